//! What may be refused inside an operation of several steps, asked before the first of them changes anything.
//!
//! Before: an admission, a growth or a truncation knows all that it will do. After: if every question was answered, no step
//! behind it can fail, so there is nothing to take back: evicted content could not be, nor could a hit's place in the queue. The
//! scheduler owns its pool alone, so an answer holds until the next change. [`Granted`] stands for the answers of one operation.
//!
//! With feature `mutants` a test has any of the questions refused, and a scheduler's pool takes, shares and copies nothing that
//! was not granted just before: it panics instead.

use crate::block_pool::BlockPool;
use crate::error::{Error, Result};
use crate::free_queue::MAX_HOLDERS;
use crate::ids::BlockId;
#[cfg(feature = "mutants")]
use crate::mutant::{self, Mutant};
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
        ledger::grant_blocks(count);
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
        ledger::grant(Act::Share, block);
        Ok(())
    }

    /// Whether a fork may begin; its holders are all added or none.
    ///
    /// # Errors
    /// [`Error::NotHeld`], where a test wants it.
    pub(crate) fn may_fork(&self) -> Result<()> {
        if is_injected() { Err(Error::NotHeld { block: BlockId::NULL }) } else { Ok(()) }
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
        ledger::grant(Act::Copy, block);
        Ok(())
    }

    /// `count` free blocks are about to leave the queue.
    #[inline]
    pub(crate) fn must_be_granted_blocks(&self, count: u32) {
        if self.is_asked_first() {
            ledger::use_blocks(count);
        }
    }

    /// `act` is about to be done to `block`.
    #[inline]
    pub(crate) fn must_be_granted(&self, act: Act, block: BlockId) {
        if self.is_asked_first() {
            ledger::use_one(act, block);
        }
    }
}

/// What may be done to one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// It is hit.
    Share,
    /// It is copied from.
    Copy,
}

/// The answers of one operation, from its first question to its last act: no longer, so that none is left for the next one.
#[must_use]
pub(crate) struct Granted(());

impl Granted {
    /// The questions begin.
    pub fn begin() -> Self {
        ledger::clear();
        Granted(())
    }

    /// So many blocks are free, and nobody else is owed them.
    pub fn take(&self, count: u32) {
        ledger::grant_blocks(count);
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        ledger::clear();
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

/// What was granted in this thread and not used yet. Only a build with faults keeps it, and only while none but those that it is
/// there for is planted.
#[cfg(feature = "mutants")]
mod ledger {
    use std::cell::RefCell;

    use super::{Act, BlockId, Mutant, mutant};

    #[derive(Default)]
    struct Ledger {
        blocks: u32,
        acts: Vec<(Act, BlockId)>,
    }

    thread_local! {
        static LEDGER: RefCell<Ledger> = RefCell::default();
    }

    const FAULTS: [Mutant; 2] = [Mutant::AskForgetsBlock, Mutant::AskForgetsHit];

    pub fn clear() {
        LEDGER.with_borrow_mut(|ledger| {
            ledger.blocks = 0;
            ledger.acts.clear();
        });
    }

    pub fn grant_blocks(count: u32) {
        LEDGER.with_borrow_mut(|ledger| ledger.blocks = count);
    }

    pub fn grant(act: Act, block: BlockId) {
        LEDGER.with_borrow_mut(|ledger| ledger.acts.push((act, block)));
    }

    pub fn use_blocks(count: u32) {
        if mutant::is_any_but(&FAULTS) {
            return;
        }
        LEDGER.with_borrow_mut(|ledger| {
            assert!(count <= ledger.blocks, "{count} blocks leave the queue, {} were asked for", ledger.blocks);
            ledger.blocks -= count;
        });
    }

    pub fn use_one(act: Act, block: BlockId) {
        if mutant::is_any_but(&FAULTS) {
            return;
        }
        LEDGER.with_borrow_mut(|ledger| {
            let found = ledger.acts.iter().position(|granted| *granted == (act, block));
            ledger.acts.swap_remove(found.unwrap_or_else(|| panic!("nobody asked to {act:?} {block:?}")));
        });
    }
}

/// See above: nothing is kept.
#[cfg(not(feature = "mutants"))]
mod ledger {
    use super::{Act, BlockId};

    #[inline(always)]
    pub const fn clear() {}

    #[inline(always)]
    pub const fn grant_blocks(_count: u32) {}

    #[inline(always)]
    pub const fn grant(_act: Act, _block: BlockId) {}

    #[inline(always)]
    pub const fn use_blocks(_count: u32) {}

    #[inline(always)]
    pub const fn use_one(_act: Act, _block: BlockId) {}
}
