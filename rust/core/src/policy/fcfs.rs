//! `fcfs`: first come, first served.
//!
//! Overtakers of a request: at most `max_pass`, all of them smaller than it; by default 8.

use crate::policy::Policy;
use crate::rank::Ask;
use crate::seat_heap::Key;

#[derive(Debug)]
pub(super) struct Fcfs;

impl Policy for Fcfs {
    fn key(&self, ask: &Ask) -> Key {
        (0, ask.rank.arrival)
    }
}
