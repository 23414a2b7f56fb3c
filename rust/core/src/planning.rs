//! Makes a plan: running requests first, highest rank first, then waiting ones.
//!
//! A running request that decodes gets its one token; a prefill gets what the budget leaves after one token for each decode behind it.
//! There are never more rows than tokens in the budget, so every decode moves in every step, and so does the first prefill.

use std::hint::black_box;

use crate::beside;
use crate::decodes::READ_AHEAD;
use crate::error::{Error, Result};
use crate::events::Content;
use crate::flight::Entry;
use crate::mutant::{self, Mutant};
use crate::plan::{PlanMemory, Sizes, TableShape};
use crate::preemption::Growth;
use crate::reason::Reason;
use crate::request::{End, Place, Request};
use crate::row_arrays::RowArrays;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Chooses the next step and writes it to `memory`, which must be the one that the last plan did not use. What an error leaves there means
    /// nothing.
    ///
    /// # Errors
    /// [`Error::StepInFlight`] if `overlap_depth` plans were made since the oldest step in flight, it included; [`Error::Stalled`] if runnable work cannot move although nothing is in flight. A request for which a step
    /// of its admission or growth is refused is left as it was, for the next plan; that refusal is the error if the plan has nothing else.
    pub fn plan(&mut self, now_us: u64, memory: PlanMemory<'_>) -> Result<Sizes> {
        let number = self.steps + 1;
        if let Some(step) = self.flight.oldest()
            && number - step.0 >= u64::from(self.config.overlap_depth)
        {
            return Err(Error::StepInFlight { step });
        }
        let shape = TableShape::new(&self.config);
        // This memory has not seen what the last plan changed.
        self.draft.apply_to_tables(shape, memory.tables);
        self.draft.clear();
        self.flight.begin(number);
        self.timelines.tell_time(now_us);
        self.frontier.clear();
        self.idle_sharers.clear();
        self.refused = None;
        let rows = &mut RowArrays::new(&self.layout, memory.staging, self.config.max_num_batched_tokens as usize);
        let ended_before = self.ended.len();
        let wasted_before = self.counters.wasted_rows_sum;
        let preemptions_before = self.counters.preemptions;
        self.expire(now_us);
        self.end_doomed();
        self.follow_cache();
        self.drain.begin(now_us);
        if self.groups.has_window() {
            self.leave_out_of_sight();
        }
        self.pay_debts();
        self.displace();
        let made_room = self.counters.preemptions > preemptions_before;
        std::mem::swap(&mut self.takers, &mut self.crossing);
        self.crossing.clear();
        self.begin_blocks();
        self.plan_running(rows);
        let has_preempted = self.counters.preemptions > preemptions_before;
        if made_room && self.refused.is_none() {
            self.admit_into_room(rows, now_us);
        }
        if (!has_preempted || mutant::is_on(Mutant::AdmitAfterPreempt)) && self.refused.is_none() {
            self.into_room = self.take_room();
            self.plan_waiting(rows, now_us);
        } else if let Some(first) = self.waiting.first() {
            let reason = if has_preempted { Reason::AfterPreemption {} } else { Reason::StepRefused {} };
            self.note_wait(first, reason);
        }
        self.plan_drafts(rows);
        let freed = has_preempted || self.ended.len() > ended_before || self.end_deadlock() || self.end_securing();
        if let Err(error) = self.check_progress(freed) {
            self.counters.wasted_rows_sum = wasted_before;
            return Err(error);
        }
        self.tell_forks();
        self.charge_step();
        self.drain.end(now_us, self.waiting.len() > 0);
        self.clear_up();
        self.steps += 1;
        let sizes = rows.sizes(self.steps);
        if !self.take_off(&sizes) && !mutant::is_on(Mutant::RowsOfNoStepWasted) {
            // Nobody waits for rows in a step that there is not.
            self.counters.wasted_rows_sum = wasted_before;
        }
        let room = self.layout.ended.len() / 2;
        let told = self.ended.len().min(room);
        self.draft.ended.extend(self.ended.drain(..told));
        self.ended_with_row = 0;
        self.draft.apply_to_tables(shape, memory.tables);
        Ok(self.draft.write(sizes, &self.layout, memory.staging))
    }

    /// Adds `chunk` rows of the request at `seat` to the plan. Its table has blocks for them.
    /// `shared`: table entries that were pending when they were hit.
    pub(crate) fn schedule(
        &mut self,
        arrays: &mut RowArrays<'_>,
        seat: usize,
        chunk: usize,
        shared: std::ops::Range<usize>,
    ) {
        let size = self.block_size;
        let request = self.seats[seat].as_mut().expect("a seat in use");
        let Place::Running(row) = request.place else { unreachable!("only running requests are scheduled") };
        let (start, end) = (request.next(), request.next() + chunk);
        let (token, source) = request.next_token();
        let samples = end == request.num_tokens_to_come();
        // With a token on its way, the step in flight brings theirs too.
        let siblings = if samples && source < 0 { request.siblings } else { 0 };
        let rows = arrays.more(1, chunk, usize::from(samples) + siblings as usize);
        let tokens = rows.first_token + chunk;
        rows.seq_slots[0] = row.index() as i32;
        rows.seq_lens[0] = end as i32;
        rows.query_ends[0] = tokens as i32;
        rows.sample_rows.fill(tokens as i32 - 1);
        if mutant::is_on(Mutant::SiblingsOfOtherRow) && siblings > 0 {
            rows.sample_rows[1] = 0;
        }
        rows.sample_requests.iter_mut().zip(request.id().0..).for_each(|(to, id)| *to = id as i64);
        let sample = samples.then_some(rows.first_sample);
        if chunk == 1 && samples {
            (rows.token_ids[0], rows.token_sources[0]) = (token as i32, source);
        } else {
            request.settle();
            let known = &request.tokens()[start..end];
            rows.token_ids.iter_mut().zip(known).for_each(|(to, &token)| *to = token as i32);
            rows.token_sources.fill(-1);
        }
        arrays.put(request, start..end, size);
        let step = self.steps + 1;
        let flight = self.flight.of_mut(step);
        let entry = flight.entries.len();
        request.fly(step, entry, chunk, sample);
        self.counters.wasted_rows_sum += (self.groups.len() * (request.table.len() * size.tokens() - end)) as u64;
        let (copied, partial) = (std::mem::take(&mut self.copied), std::mem::take(&mut self.partial_rows));
        flight.entries.push(Entry::new(seat, request.epoch, start, chunk, samples));
        if samples && chunk == 1 && siblings == 0 && self.groups.len() == 1 {
            request.foresee(start, size);
        }
        if copied || !shared.is_empty() || siblings > 0 {
            let rare = flight.rare_mut(entry);
            (rare.copied, rare.partial, rare.shared) = (copied, partial, shared);
            rare.siblings = siblings;
        }
        if !self.config.enable_prefix_caching {
            return;
        }
        if source >= 0 && chunk == 1 && !mutant::is_on(Mutant::KeyBeforeToken) {
            // The commit that brings the token names the block that it completes.
            if size.offset(end) == 0 {
                request.watch();
            }
            return;
        }
        self.name_completed(seat, start, end);
    }

    /// Names the blocks that decodes have filled since this was called last. Whoever looks at names calls it before.
    pub(crate) fn name_filled(&mut self) {
        let mut filled = std::mem::take(&mut self.filled);
        filled.chunks(READ_AHEAD).for_each(|seats| self.name_blocks_of(seats));
        filled.clear();
        self.filled = filled;
    }

    /// Names the blocks that these decodes have filled: what it takes of all of them is read first.
    fn name_blocks_of(&mut self, filled: &[usize]) {
        let entries = &self.flight.of(self.steps + 1).entries;
        let glance =
            |request: &Request| request.glance() ^ entries.get(request.entry as usize).map_or(0, Entry::glance);
        black_box(filled.iter().fold(0, |seen, &seat| seen ^ glance(self.request(seat))));
        for &seat in filled {
            let request = self.seats[seat].as_mut().expect("a seat in use");
            if !request.is_mixed && !mutant::is_on(Mutant::KeyBeforeToken) {
                request.extend_keys(&mut self.hasher, request.next());
            }
        }
        let name = |&seat: &usize| {
            let request = self.request(seat);
            let at = self.block_size.full_blocks(request.next()) - 1;
            request.keys.get(at).map(|key| (request.foreseen_block(), key))
        };
        self.pool.read_to_name(filled.iter().filter_map(name));
        let is_told = self.pool.has_ledger() || self.config.event_buffer_size > 0;
        let is_bare = self.groups.len() == 1 && !is_told && !mutant::is_on(Mutant::PublishAtPlan);
        for &seat in filled {
            let (request, end) = (self.request(seat), self.request(seat).next());
            if mutant::is_on(Mutant::KeyBeforeToken) {
                self.name_completed(seat, end - 1, end);
            } else if !request.is_mixed {
                let full = self.block_size.full_blocks(end);
                if is_bare { self.name_block(seat, full - 1) } else { self.name_blocks(seat, full - 1..full) }
            }
        }
    }

    /// The same as [`Scheduler::name_blocks`] for block `number` of a decode that has filled it, of which nothing but its name is kept.
    fn name_block(&mut self, seat: usize, number: usize) {
        let request = self.seats[seat].as_ref().expect("a seat in use");
        let mut block = request.foreseen_block();
        if mutant::is_on(Mutant::NameOfBlockBefore) {
            block = request.table.blocks()[number.saturating_sub(1)];
        }
        self.pool.make_pending(block, request.keys[number]).expect("a block of this pool");
        let (step, entry) = (request.planned_in, request.entry as usize);
        let flight = self.flight.of_mut(step);
        let at = flight.pending.len();
        flight.pending.push(block);
        flight.fill(entry, at..at + 1);
    }

    /// Makes the keys of the blocks that rows `start..end` complete, and notes the block that comes next.
    pub(crate) fn name_completed(&mut self, seat: usize, start: usize, end: usize) {
        let size = self.block_size;
        let request = self.seats[seat].as_mut().expect("a seat in use");
        let (begun, mut full) = (size.full_blocks(start), size.full_blocks(end));
        if full == begun && end == request.num_tokens() && !mutant::is_on(Mutant::PublishPartial) {
            return;
        }
        if request.is_mixed {
            return;
        }
        request.settle();
        let next = full;
        if request.keys.len() < full && full * size.tokens() > request.num_tokens() {
            // Only with the fault that names a block before its last token is known.
            request.guess_key(&mut self.hasher, full * size.tokens());
        }
        if request.keys.len() < full {
            request.extend_keys(&mut self.hasher, full * size.tokens());
        }
        if mutant::is_on(Mutant::PublishPartial) {
            full = size.blocks_for(end).min(request.keys.len());
        }
        self.name_blocks(seat, begun..full);
        let request = self.seats[seat].as_ref().expect("a seat in use");
        if let Some(&next) = request.keys.get(next) {
            self.frontier.insert_unique(next.short(), next, |key| key.short());
        }
    }

    /// The token that has just come for the request at `seat` may complete the key of the block that the step in flight fills.
    pub(crate) fn name_late(&mut self, seat: usize) {
        let size = self.block_size;
        let request = self.seats[seat].as_mut().expect("a seat in use");
        let end = request.next();
        let is_due = request.in_flight().0 > 0 && end == request.num_tokens() && size.offset(end) == 0;
        if !is_due || !self.config.enable_prefix_caching || request.is_mixed || mutant::is_on(Mutant::KeyBeforeToken) {
            return;
        }
        request.extend_keys(&mut self.hasher, end);
        let full = size.full_blocks(end);
        self.name_blocks(seat, full - 1..full);
    }

    /// Blocks `numbers` of the request at `seat` are filled by the last step that runs it: their keys, which are made, are pending.
    pub(crate) fn name_blocks(&mut self, seat: usize, numbers: std::ops::Range<usize>) {
        let size = self.block_size;
        let request = self.seats[seat].as_ref().expect("a seat in use");
        let (step, entry) = (request.planned_in, request.entry as usize);
        let first = self.flight.of(step).pending.len();
        for at in numbers {
            let request = self.seats[seat].as_ref().expect("a seat in use");
            for group in 0..self.groups.len() {
                let (block, key) = (request.table_of(group).blocks()[at], request.keys[at].in_group(group));
                if self.pool.has_ledger() {
                    beside::enter(&mut self.pool, size, block, at, request);
                }
                self.pool.make_pending(block, key).expect("a block of this pool");
                if self.config.event_buffer_size > 0
                    && let Some(tokens) = request.tokens().get(size.tokens() * at..size.tokens() * (at + 1))
                {
                    let parent = at.checked_sub(1).map(|before| request.keys[before].in_group(group));
                    self.pool.describe(block, key, Content { parent, tokens, group: group as u8 });
                }
                self.flight.of_mut(step).pending.push(block);
            }
            self.remember_block(seat, at);
            if mutant::is_on(Mutant::PublishAtPlan) {
                for table in self.seats[seat].as_ref().expect("a seat in use").tables() {
                    self.pool.publish(table.blocks()[at]).expect("a block of this pool");
                }
            }
        }
        let flight = self.flight.of_mut(step);
        if flight.pending.len() > first {
            flight.fill(entry, first..flight.pending.len());
        }
    }

    fn plan_running(&mut self, rows: &mut RowArrays<'_>) {
        let mut decodes_behind = None;
        let mut at = 0;
        loop {
            // Behind the last one only under a planted fault.
            let first = at.min(self.running.len());
            at = self.schedule_decodes(first, rows);
            decodes_behind = decodes_behind.map(|behind: usize| behind - (at - first));
            let Some(&seat) = self.running.get(at) else {
                self.name_filled();
                return;
            };
            let chunk = self.chunk_at(at, rows.budget, &mut decodes_behind);
            if chunk == 0 {
                let budget = self.config.max_num_batched_tokens;
                self.note_wait(seat, self.drafts_in_flight(seat).unwrap_or(Reason::NoBudget { budget }));
                self.count_idle_rows(seat);
                at += 1;
                continue;
            }
            if self.request(seat).looks_again() {
                self.name_filled();
                if let Some(used) = self.look_again(rows, seat, chunk) {
                    if used == 0 {
                        self.count_idle_rows(seat);
                    }
                    rows.budget -= used;
                    at += 1;
                    continue;
                }
            }
            match self.grow(at, self.request(seat).next() + chunk) {
                Growth::Fits if self.foresees(seat) => {
                    // It decodes in a block of its own from here on, and is counted there.
                    decodes_behind = decodes_behind.map(|behind| behind + 1);
                }
                Growth::Fits => {
                    self.name_filled();
                    if self.request(seat).drafts.is_empty() || !self.put_off(seat) {
                        self.schedule(rows, seat, chunk, 0..0);
                    }
                    rows.budget -= chunk;
                    // Victims rank below, so positions up to here stay; but for one planted fault.
                    at = if mutant::is_on(Mutant::PreemptEqual) { self.rank_in_running(seat) } else { at };
                    at += 1;
                }
                Growth::OverQuota
                    if self.flight.oldest().is_none()
                        && self.tenants.of(self.asks[seat].tenant).held == self.request(seat).account.held =>
                {
                    self.stop_running(seat);
                    self.end(seat, End::Capacity);
                }
                Growth::NoVictim { .. }
                    if at == 0
                        && (self.made_room_for.is_none() || mutant::is_on(Mutant::RoomEndsHighest))
                        && self.flight.oldest().is_none()
                        && (self.running.len() == 1 || !self.config.queue.no_evict && !self.secures_somebody())
                        && !mutant::leaves_lone_requests() =>
                {
                    self.stop_running(seat);
                    self.end(seat, End::Capacity);
                }
                Growth::NoVictim { .. } if mutant::is_on(Mutant::PreemptSelf) => self.preempt(seat),
                Growth::OverQuota => {
                    self.note_quota(seat);
                    self.count_idle_rows(seat);
                    at += 1;
                }
                Growth::NoVictim { needed } => {
                    self.note_no_victim(seat, needed);
                    self.count_idle_rows(seat);
                    at += 1;
                }
                Growth::Refused(error) => {
                    self.note_refusal(error);
                    self.note_wait(seat, Reason::StepRefused {});
                    self.count_idle_rows(seat);
                    at += 1;
                }
            }
        }
    }

    /// Whether the next row of a running request, which has its block, can be planned as [`Scheduler::schedule_decodes`] does it.
    fn foresees(&mut self, seat: usize) -> bool {
        let (size, copied) = (self.block_size, self.copied);
        let request = self.seats[seat].as_mut().expect("a seat in use");
        let has_others = self.groups.len() > 1;
        if copied || has_others || !request.is_decoding() || !request.drafts.is_empty() || request.siblings > 0 {
            return false;
        }
        request.foresee(request.next(), size);
        request.next_row(size).is_some()
    }

    /// Tokens for the running request at position `at`, of `budget` that are left. `decodes_behind` is counted at the first prefill
    /// and kept for the next ones; victims among them are not taken off, so a rare prefill gets fewer tokens than it might.
    fn chunk_at(&self, at: usize, budget: usize, decodes_behind: &mut Option<usize>) -> usize {
        let request = self.request(self.running[at]);
        if request.is_decoding() {
            *decodes_behind = decodes_behind.map(|behind| behind - 1);
            return budget.min(1);
        }
        let decoding = |&&seat: &&usize| self.request(seat).is_decoding();
        let behind = *decodes_behind.get_or_insert_with(|| self.running[at + 1..].iter().filter(decoding).count());
        let reserved = if mutant::is_on(Mutant::NoBudgetForDecodes) { 0 } else { behind };
        let chunk = request.remaining().min(budget.saturating_sub(reserved));
        match self.config.long_prefill_threshold {
            0 => chunk,
            threshold => chunk.min(threshold as usize),
        }
    }

    /// Counts the empty rows of a running request that this step passes over.
    fn count_idle_rows(&mut self, seat: usize) {
        let request = self.seats[seat].as_ref().expect("a seat in use");
        if request.asks_to_write {
            self.idle_sharers.push(seat);
            return;
        }
        let empty = request.table.len() * self.block_size.tokens() - request.next();
        self.counters.wasted_rows_sum += (self.groups.len() * empty) as u64;
    }

    /// The plan goes on without who was refused.
    pub(crate) fn note_refusal(&mut self, error: Error) {
        self.refused.get_or_insert(error);
    }

    /// A8: with live requests a plan runs something, frees something or ends something.
    fn check_progress(&mut self, freed: bool) -> Result<()> {
        let first = self.running.first().copied().or_else(|| self.waiting.first());
        self.idle_with_work = self.flight.oldest().is_none() && !freed && first.is_some();
        if self.idle_with_work
            && let Some(error) = self.refused.take()
        {
            self.idle_with_work = false;
            // What left the sight of a request must be told.
            return if self.draft.dirty.is_empty() { Err(error) } else { Ok(()) };
        }
        let Some(seat) = first.filter(|_| self.idle_with_work && !mutant::is_on(Mutant::StallSilently)) else {
            return Ok(());
        };
        Err(Error::Stalled(Box::new(self.stall_of(seat))))
    }

    /// The plan is made: it is in flight if there is anything to run; whether there is.
    fn take_off(&mut self, sizes: &Sizes) -> bool {
        let flight = self.flight.of_mut(self.steps);
        if flight.entries.is_empty() {
            return false;
        }
        flight.samples = sizes.samples;
        self.count_idle_sharers();
        let held = u64::from(self.pool.num_held());
        self.counters.steps += 1;
        self.counters.scheduled_tokens += sizes.tokens as u64;
        self.counters.taken_rows_sum += held * u64::from(self.config.block_size);
        self.counters.peak_blocks = self.counters.peak_blocks.max(held);
        true
    }
}
