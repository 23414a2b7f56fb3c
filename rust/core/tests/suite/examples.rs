//! The scheduler by example: what a caller does, what it gets, and what is promised when memory runs short or a step fails.
//!
//! Before: [`Scheduler::submit`]. After: plans, commits, ends. The first test is the whole walk of one request with nothing between it
//! and the scheduler; the others use the driver of the random schedules, which audits after every call and compares every token with
//! the cold answer.

use blocktable_core::chain::{Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::error::Error;
use blocktable_core::group::GroupSpec;
use blocktable_core::ids::{RequestId, StepId};
use blocktable_core::plan::PlanMemory;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::request::{End, Limits};
use blocktable_core::{Committed, Scheduler};

use crate::broken::Checked;
use crate::driver::{Driver, Plan};

/// Ten tokens and two outputs, in blocks of four.
#[test]
fn one_request_walks_through_submit_plan_and_commit() {
    let mut scheduler = Scheduler::new(config(9, 4)).unwrap();
    // The caller owns the memory that plans are written to, twice: plan k writes the set that plan k - 1 does not use.
    let memory =
        |scheduler: &Scheduler| (vec![0_i64; scheduler.layout().words], vec![0_i32; scheduler.layout().table_entries]);
    let mut memories = [memory(&scheduler), memory(&scheduler)];
    let mut plan = |scheduler: &mut Scheduler, now_us: u64| {
        let (staging, tables) = &mut memories[(scheduler.steps() % 2) as usize];
        let sizes = scheduler.plan(now_us, PlanMemory { staging, tables }).unwrap();
        (Plan::read(&sizes, scheduler.layout(), staging), tables.clone())
    };
    let mut committed = Committed::default();

    // Submit: the request waits. It holds nothing yet.
    let prompt = scheduler.prompt((100..110).collect(), Identity::of(Domain::Deployment)).unwrap();
    let id = scheduler.submit(prompt, up_to(2), 0).unwrap();
    assert_eq!((id, scheduler.num_waiting(), scheduler.pool().num_held()), (RequestId(1), 1, 0));

    // The first plan admits it to row 0 and computes its whole prompt in blocks 1, 2 and 3; block 0 is the null block.
    let (first, tables) = plan(&mut scheduler, 10);
    assert_eq!(first.step, 1);
    assert_eq!(first.admitted, [(1, 0)]);
    assert_eq!((first.seq_slots, first.query_starts, first.seq_lens), (vec![0], vec![0, 10], vec![10]));
    assert_eq!(first.token_ids, (100..110).collect::<Vec<i32>>());
    assert_eq!(first.positions, (0..10).collect::<Vec<i32>>());
    assert_eq!(first.slot_mapping, (4..14).collect::<Vec<i64>>(), "block * 4 + offset");
    assert_eq!(first.dirty, [(0, 0, vec![1, 2, 3])], "row 0, from column 0 on");
    assert_eq!(tables[..3], [1, 2, 3]);
    assert_eq!(
        (first.sample_rows, first.sample_requests),
        (vec![9], vec![1]),
        "the last token's logits bring the next"
    );

    // While it is in flight there is no other plan.
    let (staging, tables) = (&mut vec![0; scheduler.layout().words], &mut vec![0; scheduler.layout().table_entries]);
    let second_plan = scheduler.plan(11, PlanMemory { staging, tables });
    assert_eq!(second_plan.unwrap_err(), Error::StepInFlight { step: StepId(1) });

    // The commit brings token 42. The two full blocks of the prompt can be found by others from now on.
    scheduler.commit(StepId(1), &[42], &[0, 1], 20, &mut committed).unwrap();
    assert_eq!(committed, Committed { accepted: 1, ..Committed::default() });
    assert_eq!(scheduler.pool().index().num_published(), 2);

    // The second plan computes that one token, in the third block, which has room for it.
    let (second, _) = plan(&mut scheduler, 30);
    assert_eq!((second.token_ids, second.positions, second.slot_mapping), (vec![42], vec![10], vec![14]));
    assert_eq!((second.seq_lens, second.dirty.len()), (vec![11], 0));

    // Its commit brings the last output: the request ends, and its blocks are free at once.
    scheduler.commit(StepId(2), &[7], &[0, 1], 40, &mut committed).unwrap();
    assert_eq!(committed.ended, [[1, End::Length as i64]]);
    assert_eq!((scheduler.num_running(), scheduler.pool().num_held()), (0, 0));

    // Its partial block is the next to be taken; its published blocks are the last, the chain's tail before its head.
    let free: Vec<u32> = scheduler.pool().free_blocks().map(|block| block.get()).collect();
    assert_eq!(free, [3, 4, 5, 6, 7, 8, 2, 1]);

    // The next plan reports the end to who keeps the books, and has nothing to run.
    let (third, _) = plan(&mut scheduler, 50);
    assert_eq!((third.is_empty(), third.ended), (true, vec![(1, End::Length as i64)]));
    scheduler.audit().unwrap();
}

/// One computes the prompt; seven share its blocks, those of the same step too, and compute their last token only.
#[test]
fn eight_equal_cold_prompts_compute_their_tokens_once() -> Checked {
    for budget in [2048, 64] {
        let limits = Config { max_num_batched_tokens: budget, max_model_len: 1100, ..config(128, 16) };
        let mut driver = Driver::new(limits);
        for _ in 0..8 {
            driver.submit(prompt(1, 1009), up_to(4))?;
        }
        driver.drain()?;
        let prompt_tokens = driver.plans.iter().flat_map(|plan| &plan.positions).filter(|&&position| position < 1009);
        assert_eq!(prompt_tokens.count(), 1009 + 7, "budget {budget}");
        for id in 2..=8 {
            assert_eq!(driver.scheduler.num_cached_tokens(RequestId(id)), Ok(1008));
        }
    }
    Ok(())
}

/// Sixteen go on from one prompt of 1,000 tokens in blocks of 16. After every number of output rows they share its 62 full blocks, and
/// each has blocks of its own for the other 8 rows and its outputs: the partial block is copied when it is written, and once not.
#[test]
fn sixteen_children_share_the_full_blocks_of_their_prompt() -> Checked {
    let mut driver = Driver::new(Config { max_num_seqs: 17, max_model_len: 1100, ..config(256, 16) });
    let parent = driver.submit(prompt(1, 1000), up_to(64))?.expect("it fits");
    while driver.clients[&parent].outputs().is_empty() {
        driver.run_step()?;
    }
    let children: Vec<u64> =
        (0..16).map(|_| Ok(driver.fork(parent, up_to(64))?.expect("a free row"))).collect::<Checked<_>>()?;
    driver.abort(parent)?;
    assert_eq!(driver.scheduler.pool().num_held(), 63, "a fork copies nothing");
    for rows in 1..=60_usize {
        driver.run_step()?;
        assert!(children.iter().all(|child| driver.clients[child].outputs().len() == rows + 1));
        let held = driver.scheduler.pool().num_held() as usize;
        assert_eq!(held, 1000 / 16 + 16 * (1000 % 16 + rows).div_ceil(16), "after {rows} rows each");
    }
    assert_eq!(driver.plans.iter().map(|plan| plan.copies.len()).sum::<usize>(), 15, "the last owner writes in place");
    driver.drain()
}

/// Forks of forks with a window of four blocks: each answers as it would alone, and leaves nothing, in whatever order they go.
#[test]
fn forks_across_a_window_go_in_any_order() -> Checked {
    for order in [[2, 0, 1], [0, 1, 2], [1, 2, 0]] {
        let groups = vec![GroupSpec::sliding(16), GroupSpec::FULL];
        let mut driver = Driver::new(Config { groups, ..config(100, 4) });
        let root = driver.submit(prompt(1, 12), up_to(50))?.expect("it fits");
        driver.run_step()?;
        let first = driver.fork(root, up_to(50))?.expect("a free row");
        driver.run_step()?;
        driver.plan()?;
        let second = driver.fork(first, up_to(50))?.expect("a free row");
        let family = [root, first, second];
        for _ in 0..32 {
            driver.run_step()?;
        }
        for which in order {
            driver.abort(family[which])?;
            driver.run_step()?;
        }
        driver.drain()?;
    }
    Ok(())
}

#[test]
fn a_fork_that_cannot_run_at_once_is_refused_as_a_whole() -> Checked {
    let mut driver = Driver::new(Config { max_num_seqs: 2, ..config(16, 4) });
    let parent = driver.submit(prompt(1, 6), up_to(5))?.expect("it fits");
    assert_eq!(driver.fork(parent, up_to(5))?, None, "it waits");
    driver.run_step()?;
    assert_eq!(driver.fork(parent, up_to(1))?, None, "it has an output already");
    let child = driver.fork(parent, up_to(5))?.expect("a free row");
    assert_eq!(driver.fork(child, up_to(5))?, None, "no free row");
    assert_eq!(driver.fork(99, up_to(5))?, None, "unknown");
    driver.drain()
}

/// The victims are the cheapest of those below, who lost its place stands before who came later, and nobody's answer changes.
#[test]
fn preemption_keeps_the_order_of_arrival() -> Checked {
    let queue = QueueRules { max_pass: 0, ..QueueRules::default() };
    let mut driver = Driver::new(Config { enable_prefix_caching: false, queue, ..config(11, 2) });
    for (family, len) in [(1, 4), (2, 3), (3, 11), (4, 3)] {
        driver.submit(prompt(family, len), up_to(14))?;
    }
    driver.drain()?;
    assert_eq!(victims(&driver)[..3], [2, 3, 2], "2 is cheaper than 3; the next time only 3 is there; then 2 is back");
    let admitted: Vec<u64> = driver.plans.iter().flat_map(|plan| &plan.admitted).map(|&(id, _)| id).collect();
    assert_eq!(admitted[..7], [1, 2, 3, 2, 2, 3, 4], "4 never ran, and waits behind those that were preempted");
    let ends: Vec<u64> = driver.plans.iter().flat_map(|plan| &plan.ended).map(|&(id, _)| id).collect();
    assert_eq!(ends, [1, 2, 3, 4]);
    Ok(())
}

/// A request that was preempted as often as may be comes back when all that it may need is free, and is not taken any more.
#[test]
fn a_request_that_was_preempted_often_enough_is_spared() -> Checked {
    for (max_preemptions, expected) in [(16, vec![2, 2]), (1, vec![2])] {
        let mut driver = Driver::new(Config { enable_prefix_caching: false, max_preemptions, ..config(8, 4) });
        // 1 needs a block in step 2 and again in step 6. 4 ends in between, so 2 runs again by then, unless it waits for its whole need.
        for (family, len, outputs) in [(1, 4, 8), (2, 3, 8), (3, 9, 8), (4, 5, 2)] {
            driver.submit(prompt(family, len), up_to(outputs))?;
        }
        driver.drain()?;
        let victims = victims(&driver);
        assert_eq!(victims[..2.min(victims.len())], expected, "at most {max_preemptions} preemptions");
    }
    Ok(())
}

/// Alone in a pool of 12 rows, with 10 of prompt: the third output's row is the last that fits.
#[test]
fn a_lone_request_that_outgrows_the_pool_ends_for_capacity() -> Checked {
    let mut driver = Driver::new(config(4, 4));
    let id = driver.submit(prompt(1, 10), up_to(9))?.expect("its prompt fits");
    driver.drain()?;
    assert_eq!(driver.clients[&id].outputs().len(), 3);
    assert_eq!(driver.plans.last().map(|plan| plan.ended.clone()), Some(vec![(id, End::Capacity as i64)]));
    assert_eq!(driver.scheduler.counters().aborted, 1);
    Ok(())
}

#[test]
fn what_can_never_fit_is_refused_at_submit_with_the_numbers() {
    let mut scheduler = Scheduler::new(config(4, 4)).unwrap();
    let mut submit = |len, min_tokens| {
        let prompt = scheduler.prompt(prompt(1, len), Identity::of(Domain::Deployment)).unwrap();
        scheduler.submit(prompt, Limits { max_tokens: 40, min_tokens, stop_tokens: vec![] }, 0)
    };
    assert_eq!(submit(13, 0), Err(Error::NeverFits { needed: 4, usable: 3 }), "the null block is not usable");
    assert_eq!(
        submit(1, 13),
        Err(Error::NeverFits { needed: 4, usable: 3 }),
        "12 of 13 outputs have a row, beside the prompt's"
    );
    assert_eq!(submit(12, 0), Ok(RequestId(1)), "the first output needs no row");
    assert_eq!(scheduler.counters().refused, 2);
}

/// The step in flight still writes to its blocks: they are parked until it has ended, and nobody finds what it wrote.
#[test]
fn an_abort_in_flight_parks_the_blocks() -> Checked {
    let mut driver = Driver::new(config(9, 4));
    let id = driver.submit(prompt(1, 10), up_to(4))?.expect("it fits");
    driver.plan()?;
    driver.abort(id)?;
    let counts = |driver: &Driver| {
        let pool = driver.scheduler.pool();
        (pool.num_free(), pool.num_held(), pool.num_parked(), pool.index().num_published())
    };
    assert_eq!(counts(&driver), (5, 0, 3, 0));
    driver.commit(&[])?;
    assert_eq!(counts(&driver), (8, 0, 0, 0));
    let free: Vec<u32> = driver.scheduler.pool().free_blocks().map(|block| block.get()).collect();
    assert_eq!(free, [3, 2, 1, 4, 5, 6, 7, 8], "in the order of a release");
    driver.drain()
}

/// Two requests share what a third is writing in the same step. It fails: all three go on from what was published before, which is
/// nothing, and the sharers' hits are taken back.
#[test]
fn a_failed_step_puts_sharers_back() -> Checked {
    let mut driver = Driver::new(config(16, 4));
    for _ in 0..3 {
        driver.submit(prompt(1, 14), up_to(3))?;
    }
    driver.plan()?;
    assert_eq!(driver.plans[0].token_ids.len(), 14 + 2 + 2);
    assert_eq!(driver.scheduler.num_cached_tokens(RequestId(3)), Ok(12));
    driver.fail()?;
    assert_eq!(driver.scheduler.num_cached_tokens(RequestId(3)), Ok(0));
    assert_eq!(driver.scheduler.pool().index().num_published(), 0);
    assert_eq!(driver.scheduler.counters().failed_steps, 1);
    driver.drain()
}

/// The writer of a shared block is aborted in flight: the sharer goes back, and its token of this step is not its output.
#[test]
fn a_commit_names_the_tokens_that_do_not_count() -> Checked {
    let mut driver = Driver::new(config(16, 4));
    let writer = driver.submit(prompt(1, 14), up_to(3))?.expect("it fits");
    let sharer = driver.submit(prompt(1, 14), up_to(3))?.expect("it fits");
    driver.submit(prompt(2, 5), up_to(3))?;
    driver.plan()?;
    driver.abort(writer)?;
    let mut committed = Committed::default();
    driver.forward();
    let answers = driver.answers().expect("the model ran").iter().map(|&token| token.into()).collect::<Vec<i64>>();
    driver.scheduler.commit(StepId(1), &answers, &[0, 1, 2, 3], 0, &mut committed).unwrap();
    assert_eq!((committed.accepted, committed.dropped), (1, vec![0, 1]));
    assert!(driver.clients[&sharer].is_live());
    Ok(())
}

/// A sample may be left without a token: its row is computed again, and the block that it would have filled is not published.
#[test]
fn a_sample_without_a_token_is_planned_again() -> Checked {
    let mut driver = Driver::new(config(9, 4));
    driver.submit(prompt(1, 8), up_to(2))?;
    driver.plan()?;
    driver.commit(&[true])?;
    assert_eq!(driver.scheduler.pool().index().num_published(), 1);
    driver.plan()?;
    assert_eq!(driver.plans[1].positions, [7]);
    driver.drain()?;
    assert_eq!(driver.scheduler.counters().finished, 1);
    Ok(())
}

/// The chunk of a prefill leaves one token for each decode behind it, and a long prompt never takes more than the threshold.
#[test]
fn a_long_prompt_does_not_stop_the_decodes() -> Checked {
    let limits = Config { max_num_batched_tokens: 16, long_prefill_threshold: 12, ..config(64, 4) };
    let mut driver = Driver::new(limits);
    for family in 1..4 {
        driver.submit(prompt(family, 2), up_to(20))?;
    }
    driver.run_step()?;
    driver.submit(prompt(9, 50), up_to(1))?;
    let before = driver.plans.len();
    while driver.clients[&4].is_live() {
        driver.run_step()?;
    }
    let chunks: Vec<Vec<usize>> = driver.plans[before..].iter().map(Plan::chunks).collect();
    assert_eq!(chunks[..4], [[1, 1, 1, 12], [1, 1, 1, 12], [1, 1, 1, 12], [1, 1, 1, 12]]);
    assert_eq!(chunks[4], [1, 1, 1, 2]);
    driver.drain()
}

fn victims(driver: &Driver) -> Vec<u64> {
    driver.plans.iter().flat_map(|plan| plan.preempted.clone()).collect()
}

fn config(num_blocks: u32, block_size: u32) -> Config {
    Config {
        max_num_seqs: 8,
        max_num_batched_tokens: 512,
        max_waiting: 16,
        explain_misses: true,
        ..Config::new(num_blocks, block_size, 1009, 64)
    }
}

fn prompt(family: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (family * 331 + i * 17) % 1009).collect()
}

fn up_to(max_tokens: u32) -> Limits {
    Limits { max_tokens, ..Limits::default() }
}
