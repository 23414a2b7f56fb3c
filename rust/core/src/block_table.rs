//! Where one sequence's rows live: logical block number to physical block id.
//!
//! A table owns the blocks it names, one holder each. It can be moved but not copied, and gives its blocks back as one list, through
//! [`BlockPool::release`](crate::block_pool::BlockPool::release). Only the pool adds blocks to it. In a group with a window the entries
//! that no query can see any more are null; they stand before all others.

use crate::block_size::BlockSize;
use crate::ids::BlockId;

/// The blocks of one sequence, in the order of its tokens.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    pub(crate) blocks: Vec<BlockId>,
}

impl BlockTable {
    /// A table that names nothing.
    #[must_use]
    pub const fn new() -> Self {
        BlockTable { blocks: Vec::new() }
    }

    /// How many blocks it names.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether it names nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The blocks, in the order of the tokens.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Row of KV memory of the token at `position`.
    #[must_use]
    pub fn slot(&self, position: usize, size: BlockSize) -> i64 {
        let number = size.full_blocks(position);
        let (block, offset) = (self.blocks[number], position - number * size.tokens());
        i64::from(block.get()) * size.tokens() as i64 + offset as i64
    }

    /// How many of its entries name no block: those before the first that does. None behind it is null.
    #[must_use]
    pub fn num_null(&self) -> usize {
        self.blocks.partition_point(|&block| block == BlockId::NULL)
    }

    /// The entries before `end` name nothing any more; calls `left` with those that did, in order, and returns the first of them.
    /// Looks at these and at the entry before them only, so that a step in which none leaves costs one read.
    pub(crate) fn forget_before(&mut self, end: usize, mut left: impl FnMut(BlockId)) -> usize {
        let mut first = end.min(self.blocks.len());
        let end = first;
        while first > 0 && self.blocks[first - 1] != BlockId::NULL {
            first -= 1;
        }
        self.blocks[first..end].iter_mut().for_each(|block| left(std::mem::replace(block, BlockId::NULL)));
        first
    }

    /// Makes room for `blocks` blocks in all, so that growing to there allocates nothing.
    pub(crate) fn reserve(&mut self, blocks: usize) {
        self.blocks.reserve_exact(blocks.saturating_sub(self.blocks.len()));
    }

    /// Cuts the table after `len` blocks; the rest becomes a table of its own.
    #[must_use]
    pub(crate) fn split_off(&mut self, len: usize) -> BlockTable {
        BlockTable { blocks: self.blocks.split_off(len) }
    }
}
