//! What happened to each request: the last 32 records of every live one and of the last 1,024 that ended, always (design 12).
//!
//! Before: the scheduler notes a [`Reason`] at the seat of a request ([`Scheduler::note`](crate::scheduler::Scheduler)). After:
//! [`Scheduler::explain`](crate::scheduler::Scheduler::explain) reads them. Nothing is noted for a decode that just moves, so a steady
//! step costs nothing. A reason that comes again at once is one record with a count, the numbers of the last time, and both times.
//! The memory of a ring is used again by later requests; a listener, if there is one, gets every note until its buffer is full.

use std::collections::VecDeque;
use std::fmt::Write;

use crate::ids::RequestId;
use crate::mutant::{self, Mutant};
use crate::reason::{CODES, Reason};

/// Records of a request at most; the newest stay.
pub const MAX_RECORDS: usize = 32;

/// One thing that happened to a request, once or several times in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// When it happened first: the time that the last call had brought, in microseconds.
    pub at_us: u64,
    /// When it happened last.
    pub until_us: u64,
    /// Plans made before it happened last.
    pub step: u64,
    /// How often.
    pub times: u32,
    /// What, with the numbers of the last time.
    pub reason: Reason,
}

/// The records of one request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ring {
    /// At most [`MAX_RECORDS`]; full, it goes on at `oldest`.
    records: Vec<Record>,
    oldest: usize,
    /// Records that made room for newer ones.
    forgotten: u64,
}

impl Ring {
    fn clear(&mut self) {
        self.records.clear();
        self.oldest = 0;
        self.forgotten = 0;
    }

    /// The newest record.
    pub fn last(&self) -> Option<&Record> {
        // While nothing was overwritten, `oldest` is 0 and the newest stands last.
        let at = self.oldest.checked_sub(1).unwrap_or(self.records.len().saturating_sub(1));
        self.records.get(at)
    }

    fn push(&mut self, record: Record) {
        let at = self.oldest.checked_sub(1).unwrap_or(self.records.len().saturating_sub(1));
        if let Some(last) = self.records.get_mut(at)
            && last.reason.code() == record.reason.code()
        {
            *last = Record { at_us: last.at_us, times: last.times.saturating_add(1), ..record };
        } else if self.records.len() < MAX_RECORDS || mutant::is_on(Mutant::TimelineGrows) {
            self.records.push(record);
        } else {
            self.records[self.oldest] = record;
            self.oldest = (self.oldest + 1) % MAX_RECORDS;
            self.forgotten += 1;
        }
    }

    /// The oldest first.
    pub fn records(&self) -> impl Iterator<Item = &Record> {
        let (newer, older) = self.records.split_at(self.oldest);
        older.iter().chain(newer)
    }

    /// Records that made room for newer ones.
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }
}

/// Who hears every note.
#[derive(Debug)]
struct Listener {
    notes: VecDeque<(RequestId, Record)>,
    capacity: usize,
    lost: u64,
}

/// The rings of live requests by seat, and counts of every reason.
#[derive(Debug)]
pub(crate) struct Timelines {
    rings: Vec<Ring>,
    /// Memory of rings that nobody needs any more.
    spare: Vec<Ring>,
    counts: [u64; CODES],
    now_us: u64,
    listener: Option<Listener>,
}

impl Timelines {
    pub fn new() -> Self {
        Timelines { rings: Vec::new(), spare: Vec::new(), counts: [0; CODES], now_us: 0, listener: None }
    }

    /// What time it is.
    pub fn tell_time(&mut self, now_us: u64) {
        self.now_us = now_us;
    }

    /// The time that the last call brought.
    pub fn now_us(&self) -> u64 {
        self.now_us
    }

    /// A request takes seat `seat`.
    pub fn begin(&mut self, seat: usize) {
        if self.rings.len() <= seat {
            self.rings.resize_with(seat + 1, Ring::default);
        }
        self.rings[seat] = self.spare.pop().unwrap_or_default();
    }

    /// The request at `seat` runs from now on: what it is told then allocates nothing.
    pub fn make_room(&mut self, seat: usize) {
        let records = &mut self.rings[seat].records;
        records.reserve_exact(MAX_RECORDS.saturating_sub(records.len()));
    }

    /// The request at `seat` ended; its ring.
    pub fn end(&mut self, seat: usize) -> Ring {
        std::mem::take(&mut self.rings[seat])
    }

    /// Nobody asks for this ring any more.
    pub fn recycle(&mut self, mut ring: Ring) {
        ring.clear();
        self.spare.push(ring);
    }

    /// The ring of the request at `seat`.
    pub fn ring(&self, seat: usize) -> &Ring {
        &self.rings[seat]
    }

    /// Counts a reason that no request is told.
    pub fn count(&mut self, reason: Reason) {
        self.counts[usize::from(reason.code())] += 1;
    }

    /// Counts `reason` and notes it for the request `id` at `seat`.
    pub fn note(&mut self, seat: usize, id: RequestId, step: u64, reason: Reason) {
        self.count(reason);
        self.tell(seat, id, step, reason);
    }

    /// The same, for a reason that was counted.
    pub fn tell(&mut self, seat: usize, id: RequestId, step: u64, reason: Reason) {
        let record = Record { at_us: self.now_us, until_us: self.now_us, step, times: 1, reason };
        self.rings[seat].push(record);
        if let Some(listener) = &mut self.listener {
            if listener.notes.len() == listener.capacity {
                listener.notes.pop_front();
                listener.lost += 1;
            }
            listener.notes.push_back((id, record));
        }
    }

    /// How often each reason was noted, in the order of [`Reason::ALL`].
    pub fn counts(&self) -> impl Iterator<Item = (Reason, u64)> {
        Reason::ALL.iter().map(|&reason| (reason, self.counts[usize::from(reason.code())]))
    }

    /// Keeps every note from now on, the last `capacity` of them; 0 ends that.
    pub fn listen(&mut self, capacity: usize) {
        self.listener = (capacity > 0).then(|| Listener { notes: VecDeque::new(), capacity, lost: 0 });
    }

    /// Takes the notes that were kept, as one JSON object a line, oldest first; how many were lost before them. None: nobody listens.
    pub fn take_lines(&mut self, lines: &mut String) -> Option<u64> {
        let listener = self.listener.as_mut()?;
        for (id, record) in listener.notes.drain(..) {
            let reason = record.reason;
            let (name, code, kind) = (reason.name(), reason.code(), reason.kind().name());
            write!(lines, r#"{{"request":{},"at_us":{},"step":{}"#, id.0, record.at_us, record.step).expect("a string");
            write!(lines, r#","reason":"{name}","code":{code},"kind":"{kind}""#).expect("a string");
            for (number, value) in reason.numbers() {
                // A reason may name another request.
                let number = if number == "request" { "other_request" } else { number };
                write!(lines, r#","{number}":{value}"#).expect("a string");
            }
            writeln!(lines, r#","words":"{reason}"}}"#).expect("a string");
        }
        Some(std::mem::take(&mut listener.lost))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(notes: u32) -> Timelines {
        let mut timelines = Timelines::new();
        timelines.begin(0);
        for n in 0..notes {
            timelines.tell_time(u64::from(n));
            let reason = if n % 2 == 0 { Reason::PutBack { tokens: n } } else { Reason::StepFailed { tokens: n } };
            timelines.note(0, RequestId(1), 0, reason);
        }
        timelines
    }

    #[test]
    fn the_newest_records_stay_in_order() {
        for notes in [1, 31, 32, 33, 64, 100] {
            let timelines = filled(notes);
            let times: Vec<u64> = timelines.ring(0).records().map(|record| record.at_us).collect();
            let expected: Vec<u64> = (u64::from(notes.saturating_sub(32))..u64::from(notes)).collect();
            assert_eq!(times, expected);
            assert_eq!(timelines.ring(0).last().map(|record| record.at_us), expected.last().copied());
            assert_eq!(timelines.ring(0).forgotten(), u64::from(notes.saturating_sub(32)));
        }
    }

    /// So the ring of a request takes 1.5 KB at most, in steps of 4, 8, 16 and 32 records.
    #[test]
    fn a_record_is_small() {
        assert_eq!(size_of::<Record>(), 48);
    }

    #[test]
    fn what_comes_again_at_once_is_one_record() {
        for before in [0, 31, 32, 40] {
            let mut timelines = filled(before);
            for now_us in 100..200 {
                timelines.tell_time(now_us);
                timelines.note(0, RequestId(1), 5, Reason::OutOfBlocks { needed: now_us as u32, free: 0, promised: 0 });
            }
            let last = *timelines.ring(0).last().expect("a record");
            assert_eq!((last.at_us, last.until_us, last.times), (100, 199, 100));
            assert_eq!(last.reason, Reason::OutOfBlocks { needed: 199, free: 0, promised: 0 });
        }
    }

    #[test]
    fn a_listener_hears_all_until_its_buffer_is_full() {
        let mut timelines = Timelines::new();
        timelines.begin(0);
        let mut lines = String::new();
        assert_eq!(timelines.take_lines(&mut lines), None);
        timelines.listen(2);
        for tokens in 0..3 {
            timelines.note(0, RequestId(9), 1, Reason::PutBack { tokens });
        }
        timelines.note(0, RequestId(9), 2, Reason::PreemptedBy { request: 4, tokens: 7 });
        assert_eq!(timelines.take_lines(&mut lines), Some(2));
        let read: Vec<&str> = lines.lines().collect();
        assert_eq!(read.len(), 2);
        assert_eq!(
            read[1],
            concat!(
                r#"{"request":9,"at_us":0,"step":2,"reason":"preempted_by","code":30,"kind":"loss","other_request":4,"tokens":7,"#,
                r#""words":"was preempted by request 4: 7 tokens are computed again"}"#
            )
        );
        assert_eq!(timelines.take_lines(&mut lines), Some(0));
    }
}
