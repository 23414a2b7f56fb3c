//! Truncation inside published content, when there is no block to copy it to.

use blocktable_core::config::Config;
use blocktable_core::group::GroupSpec;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::request::Limits;

use crate::driver::Driver;

/// The truncated request gave its last published block back, and all that is free is promised to the third request, which ranks below: it
/// takes one of those to copy to, and nothing else is forgotten.
#[test]
fn a_promise_below_makes_room_for_a_copy() {
    let mut driver = Driver::new(config(10));
    driver.submit(prompt(1, 7), up_to(20)).unwrap();
    let truncated = driver.submit(prompt(2, 12), up_to(20)).unwrap().unwrap();
    driver.run_step().unwrap();
    driver.run_step().unwrap();
    driver.submit(prompt(3, 16), up_to(4)).unwrap();
    driver.run_step().unwrap();
    driver.truncate(truncated, 7).unwrap();
    let copies = driver.seen.copies;
    driver.run_step().unwrap();
    assert_eq!(driver.seen.copies, copies + 1);
    driver.drain().unwrap();
}

/// Two groups, 11 usable blocks. The truncated request lacks two blocks to copy to, and the first one, which ranks above, grows and leaves
/// it a single one, whose content stood behind what is written over now: that has to go too. The driver's reader of events
/// sees no child without its parent (I58).
#[test]
fn a_cached_block_does_not_outlive_the_parent_that_is_written_over() {
    let groups = vec![GroupSpec::FULL; 2];
    let queue = QueueRules { estimate_growth: false, ..QueueRules::default() };
    let mut driver = Driver::new(Config { groups, queue, long_prefill_threshold: 0, ..config(12) });
    driver.submit(prompt(1, 8), up_to(2)).unwrap();
    let truncated = driver.submit(prompt(2, 12), up_to(3)).unwrap().unwrap();
    driver.run_step().unwrap();
    driver.truncate(truncated, 7).unwrap();
    assert_eq!(driver.scheduler.pool().num_free(), 3);
    let published = driver.scheduler.pool().index().num_published();
    driver.run_step().unwrap();
    assert_eq!(driver.seen.copies, 0, "it was written in place");
    assert_eq!(driver.scheduler.pool().index().num_published(), published - 2 - 2, "with what stood behind it");
    driver.drain().unwrap();
}

#[test]
#[cfg(feature = "mutants")]
fn a_cached_block_that_outlives_its_parent_is_noticed() {
    use blocktable_core::mutant;

    assert!(mutant::choose(Some("outlives_parent")));
    let outcome = std::panic::catch_unwind(a_cached_block_does_not_outlive_the_parent_that_is_written_over);
    assert!(mutant::choose(None));
    assert!(outcome.is_err());
}

fn up_to(max_tokens: u32) -> Limits {
    Limits { max_tokens, ..Limits::default() }
}

fn config(num_blocks: u32) -> Config {
    Config {
        max_num_seqs: 8,
        max_num_batched_tokens: 512,
        max_waiting: 16,
        long_prefill_threshold: 4,
        event_buffer_size: 1000,
        ..Config::new(num_blocks, 4, 1009, 64)
    }
}

fn prompt(family: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (family * 331 + i * 17) % 1009).collect()
}
