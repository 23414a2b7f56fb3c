//! A write into a block that others share, or that can be found by its key, goes to a block of the writer's own; the rows before it are
//! copied there by the step, before its forward pass.
//!
//! Before: a fork or a truncation left a partial last block that its owner may not write. After: the plan's `copies` say what to
//! copy. The last owner writes in place. A source is leased until the step has ended. A copy counts when its step is committed.

use crate::block_pool::Release;
use crate::error::Result;
use crate::flight::Entry;
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::prefix_index::KeyState;
use crate::refusal::Granted;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// How many blocks of a running request, one a group at most, must be copied before its next row is written.
    pub(crate) fn copies_due(&mut self, seat: usize) -> u32 {
        if !self.request(seat).asks_to_write {
            return 0;
        }
        let due = self.tail(seat).filter(|&block| self.must_copy(block)).count() as u32;
        self.request_mut(seat).asks_to_write = due > 0 && !mutant::is_on(Mutant::WriteForked);
        if mutant::is_on(Mutant::WriteForked) { 0 } else { due }
    }

    /// Asks for the sources of the copies of a growth. Nothing changes. Its blocks are counted when there is room: with both, no step of
    /// it can fail.
    pub(crate) fn ask_to_grow(&self, seat: usize) -> Result<Granted> {
        let granted = Granted::begin();
        if self.request(seat).asks_to_write {
            let mut sources = self.tail(seat).filter(|&block| self.must_copy(block));
            sources.try_for_each(|block| self.pool.may_copy(block))?;
        }
        self.pool.may_take(0)?;
        Ok(granted)
    }

    /// Gives a running request blocks of its own for the rows that follow, where [`Scheduler::copies_due`] says so; the first entry of
    /// its tables that changed, if any.
    pub(crate) fn copy_tail(&mut self, seat: usize) -> Option<usize> {
        if !self.request(seat).asks_to_write {
            return None;
        }
        let (computed, step) = (self.request(seat).next(), self.steps + 1);
        let (index, offset) = (self.block_size.full_blocks(computed), self.block_size.offset(computed));
        for group in 0..self.groups.len() {
            let table = self.seats[seat].as_mut().expect("a seat in use").table_of_mut(group);
            let lease = if mutant::is_on(Mutant::CopyWithoutLease) { Release::Now } else { Release::Until(step) };
            let made = self.pool.make_writable(table, index, lease).expect("a free block was counted for it");
            let Some(copy) = made else { continue };
            if !mutant::is_on(Mutant::CopyWithoutLease) {
                self.flight.orphan(&[copy.source], step);
            }
            let rows = offset - usize::from(mutant::is_on(Mutant::CopyRowShort));
            let blocks = [copy.source.get() as i32, copy.target.get() as i32];
            self.draft.copies.push([group as i32, blocks[0], blocks[1], rows as i32]);
            self.copied = true;
        }
        self.request_mut(seat).asks_to_write = false;
        // Who shared it with this one alone has no copy to make any more.
        self.owes = true;
        Some(index)
    }

    /// With `no_evict`: what the request at `seat` was promised, and does not need, is free for others.
    pub(crate) fn give_back_surplus(&mut self, seat: usize) {
        if !self.config.queue.no_evict {
            return;
        }
        let due = self.due_to(seat);
        self.keep_promise(seat, due);
        self.recount(seat);
    }

    /// Blocks that the running request at `seat` is to be promised: its need and, with `no_evict`, those to copy its tail to and those that
    /// stand in for what it may let go before others.
    pub(crate) fn due_to(&mut self, seat: usize) -> u32 {
        let need = self.need_of(seat);
        if !self.config.queue.no_evict {
            return need;
        }
        need + self.copies_due(seat) + self.shared_and_leaving(seat)
    }

    /// The request at `seat` keeps of its promise `most` blocks.
    pub(crate) fn keep_promise(&mut self, seat: usize, most: u32) {
        let request = self.request_mut(seat);
        let rest = request.promised.saturating_sub(most);
        request.promised -= rest;
        self.promised -= rest;
    }

    /// Of `needed` blocks not all are there, even with what was promised to others: what nobody else holds loses its name and is written
    /// in place. True if that changed anything. Blocks that came behind it may be cached still, and would outlive their parent; they are
    /// among the fewer than `needed` free ones, which forget what they hold.
    pub(crate) fn unname_tail(&mut self, seat: usize, needed: u32) -> bool {
        let coming = self.pool.num_parked() + self.lookahead_in_flight();
        if !self.request(seat).asks_to_write || self.pool.num_free() + coming >= needed {
            return false;
        }
        let alone = |&block: &BlockId| self.pool.holders(block) == 1 && self.must_copy(block);
        let blocks: Vec<BlockId> = self.tail(seat).filter(alone).collect();
        for &block in &blocks {
            self.pool.withdraw(block).expect("a block of this pool");
        }
        if !blocks.is_empty() && !mutant::is_on(Mutant::OutlivesParent) {
            self.pool.forget_free();
        }
        !blocks.is_empty()
    }

    /// The step that copied rows for `entry` failed: they may not be there, and are computed anew.
    pub(crate) fn lose_copy(&mut self, entry: &Entry, partial: usize) {
        let first = entry.start().min(self.request(entry.seat()).computed());
        let kept = self.length_in_sight(entry.seat(), self.block_size.full_blocks(first));
        let rows = kept * self.block_size.tokens();
        self.go_back(entry.seat(), rows);
        let request = self.seats[entry.seat()].as_mut().expect("a seat in use");
        if partial > 0 && request.num_outputs() == 0 && request.preemptions == 0 {
            // These tokens will be computed after all.
            request.cached = Some(rows);
            self.counters.prefix_hits -= (entry.start() - rows) as u64;
        }
    }

    /// Rows without a token, of running requests that this step passes over and that may share their last block: each block once.
    pub(crate) fn count_idle_sharers(&mut self) {
        let size = self.block_size.tokens();
        let mut empty = 0;
        for (at, &seat) in self.idle_sharers.iter().enumerate() {
            let request = self.request(seat);
            let (index, partial) =
                (self.block_size.full_blocks(request.next()), self.block_size.offset(request.next()));
            empty += self.groups.len() * (request.table.len() * size - request.next());
            for (group, block) in self.tail(seat).enumerate() {
                let names = |&other: &usize| self.request(other).table_of(group).blocks().get(index) == Some(&block);
                let rows = |&other: &usize| (self.request(other).next() - index * size).min(size);
                let most = self.running.iter().filter(|other| names(other)).map(rows).max().unwrap_or(partial);
                let is_counted = self.idle_sharers[..at].iter().any(names);
                let is_full = self.pool.index().state(block) == KeyState::Published;
                empty -= if is_counted || is_full { size - partial } else { most - partial };
            }
        }
        self.counters.wasted_rows_sum += empty as u64;
    }

    /// Whether rows of the last block of a request must be copied, and a step in flight fills that block: its commit comes first.
    pub(crate) fn copy_is_written(&self, seat: usize) -> bool {
        self.request(seat).asks_to_write
            && self.tail(seat).any(|block| self.must_copy(block) && self.pool.index().state(block) == KeyState::Pending)
    }

    fn must_copy(&self, block: BlockId) -> bool {
        self.pool.holders(block) > 1 || self.pool.index().state(block) == KeyState::Published
    }

    /// The partial last block of a request in each group; none if its rows end with a block.
    pub(crate) fn tail(&self, seat: usize) -> impl Iterator<Item = BlockId> + '_ {
        let request = self.request(seat);
        let index = self.block_size.full_blocks(request.next());
        let is_partial = self.block_size.offset(request.next()) > 0;
        request.tables().take(if is_partial { usize::MAX } else { 0 }).map(move |table| table.blocks()[index])
    }
}
