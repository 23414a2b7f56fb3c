//! Gives a waiting request a row, its prefix hits, its first blocks and a promise of the rest: all of it or nothing (design 3).
//!
//! The whole of what is known (prompt, and outputs of a preempted request) must fit beside what others were promised. Hits that
//! were free leave the queue, so they count as needed. Blocks are taken chunk by chunk. All that may be refused is asked first.

use crate::beside::Beside;
use crate::block_table::BlockTable;
use crate::error::{Error, Result};
use crate::ids::Key;
use crate::mutant::{self, Mutant};
use crate::partial_hit::PartialHit;
use crate::preemption::contains;
use crate::prefix_index::KeyState;
use crate::reason::Reason;
use crate::refusal::Granted;
use crate::request::{End, Place};
use crate::row_arrays::RowArrays;
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
    /// It has sequences for which there are no rows.
    NoRows,
    /// Its tenant may not hold so many blocks.
    OverQuota,
    /// One of its steps was refused; nothing changed.
    Refused(Error),
}

impl Scheduler {
    /// Admits waiting requests, highest rank first, until rows, budget or blocks run out.
    pub(crate) fn plan_waiting(&mut self, rows: &mut RowArrays<'_>, now_us: u64) {
        self.admit_up_to(usize::MAX, rows, now_us);
    }

    /// Looks at the first waiting request alone.
    pub(crate) fn plan_waiting_one(&mut self, rows: &mut RowArrays<'_>, now_us: u64) {
        self.admit_up_to(1, rows, now_us);
    }

    fn admit_up_to(&mut self, mut left: usize, rows: &mut RowArrays<'_>, now_us: u64) {
        let mut looked_at = 0;
        let mut yielding = None;
        let (mut do_yield, mut has_yielded) = (!mutant::is_on(Mutant::SoftQuotaIgnored), false);
        while left > 0 && rows.budget > 0 && !self.free_rows.is_empty() && looked_at < MAX_PASSED && self.may_pass() {
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
            match self.admit(rows, seat, now_us) {
                Admission::Admitted { chunk } => {
                    self.drain.admit(self.asks[seat].backlog);
                    self.stop_waiting(seat);
                    self.charge_admission(seat);
                    rows.budget -= chunk;
                    self.note_passed(seat);
                }
                Admission::PrefixInFlight => {
                    self.note_wait(seat, Reason::PrefixInFlight { found: self.hit.len() as u32 });
                    looked_at += 1;
                }
                Admission::OverQuota if self.never_within_quota(seat) => {
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
                Admission::NoRows => {
                    self.note_wait(seat, Reason::NoRow { rows: self.config.rows() });
                    self.blocked.push(seat);
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
        let is_done = left == 0 && !mutant::is_on(Mutant::RoomReadsNoBudget);
        if !is_done
            && !self.waiting.has_aside()
            && let Some(seat) = self.waiting.first()
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

    /// Whether the request at `seat`, with the hit that was just found, will not fit in its tenant's quota however long it waits. A hit
    /// that is not confirmed holds more in sight than the request needs, in case it goes back: that passes.
    fn never_within_quota(&self, seat: usize) -> bool {
        let is_alone = self.tenants.of(self.asks[seat].tenant).held == 0;
        is_alone && (self.hit.confirmed() == self.hit.len() || mutant::is_on(Mutant::PendingOverQuotaEnds))
    }

    /// Whether the tenant of the request at `seat` holds too much for it whatever it would find: without a window that is as many blocks,
    /// found or not. Many tenants may be at their quota, and this looks nothing up.
    fn is_surely_over_quota(&self, seat: usize) -> bool {
        let holds_some = self.tenants.of(self.asks[seat].tenant).held > 0;
        let has_quota = holds_some && !self.groups.has_window() && !mutant::is_on(Mutant::QuotaExceeded);
        has_quota && self.need_from(seat, 0, 0) > self.room_of_tenant(&self.asks[seat])
    }

    fn admit(&mut self, rows: &mut RowArrays<'_>, seat: usize, now_us: u64) -> Admission {
        if !self.has_rows_for(seat) {
            return Admission::NoRows;
        }
        if self.is_surely_over_quota(seat) {
            return Admission::OverQuota;
        }
        if let Some(needed) = self.asks[seat].short_of
            && !self.running.is_empty()
            && needed.saturating_add(self.reserve(seat)) > self.pool.num_free().saturating_sub(self.promised)
        {
            return Admission::Blocked { needed };
        }
        let beside = self.find_hits_and_part(seat);
        self.admit_with(rows, seat, beside, now_us).unwrap_or_else(|| {
            self.find_hits(seat);
            let no_part = Some(Beside { part: None });
            self.admit_with(rows, seat, no_part, now_us).expect("nothing less can be asked for")
        })
    }

    /// Admits the request with the hit that was just found, and what it does beside; none if it does not fit with a part of a block.
    fn admit_with(
        &mut self,
        arrays: &mut RowArrays<'_>,
        seat: usize,
        beside: Option<Beside>,
        now_us: u64,
    ) -> Option<Admission> {
        let part = beside.and_then(|beside| beside.part);
        let size = self.block_size;
        let (known, prompt_len) = (self.request(seat).num_tokens(), self.request(seat).prompt_len);
        let reserve = self.reserve(seat);
        let hits = self.hit.len();
        let next = self.request(seat).keys.get(hits);
        let is_pending = |key: &Key| {
            self.promises_whole(seat) && matches!(self.pool.index().lookup(key), Some((_, KeyState::Pending)))
        };
        let is_awaited = |key: &Key| contains(&self.frontier, key) || is_pending(key);
        let awaited = hits < size.full_blocks(known - 1) && next.is_some_and(is_awaited);
        if awaited && !mutant::is_on(Mutant::NoPrefixWait) {
            return Some(Admission::PrefixInFlight);
        }
        if mutant::is_on(Mutant::RecountQueriesOnRetry) {
            self.counters.prefix_queries += prompt_len as u64;
        }
        let mut start = hits * size.tokens();
        if mutant::is_on(Mutant::StaleHit) {
            let first = *self.request_mut(seat).first_hit.get_or_insert(hits);
            start = first.max(hits) * size.tokens();
        }
        let rows = part.map_or(0, |part| part.rows);
        let mut rest = self.need_from(seat, hits * size.tokens() + rows, hits) + self.hit_and_leaving(seat);
        let named = self.hit.blocks().count() as u32;
        let sources = part.iter().flat_map(PartialHit::sources).filter(|&(_, source)| self.pool.is_free(source));
        let free_hits = self.hit.num_free(&self.pool) + sources.count() as u32;
        let is_secured = self.is_secured(seat);
        if is_secured {
            rest = self.as_far_as_there_is(seat, rest, named, free_hits);
        }
        let will_hold = rest + named;
        if will_hold > self.room_of_tenant(&self.asks[seat]) && !mutant::is_on(Mutant::QuotaExceeded) {
            return part.is_none().then_some(Admission::OverQuota);
        }
        let promised = if mutant::is_on(Mutant::IgnorePromises) { 0 } else { self.promised };
        let free = self.pool.num_free().saturating_sub(promised).saturating_sub(reserve);
        if rest + free_hits > free {
            if part.is_some() {
                return None;
            }
            if mutant::is_on(Mutant::BlockedKeepsHits) {
                self.hold_hits(seat);
            }
            self.remember_short(seat, hits, rest);
            return Some(Admission::Blocked { needed: rest + free_hits });
        }
        let _granted = match self.ask_to_admit(part, promised + rest + free_hits) {
            Ok(granted) => granted,
            Err(error) => {
                if mutant::is_on(Mutant::RefusedKeepsPromise) {
                    self.promised += rest;
                }
                return Some(Admission::Refused(error));
            }
        };
        start += rows;
        let mut chunk = (known - start).min(arrays.budget);
        if mutant::is_on(Mutant::BudgetBeforeHit) {
            chunk = known.min(arrays.budget).saturating_sub(start).max(1);
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
        let request = self.request_mut(seat);
        (request.promised, request.secured) = (rest, is_secured);
        self.promised += rest;
        self.open_account(seat, expected);
        if let Some(beside) = beside {
            self.hold_beside(seat, beside);
        }
        let now = self.block_size.blocks_for(start + chunk).saturating_sub(self.request(seat).table.len()) as u32;
        if now > 0 {
            self.take_blocks(seat, now, (now * self.groups.len() as u32).min(rest));
        }
        if let Some(hit) = part {
            self.copy_partial(seat, hits, hit);
        }
        self.note_change(seat, 0);
        if chunk > 0 {
            self.schedule(arrays, seat, chunk, self.hit.confirmed()..hits);
        }
        Some(Admission::Admitted { chunk })
    }

    /// Asks for the hit that was found, the sources of a partial one, `needed` free blocks and a row. Nothing changes. If all is granted,
    /// no step of the admission can fail.
    fn ask_to_admit(&self, part: Option<PartialHit>, needed: u32) -> Result<Granted> {
        let granted = Granted::begin();
        let sources = part.iter().flat_map(PartialHit::sources).map(|(_, source)| source);
        let forgotten = usize::from(mutant::is_on(Mutant::AskForgetsHit));
        self.hit.blocks().chain(sources).skip(forgotten).try_for_each(|block| self.pool.may_share(block))?;
        self.pool.may_take(needed)?;
        self.may_have_row()?;
        Ok(granted)
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
        request.set_computed(start);
        if request.cached.is_none() {
            request.cached = Some(start);
            self.counters.prefix_queries += request.prompt_len as u64;
            self.counters.prefix_hits += start as u64;
            let waited_us = now_us.saturating_sub(request.submitted_us);
            self.counters.queue_us_sum = self.counters.queue_us_sum.saturating_add(waited_us);
        }
        let spare = self.free_rows.len().saturating_sub(request.siblings as usize);
        request.spare_rows = self.free_rows.split_off(spare);
        if self.asks[seat].turn.queue_deadline_us != u64::MAX {
            self.asks[seat].turn.queue_deadline_us = u64::MAX;
            self.expiries.set(seat, &self.asks[seat]);
        }
        let at = self.rank_in_running(seat);
        self.running.insert(at, seat);
        let (request, number) = self.name_of(seat);
        self.draft.admitted.push([request, number, row.index() as i64]);
        self.note(seat, Reason::Admitted { cached: start as u32, row: row.index() as u32 });
    }

    /// Moves the hit into the tables. It was found in this very call, so each of its blocks still has its content.
    pub(crate) fn hold_hits(&mut self, seat: usize) {
        let request = self.seats[seat].as_mut().expect("a seat in use");
        for group in 0..self.groups.len() {
            let table = request.table_of_mut(group);
            self.pool.share_all(table, self.hit.table(group)).expect("hits of this call");
        }
        request.published = self.hit.len();
        if mutant::is_on(Mutant::WriteShared)
            && let Some((block, _)) = request.keys.get(self.hit.len()).and_then(|key| self.pool.index().lookup(key))
        {
            let _ = self.pool.share(&mut request.table, block);
        }
    }
}
