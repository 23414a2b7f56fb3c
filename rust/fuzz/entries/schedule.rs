//! Any bytes, as a schedule: what happens to one small scheduler, a call for each two bytes.
//!
//! Before: a fuzzer, or the core's own tests with a corpus and random bytes, call [`run`]. After: each call did what it says or was
//! refused by its type, every invariant held after each, and everybody left; or it panics.

use blocktable_core::block_hash::Algorithm;
use blocktable_core::chain::{Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::group::GroupSpec;
use blocktable_core::ids::{RequestId, StepId};
use blocktable_core::plan::{PlanMemory, Sizes};
use blocktable_core::request::Limits;
use blocktable_core::{Committed, Scheduler};

/// Calls of one schedule at most.
const MOST_CALLS: usize = 400;

/// Plays `data`; how many calls were not refused.
pub fn run(data: &[u8]) -> usize {
    let Some((head, calls)) = data.split_first_chunk::<4>() else { return 0 };
    let mut world = World::new(*head);
    let done = calls.chunks_exact(2).take(MOST_CALLS).filter(|call| world.call(call[0], call[1])).count();
    world.drain();
    done
}

struct World {
    scheduler: Scheduler,
    memories: [(Vec<i64>, Vec<i32>); 2],
    in_flight: Option<Sizes>,
    pins: Vec<u64>,
    newest: u64,
    now_us: u64,
}

impl World {
    fn new([blocks, size, rows, options]: [u8; 4]) -> World {
        let is_set = |bit: u8| options >> bit & 1 == 1;
        let windows = [vec![None], vec![None, Some(5)], vec![Some(3)], vec![None, Some(4), Some(9)]];
        let windows = &windows[usize::from(options >> 4) % windows.len()];
        let is_plain = windows.len() == 1 && windows[0].is_none();
        let config = Config {
            num_blocks: 2 + u32::from(blocks) % 40,
            block_size: 1 + u32::from(size) % 6,
            vocab_size: 8,
            max_model_len: 48,
            max_num_seqs: 1 + u32::from(rows) % 6,
            max_num_batched_tokens: 1 + u32::from(rows) / 6,
            max_waiting: 6,
            long_prefill_threshold: u32::from(size) / 64,
            max_preemptions: 2,
            overlap_depth: 1,
            max_draft_tokens: 4,
            groups: windows.iter().map(|&window| GroupSpec { window }).collect(),
            enable_prefix_caching: is_set(0),
            hash_algorithm: Algorithm::DEFAULT,
            hash_seed: Vec::new(),
            kv_layout: Vec::new(),
            weights_version: Vec::new(),
            event_buffer_size: if is_set(1) { 16 } else { 0 },
            explain_misses: is_set(2),
            pin_budget: u32::from(blocks) % 40 / 4,
            domain_shares: Vec::new(),
            enable_partial_hits: is_set(3) && is_set(0) && is_plain,
            queue: blocktable_core::queue_rules::QueueRules::default(),
        };
        let scheduler = Scheduler::new(config).expect("a valid configuration");
        let memory = || (vec![0; scheduler.layout().words], vec![0; scheduler.layout().table_entries]);
        let memories = [memory(), memory()];
        World { memories, scheduler, in_flight: None, pins: Vec::new(), newest: 0, now_us: 0 }
    }

    /// One call. True if it was not refused.
    fn call(&mut self, kind: u8, with: u8) -> bool {
        self.now_us += u64::from(with);
        let id = RequestId(self.newest.saturating_sub(u64::from(with % 8)));
        let is_done = match kind % 16 {
            0..=3 => self.submit(kind, with),
            4..=8 => self.step(with),
            9 => self.fail(),
            10 => self.scheduler.abort(id),
            11 => self.fork(id, with),
            12 => self.scheduler.truncate(id, usize::from(with / 8)).is_ok(),
            13 => self.pin(with),
            14 => self.pins.pop().is_some_and(|pin| self.scheduler.unpin(pin).is_ok()),
            _ if with < 128 => self.propose(with),
            _ => self.scheduler.reset_prefix_cache() > 0,
        };
        self.scheduler.audit().expect("every invariant");
        is_done
    }

    fn tokens(with: u8) -> Vec<u32> {
        (0..u32::from(with) % 30 + 1).map(|i| (i + u32::from(with / 128)) % 3).collect()
    }

    fn submit(&mut self, kind: u8, with: u8) -> bool {
        let domain = if kind & 16 == 0 { Domain::Deployment } else { Domain::Tenant(b"other".as_slice().into()) };
        let Ok(prompt) = self.scheduler.prompt(Self::tokens(with), Identity::of(domain)) else { return false };
        let limits = Limits { max_tokens: 1 + u32::from(kind / 32), ..Limits::default() };
        let Ok(id) = self.scheduler.submit(prompt, limits, self.now_us) else { return false };
        self.newest = id.0;
        true
    }

    fn fork(&mut self, parent: RequestId, with: u8) -> bool {
        let limits = Limits { max_tokens: 1 + u32::from(with / 32), ..Limits::default() };
        let Ok(id) = self.scheduler.fork(parent, limits, self.now_us) else { return false };
        self.newest = id.0;
        true
    }

    /// Up to three drafts for one row, which may be nobody's.
    fn propose(&mut self, with: u8) -> bool {
        let drafts = vec![i64::from(with / 16); usize::from(with) % 4];
        self.scheduler.propose(&[i64::from(with / 4 % 4)], &[0, drafts.len() as i64], &drafts).is_ok()
    }

    fn pin(&mut self, with: u8) -> bool {
        let Ok(prompt) = self.scheduler.prompt(Self::tokens(with), Identity::of(Domain::Deployment)) else {
            return false;
        };
        let Ok(pinned) = self.scheduler.pin(&prompt) else { return false };
        self.pins.push(pinned.id);
        true
    }

    /// Plans, or commits what is in flight: sample i gets a token if bit i of `with` is not set.
    fn step(&mut self, with: u8) -> bool {
        let Some(sizes) = self.in_flight.take() else { return self.plan() };
        let (mut tokens, mut starts) = (Vec::new(), vec![0]);
        for sample in 0..sizes.samples {
            if with >> (sample % 8) & 1 == 0 {
                tokens.push(i64::from(with % 8));
            }
            starts.push(tokens.len() as i64);
        }
        let mut committed = Committed::default();
        self.scheduler
            .commit(StepId(sizes.step), &tokens, &starts, self.now_us, &mut committed)
            .expect("a commit of what was planned");
        true
    }

    fn plan(&mut self) -> bool {
        let (staging, tables) = &mut self.memories[(self.scheduler.steps() % 2) as usize];
        let sizes = self.scheduler.plan(self.now_us, PlanMemory { staging, tables }).expect("a plan");
        self.in_flight = (sizes.seqs > 0).then_some(sizes);
        sizes.seqs > 0
    }

    fn fail(&mut self) -> bool {
        let Some(sizes) = self.in_flight.take() else { return false };
        self.scheduler.fail(StepId(sizes.step)).expect("the step in flight");
        true
    }

    /// Everybody leaves, and nothing is held but what is pinned.
    fn drain(&mut self) {
        for pin in std::mem::take(&mut self.pins) {
            self.scheduler.unpin(pin).expect("a pin of ours");
        }
        for _ in 0..10_000 {
            if self.scheduler.num_running() + self.scheduler.num_waiting() == 0 {
                break;
            }
            self.step(0);
        }
        if let Some(sizes) = self.in_flight.take() {
            self.scheduler.fail(StepId(sizes.step)).expect("the step in flight");
        }
        self.scheduler.audit().expect("every invariant");
        let held = self.scheduler.pool().num_held() + self.scheduler.pool().num_parked();
        let live = self.scheduler.num_running() + self.scheduler.num_waiting();
        assert_eq!((held, live), (0, 0), "blocks held, requests alive");
    }
}
