//! Who holds a block, and whether its content has a name: one state word a block, changed by compared exchanges.
//!
//! Before: a block was taken. After: the last holder's drop makes it the dropper's, to queue. A count never falls below zero.

use crate::error::{Error, Result};
use crate::free_queue::node::{MAX_HOLDERS, NAME, Place, State, low};
use crate::free_queue::{FreeQueue, Freed};
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::sync::Ordering;

impl FreeQueue {
    /// A hit: one holder more for a block whose content has a name. A free one leaves the queue.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id of another pool; [`Error::NotHeld`] if the block has no name, or is between its last holder and
    /// the queue, or takes under way have reserved all that is free: a miss.
    pub fn share(&self, block: BlockId) -> Result<()> {
        self.check(block)?;
        let mut has_permit = false;
        let outcome = loop {
            let word = self.nodes.state(block.get()).load(Ordering::Acquire);
            match State::of(word) {
                State { place: Place::Held(_), named: true } => {
                    if let Some(outcome) = self.count_up(block, word) {
                        break outcome;
                    }
                }
                State { place: Place::Lane(_), named: true } => {
                    has_permit = has_permit || self.reserve(1).is_ok();
                    if !has_permit {
                        break Err(Error::NotHeld { block });
                    }
                    if self.lanes.remove(&self.nodes, block.get()) {
                        return Ok(());
                    }
                }
                _ => break Err(Error::NotHeld { block }),
            }
        };
        if has_permit {
            self.add_permits(1);
        }
        outcome
    }

    /// One holder more for a block that the caller holds, named or not.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id of another pool; [`Error::NotHeld`] if nobody holds it.
    pub fn hold(&self, block: BlockId) -> Result<()> {
        self.check(block)?;
        loop {
            // Relaxed: the caller's own holder has seen the block's content.
            let word = self.nodes.state(block.get()).load(Ordering::Relaxed);
            let Place::Held(_) = State::of(word).place else { return Err(Error::NotHeld { block }) };
            if let Some(outcome) = self.count_up(block, word) {
                return outcome;
            }
        }
    }

    /// None if the word has changed.
    fn count_up(&self, block: BlockId, word: u64) -> Option<Result<()>> {
        let State { place: Place::Held(holders), .. } = State::of(word) else { return None };
        if holders == MAX_HOLDERS {
            return Some(Err(Error::NotHeld { block }));
        }
        let cell = self.nodes.state(block.get());
        if mutant::is_on(Mutant::CountWithoutCompare) {
            cell.store(word + 1, Ordering::Release);
            return Some(Ok(()));
        }
        // Acquire: what made the content nameable. Nothing is handed on.
        cell.compare_exchange(word, word + 1, Ordering::Acquire, Ordering::Relaxed).is_ok().then_some(Ok(()))
    }

    /// The content of a block that the caller holds has a name from now on: it can be hit, and is queued behind the tail.
    ///
    /// # Errors
    /// [`Error::NotHeld`] if nobody holds it, [`Error::NoSuchBlock`] for an id of another pool.
    pub fn name(&self, block: BlockId) -> Result<()> {
        self.check(block)?;
        let cell = self.nodes.state(block.get());
        // Relaxed: the caller's holder keeps the block where it is.
        let mut word = cell.load(Ordering::Relaxed);
        loop {
            let State { place: place @ Place::Held(_), .. } = State::of(word) else {
                return Err(Error::NotHeld { block });
            };
            let named = State { place, named: true }.in_word(word);
            // Release: the content comes before its name.
            match cell.compare_exchange(word, named, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(found) => word = found,
            }
        }
    }

    /// The content of `block` has no name any more. It stays where it is.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id of another pool.
    pub fn unname(&self, block: BlockId) -> Result<()> {
        self.check(block)?;
        let cell = self.nodes.state(block.get());
        if mutant::is_on(Mutant::UnnameWithoutCompare) {
            cell.store(cell.load(Ordering::Relaxed) & !NAME, Ordering::Relaxed);
            return Ok(());
        }
        // Relaxed: nothing is handed on.
        cell.fetch_and(!NAME, Ordering::Relaxed);
        Ok(())
    }

    /// The first half of a release: the blocks that lost their last holder are the caller's to queue.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id of another pool; [`Error::NotHeld`] if an entry has no holder left. Nothing changes then. (If
    /// that happens while other threads release the same blocks, an entry that they freed meanwhile stays released.)
    pub fn drop_holders(&self, blocks: &[BlockId], lane: impl Fn(BlockId) -> u8) -> Result<Freed> {
        blocks.iter().try_for_each(|&block| self.check(block))?;
        let mut freed = Freed::default();
        for dropped in 0..blocks.len() {
            let at = if mutant::is_on(Mutant::ForwardOrder) { dropped } else { blocks.len() - 1 - dropped };
            let block = blocks[at];
            if block == BlockId::NULL {
                continue;
            }
            match self.drop_holder(block, &lane) {
                Some(State { place: Place::Out(_), named }) => self.append(&mut freed, block.get(), named),
                Some(_) => {}
                None => {
                    self.undo(&blocks[at + 1..], freed);
                    return Err(Error::NotHeld { block });
                }
            }
        }
        Ok(freed)
    }

    /// The state after the drop; None, and nothing changes, if nobody holds the block.
    fn drop_holder(&self, block: BlockId, lane: impl Fn(BlockId) -> u8) -> Option<State> {
        let cell = self.nodes.state(block.get());
        // Relaxed: the exchange below decides.
        let mut word = cell.load(Ordering::Relaxed);
        loop {
            let State { place: Place::Held(holders), named } = State::of(word) else { return None };
            let place = match holders {
                1 => Place::Out(if named { lane(block) } else { 0 }),
                more => Place::Held(more - 1),
            };
            let left = State { place, named };
            if mutant::is_on(Mutant::DropWithoutCompare) {
                cell.store(left.in_word(word), Ordering::Release);
                return Some(left);
            }
            // Release: what this holder did with the block comes before. Acquire: so does what the others did, for the next owner.
            match cell.compare_exchange(word, left.in_word(word), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(left),
                Err(found) => word = found,
            }
        }
    }

    /// Gives the dropped entries `done` their holders back, the last one that was dropped first.
    fn undo(&self, done: &[BlockId], mut freed: Freed) {
        for &block in done.iter().filter(|&&block| block != BlockId::NULL) {
            if freed.len > 0 && freed.last == block.get() {
                let named = self.state(block).named;
                self.nodes.set_state(block.get(), State { place: Place::Held(1), named });
                freed.len -= 1;
                let mut last = freed.first;
                (1..freed.len).for_each(|_| last = low(self.nodes.next(last).load(Ordering::Relaxed)));
                freed.last = last;
            } else {
                let _ = self.hold(block);
            }
        }
    }
}
