//! Readers of the scheduler's KV events: one that follows from the start, and one that comes late.
//!
//! Before: a call on the scheduler has ended. After: the index that the first has rebuilt equals the scheduler's, and so does one that
//! starts from a snapshot now.

use blocktable_core::Scheduler;

use crate::broken::{Checked, broken, ensure};
use crate::mirror::{Mirror, Names, decoded};

/// The readers of one scheduler.
#[derive(Default)]
pub struct Followers {
    pub first: Mirror,
    /// Events that the first has read.
    pub read: u64,
    bytes: Vec<u8>,
}

impl Followers {
    /// Reads what the last call has changed. `names` says what is true of a key.
    pub fn follow(&mut self, scheduler: &Scheduler, names: Names<'_>) -> Checked {
        let Some(log) = scheduler.pool().index().events() else { return Ok(()) };
        let came = scheduler.read_events(self.first.next, &mut self.bytes);
        let came = came.or_else(|error| broken("numbers", error.to_string()))?;
        ensure(came.is_some() == (log.next() != self.first.next), "numbers", || format!("{came:?} at {}", log.next()))?;
        if came.is_some() {
            let events = decoded(&self.bytes)?;
            self.read += events.events().len() as u64;
            if !self.first.apply(&events, names)? {
                scheduler.event_snapshot(&mut self.bytes).expect("events are recorded");
                self.first.restart(&decoded(&self.bytes)?, names)?;
            }
            self.first.compare(scheduler.pool().index())?;
            scheduler.event_snapshot(&mut self.bytes).expect("events are recorded");
            let mut late = Mirror::default();
            late.restart(&decoded(&self.bytes)?, names)?;
            let same = (&late.keys, late.next) == (&self.first.keys, self.first.next);
            ensure(same, "snapshot", || format!("a late reader has {late:?}, the first {:?}", self.first))?;
        }
        self.first.compare(scheduler.pool().index())?;
        self.check_chains(scheduler)
    }

    /// I58: in a group that sees everything no key outlives the one before it in its chain.
    fn check_chains(&self, scheduler: &Scheduler) -> Checked {
        let groups = &scheduler.config().groups;
        let full = |group: u8| groups[usize::from(group)].window.is_none();
        let chains = self.first.keys.iter().filter(|((group, _), _)| full(*group));
        for ((group, key), parent) in chains {
            let has_parent = parent.is_none_or(|parent| self.first.keys.contains_key(&(*group, parent)));
            ensure(has_parent, "I58", || format!("{key:?} of group {group} is there and {parent:?} is not"))?;
        }
        Ok(())
    }
}
