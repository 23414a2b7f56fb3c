//! What may be refused inside an operation of several steps, asked before the first of them changes anything.
//!
//! Before: an admission, a growth, a fork or a truncation knows all that it will do. After: if every question was answered, no step
//! behind it can fail, so there is nothing to take back: evicted content could not be, nor could a hit's place in the queue. The
//! scheduler owns its pool alone, so an answer holds until the next change. With feature `mutants` a test has any of the questions refused.

use crate::block_pool::BlockPool;
use crate::error::{Error, Result};
use crate::free_queue::MAX_HOLDERS;
use crate::ids::BlockId;
use crate::prefix_index::KeyState;
use crate::scheduler::Scheduler;

impl BlockPool {
    /// Whether `count` blocks can be taken.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`].
    pub(crate) fn may_take(&self, count: u32) -> Result<()> {
        let free = self.num_free();
        if count > free || is_injected() {
            return Err(Error::OutOfBlocks { needed: count, free });
        }
        Ok(())
    }

    /// Whether `block` can be hit.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`]; [`Error::NotHeld`] if its content has no name, or it has as many holders as can be counted.
    pub(crate) fn may_share(&self, block: BlockId) -> Result<()> {
        self.block(block.get())?;
        let is_named = self.index().state(block) != KeyState::Unnamed;
        if !is_named || self.holders(block) == MAX_HOLDERS || is_injected() {
            return Err(Error::NotHeld { block });
        }
        Ok(())
    }

    /// Whether `block` is held and can have one holder more.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`]; [`Error::NotHeld`].
    pub(crate) fn may_hold(&self, block: BlockId) -> Result<()> {
        self.block(block.get())?;
        if !(1..MAX_HOLDERS).contains(&self.holders(block)) || is_injected() {
            return Err(Error::NotHeld { block });
        }
        Ok(())
    }

    /// Whether a holder of `block` can give it back.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`]; [`Error::NotHeld`].
    pub(crate) fn may_release(&self, block: BlockId) -> Result<()> {
        self.block(block.get())?;
        if self.holders(block) == 0 || is_injected() {
            return Err(Error::NotHeld { block });
        }
        Ok(())
    }

    /// Whether the rows of `block` can be copied: nobody is writing them.
    ///
    /// # Errors
    /// [`Error::BeingWritten`].
    pub(crate) fn may_copy(&self, block: BlockId) -> Result<()> {
        if self.index().state(block) == KeyState::Pending || is_injected() {
            return Err(Error::BeingWritten { block });
        }
        Ok(())
    }
}

impl Scheduler {
    /// Whether there is a row for one more running request.
    ///
    /// # Errors
    /// [`Error::NoFreeRow`].
    pub(crate) fn may_have_row(&self) -> Result<()> {
        if self.free_rows.is_empty() || is_injected() {
            return Err(Error::NoFreeRow { rows: self.config.rows() });
        }
        Ok(())
    }
}

#[cfg(feature = "mutants")]
thread_local! {
    /// Questions until the one that is refused; 0 if none is.
    static LEFT: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// Has the `nth` question from now on, counted from 1, refused in this thread, once; 0 takes that back. Returns the questions that
/// were still to come before the last choice would have been met, 0 if it was.
#[cfg(feature = "mutants")]
pub fn refuse(nth: u32) -> u32 {
    LEFT.with(|left| left.replace(nth))
}

#[cfg(feature = "mutants")]
fn is_injected() -> bool {
    LEFT.with(|left| {
        let before = left.get();
        left.set(before.saturating_sub(1));
        before == 1
    })
}

#[cfg(not(feature = "mutants"))]
#[inline(always)]
const fn is_injected() -> bool {
    false
}
