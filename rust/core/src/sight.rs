//! Gives back what no query of a running request sees any more, in the groups that have a window.
//!
//! Before: a plan begins; a step in flight sees no more than from the first row that is not confirmed. After: each table keeps only what the request's next query sees, and later ones; the
//! entries before are null and the blocks are free for anybody. What a request thereby freed is promised to it again as far as its
//! need goes, so a long prefill goes on through a window as it was admitted.

use crate::block_table::BlockTable;
use crate::mutant::{self, Mutant};
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Lets every running request leave what is behind its windows, highest rank first.
    pub(crate) fn leave_out_of_sight(&mut self) {
        if mutant::is_on(Mutant::WindowNeverFreed) {
            return;
        }
        for at in 0..self.running.len() {
            self.leave_behind(self.running[at]);
        }
    }

    /// Group by group, of each what leaves it as one list.
    fn leave_behind(&mut self, seat: usize) {
        let free = self.pool.num_free();
        let mut left = 0;
        for group in 0..self.groups.len() {
            if self.groups.specs()[group].window.is_none() {
                continue;
            }
            let request = self.seats[seat].as_mut().expect("a seat in use");
            let end = self.groups.first_kept(group, request.computed());
            let leaving = &mut self.leaving;
            leaving.clear();
            let first = request.table_of_mut(group).forget_before(end, |block| leaving.push(block));
            if leaving.is_empty() {
                continue;
            }
            let leaving = std::mem::take(leaving);
            let when = self.when_free(0, &leaving);
            self.pool.release_blocks(&leaving, when).expect("a table holds what it names");
            let end = first + leaving.len();
            if mutant::is_on(Mutant::EntryKeepsName) {
                self.request_mut(seat).table_of_mut(group).blocks[first..end].copy_from_slice(&leaving);
            }
            if !mutant::is_on(Mutant::NullNotTold) {
                self.note_entries(seat, group, first..end);
            }
            left += leaving.len() as u32;
            self.leaving = leaving;
        }
        if left > 0 {
            let freed = self.pool.num_free().saturating_sub(free);
            self.promise_again(seat, if mutant::is_on(Mutant::PromiseUnfreed) { left } else { freed });
            self.recount(seat);
        }
    }

    /// Promises a request the blocks that it just freed, if it needs them.
    fn promise_again(&mut self, seat: usize, freed: u32) {
        let due = self.due_to(seat);
        let request = self.request_mut(seat);
        let more = freed.min(due.saturating_sub(request.promised));
        request.promised += more;
        self.owes |= request.promised < due;
        self.promised += more;
    }

    /// Blocks that leave the sight of the running request at `seat` before its end and that others hold as well.
    pub(crate) fn shared_and_leaving(&self, seat: usize) -> u32 {
        let (request, rows) = (self.request(seat), self.rows_to_promise(seat));
        let in_group = |(group, table): (usize, &BlockTable)| {
            let leaving = &table.blocks()[self.groups.leaving(group, request.computed(), rows)];
            leaving.iter().filter(|&&block| self.pool.holders(block) > 1).count()
        };
        request.tables().enumerate().map(in_group).sum::<usize>() as u32
    }

    /// With `no_evict`: the same of the hit of the waiting request at `seat`, which is about to share it.
    pub(crate) fn hit_and_leaving(&self, seat: usize) -> u32 {
        if !self.config.queue.no_evict {
            return 0;
        }
        let (position, rows) = (self.hit.len() * self.block_size.tokens(), self.rows_to_promise(seat));
        let in_group = |group: usize| {
            let leaving = &self.hit.table(group)[self.groups.leaving(group, position, rows)];
            leaving.iter().filter(|&&block| !self.pool.is_free(block)).count()
        };
        (0..self.groups.len()).map(in_group).sum::<usize>() as u32
    }

    /// The longest length up to `blocks` at which the tables of a request name all that its next query sees: that, or none.
    pub(crate) fn length_in_sight(&self, seat: usize, blocks: usize) -> usize {
        if self.is_in_sight(seat, blocks * self.block_size.tokens()) { blocks } else { 0 }
    }

    /// Whether the tables of a request name all that the query at `position` sees.
    pub(crate) fn is_in_sight(&self, seat: usize, position: usize) -> bool {
        let blocks = self.block_size.blocks_for(position);
        let sees_all = |(group, table): (usize, &BlockTable)| {
            self.groups.specs()[group].first_block(position, self.block_size) >= table.num_null().min(blocks)
        };
        self.request(seat).tables().enumerate().all(sees_all) || mutant::is_on(Mutant::PutBackBlind)
    }
}
