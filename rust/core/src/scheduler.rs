//! Decides what each step runs: one token budget over prefill and decode.
//!
//! Before: the border calls. After: [`BlockPool`] gives and takes blocks. This file owns the state; a request comes in `submission.rs` and goes
//! in `ending.rs`; a step is made in `planning.rs` with `admission.rs` and `preemption.rs`, and ends in `commit.rs`; `decodes.rs` is the
//! faster way through both of requests that only decode. Every live request is in exactly one place, waiting or running, and one that
//! ended holds nothing: see `audit.rs`.

use std::collections::{BTreeMap, VecDeque};

use hashbrown::HashTable;

use crate::accounts::Outlook;
use crate::block_hash::{BlockHasher, Prompt};
use crate::block_pool::{BlockPool, Release};
use crate::block_size::BlockSize;
use crate::block_table::BlockTable;
use crate::chain::Identity;
use crate::config::Config;
use crate::drain::Drain;
use crate::ending::{REMEMBERED, Remembered};
use crate::error::{Error, Result};
use crate::events::EventLog;
use crate::expiry::Expiries;
use crate::flight::Flights;
use crate::group::Groups;
use crate::hit::Hit;
use crate::ids::{BlockId, Key, RequestId, Row, TokenId};
use crate::miss::{MissCounts, Seen};
use crate::mutant::{self, Mutant};
use crate::pins::Pins;
use crate::plan::{Draft, Layout};
use crate::policy;
use crate::rank::Ask;
use crate::request::{Place, Request};
use crate::retention::Ranges;
use crate::seat::Seat;
use crate::stats::Counters;
use crate::tenants::{Backlog, Tenants};
use crate::timeline::Timelines;
use crate::waiting_line::WaitingLine;

/// The scheduler of one pool.
pub struct Scheduler {
    pub(crate) config: Config,
    pub(crate) block_size: BlockSize,
    pub(crate) layout: Layout,
    pub(crate) groups: Groups,
    pub(crate) pool: BlockPool,
    pub(crate) hasher: BlockHasher,
    /// Live requests by seat. A seat is reused after its request has ended.
    pub(crate) seats: Vec<Seat>,
    pub(crate) empty_seats: Vec<usize>,
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
    /// With `no_evict`: some running request may have lost a block that it was promised.
    pub(crate) owes: bool,
    /// The waiting request for which room was made, while it is looked at.
    pub(crate) into_room: Option<usize>,
    /// The waiting request for which others were preempted, and the blocks that are promised to it.
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
    /// The same of the last plan.
    pub(crate) takers: Vec<usize>,
    /// Blocks on their way from the pool to the tables of decodes. Kept for its memory.
    pub(crate) begun: BlockTable,
    /// The request that is planned next writes to a block into which the step copies rows.
    pub(crate) copied: bool,
    /// Rows of a partial hit among those.
    pub(crate) partial_rows: usize,
    /// Requests of several sequences, by the first: which of them live.
    pub(crate) families: BTreeMap<RequestId, Vec<RequestId>>,
    /// Those of them that end in the next plan, since one of their sequences found no memory.
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
    pub(crate) leavings: Vec<Request>,
    /// Cached tokens of requests that ended, the newest last.
    pub(crate) remembered: VecDeque<Remembered>,
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
        pool = pool.sharing(&config.domain_shares).brought_in();
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
            begun: BlockTable::new(),
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

    pub(crate) fn sit(&mut self, request: Request, ask: Ask) -> usize {
        let id = request.id();
        let seat = self.empty_seats.pop().unwrap_or_else(|| {
            self.seats.push(Seat::empty());
            self.asks.push(ask);
            self.seats.len() - 1
        });
        self.asks[seat] = ask;
        self.expiries.set(seat, &ask);
        self.seats[seat].give(request);
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

    pub(crate) fn by_id_remove(&mut self, id: RequestId, seat: usize) {
        if let Ok(entry) = self.by_id.find_entry(spread(id), |&other| other == seat) {
            entry.remove();
        }
    }
}

/// Spreads consecutive ids over a hash table (multiplication by 2^64 / golden ratio).
fn spread(id: RequestId) -> u64 {
    id.0.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}
