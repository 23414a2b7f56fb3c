//! Progress, not by samples but in every order: three requests, five blocks, two tenants; arrivals, commits, failures and aborts in
//! every order that there is.
//!
//! Before: a configuration. After: in every state that any order of up to [`DEPTH`] events reaches, what can never fit was refused at
//! submit; then the requests that live were driven on, and one of them ended within every [`BOUND`] steps until none was left; the audit
//! held after every call. Two orders that lead to the same state are followed once.

#![cfg(feature = "mutants")]

use std::collections::HashSet;

use blocktable_core::chain::{Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::error::Error;
use blocktable_core::group::GroupSpec;
use blocktable_core::mutant::Mutant;
use blocktable_core::policy::PolicyKind;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::rank::{Asked, Turn};
use blocktable_core::request::Limits;
use blocktable_core::tenants::TenantRules;

use crate::broken::{Checked, ensure};
use crate::driver::{self, Driver};
use crate::mutants::under;
use crate::policy_checks;

/// Events of one order.
const DEPTH: usize = 7;

/// Steps in which one more request must have ended: the tokens of the longest, for each of the three that may be ahead of it.
const BOUND: usize = 3 * 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Submit(usize),
    Plan,
    Commit,
    Withhold,
    Fail,
    Abort(usize),
}

const EVENTS: [Event; 10] = [
    Event::Submit(0),
    Event::Submit(1),
    Event::Submit(2),
    Event::Plan,
    Event::Commit,
    Event::Withhold,
    Event::Fail,
    Event::Abort(0),
    Event::Abort(1),
    Event::Abort(2),
];

/// Prompt and outputs of each request: on five blocks of two rows, two of them together outgrow the pool, and the first alone; the first
/// two begin alike.
const REQUESTS: [(u32, u32, u32); 3] = [(1, 4, 8), (1, 5, 3), (2, 3, 4)];

/// Plays an order; none if it has an event that cannot happen.
fn play(config: &Config, order: &[Event]) -> Checked<Option<Driver>> {
    let mut driver = Driver::new(config.clone());
    let mut ids = [None; REQUESTS.len()];
    for &event in order {
        match event {
            Event::Submit(which) if ids[which].is_none() => {
                let (family, len, outputs) = REQUESTS[which];
                // With `no_evict` it would be refused.
                let outputs = if config.queue.no_evict { outputs.min(5) } else { outputs };
                let is_priority = config.queue.policy == PolicyKind::Priority;
                let priority = if is_priority { 2 - which as i32 } else { 0 };
                let turn = Turn { priority, ..Turn::default() };
                let asked = Asked { tenant: ["a", "b", "a"][which], turn, ..Asked::default() };
                let id = submit(&mut driver, policy_checks::prompt(family, len), outputs, asked)?;
                ensure(id.is_some(), "submit", || format!("request {which} is refused"))?;
                ids[which] = id;
            }
            Event::Plan if driver.step.is_none() && driver.live().next().is_some() => drop(driver.plan()?),
            Event::Commit if driver.step.is_some() => driver.commit(&[])?,
            Event::Withhold if driver.step.is_some() => driver.commit(&[true])?,
            Event::Fail if driver.step.is_some() => driver.fail()?,
            Event::Abort(which) => match ids[which] {
                Some(id) if driver.clients.get(&id).is_some_and(driver::Client::is_live) => driver.abort(id)?,
                _ => return Ok(None),
            },
            _ => return Ok(None),
        }
    }
    Ok(Some(driver))
}

fn submit(driver: &mut Driver, prompt: Vec<u32>, outputs: u32, asked: Asked<'static>) -> Checked<Option<u64>> {
    let limits = Limits { max_tokens: outputs, ..Limits::default() };
    driver.submit_asked(Identity::of(Domain::Deployment), prompt, limits, asked)
}

/// What the future depends on.
fn state(driver: &Driver) -> String {
    let clients =
        driver.clients.values().map(|client| (client.id, client.row, client.computed, client.tokens.len(), client.end));
    let plan = driver.step.as_ref().map(|step| step.plan.clone());
    format!("{:?} {plan:?} {}", clients.collect::<Vec<_>>(), driver.scheduler.state())
}

fn config(queue: QueueRules, max_num_seqs: u32) -> Config {
    Config {
        num_blocks: 6,
        block_size: 2,
        max_model_len: 12,
        max_num_seqs,
        max_num_batched_tokens: 4,
        max_preemptions: 2,
        ..policy_checks::config(queue)
    }
}

/// How many orders of up to `depth` events were played, and how many states they reach.
fn every_order(config: &Config, depth: usize) -> Checked<(usize, usize)> {
    let mut seen = HashSet::new();
    let mut orders = vec![Vec::new()];
    let mut played = 0;
    for _ in 0..depth {
        let mut longer = Vec::new();
        for order in &orders {
            for event in EVENTS {
                let order: Vec<Event> = order.iter().copied().chain([event]).collect();
                let Some(mut driver) = play(config, &order)? else { continue };
                played += 1;
                if !seen.insert(state(&driver)) {
                    continue;
                }
                refuse_what_never_fits(&mut driver)?;
                finish(&mut driver, &order)?;
                longer.push(order);
            }
        }
        orders = longer;
    }
    Ok((played, seen.len()))
}

/// The longest prompt that there may be needs more than the pool, whose groups all take their part; one of a row more than fits beside the
/// watermark, or in a quota, needs a block more.
fn refuse_what_never_fits(driver: &mut Driver) -> Checked {
    let (queue, longest) = (driver.config().queue.clone(), driver.config().max_model_len - 1);
    for tenant in ["a", "b"] {
        let quota = queue.tenants.iter().find(|(name, _)| **name == *tenant).map_or(5, |(_, rules)| rules.hard_blocks);
        let rows = (2 * (5 - queue.watermark).min(quota) + 1).min(longest);
        for rows in [longest, if driver.config().groups.len() > 1 { longest } else { rows }] {
            let asked = Asked { tenant, ..Asked::default() };
            let id = submit(driver, policy_checks::prompt(9, rows), 1, asked)?;
            let kind = driver.last_refusal.take();
            let is_typed = id.is_none() && matches!(kind, Some(Error::NeverFits { .. }));
            ensure(is_typed, "submit", || format!("a prompt of {rows} rows for tenant {tenant} gives {kind:?}"))?;
        }
    }
    Ok(())
}

/// From here on the model answers: within each bound somebody ends until nobody is left, and then nothing is held.
fn finish(driver: &mut Driver, order: &[Event]) -> Checked {
    if driver.step.is_some() {
        driver.commit(&[])?;
    }
    let mut live = driver.live().count();
    while live > 0 {
        let mut left = BOUND;
        while driver.live().count() == live {
            ensure(left > 0, "progress", || format!("after {order:?} nobody of {live} ends in {BOUND} steps"))?;
            driver.run_step()?;
            left -= 1;
        }
        live = driver.live().count();
    }
    driver.drain()
}

fn check(name: &str, config: &Config) -> Checked {
    let (played, states) = every_order(config, DEPTH)?;
    eprintln!("{name}: {played} orders reach {states} states");
    ensure(states > 1000, "orders", || format!("{states} states"))
}

#[test]
fn everybody_ends_in_every_order_with_two_rows() -> Checked {
    check("fcfs", &config(QueueRules::default(), 2))
}

#[test]
fn everybody_ends_in_every_order_with_quotas() -> Checked {
    let quota = TenantRules { hard_blocks: 4, soft_blocks: 2, ..TenantRules::default() };
    let queue = QueueRules { policy: PolicyKind::Fair, tenants: vec![("a".into(), quota)], ..QueueRules::default() };
    check("fair, with quotas", &config(queue, 3))
}

#[test]
fn everybody_ends_in_every_order_when_higher_classes_displace() -> Checked {
    let queue = QueueRules { policy: PolicyKind::Priority, preempt_for_waiting: true, ..QueueRules::default() };
    check("priority that displaces", &config(queue, 2))
}

#[test]
fn everybody_ends_in_every_order_without_eviction() -> Checked {
    check("no_evict", &config(QueueRules { no_evict: true, ..QueueRules::default() }, 3))
}

#[test]
fn everybody_ends_in_every_order_when_nobody_may_be_preempted_twice() -> Checked {
    let queue = QueueRules { policy: PolicyKind::Priority, estimate_growth: false, ..QueueRules::default() };
    check("one preemption", &Config { max_preemptions: 1, ..config(queue, 3) })
}

#[test]
fn everybody_ends_in_every_order_beside_a_watermark() -> Checked {
    check("watermark", &config(QueueRules { watermark: 2, ..QueueRules::default() }, 3))
}

#[test]
fn everybody_ends_in_every_order_with_a_window() -> Checked {
    // Seven blocks, of which the group with the window holds three at most.
    let groups = vec![GroupSpec::FULL, GroupSpec::sliding(3)];
    let config = config(QueueRules::default(), 3);
    check("window", &Config { num_blocks: 8, groups, long_prefill_threshold: 2, ..config })
}

/// A check of every order that finds nothing is worth nothing.
#[test]
fn the_orders_find_who_would_wait_for_ever() {
    let config = config(QueueRules::default(), 2);
    for fault in [Mutant::NeverEndsAlone, Mutant::NoNeverFits, Mutant::NullUsable, Mutant::AbortWaitingLeaks] {
        let found = under(fault, || every_order(&config, 4).map(drop));
        assert!(found.is_err(), "{} is not found", fault.name());
    }
}
