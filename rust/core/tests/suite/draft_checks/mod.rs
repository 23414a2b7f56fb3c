//! Drafts by example: what is planned for them, what counts, what a wrong one leaves behind, and what they never do to others.
//!
//! Before: a small pool, and a drafter that knows the answer. After: each check says what a reader of the documentation expects; the driver
//! and the world compare every token, every table and every count besides.

use blocktable_core::config::Config;
use blocktable_core::ids::RequestId;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::reason::Reason;
use blocktable_core::request::{End, Limits};

use crate::broken::{Checked, broken, ensure};
use crate::driver::Driver;
use crate::driver::drafts::Guess;
use crate::overlap::World;

const GUESSES: [Guess; 5] = [Guess::Right, Guess::Wrong, Guess::WrongAt(0), Guess::WrongAt(1), Guess::WrongAt(3)];

fn config(num_blocks: u32) -> Config {
    Config {
        max_num_seqs: 4,
        max_num_batched_tokens: 32,
        max_draft_tokens: 5,
        event_buffer_size: 64,
        ..Config::new(num_blocks, 4, 1009, 64)
    }
}

fn prompt(family: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (family * 331 + i * 17) % 1009).collect()
}

fn up_to(max_tokens: u32) -> Limits {
    Limits { max_tokens, ..Limits::default() }
}

fn submit(driver: &mut Driver, family: u32, len: u32, limits: Limits) -> Checked<u64> {
    let id = driver.submit(prompt(family, len), limits)?;
    id.map_or_else(|| broken("submit", "it fits".to_owned()), Ok)
}

/// Steps to its first output, then with five drafts in every step, to its end; how many steps that took.
fn run_with(driver: &mut Driver, id: u64, guess: Guess) -> Checked<usize> {
    while driver.clients[&id].outputs().is_empty() {
        driver.run_step()?;
    }
    let mut steps = 0;
    while driver.clients[&id].is_live() {
        driver.propose(&[id], 5, guess)?;
        driver.run_step()?;
        steps += 1;
    }
    Ok(steps)
}

/// Prompts that end everywhere in a block, drafts of every kind: the cold answer, in as few steps as there are right drafts (101).
pub fn every_drafter_brings_the_same_text() -> Checked {
    for len in 5..=9 {
        for guess in GUESSES {
            let mut driver = Driver::new(config(20));
            let id = submit(&mut driver, 1, len, up_to(24))?;
            let steps = run_with(&mut driver, id, guess)?;
            // Five right drafts bring six tokens; if the draft of number n is the first wrong one, n + 1 come.
            let brings = match guess {
                Guess::Right => 6,
                Guess::WrongAt(number) => number + 1,
                Guess::Wrong => 1,
            };
            let wanted = 23_usize.div_ceil(brings);
            ensure(steps == wanted, "steps", || format!("{guess:?} takes {steps} steps, must be {wanted}"))?;
            driver.drain()?;
        }
    }
    Ok(())
}

/// A second prompt that is what the first one said finds what was right, and nothing of what was wrong.
pub fn only_what_was_right_is_found_again() -> Checked {
    for guess in GUESSES {
        let mut driver = Driver::new(config(20));
        let id = submit(&mut driver, 1, 6, up_to(16))?;
        run_with(&mut driver, id, guess)?;
        let tokens = driver.clients[&id].tokens.clone();
        let again = driver.submit(tokens, up_to(3))?.expect("it fits");
        driver.run_step()?;
        let cached = driver.scheduler.num_cached_tokens(RequestId(again));
        // The newest of 22 tokens has no row, so the last full block ends at 20.
        ensure(cached == Ok(20), "hit", || format!("{guess:?}: {cached:?} tokens are cached"))?;
        driver.drain()?;
    }
    Ok(())
}

/// A run of five right drafts with a stop at each place, under each limit: it ends at the earlier of both (103).
pub fn a_run_ends_at_the_first_stop_or_limit() -> Checked {
    let mut driver = Driver::new(config(20));
    let id = submit(&mut driver, 1, 6, up_to(9))?;
    let said = driver.clients[&id].answer.outputs.clone();
    driver.drain()?;
    for stop_at in 1..=6 {
        for limit in 2..=8 {
            let mut driver = Driver::new(config(20));
            let id = submit(&mut driver, 1, 6, Limits { stop_tokens: vec![said[stop_at]], ..up_to(limit) })?;
            run_with(&mut driver, id, Guess::Right)?;
            let (outputs, is_stop) = ((limit as usize).min(stop_at + 1), stop_at < limit as usize);
            let end = if is_stop { End::Stop } else { End::Length } as i64;
            let client = &driver.clients[&id];
            let is_right = client.outputs() == &said[..outputs] && client.end == Some(end);
            ensure(is_right, "ends", || format!("{:?}, end {:?}", client.outputs(), client.end))?;
            driver.drain()?;
        }
    }
    Ok(())
}

/// Drafts for a request that comes near `max_model_len`: no row at or past the last that it may have (104).
pub fn no_draft_runs_past_the_limit() -> Checked {
    for len in 56..=62 {
        for guess in GUESSES {
            let mut driver = Driver::new(config(20));
            let id = submit(&mut driver, 1, len, up_to(64))?;
            run_with(&mut driver, id, guess)?;
            ensure(driver.clients[&id].tokens.len() == 64, "limit", || "it ends early".to_owned())?;
            driver.drain()?;
        }
    }
    Ok(())
}

/// Two requests fill the pool but for one block, which the first wants for drafts and the second soon needs: nobody is preempted, and
/// with no block left no drafts are planned beyond the rows that are there.
pub fn drafts_preempt_nobody() -> Checked {
    for num_blocks in 5..=7 {
        let config =
            Config { queue: QueueRules { estimate_growth: false, ..QueueRules::default() }, ..config(num_blocks) };
        let mut driver = Driver::new(config);
        let ids = [submit(&mut driver, 1, 6, up_to(7))?, submit(&mut driver, 2, 5, up_to(2))?];
        driver.run_step()?;
        driver.propose(&ids[..1], 5, Guess::Wrong)?;
        driver.run_step()?;
        driver.drain()?;
    }
    Ok(())
}

/// Drafts of a tenant that may hold no more blocks, and with `no_evict` drafts in blocks that were promised.
pub fn drafts_keep_to_quotas_and_promises() -> Checked {
    for guess in GUESSES {
        let queue = QueueRules { no_evict: true, ..QueueRules::default() };
        let mut driver = Driver::new(Config { queue, ..config(8) });
        let id = submit(&mut driver, 1, 6, up_to(12))?;
        let other = submit(&mut driver, 2, 3, up_to(6))?;
        driver.run_step()?;
        while driver.clients[&id].is_live() {
            driver.propose(&[id, other], 5, guess)?;
            driver.run_step()?;
        }
        driver.drain()?;
    }
    Ok(())
}

/// The step that verifies drafts fails, once and again, then says that all are wrong: their blocks are free each time.
pub fn blocks_of_drafts_go_back() -> Checked {
    let mut driver = Driver::new(config(20));
    let id = submit(&mut driver, 1, 6, up_to(12))?;
    driver.run_step()?;
    for fails in [true, true, false] {
        let held = driver.scheduler.pool().num_held();
        driver.propose(&[id], 5, if fails { Guess::Right } else { Guess::Wrong })?;
        driver.plan()?;
        ensure(driver.scheduler.pool().num_held() > held, "lookahead", || "no block is taken".to_owned())?;
        if fails {
            driver.fail()?;
        } else {
            driver.commit(&[])?;
        }
        ensure(driver.scheduler.pool().num_held() == held, "lookahead", || "a block stays".to_owned())?;
    }
    driver.drain()
}

/// A request is forked, taken back, and ended while a step verifies its drafts.
pub fn a_request_changes_while_its_drafts_are_verified() -> Checked {
    for change in 0..4 {
        let mut driver = Driver::new(config(20));
        let id = submit(&mut driver, 1, 6, up_to(12))?;
        driver.run_step()?;
        driver.propose(&[id], 5, Guess::WrongAt(3))?;
        driver.plan()?;
        match change {
            0 => drop(driver.fork(id, up_to(9))?),
            1 => driver.truncate(id, 5)?,
            2 => driver.abort(id)?,
            _ => driver.finish(id)?,
        }
        driver.commit(&[])?;
        driver.drain()?;
    }
    Ok(())
}

/// Depth 2: the step in flight verifies drafts, so the next plan leaves the sequence out and says why; then it goes on.
pub fn a_sequence_with_drafts_is_left_out_of_the_next_plan() -> Checked {
    let mut world = World::new(Config { overlap_depth: 2, ..config(20) });
    let id = world.submit(prompt(1, 6), up_to(20))?.expect("it fits");
    world.plan()?;
    world.commit(0)?;
    for guess in 0..4 {
        world.propose(id, 3, Some(guess), 0)?;
        ensure(world.plan()?, "drafts", || "nothing runs".to_owned())?;
        ensure(!world.plan()?, "drafts", || "it runs before its drafts are verified".to_owned())?;
        let told = world.scheduler.explain(RequestId(id)).expect("it lives").waits_for;
        ensure(told == Some(Reason::DraftsInFlight { drafts: 3 }), "reason", || format!("{told:?}"))?;
        world.commit(0)?;
    }
    world.drain()
}

/// Depth 2: drafts that follow a token on its way are planned with it.
pub fn drafts_follow_a_token_on_its_way() -> Checked {
    let mut world = World::new(Config { overlap_depth: 2, ..config(20) });
    let id = world.submit(prompt(1, 6), up_to(20))?.expect("it fits");
    for _ in 0..4 {
        world.plan()?;
        world.propose(id, 3, None, 1)?;
        world.plan()?;
        world.commit(0)?;
        world.commit(0)?;
    }
    let (drafted, right) = (world.scheduler.counters().drafted_tokens, world.scheduler.counters().accepted_drafts);
    ensure((drafted, right) == (12, 12), "drafts", || format!("{right} of {drafted} are right"))?;
    world.drain()
}

/// Depth 2: the last free block holds drafts of the first sequence when the second one needs it. It waits, and the third stays.
pub fn growth_waits_for_the_blocks_of_drafts() -> Checked {
    let queue = QueueRules { estimate_growth: false, ..QueueRules::default() };
    let mut world = World::new(Config { overlap_depth: 2, queue, enable_prefix_caching: false, ..config(6) });
    let first = world.submit(prompt(1, 6), up_to(8))?.expect("it fits");
    for family in 2..=3 {
        world.submit(prompt(family, 3), up_to(5))?.expect("it fits");
    }
    // Two blocks, one, one: one of five is left. The others fill their blocks with their second row of outputs.
    world.plan()?;
    world.commit(0)?;
    world.propose(first, 5, Some(0), 0)?;
    world.plan()?;
    let held = world.scheduler.pool().num_free();
    ensure(held == 0, "lookahead", || format!("{held} blocks are free"))?;
    world.plan()?;
    let preempted = world.scheduler.counters().preemptions;
    ensure(preempted == 0, "victim", || format!("{preempted} are preempted for drafts"))?;
    world.drain()
}
