//! A caller that makes the next plan while the model runs the last one, at depth 1 or 2, over memory that betrays every wrong row.
//!
//! Before: a schedule of calls. After: every token that the scheduler accepted was the next of the request's cold answer, every end came
//! when the rules say, the arrays of a plan stayed as they were until its step ended, the audit held after every call, and the drained
//! scheduler holds nothing. The caller runs steps in order and late: when they are committed, after whatever happened since the plan.

use std::collections::{BTreeMap, HashSet, VecDeque};

use blocktable_core::Committed;
use blocktable_core::chain::{Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::error::Error;
use blocktable_core::ids::{RequestId, StepId};
use blocktable_core::plan::PlanMemory;
use blocktable_core::prefix_index::KeyState;
use blocktable_core::rank::{Asked, Turn};
use blocktable_core::request::{End, Limits};
use blocktable_core::scheduler::Scheduler;

use crate::broken::{Checked, audited, broken, ensure};
use crate::driver::Plan;
use crate::driver::oracle::{ColdAnswer, KvMemory, first_seen, mix, token_of};
use crate::driver::siblings::salt_of;

/// A request as its caller knows it.
#[derive(Clone, Debug)]
pub struct Client {
    pub tokens: Vec<u32>,
    prompt_len: usize,
    limits: Limits,
    salt: u64,
    answer: ColdAnswer,
    pub ended: Option<i64>,
    /// Sequences beside it that begin with its first output.
    siblings: u32,
    /// The first sequence of its request, if that has several.
    family: Option<u64>,
    /// Its row, as plans told it.
    row: Option<i32>,
    turn: Turn,
    was_admitted: bool,
    preemptions: u32,
    /// Forks, second sequences and truncations that it was a part of.
    costs: u32,
}

/// Where a request is when it ends from outside, or its time is over.
#[derive(Clone, Copy, Debug)]
enum State {
    Waiting,
    Idle,
    InFlight,
}

/// A plan in flight, and the tables that it was given.
struct Step {
    plan: Plan,
    tables: Vec<i32>,
}

/// How often things happened that schedules are there to meet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub overlapped: u64,
    pub sourced: u64,
    pub dropped: u64,
    pub stopped_late: u64,
    pub failed_under_next: u64,
    pub forked: u64,
    pub truncated: u64,
    pub withheld: u64,
    pub drafted: u64,
    pub right_drafts: u64,
    /// Sequences beside the first of their request, and those of them that began while a later step was in flight.
    pub siblings: u64,
    pub born_under_next: u64,
    /// Requests of several sequences that were ended as one.
    pub families_left: u64,
    /// Requests that were ended from outside, and those whose time was over: while they waited, ran and were in no step, were in a step.
    pub left: [u64; 3],
    pub overdue: [u64; 3],
    /// Requests that were preempted as often as they may be.
    pub most_preempted: u64,
}

/// The scheduler, its device, and its caller's books.
pub struct World {
    pub scheduler: Scheduler,
    memories: [(Vec<i64>, Vec<i32>); 2],
    kv: KvMemory,
    steps: VecDeque<Step>,
    /// What the last step that ran answered; nothing if it failed.
    answers: Vec<u32>,
    pub clients: BTreeMap<u64, Client>,
    /// Tokens that requests had before they were truncated.
    past: Vec<Vec<u32>>,
    pub seen: Seen,
    salts: u64,
    /// Since the last plan, and in it, nobody left, failed, went without a token or had to go.
    is_calm: bool,
    /// One more with every plan.
    now_us: u64,
}

impl World {
    pub fn new(config: Config) -> Self {
        let kv = KvMemory::new(config.num_blocks, config.block_size);
        let scheduler = Scheduler::new(config).expect("a valid configuration");
        let memory = || (vec![0; scheduler.layout().words], vec![0; scheduler.layout().table_entries]);
        World {
            memories: [memory(), memory()],
            kv,
            steps: VecDeque::new(),
            answers: Vec::new(),
            clients: BTreeMap::new(),
            past: Vec::new(),
            seen: Seen::default(),
            salts: 0,
            is_calm: false,
            now_us: 0,
            scheduler,
        }
    }

    /// What a prompt answers alone.
    pub fn answer(&self, tokens: &[u32], prompt_len: usize, salt: u64, limits: &Limits) -> ColdAnswer {
        let config = self.scheduler.config();
        let (vocab, longest) = (config.vocab_size, config.max_model_len);
        ColdAnswer::of(tokens, prompt_len, salt, limits, vocab, longest, &config.groups, |_| 0)
    }

    /// Queues a request; none if it is refused.
    pub fn submit(&mut self, tokens: Vec<u32>, limits: Limits) -> Checked<Option<u64>> {
        self.submit_several(tokens, limits, 0, Turn::default())
    }

    /// The same for one of several sequences: the first, and `siblings` beside it.
    pub fn submit_several(
        &mut self,
        tokens: Vec<u32>,
        limits: Limits,
        siblings: u32,
        turn: Turn,
    ) -> Checked<Option<u64>> {
        let prompt = self.scheduler.prompt(tokens.clone(), Identity::of(Domain::Deployment)).expect("a plain prompt");
        let asked = Asked { siblings, turn, ..Asked::default() };
        let result = self.scheduler.submit_as(prompt, limits.clone(), asked, self.now_us);
        self.settle()?;
        let Ok(RequestId(id)) = result else { return Ok(None) };
        let (answer, prompt_len) = (self.answer(&tokens, tokens.len(), 0, &limits), tokens.len());
        let family = (siblings > 0).then_some(id);
        let client = Client {
            tokens,
            prompt_len,
            limits,
            salt: 0,
            answer,
            ended: None,
            siblings,
            family,
            row: None,
            turn,
            was_admitted: false,
            preemptions: 0,
            costs: siblings,
        };
        self.clients.insert(id, client);
        Ok(Some(id))
    }

    /// The caller's clock: one more with every plan.
    pub fn now_us(&self) -> u64 {
        self.now_us
    }

    /// Steps in flight.
    pub fn in_flight(&self) -> usize {
        self.steps.len()
    }

    /// Plans; true if there is something to run. A plan too many must be refused.
    pub fn plan(&mut self) -> Checked<bool> {
        let depth = u64::from(self.scheduler.config().overlap_depth);
        let oldest = self.steps.front().map(|step| step.plan.step);
        let is_refused = oldest.is_some_and(|oldest| self.scheduler.steps() + 1 - oldest >= depth);
        let which = (self.scheduler.steps() % 2) as usize;
        let wasted = self.scheduler.counters().wasted_rows_sum;
        let kept = self.kept_by_drafts();
        let (staging, tables) = &mut self.memories[which];
        self.now_us += 1;
        let result = self.scheduler.plan(self.now_us, PlanMemory { staging, tables });
        if is_refused {
            let expected = Some(Error::StepInFlight { step: StepId(oldest.expect("a step")) });
            let error = result.err();
            ensure(error == expected, "overlap", || format!("a plan too many gives {error:?}"))?;
            self.settle()?;
            return Ok(false);
        }
        let sizes = result.or_else(|error| broken("plan", error.to_string()))?;
        let plan = Plan::read(&sizes, self.scheduler.layout(), &self.memories[which].0);
        self.end_overdue();
        for &(id, code) in &plan.ended {
            let client = self.clients.get_mut(&id).expect("a known request");
            let due = *client.ended.get_or_insert(End::Capacity as i64);
            ensure(code == due, "ends", || format!("a plan tells that request {id} ended with {code}, not {due}"))?;
        }
        let first = plan.preempted.first().filter(|&&id| self.is_calm && kept.is_some_and(|last| id <= last));
        ensure(first.is_none(), "victim", || format!("request {first:?} is preempted for blocks that drafts hold"))?;
        self.is_calm = plan.preempted.is_empty() && plan.ended.is_empty();
        let most = self.scheduler.config().max_preemptions;
        for id in &plan.preempted {
            let client = self.clients.get_mut(id).expect("a known request");
            (client.row, client.preemptions) = (None, client.preemptions + 1);
            let (times, bound) = (client.preemptions, most + client.costs);
            self.seen.most_preempted += u64::from(times == most);
            ensure(times <= bound, "preemptions", || {
                format!("request {id} is preempted {times} times, at most {bound}")
            })?;
        }
        for &(id, row) in &plan.admitted {
            let client = self.clients.get_mut(&id).expect("a known request");
            (client.row, client.was_admitted) = (Some(row), true);
        }
        let drafted = plan.sample_requests.windows(2).filter(|two| two[0] == two[1]).count() as u64;
        self.seen.drafted += drafted;
        self.seen.overlapped += u64::from(oldest.is_some() && !plan.is_empty());
        self.seen.sourced += plan.token_sources.iter().filter(|&&source| source >= 0).count() as u64;
        let has_previous = self.steps.back().is_some_and(|step| step.plan.step + 1 == plan.step);
        let most = if has_previous { self.steps.back().map_or(0, |step| step.plan.sample_rows.len()) } else { 0 };
        let is_wrong = |&&source: &&i32| source >= most as i32;
        let wrong = plan.token_sources.iter().find(is_wrong);
        ensure(wrong.is_none(), "sources", || format!("a token comes from sample {wrong:?} of {most}"))?;
        let runs = !plan.is_empty();
        let is_counted = runs || self.scheduler.counters().wasted_rows_sum == wasted;
        ensure(is_counted, "wasted", || "rows are wasted in a plan that runs nothing".to_owned())?;
        if runs {
            self.steps.push_back(Step { plan, tables: self.memories[which].1.clone() });
        }
        self.settle()?;
        Ok(runs)
    }

    /// Up to which request nobody may be preempted in the next plan: where the step in flight took more blocks for drafts than those above
    /// may take, these wait for that step. None if that is not known: after anything that may have put somebody back.
    fn kept_by_drafts(&self) -> Option<u64> {
        let (config, step) = (self.scheduler.config(), self.steps.back()?);
        let (plan, rows, size) = (&step.plan, config.rows() as i32, config.block_size as usize);
        let samples = |id: u64| plan.sample_requests.iter().filter(|&&owner| owner == id as i64).count();
        let mut lent = 0;
        for (seq, &row) in plan.seq_slots.iter().enumerate() {
            let first = plan.positions[plan.query_starts[seq] as usize] as usize;
            let owner = self.clients.iter().find(|(_, client)| client.row == Some(row));
            if owner.is_some_and(|(&id, _)| samples(id) > 1) {
                let behind =
                    |change: &&(i32, i32, Vec<i32>)| change.0 % rows == row && change.1 as usize > first / size;
                lent += plan.dirty.iter().filter(behind).map(|change| change.2.len()).sum::<usize>();
            }
        }
        // A decode takes a block in each group, and no more as long as nobody has to copy.
        let may_copy = self.clients.values().any(|client| client.costs > 0);
        if !self.is_calm || may_copy || self.steps.len() > 1 || lent < config.groups.len() {
            return None;
        }
        let running = self.clients.iter().filter(|(_, client)| client.ended.is_none() && client.row.is_some());
        Some(running.map(|(&id, _)| id).find(|&id| samples(id) == 0).unwrap_or(u64::MAX))
    }

    /// A plan was made: whose time was over ended with it.
    fn end_overdue(&mut self) {
        let now_us = self.now_us;
        let code = |client: &Client| {
            let is_refused = !client.was_admitted && client.turn.queue_deadline_us <= now_us;
            let is_expired = client.turn.deadline_us <= now_us;
            is_refused.then_some(End::Refused).or(is_expired.then_some(End::Expired))
        };
        let live = self.clients.iter().filter(|(_, client)| client.ended.is_none());
        let overdue: Vec<(u64, End)> = live.filter_map(|(&id, client)| code(client).map(|code| (id, code))).collect();
        for (id, code) in overdue {
            self.is_calm = false;
            self.seen.overdue[self.state_of(id) as usize] += 1;
            self.clients.get_mut(&id).expect("a known request").ended = Some(code as i64);
        }
    }

    fn state_of(&self, id: u64) -> State {
        let Some(row) = self.clients[&id].row else { return State::Waiting };
        let runs = |step: &Step| step.plan.seq_slots.contains(&row);
        if self.steps.iter().any(runs) { State::InFlight } else { State::Idle }
    }

    /// Runs the oldest step in flight and commits it. Sample i gets no token if bit i of `withheld` is set.
    pub fn commit(&mut self, withheld: u32) -> Checked {
        let Some(step) = self.steps.pop_front() else { return Ok(()) };
        let plan = &step.plan;
        self.check_kept(&step)?;
        let answers = self.run(&step)?;
        let (mut tokens, mut starts) = (Vec::new(), vec![0]);
        let given: Vec<bool> = (0..answers.len()).map(|sample| withheld >> (sample % 32) & 1 == 0).collect();
        for (&token, &given) in answers.iter().zip(&given) {
            tokens.extend(given.then_some(i64::from(token)));
            starts.push(tokens.len() as i64);
        }
        self.seen.withheld += given.iter().filter(|&&given| !given).count() as u64;
        let mut committed = Committed::default();
        let result = self.scheduler.commit(StepId(plan.step), &tokens, &starts, self.now_us, &mut committed);
        result.or_else(|error| broken("commit", error.to_string()))?;
        let mut ended = Vec::new();
        let is_lost = |sample: usize| !given[sample] || committed.dropped.contains(&(sample as i32));
        for sample in self.in_order_of_birth(&plan.sample_requests) {
            let id = plan.sample_requests[sample];
            if is_lost(sample) {
                continue;
            }
            self.be_born(id as u64)?;
            let client = self.clients.get_mut(&(id as u64)).expect("a known request");
            let (at, token) = (client.tokens.len() - client.prompt_len, answers[sample]);
            let wanted = client.answer.outputs.get(at).copied();
            ensure(client.ended.is_none() && wanted == Some(token), "exact", || {
                format!(
                    "request {id}: output {at} is {token}, the cold answer is {wanted:?}; ended: {:?}",
                    client.ended
                )
            })?;
            client.tokens.push(token);
            let is_draft = sample > 0 && plan.sample_requests[sample - 1] == id;
            self.seen.right_drafts += u64::from(is_draft);
            if at + 1 == client.answer.outputs.len() {
                client.ended = Some(client.answer.end as i64);
                ended.push([id, client.answer.end as i64]);
                let is_late = self.steps.iter().any(|step| step.plan.sample_requests.contains(&id));
                self.seen.stopped_late += u64::from(is_late);
            }
        }
        self.seen.dropped += committed.dropped.len() as u64;
        self.is_calm &= withheld == 0 && committed.ended.is_empty() && committed.dropped.is_empty();
        let told = &committed.ended;
        ensure(*told == ended, "ends", || format!("the commit ended {told:?}, the rules say {ended:?}"))?;
        self.answers = answers;
        self.settle()
    }

    /// The samples of a plan in the order in which their tokens count: those that begin a sequence before that of the first of its request.
    fn in_order_of_birth(&self, owners: &[i64]) -> Vec<usize> {
        let mut samples: Vec<usize> = (0..owners.len()).collect();
        let mut at = 0;
        while at < owners.len() {
            let born = owners[at + 1..].iter().take_while(|id| !self.clients.contains_key(&(**id as u64))).count();
            samples[at..=at + born].rotate_left(1);
            at += 1 + born;
        }
        samples
    }

    /// The sequence begins with the token that has come for it, if it is not there yet.
    fn be_born(&mut self, id: u64) -> Checked {
        if self.clients.contains_key(&id) {
            return Ok(());
        }
        let (&first, parent) = self.clients.range_mut(..id).next_back().expect("those before it are there");
        let first = parent.family.unwrap_or(first);
        let parent = self.clients.get_mut(&first).expect("the first sequence");
        let is_due = parent.ended.is_none() && id <= first + u64::from(parent.siblings);
        ensure(is_due, "siblings", || format!("sequence {id} begins, and request {first} has no such one"))?;
        let parent = parent.clone();
        let salt = salt_of(id);
        let answer = self.answer(&parent.tokens, parent.prompt_len, salt, &parent.limits);
        self.clients.insert(id, Client { salt, answer, siblings: 0, row: None, preemptions: 0, ..parent });
        self.seen.siblings += 1;
        self.seen.born_under_next += u64::from(!self.steps.is_empty());
        Ok(())
    }

    /// The oldest step in flight fails: every other row is torn, and nobody knows its answers.
    pub fn fail(&mut self) -> Checked {
        let Some(step) = self.steps.pop_front() else { return Ok(()) };
        self.is_calm = false;
        for &copy in step.plan.copies.iter().step_by(2) {
            self.kv.copy(copy);
        }
        for slots in &step.plan.group_slots {
            for &slot in slots {
                self.kv.write(slot, None);
            }
        }
        self.answers.clear();
        self.seen.failed_under_next += u64::from(!self.steps.is_empty());
        self.scheduler.fail(StepId(step.plan.step)).or_else(|error| broken("fail", error.to_string()))?;
        self.settle()
    }

    /// Proposes `count` drafts for a request whose row was told: what it says behind its tokens and `ahead` more that are on their way. The
    /// draft of number `wrong` is not right.
    pub fn propose(&mut self, id: u64, count: usize, wrong: Option<usize>, ahead: usize) -> Checked {
        let Some(client) = self.clients.get(&id).filter(|client| client.ended.is_none()) else { return Ok(()) };
        let Some(row) = client.row else { return Ok(()) };
        let first = client.tokens.len() - client.prompt_len + ahead;
        let vocab = i64::from(self.scheduler.config().vocab_size);
        let draft = |at: usize| {
            let said = i64::from(client.answer.outputs.get(first + at).copied().unwrap_or(0));
            if wrong == Some(at) { (said + 1) % vocab } else { said }
        };
        let drafts: Vec<i64> = (0..count).map(draft).collect();
        let result = self.scheduler.propose(&[i64::from(row)], &[0, count as i64], &drafts);
        let is_refused = count > self.scheduler.config().max_draft_tokens as usize;
        ensure(result.is_err() == is_refused, "propose", || format!("{count} drafts: {result:?}"))?;
        self.settle()
    }

    /// Ends a request from outside, as aborted or as finished.
    pub fn leave(&mut self, id: u64, is_finished: bool) -> Checked {
        self.is_calm = false;
        let is_of_it = |other: u64, client: &Client| other == id || (!is_finished && client.family == Some(id));
        if self.clients.get(&id).is_some_and(|client| client.ended.is_none()) {
            self.seen.left[self.state_of(id) as usize] += 1;
        }
        let left = if is_finished { self.scheduler.finish(RequestId(id)) } else { self.scheduler.abort(RequestId(id)) };
        let code = if is_finished { End::Stop } else { End::Aborted } as i64;
        let live =
            self.clients.iter_mut().filter(|(other, client)| client.ended.is_none() && is_of_it(**other, client));
        let count = live.map(|(_, client)| client.ended = Some(code)).count();
        ensure(left == (count > 0), "ends", || format!("{count} sequences of request {id} live, left: {left}"))?;
        self.seen.families_left += u64::from(count > 1);
        self.settle()
    }

    /// Ends one sequence from outside, whichever it is.
    pub fn end_sequence(&mut self, id: u64) -> Checked {
        self.is_calm = false;
        let client = self.clients.get_mut(&id).filter(|client| client.ended.is_none());
        let lives = client.map(|client| client.ended = Some(End::Aborted as i64)).is_some();
        let left = self.scheduler.end_sequence(RequestId(id));
        ensure(left == lives, "ends", || format!("sequence {id} lives: {lives}, left: {left}"))?;
        self.settle()
    }

    /// Forks a request if it runs and has room for `more` outputs more.
    pub fn fork(&mut self, parent: u64, more: u32) -> Checked<Option<u64>> {
        let Some(client) = self.clients.get(&parent).filter(|client| client.ended.is_none()).cloned() else {
            return Ok(None);
        };
        let outputs = (client.tokens.len() - client.prompt_len) as u32;
        let limits = Limits { max_tokens: outputs + more, ..Limits::default() };
        let result = self.scheduler.fork(RequestId(parent), limits.clone(), self.now_us);
        self.settle()?;
        let Ok(id) = result else { return Ok(None) };
        self.salts += 1;
        let (salt, prompt_len) = (self.salts, client.prompt_len);
        let answer = self.answer(&client.tokens, prompt_len, salt, &limits);
        let child =
            Client { prompt_len, limits, salt, answer, siblings: 0, row: None, preemptions: 0, costs: 1, ..client };
        self.clients.insert(id.0, child);
        self.clients.get_mut(&parent).expect("a known request").costs += 1;
        self.seen.forked += 1;
        Ok(Some(id.0))
    }

    /// Takes a live request back to `share` 256ths of its tokens.
    pub fn truncate(&mut self, id: u64, share: u8) -> Checked {
        let Some(client) = self.clients.get(&id).filter(|client| client.ended.is_none()).cloned() else {
            return Ok(());
        };
        let len = (client.tokens.len() * (usize::from(share) + 1) / 256).max(1);
        self.scheduler.truncate(RequestId(id), len).or_else(|error| broken("truncate", error.to_string()))?;
        self.past.push(client.tokens.clone());
        let tokens = client.tokens[..len].to_vec();
        let prompt_len = client.prompt_len.min(len);
        let answer = self.answer(&tokens, prompt_len, client.salt, &client.limits);
        let costs = client.costs + 1;
        self.clients.insert(id, Client { tokens, prompt_len, answer, costs, ..client });
        self.seen.truncated += 1;
        self.settle()
    }

    /// Steps until nobody lives; then nothing is held.
    pub fn drain(&mut self) -> Checked {
        let live = |world: &Self| world.clients.values().filter(|client| client.ended.is_none()).count();
        let longest = self.scheduler.config().max_model_len as usize;
        let bound = 40 + 20 * longest * (1 + live(self)) * (1 + live(self));
        let mut steps = 0;
        while live(self) > 0 || !self.steps.is_empty() {
            let depth = self.scheduler.config().overlap_depth as usize;
            while self.steps.len() < depth && self.plan()? {}
            self.commit(0)?;
            steps += 1;
            ensure(steps <= bound, "progress", || format!("{} requests live after {bound} steps", live(self)))?;
        }
        let held = self.scheduler.pool().num_held();
        ensure(held == 0, "drained", || format!("{held} blocks are held by nobody"))?;
        self.check_keys()
    }

    /// Every key that is published is that of tokens that some request had.
    fn check_keys(&self) -> Checked {
        let plain = |tokens: &Vec<u32>| self.scheduler.prompt(tokens.clone(), Identity::of(Domain::Deployment));
        let chains = self.clients.values().map(|client| &client.tokens).chain(&self.past);
        let groups = self.scheduler.config().groups.len();
        let mut keys = HashSet::new();
        for prompt in chains.map(|tokens| plain(tokens).expect("plain tokens")) {
            keys.extend(prompt.keys().iter().flat_map(|key| (0..groups).map(|group| key.in_group(group).0)));
        }
        let index = self.scheduler.pool().index();
        let published = index.blocks().filter(|&block| index.state(block) == KeyState::Published);
        let foreign = published.filter_map(|block| index.key(block)).find(|key| !keys.contains(&key.0));
        ensure(foreign.is_none(), "keys", || "a key is published that no request's tokens have".to_owned())
    }

    /// The device: copies, then all writes, then what each sample's query sees.
    fn run(&mut self, step: &Step) -> Checked<Vec<u32>> {
        let plan = &step.plan;
        plan.copies.iter().for_each(|&copy| self.kv.copy(copy));
        for (group, slots) in plan.group_slots.iter().enumerate() {
            for (i, &slot) in slots.iter().enumerate() {
                let token = match plan.token_sources[i] {
                    -1 => Some(plan.token_ids[i] as u32),
                    source => self.answers.get(source as usize).copied(),
                };
                self.kv.write(slot, token.map(|token| (token, plan.positions[i] as u32, group as u32)));
            }
        }
        let config = self.scheduler.config();
        let (rows, columns) = (config.rows() as usize, config.max_blocks() as usize);
        let sample = |(&row, id): (&i32, &i64)| {
            let seq = plan.query_starts.partition_point(|&start| start <= row) - 1;
            let position = plan.positions[row as usize] as usize;
            let hash = |(number, &group)| {
                let line = (number * rows + plan.seq_slots[seq] as usize) * columns;
                self.kv.hash_through(&step.tables[line..], first_seen(group, position), position)
            };
            let salt = self.clients.get(&(*id as u64)).map_or_else(|| salt_of(*id as u64), |client| client.salt);
            token_of(mix(config.groups.iter().enumerate().map(hash)) ^ salt, config.vocab_size)
        };
        Ok(plan.sample_rows.iter().zip(&plan.sample_requests).map(sample).collect())
    }

    /// The arrays of a step in flight are what they were when it was planned.
    fn check_kept(&self, step: &Step) -> Checked {
        let (staging, tables) = &self.memories[(step.plan.step as usize + 1) % 2];
        let sizes = blocktable_core::plan::Sizes {
            step: step.plan.step,
            seqs: step.plan.seq_slots.len(),
            tokens: step.plan.token_ids.len(),
            samples: step.plan.sample_rows.len(),
            ..Default::default()
        };
        let now = Plan::read(&sizes, self.scheduler.layout(), staging);
        let is_kept = now.seq_slots == step.plan.seq_slots
            && now.token_ids == step.plan.token_ids
            && now.group_slots == step.plan.group_slots
            && *tables == step.tables;
        ensure(is_kept, "arrays", || format!("the arrays of step {} changed while it was in flight", step.plan.step))
    }

    /// What holds after every call: the audit; and nobody may read a free block that is not published.
    fn settle(&mut self) -> Checked {
        audited(self.scheduler.audit())?;
        let pool = self.scheduler.pool();
        for block in pool.free_blocks().filter(|&block| pool.index().state(block) == KeyState::Unnamed) {
            self.kv.poison(block.get());
        }
        Ok(())
    }
}
