//! Truncation inside published content, when there is no block to copy it to.

mod broken;
mod driver;
mod mirror;

use blocktable_core::config::Config;
use blocktable_core::request::Limits;

use driver::Driver;

/// The truncated request gave its last published block back, and all that is free is promised to the third request. It writes over
/// the block before in place, which thereby loses its name; the driver's reader of events sees no child without its parent (I58).
#[test]
fn a_cached_block_does_not_outlive_the_parent_that_is_written_over() {
    let mut driver = Driver::new(config(10));
    let up_to = |max_tokens| Limits { max_tokens, ..Limits::default() };
    driver.submit(prompt(1, 7), up_to(20)).unwrap();
    let truncated = driver.submit(prompt(2, 12), up_to(20)).unwrap().unwrap();
    driver.run_step().unwrap();
    driver.run_step().unwrap();
    driver.submit(prompt(3, 16), up_to(4)).unwrap();
    driver.run_step().unwrap();
    driver.truncate(truncated, 7).unwrap();
    let published = driver.scheduler.pool().index().num_published();
    driver.run_step().unwrap();
    assert!(driver.scheduler.pool().index().num_published() < published, "it was written in place");
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
