//! A scheduler whose every call can be recorded: nothing reaches it but through here.
//!
//! Before: the border, or a test, calls. After: the call was made, and, if somebody records, it stands in the recording with what
//! came of it. To look at, it is the [`Scheduler`]; to change it there are only the methods below, so a call that is not
//! recorded does not compile. Without a recording a call costs one comparison more.
//!
//! There are two ways to record, both from the very start of the scheduler. *To a writer*: all of it. *In a ring*: the last so many
//! bytes, for a report of what happened before a fault; as long as nothing was dropped from it, it can be replayed like the first.

use std::collections::VecDeque;
use std::io::Write;
use std::ops::Deref;

use crate::commit::Committed;
use crate::config::Config;
use crate::digest::{Digest, of_committed, of_plan};
use crate::error::{Error, Result};
use crate::ids::{RequestId, StepId};
use crate::mutant::{self, Mutant};
use crate::pins::Pinned;
use crate::plan::{PlanMemory, Sizes};
use crate::prompt::Prompt;
use crate::rank::Asked;
use crate::recording::{self, Check, FRAME, NEVER_RETURNED};
use crate::recording_calls as calls;
use crate::request::Limits;
use crate::retention::Ranges;
use crate::scheduler::Scheduler;

/// A scheduler, and what is recorded of it.
pub struct Recorded {
    scheduler: Scheduler,
    /// Something was called that changes it.
    is_used: bool,
    recorder: Option<Box<Recorder>>,
}

impl Deref for Recorded {
    type Target = Scheduler;

    fn deref(&self) -> &Scheduler {
        &self.scheduler
    }
}

/// Where records go.
enum Sink {
    Writer {
        out: Box<dyn Write + Send>,
        failed: Option<String>,
    },
    Ring {
        bytes: VecDeque<u8>,
        most: usize,
        /// Records that were dropped, and the checksum of the last of them.
        dropped: u64,
        before: Check,
    },
}

struct Recorder {
    config: Config,
    sink: Sink,
    check: Check,
    records: u64,
    /// The record under way, its outcome still missing. Kept for its memory.
    body: Vec<u8>,
    frame: Vec<u8>,
    digests: Vec<u32>,
    /// What came of the last call.
    outcome: u64,
}

impl Recorder {
    /// Completes the record under way.
    fn end(&mut self, outcome: u64) {
        let Recorder { body, frame, digests, check, .. } = self;
        calls::put_outcome(body, outcome, digests);
        frame.clear();
        *check = recording::frame(frame, *check, |out| out.extend_from_slice(body));
        body.clear();
        self.records += 1;
        self.outcome = outcome;
        match &mut self.sink {
            Sink::Writer { out, failed } => {
                if failed.is_none()
                    && let Err(error) = out.write_all(frame)
                {
                    *failed = Some(error.to_string());
                }
            }
            Sink::Ring { bytes, most, dropped, before } => {
                while !bytes.is_empty() && bytes.len() + frame.len() > *most {
                    let len = std::array::from_fn(|at| bytes[at]);
                    let end = u32::from_le_bytes(len) as usize + FRAME;
                    *before = std::array::from_fn(|at| bytes[end - 8 + at]);
                    bytes.drain(..end);
                    *dropped += 1;
                }
                if frame.len() <= *most {
                    bytes.extend(&*frame);
                } else {
                    *before = *check;
                    *dropped += 1;
                }
            }
        }
    }

    /// All that is kept, as one recording; nothing for a writer, which has it.
    fn kept(&self) -> Option<Vec<u8>> {
        let Sink::Ring { bytes, dropped, before, .. } = &self.sink else { return None };
        let mut out = Vec::with_capacity(bytes.len() + 1024);
        recording::begin(&mut out, &self.config, (*dropped > 0).then_some((1 + dropped, *before)));
        let (front, back) = bytes.as_slices();
        out.extend_from_slice(front);
        out.extend_from_slice(back);
        if !self.body.is_empty() {
            // A call panicked.
            let write = |out: &mut Vec<u8>| {
                out.extend_from_slice(&self.body);
                calls::put_outcome(out, NEVER_RETURNED, &[]);
            };
            recording::frame(&mut out, self.check, write);
        }
        Some(out)
    }
}

/// What a call returned, as one number.
fn outcome<T>(result: &Result<T>, value: impl FnOnce(&T) -> u64) -> u64 {
    match result {
        Ok(returned) => value(returned) << 1,
        Err(error) => Digest::of(format!("{error:?}").as_bytes()) << 1 | 1,
    }
}

impl Recorded {
    /// A scheduler of which nothing is recorded yet.
    ///
    /// # Errors
    /// As [`Scheduler::new`].
    pub fn new(config: Config) -> Result<Self> {
        Ok(Recorded { scheduler: Scheduler::new(config)?, is_used: false, recorder: None })
    }

    /// Records everything from now on to `out`.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if something was called already: a replay begins at the start.
    pub fn record_to(&mut self, out: Box<dyn Write + Send>) -> Result<()> {
        self.start(Sink::Writer { out, failed: None })
    }

    /// Keeps the last `most` bytes of everything from now on.
    ///
    /// # Errors
    /// As [`Recorded::record_to`]; [`Error::InvalidInput`] for more memory than there is.
    pub fn record_in_ring(&mut self, most: usize) -> Result<()> {
        // All of it now: a step that is recorded allocates nothing.
        let mut bytes = VecDeque::new();
        if bytes.try_reserve_exact(most).is_err() {
            let bound = "must be bytes of memory that can be had".to_owned();
            return Err(Error::InvalidInput { field: "num_bytes", value: most as i128, bound });
        }
        self.start(Sink::Ring { bytes, most, dropped: 0, before: [0; 8] })
    }

    fn start(&mut self, mut sink: Sink) -> Result<()> {
        if self.is_used {
            let bound = "must start before anything is submitted or planned: a replay begins at the start";
            let value = i128::from(self.scheduler.steps());
            return Err(Error::InvalidInput { field: "recording", value, bound: bound.to_owned() });
        }
        let config = self.scheduler.config().clone();
        let mut frame = Vec::new();
        let check = recording::begin(&mut frame, &config, None);
        if let Sink::Writer { out, failed } = &mut sink
            && let Err(error) = out.write_all(&frame)
        {
            *failed = Some(error.to_string());
        }
        let (body, digests) = (Vec::new(), Vec::new());
        let recorder = Recorder { config, sink, check, records: 0, body, frame, digests, outcome: 0 };
        self.recorder = Some(Box::new(recorder));
        Ok(())
    }

    /// Ends the recording: how many calls it has, and why its writer failed, if it did; none if nothing was recorded.
    pub fn stop_recording(&mut self) -> Option<(u64, Option<String>)> {
        let mut recorder = self.recorder.take()?;
        let failed = match &mut recorder.sink {
            Sink::Ring { .. } => None,
            Sink::Writer { out, failed } => failed.take().or(out.flush().err().map(|error| error.to_string())),
        };
        Some((recorder.records, failed))
    }

    /// Hands what the writer has buffered on.
    pub fn flush_recording(&mut self) {
        if let Some(recorder) = &mut self.recorder
            && let Sink::Writer { out, failed } = &mut recorder.sink
            && let Err(error) = out.flush()
        {
            failed.get_or_insert(error.to_string());
        }
    }

    /// What the ring holds, as a recording; none without a ring.
    #[must_use]
    pub fn recorded(&self) -> Option<Vec<u8>> {
        self.recorder.as_ref().and_then(|recorder| recorder.kept())
    }

    /// Begins a record, if somebody records.
    fn begin(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.is_used = true;
        if let Some(recorder) = &mut self.recorder {
            recorder.digests.clear();
            write(&mut recorder.body);
        }
    }

    /// Completes it.
    fn end(&mut self, outcome: impl FnOnce() -> u64) {
        if let Some(recorder) = &mut self.recorder {
            recorder.end(outcome());
        }
    }

    /// [`Scheduler::submit`].
    ///
    /// # Errors
    /// As that.
    pub fn submit(&mut self, prompt: Prompt, limits: Limits, now_us: u64) -> Result<RequestId> {
        self.submit_as(prompt, limits, Asked::default(), now_us)
    }

    /// [`Scheduler::submit_as`].
    ///
    /// # Errors
    /// As that.
    pub fn submit_as(&mut self, prompt: Prompt, limits: Limits, asked: Asked<'_>, now_us: u64) -> Result<RequestId> {
        self.begin(|out| calls::put_submit(out, &prompt.tokens, &prompt.identity(), &limits, &asked, now_us));
        let result = self.scheduler.submit_as(prompt, limits, asked, now_us);
        self.end(|| outcome(&result, |id| id.0));
        result
    }

    /// [`Scheduler::set_retention`].
    ///
    /// # Errors
    /// As that.
    pub fn set_retention(&mut self, id: RequestId, ranges: Ranges) -> Result<()> {
        self.begin(|out| calls::put_retention(out, id.0, &ranges));
        let result = self.scheduler.set_retention(id, ranges);
        self.end(|| outcome(&result, |()| 0));
        result
    }

    /// [`Scheduler::abort`].
    pub fn abort(&mut self, id: RequestId) -> bool {
        if mutant::is_on(Mutant::RecorderForgetsAbort) {
            return self.scheduler.abort(id);
        }
        self.begin(|out| calls::put_numbers(out, 3, &[id.0]));
        let did_end = self.scheduler.abort(id);
        self.end(|| u64::from(did_end) << 1);
        did_end
    }

    /// [`Scheduler::end_sequence`].
    pub fn end_sequence(&mut self, id: RequestId) -> bool {
        self.begin(|out| calls::put_numbers(out, 15, &[id.0]));
        let did_end = self.scheduler.end_sequence(id);
        self.end(|| u64::from(did_end) << 1);
        did_end
    }

    /// [`Scheduler::finish`].
    pub fn finish(&mut self, id: RequestId) -> bool {
        self.begin(|out| calls::put_numbers(out, 4, &[id.0]));
        let did_end = self.scheduler.finish(id);
        self.end(|| u64::from(did_end) << 1);
        did_end
    }

    /// [`Scheduler::fork`].
    ///
    /// # Errors
    /// As that.
    pub fn fork(&mut self, parent: RequestId, limits: Limits, now_us: u64) -> Result<RequestId> {
        self.begin(|out| calls::put_fork(out, parent.0, &limits, now_us));
        let result = self.scheduler.fork(parent, limits, now_us);
        self.end(|| outcome(&result, |id| id.0));
        result
    }

    /// [`Scheduler::truncate`].
    ///
    /// # Errors
    /// As that.
    pub fn truncate(&mut self, id: RequestId, num_tokens: usize) -> Result<()> {
        self.begin(|out| calls::put_numbers(out, 6, &[id.0, num_tokens as u64]));
        let result = self.scheduler.truncate(id, num_tokens);
        self.end(|| outcome(&result, |()| 0));
        result
    }

    /// [`Scheduler::reset_prefix_cache`].
    pub fn reset_prefix_cache(&mut self) -> u32 {
        self.begin(|out| calls::put_numbers(out, 7, &[]));
        let forgotten = self.scheduler.reset_prefix_cache();
        self.end(|| u64::from(forgotten) << 1);
        forgotten
    }

    /// [`Scheduler::pin`].
    ///
    /// # Errors
    /// As that.
    pub fn pin(&mut self, prompt: &Prompt) -> Result<Pinned> {
        self.begin(|out| calls::put_pin(out, &prompt.tokens, &prompt.identity()));
        let result = self.scheduler.pin(prompt);
        self.end(|| outcome(&result, |pinned| Digest::of(format!("{pinned:?}").as_bytes())));
        result
    }

    /// [`Scheduler::unpin`].
    ///
    /// # Errors
    /// As that.
    pub fn unpin(&mut self, id: u64) -> Result<()> {
        self.begin(|out| calls::put_numbers(out, 9, &[id]));
        let result = self.scheduler.unpin(id);
        self.end(|| outcome(&result, |()| 0));
        result
    }

    /// [`Scheduler::set_weights_version`].
    ///
    /// # Errors
    /// As that.
    pub fn set_weights_version(&mut self, version: &[u8]) -> Result<usize> {
        self.begin(|out| calls::put_weights(out, version));
        let result = self.scheduler.set_weights_version(version);
        self.end(|| outcome(&result, |&mixed| mixed as u64));
        result
    }

    /// [`Scheduler::propose`].
    ///
    /// # Errors
    /// As that.
    pub fn propose(&mut self, rows: &[i64], starts: &[i64], tokens: &[i64]) -> Result<()> {
        self.begin(|out| calls::put_propose(out, rows, starts, tokens));
        let result = self.scheduler.propose(rows, starts, tokens);
        self.end(|| outcome(&result, |()| 0));
        result
    }

    /// [`Scheduler::plan`].
    ///
    /// # Errors
    /// As that.
    pub fn plan(&mut self, now_us: u64, memory: PlanMemory<'_>) -> Result<Sizes> {
        self.begin(|out| calls::put_numbers(out, 11, &[now_us]));
        let PlanMemory { staging, tables } = memory;
        let result = self.scheduler.plan(now_us, PlanMemory { staging: &mut *staging, tables });
        if let Some(recorder) = &mut self.recorder
            && let Ok(sizes) = &result
        {
            of_plan(&self.scheduler, sizes, staging, &mut recorder.digests);
        }
        self.end(|| outcome(&result, |sizes| sizes.step));
        result
    }

    /// [`Scheduler::commit`].
    ///
    /// # Errors
    /// As that.
    pub fn commit(
        &mut self,
        step: StepId,
        tokens: &[i64],
        starts: &[i64],
        now_us: u64,
        committed: &mut Committed,
    ) -> Result<()> {
        self.begin(|out| calls::put_commit(out, step.0, tokens, starts, now_us));
        let result = self.scheduler.commit(step, tokens, starts, now_us, committed);
        self.end(|| outcome(&result, |()| of_committed(committed)));
        result
    }

    /// [`Scheduler::fail`].
    ///
    /// # Errors
    /// As that.
    pub fn fail(&mut self, step: StepId) -> Result<()> {
        self.begin(|out| calls::put_numbers(out, 13, &[step.0]));
        let result = self.scheduler.fail(step);
        self.end(|| outcome(&result, |()| 0));
        result
    }

    /// [`Scheduler::listen_to_notes`], which changes nothing that a plan depends on.
    pub fn listen_to_notes(&mut self, capacity: usize) {
        self.scheduler.listen_to_notes(capacity);
    }

    /// [`Scheduler::take_notes`].
    pub fn take_notes(&mut self, lines: &mut String) -> Option<u64> {
        self.scheduler.take_notes(lines)
    }

    /// The outcome and the digests of the call that was made last, of a scheduler that records.
    pub(crate) fn last(&self) -> (u64, &[u32]) {
        self.recorder.as_ref().map_or((0, &[]), |recorder| (recorder.outcome, &recorder.digests))
    }
}
