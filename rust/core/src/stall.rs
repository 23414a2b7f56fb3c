//! What is told when runnable work cannot move although nothing is in flight: a fault of ours, never of the caller (design 15).
//!
//! Before: a plan found nothing to run, freed nothing and ended nothing, with requests alive. After: the report names the first of them,
//! what the plan noted for it, and where every block is.

use std::fmt;

use crate::ids::RequestId;
use crate::reason::Reason;
use crate::request::Place;
use crate::scheduler::Scheduler;

/// Holders that a report names at most: those of most blocks.
pub const MAX_HOLDERS: usize = 8;

/// Who cannot move, and where every block is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The request of highest rank.
    pub request: RequestId,
    /// Whether it has a row.
    pub is_running: bool,
    /// What the plan noted for it; none: nobody said why, which is a second fault.
    pub reason: Option<Reason>,
    /// Blocks that it needs beside those that it has, for all of its tokens.
    pub needed: u32,
    /// Blocks in the free queue.
    pub free: u32,
    /// Of those, promised to running requests.
    pub promised: u32,
    /// Held by nobody, named by what is in flight.
    pub parked: u32,
    /// Held by pins.
    pub pinned: u32,
    /// Requests with a row.
    pub running: usize,
    /// Requests without one.
    pub waiting: usize,
    /// Who holds most: request and entries of its tables, at most [`MAX_HOLDERS`] of them. Shared blocks count for each.
    pub held_by: Vec<(RequestId, usize)>,
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stall { needed, free, promised, parked, pinned, running, waiting, .. } = self;
        let place = if self.is_running { "runs and got no token" } else { "waits and was not admitted" };
        write!(f, "request {} cannot move: it {place}", self.request.0)?;
        match self.reason {
            Some(reason) => write!(f, " ({reason})")?,
            None => write!(f, ", and nobody noted why")?,
        }
        write!(
            f,
            "; it needs {needed} KV blocks more, {free} are free ({promised} promised), {parked} parked, {pinned} pinned"
        )?;
        write!(f, "; {running} run, {waiting} wait")?;
        for (at, (request, blocks)) in self.held_by.iter().enumerate() {
            write!(f, "{} request {} holds {blocks}", if at == 0 { ";" } else { "," }, request.0)?;
        }
        Ok(())
    }
}

impl Scheduler {
    /// The report on the request at `seat`.
    pub(crate) fn stall_of(&self, seat: usize) -> Stall {
        let request = self.request(seat);
        let (start, held) = (request.computed(), request.table.len());
        let last = self.timelines.ring(seat).last();
        let noted = last.filter(|last| last.step == self.steps).map(|last| last.reason);
        let mut held_by: Vec<(RequestId, usize)> = (self.running.iter())
            .map(|&seat| (self.request(seat).id(), self.request(seat).tables().map(|table| table.len()).sum()))
            .collect();
        held_by.sort_by_key(|&(id, blocks)| (std::cmp::Reverse(blocks), id));
        held_by.truncate(MAX_HOLDERS);
        Stall {
            request: request.id(),
            is_running: matches!(request.place, Place::Running(_)),
            reason: noted.filter(|reason| reason.kind() == crate::reason::Kind::Wait),
            needed: self.groups.need(start, held, request.num_tokens()) as u32,
            free: self.pool.num_free(),
            promised: self.promised,
            parked: self.pool.num_parked(),
            pinned: self.num_pinned(),
            running: self.running.len(),
            waiting: self.waiting.len(),
            held_by,
        }
    }
}
