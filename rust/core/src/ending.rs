//! A request ends, wherever it is, and what is remembered of it.
//!
//! Before: a caller, a commit or a plan says how. After: it holds nothing, its seat is free, and the next plan tells its end. Of the last
//! [`REMEMBERED`] that ended, cached tokens and timelines are still known.

use crate::error::{Error, Result};
use crate::ids::RequestId;
use crate::miss::Miss;
use crate::mutant::{self, Mutant};
use crate::request::{End, Place};
use crate::scheduler::Scheduler;
use crate::timeline::Ring;

/// Ended requests whose cached tokens are still known.
pub(crate) const REMEMBERED: usize = 1024;

/// Requests that ended whose memory one call gives back.
const CLEARED_AT_ONCE: usize = 4;

/// What is known of a request that ended.
pub(crate) struct Remembered {
    pub id: RequestId,
    pub cached: usize,
    pub miss: Option<Miss>,
    pub timeline: Ring,
}

impl Scheduler {
    /// Ends a request in whatever state it is, all of its sequences; the id of another sequence than the first ends that one alone. False
    /// if it has ended already or never was.
    pub fn abort(&mut self, id: RequestId) -> bool {
        if self.families.contains_key(&id) && !mutant::is_on(Mutant::SiblingsOutlive) {
            return self.end_family(id, End::Aborted);
        }
        self.leave_by_id(id, End::Aborted)
    }

    /// Ends one sequence of a request as aborted, the first one too; false as above.
    pub fn end_sequence(&mut self, id: RequestId) -> bool {
        self.leave_by_id(id, End::Aborted)
    }

    /// Ends a request as finished, because its text reached a stop that only the caller can see; false as above.
    pub fn finish(&mut self, id: RequestId) -> bool {
        self.leave_by_id(id, End::Stop)
    }

    /// Ends the live request `id`, if there is one.
    pub(crate) fn leave_by_id(&mut self, id: RequestId, end: End) -> bool {
        let seat = self.seat_of(id);
        seat.into_iter().for_each(|seat| self.leave(seat, end));
        seat.is_some()
    }

    /// Ends the request at `seat`, wherever it is.
    pub(crate) fn leave(&mut self, seat: usize, end: End) {
        match self.request(seat).place {
            Place::Waiting => {
                if !mutant::is_on(Mutant::AbortWaitingLeaks) {
                    self.waiting.leave(seat, &self.asks[seat]);
                    self.end_waiting(seat);
                }
            }
            Place::Running(_) => {
                if self.flight.runs(self.request(seat).planned_in) {
                    self.withdraw_writer(seat);
                }
                self.stop_running(seat);
            }
        }
        self.end(seat, end);
    }

    /// Records the end of a request that is in neither line any more, and frees its seat.
    pub(crate) fn end(&mut self, seat: usize, end: End) {
        self.note_end(seat, end);
        let request = self.seats[seat].take().expect("a seat in use");
        self.by_id_remove(request.id(), seat);
        if let Some(first) = request.family {
            self.leave_family(first, request.id(), end);
        }
        self.forget_untold(request.id());
        self.empty_seats.push(seat);
        self.tenants.exit(self.asks[seat].tenant);
        self.expiries.clear(seat);
        if self.remembered.len() == REMEMBERED
            && let Some(oldest) = self.remembered.pop_front()
        {
            self.timelines.recycle(oldest.timeline);
        }
        let cached = request.cached.unwrap_or(0);
        let mut timeline = self.timelines.end(seat);
        if mutant::is_on(Mutant::EndForgetsTimeline) {
            timeline = Ring::default();
        }
        self.remembered.push_back(Remembered { id: request.id(), cached, miss: request.miss, timeline });
        match end {
            End::Stop | End::Length => {
                self.counters.finished += 1;
                self.outlook.see_end(request.num_outputs());
            }
            End::Refused => self.counters.queue_expired += 1,
            End::Aborted | End::Capacity => self.counters.aborted += 1,
            End::Expired => {
                self.counters.aborted += 1;
                self.counters.expired += 1;
            }
        }
        let record = [request.id().0 as i64, end as i64];
        // Rows are reused from the next plan on, so who had one must be told first.
        match request.place {
            Place::Running(_) => {
                self.ended.insert(self.ended_with_row, record);
                self.ended_with_row += 1;
            }
            Place::Waiting => self.ended.push_back(record),
        }
        self.leavings.push(request);
    }

    /// Gives back the memory of a few requests that ended.
    pub(crate) fn clear_up(&mut self) {
        self.leavings.truncate(self.leavings.len().saturating_sub(CLEARED_AT_ONCE));
    }

    /// Prompt tokens that a request found in the prefix cache when it was first admitted; 0 before.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if it neither lives nor is among the last 1,024 that ended.
    pub fn num_cached_tokens(&self, id: RequestId) -> Result<usize> {
        if let Some(seat) = self.seat_of(id) {
            return Ok(self.request(seat).cached.unwrap_or(0));
        }
        self.remembered_of(id).map(|ended| ended.cached).ok_or(Error::UnknownRequest { request: id })
    }

    /// What is known of a request that ended lately.
    pub(crate) fn remembered_of(&self, id: RequestId) -> Option<&Remembered> {
        self.remembered.iter().rev().find(|ended| ended.id == id)
    }
}
