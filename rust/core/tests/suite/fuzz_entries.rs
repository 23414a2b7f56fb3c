//! The entries of the fuzz targets, on their corpus and on random bytes, without a fuzzer.
//!
//! Before: `rust/fuzz/entries` has a function for each target, `rust/fuzz/corpus` inputs that reach far. After: each returned on all of
//! them, on random bytes, and on inputs of the corpus with some bytes changed; and a planted fault makes one panic.

#[path = "../../../fuzz/entries/event_bytes.rs"]
mod event_bytes;
#[path = "../../../fuzz/entries/key_encoding.rs"]
mod key_encoding;
#[path = "../../../fuzz/entries/recording.rs"]
mod recording;
#[path = "../../../fuzz/entries/schedule.rs"]
mod schedule;

use std::path::Path;

use crate::seed;
use proptest::collection::vec;
use proptest::prelude::*;

#[test]
fn keys_are_encoded_in_one_way_only() {
    stands("key_encoding", key_encoding::run);
}

#[test]
fn events_are_encoded_in_one_way_only() {
    stands("event_bytes", event_bytes::run);
}

#[test]
fn recordings_are_encoded_in_one_way_only() {
    stands("recording", recording::run);
}

#[test]
fn a_schedule_of_any_bytes_keeps_every_invariant() {
    stands("schedule", schedule::run);
}

#[cfg(feature = "mutants")]
#[test]
fn a_planted_fault_makes_an_entry_panic() {
    use blocktable_core::mutant;
    type Entry = fn(&[u8]) -> usize;
    let rows: [(&str, &str, Entry); 6] = [
        ("field_without_length", "key_encoding", key_encoding::run),
        ("field_without_tag", "key_encoding", key_encoding::run),
        ("event_count_wrong", "event_bytes", event_bytes::run),
        ("recording_number_too_long", "recording", recording::run),
        ("leak_block_on_finish", "schedule", schedule::run),
        ("keep_pending_on_abort", "schedule", schedule::run),
    ];
    for (fault, name, entry) in rows {
        assert!(mutant::choose(Some(fault)));
        let inputs = corpus(name);
        let is_found = |input: &Vec<u8>| std::panic::catch_unwind(|| entry(input)).is_err();
        let found = inputs.iter().any(is_found);
        assert!(mutant::choose(None));
        assert!(found, "no input of the corpus finds {fault}");
    }
}

/// Runs an entry on its corpus, on changed inputs of it, and on random bytes.
fn stands(name: &str, entry: fn(&[u8]) -> usize) {
    let inputs = corpus(name);
    let meant = inputs.iter().filter(|input| entry(input) > 0).count();
    assert!(meant + 1 >= inputs.len(), "only {meant} of {} inputs of the corpus mean anything", inputs.len());
    let changes = vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let changed = (prop::sample::select(inputs), changes).prop_map(|(mut input, changes)| {
        for (at, byte) in changes {
            let at = at.index(input.len());
            input[at] = byte;
        }
        input
    });
    let random = vec(prop_oneof![3 => 0..8_u8, 1 => any::<u8>()], 0..200);
    seed::run_cases(name, 1_500, &prop_oneof![changed, random], |input| {
        entry(&input);
        Ok::<(), String>(())
    });
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
    let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<_> = files.map(|file| file.expect("an entry").path()).collect();
    paths.sort();
    let inputs: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).expect("a file")).collect();
    assert!(inputs.len() >= 5 && inputs.iter().all(|input| !input.is_empty()), "{} holds no corpus", folder.display());
    inputs
}
