//! Random calls for a caller that plans ahead: see [`World`].
//!
//! Before: proptest draws a [`Script`]. After: [`Script::run`] has played it on a small pool, at depth 1 or 2, and drained it.

use proptest::collection::vec;
use proptest::prelude::*;

use blocktable_core::block_hash::Algorithm;
use blocktable_core::config::Config;
use blocktable_core::group::GroupSpec;
use blocktable_core::policy::PolicyKind;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::rank::Turn;
use blocktable_core::request::Limits;

use crate::broken::Checked;
use crate::overlap::World;

const VOCAB: u32 = 97;

/// One call. Requests are chosen modulo those that there ever were.
#[derive(Clone, Debug)]
pub enum Call {
    /// Prompts of one family begin alike. The output of the cold answer with this number, if any, is made a stop token.
    Submit {
        family: u32,
        len: usize,
        own: usize,
        max_tokens: u32,
        stop_at: Option<usize>,
        times: usize,
        /// Sequences beside the first.
        siblings: u32,
        /// In how many plans its time is over, and the time until its first admission.
        due: [Option<u64>; 2],
    },
    Plan,
    Commit {
        withheld: u32,
    },
    Fail,
    Leave(usize, bool),
    Fork(usize, u32),
    Truncate(usize, u8),
    /// So many drafts, of which one may be wrong; the first follows so many tokens on their way.
    Propose {
        number: usize,
        count: usize,
        wrong: Option<usize>,
        ahead: usize,
    },
    Reset,
}

/// A scheduler and what happens to it.
#[derive(Clone, Debug)]
pub struct Script {
    pub config: Config,
    pub calls: Vec<Call>,
}

/// Scripts on pools of 1 to about 60 rows.
pub fn scripts() -> impl Strategy<Value = Script> {
    (configs(), vec(calls(), 1..80)).prop_map(|(config, calls)| Script { config, calls })
}

/// Scripts in which drafts take the last blocks of a small pool, and those beside them grow.
pub fn drafting_scripts() -> impl Strategy<Value = Script> {
    let sizes = (1..=3_u32, 8..=24_u32, 2..=5_u32, prop::bool::ANY);
    let config = sizes.prop_map(|(block_size, rows, seqs, caching)| Config {
        max_num_seqs: seqs,
        max_num_batched_tokens: 64,
        max_waiting: 12,
        max_draft_tokens: 4,
        overlap_depth: 2,
        enable_prefix_caching: caching,
        event_buffer_size: 16,
        queue: QueueRules { estimate_growth: false, ..QueueRules::default() },
        ..Config::new(1 + rows.div_ceil(block_size), block_size, VOCAB, 40)
    });
    let submit = (0..2_u32, 0..5_usize, 0..3_usize, 2..14_u32).prop_map(|(family, len, own, max_tokens)| {
        Call::Submit { family, len, own, max_tokens, stop_at: None, times: 1, siblings: 0, due: [None; 2] }
    });
    let call = prop_oneof![
        2 => submit,
        10 => Just(Call::Plan),
        7 => Just(Call::Commit { withheld: 0 }),
        9 => (0..6_usize, 1..5_usize, proptest::option::weighted(0.7, 0..2_usize), 0..2_usize)
            .prop_map(|(number, count, wrong, ahead)| Call::Propose { number, count, wrong, ahead }),
    ];
    (config, vec(call, 10..80)).prop_map(|(config, calls)| Script { config, calls })
}

fn configs() -> impl Strategy<Value = Config> {
    let window = prop_oneof![1 => Just(None), 1 => (1..=12_u32).prop_map(Some)];
    let group = window.prop_map(|window| GroupSpec { window });
    let groups = prop_oneof![3 => Just(vec![GroupSpec::FULL]), 1 => vec(group, 1..=2)];
    let sizes = (4..=60_u32, 1..=5_u32, 6..=40_u32, groups);
    let budget = prop_oneof![1 => 2..=8_u32, 2 => 9..=48_u32];
    let limits = (1..=5_u32, budget, prop_oneof![2 => Just(0_u32), 1 => 1..=6_u32], 0..=2_u32, 1..=4_u32);
    let policy = proptest::sample::select(&PolicyKind::ALL[..]);
    let features = (prop::bool::weighted(0.85), prop::bool::ANY, policy);
    (sizes, limits, features).prop_map(|((rows, block_size, len, groups), limits, (caching, partial, policy))| Config {
        num_blocks: 1 + rows.div_ceil(block_size) * groups.len() as u32,
        block_size,
        vocab_size: VOCAB,
        max_model_len: len,
        max_num_seqs: limits.0,
        max_num_batched_tokens: limits.1,
        max_waiting: 12,
        long_prefill_threshold: limits.2,
        max_preemptions: limits.3,
        max_draft_tokens: len % 5,
        overlap_depth: 1 + u32::from(limits.4 > 1),
        groups,
        enable_prefix_caching: caching,
        hash_algorithm: Algorithm::DEFAULT,
        hash_seed: Vec::new(),
        event_buffer_size: 16,
        kv_layout: Vec::new(),
        weights_version: Vec::new(),
        explain_misses: rows % 2 == 0,
        pin_budget: 0,
        domain_shares: Vec::new(),
        enable_partial_hits: partial,
        queue: QueueRules { policy, max_pass: 2, no_evict: len % 7 == 6, ..QueueRules::default() },
    })
}

fn calls() -> impl Strategy<Value = Call> {
    let lens = (0..20_usize, prop_oneof![2 => 0..3_usize, 1 => 0..12_usize]);
    let times = (prop_oneof![2 => Just(1), 1 => 2..=3_usize], prop_oneof![3 => Just(0), 1 => 1..=3_u32]);
    let ends = (1..14_u32, proptest::option::weighted(0.4, 0..8_usize));
    let due = || proptest::option::weighted(0.15, 1..25_u64);
    let submit = (0..2_u32, lens, ends, times, [due(), due()]).prop_map(|(family, lens, ends, times, due)| {
        let ((len, own), (max_tokens, stop_at), (times, siblings)) = (lens, ends, times);
        Call::Submit { family, len, own, max_tokens, stop_at, times, siblings, due }
    });
    prop_oneof![
        6 => submit,
        18 => Just(Call::Plan),
        12 => prop_oneof![3 => Just(0_u32), 1 => any::<u32>()].prop_map(|withheld| Call::Commit { withheld }),
        2 => Just(Call::Fail),
        2 => (0..64_usize, any::<bool>()).prop_map(|(number, is_finished)| Call::Leave(number, is_finished)),
        3 => (0..64_usize, 1..8_u32).prop_map(|(number, more)| Call::Fork(number, more)),
        1 => (0..64_usize, any::<u8>()).prop_map(|(number, share)| Call::Truncate(number, share)),
        8 => (0..64_usize, 0..5_usize, proptest::option::weighted(0.4, 0..4_usize), 0..2_usize)
            .prop_map(|(number, count, wrong, ahead)| Call::Propose { number, count, wrong, ahead }),
        1 => Just(Call::Reset),
    ]
}

impl Script {
    /// Plays the calls and drains the scheduler; the world in which that happened.
    ///
    /// # Errors
    /// The first promise that does not hold.
    pub fn run(&self) -> Checked<World> {
        let mut world = World::new(self.config.clone());
        let mut ever = Vec::new();
        for call in &self.calls {
            play(&mut world, &mut ever, call)?;
        }
        world.drain()?;
        Ok(world)
    }
}

fn play(world: &mut World, ever: &mut Vec<u64>, call: &Call) -> Checked {
    let pick = |number: usize| ever.get(number % (ever.len() + 1)).copied().unwrap_or(1_000_000);
    match *call {
        Call::Submit { family, len, own, max_tokens, stop_at, times, siblings, due } => {
            let longest = world.scheduler.config().max_model_len as usize - 1;
            let mut prompt: Vec<u32> = (0..len as u32).map(|i| (7 * i + 31 * family) % VOCAB).collect();
            prompt.extend((0..own as u32).map(|i| (5 * i + 3) % VOCAB));
            prompt.push(family);
            prompt.truncate(longest);
            let mut limits = Limits { max_tokens, ..Limits::default() };
            let answer = world.answer(&prompt, prompt.len(), 0, &limits);
            limits.stop_tokens.extend(stop_at.and_then(|at| answer.outputs.get(at)));
            let [deadline_us, queue_deadline_us] =
                due.map(|plans| plans.map_or(u64::MAX, |plans| world.now_us() + plans));
            let turn = Turn { priority: 0, deadline_us, queue_deadline_us };
            for _ in 0..times {
                let id = world.submit_several(prompt.clone(), limits.clone(), siblings, turn)?;
                ever.extend(id.into_iter().flat_map(|id| id..=id + u64::from(siblings)));
            }
            Ok(())
        }
        Call::Plan => world.plan().map(drop),
        Call::Commit { withheld } => world.commit(withheld),
        Call::Fail => world.fail(),
        Call::Leave(number, false) if number % 3 == 1 => world.end_sequence(pick(number)),
        Call::Leave(number, is_finished) => world.leave(pick(number), is_finished),
        Call::Fork(number, more) => {
            ever.extend(world.fork(pick(number), more)?);
            Ok(())
        }
        Call::Truncate(number, share) => world.truncate(pick(number), share),
        Call::Propose { number, count, wrong, ahead } => world.propose(pick(number), count, wrong, ahead),
        Call::Reset => {
            world.scheduler.reset_prefix_cache();
            Ok(())
        }
    }
}
