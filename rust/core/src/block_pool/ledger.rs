//! What a pool writes down of its blocks' contents beside their names: their tokens, what they are worth, and whose they are.
//!
//! Before: parts of blocks may be reused, somebody asked for retention, or tenants have shares. After: each keeps its own books. A pool that
//! needs none of them has no ledger, and whoever handles its blocks looks for one and no more: so what is not used costs nothing.

use crate::block_pool::BlockPool;
use crate::block_size::BlockSize;
use crate::error::Result;
use crate::free_queue::{DEFAULT_LANE, Freed};
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::partial_index::PartialIndex;
use crate::prefix_index::{KeyState, PrefixIndex};
use crate::retention::Kept;
use crate::shares::{self, Shares};

/// The books of a pool, each if it is kept.
#[derive(Default)]
pub(crate) struct Ledger {
    /// What blocks hold.
    pub partial: Option<PartialIndex>,
    /// What blocks are worth.
    pub retention: Option<Kept>,
    /// Whose content blocks hold.
    pub shares: Option<Shares>,
}

impl Ledger {
    /// That of a pool in which all is as at the start: what blocks hold is written down again, if it was.
    pub fn renewed(&self, num_blocks: u32) -> Option<Box<Ledger>> {
        let size = self.partial.as_ref()?.block_size();
        Some(Box::new(Ledger { partial: Some(PartialIndex::new(num_blocks, size)), ..Ledger::default() }))
    }

    /// From now on what blocks hold is written down.
    pub fn remember(&mut self, num_blocks: u32, size: BlockSize) {
        self.partial = Some(PartialIndex::new(num_blocks, size));
    }

    /// The lane of `block`, whose content is worth `priority`.
    pub fn lane(&self, block: BlockId, priority: u16) -> u16 {
        shares::lane(self.shares.as_ref(), block, priority)
    }

    /// The lane that `block` joins when its last holder goes.
    fn lane_of(&self, block: BlockId) -> u16 {
        let worth = self.retention.as_ref().map_or(DEFAULT_LANE, |kept| kept.worth(block).priority.into());
        self.lane(block, worth)
    }

    /// The content of `block` was published.
    #[cold]
    #[inline(never)]
    pub fn published(&mut self, block: BlockId, index: &PrefixIndex) {
        if let Some(shares) = &mut self.shares {
            shares.published(block);
        }
        if let Some(partial) = &mut self.partial
            && index.key(block).and_then(|key| index.lookup(&key)) == Some((block, KeyState::Published))
        {
            partial.insert(block, index);
        }
    }

    /// Takes the name of a block's content away, as [`PrefixIndex::forget`]. Another block may stand for its key from now on; nobody has
    /// asked anything yet for what `block` will hold.
    #[cold]
    #[inline(never)]
    pub fn forget(&mut self, index: &mut PrefixIndex, block: BlockId) -> bool {
        if let Some(shares) = &mut self.shares
            && index.state(block) == KeyState::Published
        {
            shares.forgotten(block);
        }
        if let Some(retention) = &mut self.retention {
            retention.begin(block);
        }
        let Some(partial) = &mut self.partial else { return index.forget(block) };
        let stood_for = index.key(block).filter(|key| index.lookup(key) == Some((block, KeyState::Published)));
        let was_published = index.forget(block);
        if let Some(key) = stood_for
            && !mutant::is_on(Mutant::PartialKeepsForgotten)
        {
            match index.lookup(&key) {
                Some((next, KeyState::Published)) => partial.replace(block, next),
                _ => partial.remove(block, index),
            }
        }
        was_published
    }
}

impl BlockPool {
    /// Drops one holder for each entry of `blocks`, as [`FreeQueue::drop_holders`](crate::free_queue::FreeQueue::drop_holders), in a pool with
    /// a ledger: each block goes to the lane of its worth and its owner, and its time begins.
    #[cold]
    #[inline(never)]
    pub(super) fn drop_in_ledger(&mut self, blocks: &[BlockId]) -> Result<Freed> {
        let ledger = self.ledger.as_mut().expect("a ledger");
        let freed = self.queue.drop_holders(blocks, |block| ledger.lane_of(block))?;
        if let Some(retention) = &mut ledger.retention {
            self.queue.freed_ids(&freed).for_each(|block| retention.released(block, self.now_us));
        }
        Ok(freed)
    }
}
