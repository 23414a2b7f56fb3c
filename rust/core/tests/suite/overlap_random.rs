//! Random schedules at depth 1 and 2: each request gets its cold answer, whatever the next plan did not know yet.
//!
//! Before: proptest draws calls from a seed. After: they were played through a [`World`], which checks everything after every call, and
//! drained. `BLOCKTABLE_SEED` chooses other schedules, `BLOCKTABLE_CASES` more of them.

use std::cell::RefCell;

use crate::broken;
use crate::overlap_script::{drafting_scripts, scripts};
use crate::seed;

#[test]
fn every_request_gets_its_cold_answer_at_depth_1_and_2() {
    let seen = RefCell::new([0; 20]);
    let cases = seed::run_cases("overlap_random", 2_000, &scripts(), |script| {
        let world = script.run()?;
        let now = world.seen;
        let counts = [
            now.overlapped,
            now.sourced,
            now.dropped,
            now.stopped_late,
            now.failed_under_next,
            now.forked,
            now.truncated,
            world.scheduler.counters().preemptions,
            now.drafted,
            now.right_drafts,
            now.siblings,
            now.born_under_next,
            now.families_left,
            now.most_preempted,
            now.left[0],
            now.left[1],
            now.left[2],
            now.overdue[0],
            now.overdue[1],
            now.overdue[2],
        ];
        seen.borrow_mut().iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        broken::Checked::Ok(())
    });
    let seen = seen.into_inner();
    eprintln!(
        "{cases} schedules: overlapped, sourced, dropped, stopped late, failed, forked, truncated, preempted, \
         drafts, right ones, siblings, those under a later step, families that left, preempted as often as may be, ended while they \
         waited, ran, were in a step, time over while they waited, ran, were in a step: {seen:?}"
    );
    // The rarest comes in every 300th schedule: in few schedules nothing is asked for.
    assert!(seen.iter().all(|&count| count >= u64::from(cases) / 1000), "schedules must meet everything: {seen:?}");
}

#[test]
fn every_request_gets_its_cold_answer_beside_drafts_that_take_the_last_blocks() {
    seed::run_cases("overlap_random, drafting", 1_000, &drafting_scripts(), |script| script.run().map(drop));
}
