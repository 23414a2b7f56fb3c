//! What an admission promises beside what it takes at once, and what it leaves for those that run.
//!
//! Before: a request is about to be admitted, or its tables changed. After: its need is known in blocks. A promise is a count: blocks are taken
//! when they are written, and until then nobody else is given them.

use crate::mutant::{self, Mutant};
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Rows for which an admission promises blocks: those of what is known, or all that there may be, with `no_evict` or if it may not be
    /// preempted any more.
    pub(crate) fn rows_to_promise(&self, seat: usize) -> usize {
        let request = self.request(seat);
        if !self.promises_whole(seat) || mutant::is_on(Mutant::PromiseOnlyKnown) {
            return request.num_tokens();
        }
        self.most_rows(request.prompt_len, &request.limits).max(request.num_tokens())
    }

    /// Blocks that the request at `seat`, which has its tables, is promised beside what these name in sight of its next row.
    pub(crate) fn need_of(&self, seat: usize) -> u32 {
        let request = self.request(seat);
        self.need_from(seat, request.computed(), request.table.len())
    }

    /// The same if its next row were `position` and its tables had `len` entries. What leaves a window counts for nobody who may not be
    /// preempted any more: others may hold it.
    pub(crate) fn need_from(&self, seat: usize, position: usize, len: usize) -> u32 {
        let request = self.request(seat);
        let rows = self.rows_to_promise(seat);
        let own = if self.groups.has_window() && self.is_secured(seat) {
            self.block_size.blocks_for(rows).saturating_sub(len) * self.groups.len()
        } else {
            self.groups.need(position, len, rows)
        };
        own as u32 + self.need_of_siblings(request.prompt_len, &request.limits, request.siblings) as u32
    }

    /// Blocks that what is known of the request at `seat` needs, with the same.
    pub(crate) fn need_for(&self, seat: usize, position: usize, len: usize) -> u32 {
        self.groups.need(position, len, self.request(seat).num_tokens()) as u32
    }

    /// Blocks that must stay free beside those of the request at `seat`, if it is admitted: for those that run, and itself, to grow.
    pub(crate) fn reserve(&self, seat: usize) -> u32 {
        if self.running.is_empty() || self.into_room == Some(seat) || mutant::is_on(Mutant::NothingReserved) {
            return 0;
        }
        let mut reserve = u64::from(self.config.queue.watermark);
        if self.config.queue.estimate_growth && !self.config.queue.no_evict {
            reserve += self.outlook.expected;
            if !self.is_secured(seat) {
                let now = self.blocks_of(self.request(seat).num_tokens());
                reserve += u64::from(self.expected_blocks(seat)).saturating_sub(now);
            }
        }
        u32::try_from(reserve).unwrap_or(u32::MAX)
    }

    /// With `no_evict`: promises again what running requests lost when they had to go back, as far as it is free.
    pub(crate) fn pay_debts(&mut self) {
        if !self.config.queue.no_evict || !std::mem::take(&mut self.owes) {
            return;
        }
        for at in 0..self.running.len() {
            let seat = self.running[at];
            self.give_back_surplus(seat);
            let missing = self.need_of(seat).saturating_sub(self.request(seat).promised);
            let is_unlimited = mutant::is_on(Mutant::DebtPaidOverQuota);
            let room = if is_unlimited { u32::MAX } else { self.room_of_tenant(&self.asks[seat]) };
            let more = missing.min(room).min(self.pool.num_free().saturating_sub(self.promised));
            self.owes |= more < missing;
            self.request_mut(seat).promised += more;
            self.promised += more;
            self.recount(seat);
        }
    }
}
