//! Drives one scheduler as a careful caller would, and checks everything after every call.
//!
//! Before: a test says what happens (submit, plan, commit, fail, abort). After: the same call on the scheduler, then its audit, the
//! caller's books, every counter, poison over all that became free, and the comparison of each token and each end with the cold
//! answer. The driver never corrects the scheduler: the first difference is returned as [`Broken`], with the name of the check.

mod client;
pub mod drafts;
mod followers;
mod fork;
pub mod oracle;
mod pinning;
mod plan;
mod plan_check;
mod reasons;
mod refusal;
pub mod siblings;
mod step;
mod turns;
mod weights;
mod world;

use std::collections::BTreeMap;

use blocktable_core::Recorded;
use blocktable_core::chain::{Chain, Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::error::Error;
use blocktable_core::group::GroupSpec;
use blocktable_core::ids::{BlockId, Key, RequestId};
use blocktable_core::prefix_index::KeyState;
use blocktable_core::rank::{Asked, Rank};
use blocktable_core::request::{End, Limits};
use blocktable_core::retention::{DEFAULT_PRIORITY, Ranges, Retention, TokenRange};
use blocktable_core::stats::Counters;

use crate::broken::{Broken, Checked, audited, broken, ensure};
use oracle::first_seen;

pub use client::Client;
pub use followers::Followers;
pub use oracle::{ColdAnswer, KvMemory};
pub use plan::Plan;
pub use step::Step;
pub use world::mark;

/// How often rare things happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Tokens of a commit that did not count.
    pub dropped: usize,
    /// Sharers that lost a block because its writer did not finish it.
    pub put_back: usize,
    /// Requests that ended while a step ran them.
    pub ended_in_flight: usize,
    /// Requests that a caller ended while they waited, and while they ran and no step was in flight.
    pub left_waiting: usize,
    pub left_running: usize,
    /// Requests whose time was over while they ran.
    pub overdue_running: usize,
    /// Waiting requests that a lower one passed, because their next block was being computed.
    pub passed_over: usize,
    pub ended_for_capacity: usize,
    /// Requests that were preempted as often as they may be.
    pub most_preempted: usize,
    /// Running requests that got no token in a plan.
    pub skipped: usize,
    /// Entries of tables that became null, or were from the start of a hit on.
    pub out_of_sight: usize,
    /// Admissions with a hit in a group with a window.
    pub hits_through_windows: usize,
    /// Puttings back that lost all, since a window needs more than is named.
    pub put_back_to_nothing: usize,
    /// Sharers that lost what they shared, and then shared what others published or wrote since.
    pub rejoined: usize,
    pub pinned: usize,
    /// Admissions that reuse a part of a block.
    pub partial_hits: usize,
    pub forked: usize,
    pub truncated: usize,
    /// Copies that plans asked for.
    pub copies: usize,
    /// Requests that lost rows because the step that was to copy them failed.
    pub lost_copies: usize,
    /// Requests that asked for retention.
    pub kept: usize,
    /// Running requests that held rows when the weights changed.
    pub mixed: usize,
    /// Requests that ended because their time was over, one kind and the other.
    pub deadlines: usize,
    pub queue_deadlines: usize,
    /// Steps that preempted for a waiting request.
    pub rooms: usize,
    /// Refusals of a full queue.
    pub full: usize,
    /// Admissions before a request that went first and did not fit.
    pub passes: usize,
    /// Plans before which blocks fell to the default priority, because their time was over.
    pub expired: usize,
    /// Samples behind a draft that was right, and behind one that was not.
    pub right_drafts: usize,
    pub wrong_drafts: usize,
    /// Requests that ended at a draft.
    pub ended_at_draft: usize,
    /// Drafts in steps that failed.
    pub failed_drafts: usize,
    /// Sequences beside the first of their request, and requests of several that were ended as one.
    pub siblings: usize,
    pub families_left: usize,
    /// Plans in which a question was refused.
    pub refused: usize,
}

/// A scheduler, the memory of its plans, the oracle model, and the books of its caller.
pub struct Driver {
    pub scheduler: Recorded,
    pub clients: BTreeMap<u64, Client>,
    /// The plan that is neither committed nor failed.
    pub step: Option<Step>,
    /// Every plan so far.
    pub plans: Vec<Plan>,
    /// Clients as they were before they were truncated: what they computed may live on.
    past: Vec<Client>,
    kv: KvMemory,
    /// What the last forward pass could not see.
    blind: Option<Broken>,
    /// Staging buffer and block tables, twice.
    memories: [(Vec<i64>, Vec<i32>); 2],
    /// Block tables of a device that is told of changes only.
    device_tables: Vec<i32>,
    /// How often the rare things happened, so that a test can say that they did.
    pub seen: Seen,
    /// Ends that no plan has reported yet.
    unreported: BTreeMap<u64, i64>,
    expected: Counters,
    /// Indexes rebuilt from the KV events.
    pub followers: Followers,
    /// Pins that were not given back.
    pub pins: Vec<pinning::Pin>,
    now_us: u64,
    /// What submit refused last.
    pub last_refusal: Option<Error>,
    /// Which question of the next plan is refused, counted from 1; 0: none.
    pub refuse_next: u32,
    /// One was in the plan that is being checked.
    is_refused: bool,
}

impl Driver {
    pub fn new(config: Config) -> Self {
        let kv = KvMemory::new(config.num_blocks, config.block_size);
        let scheduler = Recorded::new(config).expect("a valid configuration");
        let (words, entries) = (scheduler.layout().words, scheduler.layout().table_entries);
        let memory = || (vec![0; words], vec![0; entries]);
        Driver {
            clients: BTreeMap::new(),
            step: None,
            plans: Vec::new(),
            past: Vec::new(),
            kv,
            blind: None,
            memories: [memory(), memory()],
            device_tables: vec![0; entries],
            seen: Seen::default(),
            unreported: BTreeMap::new(),
            expected: Counters::default(),
            followers: Followers::default(),
            pins: Vec::new(),
            now_us: 0,
            last_refusal: None,
            refuse_next: 0,
            is_refused: false,
            scheduler,
        }
    }

    pub fn config(&self) -> &Config {
        self.scheduler.config()
    }

    pub fn block_size(&self) -> usize {
        self.config().block_size as usize
    }

    pub fn live(&self) -> impl Iterator<Item = &Client> {
        self.clients.values().filter(|client| client.is_live())
    }

    /// Submits a request; `None` if it is refused, as the rules say it must be.
    pub fn submit(&mut self, prompt: Vec<u32>, limits: Limits) -> Checked<Option<u64>> {
        self.submit_as(Identity::of(Domain::Deployment), prompt, limits)
    }

    /// The same for a tenant, an adapter, salts and media, which must be valid.
    pub fn submit_as(&mut self, identity: Identity, prompt: Vec<u32>, limits: Limits) -> Checked<Option<u64>> {
        self.submit_asked(identity, prompt, limits, Asked::default())
    }

    /// The same with a tenant, a priority and deadlines.
    pub fn submit_asked(
        &mut self,
        identity: Identity,
        prompt: Vec<u32>,
        limits: Limits,
        asked: Asked<'static>,
    ) -> Checked<Option<u64>> {
        let now_us = self.tick();
        let mut reasons = self.reasons_to_refuse(&prompt, &limits, &asked);
        reasons.extend(self.reasons_of_turn(&asked));
        let before = self.snapshot();
        let hashed = self.scheduler.prompt(prompt.clone(), identity.clone()).expect("a valid identity");
        let chain = hashed.chain().clone();
        let result = self.scheduler.submit_as(hashed, limits.clone(), asked, now_us);
        let id = match result {
            Err(error) => {
                self.expected.refused += 1;
                self.last_refusal = Some(error.clone());
                self.seen.full += usize::from(matches!(error, Error::QueueFull { .. }));
                ensure(reasons.contains(&kind_of(&error)), "submit", || {
                    format!("refused with {error}; reasons: {reasons:?}")
                })?;
                self.unchanged_since(&before)?;
                None
            }
            Ok(RequestId(id)) => {
                ensure(reasons.is_empty(), "submit", || format!("accepted although {reasons:?}"))?;
                ensure(!self.clients.contains_key(&id), "submit", || format!("id {id} is given a second time"))?;
                self.expected.submitted += 1;
                let mut client = self.new_client(id, prompt, limits, identity, chain);
                client.asked = asked;
                client.siblings = asked.siblings;
                client.family = (asked.siblings > 0).then_some(id);
                client.rank = Rank { class: self.class_of(&asked), arrival: id };
                self.clients.insert(id, client);
                Some(id)
            }
        };
        self.settle()?;
        Ok(id)
    }

    /// Asks how long the blocks of a request are to stay.
    pub fn keep(&mut self, id: u64, ranges: &[TokenRange]) -> Checked {
        let ranges = Ranges::new(ranges).expect("valid ranges");
        let result = self.scheduler.set_retention(RequestId(id), ranges);
        result.or_else(|error| broken("retention", error.to_string()))?;
        self.seen.kept += 1;
        self.settle()
    }

    /// Aborts a request, in whatever state it is.
    pub fn abort(&mut self, id: u64) -> Checked {
        let did_end = self.scheduler.abort(RequestId(id));
        if self.leave_family(id, did_end)? {
            return self.settle();
        }
        self.leave(id, did_end, End::Aborted)
    }

    /// Ends a request as finished: the caller saw a stop string.
    pub fn finish(&mut self, id: u64) -> Checked {
        let did_end = self.scheduler.finish(RequestId(id));
        self.leave(id, did_end, End::Stop)
    }

    pub fn reset_prefix_cache(&mut self) -> Checked {
        let held: Vec<BlockId> = self.blocks().filter(|&block| self.scheduler.pool().holders(block) > 0).collect();
        let state = |block: &BlockId| self.scheduler.pool().index().state(*block);
        let states: Vec<KeyState> = held.iter().map(state).collect();
        let published = self.scheduler.pool().index().num_published();
        let forgotten = self.scheduler.reset_prefix_cache();
        let kept = self.scheduler.pool().index().num_published();
        ensure(published - forgotten == kept, "reset", || format!("{published} - {forgotten} is not {kept}"))?;
        let state = |block: &BlockId| self.scheduler.pool().index().state(*block);
        ensure(held.iter().map(state).eq(states), "reset", || "a held block lost its name".to_owned())?;
        self.settle()
    }

    /// Steps until nobody lives, then checks that nothing is held and every end was reported.
    pub fn drain(&mut self) -> Checked {
        if self.step.is_some() {
            self.commit(&[])?;
        }
        let live = self.live().map(|client| 1 + client.siblings as usize).sum::<usize>();
        let longest = self.live().map(Client::most_tokens).max().unwrap_or(0);
        // The running request of highest rank, or one that it waits for and nobody may preempt, brings a row in every step and is never
        // a victim, so a request that waits at the head starts after at most `live` others have ended.
        let bound = live * (live + 1) * longest + 1;
        for _ in 0..bound {
            if self.live().next().is_none() {
                break;
            }
            self.run_step()?;
        }
        let left: Vec<u64> = self.live().map(|client| client.id).collect();
        ensure(left.is_empty(), "progress", || format!("requests {left:?} still live after {bound} steps"))?;
        while !self.unreported.is_empty() {
            let before = self.unreported.len();
            self.plan()?;
            ensure(self.unreported.len() < before, "ends", || format!("{:?} are never reported", self.unreported))?;
        }
        self.unpin_all()?;
        let pool = self.scheduler.pool();
        ensure(pool.num_free() == pool.usable(), "drain", || {
            format!(
                "{} of {} are free, {} held, {} parked",
                pool.num_free(),
                pool.usable(),
                pool.num_held(),
                pool.num_parked()
            )
        })
    }

    fn new_client(&self, id: u64, prompt: Vec<u32>, limits: Limits, identity: Identity, chain: Chain) -> Client {
        let config = self.config();
        let mark = |position| mark(&identity, position, config.block_size as usize);
        let answer = ColdAnswer::of(
            &prompt,
            prompt.len(),
            0,
            &limits,
            config.vocab_size,
            config.max_model_len,
            &config.groups,
            mark,
        );
        Client {
            id,
            prompt_len: prompt.len(),
            tokens: prompt.clone(),
            limits,
            identity,
            chain,
            answer,
            submitted_us: self.now_us,
            admitted_us: None,
            row: None,
            is_untold: false,
            is_mixed: false,
            may_copy: false,
            looks_again: false,
            salt: 0,
            computed: 0,
            granted: 0,
            cached: None,
            preemptions: 0,
            costs: 0,
            asked: Asked::default(),
            queued: prompt.len(),
            rank: Rank { class: 0, arrival: id },
            passes: 0,
            drafts: Vec::new(),
            siblings: 0,
            family: None,
            end: None,
            keys: Vec::new(),
        }
    }

    fn leave(&mut self, id: u64, did_end: bool, end: End) -> Checked {
        let was_live = self.clients.get(&id).is_some_and(Client::is_live);
        ensure(did_end == was_live, "leave", || format!("request {id} lives: {was_live}; ending it says {did_end}"))?;
        if did_end {
            let is_waiting = self.clients[&id].is_waiting();
            self.seen.left_waiting += usize::from(is_waiting);
            self.seen.left_running += usize::from(!is_waiting && self.step.is_none());
            self.lose_writer(id);
            self.mark_ended(id, end as i64);
        }
        self.settle()
    }

    fn mark_ended(&mut self, id: u64, code: i64) {
        self.clients.get_mut(&id).expect("a known request").end = Some(code);
        self.unreported.insert(id, code);
        if code == End::Stop as i64 || code == End::Length as i64 {
            self.expected.finished += 1;
        } else if code == End::Refused as i64 {
            self.expected.queue_expired += 1;
        } else {
            self.expected.aborted += 1;
            self.expected.expired += u64::from(code == End::Expired as i64);
        }
    }

    /// After every call.
    fn settle(&mut self) -> Checked {
        self.audit()?;
        let (running, waiting) = (
            self.live().filter(|client| client.is_running()).count(),
            self.live().filter(|client| client.is_waiting()).count(),
        );
        let counted = (self.scheduler.num_running(), self.scheduler.num_waiting());
        ensure(counted == (running, waiting), "books", || {
            format!("(running, waiting) is {counted:?}, the caller knows {:?}", (running, waiting))
        })?;
        self.follow_events()?;
        self.check_pins()?;
        let counters = self.scheduler.counters();
        ensure(counters == self.expected, "counters", || format!("{counters:?}, must be {:?}", self.expected))?;
        let free: Vec<BlockId> = self.scheduler.pool().free_blocks().collect();
        for block in free {
            if self.scheduler.pool().index().state(block) != KeyState::Published {
                self.kv.poison(block.get());
            }
        }
        Ok(())
    }

    /// Only what some client's chain names may be told.
    fn follow_events(&mut self) -> Checked {
        let mut hasher = self.scheduler.hasher().clone();
        for client in self.clients.values_mut() {
            hasher.extend(&client.chain, &mut client.keys, &client.tokens);
        }
        let (clients, past, size) = (&self.clients, &self.past, self.scheduler.config().block_size as usize);
        let names = |key: &Key, parent: Option<Key>, tokens: &[u32], _group: u8| {
            clients.values().chain(past).any(|client| {
                let at = client.keys.iter().position(|named| named == key);
                at.is_some_and(|at| {
                    let before = at.checked_sub(1).map(|before| client.keys[before]);
                    before == parent && client.tokens[at * size..(at + 1) * size] == *tokens
                })
            })
        };
        self.followers.follow(&self.scheduler, &names)
    }

    fn audit(&self) -> Checked {
        audited(self.scheduler.audit())
    }

    /// Kinds of refusal that the documentation of submit gives for this request; empty if it must be accepted.
    fn reasons_to_refuse(&self, prompt: &[u32], limits: &Limits, asked: &Asked<'_>) -> Vec<&'static str> {
        let config = self.config();
        let longest = config.max_model_len as usize - 1;
        let queue = &config.queue;
        let must_make = if queue.no_evict { limits.max_tokens } else { limits.min_tokens.max(1) } as usize;
        let rows = (prompt.len() + must_make.max(1) - 1).min(longest);
        let ids = prompt.iter().chain(&limits.stop_tokens);
        let mut reasons = Vec::new();
        if prompt.is_empty() || prompt.len() > longest {
            reasons.push("prompt_len");
        }
        if ids.clone().any(|&id| id >= config.vocab_size) {
            reasons.extend(["token_ids", "stop_token_ids"]);
        }
        if limits.max_tokens == 0 {
            reasons.push("max_tokens");
        }
        if limits.min_tokens > limits.max_tokens {
            reasons.push("min_tokens");
        }
        let rules = self.rules_of(asked.tenant);
        let siblings = if queue.no_evict { asked.siblings as usize } else { 0 };
        let need = self.need(rows) + siblings * self.need_behind(prompt.len(), rows);
        if need > (config.num_blocks - 1 - queue.watermark).min(rules.hard_blocks) as usize {
            reasons.push("never fits");
        }
        if self.is_queue_full(prompt.len(), asked.tenant) {
            reasons.push("queue full");
        }
        reasons
    }

    /// Blocks that a request of `rows` rows holds at once at most.
    fn need(&self, rows: usize) -> usize {
        let all = rows.div_ceil(self.block_size());
        self.config().groups.iter().map(|&group| all.min(self.most_held(group))).sum()
    }

    /// Blocks that a second sequence behind `prompt` rows needs of its own to have `rows`, one for its part of the tail included.
    fn need_behind(&self, prompt: usize, rows: usize) -> usize {
        let size = self.block_size();
        let (shared, all) = (prompt.div_ceil(size), rows.div_ceil(size));
        let in_group = |&group: &GroupSpec| {
            let last = (first_seen(group, prompt) / size).saturating_add(self.most_held(group));
            // What it sees first and not at last it may let go before the other one does.
            let (first, end) = (first_seen(group, prompt) / size, first_seen(group, rows.max(1) - 1) / size);
            let leaving = end.min(prompt / size).saturating_sub(first);
            all.min(last).saturating_sub(shared) + usize::from(!prompt.is_multiple_of(size)) + leaving
        };
        self.config().groups.iter().map(in_group).sum()
    }

    /// Blocks of a group that a sequence holds at once at most, however long it is, by trying every place where a step may start.
    fn most_held(&self, group: GroupSpec) -> usize {
        let (size, chunk) = (self.block_size(), self.config().max_chunk());
        let Some(window) = group.window else { return usize::MAX };
        let far = window as usize + size;
        let held = |first: usize| (first + chunk).div_ceil(size) - first_seen(group, first) / size;
        (far..far + size).map(held).max().expect("a block has rows")
    }

    /// Whether every running request has been promised all that it may need: nobody went back, and no quota stands between.
    pub(super) fn promises_all(&self) -> bool {
        let has_quota = self.config().queue.tenants.iter().any(|(_, rules)| rules.hard_blocks < u32::MAX);
        let went_back = self.seen.put_back + self.seen.lost_copies + self.seen.truncated + self.seen.pinned;
        self.config().queue.no_evict && !has_quota && went_back == 0 && !self.is_refused
    }

    /// The lines of the block tables that belong to a row, one for each group: where each begins.
    fn lines(&self, row: i32) -> Vec<usize> {
        let (rows, columns) = (self.config().rows() as usize, self.config().max_blocks() as usize);
        (0..self.config().groups.len()).map(|group| (group * rows + row as usize) * columns).collect()
    }

    /// The entries of a running request in one group, as the device was told.
    pub fn table(&self, id: u64, group: usize) -> &[i32] {
        let client = &self.clients[&id];
        let line = self.lines(client.row.expect("it runs"))[group];
        &self.device_tables[line..line + client.granted.div_ceil(self.block_size())]
    }

    /// The first entry that the query at `position` sees in each group.
    fn first_entries(&self, position: usize) -> Vec<usize> {
        let size = self.block_size();
        self.config().groups.iter().map(|&group| first_seen(group, position) / size).collect()
    }

    /// What a refused call must leave as it was.
    fn snapshot(&self) -> Snapshot {
        Snapshot {
            free: self.scheduler.pool().free_blocks().collect(),
            lines: (self.scheduler.num_running(), self.scheduler.num_waiting()),
            steps: self.scheduler.steps(),
        }
    }

    fn unchanged_since(&self, before: &Snapshot) -> Checked {
        let now = self.snapshot();
        ensure(now == *before, "refusal", || format!("a refused call changed {before:?} to {now:?}"))
    }

    fn blocks(&self) -> impl Iterator<Item = BlockId> {
        let pool = self.scheduler.pool();
        (1..pool.num_blocks()).map(|id| pool.block(id).expect("a block of this pool"))
    }

    /// The first `count` keys of a client's chain.
    fn keys_of(&mut self, id: u64, count: usize) -> Vec<Key> {
        let block_size = self.block_size();
        let client = self.clients.get_mut(&id).expect("a known request");
        if client.keys.len() < count {
            let mut hasher = self.scheduler.hasher().clone();
            hasher.extend(&client.chain, &mut client.keys, &client.tokens[..count * block_size]);
        }
        client.keys[..count].to_vec()
    }

    /// Blocks that are worth more than the default.
    fn num_lasting(&self) -> usize {
        let retention = self.scheduler.pool().retention();
        let lasts = |retention: &Retention| {
            self.blocks().filter(|&block| retention.worth(block).priority > DEFAULT_PRIORITY).count()
        };
        retention.map_or(0, lasts)
    }

    /// Time passes.
    pub fn wait(&mut self, time_us: u64) {
        self.now_us += time_us;
    }

    /// The caller's clock.
    pub fn now_us(&self) -> u64 {
        self.now_us
    }

    fn tick(&mut self) -> u64 {
        self.now_us += 7;
        self.now_us
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Snapshot {
    free: Vec<BlockId>,
    lines: (usize, usize),
    steps: u64,
}

fn kind_of(error: &Error) -> &'static str {
    match error {
        Error::InvalidInput { field, .. } => field,
        Error::NeverFits { .. } => "never fits",
        Error::QueueFull { .. } => "queue full",
        _ => "something else",
    }
}
