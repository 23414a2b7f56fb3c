//! Ends a step: its rows are confirmed and its tokens appended, or all of it is undone.
//!
//! Before: the model ran, or failed. After: requests that reached their end have left; blocks whose last row was confirmed are
//! published. Results of a request that has ended or was put back since the plan are dropped: its epoch differs.

use crate::error::{Error, Result};
use crate::flight::Entry;
use crate::ids::{BlockId, StepId, TokenId};
use crate::mutant::{self, Mutant};
use crate::prefix_index::KeyState;
use crate::reason::Reason;
use crate::request::End;
use crate::scheduler::Scheduler;

/// What a commit changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// (request id, end code) of the requests that it ended.
    pub ended: Vec<[i64; 2]>,
    /// Tokens that were appended.
    pub accepted: usize,
    /// Samples whose token was dropped: their request has ended, or went back because what it shared was withdrawn. They live on
    /// if they have not ended, and will be sampled again.
    pub dropped: Vec<i32>,
}

impl Scheduler {
    /// Brings the tokens of step `step`: sample `i` of its plan gets `tokens[starts[i]..starts[i + 1]]`, none or one.
    /// A sample that gets none is planned again. `committed` is cleared and filled.
    ///
    /// # Errors
    /// [`Error::WrongStep`]; [`Error::InvalidInput`] for counts, bounds and ids out of range. Nothing changes then.
    pub fn commit(
        &mut self,
        step: StepId,
        tokens: &[i64],
        starts: &[i64],
        now_us: u64,
        committed: &mut Committed,
    ) -> Result<()> {
        self.check_step(step)?;
        self.check_samples(tokens, starts)?;
        committed.ended.clear();
        committed.dropped.clear();
        committed.accepted = 0;
        self.flight.land();
        self.pool.tell_time(now_us);
        self.timelines.tell_time(now_us);
        self.pool.end_leases();
        let mut sample = 0;
        for at in 0..self.flight.entries.len() {
            let entry = self.flight.entries[at];
            if entry.samples && entry.is_ordinary() {
                let token = &tokens[starts[sample] as usize..starts[sample + 1] as usize];
                if let &[token] = token
                    && let Some(end) = self.commit_ordinary(&entry, token as TokenId)
                {
                    sample += 1;
                    committed.accepted += 1;
                    if let Some(end) = end {
                        self.commit_end(entry.seat(), end, committed);
                    }
                    continue;
                }
            }
            let mut token = None;
            if entry.samples {
                token = tokens[starts[sample] as usize..starts[sample + 1] as usize].first().copied();
                sample += 1;
            }
            if self.is_stale(&entry) {
                if token.is_some() {
                    committed.dropped.push(sample as i32 - 1);
                }
                continue;
            }
            self.confirm(at, &entry, token.is_some());
            if let Some(token) = token {
                committed.accepted += 1;
                self.accept(entry.seat(), token as TokenId, now_us, committed);
            }
        }
        Ok(())
    }

    /// The model failed: step `step` counts for nothing. Its requests go on from what was confirmed before.
    ///
    /// # Errors
    /// [`Error::WrongStep`].
    pub fn fail(&mut self, step: StepId) -> Result<()> {
        self.check_step(step)?;
        self.flight.land();
        self.counters.failed_steps += 1;
        self.pool.end_leases();
        for at in 0..self.flight.entries.len() {
            let entry = self.flight.entries[at];
            if self.is_stale(&entry) {
                continue;
            }
            if self.flight.rare(&entry).copied && !mutant::is_on(Mutant::FailedCopyCounts) {
                self.lose_copy(&entry);
            }
            if mutant::is_on(Mutant::NoRollbackOnFail) {
                self.request_mut(entry.seat()).computed += entry.chunk() - usize::from(entry.samples);
            }
            self.note(entry.seat(), Reason::StepFailed { tokens: entry.chunk() as u32 });
            self.withdraw(at, mutant::is_on(Mutant::KeepPendingOnFail));
        }
        Ok(())
    }

    /// The request at `seat`, which the step in flight runs, is about to leave: whoever shares what it was writing goes back.
    pub(crate) fn withdraw_writer(&mut self, seat: usize) {
        let found = (0..self.flight.entries.len()).find(|&at| self.flight.entries[at].seat() == seat);
        let at = found.expect("the step in flight runs it");
        if !self.is_stale(&self.flight.entries[at]) {
            self.withdraw(at, mutant::is_on(Mutant::KeepPendingOnAbort));
        }
    }

    /// Whether what the step in flight brings for this entry no longer counts.
    pub(crate) fn is_stale(&self, entry: &Entry) -> bool {
        let Some(request) = self.seats[entry.seat()].as_ref() else { return true };
        if mutant::is_on(Mutant::ApplyStaleResult) {
            return request.planned_in != self.steps;
        }
        request.epoch != entry.epoch
    }

    /// Takes the pending keys of entry `at` away and puts everybody who shares one back to the blocks that were published when it
    /// was admitted. Sharers come behind their writers, so one walk finds sharers of sharers too.
    fn withdraw(&mut self, at: usize, publish_instead: bool) {
        for pending in self.flight.rare(&self.flight.entries[at]).pending {
            let block = self.flight.pending[pending];
            if publish_instead {
                self.pool.publish(block).expect("a block of this pool");
            } else {
                self.pool.withdraw(block).expect("a block of this pool");
            }
        }
        self.put_back_sharers(at + 1);
    }

    fn put_back_sharers(&mut self, from: usize) {
        if mutant::is_on(Mutant::SharerNotReset) {
            return;
        }
        for at in from..self.flight.entries.len() {
            let entry = self.flight.entries[at];
            let shared = self.flight.rare(&entry).shared;
            if shared.is_empty() || self.is_stale(&entry) {
                continue;
            }
            let lost = |&block: &BlockId| block != BlockId::NULL && self.pool.index().state(block) == KeyState::Unnamed;
            let tables = self.request(entry.seat()).tables();
            let is_lost = tables.flat_map(|table| &table.blocks()[shared.clone()]).any(lost);
            if is_lost {
                self.put_back(&entry);
            }
        }
    }

    /// Cuts a sharer's tables back to the hits that were published, or to nothing if a window needs more than they name, and drops
    /// what the step in flight brings for it.
    fn put_back(&mut self, entry: &Entry) {
        let rare = self.flight.rare(entry);
        for pending in rare.pending {
            self.pool.withdraw(self.flight.pending[pending]).expect("a block of this pool");
        }
        let size = self.block_size;
        let kept = self.length_in_sight(entry.seat(), rare.shared.start);
        let kept = if mutant::is_on(Mutant::PutBackToStart) { 0 } else { kept };
        let request = self.seats[entry.seat()].as_mut().expect("a seat in use");
        let lost = request.computed - kept * size.tokens();
        request.computed = kept * size.tokens();
        request.published = kept;
        request.epoch += 1;
        if request.num_outputs() == 0 && request.preemptions == 0 {
            // These tokens will be computed after all.
            request.cached = Some(kept * size.tokens());
            self.counters.prefix_hits -= lost as u64;
        }
        self.timelines.note(entry.seat(), request.id, self.steps, Reason::PutBack { tokens: lost as u32 });
        let rest = request.cut(kept);
        let in_flight = self.flight.runs(request.planned_in);
        let when = self.when_free(in_flight, rest.blocks());
        self.pool.release(rest, when);
    }

    /// The rows of entry `at` are computed. Without the token that was due, its last row is not: it is planned again.
    fn confirm(&mut self, at: usize, entry: &Entry, has_token: bool) {
        let size = self.block_size;
        let kept = if entry.samples && !has_token { entry.chunk() - 1 } else { entry.chunk() };
        let request = self.seats[entry.seat()].as_mut().expect("a seat in use");
        request.computed += kept + usize::from(mutant::is_on(Mutant::CountOneTooMany));
        let end = entry.start() + kept;
        let mut withdrawn = false;
        let all_pending = self.flight.rare(entry).pending;
        if all_pending.is_empty() {
            return;
        }
        let begun = size.full_blocks(entry.start());
        for pending in all_pending.clone() {
            let block = self.flight.pending[pending];
            let number = begun + (pending - all_pending.start) / self.groups.len();
            if (number + 1) * size.tokens() <= end || mutant::is_on(Mutant::PublishPartial) {
                self.pool.publish(block).expect("a block of this pool");
                self.request_mut(entry.seat()).published = number + 1;
            } else {
                self.pool.withdraw(block).expect("a block of this pool");
                withdrawn = true;
            }
        }
        let published = self.request(entry.seat()).published;
        self.note_published(entry.seat(), begun..published.max(begun));
        if withdrawn {
            self.put_back_sharers(at + 1);
        }
    }

    fn accept(&mut self, seat: usize, token: TokenId, now_us: u64, committed: &mut Committed) {
        let request = self.seats[seat].as_mut().expect("a seat in use");
        if request.num_outputs() == 0 {
            let took_us = now_us.saturating_sub(request.submitted_us);
            self.counters.first_token_us_sum = self.counters.first_token_us_sum.saturating_add(took_us);
            self.timelines.note(seat, request.id, self.steps, Reason::FirstToken {});
        }
        let Some(end) = request.push(token) else { return };
        self.commit_end(seat, end, committed);
    }

    /// One row and one token of a decode that completes no block, from the request's own lines; the end that it brings. `None` if it
    /// takes more than that.
    #[inline]
    fn commit_ordinary(&mut self, entry: &Entry, token: TokenId) -> Option<Option<End>> {
        let request = self.seats[entry.seat()].as_mut()?;
        if request.epoch != entry.epoch || request.is_watched() {
            return None;
        }
        request.computed += entry.chunk() + usize::from(mutant::is_on(Mutant::CountOneTooMany));
        Some(request.push(token))
    }

    fn commit_end(&mut self, seat: usize, end: End, committed: &mut Committed) {
        committed.ended.push([self.request(seat).id.0 as i64, end as i64]);
        self.stop_running(seat);
        self.end(seat, end);
    }

    fn check_step(&self, given: StepId) -> Result<()> {
        if self.flight.step == Some(given) {
            return Ok(());
        }
        Err(Error::WrongStep { given, expected: self.flight.step })
    }

    fn check_samples(&self, tokens: &[i64], starts: &[i64]) -> Result<()> {
        let invalid =
            |field, value: i64, bound: String| Err(Error::InvalidInput { field, value: i128::from(value), bound });
        let samples = self.draft.sample_rows.len();
        if starts.len() != samples + 1 {
            return invalid(
                "starts",
                starts.len() as i64,
                format!("this step has {samples} samples, so {} starts", samples + 1),
            );
        }
        if starts[0] != 0 {
            return invalid("starts", starts[0], "must begin with 0".to_owned());
        }
        if let Some(pair) = starts.windows(2).find(|pair| !(0..=1).contains(&pair[1].wrapping_sub(pair[0]))) {
            return invalid(
                "starts",
                pair[1],
                format!("each sample gets 0 or 1 tokens: must be {0} or {0} + 1", pair[0]),
            );
        }
        if starts[samples] != tokens.len() as i64 {
            return invalid("token_ids", tokens.len() as i64, format!("starts end at {}", starts[samples]));
        }
        let vocab = i64::from(self.config.vocab_size);
        if let Some(&id) = tokens.iter().find(|&&id| !(0..vocab).contains(&id)) {
            return invalid("token_ids", id, format!("must be 0..={} for this vocabulary", vocab - 1));
        }
        Ok(())
    }
}
