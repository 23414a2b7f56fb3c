//! Ends requests whose time is over: one that was never admitted is refused, any other is aborted, wherever it is.
//!
//! Before: a plan begins and says what time it is. After: nobody lives whose deadline is `now_us` or earlier. Those with a deadline
//! stand in an order, so a plan looks only at who is due, and at the next one.

use std::hint::black_box;

use crate::decodes::READ_AHEAD;
use crate::mutant::{self, Mutant};
use crate::rank::Ask;
use crate::request::End;
use crate::scheduler::Scheduler;
use crate::seat_heap::NOWHERE;
use crate::seat_order::SeatOrder;

/// Deadlines of live requests.
#[derive(Debug)]
pub(crate) struct Expiries {
    order: SeatOrder,
    places: Vec<u32>,
    /// Blocks have times of their own: every plan looks whether one is over.
    of_blocks: bool,
    /// Before this nothing is over.
    wake_us: u64,
}

impl Default for Expiries {
    fn default() -> Self {
        Expiries { order: SeatOrder::default(), places: Vec::new(), of_blocks: false, wake_us: u64::MAX }
    }
}

impl Expiries {
    /// Blocks have times of their own from now on.
    pub fn look_at_blocks(&mut self) {
        self.of_blocks = true;
        self.note_next();
    }

    fn note_next(&mut self) {
        self.wake_us = if self.of_blocks { 0 } else { self.next_us().unwrap_or(u64::MAX) };
    }

    /// The request at `seat` begins to live, or was admitted for the first time.
    pub fn set(&mut self, seat: usize, ask: &Ask) {
        let due = ask.turn.deadline_us.min(ask.turn.queue_deadline_us);
        self.clear(seat);
        if due != u64::MAX {
            self.order.push(&mut self.places, seat, (due, ask.rank.arrival));
            self.note_next();
        }
    }

    /// The request at `seat` has no deadline any more.
    pub fn clear(&mut self, seat: usize) {
        if self.places.get(seat).is_some_and(|&place| place != NOWHERE) {
            self.order.remove(&mut self.places, seat);
            self.note_next();
        }
    }

    fn due(&self, now_us: u64) -> Option<usize> {
        self.order.first().filter(|&((due, _), _)| due <= now_us).map(|(_, seat)| seat)
    }

    /// When the next one is over.
    pub fn next_us(&self) -> Option<u64> {
        self.order.first().map(|((due, _), _)| due)
    }
}

impl Scheduler {
    /// The next time at which a request's deadline is over, if there is one: an engine that sleeps wakes up then.
    #[must_use]
    pub fn next_deadline_us(&self) -> Option<u64> {
        self.expiries.next_us()
    }

    /// Tells the time. Blocks whose time is over are worth less, and everybody whose time is over ends.
    pub(crate) fn expire(&mut self, now_us: u64) {
        self.pool.tell_time(now_us);
        if self.expiries.wake_us <= now_us {
            self.expire_due(now_us);
        }
    }

    #[cold]
    #[inline(never)]
    fn expire_due(&mut self, now_us: u64) {
        self.pool.expire(now_us);
        if mutant::is_on(Mutant::NeverExpires) {
            return;
        }
        let mut due = std::mem::take(&mut self.due);
        while let Some(seat) = self.expiries.due(now_us) {
            self.expiries.clear(seat);
            due.push(seat);
        }
        for seats in due.chunks(READ_AHEAD) {
            // What waited long is far away: fetched side by side before the first of them is looked at.
            black_box(seats.iter().fold(0, |seen, &seat| seen ^ self.glance(seat)));
            for &seat in seats {
                let never_admitted = self.asks[seat].turn.queue_deadline_us <= now_us;
                self.leave(seat, if never_admitted { End::Refused } else { End::Expired });
            }
        }
        due.clear();
        self.due = due;
    }

    /// Reads what the end of the request at `seat` needs, and makes something of it.
    fn glance(&self, seat: usize) -> u64 {
        let (request, ask) = (self.request(seat), &self.asks[seat]);
        let noted = self.timelines.ring(seat).last().map_or(0, |record| record.step);
        request.glance_at_all() ^ noted ^ ask.backlog.tokens ^ ask.rank.arrival ^ u64::from(self.has_id_of(seat))
    }
}
