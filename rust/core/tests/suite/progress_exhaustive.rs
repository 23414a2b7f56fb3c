//! Progress, not by samples but in every order: three requests, five blocks, two tenants; arrivals, commits, failures and aborts in
//! every order that there is.
//!
//! Before: a configuration. After: from every state that any order of up to [`DEPTH`] events reaches, the requests that live were driven
//! on, and within [`BOUND`] steps none was left; the audit held after every call. Two orders that lead to the same state are followed once.

#![cfg(feature = "mutants")]

use std::collections::HashSet;

use blocktable_core::chain::{Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::policy::PolicyKind;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::rank::{Asked, Turn};
use blocktable_core::request::Limits;
use blocktable_core::tenants::TenantRules;

use crate::broken::{Checked, ensure};
use crate::driver::{self, Driver};
use crate::policy_checks;

/// Events of one order.
const DEPTH: usize = 7;

/// Steps in which three requests must end: three times the tokens of the longest, for each that is ahead of another.
const BOUND: usize = 3 * 3 * 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Submit,
    Plan,
    Commit,
    Withhold,
    Fail,
    Abort(usize),
}

const EVENTS: [Event; 8] = [
    Event::Submit,
    Event::Plan,
    Event::Commit,
    Event::Withhold,
    Event::Fail,
    Event::Abort(0),
    Event::Abort(1),
    Event::Abort(2),
];

/// Prompt and outputs of each request: on five blocks of two rows, two of them together outgrow the pool; the first two begin alike.
const REQUESTS: [(u32, u32, u32); 3] = [(1, 4, 5), (1, 5, 3), (2, 3, 4)];

/// Plays an order; none if it has an event that cannot happen.
fn play(config: &Config, order: &[Event]) -> Checked<Option<(Driver, Vec<u64>)>> {
    let mut driver = Driver::new(config.clone());
    let mut ids = Vec::new();
    for &event in order {
        match event {
            Event::Submit => {
                let Some(&(family, len, outputs)) = REQUESTS.get(ids.len()) else { return Ok(None) };
                let prompt = policy_checks::prompt(family, len);
                let limits = Limits { max_tokens: outputs, ..Limits::default() };
                let is_priority = config.queue.policy == PolicyKind::Priority;
                let priority = if is_priority { 2 - ids.len() as i32 } else { 0 };
                let turn = Turn { priority, ..Turn::default() };
                let asked = Asked { tenant: ["a", "b", "a"][ids.len()], turn, ..Asked::default() };
                ids.push(driver.submit_asked(Identity::of(Domain::Deployment), prompt, limits, asked)?.unwrap_or(0));
            }
            Event::Plan if driver.step.is_none() && driver.live().next().is_some() => drop(driver.plan()?),
            Event::Commit if driver.step.is_some() => driver.commit(&[])?,
            Event::Withhold if driver.step.is_some() => driver.commit(&[true])?,
            Event::Fail if driver.step.is_some() => driver.fail()?,
            Event::Abort(which) => match ids.get(which) {
                Some(id) if driver.clients.get(id).is_some_and(driver::Client::is_live) => driver.abort(*id)?,
                _ => return Ok(None),
            },
            _ => return Ok(None),
        }
    }
    Ok(Some((driver, ids)))
}

/// What the future depends on.
fn state(driver: &Driver) -> String {
    let clients =
        driver.clients.values().map(|client| (client.id, client.row, client.computed, client.tokens.len(), client.end));
    let plan = driver.step.as_ref().map(|step| step.plan.clone());
    format!("{:?} {plan:?} {}", clients.collect::<Vec<_>>(), driver.scheduler.state())
}

fn every_order(queue: QueueRules, max_num_seqs: u32) -> Checked<(usize, usize)> {
    let config = Config {
        num_blocks: 6,
        block_size: 2,
        max_model_len: 11,
        max_num_seqs,
        max_num_batched_tokens: 4,
        max_preemptions: 2,
        ..policy_checks::config(queue)
    };
    let mut seen = HashSet::new();
    let mut orders = vec![Vec::new()];
    let mut played = 0;
    for _ in 0..DEPTH {
        let mut longer = Vec::new();
        for order in &orders {
            for event in EVENTS {
                let order: Vec<Event> = order.iter().copied().chain([event]).collect();
                let Some((mut driver, _)) = play(&config, &order)? else { continue };
                played += 1;
                if !seen.insert(state(&driver)) {
                    continue;
                }
                finish(&mut driver, &order)?;
                longer.push(order);
            }
        }
        orders = longer;
    }
    Ok((played, seen.len()))
}

/// From here on the model answers: within the bound nobody is left, and nothing is held.
fn finish(driver: &mut Driver, order: &[Event]) -> Checked {
    if driver.step.is_some() {
        driver.commit(&[])?;
    }
    for _ in 0..BOUND {
        if driver.live().next().is_none() {
            return driver.drain();
        }
        driver.run_step()?;
    }
    ensure(driver.live().next().is_none(), "progress", || format!("after {order:?} somebody lives for ever"))?;
    driver.drain()
}

fn check(name: &str, queue: QueueRules, max_num_seqs: u32) -> Checked {
    let (played, states) = every_order(queue, max_num_seqs)?;
    eprintln!("{name}: {played} orders reach {states} states");
    ensure(states > 300, "orders", || format!("{states} states"))
}

#[test]
fn everybody_ends_in_every_order_with_two_rows() -> Checked {
    check("fcfs", QueueRules::default(), 2)
}

#[test]
fn everybody_ends_in_every_order_with_quotas() -> Checked {
    let quota = TenantRules { hard_blocks: 4, soft_blocks: 2, ..TenantRules::default() };
    let queue = QueueRules { policy: PolicyKind::Fair, tenants: vec![("a".into(), quota)], ..QueueRules::default() };
    check("fair, with quotas", queue, 3)
}

#[test]
fn everybody_ends_in_every_order_when_higher_classes_displace() -> Checked {
    let queue = QueueRules { policy: PolicyKind::Priority, preempt_for_waiting: true, ..QueueRules::default() };
    check("priority that displaces", queue, 2)
}

#[test]
fn everybody_ends_in_every_order_without_eviction() -> Checked {
    check("no_evict", QueueRules { no_evict: true, ..QueueRules::default() }, 3)
}
