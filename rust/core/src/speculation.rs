//! Draft tokens: guesses of what a sequence says next, computed with its newest token in one step, and verified by what that step samples.
//!
//! Before: [`propose`](Scheduler::propose), between two plans. After: a plan gave the sequence one row more for each draft, as far as blocks
//! and tokens were left when everybody else had theirs; its commit kept the drafts that are what the samples before them say.
//! Always: drafts never preempt anybody nor delay an admission, so they take their blocks last, and growth waits for a step in flight that
//! holds blocks for drafts rather than preempt for them. A request's tokens and confirmed rows never count a draft, and no key names
//! one. When a step has ended, a sequence has the blocks that it would have without drafts: those behind go back at once, so a draft
//! that was wrong leaves nothing behind but rows that are written again before anybody sees them (I44 to I47).

use crate::commit::Committed;
use crate::error::{Error, Result};
use crate::flight::Entry;
use crate::ids::TokenId;
use crate::mutant::{self, Mutant};
use crate::reason::{Reason, saturated};
use crate::refusal::Granted;
use crate::request::Place;
use crate::row_arrays::RowArrays;
use crate::scheduler::Scheduler;

/// What a commit was given for one sequence: none or one token for each of its samples.
pub(crate) struct Given<'a> {
    /// Of the whole step.
    pub tokens: &'a [i64],
    /// Where those of each sample begin, and where the last ones end.
    pub starts: &'a [i64],
    /// Number of its first sample.
    pub first: usize,
}

impl Given<'_> {
    pub fn len(&self) -> usize {
        self.starts.len() - 1
    }

    pub fn token(&self, sample: usize) -> Option<TokenId> {
        let given = &self.tokens[self.starts[sample] as usize..self.starts[sample + 1] as usize];
        given.first().map(|&token| token as TokenId)
    }
}

impl Scheduler {
    /// Says what sequences may say next: row `rows[i]` of the block tables gets the drafts `tokens[starts[i]..starts[i + 1]]`, which follow
    /// its last token, known or on its way. They count for the next plan alone and only if the sequence decodes then; a plan takes as
    /// many of them as there is room for. Drafts that were proposed before for the same plan are replaced.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for rows that nobody has or that stand there twice, more than `max_draft_tokens` for one, and counts or ids
    /// out of range. Nothing changes then.
    pub fn propose(&mut self, rows: &[i64], starts: &[i64], tokens: &[i64]) -> Result<()> {
        self.check_drafts(starts, rows.len(), tokens)?;
        let seats = self.seats_of_rows(rows)?;
        for (&seat, ends) in seats.iter().zip(starts.windows(2)) {
            let drafts = &tokens[ends[0] as usize..ends[1] as usize];
            let request = self.request_mut(seat);
            request.drafts.clear();
            request.drafts.extend(drafts.iter().map(|&token| token as TokenId));
            request.look_closer();
        }
        self.proposed.extend(seats);
        Ok(())
    }

    fn check_drafts(&self, starts: &[i64], rows: usize, tokens: &[i64]) -> Result<()> {
        let invalid =
            |field, value: i64, bound: String| Err(Error::InvalidInput { field, value: i128::from(value), bound });
        if starts.len() != rows + 1 {
            return invalid("starts", starts.len() as i64, format!("{rows} rows need {} starts", rows + 1));
        }
        if starts[0] != 0 {
            return invalid("starts", starts[0], "must begin with 0".to_owned());
        }
        let most = i64::from(self.config.max_draft_tokens);
        if let Some(pair) = starts.windows(2).find(|pair| !(0..=most).contains(&pair[1].wrapping_sub(pair[0]))) {
            let bound = format!("must be {0} and up to max_draft_tokens, {most}, more", pair[0]);
            return invalid("starts", pair[1], bound);
        }
        if starts[rows] != tokens.len() as i64 {
            return invalid("token_ids", tokens.len() as i64, format!("starts end at {}", starts[rows]));
        }
        let vocab = i64::from(self.config.vocab_size);
        if let Some(&id) = tokens.iter().find(|&&id| !(0..vocab).contains(&id)) {
            return invalid("token_ids", id, format!("must be 0..={} for this vocabulary", vocab - 1));
        }
        Ok(())
    }

    /// Who has these rows.
    fn seats_of_rows(&self, rows: &[i64]) -> Result<Vec<usize>> {
        let mut by_row = vec![None; self.config.rows() as usize];
        for &seat in &self.running {
            if let Place::Running(row) = self.request(seat).place {
                by_row[row.index()] = Some(seat);
            }
        }
        let mut seat_of = |&row: &i64| {
            let seat = usize::try_from(row).ok().and_then(|at| by_row.get_mut(at)).and_then(Option::take);
            let bound = "must be rows of running sequences, each once".to_owned();
            seat.ok_or(Error::InvalidInput { field: "seq_slots", value: i128::from(row), bound })
        };
        rows.iter().map(&mut seat_of).collect()
    }

    /// The request at `seat`, which has drafts, has a block for its next row: if it decodes, it is planned behind all others, with them.
    pub(crate) fn put_off(&mut self, seat: usize) -> bool {
        let request = self.request(seat);
        let decodes = request.is_decoding() && request.siblings == 0;
        if decodes {
            self.drafting.push((seat, std::mem::take(&mut self.copied)));
        }
        decodes
    }

    /// Plans those that were put off, highest rank first, each with as many of its drafts as there is room for. The budget is what all
    /// others and their own newest tokens leave.
    pub(crate) fn plan_drafts(&mut self, rows: &mut RowArrays<'_>) {
        let mut drafting = std::mem::take(&mut self.drafting);
        for (seat, copied) in drafting.drain(..) {
            if mutant::is_on(Mutant::DraftsPreempt) {
                let end = self.request(seat).next() + 1 + self.request(seat).drafts.len();
                self.grow(self.rank_in_running(seat), end);
            }
            let count = self.room_for_drafts(seat, rows.budget);
            self.copied = copied;
            if count == 0 {
                self.schedule(rows, seat, 1, 0..0);
                continue;
            }
            let lent = self.take_for_drafts(seat, count);
            self.schedule_run(rows, seat, count, lent);
            rows.budget -= count;
        }
        self.drafting = drafting;
        for seat in self.proposed.drain(..) {
            if let Some(request) = self.seats[seat].as_mut() {
                request.drafts.clear();
            }
        }
    }

    /// How many drafts of the request at `seat` can be planned with `budget` tokens: behind its next row, for which it has a block, in
    /// blocks that it was promised or that are promised to nobody; and no row behind the last that it may ever have.
    fn room_for_drafts(&self, seat: usize, budget: usize) -> usize {
        let request = self.request(seat);
        let groups = self.groups.len();
        let mut most = request.drafts.len().min(budget).min(self.config.max_chunk() - 1);
        if !mutant::is_on(Mutant::DraftsPastLimit) {
            // The last of its tokens has no row, and every draft brings one token more.
            most = most.min(request.tokens_left().saturating_sub(1));
        }
        let unpromised = self.pool.num_free().saturating_sub(self.promised);
        let spare = request.promised + unpromised.min(self.room_of_tenant(&self.asks[seat]));
        let rows = (request.table.len() + spare as usize / groups) * self.block_size.tokens();
        most.min(rows - (request.next() + 1))
    }

    /// Blocks for `count` drafts of the request at `seat`; how many of them it had been promised.
    fn take_for_drafts(&mut self, seat: usize, count: usize) -> u32 {
        let request = self.request(seat);
        let (len, rows) = (request.table.len(), request.next() + 1 + count);
        let missing = self.block_size.blocks_for(rows).saturating_sub(len) as u32;
        if missing == 0 {
            return 0;
        }
        let all = missing * self.groups.len() as u32;
        let own = request.promised.min(all);
        let granted = Granted::begin();
        granted.take(all);
        self.take_blocks(seat, missing, own);
        self.note_change(seat, len);
        self.recount(seat);
        let step = self.steps + 1;
        self.flight.of_mut(step).lookahead += all;
        own
    }

    /// Adds the next row of the request at `seat` and `count` drafts to the plan: each of them brings a token, if all before it are right.
    fn schedule_run(&mut self, rows: &mut RowArrays<'_>, seat: usize, count: usize, lent: u32) {
        let size = self.block_size;
        let request = self.seats[seat].as_mut().expect("a seat in use");
        let Place::Running(row) = request.place else { unreachable!("only running requests are scheduled") };
        let (start, end) = (request.next(), request.next() + 1 + count);
        let (token, source) = request.next_token();
        let drafts = &request.drafts[..count];
        let plan = rows.more(1, 1 + count, 1 + count);
        let (tokens, sample) = (plan.first_token + 1 + count, plan.first_sample);
        plan.seq_slots[0] = row.index() as i32;
        plan.seq_lens[0] = end as i32;
        plan.query_ends[0] = tokens as i32;
        plan.token_ids[0] = token as i32;
        plan.token_ids[1..].iter_mut().zip(drafts).for_each(|(to, &token)| *to = token as i32);
        plan.token_sources[0] = source;
        plan.token_sources[1..].fill(-1);
        plan.sample_rows.iter_mut().zip(plan.first_token..).for_each(|(to, row)| *to = row as i32);
        plan.sample_requests.fill(request.id().0 as i64);
        rows.put(request, start..end, size);
        let step = self.steps + 1;
        let flight = self.flight.of_mut(step);
        let entry = flight.entries.len();
        flight.entries.push(Entry::new(seat, request.epoch, start, 1 + count, true));
        let first = flight.drafts.len();
        flight.drafts.extend_from_slice(drafts);
        let rare = flight.rare_mut(entry);
        (rare.drafts, rare.lent) = (first..first + count, lent);
        (rare.copied, rare.partial) = (std::mem::take(&mut self.copied), std::mem::take(&mut self.partial_rows));
        request.fly(step, entry, 1 + count, Some(sample));
        request.look_closer();
        self.counters.wasted_rows_sum += (self.groups.len() * (request.table.len() * size.tokens() - end)) as u64;
        self.counters.drafted_tokens += count as u64;
        if self.config.enable_prefix_caching && source < 0 {
            self.name_completed(seat, start, start + 1);
        }
    }

    /// Blocks that steps in flight hold for drafts, and will give back but for what turns out right.
    pub(crate) fn lookahead_in_flight(&self) -> u32 {
        if mutant::is_on(Mutant::LookaheadNotAwaited) { 0 } else { self.flight.lookahead() }
    }

    /// The reason why the request at `seat` cannot be planned, if the step in flight verifies drafts of it.
    pub(crate) fn drafts_in_flight(&self, seat: usize) -> Option<Reason> {
        let request = self.request(seat);
        if request.in_flight().0 == 0 {
            return None;
        }
        let flight = self.flight.of(request.planned_in);
        let drafts = flight.rare(&flight.entries[request.entry as usize]).drafts.len();
        (drafts > 0).then_some(Reason::DraftsInFlight { drafts: saturated(drafts as u64) })
    }

    /// Brings the tokens of entry `at` of step `step`, which has drafts. Counts up to the first draft that is not what the sample before it
    /// says, or to the end of the request; the rest is dropped, and its rows never were.
    pub(crate) fn commit_run(
        &mut self,
        step: u64,
        at: usize,
        given: &Given<'_>,
        now_us: u64,
        committed: &mut Committed,
    ) {
        let flight = self.flight.of(step);
        let (entry, rare) = (flight.entries[at], flight.rare(&flight.entries[at]));
        let (seat, mut kept, mut end) = (entry.seat(), 0, None);
        let is_stale = self.is_stale(&entry);
        let mut before = None;
        while !is_stale && kept < given.len() && (end.is_none() || mutant::is_on(Mutant::StopInsideRunMissed)) {
            let Some(token) = given.token(kept) else { break };
            let draft = kept.checked_sub(1).map(|at| self.flight.of(step).drafts[rare.drafts.start + at]);
            if draft != before && !mutant::is_on(Mutant::DraftNotCompared) {
                break;
            }
            end = self.append(seat, token, now_us);
            before = Some(token);
            kept += 1;
        }
        committed.accepted += kept;
        let dropped = (kept..given.len()).filter(|&sample| given.token(sample).is_some());
        committed.dropped.extend(dropped.map(|sample| (given.first + sample) as i32));
        if is_stale {
            return;
        }
        self.counters.accepted_drafts += kept.saturating_sub(1) as u64;
        if self.waiting.policy.charges() {
            self.waiting.policy.charge(self.asks[seat].tenant as usize, kept.saturating_sub(1) as u64);
        }
        let is_wrong = kept < entry.chunk() && kept > 0;
        self.confirm(step, at, kept + usize::from(mutant::is_on(Mutant::RollbackKeepsOne) && is_wrong));
        self.publish_run(seat, entry.start());
        self.give_back(seat, entry.start() + kept.max(1), rare.lent);
        if let Some(end) = end {
            self.commit_end(seat, end, committed);
        }
    }

    /// Publishes the blocks from row `start` on that the request at `seat` completed with drafts that were right.
    fn publish_run(&mut self, seat: usize, start: usize) {
        let size = self.block_size;
        let request = self.seats[seat].as_mut().expect("a seat in use");
        let begun = request.published.max(size.full_blocks(start));
        let mut full = size.full_blocks(request.computed());
        if mutant::is_on(Mutant::RejectedDraftPublished) {
            full = size.blocks_for(request.computed());
            request.guess_key(&mut self.hasher, full * size.tokens());
        }
        if begun >= full || !self.config.enable_prefix_caching || request.is_mixed {
            return;
        }
        if request.keys.len() < full {
            request.extend_keys(&mut self.hasher, full * size.tokens());
        }
        self.name_blocks(seat, begun..full);
        let request = self.seats[seat].as_mut().expect("a seat in use");
        for table in request.tables() {
            for &block in &table.blocks()[begun..full] {
                self.pool.publish(block).expect("a block of this pool");
            }
        }
        request.published = full;
        self.note_published(seat, begun..full);
    }

    /// The request at `seat` keeps blocks for `rows` rows. What it had been promised of the others, up to `lent`, is promised again.
    pub(crate) fn give_back(&mut self, seat: usize, rows: usize, lent: u32) {
        let kept = self.block_size.blocks_for(rows);
        let request = self.seats[seat].as_mut().expect("a seat in use");
        if kept >= request.table.len() || mutant::is_on(Mutant::LookaheadKept) {
            return;
        }
        let rest = request.cut(kept);
        let planned_in = request.planned_in;
        let when = self.when_free(planned_in, rest.blocks());
        let free = self.pool.num_free();
        let owed = lent.min(rest.len() as u32);
        self.pool.release(rest, when);
        let again = owed.min(self.pool.num_free() - free);
        self.request_mut(seat).promised += again;
        self.promised += again;
        self.owes |= again < owed;
        self.recount(seat);
    }
}
