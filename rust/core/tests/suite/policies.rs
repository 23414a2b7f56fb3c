//! The bounds on starvation of every policy, with figures, and that what is asked of a turn is kept.
//!
//! Each check is here without a planted fault and in `mutants.rs` with the one that it must find.

use blocktable_core::config::Config;
use blocktable_core::policy::PolicyKind;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::rank::Asked;

use crate::broken::{self, Checked};
use crate::driver::Driver;
use crate::limits_of_the_queue;
use crate::policy_checks;

macro_rules! checks {
    ($($name:ident)*) => { $(#[test] fn $name() -> Checked { policy_checks::$name() })* };
}

checks! {
    a_low_priority_waits_behind_high_ones
    no_deadline_waits_behind_early_ones
    a_cold_prompt_waits_behind_cached_ones
    a_tenant_waits_behind_another_that_floods
    a_large_request_waits_behind_small_ones
    a_tenant_comes_back_with_a_flood
    tenants_have_different_weights
    a_waiting_prompt_becomes_cached
    deadlines_pass
}

macro_rules! limits {
    ($($name:ident)*) => { $(#[test] fn $name() -> Checked { limits_of_the_queue::$name() })* };
}

limits! {
    what_the_watermark_leaves_no_room_for_is_refused
    who_shares_what_is_being_written_waits_for_its_quota
    what_no_quota_can_hold_is_refused
    a_tenant_never_holds_more_than_its_hard_quota
    a_tenant_above_its_soft_quota_yields
    a_queue_is_full_by_tokens_and_blocks_too
    a_full_queue_says_when_to_come_again
    without_eviction_nobody_waits_for_another
    without_eviction_a_fork_that_went_back_waits
    what_grows_is_left_room
    the_lowest_class_is_preempted_first
    only_a_higher_class_displaces
    nobody_is_preempted_more_often_than_may_be
    without_preemptions_what_may_outgrow_the_pool_runs_alone
    a_quota_bounds_what_a_request_is_secured
    who_goes_first_waits_while_room_is_kept
    without_eviction_a_fork_makes_nobody_wait
    without_eviction_a_debt_waits_for_its_quota
    a_quota_takes_nothing_in_vain
    what_is_kept_for_growth_is_told
    who_waits_behind_a_room_is_told_why
}

/// Two tenants on four rows, requests of 12 steps: one sends two in every step, far more than can be served, the other one in 20 steps.
/// A row is free at least every 12 steps, and the quiet tenant's request is the next to get one.
#[test]
fn the_p99_wait_of_a_quiet_tenant_stays_within_the_bound_while_another_floods() -> Checked {
    let queue = QueueRules { policy: PolicyKind::Fair, ..QueueRules::default() };
    let mut driver =
        Driver::new(Config { max_num_seqs: 4, enable_prefix_caching: false, ..policy_checks::config(queue) });
    let tenant = |tenant| Asked { tenant, ..Asked::default() };
    let (mut quiet, mut flood) = (Vec::new(), Vec::new());
    for step in 0..600 {
        if step < 300 {
            for i in 0..2 {
                flood.push((
                    step,
                    policy_checks::ask(&mut driver, policy_checks::prompt(step * 2 + i, 5), 12, tenant("flood"))?,
                ));
            }
        }
        if step % 20 == 7 && step < 300 {
            quiet.push((step, policy_checks::ask(&mut driver, policy_checks::prompt(step, 5), 12, tenant("quiet"))?));
        }
        driver.run_step()?;
    }
    let steps_waited = |asked: &[(u32, u64)]| {
        let step_us = 14;
        let mut waits: Vec<u64> = asked
            .iter()
            .map(|(_, id)| &driver.clients[id])
            .map(|client| client.admitted_us.map_or(u64::MAX, |at| (at - client.submitted_us) / step_us))
            .collect();
        waits.sort_unstable();
        waits[(waits.len() * 99).div_ceil(100) - 1]
    };
    let (quiet, flood) = (steps_waited(&quiet), steps_waited(&flood));
    eprintln!("p99 of steps waited: quiet tenant {quiet}, flooding tenant {flood} (u64::MAX: not started)");
    // Submits of the flood make a step up to 35 us long, so the 12 steps of the bound are at most 30 of 14 us.
    broken::ensure(quiet <= 30 && flood > 300, "starvation", || format!("{quiet} and {flood} steps"))
}
