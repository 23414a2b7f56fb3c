//! The pool's half of retention: whose time is over, and which lane a released block joins.
//!
//! Before: requests ask something for their blocks. After: see [`retention`](crate::retention). Without retention in use nothing happens.

use crate::block_pool::BlockPool;
use crate::free_queue::DEFAULT_LANE;
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::prefix_index::KeyState;
use crate::retention::{self, Retention, Worth};
use crate::shares::priority;

impl BlockPool {
    /// From now on blocks may be worth more or less than the default. Takes the memory for that, once.
    pub fn use_retention(&mut self) {
        if self.retention().is_none() {
            self.keep_ledger().retention = retention::keep(&self.index);
        }
    }

    /// What blocks are worth, if that is in use.
    #[must_use]
    pub fn retention(&self) -> Option<&Retention> {
        self.ledger.as_ref()?.retention.as_deref()
    }

    fn retention_mut(&mut self) -> Option<&mut Retention> {
        self.ledger.as_mut()?.retention.as_deref_mut()
    }

    /// Who writes or hits the content of `block`, number `number` of its chain, asks `asked` for it. Without retention in use nothing
    /// happens.
    pub fn ask(&mut self, block: BlockId, number: usize, asked: Worth) {
        if let Some(retention) = self.retention_mut()
            && block != BlockId::NULL
        {
            retention.ask(block, number, asked);
        }
    }

    /// `chain`, the head of a chain in which several may have written, has a holder who asks `asked` for the block of each number, if
    /// anything; `behind` is a block that was found behind it. Without retention in use nothing happens.
    pub fn ask_chain(&mut self, chain: &[BlockId], behind: Option<BlockId>, asked: impl Fn(usize) -> Option<Worth>) {
        if let Some(retention) = self.retention_mut() {
            retention.ask_chain(chain, behind, asked);
        }
    }

    /// Tells the time, from which releases count. It never goes back.
    pub fn tell_time(&mut self, now_us: u64) {
        self.now_us = self.now_us.max(now_us);
    }

    /// Tells the time; free blocks whose time is over then join the tail of the default lane, in the order in which their times ended.
    pub fn expire(&mut self, now_us: u64) {
        self.tell_time(now_us);
        let Some(ledger) = &mut self.ledger else { return };
        let Some(retention) = &mut ledger.retention else { return };
        retention.begin_expiry();
        while let Some((block, due_us)) = retention.next_over(self.now_us) {
            if self.queue.is_out(block) {
                retention.wait(block, due_us);
            } else if self.queue.lane(block).is_some() && !mutant::is_on(Mutant::NothingExpires) {
                retention.fall(block);
                let lane = crate::shares::lane(ledger.shares.as_ref(), block, DEFAULT_LANE);
                self.queue.move_to_lane(block, lane).expect("a block in a lane is free");
            }
        }
    }

    /// The content of `block` is about to be forgotten: if nobody holds it and it was worth more than the default, it joins that lane.
    pub(super) fn level(&mut self, block: BlockId) {
        let Some(ledger) = self.ledger.as_ref().filter(|ledger| ledger.retention.is_some()) else { return };
        if self.index.state(block) == KeyState::Published
            && self.queue.lane(block).is_some_and(|lane| priority(lane) > DEFAULT_LANE)
            && !mutant::is_on(Mutant::ForgottenKeepsWorth)
        {
            let lane = ledger.lane(block, DEFAULT_LANE);
            self.queue.move_to_lane(block, lane).expect("a named block in a lane is free");
        }
    }
}
