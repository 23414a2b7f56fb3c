//! Decides what each step runs: first come, first served, one token budget over prefill and decode.
//!
//! Before: the border calls. After: [`BlockPool`] gives and takes blocks. This file owns the state and its outer doors (submit, abort,
//! finish); a step is made in `planning.rs` with `admission.rs` and `preemption.rs`, and ends in `commit.rs`.
//! Every live request is in exactly one place, waiting or running, and one that ended holds nothing: see `audit.rs`.

use std::collections::{BTreeMap, VecDeque};

use hashbrown::HashTable;

use crate::accounts::Outlook;
use crate::block_hash::{BlockHasher, Prompt};
use crate::block_pool::{BlockPool, Release};
use crate::block_size::BlockSize;
use crate::chain::Identity;
use crate::config::Config;
use crate::drain::Drain;
use crate::error::{Error, Result};
use crate::events::EventLog;
use crate::expiry::Expiries;
use crate::flight::Flights;
use crate::group::Groups;
use crate::hit::Hit;
use crate::ids::{BlockId, Key, RequestId, Row, TokenId};
use crate::miss::{Miss, MissCounts, Seen};
use crate::mutant::{self, Mutant};
use crate::pins::Pins;
use crate::plan::{Draft, Layout};
use crate::policy::{self, PolicyKind};
use crate::queue_rules::PRIORITIES;
use crate::rank::{Ask, Asked, Rank};
use crate::reason::{Reason, saturated};
use crate::request::{End, Limits, Place, Request};
use crate::retention::Ranges;
use crate::stats::Counters;
use crate::tenants::{self, Backlog, Tenants};
use crate::timeline::{Ring, Timelines};
use crate::waiting_line::WaitingLine;

/// Ended requests whose cached tokens are still known.
const REMEMBERED: usize = 1024;

/// Requests that ended whose memory one call gives back.
const CLEARED_AT_ONCE: usize = 4;

/// What is known of a request that ended.
pub(crate) struct Remembered {
    pub id: RequestId,
    pub cached: usize,
    pub miss: Option<Miss>,
    pub timeline: Ring,
}

/// The scheduler of one pool.
pub struct Scheduler {
    pub(crate) config: Config,
    pub(crate) block_size: BlockSize,
    pub(crate) layout: Layout,
    pub(crate) groups: Groups,
    pub(crate) pool: BlockPool,
    pub(crate) hasher: BlockHasher,
    /// Live requests by seat. A seat is reused after its request has ended.
    pub(crate) seats: Vec<Option<Request>>,
    empty_seats: Vec<usize>,
    /// Seats by request id.
    by_id: HashTable<usize>,
    pub(crate) next_id: u64,
    /// Seats of running requests, highest rank first.
    pub(crate) running: Vec<usize>,
    /// Seats of waiting requests, in the order of the policy.
    pub(crate) waiting: WaitingLine,
    /// Rank, tenant and deadlines by seat; those of empty seats are old.
    pub(crate) asks: Vec<Ask>,
    pub(crate) tenants: Tenants,
    pub(crate) expiries: Expiries,
    /// All that waits.
    pub(crate) backlog: Backlog,
    pub(crate) drain: Drain,
    pub(crate) outlook: Outlook,
    /// The waiting request for which others were preempted, and the blocks that are promised to it.
    /// With `no_evict`: some running request may have lost a block that it was promised.
    pub(crate) owes: bool,
    /// The waiting request for which room was made, while it is looked at.
    pub(crate) into_room: Option<usize>,
    pub(crate) made_room_for: Option<(RequestId, u32)>,
    /// Rows of the block tables that nobody has, the next one last.
    pub(crate) free_rows: Vec<Row>,
    /// Sum of `promised` over running requests; never more than are free.
    pub(crate) promised: u32,
    pub(crate) steps: u64,
    pub(crate) draft: Draft,
    pub(crate) flight: Flights,
    /// Keys of the blocks that the requests of the plan under way will complete next.
    pub(crate) frontier: HashTable<Key>,
    /// The hit of the admission under way. Kept for its memory.
    pub(crate) hit: Hit,
    /// Looked at in the plan under way and found not to fit. Kept for its memory.
    pub(crate) blocked: Vec<usize>,
    /// Blocks that leave the sight of a request. Kept for its memory.
    pub(crate) leaving: Vec<BlockId>,
    /// Forked since the last plan, which has not told their rows: seat and id.
    pub(crate) untold: Vec<(usize, RequestId)>,
    /// Running requests without a token in the plan under way that may share their last block.
    pub(crate) idle_sharers: Vec<usize>,
    /// Requests, by seat, whose row in the plan under way was the last of its block, which has no name yet. Kept for its memory.
    pub(crate) filled: Vec<usize>,
    /// Decodes, by seat, that filled a block in the plan under way so far: each takes one in the next.
    pub(crate) crossing: Vec<usize>,
    /// The same of the last plan; and how many of the plan under way began one.
    pub(crate) takers: Vec<usize>,
    pub(crate) num_begun: usize,
    /// The request that is planned next writes to a block into which the step copies rows.
    pub(crate) copied: bool,
    /// Rows of a partial hit among those.
    pub(crate) partial_rows: usize,
    /// Requests of several sequences, by the first: which of them live.
    pub(crate) families: BTreeMap<RequestId, Vec<RequestId>>,
    /// Of those, the ones that end in the next plan, since one of them found no memory.
    pub(crate) doomed: Vec<RequestId>,
    /// Seats of requests that have drafts for the next plan.
    pub(crate) proposed: Vec<usize>,
    /// Those that got their row in the plan under way, which comes behind all others' with their drafts; and `copied` of each.
    pub(crate) drafting: Vec<(usize, bool)>,
    /// Ended since the last plan; those that had a row come first.
    pub(crate) ended: VecDeque<[i64; 2]>,
    pub(crate) ended_with_row: usize,
    /// Requests, by seat, whose deadline is over in the plan under way. Kept for its memory.
    pub(crate) due: Vec<usize>,
    /// Memory of requests that ended: many may end in one step, so it is given back little by little.
    leavings: Vec<Request>,
    /// Cached tokens of requests that ended, the newest last.
    remembered: VecDeque<Remembered>,
    /// What was published lately, if misses are to be explained.
    pub(crate) seen: Option<Seen>,
    pub(crate) misses: MissCounts,
    pub(crate) counters: Counters,
    /// What happened to each request, and why.
    pub(crate) timelines: Timelines,
    pub(crate) pins: Pins,
    /// The first refusal in the plan under way.
    pub(crate) refused: Option<Error>,
    /// The last plan had nothing to run although requests were live.
    pub(crate) idle_with_work: bool,
}

impl Scheduler {
    /// A scheduler with an empty pool.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if `config` breaks a bound.
    pub fn new(config: Config) -> Result<Self> {
        config.validate()?;
        let rows = config.rows();
        let mut pool = BlockPool::new(config.num_blocks)?.asked_first();
        if config.event_buffer_size > 0 {
            pool = pool.recording(EventLog::new(config.num_blocks, config.block_size, config.event_buffer_size));
        }
        if config.enable_partial_hits && config.enable_prefix_caching {
            pool = pool.remembering(BlockSize::new(config.block_size));
        }
        pool = pool.sharing(&config.domain_shares);
        Ok(Scheduler {
            block_size: BlockSize::new(config.block_size),
            layout: Layout::new(&config),
            groups: Groups::new(&config),
            pool,
            hasher: config.hasher()?,
            seats: Vec::new(),
            empty_seats: Vec::new(),
            by_id: HashTable::new(),
            next_id: 1,
            running: Vec::with_capacity(rows as usize),
            waiting: WaitingLine::new(policy::make(&config.queue)),
            asks: Vec::new(),
            tenants: Tenants::new(&config.queue.tenants, config.queue.other_tenants),
            expiries: Expiries::default(),
            backlog: Backlog::default(),
            drain: Drain::default(),
            outlook: Outlook::default(),
            owes: false,
            into_room: None,
            made_room_for: None,
            free_rows: (0..rows).rev().map(Row::new).collect(),
            promised: 0,
            steps: 0,
            draft: Draft::new(&config),
            flight: Flights::new(config.num_blocks, rows as usize),
            frontier: HashTable::new(),
            hit: Hit::new(config.groups.len()),
            blocked: Vec::new(),
            leaving: Vec::new(),
            untold: Vec::new(),
            idle_sharers: Vec::new(),
            filled: Vec::with_capacity(rows as usize),
            crossing: Vec::with_capacity(rows as usize),
            takers: Vec::with_capacity(rows as usize),
            num_begun: 0,
            copied: false,
            partial_rows: 0,
            families: BTreeMap::new(),
            doomed: Vec::new(),
            proposed: Vec::new(),
            drafting: Vec::new(),
            ended: VecDeque::new(),
            ended_with_row: 0,
            due: Vec::new(),
            leavings: Vec::new(),
            remembered: VecDeque::with_capacity(REMEMBERED),
            seen: (config.explain_misses && config.enable_prefix_caching).then(|| Seen::new(config.num_blocks)),
            misses: MissCounts::default(),
            counters: Counters::default(),
            timelines: Timelines::new(),
            pins: Pins::default(),
            refused: None,
            idle_with_work: false,
            config,
        })
    }

    /// Queues one request of the nameless tenant, without priority and deadlines.
    ///
    /// # Errors
    /// As [`submit_as`](Self::submit_as).
    pub fn submit(&mut self, prompt: Prompt, limits: Limits, now_us: u64) -> Result<RequestId> {
        self.submit_as(prompt, limits, Asked::default(), now_us)
    }

    /// Queues one request. Ids count up, so of one class earlier ones rank higher.
    ///
    /// # Errors
    /// [`Error::InvalidInput`], [`Error::NeverFits`] or [`Error::QueueFull`]; nothing is queued then.
    pub fn submit_as(
        &mut self,
        mut prompt: Prompt,
        limits: Limits,
        asked: Asked<'_>,
        now_us: u64,
    ) -> Result<RequestId> {
        if let Err(error) = self
            .check_siblings(asked.siblings)
            .and_then(|()| self.check(&prompt.tokens, &limits, asked.siblings))
            .and_then(|()| self.check_asked(&asked, now_us))
            .and_then(|()| self.check_tenant(&prompt.tokens, &limits, &asked))
            .and_then(|()| self.check_queue(prompt.tokens.len(), asked.tenant))
        {
            self.counters.refused += 1;
            self.timelines.count(Reason::of_refusal(&error));
            return Err(error);
        }
        if prompt.generation != self.hasher.generation && self.config.enable_prefix_caching {
            // The weights changed while it was hashed.
            prompt.keys.clear();
            self.hasher.extend(&prompt.chain, &mut prompt.keys, &prompt.tokens);
            if let Some(trail) = &mut prompt.trail {
                trail.restart();
                trail.extend(&mut self.hasher, &prompt.tokens);
            }
        }
        self.clear_up();
        self.pool.tell_time(now_us);
        let id = RequestId(self.next_id);
        self.next_id += 1 + u64::from(asked.siblings);
        let ask = self.ask(id, &asked, now_us);
        let (tokens, max_tokens) = (saturated(prompt.tokens.len() as u64), limits.max_tokens);
        self.timelines.tell_time(now_us);
        let seat = self.sit(Request::new(id, prompt, limits, now_us, self.config.max_model_len as usize), ask);
        if asked.siblings > 0 {
            self.begin_family(seat, asked.siblings);
        }
        self.note(seat, Reason::Submitted { tokens, max_tokens });
        if self.waiting.len() > 0 {
            self.note(seat, Reason::BehindHead { others: self.waiting.len() as u32 });
        }
        self.start_waiting(seat);
        self.counters.submitted += 1;
        Ok(id)
    }

    /// Asks how long the blocks of a request are to stay when nobody holds them: those that it has, and those to come.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if it has ended or never was.
    pub fn set_retention(&mut self, id: RequestId, ranges: Ranges) -> Result<()> {
        let seat = self.seat_of(id).ok_or(Error::UnknownRequest { request: id })?;
        self.pool.use_retention();
        self.expiries.look_at_blocks();
        self.request_mut(seat).retention = Some(Box::new(ranges));
        self.ask_for_all(seat);
        Ok(())
    }

    /// A prompt with what this scheduler needs to know of it.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] with the first field of `identity` that breaks a bound.
    pub fn prompt(&self, tokens: Vec<TokenId>, identity: Identity) -> Result<Prompt> {
        self.hasher.clone().prompt(tokens, identity)
    }

    /// What makes its keys. A copy may hash prompts elsewhere.
    #[must_use]
    pub fn hasher(&self) -> &BlockHasher {
        &self.hasher
    }

    /// Ends a request in whatever state it is, all of its sequences; the id of another sequence than the first ends that one alone. False
    /// if it has ended already or never was.
    pub fn abort(&mut self, id: RequestId) -> bool {
        if self.families.contains_key(&id) && !mutant::is_on(Mutant::SiblingsOutlive) {
            return self.end_family(id, End::Aborted);
        }
        self.leave_by_id(id, End::Aborted)
    }

    /// Ends one sequence of a request as aborted, the first one too; false as above.
    pub fn end_sequence(&mut self, id: RequestId) -> bool {
        self.leave_by_id(id, End::Aborted)
    }

    /// Ends a request as finished, because its text reached a stop that only the caller can see; false as above.
    pub fn finish(&mut self, id: RequestId) -> bool {
        self.leave_by_id(id, End::Stop)
    }

    /// Forgets all published content that no live sequence holds; returns how many blocks forgot theirs.
    pub fn reset_prefix_cache(&mut self) -> u32 {
        self.pool.forget_unheld()
    }

    /// Puts the KV events from number `since` on into `bytes` (cleared before); the number to read on from. None if they are not
    /// recorded, or if there are none and none were lost; `bytes` is as it was then. See [`event_bytes`](crate::event_bytes).
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for a number that no event has had yet.
    pub fn read_events(&self, since: u64, bytes: &mut Vec<u8>) -> Result<Option<u64>> {
        self.pool.read_events(since, bytes)
    }

    /// Puts all that is published into `bytes` (cleared before), as events: everything is cleared, then each key is stored, parents
    /// first. The number to read on from; none if events are not recorded. Walks the whole pool.
    pub fn event_snapshot(&self, bytes: &mut Vec<u8>) -> Option<u64> {
        self.pool.event_snapshot(bytes)
    }

    /// Prompt tokens that a request found in the prefix cache when it was first admitted; 0 before.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if it neither lives nor is among the last 1,024 that ended.
    pub fn num_cached_tokens(&self, id: RequestId) -> Result<usize> {
        if let Some(seat) = self.seat_of(id) {
            return Ok(self.request(seat).cached.unwrap_or(0));
        }
        self.remembered_of(id).map(|ended| ended.cached).ok_or(Error::UnknownRequest { request: id })
    }

    /// What is known of a request that ended lately.
    pub(crate) fn remembered_of(&self, id: RequestId) -> Option<&Remembered> {
        self.remembered.iter().rev().find(|ended| ended.id == id)
    }

    /// Requests with a row.
    #[must_use]
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Requests without a row.
    #[must_use]
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// What it was made with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Places of a plan's arrays in the caller's memory.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Plans made so far; the next one writes memory `steps % 2`.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The pool, to look at.
    #[must_use]
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Free blocks that are promised to running requests.
    #[must_use]
    pub fn num_promised(&self) -> u32 {
        self.promised
    }

    /// Counters since the start.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    pub(crate) fn request(&self, seat: usize) -> &Request {
        self.seats[seat].as_ref().expect("a seat in use")
    }

    pub(crate) fn request_mut(&mut self, seat: usize) -> &mut Request {
        self.seats[seat].as_mut().expect("a seat in use")
    }

    /// Position among the running requests, which are in order of rank, of the first that does not rank above `seat`.
    pub(crate) fn rank_in_running(&self, seat: usize) -> usize {
        let rank = self.asks[seat].rank;
        self.running.partition_point(|&other| self.asks[other].rank < rank)
    }

    /// The request at `seat`, which has no row and no block, waits from now on.
    pub(crate) fn start_waiting(&mut self, seat: usize) {
        self.begin_to_follow(seat);
        let tokens = self.request(seat).num_tokens();
        let backlog = Backlog { requests: 1, tokens: tokens as u64, blocks: self.blocks_of(tokens) };
        self.backlog.add(backlog);
        self.asks[seat].backlog = backlog;
        let ask = &self.asks[seat];
        let tenant = self.tenants.of_mut(ask.tenant);
        tenant.backlog.add(backlog);
        self.waiting.join(seat, ask, tenant.rules.weight);
    }

    /// The request at `seat` has left the line.
    pub(crate) fn end_waiting(&mut self, seat: usize) {
        self.end_to_follow(seat);
        let backlog = std::mem::take(&mut self.asks[seat].backlog);
        self.backlog.take(backlog);
        self.tenants.of_mut(self.asks[seat].tenant).backlog.take(backlog);
    }

    /// Blocks for so many tokens, in all groups.
    pub(crate) fn blocks_of(&self, tokens: usize) -> u64 {
        self.groups.need(0, 0, tokens) as u64
    }

    /// Takes a running request's row and blocks away. It is in neither line afterwards.
    pub(crate) fn stop_running(&mut self, seat: usize) {
        let at = self.rank_in_running(seat);
        self.running.remove(at);
        let request = self.seats[seat].as_mut().expect("a seat in use");
        let Place::Running(row) = request.place else { unreachable!("only running requests are stopped") };
        self.promised -= std::mem::take(&mut request.promised);
        self.free_rows.push(row);
        if !mutant::is_on(Mutant::SpareRowsLost) {
            self.free_rows.append(&mut request.spare_rows);
        }
        let all = request.cut(0);
        let planned_in = request.planned_in;
        let when = self.when_free(planned_in, all.blocks());
        self.pool.release(all, when);
        // Who shared its tail with this one may have a copy less to make.
        self.owes = true;
        self.close_account(seat);
    }

    /// When blocks of a table that was last planned in step `planned_in` (0 = no step names them) are free once nobody holds them: those
    /// that steps in flight name, when these have ended.
    pub(crate) fn when_free(&mut self, planned_in: u64, blocks: &[BlockId]) -> Release {
        let mut until = 0;
        if self.flight.runs(planned_in) {
            self.flight.orphan(blocks, planned_in);
            until = planned_in;
        }
        until = blocks.iter().map(|&block| self.flight.orphaned_until(block)).fold(until, u64::max);
        if until == 0 || mutant::is_on(Mutant::FreeInFlight) { Release::Now } else { Release::Until(until) }
    }

    /// Records the end of a request that is in neither line any more, and frees its seat.
    pub(crate) fn end(&mut self, seat: usize, end: End) {
        self.note_end(seat, end);
        let request = self.seats[seat].take().expect("a seat in use");
        self.by_id_remove(request.id(), seat);
        if let Some(first) = request.family {
            self.leave_family(first, request.id(), end);
        }
        self.forget_untold(request.id());
        self.empty_seats.push(seat);
        self.tenants.exit(self.asks[seat].tenant);
        self.expiries.clear(seat);
        if self.remembered.len() == REMEMBERED
            && let Some(oldest) = self.remembered.pop_front()
        {
            self.timelines.recycle(oldest.timeline);
        }
        let cached = request.cached.unwrap_or(0);
        let mut timeline = self.timelines.end(seat);
        if mutant::is_on(Mutant::EndForgetsTimeline) {
            timeline = Ring::default();
        }
        self.remembered.push_back(Remembered { id: request.id(), cached, miss: request.miss, timeline });
        match end {
            End::Stop | End::Length => {
                self.counters.finished += 1;
                self.outlook.see_end(request.num_outputs());
            }
            End::Refused => self.counters.queue_expired += 1,
            End::Aborted | End::Capacity => self.counters.aborted += 1,
            End::Expired => {
                self.counters.aborted += 1;
                self.counters.expired += 1;
            }
        }
        let record = [request.id().0 as i64, end as i64];
        // Rows are reused from the next plan on, so who had one must be told first.
        match request.place {
            Place::Running(_) => {
                self.ended.insert(self.ended_with_row, record);
                self.ended_with_row += 1;
            }
            Place::Waiting => self.ended.push_back(record),
        }
        self.leavings.push(request);
    }

    /// Gives back the memory of a few requests that ended.
    pub(crate) fn clear_up(&mut self) {
        self.leavings.truncate(self.leavings.len().saturating_sub(CLEARED_AT_ONCE));
    }

    /// Ends the live request `id`, if there is one.
    pub(crate) fn leave_by_id(&mut self, id: RequestId, end: End) -> bool {
        let seat = self.seat_of(id);
        seat.into_iter().for_each(|seat| self.leave(seat, end));
        seat.is_some()
    }

    /// Ends the request at `seat`, wherever it is.
    pub(crate) fn leave(&mut self, seat: usize, end: End) {
        match self.request(seat).place {
            Place::Waiting => {
                if !mutant::is_on(Mutant::AbortWaitingLeaks) {
                    self.waiting.leave(seat, &self.asks[seat]);
                    self.end_waiting(seat);
                }
            }
            Place::Running(_) => {
                if self.flight.runs(self.request(seat).planned_in) {
                    self.withdraw_writer(seat);
                }
                self.stop_running(seat);
            }
        }
        self.end(seat, end);
    }

    fn check(&self, prompt: &[TokenId], limits: &Limits, siblings: u32) -> Result<()> {
        let invalid =
            |field, value: usize, bound: String| Err(Error::InvalidInput { field, value: value as i128, bound });
        let vocab = self.config.vocab_size;
        let longest = self.config.max_model_len as usize - 1;
        if prompt.is_empty() || prompt.len() > longest {
            return invalid(
                "prompt_len",
                prompt.len(),
                format!("must be 1..={longest} tokens for max_model_len {}", longest + 1),
            );
        }
        // All at once, many at a time: nearly always all are right.
        let is_wrong = prompt.iter().fold(false, |wrong, &id| wrong | (id >= vocab));
        if is_wrong && let Some(&id) = prompt.iter().find(|&&id| id >= vocab) {
            return invalid("token_ids", id as usize, format!("must be 0..={} for this vocabulary", vocab - 1));
        }
        self.check_limits(limits)?;
        self.check_fits(prompt.len(), limits, siblings)
    }

    fn check_asked(&self, asked: &Asked<'_>, now_us: u64) -> Result<()> {
        let invalid = |field, value: i128, bound: String| Err(Error::InvalidInput { field, value, bound });
        tenants::check_name(asked.tenant)?;
        let turn = &asked.turn;
        if !PRIORITIES.contains(&turn.priority) {
            let bound = format!("must be {}..={}", PRIORITIES.start(), PRIORITIES.end());
            return invalid("priority", i128::from(turn.priority), bound);
        }
        let policy = self.config.queue.policy;
        if turn.priority != 0 && policy != PolicyKind::Priority {
            return invalid("priority", i128::from(turn.priority), format!("must be 0 with policy {}", policy.name()));
        }
        for (field, value) in [("deadline_us", turn.deadline_us), ("queue_deadline_us", turn.queue_deadline_us)] {
            if value <= now_us {
                return invalid(field, i128::from(value), format!("must be later than now_us, {now_us}"));
            }
        }
        Ok(())
    }

    /// What the line is to know of the request `id`, whose tenant has one more from here on.
    fn ask(&mut self, id: RequestId, asked: &Asked<'_>, now_us: u64) -> Ask {
        let (tenant, is_reused) = self.tenants.enter(asked.tenant);
        if is_reused {
            self.waiting.policy.forget(tenant as usize);
        }
        let turn = asked.turn;
        let class = self.waiting.policy.class(turn.priority, now_us);
        Ask {
            rank: Rank { class, arrival: id.0 },
            turn,
            tenant,
            submitted_us: now_us,
            due_us: turn.deadline_us.min(turn.queue_deadline_us),
            cached_blocks: 0,
            short_of: None,
            backlog: Backlog::default(),
            passed: 0,
            charged: 0,
        }
    }

    pub(crate) fn check_limits(&self, limits: &Limits) -> Result<()> {
        let invalid =
            |field, value: u32, bound: String| Err(Error::InvalidInput { field, value: i128::from(value), bound });
        let vocab = self.config.vocab_size;
        if let Some(&id) = limits.stop_tokens.iter().find(|&&id| id >= vocab) {
            return invalid("stop_token_ids", id, format!("must be 0..={} for this vocabulary", vocab - 1));
        }
        if limits.max_tokens == 0 {
            return invalid("max_tokens", 0, "must be at least 1".to_owned());
        }
        if limits.min_tokens > limits.max_tokens {
            let bound = format!("must be at most max_tokens, {}", limits.max_tokens);
            return invalid("min_tokens", limits.min_tokens, bound);
        }
        Ok(())
    }

    /// Refuses what cannot fit even alone: the rows of the prompt and of the outputs that must be made. The newest output has no row.
    /// With `no_evict` all sequences must fit at once.
    pub(crate) fn check_fits(&self, prompt_len: usize, limits: &Limits, siblings: u32) -> Result<()> {
        let must_make = limits.min_tokens.max(1) as usize;
        let mut rows = (prompt_len + must_make - 1).min(self.config.max_model_len as usize - 1);
        if self.config.queue.no_evict {
            rows = self.most_rows(prompt_len, limits);
        }
        let needed = self.groups.need(0, 0, rows) as u64 + self.need_of_siblings(prompt_len, limits, siblings);
        let usable =
            self.pool.usable() - if mutant::is_on(Mutant::WatermarkUsable) { 0 } else { self.config.queue.watermark };
        let usable = u64::from(usable) + u64::from(mutant::is_on(Mutant::NullUsable));
        if needed > usable && !mutant::is_on(Mutant::NoNeverFits) {
            return Err(Error::NeverFits { needed, usable });
        }
        Ok(())
    }

    pub(crate) fn sit(&mut self, request: Request, ask: Ask) -> usize {
        let id = request.id();
        let seat = self.empty_seats.pop().unwrap_or_else(|| {
            self.seats.push(None);
            self.asks.push(ask);
            self.seats.len() - 1
        });
        self.asks[seat] = ask;
        self.expiries.set(seat, &ask);
        self.seats[seat] = Some(request);
        self.timelines.begin(seat);
        let seats = &self.seats;
        self.by_id.insert_unique(spread(id), seat, |&seat| spread(seats[seat].as_ref().expect("a seat in use").id()));
        seat
    }

    pub(crate) fn seat_of(&self, id: RequestId) -> Option<usize> {
        let is_it = |&seat: &usize| self.seats[seat].as_ref().is_some_and(|request| request.id() == id);
        self.by_id.find(spread(id), is_it).copied()
    }

    /// Whether the request at `seat` is found by its id, as it is: reads what its end will.
    pub(crate) fn has_id_of(&self, seat: usize) -> bool {
        self.by_id.find(spread(self.request(seat).id()), |&other| other == seat).is_some()
    }

    fn by_id_remove(&mut self, id: RequestId, seat: usize) {
        if let Ok(entry) = self.by_id.find_entry(spread(id), |&other| other == seat) {
            entry.remove();
        }
    }
}

/// Spreads consecutive ids over a hash table (multiplication by 2^64 / golden ratio).
fn spread(id: RequestId) -> u64 {
    id.0.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}
