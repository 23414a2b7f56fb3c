//! Room for a waiting request of a higher class, at the cost of running ones of lower classes (`preempt_for_waiting`).
//!
//! Before: a plan begins, and the request that goes first does not fit. After: if those of strictly lower priority and class that are
//! not secured hold enough, the cheapest of the lowest class were preempted until it fits, and what it needs is promised to it: the step
//! admits nobody else. Who runs and ranks above it may still take that room before anybody is preempted.

use crate::mutant::{self, Mutant};
use crate::request::End;
use crate::row_arrays::RowArrays;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Preempts for the request that goes first, if that helps it.
    pub(crate) fn displace(&mut self) {
        let before = self.take_room();
        if !self.config.queue.preempt_for_waiting {
            return;
        }
        let Some(seat) = self.waiting.first() else { return };
        let needed = self.needed_by(seat);
        if needed > self.room_of_tenant(&self.asks[seat]) || self.is_over_soft(seat) {
            return;
        }
        let short = needed.saturating_sub(self.unpromised());
        if short == 0 && self.has_rows_for(seat) {
            if before == Some(seat) {
                self.keep_room(seat, needed);
            }
            return;
        }
        let rows = self.free_rows.len() + self.victims_for(seat).count();
        if rows <= self.request(seat).siblings as usize {
            return;
        }
        if self.victims_for(seat).next().is_none() || !self.suffice_for(seat, short) {
            return;
        }
        while self.needed_by(seat) > self.unpromised() || !self.has_rows_for(seat) {
            let Some(victim) = self.victims_for(seat).min_by_key(|&victim| self.cost_of(victim)) else { return };
            self.note_preemption(victim, seat);
            self.preempt(victim);
        }
        let needed = self.needed_by(seat);
        self.keep_room(seat, needed);
    }

    /// Admits the request for which room was made in this plan, and nobody else.
    pub(crate) fn admit_into_room(&mut self, rows: &mut RowArrays<'_>, now_us: u64) {
        let Some(seat) = self.take_room() else { return };
        self.into_room = Some(seat);
        if self.waiting.first() == Some(seat) && rows.budget > 0 {
            self.plan_waiting_one(rows, now_us);
        } else {
            let needed = self.needed_by(seat).min(self.unpromised());
            self.keep_room(seat, needed);
        }
    }

    /// Takes back the promise to a waiting request; whose it was, if it still waits.
    pub(crate) fn take_room(&mut self) -> Option<usize> {
        let (id, blocks) = self.made_room_for.take()?;
        self.promised -= blocks;
        self.seat_of(id)
    }

    /// The same for the growth of the request at `seat`, if it ranks above.
    pub(crate) fn take_room_below(&mut self, seat: usize) -> bool {
        let Some((id, _)) = self.made_room_for else { return false };
        let is_below = self.seat_of(id).is_none_or(|other| self.asks[other].rank > self.asks[seat].rank);
        is_below && {
            self.take_room();
            true
        }
    }

    /// With `no_evict` two requests that had to go back may each lack a block that the other has: the lower one ends. True
    /// if somebody did.
    pub(crate) fn end_deadlock(&mut self) -> bool {
        let stuck = self.config.queue.no_evict && self.flight.oldest().is_none() && self.refused.is_none();
        let Some(&seat) = self.running.last().filter(|_| stuck && !mutant::leaves_lone_requests()) else {
            return false;
        };
        self.stop_running(seat);
        self.end(seat, End::Capacity);
        true
    }

    fn keep_room(&mut self, seat: usize, blocks: u32) {
        self.made_room_for = Some((self.request(seat).id(), blocks));
        self.promised += blocks;
    }

    fn unpromised(&self) -> u32 {
        self.pool.num_free().saturating_sub(self.promised)
    }

    /// Free blocks that an admission of the waiting request at `seat` takes or promises.
    fn needed_by(&mut self, seat: usize) -> u32 {
        self.find_hits(seat);
        let hits = self.hit.len();
        self.need_from(seat, hits * self.block_size.tokens(), hits) + self.hit.num_free(&self.pool)
    }

    /// Running requests that the one at `seat` may displace: of lower priority as it was asked for and as it has aged, and not secured.
    fn victims_for(&self, seat: usize) -> impl Iterator<Item = usize> + '_ {
        let above = self.asks[seat];
        self.running.iter().rev().copied().filter(move |&other| {
            let ask = &self.asks[other];
            let is_lower = ask.rank.class > above.rank.class && ask.turn.priority > above.turn.priority;
            (is_lower || mutant::is_on(Mutant::RoomFromEquals)) && self.may_lose(other)
        })
    }

    /// Whether those that may be displaced were promised, or hold alone, at least `short` blocks.
    fn suffice_for(&self, seat: usize, short: u32) -> bool {
        let alone = |other: usize| {
            let request = self.request(other);
            let blocks = request.tables().flat_map(|table| table.blocks());
            let alone = blocks.filter(|&&block| self.pool.holders(block) == 1 && !self.flight.is_orphan(block));
            u64::from(request.promised) + alone.count() as u64
        };
        self.victims_for(seat).map(alone).sum::<u64>() >= u64::from(short)
    }
}
