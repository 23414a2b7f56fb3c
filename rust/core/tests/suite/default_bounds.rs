//! The bounds that the policies document, with the numbers of the default configuration: computed from it, read in the
//! documentation, and played.
//!
//! Before: `QueueRules::default()`. After: a request was overtaken as often as its policy's file says it may be at most, or nearly, and
//! never more.

use blocktable_core::config::Config;
use blocktable_core::policy::PolicyKind;
use blocktable_core::queue_rules::{PRIORITIES, QueueRules};
use blocktable_core::rank::{Asked, Turn};

use crate::broken::{Checked, ensure};
use crate::driver::Driver;
use crate::policy_checks::{self, Rounds, ask, overtakers_of, prompt, within};

fn rules(policy: PolicyKind) -> QueueRules {
    QueueRules { policy, ..QueueRules::default() }
}

fn driver_of(policy: PolicyKind) -> Driver {
    Driver::new(policy_checks::config(rules(policy)))
}

fn of_priority(priority: i32) -> Asked<'static> {
    Asked { turn: Turn { priority, ..Turn::default() }, ..Asked::default() }
}

/// `words` stand in the documentation at the head of a file.
fn ensure_documented(file: &str, words: &str) -> Checked {
    let head: Vec<&str> = file.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim).collect();
    ensure(head.join(" ").contains(words), "documented", || format!("{words:?} does not stand in {head:?}"))
}

/// A number with a comma after every three digits.
fn in_words(number: u64) -> String {
    let digits = number.to_string();
    let triples: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|part| std::str::from_utf8(part).expect("digits")).collect();
    triples.join(",")
}

#[test]
fn fcfs_lets_8_smaller_ones_pass() -> Checked {
    let most = rules(PolicyKind::Fcfs).max_pass;
    ensure_documented(include_str!("../../src/policy/fcfs.rs"), &format!("by default {most}."))?;
    let config = Config { num_blocks: 18, max_num_seqs: 8, ..policy_checks::config(rules(PolicyKind::Fcfs)) };
    let mut driver = Driver::new(config);
    ask(&mut driver, prompt(0, 9), 50, Asked::default())?;
    driver.run_step()?;
    // It needs 16 of 17 blocks; a small one of two blocks comes in every step.
    let large = ask(&mut driver, prompt(900, 63), 1, Asked::default())?;
    for i in 0..60 {
        ask(&mut driver, prompt(1 + i, 5), 4, Asked::default())?;
        driver.run_step()?;
    }
    within(driver.clients[&large].passes as usize, most as usize, most as usize)?;
    driver.drain()
}

#[test]
fn priority_lets_who_comes_a_second_later_for_each_number_wait() -> Checked {
    let rules = rules(PolicyKind::Priority);
    let second = 1_000_000;
    ensure(rules.ageing_us == second, "documented", || format!("{rules:?}"))?;
    let file = include_str!("../../src/policy/priority.rs");
    ensure_documented(file, "by default that is 1 s for each priority between them")?;
    let mut driver = driver_of(PolicyKind::Priority);
    let rounds = Rounds { most: 100, pause_us: second / 10 };
    let count = overtakers_of(&mut driver, rounds, of_priority(3), |_| of_priority(0), |i| prompt(i, 9))?;
    within(count, 28, 3 * 10)?;
    // The lowest of all behind the highest, of which one comes in every 50 s.
    let between = (PRIORITIES.end() - PRIORITIES.start()) as u64 * rules.ageing_us / second;
    ensure_documented(file, &format!("{} s for the lowest of all behind the highest", in_words(between)))?;
    let mut driver = driver_of(PolicyKind::Priority);
    let (lowest, highest) = (of_priority(*PRIORITIES.end()), of_priority(*PRIORITIES.start()));
    let rounds = Rounds { most: 100, pause_us: 50 * second };
    let count = overtakers_of(&mut driver, rounds, lowest, |_| highest, |i| prompt(i, 9))?;
    within(count, 38, between as usize / 50)
}

#[test]
fn deadline_lets_who_comes_a_minute_later_wait() -> Checked {
    let seconds = rules(PolicyKind::Deadline).latest_deadline_us / 1_000_000;
    ensure_documented(
        include_str!("../../src/policy/deadline.rs"),
        &format!("by default nobody who comes {seconds} s later"),
    )?;
    let urgent = |now| Asked { turn: Turn { deadline_us: now + 90, ..Turn::default() }, ..Asked::default() };
    let mut driver = driver_of(PolicyKind::Deadline);
    let rounds = Rounds { most: 100, pause_us: 1_000_000 };
    let count = overtakers_of(&mut driver, rounds, Asked::default(), urgent, |i| prompt(i, 9))?;
    within(count, seconds as usize - 2, seconds as usize)
}

#[test]
fn prefix_lets_the_rest_of_a_band_of_1024_go_first() -> Checked {
    let rules = rules(PolicyKind::Prefix);
    let most = rules.prefix_band - 1;
    let words = format!("by default {} + {}.", in_words(u64::from(most)), rules.max_pass);
    ensure_documented(include_str!("../../src/policy/prefix.rs"), &words)?;
    let mut driver = driver_of(PolicyKind::Prefix);
    let shared = |i| [prompt(500, 8), prompt(i, 2)].concat();
    let rounds = Rounds { most: 2 * rules.prefix_band, pause_us: 0 };
    let count = overtakers_of(&mut driver, rounds, Asked::default(), |_| Asked::default(), shared)?;
    within(count, most as usize - 10, most as usize)
}

/// A tenant that was just given the largest prompt waits until the other, which has the smallest requests, was given as much.
#[test]
fn fair_lets_another_tenant_catch_up() -> Checked {
    let (rules, longest) = (rules(PolicyKind::Fair), 4096);
    let config = Config { max_num_seqs: 1, queue: rules.clone(), ..Config::new(600, 16, 1009, 8192) };
    let (tenants, weight) = (2, u64::from(rules.other_tenants.weight));
    let unit = longest.max(2 * u64::from(config.max_num_batched_tokens));
    let most = (tenants - 1) * (unit / weight + 1);
    let (budget, pass) = (in_words(u64::from(config.max_num_batched_tokens)), rules.max_pass);
    ensure_documented(
        include_str!("../../src/policy/fair.rs"),
        &format!(
            "with two tenants, prompts up to {} tokens and a budget of {budget} tokens a step: at most {} + {pass}, and {pass} for a",
            in_words(longest),
            in_words(most)
        ),
    )?;
    let of_tenant = |tenant| Asked { tenant, ..Asked::default() };
    let mut driver = Driver::new(config);
    let large = ask(&mut driver, prompt(1, longest as u32), 1, of_tenant("large"))?;
    while driver.clients[&large].is_live() {
        driver.run_step()?;
    }
    let rounds = Rounds { most: most as u32 + 100, pause_us: 0 };
    let (large, small) = (of_tenant("large"), of_tenant("small"));
    let count = overtakers_of(&mut driver, rounds, large, |_| small, |i| prompt(i, 1))?;
    // Each of them is charged one token of prompt and two for its output.
    within(count, longest as usize / 3 - 10, (most + u64::from(pass)) as usize)
}

#[test]
fn a_request_is_preempted_16_times_at_most() -> Checked {
    let most = Config::new(2, 1, 2, 2).max_preemptions;
    let words = format!("at most `max_preemptions` times, by default {most}");
    ensure_documented(include_str!("../../src/secured.rs"), &words)
}
