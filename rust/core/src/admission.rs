//! Gives a waiting request a row, its prefix hits, its first blocks and a promise of the rest: all of it or nothing (design 3).
//!
//! The whole of what is known (prompt, and outputs of a preempted request) must fit beside what others were promised. Hits that
//! were free leave the queue, so they count as needed. Blocks are taken chunk by chunk. All that may be refused is asked first.

use crate::block_table::BlockTable;
use crate::error::{Error, Result};
use crate::ids::Key;
use crate::mutant::{self, Mutant};
use crate::partial_hit::PartialHit;
use crate::preemption::contains;
use crate::prefix_index::KeyState;
use crate::reason::Reason;
use crate::request::{End, Place};
use crate::scheduler::Scheduler;

/// Requests that are passed over in one plan because their prefix is in flight; those behind wait for the next plan.
const MAX_PASSED: usize = 64;

/// Requests that are found not to fit in one plan; those behind wait for the next plan.
const MAX_BLOCKED: usize = 16;

enum Admission {
    /// It runs, with so many tokens in this step.
    Admitted { chunk: usize },
    /// Another request computes its next block in this step: wait, holding nothing, and reuse it.
    PrefixInFlight,
    /// So many blocks are not free.
    Blocked { needed: u32 },
    /// Its tenant may not hold so many blocks.
    OverQuota,
    /// One of its steps was refused; nothing changed.
    Refused(Error),
}

impl Scheduler {
    /// Admits waiting requests, highest rank first, until rows, budget or blocks run out.
    pub(crate) fn plan_waiting(&mut self, budget: &mut usize, now_us: u64) {
        self.admit_up_to(usize::MAX, budget, now_us);
    }

    /// Looks at the first waiting request alone.
    pub(crate) fn plan_waiting_one(&mut self, budget: &mut usize, now_us: u64) {
        self.admit_up_to(1, budget, now_us);
    }

    fn admit_up_to(&mut self, mut left: usize, budget: &mut usize, now_us: u64) {
        let mut looked_at = 0;
        let mut yielding = None;
        let (mut do_yield, mut has_yielded) = (!mutant::is_on(Mutant::SoftQuotaIgnored), false);
        while left > 0 && *budget > 0 && !self.free_rows.is_empty() && looked_at < MAX_PASSED && self.may_pass() {
            let Some(first) = self.waiting.first() else {
                if do_yield && has_yielded && self.blocked.is_empty() && looked_at == 0 {
                    // Nobody else wants what is left.
                    do_yield = false;
                    self.waiting.allow();
                    continue;
                }
                break;
            };
            if do_yield && self.is_over_soft(first) && self.into_room != Some(first) {
                has_yielded = true;
                yielding = Some(first);
                self.waiting.skip(self.asks[first].tenant);
                continue;
            }
            let Some(seat) = self.waiting.next() else { break };
            left -= 1;
            match self.admit(seat, *budget, now_us) {
                Admission::Admitted { chunk } => {
                    self.drain.admit(self.asks[seat].backlog);
                    self.stop_waiting(seat);
                    self.charge_admission(seat);
                    *budget -= chunk;
                    self.note_passed(seat);
                }
                Admission::PrefixInFlight => {
                    self.note_wait(seat, Reason::PrefixInFlight { found: self.hit.len() as u32 });
                    looked_at += 1;
                }
                Admission::OverQuota if self.tenants.of(self.asks[seat].tenant).held == 0 => {
                    self.stop_waiting(seat);
                    self.end(seat, End::Capacity);
                }
                Admission::OverQuota => {
                    self.note_quota(seat);
                    self.waiting.skip(self.asks[seat].tenant);
                }
                Admission::Blocked { .. }
                    if self.running.is_empty() && self.pool.num_parked() == 0 && !mutant::leaves_lone_requests() =>
                {
                    self.stop_waiting(seat);
                    self.end(seat, End::Capacity);
                }
                Admission::Blocked { needed } => {
                    self.note_blocked(seat, needed);
                    self.blocked.push(seat);
                }
                Admission::Refused(error) => {
                    self.note_wait(seat, Reason::StepRefused {});
                    self.note_refusal(error);
                    break;
                }
            }
        }
        if let Some(first) = yielding.filter(|_| do_yield) {
            let tenant = self.tenants.of(self.asks[first].tenant);
            let (held, limit) = (tenant.held, tenant.rules.soft_blocks);
            self.note_wait(first, Reason::Yields { held, limit });
        }
        if !self.waiting.has_aside()
            && let Some(seat) = self.waiting.head()
        {
            let reason = if self.free_rows.is_empty() {
                Reason::NoRow { rows: self.config.rows() }
            } else {
                Reason::NoBudget { budget: self.config.max_num_batched_tokens }
            };
            self.note_wait(seat, reason);
        }
        self.blocked.clear();
        self.into_room = None;
        self.waiting.restore(&self.asks);
    }

    /// Whether those that do not fit may be passed by one more. None of them ever is more than `max_pass` times, so that the blocks
    /// that become free are theirs in the end.
    fn may_pass(&self) -> bool {
        let is_passed_enough = |&seat: &usize| self.asks[seat].passed >= self.config.queue.max_pass;
        let blocked = &self.blocked;
        blocked.len() < MAX_BLOCKED && (!blocked.iter().any(is_passed_enough) || mutant::is_on(Mutant::PassForEver))
    }

    /// The request that was looked at last waits no more.
    fn stop_waiting(&mut self, seat: usize) {
        self.waiting.admit(&self.asks[seat]);
        self.end_waiting(seat);
    }

    /// Notes that the tenant of the request at `seat` may hold no more.
    pub(crate) fn note_quota(&mut self, seat: usize) {
        let tenant = self.tenants.of(self.asks[seat].tenant);
        let (held, limit) = (tenant.held, tenant.rules.hard_blocks);
        self.note_wait(seat, Reason::OverQuota { held, limit });
    }

    /// Whether the tenant of the request at `seat` holds more than its soft quota.
    pub(crate) fn is_over_soft(&self, seat: usize) -> bool {
        let tenant = self.tenants.of(self.asks[seat].tenant);
        tenant.held > tenant.rules.soft_blocks
    }

    /// Rows for which an admission promises blocks: those of what is known, or with `no_evict` all that there may be.
    pub(crate) fn rows_to_promise(&self, seat: usize) -> usize {
        let request = self.request(seat);
        if !self.config.queue.no_evict || mutant::is_on(Mutant::PromiseOnlyKnown) {
            return request.num_tokens();
        }
        self.most_rows(request.prompt_len, &request.limits).max(request.num_tokens())
    }

    /// Blocks that must stay free beside those of the request at `seat`, if it is admitted: for those that run, and itself, to grow.
    fn reserve(&self, seat: usize) -> u32 {
        if self.running.is_empty() || self.into_room == Some(seat) || mutant::is_on(Mutant::NothingReserved) {
            return 0;
        }
        let mut reserve = u64::from(self.config.queue.watermark);
        if self.config.queue.estimate_growth && !self.config.queue.no_evict {
            let now = self.blocks_of(self.request(seat).num_tokens());
            reserve += self.outlook.expected + u64::from(self.expected_blocks(seat)).saturating_sub(now);
        }
        u32::try_from(reserve).unwrap_or(u32::MAX)
    }

    /// With `no_evict`: promises again what running requests lost when they had to go back, as far as it is free.
    pub(crate) fn pay_debts(&mut self) {
        if !self.config.queue.no_evict || !std::mem::take(&mut self.owes) {
            return;
        }
        for at in 0..self.running.len() {
            let seat = self.running[at];
            let wanted = self.rows_to_promise(seat);
            let request = self.request(seat);
            let need = self.groups.need(request.computed, request.table.len(), wanted) as u32;
            let missing = need.saturating_sub(request.promised);
            let more = missing.min(self.pool.num_free().saturating_sub(self.promised));
            self.owes |= more < missing;
            self.request_mut(seat).promised += more;
            self.promised += more;
            self.recount(seat);
        }
    }

    /// Charges the prompt of a request that was just admitted to its tenant, but for what was cached or charged before.
    fn charge_admission(&mut self, seat: usize) {
        if self.waiting.policy.charges() {
            let (computed, known) = (self.request(seat).computed, self.request(seat).num_tokens());
            self.charge_rows(seat, computed, known);
        }
    }

    /// Charges the outputs of the step that was just planned, and the rows behind what was charged at admission.
    pub(crate) fn charge_step(&mut self) {
        if !self.waiting.policy.charges() {
            return;
        }
        let step = self.steps + 1;
        for at in 0..self.flight.of(step).entries.len() {
            let entry = &self.flight.of(step).entries[at];
            let (seat, start, end, samples) =
                (entry.seat(), entry.start(), entry.start() + entry.chunk(), entry.samples);
            if samples {
                self.waiting.policy.charge(self.asks[seat].tenant as usize, 1);
            }
            self.charge_rows(seat, start, end);
        }
    }

    fn charge_rows(&mut self, seat: usize, start: usize, end: usize) {
        let ask = &mut self.asks[seat];
        let new = end.saturating_sub(start.max(ask.charged as usize));
        ask.charged = ask.charged.max(end as u32);
        if new > 0 {
            self.waiting.policy.charge(ask.tenant as usize, new as u64);
        }
    }

    fn admit(&mut self, seat: usize, budget: usize, now_us: u64) -> Admission {
        let size = self.block_size;
        let (known, prompt_len) = (self.request(seat).num_tokens(), self.request(seat).prompt_len);
        let unpromised = self.pool.num_free().saturating_sub(self.promised);
        let reserve = self.reserve(seat);
        if let Some(needed) = self.asks[seat].short_of.filter(|rest| rest.saturating_add(reserve) > unpromised)
            && !self.running.is_empty()
        {
            return Admission::Blocked { needed };
        }
        self.find_hits(seat);
        let hits = self.hit.len();
        let next = self.request(seat).keys.get(hits);
        let is_pending = |key: &Key| {
            self.config.queue.no_evict && matches!(self.pool.index().lookup(key), Some((_, KeyState::Pending)))
        };
        let is_awaited = |key: &Key| contains(&self.frontier, key) || is_pending(key);
        let awaited = hits < size.full_blocks(known - 1) && next.is_some_and(is_awaited);
        if awaited && !mutant::is_on(Mutant::NoPrefixWait) {
            return Admission::PrefixInFlight;
        }
        if mutant::is_on(Mutant::RecountQueriesOnRetry) {
            self.counters.prefix_queries += prompt_len as u64;
        }
        let mut start = hits * size.tokens();
        if mutant::is_on(Mutant::StaleHit) {
            let first = *self.request_mut(seat).first_hit.get_or_insert(hits);
            start = first.max(hits) * size.tokens();
        }
        let rest = self.groups.need(hits * size.tokens(), hits, self.rows_to_promise(seat)) as u32;
        let will_hold = rest + self.hit.blocks().count() as u32;
        if will_hold > self.room_of_tenant(&self.asks[seat]) && !mutant::is_on(Mutant::QuotaExceeded) {
            return Admission::OverQuota;
        }
        let free_hits = self.hit.blocks().filter(|&block| self.pool.takes_free(block)).count() as u32;
        let mut partial = self.find_partial(seat, hits);
        let promised = if mutant::is_on(Mutant::IgnorePromises) { 0 } else { self.promised };
        let free = self.pool.num_free().saturating_sub(promised).saturating_sub(reserve);
        if rest + free_hits > free {
            if mutant::is_on(Mutant::BlockedKeepsHits) {
                self.hold_hits(seat);
            }
            self.remember_short(seat, hits, rest);
            return Admission::Blocked { needed: rest + free_hits };
        }
        let takes_free_source = |hit: &PartialHit| self.pool.holders(hit.source) == 0 && self.pool.is_free(hit.source);
        let mut needed = rest + free_hits + u32::from(partial.as_ref().is_some_and(takes_free_source));
        if needed > free {
            // Only its source is missing.
            partial = None;
            needed = rest + free_hits;
        }
        if let Err(error) = self.ask_to_admit(partial, promised + needed) {
            if mutant::is_on(Mutant::RefusedKeepsPromise) {
                self.promised += rest;
            }
            return Admission::Refused(error);
        }
        start += partial.map_or(0, |hit| hit.rows);
        let mut chunk = (known - start).min(budget);
        if mutant::is_on(Mutant::BudgetBeforeHit) {
            chunk = known.min(budget).saturating_sub(start).max(1);
        }
        if self.config.long_prefill_threshold > 0 {
            chunk = chunk.min(self.config.long_prefill_threshold as usize);
        }
        if self.request(seat).cached.is_none() || mutant::is_on(Mutant::MissCountedAgain) {
            self.explain_hit(seat);
        }
        let expected = self.expected_blocks(seat);
        self.start_running(seat, start, now_us);
        self.hold_hits(seat);
        self.request_mut(seat).promised = rest;
        self.promised += rest;
        self.open_account(seat, expected);
        if let Some(hit) = partial {
            self.lease_source(hit);
        }
        let now = self.block_size.blocks_for(start + chunk).saturating_sub(self.request(seat).table.len()) as u32;
        if now > 0 {
            self.take_blocks(seat, now, (now * self.groups.len() as u32).min(rest));
        }
        if let Some(hit) = partial {
            self.copy_partial(seat, hits, hit);
        }
        self.note_change(seat, 0);
        if chunk > 0 {
            self.schedule(seat, chunk, self.hit.confirmed()..hits);
        }
        Admission::Admitted { chunk }
    }

    /// Asks for the hit that was found, the source of a partial one, `needed` free blocks and a row. Nothing changes. If all is granted,
    /// no step of the admission can fail.
    fn ask_to_admit(&self, partial: Option<PartialHit>, needed: u32) -> Result<()> {
        let source = partial.map(|hit| hit.source);
        self.hit.blocks().chain(source).try_for_each(|block| self.pool.may_share(block))?;
        self.pool.may_take(needed)?;
        self.may_have_row()
    }

    /// Finds the longest known prefix. The last token is always computed, so that there are logits to sample from.
    pub(crate) fn find_hits(&mut self, seat: usize) {
        let size = self.block_size;
        let request = self.seats[seat].as_ref().expect("a seat in use");
        let mut most = size.full_blocks(request.num_tokens() - 1);
        if mutant::is_on(Mutant::HitWholePrompt) {
            most = size.full_blocks(request.num_tokens());
        }
        let keys = &request.keys[..most.min(request.keys.len())];
        if self.config.queue.no_evict {
            // Who shares what is not confirmed may lose it, and was not promised blocks of its own.
            self.hit.find_published(self.pool.index(), &self.groups, keys);
        } else {
            self.hit.find(self.pool.index(), &self.groups, keys);
        }
        if let Some(at) = self.first_forged(seat) {
            self.counters.forged_hits += 1;
            let keys = &self.seats[seat].as_ref().expect("a seat in use").keys[..at];
            self.hit.find(self.pool.index(), &self.groups, keys);
        }
    }

    /// Makes room for all tokens, keys and blocks that a request can ever have: decoding allocates nothing.
    pub(crate) fn make_room(&mut self, seat: usize) {
        let (max_len, max_outputs) =
            (self.config.max_model_len as usize, self.request(seat).limits.max_tokens as usize);
        let longest = max_len.min(self.request(seat).prompt_len.saturating_add(max_outputs));
        let most_blocks = self.block_size.blocks_for(longest);
        let request = self.seats[seat].as_mut().expect("a seat in use");
        request.reserve_tokens(longest);
        let more = most_blocks.saturating_sub(request.keys.len());
        request.keys.reserve_exact(more);
        request.table.reserve(most_blocks);
        if request.others.len() + 1 < self.groups.len() {
            request.others = (1..self.groups.len()).map(|_| BlockTable::new()).collect();
        }
        request.others.iter_mut().for_each(|table| table.reserve(most_blocks));
        self.timelines.make_room(seat);
    }

    fn start_running(&mut self, seat: usize, start: usize, now_us: u64) {
        let mut row = self.free_rows.pop().expect("a free row");
        if mutant::is_on(Mutant::UnrecordedDecision) && mutant::unrecorded() % 2 == 1 && !self.free_rows.is_empty() {
            std::mem::swap(&mut row, &mut self.free_rows[0]);
        }
        self.make_room(seat);
        let request = self.seats[seat].as_mut().expect("a seat in use");
        request.place = Place::Running(row);
        request.computed = start;
        if request.cached.is_none() {
            request.cached = Some(start);
            self.counters.prefix_queries += request.prompt_len as u64;
            self.counters.prefix_hits += start as u64;
            let waited_us = now_us.saturating_sub(request.submitted_us);
            self.counters.queue_us_sum = self.counters.queue_us_sum.saturating_add(waited_us);
        }
        let id = request.id;
        if self.asks[seat].turn.queue_deadline_us != u64::MAX {
            self.asks[seat].turn.queue_deadline_us = u64::MAX;
            self.expiries.set(seat, &self.asks[seat]);
        }
        let at = self.rank_in_running(seat);
        self.running.insert(at, seat);
        self.draft.admitted.push([id.0 as i64, 0, row.index() as i64]);
        self.note(seat, Reason::Admitted { cached: start as u32, row: row.index() as u32 });
    }

    /// Moves the hit into the tables. It was found in this very call, so each of its blocks still has its content.
    fn hold_hits(&mut self, seat: usize) {
        let request = self.seats[seat].as_mut().expect("a seat in use");
        for group in 0..self.groups.len() {
            let table = request.table_of_mut(group);
            self.pool.share_all(table, self.hit.table(group)).expect("hits of this call");
        }
        if self.pool.retention().is_some() {
            for group in 0..self.groups.len() {
                for (number, &block) in self.hit.table(group).iter().enumerate() {
                    self.pool.ask(block, number, request.worth(number * self.block_size.tokens()));
                }
            }
        }
        request.published = self.hit.len();
        if mutant::is_on(Mutant::WriteShared)
            && let Some((block, _)) = request.keys.get(self.hit.len()).and_then(|key| self.pool.index().lookup(key))
        {
            let _ = self.pool.share(&mut request.table, block);
        }
    }
}
