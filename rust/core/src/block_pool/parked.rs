//! Blocks without holders that a step in flight still names: they wait, list by list, for its end (design 14).
//!
//! Before: a release whose blocks a step names. After: [`BlockPool::end_leases`] queues them in order of release. A block that was hit
//! meanwhile is left out.

use crate::block_pool::{BlockPool, NOT_PARKED};
use crate::free_queue::Freed;
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};

impl BlockPool {
    /// The step in flight has ended: parked lists enter the queue, in order of their release.
    pub fn end_leases(&mut self) {
        let mut start = 0;
        for &end in &self.parked_ends {
            for block in self.parked[start..end].iter().filter(|&&block| block != BlockId::NULL) {
                self.parked_at[block.index()] = NOT_PARKED;
            }
            self.queue.enqueue(self.queue.freed_again(&self.parked[start..end]));
            start = end;
        }
        self.parked.clear();
        self.parked_ends.clear();
        self.num_parked = 0;
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

    pub(super) fn park(&mut self, freed: &Freed) {
        if freed.is_empty() {
            return;
        }
        for block in self.queue.freed_ids(freed) {
            self.parked_at[block.index()] = self.parked.len() as u32;
            self.parked.push(block);
        }
        self.num_parked += freed.len();
        self.parked_ends.push(self.parked.len());
    }
}
