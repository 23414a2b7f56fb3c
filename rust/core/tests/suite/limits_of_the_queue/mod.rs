//! Limits and quotas, room for growth, and who is preempted for whom.
//!
//! Before: a small pool and a few requests. After: each check says what a reader of the documentation expects.

use blocktable_core::chain::{Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::error::Error;
use blocktable_core::group::GroupSpec;
use blocktable_core::ids::RequestId;
use blocktable_core::policy::PolicyKind;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::rank::{Asked, Turn};
use blocktable_core::reason::Reason;
use blocktable_core::request::Limits;
use blocktable_core::tenants::TenantRules;

use crate::broken::{Checked, broken, ensure};
use crate::driver::Driver;
use crate::policy_checks::{ask, config, prompt};

fn of_tenant(tenant: &'static str) -> Asked<'static> {
    Asked { tenant, ..Asked::default() }
}

fn with_tenant(name: &str, rules: TenantRules) -> QueueRules {
    QueueRules { tenants: vec![(name.into(), rules)], ..QueueRules::default() }
}

fn rows(num_blocks: u32, max_num_seqs: u32, queue: QueueRules) -> Config {
    Config { num_blocks, max_num_seqs, enable_prefix_caching: false, ..config(queue) }
}

/// Whether a request is refused; the driver checks that the rules say so.
fn is_refused(driver: &mut Driver, len: u32, outputs: u32, asked: Asked<'static>) -> Checked<bool> {
    let limits = Limits { max_tokens: outputs, ..Limits::default() };
    Ok(driver.submit_asked(Identity::of(Domain::Deployment), prompt(len, len), limits, asked)?.is_none())
}

/// Ten usable blocks of 4 rows, three of which are never given to a newcomer while others run.
pub fn what_the_watermark_leaves_no_room_for_is_refused() -> Checked {
    let mut driver = Driver::new(rows(11, 2, QueueRules { watermark: 3, ..QueueRules::default() }));
    for (len, refused) in [(28, false), (29, true), (40, true)] {
        let is = is_refused(&mut driver, len, 1, Asked::default())?;
        ensure(is == refused, "submit", || format!("{len} tokens: {is}"))?;
    }
    driver.drain()
}

/// A tenant may hold the 5 blocks that 9 rows need. While the second block of its prefix is being written, its group with a window
/// would keep the first one too, or nothing would be left if the writer failed: that makes 6.
pub fn who_shares_what_is_being_written_waits_for_its_quota() -> Checked {
    let queue = with_tenant("small", TenantRules { hard_blocks: 5, ..TenantRules::default() });
    let groups = vec![GroupSpec::sliding(2), GroupSpec::FULL];
    let config = Config { groups, long_prefill_threshold: 1, enable_prefix_caching: true, ..rows(8, 2, queue) };
    let mut driver = Driver::new(config);
    let limits = Limits { max_tokens: 1, ..Limits::default() };
    for (len, tenant) in [(8, "other"), (9, "small")] {
        let identity = Identity::of(Domain::Deployment);
        driver.submit_asked(identity, prompt(1, len), limits.clone(), of_tenant(tenant))?;
        driver.run_step()?;
    }
    driver.drain()
}

/// A tenant may hold 4 blocks of 4 rows.
pub fn what_no_quota_can_hold_is_refused() -> Checked {
    let rules = TenantRules { hard_blocks: 4, ..TenantRules::default() };
    for no_evict in [false, true] {
        let queue = QueueRules { no_evict, ..with_tenant("small", rules) };
        let mut driver = Driver::new(rows_of_quota(queue));
        for (len, outputs, refused) in [(16, 1, false), (17, 1, true), (16, 8, no_evict)] {
            let is = is_refused(&mut driver, len, outputs, of_tenant("small"))?;
            ensure(is == refused, "submit", || format!("{len} tokens and {outputs} outputs: {is}"))?;
        }
        driver.drain()?;
    }
    Ok(())
}

fn rows_of_quota(queue: QueueRules) -> Config {
    rows(33, 4, queue)
}

/// Two requests of one tenant that together outgrow its quota, beside another tenant's.
pub fn a_tenant_never_holds_more_than_its_hard_quota() -> Checked {
    let mut driver =
        Driver::new(rows_of_quota(with_tenant("small", TenantRules { hard_blocks: 5, ..TenantRules::default() })));
    for i in 0..3 {
        ask(&mut driver, prompt(i, 7), 9, of_tenant("small"))?;
    }
    ask(&mut driver, prompt(9, 7), 30, of_tenant("other"))?;
    driver.drain()?;
    let lone = ask(&mut driver, prompt(4, 7), 40, of_tenant("small"))?;
    driver.drain()?;
    let outputs = driver.clients[&lone].outputs().len();
    ensure((12..=14).contains(&outputs), "capacity", || format!("alone it made {outputs} outputs in 5 blocks"))
}

/// One tenant floods and is above its soft quota; another asks later.
pub fn a_tenant_above_its_soft_quota_yields() -> Checked {
    let queue = with_tenant("flood", TenantRules { soft_blocks: 2, ..TenantRules::default() });
    let mut driver = Driver::new(rows(33, 2, queue));
    for i in 0..6 {
        ask(&mut driver, prompt(i, 11), 6, of_tenant("flood"))?;
    }
    driver.run_step()?;
    let other = ask(&mut driver, prompt(50, 11), 6, of_tenant("other"))?;
    for _ in 0..7 {
        driver.run_step()?;
    }
    let is_first = driver.clients.values().filter(|client| client.cached.is_some()).count() == 4;
    let started = driver.clients[&other].cached.is_some();
    ensure(started && is_first, "yield", || {
        format!("the other tenant started: {started}, and is one of four: {is_first}")
    })?;
    driver.drain()
}

/// Limits in tokens and blocks, for all and for a tenant; and when to come again.
pub fn a_queue_is_full_by_tokens_and_blocks_too() -> Checked {
    let rules = TenantRules { max_waiting_tokens: 20, ..TenantRules::default() };
    let queue = QueueRules { max_waiting_tokens: 40, max_waiting_blocks: 12, ..with_tenant("small", rules) };
    let mut driver = Driver::new(rows(33, 1, queue));
    let cases = [
        ("small", 12, false),
        ("small", 9, true),
        ("small", 8, false),
        ("", 13, false),
        ("", 13, true),
        ("", 1, false),
    ];
    for (tenant, len, refused) in cases {
        let is = is_refused(&mut driver, len, 2, of_tenant(tenant))?;
        ensure(is == refused, "submit", || format!("{len} tokens of {tenant:?}: {is}"))?;
    }
    driver.drain()
}

/// The first time at which there will be room is said only when requests have left at a rate.
pub fn a_full_queue_says_when_to_come_again() -> Checked {
    let mut driver = Driver::new(Config { max_waiting: 3, ..rows(33, 1, QueueRules::default()) });
    let refusal = |driver: &mut Driver| {
        is_refused(driver, 4, 1, Asked::default())?;
        Checked::Ok(driver.last_refusal.clone().expect("full"))
    };
    for i in 0..3 {
        ask(&mut driver, prompt(i, 4), 3, Asked::default())?;
    }
    let Error::QueueFull { what: "max_waiting", limit: 3, waiting: 3, retry_after_us: None } = refusal(&mut driver)?
    else {
        return broken("retry", "nothing was admitted yet, so nothing is known".to_owned());
    };
    // One is admitted every three steps of 14 us.
    for i in 0..12 {
        driver.run_step()?;
        if driver.scheduler.num_waiting() < 3 {
            ask(&mut driver, prompt(10 + i, 4), 3, Asked::default())?;
        }
    }
    let Error::QueueFull { retry_after_us: Some(us), .. } = refusal(&mut driver)? else {
        return broken("retry", "a rate was measured".to_owned());
    };
    ensure((35..=60).contains(&us), "retry", || format!("{us} us"))
}

/// Four blocks, two requests that need three each in the end: never both at once, and never one that waits for the other.
pub fn without_eviction_nobody_waits_for_another() -> Checked {
    let mut driver = Driver::new(rows(5, 4, QueueRules { no_evict: true, ..QueueRules::default() }));
    for i in 0..3 {
        ask(&mut driver, prompt(i, 4), 9, Asked::default())?;
    }
    driver.drain()?;
    let skipped = driver.seen.skipped;
    ensure(skipped == 0, "all at once", || format!("{skipped} times somebody had to wait for a block"))
}

/// The fork's parent goes back behind what both share, further than its promise reaches: it lacks a block then, and no other gives
/// one up for it.
pub fn without_eviction_a_fork_that_went_back_waits() -> Checked {
    let mut driver = Driver::new(rows(9, 4, QueueRules { no_evict: true, ..QueueRules::default() }));
    let parent = ask(&mut driver, prompt(1, 2), 12, Asked::default())?;
    for _ in 0..9 {
        driver.run_step()?;
    }
    let child = driver.fork(parent, Limits { max_tokens: 20, ..Limits::default() })?;
    ensure(child.is_some(), "fork", || "there is room for the child".to_owned())?;
    driver.truncate(parent, 3)?;
    driver.drain()?;
    ensure(driver.seen.skipped > 0, "fork", || "the parent did not have to wait".to_owned())
}

/// Three blocks: two of the parent, whose last one its child shares, and one for the copy. The parent writes first. So does a second
/// sequence of the parent, which is born later than the child and ranks above it.
pub fn without_eviction_a_fork_makes_nobody_wait() -> Checked {
    let queue = || QueueRules { no_evict: true, ..QueueRules::default() };
    let mut driver = Driver::new(rows(4, 3, queue()));
    let parent = ask(&mut driver, prompt(1, 5), 2, Asked::default())?;
    driver.run_step()?;
    let child = driver.fork(parent, Limits { max_tokens: 2, ..Limits::default() })?;
    ensure(child.is_some(), "fork", || "there is room for the child".to_owned())?;
    driver.drain()?;
    let mut driver = Driver::new(Config { max_num_batched_tokens: 3, block_size: 7, ..rows(4, 3, queue()) });
    let parent = ask(&mut driver, prompt(1, 4), 3, Asked { siblings: 1, ..Asked::default() })?;
    driver.run_step()?;
    driver.plan()?;
    let child = driver.fork(parent, Limits { max_tokens: 1, ..Limits::default() })?;
    ensure(child.is_some(), "fork", || "there is room for the child".to_owned())?;
    driver.drain()
}

/// A tenant may hold 5 blocks of 4 rows. What a request lacks since it was truncated is free, but not within its quota.
pub fn without_eviction_a_debt_waits_for_its_quota() -> Checked {
    let rules = TenantRules { hard_blocks: 5, ..TenantRules::default() };
    let queue = QueueRules { no_evict: true, ..with_tenant("small", rules) };
    let mut driver = Driver::new(Config { enable_prefix_caching: true, ..rows(20, 3, queue) });
    let first = ask(&mut driver, prompt(1, 9), 4, of_tenant("small"))?;
    driver.run_step()?;
    driver.truncate(first, 7)?;
    ask(&mut driver, prompt(1, 9), 4, of_tenant("small"))?;
    driver.drain()
}

/// A tenant may hold 3 blocks of 4 rows. The last of its three requests was truncated and holds nothing: the second, which needs a
/// block, gains nothing by its loss, and waits for the first.
pub fn a_quota_takes_nothing_in_vain() -> Checked {
    let mut driver =
        Driver::new(rows_of_quota(with_tenant("small", TenantRules { hard_blocks: 3, ..TenantRules::default() })));
    ask(&mut driver, prompt(1, 3), 5, of_tenant("small"))?;
    ask(&mut driver, prompt(2, 2), 5, of_tenant("small"))?;
    let last = ask(&mut driver, prompt(3, 1), 5, of_tenant("small"))?;
    driver.run_step()?;
    driver.run_step()?;
    driver.truncate(last, 1)?;
    for _ in 0..3 {
        driver.run_step()?;
    }
    let (preemptions, skipped) = (driver.scheduler.counters().preemptions, driver.seen.skipped);
    ensure(preemptions == 0 && skipped > 0, "quota", || format!("{preemptions} preemptions, {skipped} waits"))?;
    driver.drain()
}

/// Ten blocks of 4 rows, four of which are kept. Three are held, and a prompt of four waits for those that are free.
pub fn what_is_kept_for_growth_is_told() -> Checked {
    let queue = QueueRules { watermark: 4, estimate_growth: false, ..QueueRules::default() };
    let mut driver = Driver::new(rows(11, 2, queue));
    ask(&mut driver, prompt(1, 12), 4, Asked::default())?;
    let waits = ask(&mut driver, prompt(2, 16), 4, Asked::default())?;
    driver.run_step()?;
    let told = driver.scheduler.explain(RequestId(waits)).expect("it lives").waits_for;
    ensure(told == Some(Reason::KeptForGrowth { needed: 4, free: 7, kept: 4 }), "numbers", || format!("{told:?}"))?;
    driver.drain()
}

/// Room is made for a request of a higher class; one behind it is told that such a step admits nobody else.
pub fn who_waits_behind_a_room_is_told_why() -> Checked {
    let queue = QueueRules {
        policy: PolicyKind::Priority,
        preempt_for_waiting: true,
        estimate_growth: false,
        ..QueueRules::default()
    };
    let mut driver = Driver::new(rows(9, 4, queue));
    let of = |priority| Asked { turn: Turn { priority, ..Turn::default() }, ..Asked::default() };
    for family in 1..=3 {
        ask(&mut driver, prompt(family, 8), 20, of(5))?;
    }
    driver.run_step()?;
    ask(&mut driver, prompt(4, 13), 4, of(0))?;
    let behind = ask(&mut driver, prompt(5, 13), 4, of(1))?;
    driver.run_step()?;
    let told = driver.scheduler.explain(RequestId(behind)).expect("it lives").waits_for;
    ensure(told == Some(Reason::AfterPreemption {}), "reason", || format!("{told:?}"))?;
    driver.drain()
}

/// Many long outputs on a small pool, after one was seen: nobody is admitted only to be preempted.
pub fn what_grows_is_left_room() -> Checked {
    let mut driver = Driver::new(rows(25, 8, QueueRules::default()));
    ask(&mut driver, prompt(1, 4), 28, Asked::default())?;
    driver.drain()?;
    for i in 0..8 {
        ask(&mut driver, prompt(10 + i, 4), 28, Asked::default())?;
    }
    driver.drain()?;
    let preemptions = driver.scheduler.counters().preemptions;
    ensure(preemptions == 0, "thrash", || format!("{preemptions} preemptions"))
}

/// Requests of a better class come all the time and outgrow the pool. One that was preempted twice comes back when its whole need is free,
/// and then they wait for it.
pub fn nobody_is_preempted_more_often_than_may_be() -> Checked {
    let queue = QueueRules {
        policy: PolicyKind::Priority,
        ageing_us: 1 << 50,
        estimate_growth: false,
        ..QueueRules::default()
    };
    let mut driver = Driver::new(Config { max_preemptions: 2, ..rows(9, 3, queue) });
    let of = |priority| Asked { turn: Turn { priority, ..Turn::default() }, ..Asked::default() };
    let low = ask(&mut driver, prompt(900, 5), 15, of(1))?;
    for i in 0..90 {
        if i > 0 && driver.live().count() < 3 {
            ask(&mut driver, prompt(i, 3), 16, of(0))?;
        }
        driver.run_step()?;
    }
    driver.drain()?;
    let preemptions = driver.clients[&low].preemptions;
    ensure(preemptions == 2, "preemptions", || format!("{preemptions} times, not as often as may be"))
}

/// Nobody may be preempted, and each of three may outgrow the pool by far: they go one after another, with all that there is.
pub fn without_preemptions_what_may_outgrow_the_pool_runs_alone() -> Checked {
    let mut driver = Driver::new(Config { max_preemptions: 0, ..rows(7, 3, QueueRules::default()) });
    for (family, outputs) in [(1, 60), (2, 40), (3, 6)] {
        ask(&mut driver, prompt(family, 5), outputs, Asked::default())?;
    }
    driver.run_step()?;
    let running = driver.scheduler.num_running();
    driver.drain()?;
    let (preemptions, ended) = (driver.scheduler.counters().preemptions, driver.seen.ended_for_capacity);
    ensure((running, preemptions, ended) == (1, 0, 2), "preemptions", || {
        format!("{running} run at first, {preemptions} preemptions, {ended} end for want of memory")
    })
}

/// A tenant may hold 3 blocks of 4 rows, and its request may need more. Preempted as often as may be, it comes back with what its quota
/// leaves it.
pub fn a_quota_bounds_what_a_request_is_secured() -> Checked {
    let queue = with_tenant("small", TenantRules { hard_blocks: 3, ..TenantRules::default() });
    let mut driver = Driver::new(Config { max_preemptions: 0, ..rows(9, 3, queue) });
    let small = ask(&mut driver, prompt(1, 5), 30, of_tenant("small"))?;
    let other = ask(&mut driver, prompt(2, 5), 12, Asked::default())?;
    driver.run_step()?;
    let running = driver.scheduler.num_running();
    driver.drain()?;
    let outputs = [small, other].map(|id| driver.clients[&id].outputs().len());
    ensure((running, outputs) == (2, [8, 12]), "quota", || format!("{running} run at first, {outputs:?} outputs"))
}

/// The one of lower priority holds more, and is the victim all the same.
pub fn the_lowest_class_is_preempted_first() -> Checked {
    let queue = QueueRules { policy: PolicyKind::Priority, estimate_growth: false, ..QueueRules::default() };
    let mut driver = Driver::new(rows(9, 3, queue));
    let of = |priority| Asked { turn: Turn { priority, ..Turn::default() }, ..Asked::default() };
    let low = ask(&mut driver, prompt(1, 12), 12, of(2))?;
    ask(&mut driver, prompt(2, 8), 12, of(0))?;
    let middle = ask(&mut driver, prompt(3, 4), 12, of(1))?;
    driver.drain()?;
    let first = driver.plans.iter().flat_map(|plan| plan.preempted.clone()).next();
    ensure(first == Some(low), "victim", || format!("{first:?} was preempted first, not {low}; {middle} is cheaper"))
}

/// Six blocks of 5 rows. For the third request the first is preempted, as it is cheaper than the second, which then fills its promise
/// and the budget of the step. In the next step it needs a block, and all that are free are kept for the third: it waits.
pub fn who_goes_first_waits_while_room_is_kept() -> Checked {
    let queue = QueueRules { policy: PolicyKind::Priority, preempt_for_waiting: true, ..QueueRules::default() };
    let sizes = Config { block_size: 5, max_num_batched_tokens: 8, ..rows(7, 3, queue) };
    let mut driver = Driver::new(sizes);
    let of = |priority| Asked { turn: Turn { priority, ..Turn::default() }, ..Asked::default() };
    let cheap = ask(&mut driver, prompt(1, 1), 6, of(1))?;
    let first = ask(&mut driver, prompt(2, 15), 4, of(1))?;
    driver.run_step()?;
    let high = ask(&mut driver, prompt(3, 15), 1, of(0))?;
    driver.run_step()?;
    let (preempted, is_waiting) = (driver.clients[&cheap].preemptions, driver.clients[&high].is_waiting());
    ensure(preempted == 1 && is_waiting, "room", || format!("{preempted} preemptions, it waits: {is_waiting}"))?;
    driver.run_step()?;
    let (skipped, started) = (driver.seen.skipped, driver.clients[&high].cached.is_some());
    ensure(skipped == 1 && started, "room", || format!("{skipped} wait, the room is used: {started}"))?;
    driver.drain()?;
    let outputs = driver.clients[&first].outputs().len();
    ensure(outputs == 4, "room", || format!("it ends with {outputs} outputs"))
}

/// A waiting request of a higher class takes the place of a lower one, an equal one waits.
pub fn only_a_higher_class_displaces() -> Checked {
    let queue = QueueRules { policy: PolicyKind::Priority, preempt_for_waiting: true, ..QueueRules::default() };
    let mut driver = Driver::new(rows(33, 1, queue));
    let of = |priority| Asked { turn: Turn { priority, ..Turn::default() }, ..Asked::default() };
    let low = ask(&mut driver, prompt(1, 5), 8, of(1))?;
    driver.run_step()?;
    let equal = ask(&mut driver, prompt(2, 5), 2, of(1))?;
    driver.run_step()?;
    let preemptions = |driver: &Driver, id| driver.clients[&id].preemptions;
    let (is_waiting, before) = (driver.clients[&equal].is_waiting(), preemptions(&driver, low));
    ensure(is_waiting && before == 0, "displaced", || format!("by an equal one: {before} times"))?;
    let high = ask(&mut driver, prompt(3, 5), 2, of(0))?;
    driver.run_step()?;
    let started = driver.clients[&high].cached.is_some();
    let after = preemptions(&driver, low);
    ensure(started && after == 1, "displaced", || format!("by a higher one: {after} times, which started: {started}"))?;
    driver.drain()?;
    ensure(driver.seen.rooms == 1, "displaced", || format!("{} times", driver.seen.rooms))
}
