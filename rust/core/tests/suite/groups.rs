//! Groups and windows by example: what a long request holds, who takes what it leaves, and what is found again.
//!
//! Before: the driver of the random schedules, which audits after every call and compares what every query sees with the definition of
//! its window. After: the numbers that are promised for windows, and hits at every point where a prompt may part from a cached one.

use std::collections::BTreeSet;

use blocktable_core::config::Config;
use blocktable_core::group::GroupSpec;
use blocktable_core::request::Limits;

use crate::broken::Checked;
use crate::driver::Driver;

const WINDOW: usize = 1024;
const CHUNK: usize = 2048;
const BLOCK: usize = 16;
const CONTEXT: usize = 32_768;

/// A pool that holds the full group and what the window needs, but not 32k rows twice.
#[test]
fn at_32k_tokens_a_window_of_1024_holds_its_rows_and_a_chunk_and_others_take_what_it_leaves() -> Checked {
    let most = (WINDOW - 1 + CHUNK).div_ceil(BLOCK) + 1;
    let groups = vec![GroupSpec::FULL, GroupSpec::sliding(WINDOW as u32)];
    let mut driver = Driver::new(Config {
        groups,
        num_blocks: (1 + CONTEXT / BLOCK + most + 60) as u32,
        max_model_len: CONTEXT as u32,
        max_num_batched_tokens: CHUNK as u32,
        ..config(BLOCK as u32)
    });
    let long = driver.submit(prompt(1, CONTEXT - 40), up_to(40))?.expect("it fits");
    let mut left: BTreeSet<i32> = BTreeSet::new();
    let mut before = BTreeSet::new();
    let mut held = Vec::new();
    while driver.clients[&long].outputs().len() < 2 {
        driver.run_step()?;
        let now: BTreeSet<i32> = driver.table(long, 1).iter().copied().filter(|&id| id > 0).collect();
        left.extend(before.difference(&now).copied());
        held.push(now.len());
        before = now;
    }
    assert_eq!(driver.table(long, 0).iter().filter(|&&id| id > 0).count(), (CONTEXT - 39).div_ceil(BLOCK));
    assert_eq!(held.iter().max(), Some(&(most - 1)), "two whole chunks stand behind the window: {held:?}");
    assert!(held.last() <= Some(&(WINDOW.div_ceil(BLOCK) + 1)), "a decode needs the window alone: {held:?}");
    assert!(left.len() > CONTEXT / BLOCK / 2, "{} blocks were left", left.len());

    // 200 rows twice are 26 blocks, more than the pool ever had beside the window.
    let other = driver.submit(prompt(2, 200), up_to(2))?.expect("it fits");
    driver.run_step()?;
    let taken: BTreeSet<i32> = [driver.table(other, 0), driver.table(other, 1)].concat().into_iter().collect();
    assert!(taken.iter().filter(|id| left.contains(id)).count() >= 13, "{taken:?} are not what the window left");
    assert_eq!(driver.scheduler.counters().preemptions, 0);
    driver.drain()
}

/// The prompt of each request parts from a cached one at another token: all full blocks before that point are found. Where queries
/// see themselves only, nothing need be found, and only the last token is computed.
#[test]
fn a_prompt_finds_what_it_shares_whatever_window_and_wherever_it_parts() -> Checked {
    for window in [None, Some(1), Some(3), Some(4), Some(5), Some(9), Some(40)] {
        for groups in [vec![GroupSpec { window }], vec![GroupSpec::FULL, GroupSpec { window }]] {
            let sees_itself_only = groups == [GroupSpec::sliding(1)];
            let mut driver = Driver::new(Config { groups, num_blocks: 400, ..config(4) });
            driver.submit(prompt(1, 30), up_to(2))?;
            driver.drain()?;
            for shared in 1..=30 {
                let asked = [&prompt(1, shared)[..], &prompt(2 + shared as u32, 5)].concat();
                let id = driver.submit(asked, up_to(1))?.expect("it fits");
                driver.drain()?;
                let found = if sees_itself_only { shared + 4 } else { shared };
                assert_eq!(driver.clients[&id].cached, Some(found / 4 * 4), "{window:?}, {shared} tokens are shared");
            }
        }
    }
    Ok(())
}

/// What left the window goes behind the tail like any other content, oldest first, and is found until it is handed out.
#[test]
fn a_hit_needs_no_more_than_the_window_and_what_left_it_is_evicted_first() -> Checked {
    let groups = vec![GroupSpec::sliding(8)];
    let mut driver = Driver::new(Config { groups, num_blocks: 12, max_num_batched_tokens: 8, ..config(4) });
    // Ten blocks in all pass through a pool of eleven; the window needs two of them and the one that is being filled.
    driver.submit(prompt(1, 38), up_to(1))?;
    driver.drain()?;
    driver.submit(prompt(2, 17), up_to(1))?;
    driver.drain()?;
    // The second took the head of the first one's chain; its window is still there.
    let again = driver.submit(prompt(1, 38), up_to(1))?.expect("it fits");
    driver.run_step()?;
    assert_eq!(driver.clients[&again].cached, Some(36));
    let short = driver.submit(prompt(1, 14), up_to(1))?.expect("it fits");
    driver.drain()?;
    assert_eq!(driver.clients[&short].cached, Some(0), "the head is gone, and nothing stands in for it");
    Ok(())
}

/// The same request, released by an abort between steps and by one in flight: the queue is the same.
#[test]
fn groups_are_released_in_the_same_order_at_once_and_when_a_step_has_ended() -> Checked {
    let orders = [false, true].map(|in_flight| {
        let groups = vec![GroupSpec::FULL, GroupSpec::sliding(6), GroupSpec::FULL];
        let mut driver = Driver::new(Config { groups, num_blocks: 60, ..config(4) });
        let id = driver.submit(prompt(1, 22), up_to(4)).unwrap().expect("it fits");
        driver.run_step().unwrap();
        driver.plan().unwrap();
        if in_flight {
            driver.abort(id).unwrap();
            driver.commit(&[]).unwrap();
        } else {
            driver.commit(&[]).unwrap();
            driver.abort(id).unwrap();
        }
        driver.scheduler.pool().free_blocks().map(|block| block.get()).collect::<Vec<_>>()
    });
    assert_eq!(orders[0], orders[1]);
    // Blocks 1 to 6 are the first group's, 7 to 12 the second's, 13 to 18 the third's. The second plan let go what is behind the
    // window; then the last rows of all groups go first.
    assert_eq!(orders[0][..3], [18, 12, 6], "partial blocks are taken next");
    let behind = [10, 9, 8, 7];
    let rest = [17, 11, 5, 16, 4, 15, 3, 14, 2, 13, 1];
    assert_eq!(orders[0][orders[0].len() - 15..], [&behind[..], &rest].concat());
    Ok(())
}

/// A window of four blocks, a prompt of three, two children: each branch decodes eight blocks more, and they leave in the order
/// last, first, second. The driver audits after every call and compares each branch with its cold answer.
#[test]
fn branches_share_what_their_windows_see_and_each_gives_back_its_own() -> Checked {
    for groups in [vec![GroupSpec::sliding(16)], vec![GroupSpec::FULL, GroupSpec::sliding(16)]] {
        let mut driver = Driver::new(Config { groups, ..config(4) });
        let first = driver.submit(prompt(1, 11), up_to(40))?.expect("it fits");
        driver.run_step()?;
        let branches = [Some(first), driver.fork(first, up_to(40))?, driver.fork(first, up_to(40))?];
        let branches = branches.map(|branch| branch.expect("there are rows"));
        for _ in 0..32 {
            driver.run_step()?;
        }
        for branch in [2, 0, 1] {
            assert!(driver.clients[&branches[branch]].outputs().len() >= 32);
            driver.abort(branches[branch])?;
            driver.run_step()?;
        }
        driver.drain()?;
    }
    Ok(())
}

#[test]
fn groups_out_of_bounds_are_refused() {
    let refused = |groups: Vec<GroupSpec>| blocktable_core::Scheduler::new(Config { groups, ..config(4) }).err();
    assert!(refused(vec![GroupSpec::FULL; 16]).is_none());
    for wrong in [vec![], vec![GroupSpec::FULL; 17], vec![GroupSpec::sliding(0)], vec![GroupSpec::sliding(u32::MAX)]] {
        let error = refused(wrong.clone()).map(|error| error.to_string());
        assert!(error.as_ref().is_some_and(|text| text.starts_with("groups=")), "{wrong:?}: {error:?}");
    }
}

fn config(block_size: u32) -> Config {
    Config { max_num_seqs: 4, max_num_batched_tokens: 512, max_waiting: 16, ..Config::new(100, block_size, 1009, 64) }
}

fn prompt(family: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (family * 331 + i * 17 + i / 59) % 1009).collect()
}

fn up_to(max_tokens: u32) -> Limits {
    Limits { max_tokens, ..Limits::default() }
}
