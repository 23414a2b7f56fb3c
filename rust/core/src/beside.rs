//! What requests say of their blocks in a pool that writes down more than names: whose the content is, what it is worth to them, and that
//! they copy from more.
//!
//! Before: a pool with a ledger, told from one without by one look. After: the ledger knows. None of this is reached otherwise.

use crate::block_pool::BlockPool;
use crate::block_size::BlockSize;
use crate::ids::BlockId;
use crate::partial_hit::PartialHit;
use crate::request::Request;
use crate::scheduler::Scheduler;

/// What an admission does beside holding its full blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beside {
    /// Rows of the next block that it copies.
    pub part: Option<PartialHit>,
}

impl Scheduler {
    /// The request at `seat`, which holds its full blocks, asks for them what it wants. Those from which it will copy cannot be handed out
    /// until the step has ended.
    #[cold]
    #[inline(never)]
    pub(crate) fn hold_beside(&mut self, seat: usize, beside: Beside) {
        self.ask_for_hits(seat, beside.part);
        if let Some(part) = beside.part {
            self.lease_sources(part);
        }
    }

    /// The request at `seat` asks for the blocks of the hit that it holds; a source behind them may be worth more.
    pub(crate) fn ask_for_hits(&mut self, seat: usize, part: Option<PartialHit>) {
        let (request, size) = (self.seats[seat].as_ref().expect("a seat in use"), self.block_size.tokens());
        for group in 0..self.groups.len() {
            let behind = part.and_then(|part| part.source_of(group));
            self.pool.ask_chain(self.hit.table(group), behind, |number| Some(request.worth(number * size)));
        }
    }

    /// The request at `seat` asks for all blocks that it has.
    pub(crate) fn ask_for_all(&mut self, seat: usize) {
        let (request, size) = (self.seats[seat].as_ref().expect("a seat in use"), self.block_size.tokens());
        for table in request.tables() {
            self.pool.ask_chain(table.blocks(), None, |number| Some(request.worth(number * size)));
        }
    }
}

/// `block`, number `number` of the chain of `request`, is about to get a name.
#[cold]
#[inline(never)]
pub(crate) fn enter(pool: &mut BlockPool, size: BlockSize, block: BlockId, number: usize, request: &Request) {
    pool.set_owner(block, request.chain.owner(number));
    pool.ask(block, number, request.worth(number * size.tokens()));
}
