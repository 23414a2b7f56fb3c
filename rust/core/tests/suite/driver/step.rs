//! One step of the driver: the plan, the forward pass of the oracle, and the commit or failure that ends it.
//!
//! The driver foretells which results no longer count when they arrive: those of requests that ended since the plan, and those of
//! requests that shared a block whose writer ended, failed, or got no token for the block's last row.

use std::collections::BTreeSet;

use blocktable_core::Committed;
use blocktable_core::error::Error;
use blocktable_core::group::GroupSpec;
use blocktable_core::ids::StepId;
use blocktable_core::plan::PlanMemory;
use blocktable_core::prefix_index::KeyState;
use blocktable_core::request::End;

use super::oracle::{first_seen, mix, token_of};
use super::plan_check::Before;
use super::refusal::with_refusal;
use super::world::mark;
use super::{Client, Driver, Plan};
use crate::broken::{Checked, broken, ensure};

/// A plan in flight.
#[derive(Clone, Debug)]
pub struct Step {
    pub plan: Plan,
    pub entries: Vec<Entry>,
    /// What the model answered, once it ran.
    tokens: Option<Vec<u32>>,
}

/// What the plan in flight does for one request.
#[derive(Clone, Debug)]
pub struct Entry {
    pub id: u64,
    pub start: usize,
    pub chunk: usize,
    pub samples: bool,
    /// Sequences that get their first token from its last row, beside itself.
    pub siblings: usize,
    /// Tokens behind those of the request: guesses.
    pub drafts: Vec<u32>,
    pub written: BTreeSet<i32>,
    /// The blocks of its last row but drafts.
    pub last: BTreeSet<i32>,
    /// Blocks behind its start that others write in this plan.
    pub shared: BTreeSet<i32>,
    /// Table entries that it keeps if it loses one of those: all before them, or none if a window needs more.
    pub kept: usize,
    /// It would keep more, but for a window.
    pub lost_sight: bool,
    /// The block of its first row gets rows copied in this step; if that fails it goes back to so many table entries.
    pub copied: Option<usize>,
    /// Those rows are a partial hit.
    pub is_partial_hit: bool,
    /// What the step brings for it does not count any more.
    pub is_stale: bool,
}

impl Driver {
    /// Plans; true if there is something to run, which is then in flight.
    pub fn plan(&mut self) -> Checked<bool> {
        if let Some(step) = &self.step {
            let expected = Error::StepInFlight { step: StepId(step.plan.step) };
            return self.must_refuse_plan(&expected).map(|()| true);
        }
        let now_us = self.tick();
        let overdue = self.end_overdue();
        let before = Before::look(self, overdue > 0);
        let lasting = self.num_lasting();
        let which = (self.scheduler.steps() % 2) as usize;
        let (staging, tables) = &mut self.memories[which];
        let nth = std::mem::take(&mut self.refuse_next);
        let make = || self.scheduler.plan(now_us, PlanMemory { staging, tables });
        let (result, is_refused) = with_refusal(nth, make);
        self.is_refused = is_refused;
        self.seen.refused += usize::from(is_refused);
        self.audit()?;
        if is_refused
            && matches!(
                result,
                Err(Error::OutOfBlocks { .. }
                    | Error::NotHeld { .. }
                    | Error::NoFreeRow { .. }
                    | Error::BeingWritten { .. })
            )
        {
            // The plan has nothing else; drafts were for it alone.
            self.clients.values_mut().for_each(|client| client.drafts.clear());
            return self.settle().map(|()| false);
        }
        let sizes = result.or_else(|error| broken("plan", error.to_string()))?;
        let plan = Plan::read(&sizes, self.scheduler.layout(), &self.memories[which].0);
        self.seen.expired += usize::from(lasting > self.num_lasting());
        self.plans.push(plan.clone());
        self.apply_changes(&plan);
        self.seen.copies += plan.copies.len();
        self.keep_books(&plan)?;
        self.check_reasons(&plan)?;
        let mut without_forks = plan.clone();
        without_forks.admitted.retain(|(id, _)| !before.running.contains(id));
        self.check_plan(&without_forks, &before)?;
        let mut entries = self.entries_of(&plan);
        self.expected.drafted_tokens += entries.iter().map(|entry| entry.drafts.len() as u64).sum::<u64>();
        self.check_drafts(&plan)?;
        for entry in entries.iter_mut().filter(|entry| entry.copied.is_some()) {
            entry.is_partial_hit = without_forks.admitted.iter().any(|(id, _)| *id == entry.id);
        }
        for entry in &entries {
            let client = self.clients.get_mut(&entry.id).expect("a known request");
            if std::mem::take(&mut client.looks_again) && entry.start > client.computed && client.preemptions == 0 {
                self.seen.rejoined += 1;
                if client.outputs().is_empty() {
                    client.cached = Some(entry.start);
                    self.expected.prefix_hits += (entry.start - client.computed) as u64;
                }
            }
            client.computed = entry.start;
            client.may_copy = false;
            client.granted = client.granted.max(entry.start + entry.chunk);
        }
        self.check_quotas()?;
        self.check_memory(&entries)?;
        self.count_rows(&entries);
        let runs = !plan.is_empty();
        self.step = runs.then_some(Step { plan, entries, tokens: None });
        self.settle()?;
        Ok(runs)
    }

    /// Runs the oracle over the plan in flight: all writes of the step, then its reads.
    pub fn forward(&mut self) {
        let Some(step) = &self.step else { return };
        let (plan, size) = (&step.plan, self.block_size());
        for &copy in &plan.copies {
            self.kv.copy(copy);
        }
        for (group, slots) in plan.group_slots.iter().enumerate() {
            for (i, &slot) in slots.iter().enumerate() {
                let seq = plan.query_starts.partition_point(|&start| start as usize <= i) - 1;
                let identity = &self.clients[&step.entries[seq].id].identity;
                let token = plan.token_ids[i] as u32 ^ mark(identity, plan.positions[i] as usize, size);
                self.kv.write(slot, Some((token, plan.positions[i] as u32, group as u32)));
            }
        }
        self.blind = self.check_sight(step).err();
        let tables = &self.memories[(plan.step as usize + 1) % 2].1;
        let sample = |&row: &i32| {
            let seq = plan.query_starts.partition_point(|&start| start <= row) - 1;
            let position = plan.positions[row as usize] as usize;
            let groups = self.config().groups.iter().zip(self.lines(plan.seq_slots[seq]));
            let hash = |(&group, line): (&GroupSpec, usize)| {
                self.kv.hash_through(&tables[line..], first_seen(group, position), position)
            };
            mix(groups.map(hash))
        };
        let salt = |id: &i64| self.salt(*id as u64);
        let salted = plan.sample_rows.iter().map(sample).zip(plan.sample_requests.iter().map(salt));
        let tokens = Some(salted.map(|(hash, salt)| token_of(hash ^ salt, self.config().vocab_size)).collect());
        self.step.as_mut().expect("a plan in flight").tokens = tokens;
    }

    /// Every query of the step, not only the sampled ones, sees through the tables the rows that it must, in every group.
    fn check_sight(&self, step: &Step) -> Checked {
        let size = self.block_size();
        let tables = &self.memories[(step.plan.step as usize + 1) % 2].1;
        for (seq, entry) in step.entries.iter().enumerate() {
            let known = entry.start + entry.chunk - entry.drafts.len();
            if self.clients[&entry.id].tokens.len() < known {
                // Truncated since: what its queries see counts for nothing.
                continue;
            }
            let lines = self.lines(step.plan.seq_slots[seq]);
            for (number, (&group, line)) in self.config().groups.iter().zip(lines).enumerate() {
                for position in first_seen(group, entry.start)..entry.start + entry.chunk {
                    let block = i64::from(tables[line + position / size]);
                    let row = self.kv.read(block * size as i64 + (position % size) as i64);
                    let client = &self.clients[&entry.id];
                    let token = if position < known { client.tokens[position] } else { entry.drafts[position - known] };
                    let token = token ^ mark(&client.identity, position, size);
                    let due = Some((token, position as u32, number as u32));
                    ensure(row == due, "sight", || {
                        format!("request {} sees {row:?} in block {block} of group {number}, must be {due:?}", entry.id)
                    })?;
                }
            }
        }
        Ok(())
    }

    /// What the oracle answered for the plan in flight, if it ran.
    pub fn answers(&self) -> Option<&[u32]> {
        self.step.as_ref()?.tokens.as_deref()
    }

    /// Commits the plan in flight, which the oracle runs if it has not yet. Sample i gets no token if `withheld[i]`.
    pub fn commit(&mut self, withheld: &[bool]) -> Checked {
        let Some(step) = &self.step else { return self.must_refuse_end() };
        if step.tokens.is_none() {
            self.forward();
        }
        if let Some(blind) = self.blind.take() {
            return Err(blind);
        }
        let step = self.step.clone().expect("a plan in flight");
        let answers = step.tokens.expect("the oracle ran");
        let is_withheld = |sample: usize| withheld.get(sample).copied().unwrap_or(false);
        let (mut tokens, mut starts) = (Vec::new(), vec![0]);
        for (sample, &token) in answers.iter().enumerate() {
            tokens.extend((!is_withheld(sample)).then_some(i64::from(token)));
            starts.push(tokens.len() as i64);
        }
        let now_us = self.tick();
        let mut committed = Committed::default();
        let result = self.scheduler.commit(StepId(step.plan.step), &tokens, &starts, now_us, &mut committed);
        self.audit()?;
        result.or_else(|error| broken("commit", error.to_string()))?;
        let given: Vec<Option<u32>> =
            answers.iter().enumerate().map(|(sample, &token)| (!is_withheld(sample)).then_some(token)).collect();
        self.take_results(&given, &committed)?;
        self.step = None;
        self.settle()
    }

    /// The model fails: some rows were written, some not, some wrongly.
    pub fn fail(&mut self) -> Checked {
        let Some(step) = self.step.clone() else { return self.must_refuse_end() };
        for slots in &step.plan.group_slots {
            for (i, &slot) in slots.iter().enumerate() {
                let torn = (step.plan.token_ids[i] as u32 ^ 1, step.plan.positions[i] as u32, 0);
                self.kv.write(slot, (i % 2 == 0).then_some(torn));
            }
        }
        for &copy in step.plan.copies.iter().step_by(2) {
            self.kv.copy(copy);
        }
        let result = self.scheduler.fail(StepId(step.plan.step));
        self.expected.failed_steps += 1;
        for at in 0..step.entries.len() {
            self.lose_copied(at);
            let entry = &step.entries[at];
            let is_stale = self.step.as_ref().expect("a plan in flight").entries[at].is_stale;
            self.expected.failed_tokens += if is_stale { 0 } else { entry.chunk as u64 };
            if !entry.drafts.is_empty() && !is_stale {
                self.seen.failed_drafts += entry.drafts.len();
                self.forget_lookahead(entry.id, entry.start + 1);
            }
            self.lose_sharers(&step.entries[at].written);
        }
        self.step = None;
        self.audit()?;
        result.or_else(|error| broken("fail", error.to_string()))?;
        self.settle()
    }

    /// Plan, forward, commit.
    pub fn run_step(&mut self) -> Checked {
        if self.plan()? { self.commit(&[]) } else { Ok(()) }
    }

    /// Ends of steps that are not in flight and results that make no sense change nothing.
    pub fn talk_nonsense(&mut self) -> Checked {
        let Some(step) = &self.step else { return self.must_refuse_end() };
        let (number, samples) = (step.plan.step, step.plan.sample_rows.len());
        let vocab = i64::from(self.config().vocab_size);
        let good: Vec<i64> = (0..=samples as i64).collect();
        let ids = vec![0; samples];
        let mut wrong: Vec<(u64, Vec<i64>, Vec<i64>)> = vec![
            (number + 1, ids.clone(), good.clone()),
            (number - 1, ids.clone(), good.clone()),
            (number, ids.clone(), [&good[..], &[samples as i64]].concat()),
            (number, [&ids[..], &[0]].concat(), good.clone()),
            (number, ids.clone(), good[1..].to_vec()),
            (number, ids.clone(), good.iter().map(|start| start + 1).collect()),
        ];
        if samples > 0 {
            wrong.push((number, vec![vocab; samples], good.clone()));
            wrong.push((number, vec![-1; samples], good.clone()));
            wrong.push((number, ids, good.iter().map(|start| start * 2).collect()));
            wrong.push((number, vec![], good.iter().map(|start| -start).collect()));
            wrong.push((number, vec![0], [vec![0; samples], vec![i64::MIN]].concat()));
        }
        for (number, ids, starts) in wrong {
            let before = self.snapshot();
            let result = self.scheduler.commit(StepId(number), &ids, &starts, self.now_us, &mut Committed::default());
            let is_typed = matches!(result, Err(Error::WrongStep { .. } | Error::InvalidInput { .. }));
            ensure(is_typed, "nonsense", || format!("commit({number}, {ids:?}, {starts:?}) gives {result:?}"))?;
            self.unchanged_since(&before)?;
        }
        let failed = self.scheduler.fail(StepId(number + 1));
        ensure(matches!(failed, Err(Error::WrongStep { .. })), "nonsense", || format!("fail gives {failed:?}"))?;
        self.settle()
    }

    /// The request leaves while the plan in flight runs it: nobody may rely on what it writes.
    pub(super) fn lose_writer(&mut self, id: u64) {
        let Some(step) = &mut self.step else { return };
        let Some(entry) = step.entries.iter_mut().find(|entry| entry.id == id) else { return };
        self.seen.ended_in_flight += 1;
        if !std::mem::replace(&mut entry.is_stale, true) {
            let written = entry.written.clone();
            self.lose_sharers(&written);
        }
    }

    /// Nobody may rely on `lost` blocks: who shares one goes back, and takes what it writes itself along.
    fn lose_sharers(&mut self, lost: &BTreeSet<i32>) {
        let Some(step) = &mut self.step else { return };
        let mut lost = lost.clone();
        for entry in step.entries.iter_mut().filter(|entry| !entry.is_stale) {
            let client = self.clients.get_mut(&entry.id).expect("a known request");
            if entry.shared.is_disjoint(&lost) || !client.is_live() {
                continue;
            }
            entry.is_stale = true;
            lost.extend(&entry.written);
            self.seen.put_back += 1;
            self.seen.put_back_to_nothing += usize::from(entry.kept == 0 && entry.lost_sight);
            let kept = entry.kept * self.scheduler.config().block_size as usize;
            self.expected.put_back_tokens += (client.computed - kept) as u64;
            client.computed = kept;
            client.granted = client.computed;
            client.looks_again = true;
            if client.outputs().is_empty() && client.preemptions == 0 {
                let cached = client.cached.replace(client.computed).expect("it was admitted");
                self.expected.prefix_hits -= (cached - client.computed) as u64;
            }
        }
    }

    fn take_results(&mut self, given: &[Option<u32>], committed: &Committed) -> Checked {
        let count = self.step.as_ref().map_or(0, |step| step.entries.len());
        let (mut sample, mut accepted, mut dropped, mut ended) = (0, 0, Vec::new(), Vec::new());
        for at in 0..count {
            let entry = self.step.as_ref().expect("a plan in flight").entries[at].clone();
            let token = entry.samples.then(|| given[sample]);
            if !entry.drafts.is_empty() {
                let all = &given[sample..=sample + entry.drafts.len()];
                let (kept, end) = if entry.is_stale { (0, None) } else { self.take_run(&entry, all)? };
                accepted += kept;
                ended.extend(end);
                let is_lost = |&at: &usize| all[at].is_some();
                dropped.extend((kept..all.len()).filter(is_lost).map(|at| (sample + at) as i32));
                sample += all.len();
                continue;
            }
            let all = &given[sample..sample + if entry.samples { 1 + entry.siblings } else { 0 }];
            let is_whole = all.iter().all(Option::is_some);
            let token = token.map(|token| token.filter(|_| is_whole));
            if entry.siblings > 0 && (entry.is_stale || !is_whole) {
                let is_lost = |&at: &usize| all[at].is_some() && (at > 0 || !is_whole);
                dropped.extend((0..all.len()).filter(is_lost).map(|at| (sample + at) as i32));
            }
            let first = sample;
            sample += all.len();
            if entry.is_stale {
                if let Some(Some(_)) = token {
                    dropped.push(first as i32);
                    dropped.sort_unstable();
                }
                continue;
            }
            let is_missing = token == Some(None);
            let end = entry.start + entry.chunk - usize::from(is_missing);
            if is_missing && (end + 1).is_multiple_of(self.block_size()) {
                self.lose_sharers(&entry.last);
            }
            self.clients.get_mut(&entry.id).expect("a known request").computed = end;
            if let Some(Some(token)) = token {
                if entry.siblings > 0 {
                    accepted += entry.siblings;
                    ended.extend(self.bear(&entry, all)?);
                }
                accepted += 1;
                ended.extend(self.take_token(entry.id, token)?);
            }
        }
        let told: Vec<(u64, i64)> = committed.ended.iter().map(|&[id, code]| (id as u64, code)).collect();
        ensure((committed.accepted, &committed.dropped) == (accepted, &dropped), "epoch", || {
            let (told, those) = (committed.accepted, &committed.dropped);
            format!("{told} tokens were accepted, samples {those:?} dropped; must be {accepted} and {dropped:?}")
        })?;
        self.seen.dropped += dropped.len();
        ensure(told == ended, "ends", || format!("the commit ended {told:?}, the rules say {ended:?}"))
    }

    /// The tokens of a sequence with drafts: how many count, and the end that they bring.
    fn take_run(&mut self, entry: &Entry, given: &[Option<u32>]) -> Checked<(usize, Option<(u64, i64)>)> {
        let (mut kept, mut end) = (0, None);
        while kept < given.len() && end.is_none() {
            let Some(token) = given[kept] else { break };
            if kept > 0 && given[kept - 1] != Some(entry.drafts[kept - 1]) {
                self.seen.wrong_drafts += 1;
                break;
            }
            self.seen.right_drafts += usize::from(kept > 0);
            end = self.take_token(entry.id, token)?;
            self.seen.ended_at_draft += usize::from(kept > 0 && end.is_some());
            kept += 1;
        }
        if kept == 0 && (entry.start + 1).is_multiple_of(self.block_size()) {
            self.lose_sharers(&entry.last);
        }
        self.expected.accepted_drafts += kept.saturating_sub(1) as u64;
        self.clients.get_mut(&entry.id).expect("a known request").computed = entry.start + kept;
        self.forget_lookahead(entry.id, entry.start + kept.max(1));
        Ok((kept, end))
    }

    /// Compares a token with the cold answer; the end that it brings.
    pub(super) fn take_token(&mut self, id: u64, token: u32) -> Checked<Option<(u64, i64)>> {
        let now_us = self.now_us;
        let client = self.clients.get_mut(&id).expect("a known request");
        let at = client.outputs().len();
        let wanted = client.answer.outputs.get(at).copied();
        ensure(wanted == Some(token), "exact", || {
            format!("request {id}: output {at} is {token}, the cold answer is {wanted:?}")
        })?;
        if at == 0 {
            self.expected.first_token_us_sum += now_us - client.submitted_us;
        }
        client.tokens.push(token);
        if at + 1 < client.answer.outputs.len() {
            return Ok(None);
        }
        let code = client.answer.end as i64;
        self.mark_ended(id, code);
        Ok(Some((id, code)))
    }

    fn entries_of(&self, plan: &Plan) -> Vec<Entry> {
        let size = self.block_size();
        let mut entries = Vec::new();
        for (seq, chunk) in plan.chunks().into_iter().enumerate() {
            let (row, first) = (plan.seq_slots[seq], plan.query_starts[seq] as usize);
            let client = self.live().find(|client| client.row == Some(row)).expect("checked before");
            let start = plan.positions[first] as usize;
            let block = |&slot: &i64| (slot / size as i64) as i32;
            let drafts = self.num_drafts(plan, seq);
            let slots = plan.group_slots.iter().map(|slots| &slots[first..first + chunk]);
            let last = slots.clone().map(|slots| block(&slots[chunk - drafts - 1]));
            entries.push(Entry {
                id: client.id,
                start,
                chunk,
                samples: start + chunk - drafts == client.tokens.len(),
                siblings: if start + chunk == client.tokens.len() { client.siblings as usize } else { 0 },
                drafts: plan.token_ids[first + chunk - drafts..first + chunk].iter().map(|&id| id as u32).collect(),
                written: slots.clone().flatten().map(block).collect(),
                last: last.collect(),
                shared: BTreeSet::new(),
                kept: 0,
                lost_sight: false,
                copied: None,
                is_partial_hit: false,
                is_stale: false,
            });
        }
        let all: BTreeSet<i32> = entries.iter().flat_map(|entry| entry.written.iter().copied()).collect();
        for (seq, entry) in entries.iter_mut().enumerate() {
            let lines = self.lines(plan.seq_slots[seq]);
            let full = entry.start / size;
            let behind: Vec<&[i32]> = lines.into_iter().map(|line| &self.device_tables[line..line + full]).collect();
            let first = |table: &&[i32]| table.iter().position(|block| all.contains(block)).unwrap_or(full);
            let kept = behind.iter().map(first).min().expect("a group");
            let names_all = |(table, entry): (&&[i32], usize)| table[entry.min(kept)..kept].iter().all(|&id| id > 0);
            let in_sight = behind.iter().zip(self.first_entries(kept * size)).all(names_all);
            entry.kept = if in_sight { kept } else { 0 };
            entry.lost_sight = kept > 0 && !in_sight;
            if plan.copies.iter().any(|copy| entry.written.contains(&copy[2])) {
                let is_kept = |(table, entry): (&&[i32], usize)| table[entry.min(full)..].iter().all(|&id| id > 0);
                let in_sight = behind.iter().zip(self.first_entries(full * size)).all(is_kept);
                entry.copied = Some(if in_sight { full } else { 0 });
            }
            entry.shared = behind.iter().flat_map(|table| *table).filter(|id| all.contains(id)).copied().collect();
        }
        entries
    }

    /// Nothing is held but the blocks of the rows that running requests were given, as far as their next query sees them. Who shares
    /// what is being written keeps what it needs if it loses that.
    fn check_memory(&self, entries: &[Entry]) -> Checked {
        let size = self.block_size();
        let mut named: BTreeSet<i32> = BTreeSet::new();
        for client in self.clients.values().filter(|client| client.is_running()) {
            let entry = entries.iter().find(|entry| entry.id == client.id && !entry.shared.is_empty());
            let sure = entry.map_or(client.computed, |entry| entry.kept * size);
            let lines = self.lines(client.row.expect("it runs"));
            for ((line, seen), first) in
                lines.into_iter().zip(self.first_entries(client.computed)).zip(self.first_entries(sure))
            {
                let table = &self.device_tables[line..line + client.granted.div_ceil(size)];
                let is_right = table[..first].iter().all(|&id| id == 0) && table[seen..].iter().all(|&id| id > 0);
                ensure(is_right, "memory", || {
                    format!("request {} names {table:?}, sees from {seen} on, keeps from {first} on", client.id)
                })?;
                named.extend(table.iter().filter(|&&id| id > 0));
            }
        }
        named.extend(self.scheduler.pinned_blocks().map(|block| block.get() as i32));
        let held = self.scheduler.pool().num_held() as usize;
        ensure(held == named.len(), "memory", || format!("{held} blocks are held, requests need {named:?}"))
    }

    /// Counters of a plan that runs something: rows of held blocks, and those of them that hold a token after the step.
    fn count_rows(&mut self, entries: &[Entry]) {
        if entries.is_empty() {
            return;
        }
        let size = self.block_size();
        let held = u64::from(self.scheduler.pool().num_held());
        let mut filled = BTreeSet::new();
        for block in self.scheduler.pinned_blocks() {
            filled.extend((0..size).map(|row| (block.get() as i32, row)));
        }
        for client in self.clients.values().filter(|client| client.is_running()) {
            let planned = entries.iter().find(|entry| entry.id == client.id);
            let rows = planned.map_or(client.computed, |entry| entry.start + entry.chunk);
            for line in self.lines(client.row.expect("it runs")) {
                let block = |row: usize| self.device_tables[line + row / size];
                filled.extend((0..rows).map(|row| (block(row), row % size)).filter(|&(block, _)| block > 0));
            }
        }
        // What is published is full, even where its owner was truncated.
        for id in 1..self.config().num_blocks {
            let block = self.scheduler.pool().block(id).expect("a block of the pool");
            let index = self.scheduler.pool().index();
            if self.scheduler.pool().holders(block) > 0 && index.state(block) == KeyState::Published {
                filled.extend((0..size).map(|row| (id as i32, row)));
            }
        }
        self.expected.steps += 1;
        self.expected.scheduled_tokens += entries.iter().map(|entry| entry.chunk as u64).sum::<u64>();
        self.expected.taken_rows_sum += held * size as u64;
        self.expected.wasted_rows_sum += held * size as u64 - filled.len() as u64;
        self.expected.peak_blocks = self.expected.peak_blocks.max(held);
    }

    /// Applies what the plan tells its caller, in the order of the contract: ended and preempted, then admitted.
    fn keep_books(&mut self, plan: &Plan) -> Checked {
        for &(id, code) in &plan.ended {
            self.hear_end(id, code)?;
        }
        for &id in &plan.preempted {
            let Some(client) = self.clients.get_mut(&id).filter(|client| client.is_running()) else {
                return broken("books", format!("request {id} is preempted, and does not run"));
            };
            client.row = None;
            client.is_mixed = false;
            client.preemptions += 1;
            client.queued = client.tokens.len();
            self.expected.preemptions += 1;
            self.expected.recomputed_tokens += client.computed as u64;
        }
        let told = |id: &u64| plan.admitted.iter().any(|(admitted, _)| admitted == id);
        for client in self.clients.values_mut().filter(|client| client.is_live() && client.is_untold) {
            // Who was preempted before it was told ran for nobody to see.
            if !told(&client.id) {
                client.is_untold = false;
                client.is_mixed = false;
                client.preemptions += 1;
                client.queued = client.tokens.len();
                self.expected.preemptions += 1;
                self.expected.recomputed_tokens += client.computed as u64;
            }
        }
        for &(id, row) in &plan.admitted {
            let taken = self.clients.values().any(|client| client.row == Some(row));
            ensure(!taken, "books", || format!("row {row} is given to request {id}, and is not free"))?;
            let Some(client) = self.clients.get_mut(&id).filter(|client| client.is_waiting() || client.is_untold)
            else {
                return broken("books", format!("request {id} is admitted, and does not wait"));
            };
            client.row = Some(row);
            client.granted = if std::mem::take(&mut client.is_untold) { client.computed } else { 0 };
        }
        Ok(())
    }

    fn hear_end(&mut self, id: u64, code: i64) -> Checked {
        let usable = (self.scheduler.pool().usable() - self.scheduler.num_pinned()) as usize;
        let Some(client) = self.clients.get(&id) else { return broken("ends", format!("request {id} never was")) };
        if code == End::Capacity as i64 && client.is_live() {
            let tokens = client.tokens.len();
            let usable = usable.min(self.rules_of(client.asked.tenant).hard_blocks as usize);
            let is_of_family =
                |other: &Client| client.family.is_some() && other.family == client.family && other.end == Some(code);
            let is_doomed = self.clients.values().any(is_of_family);
            ensure(is_doomed || self.need(tokens) > usable || self.config().queue.no_evict, "capacity", || {
                format!("request {id} ends for want of memory with {tokens} tokens, {usable} blocks are usable")
            })?;
            self.mark_ended(id, code);
            self.seen.ended_for_capacity += 1;
        }
        let told = self.unreported.remove(&id);
        ensure(told == Some(code), "ends", || format!("request {id} is reported with end {code}, must be {told:?}"))?;
        self.clients.get_mut(&id).expect("a known request").row = None;
        Ok(())
    }

    fn apply_changes(&mut self, plan: &Plan) {
        let columns = self.config().max_blocks() as usize;
        for (row, first, ids) in &plan.dirty {
            let at = *row as usize * columns + *first as usize;
            self.device_tables[at..at + ids.len()].copy_from_slice(ids);
            self.seen.out_of_sight += ids.iter().filter(|&&id| id == 0).count();
        }
    }

    /// The first admission of a request that stands in the plan with its start.
    pub(super) fn note_admission(&mut self, id: u64, start: usize) {
        let now_us = self.now_us;
        let client = self.clients.get_mut(&id).expect("a known request");
        if client.cached.is_none() {
            client.cached = Some(start);
            client.admitted_us = Some(now_us);
            self.expected.prefix_queries += client.prompt_len as u64;
            self.expected.prefix_hits += start as u64;
            self.expected.queue_us_sum += now_us - client.submitted_us;
        }
    }

    fn must_refuse_plan(&mut self, expected: &Error) -> Checked {
        let before = self.snapshot();
        let which = (self.scheduler.steps() % 2) as usize;
        let (staging, tables) = &mut self.memories[which];
        let result = self.scheduler.plan(self.now_us, PlanMemory { staging, tables });
        let error = result.err();
        ensure(error.as_ref() == Some(expected), "nonsense", || format!("a second plan gives {error:?}"))?;
        self.unchanged_since(&before)?;
        self.settle()
    }

    fn must_refuse_end(&mut self) -> Checked {
        let before = self.snapshot();
        let step = StepId(self.scheduler.steps());
        let expected = Err(Error::WrongStep { given: step, expected: None });
        let committed = self.scheduler.commit(step, &[], &[0], self.now_us, &mut Committed::default());
        let failed = self.scheduler.fail(step);
        ensure(committed == expected && failed == expected, "nonsense", || {
            format!("the end of no step gives {committed:?} and {failed:?}")
        })?;
        self.unchanged_since(&before)?;
        self.settle()
    }
}
