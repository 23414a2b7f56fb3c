//! Where the random tests get their numbers: one seed for all, printed by each, and how many cases they run.
//!
//! `BLOCKTABLE_SEED` (default 0) repeats or varies a run; `BLOCKTABLE_CASES` replaces the number of cases of every random test.
//! The same seed gives the same cases in the same order, so nothing needs to be kept between runs.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};

/// The seed of this run.
pub fn seed() -> u64 {
    number("BLOCKTABLE_SEED").unwrap_or(0)
}

/// Runs `default_cases` cases, unless the environment asks for another number. Says what repeats them; returns their
/// number.
///
/// # Panics
/// At the first case that fails, with the smallest one like it that was found.
pub fn run_cases<S: Strategy, E: ToString>(
    name: &str,
    default_cases: u32,
    strategy: &S,
    check: impl Fn(S::Value) -> Result<(), E>,
) -> u32 {
    let seed = seed();
    let cases = number("BLOCKTABLE_CASES").map_or(default_cases, |cases| cases as u32);
    eprintln!("{name}: {cases} cases, BLOCKTABLE_SEED={seed}");
    let outcome =
        runner(seed, cases).run(strategy, |case| check(case).map_err(|why| TestCaseError::fail(why.to_string())));
    match outcome {
        Ok(()) => cases,
        Err(TestError::Abort(why)) => panic!("{name}: {why}"),
        Err(TestError::Fail(why, case)) => panic!("{name}, BLOCKTABLE_SEED={seed}: {why}\nsmallest case: {case:?}"),
    }
}

/// Draws cases that depend on nothing but the seed, without shrinking; stops at the first that fails.
///
/// # Errors
/// What that one says.
pub fn sweep<S: Strategy, E>(
    seed: u64,
    cases: u32,
    strategy: &S,
    check: impl Fn(S::Value) -> Result<(), E>,
) -> Result<(), E> {
    let mut runner = runner(seed, cases);
    (0..cases).try_for_each(|_| check(strategy.new_tree(&mut runner).expect("nothing is filtered").current()))
}

fn runner(seed: u64, cases: u32) -> TestRunner {
    TestRunner::new(Config {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..Config::default()
    })
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text}: must be a whole number")))
}
