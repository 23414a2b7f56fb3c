//! Blocks without holders that steps in flight still name: they wait, list by list, for the end of the last (design 14).
//!
//! Before: a release whose blocks a step names. After: [`BlockPool::end_leases`] queues them in order of release. A block that was hit
//! meanwhile is left out.

use crate::block_pool::{BlockPool, NOT_PARKED};
use crate::free_queue::Freed;
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};

impl BlockPool {
    /// The steps up to `step` have ended: the parked lists that waited for them enter the queue, in order of their release.
    pub fn end_leases(&mut self, step: u64) {
        let (mut start, mut kept, mut kept_lists) = (0, 0, 0);
        for list in 0..self.parked_ends.len() {
            let (end, until) = self.parked_ends[list];
            if until > step && !mutant::is_on(Mutant::LeasesEndTogether) {
                for at in start..end {
                    let block = self.parked[at];
                    if block != BlockId::NULL {
                        self.parked_at[block.index()] = kept as u32;
                        self.parked[kept] = block;
                        kept += 1;
                    }
                }
                self.parked_ends[kept_lists] = (kept, until);
                kept_lists += 1;
            } else {
                for block in self.parked[start..end].iter().filter(|&&block| block != BlockId::NULL) {
                    self.parked_at[block.index()] = NOT_PARKED;
                    self.num_parked -= 1;
                }
                self.queue.enqueue(self.queue.freed_again(&self.parked[start..end]));
            }
            start = end;
        }
        self.parked.truncate(kept);
        self.parked_ends.truncate(kept_lists);
    }

    /// Whether `block` waits for the end of a step and its content has a name.
    pub(super) fn is_parked_hit(&self, block: BlockId) -> bool {
        self.parked_at[block.index()] != NOT_PARKED && self.queue.is_named(block)
    }

    /// Takes a block, hit while it was parked, out of its list: it enters the queue when that hit ends (design 14).
    pub(super) fn unpark(&mut self, block: BlockId) {
        let at = std::mem::replace(&mut self.parked_at[block.index()], NOT_PARKED);
        assert!(at != NOT_PARKED, "{block:?} can be hit");
        if !mutant::is_on(Mutant::HitStaysParked) {
            self.parked[at as usize] = BlockId::NULL;
            self.num_parked -= 1;
        }
        self.queue.hold_freed(block);
    }

    pub(super) fn park(&mut self, freed: &Freed, until: u64) {
        if freed.is_empty() {
            return;
        }
        for block in self.queue.freed_ids(freed) {
            self.parked_at[block.index()] = self.parked.len() as u32;
            self.parked.push(block);
        }
        self.num_parked += freed.len();
        self.parked_ends.push((self.parked.len(), until));
    }
}
