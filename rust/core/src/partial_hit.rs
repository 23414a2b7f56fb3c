//! The rows that a prompt shares with the first block in which it differs from what is cached, and proof that what is cached is what
//! was asked for.
//!
//! Before: an admission found its full blocks. After: a published block behind the same parent, with the same fields, whose first rows hold
//! the next tokens of the prompt, is the source of a copy into the request's own next block. It is leased until the step has
//! ended, and then stands in the free queue as if it had been hit and released. Its key is made anew from our parent, our fields
//! and its tokens, so a hash that collides brings a miss and never a foreign row. With one group that sees everything only.

use crate::block_pool::Release;
use crate::block_table::BlockTable;
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::partial_index::least_rows;
use crate::prefix_index::KeyState;
use crate::scheduler::Scheduler;

/// What can be copied for an admission.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartialHit {
    pub source: BlockId,
    pub rows: usize,
}

impl Scheduler {
    /// The longest head of the next block that some published block holds, behind `hits` full blocks.
    pub(crate) fn find_partial(&mut self, seat: usize, hits: usize) -> Option<PartialHit> {
        let partial = self.pool.partial()?;
        let (size, least) = (self.block_size.tokens(), least_rows(self.block_size));
        let request = self.seats[seat].as_ref().expect("a seat in use");
        let end = ((hits + 1) * size).min(request.num_tokens() - 1);
        let wanted = request.tokens().get(hits * size..end).filter(|wanted| wanted.len() >= least)?;
        let parent = hits.checked_sub(1).map(|before| request.keys[before]);
        let mark = self.hasher.head_key(&request.chain, hits, parent.as_ref(), &wanted[..least]).ok()?.short();
        let mark = if mutant::is_on(Mutant::PartialOfAnybody) { u64::from(wanted[0]) } else { mark };
        let (source, rows) = partial.find(mark, wanted).filter(|(_, rows)| *rows >= least)?;
        let key = self.hasher.block_key(&request.chain, hits, parent.as_ref(), partial.tokens(source)).ok()?;
        let is_ours = self.pool.index().key(source) == Some(key) || mutant::is_on(Mutant::PartialOfAnybody);
        let is_published = self.pool.index().state(source) == KeyState::Published;
        let rows = rows + usize::from(mutant::is_on(Mutant::PartialRowTooMany) && rows < wanted.len());
        (is_ours && is_published).then_some(PartialHit { source, rows })
    }

    /// What stands for the head of block `at` of a request, in the hash that finds it again.
    pub(crate) fn remember_block(&mut self, seat: usize, at: usize) {
        if self.pool.partial().is_none() {
            return;
        }
        let (size, least) = (self.block_size.tokens(), least_rows(self.block_size));
        let request = self.seats[seat].as_ref().expect("a seat in use");
        let Some(tokens) = request.tokens().get(at * size..(at + 1) * size) else { return };
        let parent = at.checked_sub(1).map(|before| request.keys[before]);
        let Ok(mark) = self.hasher.head_key(&request.chain, at, parent.as_ref(), &tokens[..least]) else { return };
        let mark = if mutant::is_on(Mutant::PartialOfAnybody) { u64::from(tokens[0]) } else { mark.short() };
        self.pool.remember(request.table.blocks()[at], request.keys[at], mark, tokens);
    }

    /// The source of a partial hit cannot be handed out until the step has ended.
    pub(crate) fn lease_source(&mut self, hit: PartialHit) {
        if mutant::is_on(Mutant::PartialWithoutLease) {
            return;
        }
        let mut table = BlockTable::new();
        self.pool.share(&mut table, hit.source).expect("found in this very call");
        let step = self.steps + 1;
        self.flight.orphan(&[hit.source], step);
        self.pool.release(table, Release::Until(step));
    }

    /// Tells the plan to copy a partial hit into the first block behind the full ones.
    pub(crate) fn copy_partial(&mut self, seat: usize, hits: usize, hit: PartialHit) {
        let target = self.request(seat).table.blocks()[hits];
        self.draft.copies.push([0, hit.source.get() as i32, target.get() as i32, hit.rows as i32]);
        self.copied = true;
        self.partial_rows = hit.rows;
    }

    /// The first block of the hit that was just found whose content is not what its key says.
    pub(crate) fn first_forged(&self, seat: usize) -> Option<usize> {
        let partial = self.pool.partial().filter(|_| !mutant::is_on(Mutant::TokensNotCompared))?;
        let (request, size) = (self.request(seat), self.block_size.tokens());
        let is_forged = |&at: &usize| {
            let block = self.hit.table(0)[at];
            block != BlockId::NULL && partial.tokens(block) != &request.tokens()[at * size..(at + 1) * size]
        };
        (0..self.hit.len()).find(is_forged)
    }
}
