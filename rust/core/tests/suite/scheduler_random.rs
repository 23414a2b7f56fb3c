//! Random schedules over the scheduler, with a model that betrays every wrong KV row: each request gets its cold answer.
//!
//! Before: proptest draws a schedule from a seed. After: it was played through the driver, which audits after every call, keeps a
//! caller's books, recounts every counter, and compares each token and each end with what the request answers alone on memory of its
//! own; then it was drained within a bound on steps. `BLOCKTABLE_SEED` chooses other schedules, `BLOCKTABLE_CASES` more of them.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::broken::{Checked, ensure};
use crate::driver::Driver;
use crate::schedule_corners::{corners, refusing_schedules};
use crate::schedule_script::{Schedule, schedules};
use crate::seed;

#[test]
fn every_request_gets_its_cold_answer_whatever_happens_around_it() {
    let seen = RefCell::new(BTreeMap::new());
    let cases = seed::run_cases("scheduler_random", 2_000, &schedules(), |schedule| {
        let driver = schedule.run()?;
        count(&driver, &mut seen.borrow_mut());
        Checked::Ok(())
    });
    let seen = seen.into_inner();
    eprintln!("{cases} schedules met {seen:?}");
    // The rarest comes in every 300th schedule: in few schedules nothing is asked for.
    let is_rare = |&(_, &count): &(&&str, &u64)| count < u64::from(cases) / 1000;
    assert_eq!(seen.iter().find(is_rare), None, "schedules must meet everything: {seen:?}");
}

#[test]
fn every_request_gets_its_cold_answer_at_quotas_beside_writers_and_short_of_memory() {
    seed::run_cases("scheduler_random, corners", 500, &corners(), |schedule| schedule.run().map(drop));
}

#[test]
fn every_request_gets_its_cold_answer_where_steps_are_refused() {
    seed::run_cases("scheduler_random, refusing", 300, &refusing_schedules(), |schedule| schedule.run().map(drop));
}

#[test]
fn the_same_schedule_brings_the_same_plans() {
    seed::run_cases("scheduler_random, twice", 200, &schedules(), |schedule: Schedule| {
        let (first, second) = (schedule.run()?, schedule.run()?);
        ensure(first.plans == second.plans, "determinism", || "two runs made different plans".to_owned())
    });
}

/// Adds up how often each thing happened that the schedules are there to meet.
fn count(driver: &Driver, seen: &mut BTreeMap<&str, u64>) {
    let (counters, rare) = (driver.scheduler.counters(), driver.seen);
    let happened = [
        ("finished", counters.finished),
        ("aborted", counters.aborted),
        ("refused", counters.refused),
        ("preemptions", counters.preemptions),
        ("failed_steps", counters.failed_steps),
        ("prefix_hits", counters.prefix_hits),
        ("evictions", driver.scheduler.pool().evictions()),
        ("dropped", rare.dropped as u64),
        ("put_back", rare.put_back as u64),
        ("rejoined", rare.rejoined as u64),
        ("ended_in_flight", rare.ended_in_flight as u64),
        ("passed_over", rare.passed_over as u64),
        ("ended_for_capacity", rare.ended_for_capacity as u64),
        ("skipped", rare.skipped as u64),
        ("out_of_sight", rare.out_of_sight as u64),
        ("hits_through_windows", rare.hits_through_windows as u64),
        ("partial_hits", rare.partial_hits as u64),
        ("forked", rare.forked as u64),
        ("truncated", rare.truncated as u64),
        ("copies", rare.copies as u64),
        ("lost_copies", rare.lost_copies as u64),
        ("events", driver.followers.read),
        ("pinned", rare.pinned as u64),
        ("kept", rare.kept as u64),
        ("mixed", rare.mixed as u64),
        ("right_drafts", rare.right_drafts as u64),
        ("wrong_drafts", rare.wrong_drafts as u64),
        ("ended_at_draft", rare.ended_at_draft as u64),
        ("failed_drafts", rare.failed_drafts as u64),
        ("siblings", rare.siblings as u64),
        ("families_left", rare.families_left as u64),
        ("expired", rare.expired as u64),
        ("deadlines", rare.deadlines as u64),
        ("queue_deadlines", rare.queue_deadlines as u64),
        ("overdue_running", rare.overdue_running as u64),
        ("left_waiting", rare.left_waiting as u64),
        ("left_running", rare.left_running as u64),
        ("most_preempted", rare.most_preempted as u64),
        ("chunks", driver.plans.iter().map(|plan| plan.num_chunks_without_sample() as u64).sum()),
        (driver.scheduler.config().queue.policy.name(), counters.finished),
        ("no_evict", u64::from(driver.scheduler.config().queue.no_evict) * counters.finished),
        ("passes", rare.passes as u64),
        ("rooms", rare.rooms as u64),
        ("full", rare.full as u64),
        ("event_restarts", driver.followers.first.restarts as u64),
    ];
    for (what, times) in happened {
        *seen.entry(what).or_default() += times;
    }
}
