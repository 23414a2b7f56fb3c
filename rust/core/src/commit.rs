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
use crate::speculation::Given;

/// What a commit changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// (request id, end code) of the requests that it ended.
    pub ended: Vec<[i64; 2]>,
    /// Tokens that were appended.
    pub accepted: usize,
    /// Samples whose token was dropped: their request has ended, or went back because what it shared was withdrawn, or the draft before
    /// them was wrong. Requests that have not ended live on and will be sampled again.
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
        self.check_samples(self.flight.of(step.0).samples, tokens, starts)?;
        committed.ended.clear();
        committed.dropped.clear();
        committed.accepted = 0;
        let step = step.0;
        self.flight.land(step);
        self.pool.tell_time(now_us);
        self.timelines.tell_time(now_us);
        self.pool.end_leases(step);
        self.pool.read_to_publish(&self.flight.of(step).pending);
        let entries = self.flight.of(step).entries.len();
        // Up to the sample `whole`, from the next one on, each has its token. Nearly always all have.
        let (mut at, mut sample, mut whole) = (0, 0, 0);
        while at < entries {
            let first = starts[sample] as usize;
            if sample >= whole {
                whole = sample + num_whole(&tokens[first..], &starts[sample..]);
            }
            let (count, end) = self.commit_decodes(step, at, &tokens[first..][..whole - sample]);
            committed.accepted += count;
            (at, sample) = (at + count, sample + count);
            if let Some((seat, end)) = end {
                self.commit_end(seat, end, committed);
                continue;
            }
            let (here, Some(&entry)) = (at, self.flight.of(step).entries.get(at)) else { break };
            at += 1;
            let mut token = None;
            if entry.samples() {
                token = tokens[starts[sample] as usize..starts[sample + 1] as usize].first().copied();
                sample += 1;
            }
            let rare = self.flight.of(step).rare(&entry);
            let more = rare.drafts.len() + rare.siblings as usize;
            if more > 0 {
                let given = Given { tokens, starts: &starts[sample - 1..=sample + more], first: sample - 1 };
                if rare.siblings > 0 {
                    self.commit_family(step, here, &given, now_us, committed);
                } else {
                    self.commit_run(step, here, &given, now_us, committed);
                }
                sample += more;
                continue;
            }
            if self.is_stale(&entry) {
                if token.is_some() {
                    committed.dropped.push(sample as i32 - 1);
                }
                continue;
            }
            self.confirm(step, here, entry.chunk() - usize::from(entry.samples() && token.is_none()));
            if let Some(token) = token {
                committed.accepted += 1;
                self.accept(entry.seat(), token as TokenId, now_us, committed);
            }
        }
        self.flight.of_mut(step).clear();
        Ok(())
    }

    /// The model failed: step `step` counts for nothing, nor does what a plan made since brings for its requests. They go on from
    /// what was confirmed before.
    ///
    /// # Errors
    /// [`Error::WrongStep`].
    pub fn fail(&mut self, step: StepId) -> Result<()> {
        self.check_step(step)?;
        let step = step.0;
        self.flight.land(step);
        self.counters.failed_steps += 1;
        self.pool.end_leases(step);
        for at in 0..self.flight.of(step).entries.len() {
            let entry = self.flight.of(step).entries[at];
            if self.is_stale(&entry) {
                continue;
            }
            if mutant::is_on(Mutant::NoRollbackOnFail) {
                let request = self.request_mut(entry.seat());
                request.set_computed(request.computed() + entry.chunk() - usize::from(entry.samples()));
            }
            self.counters.failed_tokens += entry.chunk() as u64;
            self.note(entry.seat(), Reason::StepFailed { tokens: entry.chunk() as u32 });
            if mutant::is_on(Mutant::FailLeavesNext) && step + 1 == self.request(entry.seat()).planned_in {
                self.withdraw(step, at, false);
                self.request_mut(entry.seat()).land(entry.chunk(), 0, entry.samples());
                continue;
            }
            self.lose_flight(step, entry.seat());
        }
        self.flight.of_mut(step).clear();
        Ok(())
    }

    /// The request at `seat`, which steps in flight run, is about to leave: whoever shares what it was writing goes back.
    pub(crate) fn withdraw_writer(&mut self, seat: usize) {
        for step in self.flight.since(self.oldest_flight()) {
            if let Some(at) = self.live_entry(step, seat) {
                self.withdraw(step, at, mutant::is_on(Mutant::KeepPendingOnAbort));
            }
        }
    }

    /// Whether what its step brings for this entry no longer counts.
    pub(crate) fn is_stale(&self, entry: &Entry) -> bool {
        let Some(request) = self.seats[entry.seat()].as_ref() else { return true };
        if mutant::is_on(Mutant::ApplyStaleResult) {
            return !request.has_epoch_of(entry.epoch);
        }
        request.epoch != entry.epoch
    }

    /// The entry of step `step` for the request at `seat`, if it counts.
    pub(crate) fn live_entry(&self, step: u64, seat: usize) -> Option<usize> {
        self.flight.of(step).entries.iter().position(|entry| entry.seat() == seat && !self.is_stale(entry))
    }

    fn oldest_flight(&self) -> u64 {
        self.flight.oldest().map_or(u64::MAX, |step| step.0)
    }

    /// What step `first`, which ended in this call, and those in flight behind it bring for the request at `seat` does not count. Nobody
    /// relies on it, nor on rows that they were to copy.
    fn lose_flight(&mut self, first: u64, seat: usize) {
        let mut lookahead = None;
        for step in self.flight.since(first) {
            let Some(at) = self.live_entry(step, seat) else { continue };
            let flight = self.flight.of(step);
            let (entry, rare) = (flight.entries[at], flight.rare(&flight.entries[at]));
            if rare.copied && !mutant::is_on(Mutant::FailedCopyCounts) {
                self.lose_copy(&entry, rare.partial);
            }
            if !rare.drafts.is_empty() {
                lookahead = Some((entry.start() + 1, rare.lent));
            }
            self.withdraw(step, at, mutant::is_on(Mutant::KeepPendingOnFail));
        }
        let request = self.request_mut(seat);
        request.forget_flight();
        // It may have been forked at the row to which it goes back.
        request.asks_to_write = true;
        if let Some((rows, lent)) = lookahead {
            self.give_back(seat, rows, lent);
        }
    }

    /// Takes the pending keys of entry `at` of step `step` away and puts everybody who shares one back to the blocks that were published
    /// when it was admitted. Sharers come behind their writers, so one walk finds sharers of sharers too.
    fn withdraw(&mut self, step: u64, at: usize, publish_instead: bool) {
        let flight = self.flight.of(step);
        for pending in flight.rare(&flight.entries[at]).pending {
            let block = self.flight.of(step).pending[pending];
            if publish_instead {
                self.pool.publish(block).expect("a block of this pool");
            } else {
                self.pool.withdraw(block).expect("a block of this pool");
            }
        }
        self.put_back_sharers(step, at + 1);
    }

    fn put_back_sharers(&mut self, first: u64, from: usize) {
        if mutant::is_on(Mutant::SharerNotReset) {
            return;
        }
        for step in self.flight.since(first) {
            for at in if step == first { from } else { 0 }..self.flight.of(step).entries.len() {
                let entry = self.flight.of(step).entries[at];
                let shared = self.flight.of(step).rare(&entry).shared;
                if shared.is_empty() || self.is_stale(&entry) {
                    continue;
                }
                let lost =
                    |&block: &BlockId| block != BlockId::NULL && self.pool.index().state(block) == KeyState::Unnamed;
                let tables = self.request(entry.seat()).tables();
                let is_lost = tables.flat_map(|table| &table.blocks()[shared.clone()]).any(lost);
                if is_lost {
                    self.put_back(step, entry.seat(), shared.start);
                }
            }
        }
    }

    /// Cuts a sharer's tables back to the `kept` hits that were published, or to nothing if a window needs more than they name, and drops
    /// what step `first` and those behind it bring for it.
    fn put_back(&mut self, first: u64, seat: usize, kept: usize) {
        for step in self.flight.since(first) {
            let Some(at) = self.live_entry(step, seat) else { continue };
            let flight = self.flight.of(step);
            for pending in flight.rare(&flight.entries[at]).pending {
                self.pool.withdraw(self.flight.of(step).pending[pending]).expect("a block of this pool");
            }
        }
        let size = self.block_size;
        let kept = self.length_in_sight(seat, kept);
        let kept = if mutant::is_on(Mutant::PutBackToStart) { 0 } else { kept };
        let request = self.seats[seat].as_mut().expect("a seat in use");
        let lost = request.computed() - kept * size.tokens();
        request.set_computed(kept * size.tokens());
        request.published = kept;
        request.forget_flight();
        request.look_again();
        if request.num_outputs() == 0 && request.preemptions == 0 {
            // These tokens will be computed after all.
            request.cached = Some(kept * size.tokens());
            self.counters.prefix_hits -= lost as u64;
        }
        self.counters.put_back_tokens += lost as u64;
        self.timelines.note(seat, request.id(), self.steps, Reason::PutBack { tokens: lost as u32 });
        let rest = request.cut(kept);
        let planned_in = request.planned_in;
        let when = self.when_free(planned_in, rest.blocks());
        self.pool.release(rest, when);
        self.owes = true;
        self.recount(seat);
    }

    /// The first `kept` rows of entry `at` of step `step` are computed. Without the token that was due, its last row is not: it is planned
    /// again, and what a later step brings for it does not count.
    pub(crate) fn confirm(&mut self, step: u64, at: usize, kept: usize) {
        let size = self.block_size;
        let flight = self.flight.of(step);
        let (entry, all_pending) = (flight.entries[at], flight.rare(&flight.entries[at]).pending);
        let is_missing = kept < entry.chunk();
        let request = self.seats[entry.seat()].as_mut().expect("a seat in use");
        request.land(entry.chunk(), kept + usize::from(mutant::is_on(Mutant::CountOneTooMany)), entry.samples());
        let end = entry.start() + kept;
        let is_ahead = request.in_flight().0 > 0;
        let mut withdrawn = false;
        if !all_pending.is_empty() {
            let begun = size.full_blocks(entry.start());
            for pending in all_pending.clone() {
                let block = self.flight.of(step).pending[pending];
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
        }
        if withdrawn {
            self.put_back_sharers(step, at + 1);
        }
        if is_missing && is_ahead {
            self.lose_flight(step + 1, entry.seat());
        }
    }

    pub(crate) fn accept(&mut self, seat: usize, token: TokenId, now_us: u64, committed: &mut Committed) {
        let end = self.append(seat, token, now_us);
        if mutant::is_on(Mutant::WastedTokenShown) && self.request(seat).in_flight().0 > 0 && end == Some(End::Stop) {
            return;
        }
        match end {
            Some(end) => self.commit_end(seat, end, committed),
            None => self.name_late(seat),
        }
    }

    /// The request at `seat` has one output more; the end that it brings.
    pub(crate) fn append(&mut self, seat: usize, token: TokenId, now_us: u64) -> Option<End> {
        let request = self.seats[seat].as_mut().expect("a seat in use");
        if request.num_outputs() == 0 {
            let took_us = now_us.saturating_sub(request.submitted_us);
            self.counters.first_token_us_sum = self.counters.first_token_us_sum.saturating_add(took_us);
            self.timelines.note(seat, request.id(), self.steps, Reason::FirstToken {});
        }
        request.push(token)
    }

    pub(crate) fn commit_end(&mut self, seat: usize, end: End, committed: &mut Committed) {
        committed.ended.push([self.request(seat).id().0 as i64, end as i64]);
        if self.request(seat).in_flight().0 > 0 {
            self.withdraw_writer(seat);
        }
        self.stop_running(seat);
        self.end(seat, end);
    }

    fn check_step(&self, given: StepId) -> Result<()> {
        let expected = self.flight.oldest();
        if expected == Some(given) {
            return Ok(());
        }
        Err(Error::WrongStep { given, expected })
    }

    fn check_samples(&self, samples: usize, tokens: &[i64], starts: &[i64]) -> Result<()> {
        let invalid =
            |field, value: i64, bound: String| Err(Error::InvalidInput { field, value: i128::from(value), bound });
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
        let counts = || starts.iter().zip(&starts[1..]).map(|(start, end)| end.wrapping_sub(*start));
        if !are_up_to(1, counts()) {
            let at = counts().position(|count| !(0..=1).contains(&count)).unwrap_or_default();
            let bound = format!("each sample gets 0 or 1 tokens: must be {0} or {0} + 1", starts[at]);
            return invalid("starts", starts[at + 1], bound);
        }
        if starts[samples] != tokens.len() as i64 {
            return invalid("token_ids", tokens.len() as i64, format!("starts end at {}", starts[samples]));
        }
        let last = i64::from(self.config.vocab_size) - 1;
        if !are_up_to(last, tokens.iter().copied()) {
            let id = tokens.iter().copied().find(|id| !(0..=last).contains(id)).unwrap_or_default();
            return invalid("token_ids", id, format!("must be 0..={last} for this vocabulary"));
        }
        Ok(())
    }
}

/// How many samples from the first on have their token. There are 0 or 1 tokens for each.
fn num_whole(tokens: &[i64], starts: &[i64]) -> usize {
    if tokens.len() + 1 == starts.len() {
        return tokens.len();
    }
    starts.windows(2).take_while(|pair| pair[0] < pair[1]).count()
}

/// Whether all numbers are `0..=most`: neither they nor what is left to `most` is negative. Looks at all, many at a time.
fn are_up_to(most: i64, numbers: impl Iterator<Item = i64>) -> bool {
    numbers.fold(0, |signs, number| signs | number | most.wrapping_sub(number)) >= 0
}
