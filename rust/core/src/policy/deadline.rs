//! `deadline`: the earliest deadline first.
//!
//! A request is ordered by the earlier of its two deadlines, or by `latest_deadline_us` after its submission if that is earlier still
//! or it has none.
//!
//! Overtakers of a request: those that arrive less than `latest_deadline_us` after it, and `max_pass` smaller ones; by default nobody
//! who comes 60 s later.

use crate::mutant::{self, Mutant};
use crate::policy::Policy;
use crate::rank::Ask;
use crate::seat_heap::Key;

#[derive(Debug)]
pub(super) struct Deadline {
    pub latest_us: u64,
}

impl Policy for Deadline {
    fn key(&self, ask: &Ask) -> Key {
        let latest = ask.submitted_us.saturating_add(self.latest_us);
        let due = if mutant::is_on(Mutant::NoLatestDeadline) { ask.due_us } else { ask.due_us.min(latest) };
        (due, ask.rank.arrival)
    }
}
