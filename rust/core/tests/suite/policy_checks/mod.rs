//! What the policies promise: how often a request is overtaken, and that nobody saves up a turn.
//!
//! Before: a stream of requests that never ends and always goes first, and one that waits behind it. After: each check counts who was
//! admitted before, and compares with the formula at the head of the policy's file.

use blocktable_core::chain::{Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::policy::PolicyKind;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::rank::{Asked, Turn};
use blocktable_core::request::Limits;
use blocktable_core::tenants::TenantRules;

use crate::broken::{Checked, ensure};
use crate::driver::Driver;

/// Microseconds of one round of the streams below: a submit, a plan, a commit.
const ROUND_US: u64 = 21;

pub fn config(queue: QueueRules) -> Config {
    Config { max_num_seqs: 1, max_num_batched_tokens: 64, max_preemptions: 4, queue, ..Config::new(33, 4, 1009, 64) }
}

/// `len` tokens of their own for each `family`.
pub fn prompt(family: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (family * 331 + i * 17) % 1009).collect()
}

/// Submits a request that runs for `outputs` steps.
pub fn ask(driver: &mut Driver, prompt: Vec<u32>, outputs: u32, asked: Asked<'static>) -> Checked<u64> {
    let limits = Limits { max_tokens: outputs, ..Limits::default() };
    let id = driver.submit_asked(Identity::of(Domain::Deployment), prompt, limits, asked)?;
    Ok(id.expect("accepted"))
}

fn of_tenant(tenant: &'static str) -> Asked<'static> {
    Asked { tenant, ..Asked::default() }
}

/// One request `asked` behind three of the stream, of which one more comes in every round: how many that came later were admitted
/// before it, in at most 100 rounds.
fn overtakers(
    queue: QueueRules,
    asked: Asked<'static>,
    stream: impl Fn(u64) -> Asked<'static>,
    of_stream: impl Fn(u32) -> Vec<u32>,
) -> Checked<usize> {
    overtakers_of(&mut Driver::new(config(queue)), Rounds { most: 100, pause_us: 0 }, asked, stream, of_stream)
}

/// How long a stream is watched.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    pub most: u32,
    /// Time that passes before each of them.
    pub pause_us: u64,
}

/// The same on a driver of one row, for so many rounds.
pub fn overtakers_of(
    driver: &mut Driver,
    rounds: Rounds,
    asked: Asked<'static>,
    stream: impl Fn(u64) -> Asked<'static>,
    of_stream: impl Fn(u32) -> Vec<u32>,
) -> Checked<usize> {
    for i in 0..3 {
        let says = stream(driver.now_us() + 7);
        ask(driver, of_stream(i), 1, says)?;
    }
    let waits = ask(driver, prompt(900, 9), 1, asked)?;
    let mut later = Vec::new();
    for i in 3..3 + rounds.most {
        driver.wait(rounds.pause_us);
        let says = stream(driver.now_us() + 7);
        later.push(ask(driver, of_stream(i), 1, says)?);
        driver.run_step()?;
        if !driver.clients[&waits].is_waiting() {
            break;
        }
    }
    let count = later.iter().filter(|id| driver.clients[id].cached.is_some()).count();
    driver.drain()?;
    Ok(count)
}

pub fn within(count: usize, least: usize, most: usize) -> Checked {
    ensure((least..=most).contains(&count), "starvation", || format!("{count} overtakers, must be {least}..={most}"))
}

/// A request of priority 3 behind an endless stream of priority 0.
pub fn a_low_priority_waits_behind_high_ones() -> Checked {
    let queue = QueueRules { policy: PolicyKind::Priority, ageing_us: 100, ..QueueRules::default() };
    let low = Asked { turn: Turn { priority: 3, ..Turn::default() }, ..Asked::default() };
    let count = overtakers(queue, low, |_| Asked::default(), |i| prompt(i, 9))?;
    within(count, 8, (3 * 100_usize).div_ceil(ROUND_US as usize))
}

/// A request without a deadline behind an endless stream of urgent ones.
pub fn no_deadline_waits_behind_early_ones() -> Checked {
    let queue = QueueRules { policy: PolicyKind::Deadline, latest_deadline_us: 300, ..QueueRules::default() };
    let urgent = |now| Asked { turn: Turn { deadline_us: now + 90, ..Turn::default() }, ..Asked::default() };
    let count = overtakers(queue, Asked::default(), urgent, |i| prompt(i, 9))?;
    within(count, 8, 300_usize.div_ceil(ROUND_US as usize))
}

/// A cold request behind an endless stream of requests with a cached prefix.
pub fn a_cold_prompt_waits_behind_cached_ones() -> Checked {
    let queue = QueueRules { policy: PolicyKind::Prefix, prefix_band: 8, ..QueueRules::default() };
    let shared = |i| [prompt(500, 8), prompt(i, 2)].concat();
    let count = overtakers(queue, Asked::default(), |_| Asked::default(), shared)?;
    within(count, 2, 7)
}

/// A request of a second tenant behind an endless stream of the first.
pub fn a_tenant_waits_behind_another_that_floods() -> Checked {
    let queue = QueueRules { policy: PolicyKind::Fair, ..QueueRules::default() };
    within(overtakers(queue, of_tenant("quiet"), |_| of_tenant("flood"), |i| prompt(i, 9))?, 0, 0)
}

/// A request that needs the whole pool behind small ones that never end to come.
pub fn a_large_request_waits_behind_small_ones() -> Checked {
    let queue = QueueRules { max_pass: 3, ..QueueRules::default() };
    let mut driver = Driver::new(Config { num_blocks: 18, max_num_seqs: 8, ..config(queue) });
    ask(&mut driver, prompt(0, 9), 20, Asked::default())?;
    driver.run_step()?;
    let large = ask(&mut driver, prompt(900, 63), 1, Asked::default())?;
    // It needs 16 of 17 blocks; a new small one of two blocks comes in every step and stays for four.
    let mut small = Vec::new();
    for i in 0..60 {
        small.push(ask(&mut driver, prompt(1 + i, 5), 4, Asked::default())?);
        driver.run_step()?;
    }
    ensure(driver.clients[&large].cached.is_some(), "starvation", || "the large one did not start".to_owned())?;
    let passed = driver.clients[&large].passes;
    ensure(passed <= 3, "starvation", || format!("passed {passed} times"))?;
    driver.drain()
}

/// A tenant that was away while another worked comes back with a flood: the other still gets its half.
pub fn a_tenant_comes_back_with_a_flood() -> Checked {
    let queue = QueueRules { policy: PolicyKind::Fair, ..QueueRules::default() };
    let mut driver = Driver::new(config(queue));
    // The one that stays has the higher number, so that ties are the other's.
    let first = ask(&mut driver, prompt(990, 9), 1, of_tenant("returns"))?;
    driver.abort(first)?;
    for i in 0..40 {
        ask(&mut driver, prompt(i, 9), 1, of_tenant("stays"))?;
    }
    for _ in 0..20 {
        driver.run_step()?;
    }
    let flood: Checked<Vec<u64>> =
        (0..40).map(|i| ask(&mut driver, prompt(100 + i, 9), 1, of_tenant("returns"))).collect();
    for _ in 0..20 {
        driver.run_step()?;
    }
    let served = flood?.iter().filter(|id| driver.clients[id].cached.is_some()).count();
    ensure((9..=11).contains(&served), "share", || format!("{served} of 20 admissions are the returning tenant's"))?;
    driver.drain()
}

/// Three tenants that always wait: work in proportion to their weights.
pub fn tenants_have_different_weights() -> Checked {
    let weight = |weight| TenantRules { weight, ..TenantRules::default() };
    let tenants = vec![("two".into(), weight(2)), ("five".into(), weight(5))];
    let queue = QueueRules { policy: PolicyKind::Fair, tenants, ..QueueRules::default() };
    let mut driver = Driver::new(config(queue));
    let names = ["one", "two", "five"];
    let mut asked = Vec::new();
    for i in 0..240 {
        let tenant = (i % 3) as usize;
        asked.push((tenant, ask(&mut driver, prompt(i, 9), 1, of_tenant(names[tenant]))?));
    }
    for _ in 0..80 {
        driver.run_step()?;
    }
    let mut served = [0; 3];
    for (tenant, id) in asked {
        served[tenant] += usize::from(driver.clients[&id].cached.is_some());
    }
    let off = |(served, due): (usize, usize)| served.abs_diff(due) > 1;
    ensure(!served.into_iter().zip([10, 20, 50]).any(off), "share", || format!("{served:?} of 80 admissions"))
}

/// Two cold requests wait; what is published in the meantime makes the later one the better.
pub fn a_waiting_prompt_becomes_cached() -> Checked {
    let queue = QueueRules { policy: PolicyKind::Prefix, ..QueueRules::default() };
    let mut driver = Driver::new(config(queue));
    ask(&mut driver, prompt(7, 9), 3, Asked::default())?;
    let cold = ask(&mut driver, prompt(8, 9), 3, Asked::default())?;
    let warm = ask(&mut driver, [prompt(7, 8), prompt(9, 3)].concat(), 3, Asked::default())?;
    for _ in 0..4 {
        driver.run_step()?;
    }
    let admitted = |id| !driver.clients[&id].is_waiting();
    ensure(admitted(warm) && !admitted(cold), "order", || "the longest cached prefix does not go first".to_owned())?;
    // And once it is evicted it is not the better any more.
    driver.reset_prefix_cache()?;
    driver.drain()
}

/// Deadlines of both kinds, met while waiting and while running.
pub fn deadlines_pass() -> Checked {
    let mut driver = Driver::new(config(QueueRules::default()));
    let until = |deadline_us, queue_deadline_us| Asked {
        turn: Turn { deadline_us, queue_deadline_us, ..Turn::default() },
        ..Asked::default()
    };
    ask(&mut driver, prompt(1, 9), 30, until(150, 100))?;
    ask(&mut driver, prompt(2, 9), 2, until(u64::MAX, 120))?;
    ask(&mut driver, prompt(3, 9), 2, until(130, u64::MAX))?;
    ask(&mut driver, prompt(4, 9), 2, until(1_000_000, 1_000_000))?;
    driver.drain()?;
    let met = (driver.seen.deadlines, driver.seen.queue_deadlines);
    ensure(met == (2, 1), "deadline", || format!("{met:?} deadlines passed"))
}
