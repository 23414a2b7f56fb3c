//! Who holds a block, and whether its content has a name: one state word a block, changed by compared exchanges.
//!
//! Before: a block was taken. After: the last holder's drop makes it the dropper's, to queue. A count never falls below zero.

use crate::error::{Error, Result};
use crate::free_queue::lanes::HITS;
use crate::free_queue::node::{MAX_HOLDERS, NAME, Place, State, low};
use crate::free_queue::{DEFAULT_LANE, FreeQueue, Freed};
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::sync::Ordering;

/// Blocks whose words are read before the first of them is changed.
const AHEAD: usize = 64;

impl FreeQueue {
    /// A hit: one holder more for a block whose content has a name. A free one leaves the queue.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id of another pool; [`Error::NotHeld`] if the block has no name, or is between its last holder and
    /// the queue, or takes under way have reserved all that is free: a miss.
    pub fn share(&self, block: BlockId) -> Result<()> {
        self.check(block)?;
        if self.share_all(&[block]) == 1 { Ok(()) } else { Err(Error::NotHeld { block }) }
    }

    /// Hits of a chain, one after the other, until one of its blocks misses; returns how many were hit. Blocks that stand as a release
    /// of the chain queued them, each right before the one that it follows, leave their lane up to 16 at a time.
    #[must_use]
    #[inline(never)]
    pub fn share_all(&self, blocks: &[BlockId]) -> usize {
        let (mut hit, mut permits) = (0, 0);
        while let Some(&block) = blocks.get(hit) {
            if self.check(block).is_err() {
                break;
            }
            let word = self.nodes.state(block.get()).load(Ordering::Acquire);
            match State::of(word) {
                State { place: Place::Held(_), named: true } => match self.count_up(block, word) {
                    Some(Ok(())) => hit += 1,
                    Some(Err(_)) => break,
                    None => {}
                },
                State { place: Place::Lane(_), named: true } => {
                    let rest = &blocks[hit..];
                    if permits == 0 {
                        permits = self.reserve_some(rest.len().min(HITS));
                    }
                    if permits == 0 {
                        break;
                    }
                    let removed = self.lanes.remove(&self.nodes, &rest[..rest.len().min(permits)]);
                    permits -= removed;
                    hit += removed;
                }
                _ => break,
            }
        }
        if permits > 0 {
            self.add_permits(permits as u32);
        }
        hit
    }

    /// Whether a hit of `block` would find it: its content has a name, and it is in a lane or has room for a holder more.
    pub(crate) fn is_hittable(&self, block: BlockId) -> bool {
        let State { place, named } = self.state(block);
        named && matches!(place, Place::Lane(_) | Place::Held(..MAX_HOLDERS))
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

    /// The same for many blocks, null blocks passed over.
    ///
    /// # Errors
    /// As [`FreeQueue::hold`], for any of them. Nothing changes then.
    pub fn hold_all(&self, blocks: &[BlockId]) -> Result<()> {
        let is_block = |block: &&BlockId| **block != BlockId::NULL;
        let mut held = 0;
        let outcome = blocks.chunks(AHEAD).try_for_each(|some| {
            // Plain reads fetch the words side by side; exchanges fetch them one after the other.
            for &block in some.iter().filter(is_block) {
                self.check(block)?;
                if self.holders(block) == 0 {
                    return Err(Error::NotHeld { block });
                }
            }
            some.iter().try_for_each(|block| {
                if is_block(&block) {
                    self.hold(*block)?;
                }
                held += 1;
                Ok(())
            })
        });
        if outcome.is_err() {
            self.release(&blocks[..held], |_| DEFAULT_LANE)?;
        }
        outcome
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
    pub fn drop_holders(&self, blocks: &[BlockId], lane: impl Fn(BlockId) -> u16) -> Result<Freed> {
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
    fn drop_holder(&self, block: BlockId, lane: impl Fn(BlockId) -> u16) -> Option<State> {
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
