//! Content that two wrote and one of them wants kept: whoever holds the front of the one and the rest of the other keeps the front too.
//!
//! Before: a prompt that is what another request is about to say, so both publish the same content in blocks of their own; the other one
//! asked for a high priority. After: a third that asked for nothing was over the blocks of both, a flood came, and no cached block outlived
//! the one before it (I58): the driver's reader of events looks after every call.

use blocktable_core::block_hash::{Algorithm, BlockHasher};
use blocktable_core::config::Config;
use blocktable_core::prefix_index::KeyState;
use blocktable_core::request::Limits;
use blocktable_core::retention::{Ranges, TokenRange};
use blocktable_core::sequences::Sequences;

use crate::broken::{Checked, ensure};
use crate::driver::Driver;

const BLOCK: usize = 4;
const USABLE: u32 = 24;
const KEPT: TokenRange = TokenRange { start: 0, end: None, priority: 80, duration_ms: None };

/// The third finds all of it in full blocks.
#[test]
pub fn a_front_is_worth_what_the_rest_of_the_hit_is() -> Checked {
    flood_after(|written| (written.to_vec(), written.len() / BLOCK * BLOCK))
}

/// The third parts from it inside the last block, of which it copies rows.
#[test]
pub fn a_front_is_worth_what_the_source_behind_it_is() -> Checked {
    flood_after(|written| {
        let (shared, other) = (written.len() / BLOCK * BLOCK - 1, (written[0] + 1) % 1009);
        ([&written[..shared], &[other; 3]].concat(), shared)
    })
}

/// `prompt` makes the third's prompt of what was written, and says how much of that is cached.
fn flood_after(prompt: impl Fn(&[u32]) -> (Vec<u32>, usize)) -> Checked {
    let mut alone = Driver::new(config());
    let only = alone.submit((1..7).collect(), up_to(18))?.expect("it fits");
    alone.drain()?;
    let said = &alone.clients[&only].tokens;

    let mut driver = Driver::new(config());
    let kept = driver.submit((1..7).collect(), up_to(18))?.expect("it fits");
    driver.run_step()?;
    driver.keep(kept, &[KEPT])?;
    driver.submit(said[..17].to_vec(), up_to(1))?;
    driver.drain()?;
    let (prompt, cached) = prompt(&said[..said.len() - 1]);
    let third = driver.submit(prompt, up_to(1))?.expect("it fits");
    driver.drain()?;
    let found = driver.clients[&third].cached;
    ensure(found.is_some_and(|found| found + 1 >= cached), "hit", || format!("{found:?} of {cached} are found"))?;
    // Each takes what the one before it left, and one block more.
    for blocks in 1..=USABLE {
        driver.submit((0..blocks * BLOCK as u32 - 1).map(|at| (500 + blocks * 97 + at) % 1009).collect(), up_to(1))?;
        driver.drain()?;
    }
    Ok(())
}

/// The same with sequences that an engine of its own drives: the front goes with the rest, and the flood takes the chain from behind.
#[test]
pub fn a_found_sequence_keeps_its_front_for_the_rest() -> Checked {
    let mut sequences = Sequences::new(12, BLOCK as u32).expect("a pool");
    let mut hasher = BlockHasher::new(Algorithm::DEFAULT, BLOCK as u32, b"");
    let tokens: Vec<u32> = (1..=17).collect();
    let chain = hasher.plain_chain();
    let prompt = hasher.prompt_of(&chain, tokens.clone());
    let names = hasher.names_from(&chain, 0, None, &tokens[..16], false).expect("whole blocks");
    let write = |sequences: &mut Sequences, ranges: Option<&Ranges>| {
        let id = sequences.begin();
        sequences.append(id, 16).expect("room");
        sequences.publish(id, &names, &tokens[..16], ranges).expect("they were appended");
        id
    };
    let plain = write(&mut sequences, None);
    let kept = write(&mut sequences, Some(&Ranges::new(&[KEPT]).expect("a valid range")));
    sequences.release(plain).expect("it lives");
    sequences.release(kept).expect("it lives");
    // Three that are fresh, and the last block of the one that asked for nothing.
    sequences.take(4).expect("they are free");
    let (found, rows) = sequences.find(&mut hasher, &prompt, 0).expect("nothing more is needed");
    assert_eq!(rows, 16);
    sequences.release(found).expect("it lives");
    while sequences.take(1).is_ok() {
        let index = sequences.pool().index();
        let is_there = |at: usize| matches!(index.lookup(&prompt.keys()[at]), Some((_, KeyState::Published)));
        let orphan = (1..4).find(|&at| is_there(at) && !is_there(at - 1));
        ensure(orphan.is_none(), "I58", || format!("block {orphan:?} is there, the one before it is not"))?;
    }
    Ok(())
}

/// Each of them, with the fault.
pub fn all() -> Checked {
    let found = [
        a_front_is_worth_what_the_rest_of_the_hit_is(),
        a_front_is_worth_what_the_source_behind_it_is(),
        a_found_sequence_keeps_its_front_for_the_rest(),
    ];
    match found.iter().find(|found| found.is_ok()) {
        Some(passed) if found.iter().any(Result::is_err) => passed.clone(),
        _ => found.into_iter().collect(),
    }
}

fn config() -> Config {
    Config {
        max_num_seqs: 2,
        max_num_batched_tokens: 64,
        max_waiting: 16,
        event_buffer_size: 64,
        enable_partial_hits: true,
        ..Config::new(USABLE + 1, BLOCK as u32, 1009, 128)
    }
}

fn up_to(max_tokens: u32) -> Limits {
    Limits { max_tokens, ..Limits::default() }
}
