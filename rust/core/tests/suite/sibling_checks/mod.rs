//! Several sequences in one request, by example: what they share, when they begin, and who ends whom.
//!
//! Before: a small pool. After: each check says what a reader of the documentation expects; the driver compares every token with the cold
//! answer of its sequence, and every table and count besides.

use blocktable_core::chain::{Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::error::Error;
use blocktable_core::group::GroupSpec;
use blocktable_core::ids::StepId;
use blocktable_core::plan::PlanMemory;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::rank::Asked;
use blocktable_core::request::{End, Limits};
use blocktable_core::{Committed, Scheduler};

use crate::broken::{Checked, audited, broken, ensure};
use crate::driver::Driver;

fn config(rows: u32) -> Config {
    Config { max_num_seqs: rows, max_num_batched_tokens: 32, ..Config::new(40, 4, 1009, 64) }
}

fn submit(driver: &mut Driver, len: u32, max_tokens: u32, n: u32) -> Checked<Option<u64>> {
    let prompt = (0..len).map(|i| 100 * len + i * 17 % 1009).map(|id| id % 1009).collect();
    let limits = Limits { max_tokens, ..Limits::default() };
    let asked = Asked { siblings: n - 1, ..Asked::default() };
    driver.submit_asked(Identity::of(Domain::Deployment), prompt, limits, asked)
}

fn accepted(id: Option<u64>) -> Checked<u64> {
    id.map_or_else(|| broken("submit", "it fits".to_owned()), Ok)
}

/// Four sequences of 10 tokens in blocks of 4: the prompt is computed once, its two full blocks are shared, the tail is copied.
pub fn the_prompt_is_computed_once_and_shared() -> Checked {
    let mut driver = Driver::new(config(4));
    let id = accepted(submit(&mut driver, 10, 9, 4)?)?;
    driver.run_step()?;
    let computed = driver.scheduler.counters().scheduled_tokens;
    ensure(computed == 10 && driver.live().count() == 4, "siblings", || format!("{computed} tokens are computed"))?;
    driver.run_step()?;
    let (held, copies) = (driver.scheduler.pool().num_held(), driver.plans[1].copies.len());
    ensure((held, copies) == (2 + 4, 3), "siblings", || format!("{held} blocks are held, {copies} copied"))?;
    let first: Vec<u32> = (id..id + 4).map(|id| driver.clients[&id].outputs()[0]).collect();
    ensure(first.iter().any(|token| *token != first[0]), "siblings", || format!("all say {first:?}"))?;
    driver.drain()
}

/// In every state from submission to the last output: an abort ends all sequences, and all that they had is free (77, 78).
pub fn a_request_is_ended_as_one() -> Checked {
    for steps in 0..6 {
        for in_flight in [false, true] {
            let mut driver = Driver::new(Config { long_prefill_threshold: 5, ..config(4) });
            let id = accepted(submit(&mut driver, 10, 4, 3)?)?;
            for _ in 0..steps {
                driver.run_step()?;
            }
            if in_flight {
                driver.plan()?;
            }
            driver.abort(id)?;
            ensure(driver.live().next().is_none(), "siblings", || "a sequence lives on".to_owned())?;
            driver.drain()?;
        }
    }
    Ok(())
}

/// Each sequence ends by itself, and one that is taken out leaves the others alone.
pub fn a_sequence_is_ended_alone() -> Checked {
    for number in 0..3 {
        let mut driver = Driver::new(config(4));
        let id = accepted(submit(&mut driver, 10, 6, 3)?)?;
        driver.run_step()?;
        driver.run_step()?;
        let held = driver.scheduler.pool().num_held();
        driver.end_sequence(id + number)?;
        let left = driver.scheduler.pool().num_held();
        ensure(left + 1 == held && driver.live().count() == 2, "siblings", || {
            format!("{left} of {held} blocks are held")
        })?;
        driver.drain()?;
        let lengths = (0..3).filter(|other| *other != number).map(|other| &driver.clients[&(id + other)]);
        let all_end = lengths.map(|client| client.end).all(|end| end == Some(End::Length as i64));
        ensure(all_end, "siblings", || "the others do not end by their length".to_owned())?;
    }
    Ok(())
}

/// Two sequences outgrow a pool of 7 blocks. The plan that finds no memory ends the first; who is forked from the second before the next
/// plan ends there with it.
pub fn a_fork_ends_with_its_request() -> Checked {
    let mut driver = Driver::new(Config { num_blocks: 8, block_size: 2, ..config(4) });
    let id = accepted(submit(&mut driver, 3, 30, 2)?)?;
    while driver.clients[&id].end.is_none() {
        driver.run_step()?;
    }
    let child = accepted(driver.fork(id + 1, Limits { max_tokens: 30, ..Limits::default() })?)?;
    driver.plan()?;
    let ends = [id, id + 1, child].map(|id| driver.clients[&id].end);
    ensure(ends == [Some(End::Capacity as i64); 3], "siblings", || format!("they end as {ends:?}"))?;
    driver.drain()
}

/// Five rows, requests of three and of three: the second waits until there are rows for all of its sequences.
pub fn a_row_is_kept_for_each() -> Checked {
    let mut driver = Driver::new(Config { long_prefill_threshold: 5, ..config(5) });
    submit(&mut driver, 10, 4, 3)?;
    submit(&mut driver, 9, 4, 3)?;
    driver.run_step()?;
    let running = driver.scheduler.num_running();
    ensure(running == 1, "siblings", || format!("{running} run"))?;
    driver.drain()
}

/// More sequences than may run at once are refused with the numbers.
pub fn too_many_are_refused() -> Checked {
    let mut driver = Driver::new(config(4));
    for n in [5, 6, u32::MAX] {
        let refused = submit(&mut driver, 10, 4, n)?.is_none();
        let told = matches!(&driver.last_refusal, Some(Error::InvalidInput { field: "n", value, .. }) if *value == i128::from(n));
        ensure(refused && told, "siblings", || format!("{n}: {:?}", driver.last_refusal))?;
    }
    driver.drain()
}

/// Around the ends of blocks of 16, three sequences each, three times: all full blocks but that of the last token are found (25).
pub fn the_same_prompt_comes_again() -> Checked {
    for len in [15, 16, 17, 32, 33] {
        let mut driver = Driver::new(Config { max_num_batched_tokens: 64, block_size: 16, ..config(4) });
        for times in 0..3 {
            accepted(submit(&mut driver, len, 3, 3)?)?;
            driver.drain()?;
            let (hits, due) = (driver.scheduler.counters().prefix_hits, times * u64::from((len - 1) / 16 * 16));
            ensure(hits == due, "cached", || format!("{len} tokens: {hits} were found, {due} were there"))?;
        }
    }
    Ok(())
}

/// Three sequences of 14 tokens in blocks of 6, of which they see 3: of three blocks the others share the last, and the first keeps it.
pub fn others_begin_behind_a_window() -> Checked {
    let sizes = Config { block_size: 6, max_model_len: 17, groups: vec![GroupSpec::sliding(3)], ..config(3) };
    let mut driver = Driver::new(Config { enable_prefix_caching: false, ..sizes });
    accepted(submit(&mut driver, 14, 3, 3)?)?;
    driver.run_step()?;
    driver.run_step()?;
    let (told, null) = (driver.plans[1].admitted.len(), driver.seen.out_of_sight);
    ensure((told, null) == (2, 6), "siblings", || format!("{told} are told, {null} entries are null"))?;
    driver.drain()
}

/// All twelve usable blocks are promised to two sequences of 24 tokens in two groups. What the first lets go when the second begins is its
/// own again, and nothing for the small request that waits.
pub fn without_eviction_others_begin_behind_a_window() -> Checked {
    let queue = QueueRules { no_evict: true, ..QueueRules::default() };
    let groups = vec![GroupSpec::sliding(12), GroupSpec::sliding(12)];
    let sizes = Config { num_blocks: 13, block_size: 5, max_model_len: 27, groups, ..config(4) };
    let steps = Config { max_num_batched_tokens: 5, long_prefill_threshold: 4, enable_prefix_caching: false, ..sizes };
    let mut driver = Driver::new(Config { queue, ..steps });
    accepted(submit(&mut driver, 24, 3, 2)?)?;
    let small = accepted(submit(&mut driver, 1, 1, 1)?)?;
    for _ in 0..6 {
        driver.run_step()?;
    }
    // Of five blocks in each group the next query sees three.
    let pool = driver.scheduler.pool();
    let holders = (1..13).map(|id| pool.holders(pool.block(id).expect("a block of this pool")));
    let shared = holders.filter(|&holders| holders == 2).count();
    ensure(shared == 2 * 3, "siblings", || format!("{shared} blocks are shared"))?;
    driver.run_step()?;
    let (siblings, waits) = (driver.seen.siblings, driver.clients[&small].is_waiting());
    ensure(siblings == 1 && waits, "siblings", || format!("{siblings} others; the small one waits: {waits}"))?;
    driver.drain()
}

/// Ten usable blocks of 4 rows. Three sequences of 6 tokens and up to 9 outputs share one block and need 3 each beside it: that is all.
/// Another one of two blocks waits until they are through, and none of them waits for a block.
pub fn without_eviction_every_sequence_has_its_blocks() -> Checked {
    for (usable, fits) in [(9, false), (10, true), (11, true)] {
        let queue = QueueRules { no_evict: true, ..QueueRules::default() };
        let mut driver = Driver::new(Config { num_blocks: usable + 1, queue, ..config(4) });
        let id = submit(&mut driver, 6, 9, 3)?;
        let told = match &driver.last_refusal {
            Some(Error::NeverFits { needed, usable }) => Some((*needed, *usable)),
            _ => None,
        };
        ensure(id.is_some() == fits && told == (!fits).then_some((10, 9)), "siblings", || {
            format!("of {usable} blocks: {id:?}, refused with {told:?}")
        })?;
        let Some(id) = id else { continue };
        let other = accepted(submit(&mut driver, 5, 3, 1)?)?;
        driver.run_step()?;
        let waits = driver.clients[&other].is_waiting();
        ensure(waits && driver.live().filter(|client| client.is_running()).count() == 3, "siblings", || {
            format!("request {other} waits: {waits}")
        })?;
        driver.drain()?;
        let waited = driver.seen.skipped + (id..id + 3).filter(|id| driver.clients[id].preemptions > 0).count();
        ensure(waited == 0, "siblings", || format!("{waited} times one of them waited for a block"))?;
    }
    Ok(())
}

/// Depth 2: the next plan is made before the first outputs are there; the others begin at the commit that brings them.
pub fn others_begin_behind_a_plan_that_did_not_know_them() -> Checked {
    let mut scheduler = Scheduler::new(Config { overlap_depth: 2, ..config(4) }).expect("a valid configuration");
    let memory = || (vec![0; scheduler.layout().words], vec![0; scheduler.layout().table_entries]);
    let mut memories = [memory(), memory()];
    let prompt = scheduler.prompt((0..10).collect(), Identity::of(Domain::Deployment)).expect("a plain prompt");
    let limits = Limits { max_tokens: 7, ..Limits::default() };
    let asked = Asked { siblings: 2, ..Asked::default() };
    scheduler.submit_as(prompt, limits, asked, 0).or_else(|error| broken("submit", error.to_string()))?;
    let mut flying = std::collections::VecDeque::new();
    let mut accepted = 0;
    for _ in 0..40 {
        while flying.len() < 2 {
            let (staging, tables) = &mut memories[(scheduler.steps() % 2) as usize];
            let sizes = scheduler.plan(0, PlanMemory { staging, tables });
            let sizes = sizes.or_else(|error| broken("plan", error.to_string()))?;
            audited(scheduler.audit())?;
            if sizes.seqs == 0 {
                break;
            }
            flying.push_back(sizes);
        }
        let Some(sizes) = flying.pop_front() else { break };
        let (tokens, starts) = (vec![5; sizes.samples], (0..=sizes.samples as i64).collect::<Vec<_>>());
        let mut committed = Committed::default();
        let result = scheduler.commit(StepId(sizes.step), &tokens, &starts, 0, &mut committed);
        result.or_else(|error| broken("commit", error.to_string()))?;
        audited(scheduler.audit())?;
        accepted += committed.accepted;
    }
    let held = scheduler.pool().num_held();
    ensure((accepted, held) == (21, 0), "siblings", || format!("{accepted} outputs, {held} blocks are held"))
}
