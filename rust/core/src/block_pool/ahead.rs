//! Reads what calls are about to need of many blocks. Nothing changes, and nothing depends on it but time: one call after the other waits
//! for memory each time, these reads depend on nothing and wait together. In a large pool every block is far from every other.
//!
//! Before: the scheduler knows what a step will do. After: the words are near.

use std::hint::black_box;

use crate::block_pool::BlockPool;
use crate::ids::{BlockId, Key};

impl BlockPool {
    /// The next blocks are about to be taken, as many as `takers` has entries: each reads what else a take needs, while the way along the
    /// queue waits for memory block by block.
    pub(crate) fn read_to_take(&self, takers: impl ExactSizeIterator<Item = u32>) {
        let count = takers.len();
        let next = || self.queue.iter().take(count);
        black_box(next().zip(takers).fold(0, |seen, (block, taker)| seen ^ taker ^ self.index.glance(block)));
        black_box(next().fold(0, |seen, block| seen ^ self.index.glance_at_name(block)));
    }

    /// These blocks are about to be named.
    pub(crate) fn read_to_name<'a>(&self, names: impl Iterator<Item = (BlockId, &'a Key)> + Clone) {
        let glance = |(block, key)| self.index.glance(block) ^ self.index.glance_at(key) ^ self.queue.glance(block);
        black_box(names.clone().fold(0, |seen, name| seen ^ glance(name)));
        black_box(names.fold(0, |seen, (_, key)| seen ^ self.index.glance_behind(key)));
    }

    /// These blocks, which are pending, are about to be published.
    pub(crate) fn read_to_publish(&self, blocks: &[BlockId]) {
        black_box(blocks.iter().fold(0, |seen, &block| seen ^ self.index.glance(block)));
    }
}
