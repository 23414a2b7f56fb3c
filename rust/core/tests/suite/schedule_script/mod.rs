//! Random schedules: submits with shared prefixes, steps, failures, aborts in every state, on small pools with odd limits.
//!
//! Before: proptest draws a [`Schedule`]. After: [`Schedule::run`] has played it through the [`Driver`], which checks everything after
//! every call, and drained it. The same schedule brings the same plans.

use proptest::collection::vec;
use proptest::prelude::*;

use blocktable_core::chain::{Adapter, Domain, Identity, Media, Salt};
use blocktable_core::config::Config;
use blocktable_core::group::GroupSpec;
use blocktable_core::policy::PolicyKind;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::rank::{Asked, Turn};
use blocktable_core::request::Limits;
use blocktable_core::retention::TokenRange;
use blocktable_core::shares::DomainShare;
use blocktable_core::tenants::TenantRules;

use crate::broken::{Checked, ensure};
use crate::driver::drafts::Guess;
use crate::driver::{ColdAnswer, Driver, mark};

pub const VOCAB: u32 = 1009;

/// No tenant may have such a name.
const LONG_NAME: &str = match std::str::from_utf8(&[b'n'; 1025]) {
    Ok(name) => name,
    Err(_) => unreachable!(),
};

/// What is submitted. Prompts of one family begin alike, and few suffixes differ, so that whole prompts meet again.
#[derive(Clone, Debug)]
pub struct Ask {
    family: u32,
    shared: usize,
    suffix: u32,
    own: usize,
    /// Who asks, and how: see [`Ask::identity`].
    who: u8,
    max_tokens: u32,
    min_tokens: u32,
    /// The output of the cold answer that is made a stop token.
    stop_at: Option<usize>,
    /// How long its blocks are to stay.
    kept: Option<TokenRange>,
    turn: Say,
}

/// What a request says of its turn; times are in microseconds from its submission.
#[derive(Clone, Copy, Debug)]
pub struct Say {
    tenant: usize,
    priority: i32,
    deadline: Option<u64>,
    queue_deadline: Option<u64>,
}

/// One call. Requests are chosen modulo those that there ever were.
#[derive(Clone, Debug)]
pub enum Event {
    /// The same prompt, so many times.
    Submit(Ask, usize),
    /// What submit must refuse as invalid.
    SubmitNonsense(u8),
    /// A whole step.
    Step,
    Plan,
    Forward,
    /// Which samples get no token, by bits.
    Commit {
        withheld: u8,
    },
    Fail,
    Abort(usize),
    /// One of those that the step in flight runs; plans first if none is.
    AbortPlanned(usize),
    Finish(usize),
    /// One of those that run, with so many outputs more.
    Fork(usize, u32),
    /// To so many 256ths of its tokens.
    Truncate(usize, u8),
    /// So many drafts for the requests of these bits; which of them is wrong, if any.
    Propose {
        who: u64,
        count: usize,
        wrong: Option<usize>,
    },
    ProposeNonsense,
    /// This question of the next plan is refused, counted from 1.
    Refuse(u32),
    ResetPrefixCache,
    /// The prompt of one of the requests, as far as it is cached.
    Pin(usize),
    Unpin(usize),
    /// Other weights compute from now on, of a few versions.
    SetWeights(u8),
    /// So many milliseconds pass.
    Wait(u64),
    Nonsense,
}

/// A scheduler and what happens to it.
#[derive(Clone, Debug)]
pub struct Schedule {
    pub config: Config,
    pub events: Vec<Event>,
}

/// Schedules on pools of 1 to about 80 rows.
pub fn schedules() -> impl Strategy<Value = Schedule> {
    (configs(), vec(events(), 1..60)).prop_map(|(config, events)| Schedule { config, events })
}

fn configs() -> impl Strategy<Value = Config> {
    let rows = prop_oneof![1 => 1..=8_u32, 4 => 9..=80_u32];
    let sizes = (rows, 1..=7_u32, 6..=56_u32);
    let budget = prop_oneof![1 => 1..=4_u32, 2 => 5..=16_u32, 3 => 17..=64_u32];
    let threshold = prop_oneof![2 => Just(0_u32), 1 => 1..=9_u32];
    let waiting = prop_oneof![1 => 1..=2_u32, 4 => 3..=12_u32];
    let limits = (1..=5_u32, budget, waiting, threshold, 0..=3_u32);
    let events = prop_oneof![1 => Just(0_u32), 1 => 1..=6_u32, 3 => 7..=80_u32];
    let features = (prop::bool::weighted(0.85), events, groups());
    (sizes, limits, features, rules()).prop_map(|(sizes, limits, (caching, events, groups), mut queue)| {
        let (rows, block_size, len) = sizes;
        let num_blocks = 1 + rows.div_ceil(block_size) * (1 + groups.len() as u32) / 2;
        queue.watermark = queue.watermark.min(num_blocks - 2);
        Config {
            max_num_seqs: limits.0,
            max_num_batched_tokens: limits.1,
            max_waiting: limits.2,
            long_prefill_threshold: limits.3,
            max_preemptions: limits.4,
            groups,
            enable_prefix_caching: caching,
            max_draft_tokens: (rows % 4) * 2,
            event_buffer_size: events,
            explain_misses: rows % 5 != 4,
            pin_budget: rows.div_ceil(block_size).saturating_sub(2) / 2,
            domain_shares: shares((rows % 5).saturating_sub(2), rows.div_ceil(block_size)),
            enable_partial_hits: rows % 4 != 3,
            queue,
            ..Config::new(num_blocks, block_size, VOCAB, len)
        }
    })
}

/// Every policy, with so little time that all of their bounds are met.
/// Some share of `usable` blocks for as many of the tenants as `tenants` says.
fn shares(tenants: u32, usable: u32) -> Vec<DomainShare> {
    let share = |name: &[u8], blocks: u32| DomainShare { domain: name.into(), blocks };
    let all = [share(b"a", usable.div_ceil(3)), share(b"b", usable / 2)];
    all.into_iter().filter(|share| share.blocks > 0).take(tenants as usize).collect()
}

fn rules() -> impl Strategy<Value = QueueRules> {
    let policy = prop_oneof![3 => Just(PolicyKind::Fcfs), 5 => proptest::sample::select(&PolicyKind::ALL[1..])];
    let times = (1..300_u64, 1..500_u64, 1..8_u32, 0..4_u32);
    let few = |most: u32| prop_oneof![4 => Just(u32::MAX), 1 => 1..most];
    let quotas = (few(12), few(8), few(4), few(40), few(12));
    let watermark = prop_oneof![3 => Just(0_u32), 1 => 0..4_u32];
    let modes = (watermark, any::<bool>(), prop::bool::weighted(0.2), any::<bool>());
    let limits = (prop_oneof![4 => Just(0_u64), 1 => 1..60_u64], prop_oneof![4 => Just(0_u64), 1 => 1..20_u64]);
    (policy, times, quotas, modes, limits).prop_map(|(policy, times, quotas, modes, limits)| QueueRules {
        policy,
        ageing_us: times.0,
        latest_deadline_us: times.1,
        prefix_band: times.2,
        max_pass: times.3,
        watermark: modes.0,
        estimate_growth: modes.1,
        no_evict: modes.2,
        preempt_for_waiting: modes.3 && !modes.2 && policy == PolicyKind::Priority,
        max_waiting_tokens: limits.0,
        max_waiting_blocks: limits.1,
        tenants: vec![
            ("a".into(), of_quotas(quotas)),
            ("b".into(), TenantRules { weight: 3, ..TenantRules::default() }),
        ],
        ..QueueRules::default()
    })
}

fn of_quotas((hard, soft, requests, tokens, blocks): (u32, u32, u32, u32, u32)) -> TenantRules {
    TenantRules {
        hard_blocks: hard,
        soft_blocks: soft,
        max_waiting: u64::from(requests),
        max_waiting_tokens: u64::from(tokens),
        max_waiting_blocks: u64::from(blocks),
        ..TenantRules::default()
    }
}

/// One group that sees everything, or up to three with windows and without.
fn groups() -> impl Strategy<Value = Vec<GroupSpec>> {
    let window = prop_oneof![1 => Just(None), 2 => (1..=24_u32).prop_map(Some)];
    let group = window.prop_map(|window| GroupSpec { window });
    prop_oneof![2 => Just(vec![GroupSpec::FULL]), 3 => vec(group, 1..=3)]
}

fn events() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (asks(), 1..=1_usize).prop_map(|(ask, times)| Event::Submit(ask, times)),
        2 => (asks(), 2..=4_usize).prop_map(|(ask, times)| Event::Submit(ask, times)),
        1 => (0..11_u8).prop_map(Event::SubmitNonsense),
        14 => Just(Event::Step),
        8 => Just(Event::Plan),
        2 => Just(Event::Forward),
        5 => prop_oneof![2 => Just(0_u8), 1 => any::<u8>()].prop_map(|withheld| Event::Commit { withheld }),
        2 => Just(Event::Fail),
        1 => (0..64_usize).prop_map(Event::Abort),
        2 => (0..3_usize).prop_map(Event::AbortPlanned),
        1 => (0..64_usize).prop_map(Event::Finish),
        3 => (0..64_usize, 0..8_u32).prop_map(|(number, more)| Event::Fork(number, more)),
        1 => (0..64_usize, any::<u8>()).prop_map(|(number, share)| Event::Truncate(number, share)),
        4 => (any::<u64>(), 0..8_usize, proptest::option::weighted(0.5, 0..8_usize)).prop_map(|(who, count, wrong)| Event::Propose { who, count, wrong }),
        1 => Just(Event::ProposeNonsense),
        1 => Just(Event::ResetPrefixCache),
        1 => (0..64_usize).prop_map(Event::Pin),
        1 => (0..64_usize).prop_map(Event::Unpin),
        1 => (0..3_u8).prop_map(Event::SetWeights),
        1 => (1..=2_u64).prop_map(Event::Wait),
        1 => Just(Event::Nonsense),
    ]
}

fn asks() -> impl Strategy<Value = Ask> {
    let who = prop_oneof![3 => Just(0_u8), 1 => 1..12_u8];
    let prompt = (0..2_u32, 0..24_usize, 0..3_u32, prop_oneof![3 => 0..4_usize, 1 => 0..20_usize], who);
    let limits =
        (1..10_u32, prop_oneof![3 => Just(0_u32), 1 => 0..10_u32], proptest::option::weighted(0.3, 0..6_usize));
    let end = prop_oneof![1 => Just(None), 2 => (1..24_u32).prop_map(Some)];
    let duration = prop_oneof![1 => Just(None), 2 => Just(Some(1_u64))];
    let kept = (end, 0..=100_u8, duration).prop_map(|(end, priority, duration_ms)| TokenRange {
        start: 0,
        end,
        priority,
        duration_ms,
    });
    let kept = proptest::option::weighted(0.2, kept);
    let deadline = || prop_oneof![5 => Just(None), 1 => (1..2000_u64).prop_map(Some)];
    let turn = (0..3_usize, -2..3_i32, deadline(), deadline());
    let turn = turn.prop_map(|(tenant, priority, deadline, queue_deadline)| Say {
        tenant,
        priority,
        deadline,
        queue_deadline,
    });
    (prompt, limits, kept, turn).prop_map(|(prompt, (max_tokens, min_tokens, stop_at), kept, turn)| {
        let (family, shared, suffix, own, who) = prompt;
        let min_tokens = min_tokens.min(max_tokens);
        Ask { family, shared, suffix, own, who, max_tokens, min_tokens, stop_at, kept, turn }
    })
}

impl Schedule {
    /// Plays the schedule and drains it; the driver that did.
    ///
    /// # Errors
    /// The first promise that does not hold.
    pub fn run(&self) -> Checked<Driver> {
        let mut driver = Driver::new(self.config.clone());
        self.play(&mut driver)?;
        Ok(driver)
    }

    /// The same on a driver that was made for its configuration.
    ///
    /// # Errors
    /// As [`Schedule::run`].
    pub fn play(&self, driver: &mut Driver) -> Checked {
        let mut ever = Vec::new();
        for event in &self.events {
            play(driver, &mut ever, event)?;
        }
        driver.drain()
    }
}

fn play(driver: &mut Driver, ever: &mut Vec<u64>, event: &Event) -> Checked {
    // One id that was never given, too.
    let pick = |number: usize| ever.get(number % (ever.len() + 1)).copied().unwrap_or(1_000_000);
    match *event {
        Event::Submit(ref ask, times) => (0..times).try_for_each(|_| {
            let (identity, prompt, limits) = ask.request(driver.config());
            // Now and then two or three sequences.
            let siblings = if ask.max_tokens % 3 == 0 { ask.max_tokens / 3 % 3 } else { 0 };
            let asked = Asked { siblings, ..ask.turn.asked(driver) };
            let id = driver.submit_asked(identity, prompt, limits, asked)?;
            ever.extend(id.into_iter().flat_map(|id| id..=id + u64::from(siblings)));
            id.zip(ask.kept).map_or(Ok(()), |(id, range)| driver.keep(id, &[range]))
        }),
        Event::SubmitNonsense(which) => submit_nonsense(driver, which),
        Event::Step if driver.step.is_some() => driver.commit(&[]),
        Event::Step => driver.run_step(),
        Event::Plan => driver.plan().map(|_| ()),
        Event::Forward => {
            driver.forward();
            Ok(())
        }
        Event::Commit { withheld } => driver.commit(&std::array::from_fn::<bool, 8, _>(|bit| withheld >> bit & 1 == 1)),
        Event::Fail => driver.fail(),
        Event::Abort(number) if number % 3 == 1 => driver.end_sequence(pick(number)),
        Event::Abort(number) => driver.abort(pick(number)),
        Event::AbortPlanned(number) => {
            if driver.step.is_none() {
                driver.plan()?;
            }
            let planned = driver.step.as_ref().and_then(|step| step.entries.get(number).map(|entry| entry.id));
            planned.map_or(Ok(()), |id| driver.abort(id))
        }
        Event::Finish(number) => driver.finish(pick(number)),
        Event::Fork(number, more) => {
            let running: Vec<u64> =
                driver.live().filter(|client| client.is_running()).map(|client| client.id).collect();
            let parent = if number % 7 == 6 {
                pick(number)
            } else {
                running.get(number % running.len().max(1)).copied().unwrap_or(0)
            };
            let outputs = driver.clients.get(&parent).map_or(0, |client| client.outputs().len() as u32);
            let limits = Limits { max_tokens: outputs + more, ..Limits::default() };
            ever.extend(driver.fork(parent, limits)?);
            Ok(())
        }
        Event::Truncate(number, share) => {
            let id = pick(number);
            let len = driver.clients.get(&id).map_or(0, |client| client.tokens.len());
            driver.truncate(id, len * (usize::from(share) + 1) / 256)
        }
        Event::Propose { who, count, wrong } => {
            let is_asked = |(at, id): (usize, &u64)| (who >> (at % 64) & 1 == 1).then_some(*id);
            let ids: Vec<u64> = ever.iter().enumerate().filter_map(is_asked).collect();
            let guess = match wrong {
                None => Guess::Right,
                Some(7) => Guess::Wrong,
                Some(at) => Guess::WrongAt(at),
            };
            driver.propose(&ids, count, guess)
        }
        Event::ProposeNonsense => driver.propose_nonsense(),
        Event::Refuse(nth) => {
            driver.refuse_next = nth;
            Ok(())
        }
        Event::ResetPrefixCache => driver.reset_prefix_cache(),
        Event::Pin(number) => {
            let client =
                driver.clients.get(&pick(number)).map(|client| (client.identity.clone(), client.tokens.clone()));
            client.map_or(Ok(()), |(identity, tokens)| driver.pin_as(identity, &tokens).map(drop))
        }
        Event::Unpin(number) => driver.unpin(number),
        Event::SetWeights(version) => driver.set_weights_version(version),
        Event::Wait(milliseconds) => {
            driver.wait(milliseconds * 1000);
            Ok(())
        }
        Event::Nonsense => driver.talk_nonsense(),
    }
}

fn submit_nonsense(driver: &mut Driver, which: u8) -> Checked {
    let longest = driver.config().max_model_len as usize;
    let limits = |max_tokens, min_tokens, stop_tokens| Limits { max_tokens, min_tokens, stop_tokens };
    let (prompt, limits) = match which {
        0 => (vec![], limits(1, 0, vec![])),
        1 => (vec![1; longest], limits(1, 0, vec![])),
        2 => (vec![VOCAB], limits(1, 0, vec![])),
        3 => (vec![1], limits(1, 0, vec![VOCAB])),
        4 => (vec![1], limits(0, 0, vec![])),
        5 => (vec![1], limits(2, 3, vec![])),
        _ => (vec![1], limits(1, 0, vec![])),
    };
    let mut asked = Asked::default();
    match which {
        6 => asked.turn.priority = 1001,
        7 => asked.turn.deadline_us = 0,
        8 => asked.turn.queue_deadline_us = 1,
        9 => asked.tenant = LONG_NAME,
        _ => asked.turn.priority = i32::from(which == 10) * -1001,
    }
    let id = driver.submit_asked(Identity::of(Domain::Deployment), prompt, limits, asked)?;
    ensure(id.is_none(), "submit", || format!("nonsense {which} is accepted"))
}

impl Say {
    fn asked(&self, driver: &Driver) -> Asked<'static> {
        let is_priority = driver.config().queue.policy == PolicyKind::Priority;
        let at = |from_now: Option<u64>| from_now.map_or(u64::MAX, |us| driver.now_us() + 7 + us);
        let turn = Turn {
            priority: if is_priority { self.priority } else { 0 },
            deadline_us: at(self.deadline),
            queue_deadline_us: at(self.queue_deadline),
        };
        Asked { tenant: ["", "a", "b"][self.tenant], turn, ..Asked::default() }
    }
}

impl Ask {
    /// `len` tokens, most of them shared by the family.
    pub fn plain(family: u32, len: usize, max_tokens: u32) -> Self {
        let (shared, own) = (len.saturating_sub(2), len.min(2));
        let turn = Say { tenant: 0, priority: 0, deadline: None, queue_deadline: None };
        Ask { family, shared, suffix: family, own, who: 0, max_tokens, min_tokens: 0, stop_at: None, kept: None, turn }
    }

    /// The same, of a tenant: nameless, a or b.
    pub fn by(self, tenant: usize) -> Self {
        Ask { turn: Say { tenant, ..self.turn }, ..self }
    }

    fn request(&self, config: &Config) -> (Identity, Vec<u32>, Limits) {
        let max_model_len = config.max_model_len;
        let shared = (0..self.shared as u32).map(|i| number(self.family, i));
        let own = (0..self.own as u32).map(|i| number(100 + self.suffix, i));
        let mut prompt: Vec<u32> = shared.chain(own).collect();
        prompt.truncate(max_model_len as usize - 1);
        if prompt.is_empty() {
            prompt.push(number(self.suffix, 0));
        }
        let mut limits = Limits { max_tokens: self.max_tokens, min_tokens: self.min_tokens, stop_tokens: Vec::new() };
        let identity = self.identity(prompt.len());
        let mark = |position| mark(&identity, position, config.block_size as usize);
        let answer = ColdAnswer::of(&prompt, prompt.len(), 0, &limits, VOCAB, max_model_len, &config.groups, mark);
        limits.stop_tokens.extend(self.stop_at.and_then(|at| answer.outputs.get(at)));
        (identity, prompt, limits)
    }

    /// Two tenants, with and without a public range; salts for all and for what is not shared; two loads of an adapter, and media.
    fn identity(&self, prompt_len: usize) -> Identity {
        let tenant = |name: &str| Identity::of(Domain::Tenant(name.as_bytes().into()));
        let plain = Identity::of(Domain::Deployment);
        let public_tokens = self.shared.min(prompt_len);
        let salt = |start, end| vec![Salt { start, end, salt: (*b"salt").into() }];
        let adapter = |load| Some(Adapter { name: (*b"salt").into(), load, path: Box::default() });
        let media = |start: usize| {
            let end = (start + 3).min(prompt_len);
            let id = (*b"picture").into();
            if start < end { vec![Media { start, end, id }] } else { Vec::new() }
        };
        match self.who {
            1 => tenant("a"),
            2 => tenant("b"),
            3 => Identity { public_tokens, ..tenant("a") },
            4 => Identity { public_tokens, ..tenant("b") },
            5 => Identity { public_tokens, ..plain },
            6 => Identity { salts: salt(0, usize::MAX), ..plain },
            7 if public_tokens < prompt_len => Identity { salts: salt(public_tokens, prompt_len), ..plain },
            8 => Identity { adapter: adapter(1), ..plain },
            9 => Identity { adapter: adapter(2), ..plain },
            10 => Identity { media: media(1), ..plain },
            11 => Identity { media: media(2), ..plain },
            _ => plain,
        }
    }
}

/// A token that depends on the two numbers alone.
fn number(family: u32, at: u32) -> u32 {
    let mixed = (u64::from(family) << 32 | u64::from(at)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 40) as u32 % VOCAB
}
