//! Notes why things happen to requests, and tells it (design 12).
//!
//! Before: the scheduler is about to pass over, preempt or end a request. After: its timeline has the reason, with the numbers of this
//! moment; [`Scheduler::explain`] reads it back, of live requests and of the last 1,024 that ended.

use std::fmt;

use crate::error::{Error, Result};
use crate::ids::RequestId;
use crate::mutant::{self, Mutant};
use crate::reason::{Kind, Reason, saturated};
use crate::request::{End, Place};
use crate::scheduler::Scheduler;
use crate::timeline::{Record, Ring};

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// It waits.
    Waiting,
    /// It has a row.
    Running,
    /// It ended.
    Ended,
}

impl Whereabouts {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Whereabouts::Waiting => "waiting",
            Whereabouts::Running => "running",
            Whereabouts::Ended => "ended",
        }
    }
}

/// What is known of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The request.
    pub request: RequestId,
    /// Where it is.
    pub place: Whereabouts,
    /// What it waits for now, if the last plan passed it over.
    pub waits_for: Option<Reason>,
    /// Records before the first of these, which made room for newer ones.
    pub forgotten: u64,
    /// What happened, oldest first.
    pub records: Vec<Record>,
}

impl fmt::Display for Explanation {
    /// A line for each record, with times counted from the first one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {} ({})", self.request.0, self.place.name())?;
        if let Some(reason) = self.waits_for {
            write!(f, ": {reason}")?;
        }
        if self.forgotten > 0 {
            write!(f, "\n  ({} earlier records are forgotten)", self.forgotten)?;
        }
        let first_us = self.records.first().map_or(0, |record| record.at_us);
        for record in &self.records {
            let after_us = record.at_us.saturating_sub(first_us);
            write!(f, "\n  +{}.{:06} s: {}", after_us / 1_000_000, after_us % 1_000_000, record.reason)?;
            if record.times > 1 {
                let lasted_us = record.until_us.saturating_sub(record.at_us);
                let (seconds, rest) = (lasted_us / 1_000_000, lasted_us % 1_000_000);
                write!(f, " ({} times in {seconds}.{rest:06} s)", record.times)?;
            }
        }
        Ok(())
    }
}

impl Scheduler {
    /// What happened to a request, and what it waits for now.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if it neither lives nor is among the last 1,024 that ended.
    pub fn explain(&self, id: RequestId) -> Result<Explanation> {
        let tell = |place, waits_for, ring: &Ring| Explanation {
            request: id,
            place,
            waits_for,
            forgotten: ring.forgotten(),
            records: ring.records().copied().collect(),
        };
        let Some(seat) = self.seat_of(id) else {
            let ended = self.remembered_of(id).ok_or(Error::UnknownRequest { request: id })?;
            return Ok(tell(Whereabouts::Ended, None, &ended.timeline));
        };
        let place = match self.request(seat).place {
            Place::Waiting => Whereabouts::Waiting,
            Place::Running(_) => Whereabouts::Running,
        };
        Ok(tell(place, self.wait_of(seat), self.timelines.ring(seat)))
    }

    /// How often each reason was noted since the start.
    pub fn reasons(&self) -> impl Iterator<Item = (Reason, u64)> {
        self.timelines.counts()
    }

    /// Keeps every note from now on, the last `capacity` of them, for [`Scheduler::take_notes`]; 0 ends that.
    pub fn listen_to_notes(&mut self, capacity: usize) {
        self.timelines.listen(capacity);
    }

    /// Appends the notes that were kept to `lines`, as one JSON object a line, and forgets them; how many were lost before them. None
    /// if nobody listens.
    pub fn take_notes(&mut self, lines: &mut String) -> Option<u64> {
        self.timelines.take_lines(lines)
    }

    /// Notes `reason` for the request at `seat`.
    pub(crate) fn note(&mut self, seat: usize, reason: Reason) {
        let id = self.request(seat).id();
        self.timelines.note(seat, id, self.steps, reason);
    }

    /// Notes why the plan under way passes over the request at `seat`.
    pub(crate) fn note_wait(&mut self, seat: usize, reason: Reason) {
        if !mutant::is_on(Mutant::WaitNotNoted) {
            self.note(seat, reason);
        }
    }

    /// Notes that the waiting request at `seat`, which needs `needed` blocks, does not fit beside what is held and promised.
    pub(crate) fn note_blocked(&mut self, seat: usize, needed: u32) {
        let free = self.pool.num_free().saturating_sub(self.promised);
        if needed <= free && !mutant::is_on(Mutant::KeptReadsInFlight) {
            return self.note_wait(seat, Reason::KeptForGrowth { needed, free, kept: self.reserve(seat).min(free) });
        }
        self.note_wait(seat, self.lack(needed, false));
    }

    /// Counts and notes for those that do not fit that the request at `seat` was admitted.
    pub(crate) fn note_passed(&mut self, seat: usize) {
        let request = self.request(seat).id().0;
        for at in 0..self.blocked.len() {
            let blocked = self.blocked[at];
            self.asks[blocked].passed += 1;
            self.note(blocked, Reason::PassedBy { request });
        }
    }

    /// Notes that the running request at `seat` finds no `needed` blocks beyond its promise.
    pub(crate) fn note_no_victim(&mut self, seat: usize, needed: u32) {
        self.note_wait(seat, self.lack(needed, true));
    }

    /// Why `needed` blocks beyond what is promised to the asker are not there.
    fn lack(&self, needed: u32, runs: bool) -> Reason {
        let (free, promised, parked) =
            (self.pool.num_free(), self.promised, self.pool.num_parked() + self.lookahead_in_flight());
        let unpromised = free.saturating_sub(promised);
        if needed <= unpromised + parked {
            Reason::BlocksInFlight { needed, free: unpromised, parked }
        } else if runs {
            Reason::NoVictim { needed, free, promised }
        } else {
            Reason::OutOfBlocks { needed, free, promised }
        }
    }

    /// Notes that the request at `seat` is about to lose everything to the one at `taker`.
    pub(crate) fn note_preemption(&mut self, seat: usize, taker: usize) {
        let (request, tokens) = (self.request(taker).id().0, saturated(self.request(seat).computed() as u64));
        self.note(seat, Reason::PreemptedBy { request, tokens });
    }

    /// Notes that the request at `seat` ends.
    pub(crate) fn note_end(&mut self, seat: usize, end: End) {
        let request = self.request(seat);
        let tokens = saturated(request.num_outputs() as u64);
        let usable = self.pool.usable() - self.num_pinned();
        let quota = self.tenants.of(self.asks[seat].tenant).rules.hard_blocks;
        self.note(
            seat,
            match end {
                End::Stop => Reason::FinishedStop { tokens },
                End::Length => Reason::FinishedLength { tokens },
                End::Aborted => Reason::Aborted { tokens },
                End::Expired => Reason::Deadline { tokens },
                End::Refused => {
                    let waited_us = self.timelines.now_us().saturating_sub(self.asks[seat].submitted_us);
                    Reason::QueueDeadline { waited_ms: saturated(waited_us / 1000) }
                }
                End::Capacity => Reason::Capacity {
                    needed: saturated(self.groups.need(0, 0, request.num_tokens()) as u64),
                    usable: if mutant::is_on(Mutant::CapacityTellsPool) { usable } else { usable.min(quota) },
                },
            },
        );
    }

    /// What the request at `seat` waits for now: what the last plan noted, or its turn.
    pub(crate) fn wait_of(&self, seat: usize) -> Option<Reason> {
        let mut noted = None;
        for record in self.timelines.ring(seat).records() {
            match record.reason {
                // What it waited for before it got its row, perhaps in the same plan, is over.
                Reason::Admitted { .. } | Reason::ForkedFrom { .. } => noted = None,
                // Since a wait, others may have passed it.
                reason if reason.kind() == Kind::Wait && record.step + 1 >= self.steps => noted = Some(reason),
                _ => {}
            }
        }
        if let Place::Running(_) = self.request(seat).place {
            // A plan that could run nothing gave its number to the next one, which may have run it.
            let has_run = self.request(seat).planned_in == self.steps && !mutant::is_on(Mutant::RefusedReadsWaiting);
            return noted.filter(|_| !has_run);
        }
        let others = (self.waiting.len() as u32).saturating_sub(1);
        noted.filter(|reason| !matches!(reason, Reason::BehindHead { .. })).or(Some(Reason::BehindHead { others }))
    }
}
