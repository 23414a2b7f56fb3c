//! Ends requests whose time is over: one that was never admitted is refused, any other is aborted, wherever it is.
//!
//! Before: a plan begins and says what time it is. After: nobody lives whose deadline is `now_us` or earlier. Those with a deadline
//! stand in an order, so a plan looks only at who is due, and at the next one.

use std::hint::black_box;

use crate::mutant::{self, Mutant};
use crate::rank::Ask;
use crate::request::End;
use crate::scheduler::Scheduler;
use crate::seat_heap::NOWHERE;
use crate::seat_order::SeatOrder;

/// Deadlines of live requests.
#[derive(Debug, Default)]
pub(crate) struct Expiries {
    order: SeatOrder,
    places: Vec<u32>,
}

impl Expiries {
    /// The request at `seat` begins to live, or was admitted for the first time.
    pub fn set(&mut self, seat: usize, ask: &Ask) {
        let due = ask.turn.deadline_us.min(ask.turn.queue_deadline_us);
        self.clear(seat);
        if due != u64::MAX {
            self.order.push(&mut self.places, seat, (due, ask.rank.arrival));
        }
    }

    /// The request at `seat` has no deadline any more.
    pub fn clear(&mut self, seat: usize) {
        if self.places.get(seat).is_some_and(|&place| place != NOWHERE) {
            self.order.remove(&mut self.places, seat);
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

    /// Ends everybody whose time is over.
    pub(crate) fn expire(&mut self, now_us: u64) {
        if mutant::is_on(Mutant::NeverExpires) {
            return;
        }
        let mut due = std::mem::take(&mut self.due);
        while let Some(seat) = self.expiries.due(now_us) {
            self.expiries.clear(seat);
            due.push(seat);
        }
        // What waited long is far away: fetched side by side before the first of them is looked at.
        black_box(due.iter().fold(0, |seen, &seat| seen ^ self.glance(seat)));
        for &seat in &due {
            let never_admitted = self.asks[seat].turn.queue_deadline_us <= now_us;
            let end = if never_admitted { End::Refused } else { End::Expired };
            let id = self.request(seat).id;
            self.leave(id, end);
        }
        due.clear();
        self.due = due;
    }

    /// Reads what the end of the request at `seat` needs, and makes something of it.
    fn glance(&self, seat: usize) -> u64 {
        let request = self.request(seat);
        let noted = self.timelines.ring(seat).last().map_or(0, |record| record.step);
        request.id.0 ^ request.num_outputs() as u64 ^ noted ^ self.asks[seat].backlog.tokens
    }
}
