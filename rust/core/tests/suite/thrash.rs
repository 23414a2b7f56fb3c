//! A pool far too small for the long outputs of what is admitted: the case in which engines admit and preempt in turn.
//!
//! Before: 48 requests of 3 blocks whose outputs need 16 more, on a pool of 96. After: the same outputs in no more steps than
//! `no_evict` needs, but for a tenth, and each request preempted no more often than it may be.

use blocktable_core::config::Config;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::rank::Asked;

use crate::broken::{Checked, ensure};
use crate::driver::Driver;
use crate::policy_checks::{ask, config, prompt};

/// Steps, preemptions in all, tokens computed anew, and the most preemptions of one request.
fn run(queue: QueueRules, max_preemptions: u32) -> Checked<(usize, u64, u64, u32)> {
    let mut driver = Driver::new(Config {
        num_blocks: 97,
        max_model_len: 128,
        max_num_seqs: 48,
        max_num_batched_tokens: 128,
        enable_prefix_caching: false,
        max_preemptions,
        ..config(queue)
    });
    for i in 0..48 {
        ask(&mut driver, prompt(i, 11), 60 + i % 9, Asked::default())?;
    }
    driver.drain()?;
    let counters = driver.scheduler.counters();
    let most = driver.clients.values().map(|client| client.preemptions).max().unwrap_or(0);
    Ok((counters.steps as usize, counters.preemptions, counters.recomputed_tokens, most))
}

#[test]
fn admission_that_estimates_growth_keeps_the_throughput_of_a_pool_that_never_evicts() -> Checked {
    let never = run(QueueRules { no_evict: true, ..QueueRules::default() }, 16)?;
    let estimated = run(QueueRules::default(), 16)?;
    let greedy = run(QueueRules { estimate_growth: false, ..QueueRules::default() }, 16)?;
    let figures = "(steps, preemptions, tokens computed anew, most preemptions of one request)";
    eprintln!("{figures}: no_evict {never:?}, estimated {estimated:?}, greedy {greedy:?}");
    ensure(never.1 == 0, "no_evict", || format!("{never:?}"))?;
    ensure(estimated.0 * 9 <= never.0 * 10, "throughput", || format!("{estimated:?}, without eviction {never:?}"))?;
    ensure(estimated.1 * 2 <= greedy.1, "thrash", || format!("{estimated:?}, greedy {greedy:?}"))?;
    ensure(estimated.3 <= 4, "preemptions", || format!("{estimated:?}"))
}

#[test]
fn nobody_is_preempted_more_often_than_may_be_when_growth_is_not_estimated() -> Checked {
    for max_preemptions in [0, 1, 2, 5] {
        let greedy = QueueRules { estimate_growth: false, ..QueueRules::default() };
        let (steps, preemptions, recomputed, most) = run(greedy, max_preemptions)?;
        eprintln!(
            "at most {max_preemptions}: {steps} steps, {preemptions} preemptions, {recomputed} tokens anew, {most} of one"
        );
        ensure(most == max_preemptions, "preemptions", || format!("{most}, at most {max_preemptions}"))?;
    }
    Ok(())
}
