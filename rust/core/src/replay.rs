//! Makes the calls of a recording again, on a new scheduler, and demands that each plan is the same bit for bit.
//!
//! Before: bytes that [`Recorded`] wrote, perhaps in another process. After: every call returned what it had returned, every array of
//! every plan and all counters had the same digests; or the first difference is named.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::commit::Committed;
use crate::digest::NAMES;
use crate::error::{Error, Result};
use crate::ids::{RequestId, StepId};
use crate::plan::PlanMemory;
use crate::rank::Asked;
use crate::recorder::Recorded;
use crate::recording::{Call, NEVER_RETURNED, Recording};

/// Where a replay went another way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Number of the record; the configuration is 0.
    pub record: u64,
    /// The call.
    pub call: &'static str,
    /// Plans made before it.
    pub steps: u64,
    /// What differs: `outcome`, or one of the names of [`mod@crate::digest`].
    pub what: &'static str,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { record, call, steps, what } = self;
        write!(f, "record {record}, {call} after {steps} plans: {what} is not what was recorded")
    }
}

/// What a replay did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replayed {
    /// Calls that were made again.
    pub calls: u64,
    /// Plans among them that were compared.
    pub plans: u64,
    /// Tokens that they scheduled.
    pub tokens: u64,
    /// The bytes ended within a record: everything before it was replayed.
    pub is_cut: bool,
    /// The last call never returned when it was recorded, and did not return now.
    pub ends_in_panic: bool,
    /// The first difference, where the replay ended; none: all was the same.
    pub difference: Option<Difference>,
}

/// Replays a recording.
///
/// # Errors
/// [`Error::InvalidInput`] for bytes that are no recording, one whose beginning was dropped, or a configuration that is refused.
pub fn replay(bytes: &[u8]) -> Result<Replayed> {
    let recording = Recording::read(bytes)?;
    if recording.first != 1 {
        let bound = "is the number of the first record that was kept: a replay needs all from 1 on".to_owned();
        return Err(Error::InvalidInput { field: "recording", value: i128::from(recording.first), bound });
    }
    let mut scheduler = Recorded::new(recording.config.clone())?;
    // Digests are made by the recorder alone.
    scheduler.record_in_ring(0)?;
    let memory = || (vec![0; scheduler.layout().words], vec![0; scheduler.layout().table_entries]);
    let mut memories = [memory(), memory()];
    let is_cut = recording.is_cut;
    let mut replayed = Replayed { calls: 0, plans: 0, tokens: 0, is_cut, ends_in_panic: false, difference: None };
    for entry in &recording.entries {
        let steps = scheduler.steps();
        replayed.calls += 1;
        if entry.outcome == NEVER_RETURNED {
            let made = catch_unwind(AssertUnwindSafe(|| make(&mut scheduler, &entry.call, &mut memories)));
            replayed.ends_in_panic = made.is_err();
            if made.is_err() {
                // What it left behind is of no use.
                return Ok(replayed);
            }
        } else {
            make(&mut scheduler, &entry.call, &mut memories)?;
        }
        replayed.plans += u64::from(!entry.digests.is_empty());
        let (outcome, digests) = scheduler.last();
        let differs = digests.iter().zip(&entry.digests).position(|(now, then)| now != then);
        let what = match differs {
            Some(at) => NAMES.get(at).copied(),
            None if outcome != entry.outcome || digests.len() != entry.digests.len() => Some("outcome"),
            None => None,
        };
        if let Some(what) = what {
            replayed.difference = Some(Difference { record: replayed.calls, call: entry.call.name(), steps, what });
            break;
        }
    }
    replayed.tokens = scheduler.counters().scheduled_tokens;
    Ok(replayed)
}

/// Makes one call. What it returns stands in the recorder.
fn make(scheduler: &mut Recorded, call: &Call, memories: &mut [(Vec<i64>, Vec<i32>); 2]) -> Result<()> {
    match call {
        Call::Submit { tokens, identity, limits, tenant, turn, siblings, now_us } => {
            let prompt = scheduler.prompt(tokens.clone(), identity.clone())?;
            let asked = Asked { tenant, turn: *turn, siblings: *siblings };
            drop(scheduler.submit_as(prompt, limits.clone(), asked, *now_us));
        }
        Call::SetRetention { request, ranges } => drop(scheduler.set_retention(RequestId(*request), ranges.clone())),
        Call::Abort { request } => {
            scheduler.abort(RequestId(*request));
        }
        Call::EndSequence { request } => {
            scheduler.end_sequence(RequestId(*request));
        }
        Call::Finish { request } => {
            scheduler.finish(RequestId(*request));
        }
        Call::Fork { request, limits, now_us } => {
            drop(scheduler.fork(RequestId(*request), limits.clone(), *now_us));
        }
        Call::Truncate { request, num_tokens } => {
            drop(scheduler.truncate(RequestId(*request), *num_tokens as usize));
        }
        Call::ResetPrefixCache => {
            scheduler.reset_prefix_cache();
        }
        Call::Pin { tokens, identity } => {
            let prompt = scheduler.prompt(tokens.clone(), identity.clone())?;
            drop(scheduler.pin(&prompt));
        }
        Call::Unpin { pin } => drop(scheduler.unpin(*pin)),
        Call::SetWeightsVersion { version } => drop(scheduler.set_weights_version(version)),
        Call::Propose { rows, starts, tokens } => drop(scheduler.propose(rows, starts, tokens)),
        Call::Plan { now_us } => {
            let (staging, tables) = &mut memories[(scheduler.steps() % 2) as usize];
            drop(scheduler.plan(*now_us, PlanMemory { staging, tables }));
        }
        Call::Commit { step, tokens, starts, now_us } => {
            drop(scheduler.commit(StepId(*step), tokens, starts, *now_us, &mut Committed::default()));
        }
        Call::Fail { step } => drop(scheduler.fail(StepId(*step))),
    }
    Ok(())
}
