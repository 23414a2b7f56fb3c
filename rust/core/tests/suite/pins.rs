//! Pins: held through a flood, counted once, refused over the budget with the numbers, given back as one list.

use blocktable_core::chain::{Domain, Identity};
use blocktable_core::config::Config;
use blocktable_core::error::Error;
use blocktable_core::prompt::Prompt;
use blocktable_core::request::Limits;

use crate::broken::Checked;
use crate::driver::Driver;

const USABLE: u32 = 20;

fn driver(pin_budget: u32) -> Driver {
    Driver::new(Config {
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_waiting: 16,
        event_buffer_size: 64,
        pin_budget,
        ..Config::new(USABLE + 1, 4, 1009, 64)
    })
}

fn prompt(family: u32, len: u32) -> Vec<u32> {
    (0..len).map(|at| (family * 31 + at * 7) % 1009).collect()
}

fn prompt_of(driver: &Driver, prompt: Vec<u32>) -> Prompt {
    driver.scheduler.prompt(prompt, Identity::of(Domain::Deployment)).unwrap()
}

fn run(driver: &mut Driver, prompt: Vec<u32>) -> Checked {
    driver.submit(prompt, Limits { max_tokens: 2, min_tokens: 0, stop_tokens: Vec::new() })?;
    while driver.live().next().is_some() {
        driver.run_step()?;
    }
    Ok(())
}

#[test]
fn a_pinned_prefix_survives_a_flood_of_ten_times_the_pool() {
    let mut driver = driver(6);
    let wanted = prompt(1, 21);
    run(&mut driver, wanted.clone()).unwrap();
    assert!(driver.pin(&wanted).unwrap());
    assert_eq!(driver.scheduler.num_pinned(), 5);
    for family in 0..10 * USABLE / 3 {
        run(&mut driver, prompt(100 + family, 12)).unwrap();
    }
    assert!(driver.scheduler.pool().evictions() >= u64::from(5 * USABLE), "the flood passed through the whole pool");
    let hits = driver.scheduler.counters().prefix_hits;
    run(&mut driver, wanted.clone()).unwrap();
    assert_eq!(driver.scheduler.counters().prefix_hits - hits, 20);
    driver.unpin_all().unwrap();
    for family in 0..10 * USABLE / 3 {
        run(&mut driver, prompt(500 + family, 12)).unwrap();
    }
    let hits = driver.scheduler.counters().prefix_hits;
    run(&mut driver, wanted).unwrap();
    assert_eq!(driver.scheduler.counters().prefix_hits, hits, "without its pin it went with the flood");
}

#[test]
fn a_pin_over_the_budget_is_refused_with_the_numbers_and_blocks_count_once() {
    let mut driver = driver(7);
    let (one, other) = (prompt(1, 17), [prompt(1, 8), prompt(2, 12)].concat());
    for prompt in [&one, &other] {
        run(&mut driver, prompt.clone()).unwrap();
    }
    assert!(driver.pin(&one).unwrap());
    assert!(driver.pin(&one).unwrap(), "nothing more is pinned");
    assert_eq!(driver.scheduler.num_pinned(), 4);
    let hashed = prompt_of(&driver, other.clone());
    assert_eq!(driver.scheduler.pin(&hashed).map(|pinned| pinned.tokens), Ok(20), "two of five are pinned already");
    let third = prompt(3, 5);
    run(&mut driver, third.clone()).unwrap();
    let hashed = prompt_of(&driver, third);
    assert_eq!(driver.scheduler.pin(&hashed), Err(Error::OverPinBudget { needed: 1, pinned: 7, budget: 7 }));
    assert!(matches!(driver.scheduler.unpin(77), Err(Error::InvalidInput { field: "pin", value: 77, .. })));
    driver.scheduler.unpin(3).unwrap();
    assert_eq!(driver.scheduler.num_pinned(), 4);
    driver.drain().unwrap();
}

#[test]
fn what_is_not_published_cannot_be_pinned() {
    let mut driver = driver(7);
    let wanted = prompt(1, 9);
    let hashed = prompt_of(&driver, wanted.clone());
    let refused = |error| matches!(error, Err(Error::InvalidInput { field: "token_ids", .. }));
    assert!(refused(driver.scheduler.pin(&hashed).map(|pinned| pinned.id)));
    driver.submit(wanted, Limits { max_tokens: 2, min_tokens: 0, stop_tokens: Vec::new() }).unwrap();
    driver.plan().unwrap();
    assert!(refused(driver.scheduler.pin(&hashed).map(|pinned| pinned.id)), "pending content may still be withdrawn");
    driver.commit(&[]).unwrap();
    assert_eq!(driver.scheduler.pin(&hashed).map(|pinned| pinned.tokens), Ok(8));
    driver.scheduler.unpin(1).unwrap();
    driver.drain().unwrap();
}

#[test]
fn a_reset_keeps_what_is_pinned() {
    let mut driver = driver(7);
    run(&mut driver, prompt(1, 9)).unwrap();
    run(&mut driver, prompt(2, 9)).unwrap();
    assert!(driver.pin(&prompt(1, 9)).unwrap());
    driver.reset_prefix_cache().unwrap();
    assert_eq!(driver.scheduler.pool().index().num_published(), 2);
    driver.drain().unwrap();
}
