//! The pool's half of retention: whose time is over, and which lane a released block joins.
//!
//! Before: requests ask something for their blocks. After: see [`retention`](crate::retention). Without retention in use nothing happens.

use crate::block_pool::BlockPool;
use crate::free_queue::DEFAULT_LANE;
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::prefix_index::KeyState;
use crate::retention::{self, Retention, Worth};
use crate::shares::{lane, priority};

impl BlockPool {
    /// From now on blocks may be worth more or less than the default. Takes the memory for that, once.
    pub fn use_retention(&mut self) {
        if self.retention.is_none() {
            self.retention = retention::keep(self.num_blocks());
        }
    }

    /// What blocks are worth, if that is in use.
    #[must_use]
    pub fn retention(&self) -> Option<&Retention> {
        self.retention.as_deref()
    }

    /// Who writes or hits the content of `block`, number `number` of its chain, asks `asked` for it. Without retention in use nothing
    /// happens.
    pub fn ask(&mut self, block: BlockId, number: usize, asked: Worth) {
        if let Some(retention) = &mut self.retention
            && block != BlockId::NULL
        {
            retention.ask(block, number, asked);
        }
    }

    /// Tells the time, from which releases count.
    pub fn tell_time(&mut self, now_us: u64) {
        if let Some(retention) = &mut self.retention {
            retention.tell_time(now_us);
        }
    }

    /// Free blocks whose time is over at `now_us` join the tail of the default lane, in the order in which their times ended.
    pub fn expire(&mut self, now_us: u64) {
        let Some(retention) = &mut self.retention else { return };
        retention.begin_expiry(now_us);
        while let Some((block, due_us)) = retention.next_over() {
            if self.queue.is_out(block) {
                retention.wait(block, due_us);
            } else if self.queue.lane(block).is_some() && !mutant::is_on(Mutant::NothingExpires) {
                retention.fall(block);
                let lane = lane(self.shares.as_deref(), block, DEFAULT_LANE);
                self.queue.move_to_lane(block, lane).expect("a block in a lane is free");
            }
        }
    }

    /// `block` is worth the default if nobody holds it: its content is about to be forgotten.
    pub(super) fn level(&mut self, block: BlockId) {
        let Some(retention) = &mut self.retention else { return };
        if self.queue.holders(block) > 0 || mutant::is_on(Mutant::ForgottenKeepsWorth) {
            return;
        }
        retention.forget(block);
        if self.index.state(block) == KeyState::Published
            && self.queue.lane(block).is_some_and(|lane| priority(lane) > DEFAULT_LANE)
        {
            let lane = lane(self.shares.as_deref(), block, DEFAULT_LANE);
            self.queue.move_to_lane(block, lane).expect("a named block in a lane is free");
        }
    }
}
