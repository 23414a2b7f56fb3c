//! The pool's half of shares: whose content blocks hold, and whose goes first.
//!
//! Before: tenants have shares of the pool. After: see [`shares`](crate::shares). Without shares nothing happens.

use crate::block_pool::BlockPool;
use crate::error::{Error, Result};
use crate::free_queue::FreeQueue;
use crate::ids::BlockId;
use crate::prefix_index::KeyState;
use crate::shares::{DomainShare, Shares};

impl BlockPool {
    /// The same pool, all of whose blocks are free and without names, with these shares of it.
    #[must_use]
    pub fn sharing(mut self, shares: &[DomainShare]) -> Self {
        if !shares.is_empty() {
            let shares = Shares::new(self.num_blocks(), shares);
            self.queue = FreeQueue::with_owners(self.num_blocks(), shares.owners());
            self.keep_ledger().shares = Some(shares);
        }
        self
    }

    /// Whose content blocks hold, if somebody has a share.
    pub(crate) fn shares(&self) -> Option<&Shares> {
        self.ledger.as_ref()?.shares.as_ref()
    }

    /// Says whose content `block` is about to get a name for; 0: nobody's who has a share.
    pub fn set_owner(&mut self, block: BlockId, owner: u8) {
        if let Some(ledger) = &mut self.ledger
            && let Some(shares) = &mut ledger.shares
            && self.index.state(block) == KeyState::Unnamed
            && self.queue.holders(block) > 0
        {
            shares.set_owner(block, owner);
        }
    }

    /// The same as the queue's take, but that content goes first whose owner has most above its share.
    pub(super) fn take_by_share(&mut self, out: &mut [BlockId]) -> Result<()> {
        let needed = out.len() as u32;
        self.queue.reserve(u64::from(needed)).map_err(|free| Error::OutOfBlocks { needed, free })?;
        let (mut taken, mut empty) = (0, 0);
        while taken < out.len() {
            let rest = &mut out[taken..];
            let mut count = self.queue.take_empty(rest);
            if count == 0 {
                let shares = self.shares().expect("it is asked for with shares only");
                let (owner, most) = shares.most_above(empty).expect("the permits say that there are blocks");
                let most = most.min(rest.len());
                count = self.queue.take_of(owner, &mut rest[..most]);
                empty |= u64::from(count == 0) << owner;
                self.evict(&out[taken..taken + count]);
            }
            taken += count;
        }
        Ok(())
    }
}
