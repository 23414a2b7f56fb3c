//! A schedule that was recorded is replayed bit for bit, also by another process, and what differs is named (I27, design 2).
//!
//! Before: random schedules on a scheduler that records. After: a new scheduler made every call again, and each returned the same; every
//! change of the bytes is refused, and a decision that depends on what was not recorded is found.

use std::cell::Cell;
use std::process::Command;

use blocktable_core::chain::{Adapter, Domain, Identity, Media, Salt};
use blocktable_core::config::Config;
use blocktable_core::error::Error;
use blocktable_core::group::GroupSpec;
use blocktable_core::ids::RequestId;
use blocktable_core::rank::{Asked, Turn};
use blocktable_core::recorder::Recorded;
use blocktable_core::recording::{NEVER_RETURNED, Recording, mend};
use blocktable_core::replay::{Replayed, replay};
use blocktable_core::request::Limits;
use blocktable_core::retention::{Ranges, TokenRange};

use crate::broken::{Checked, broken, ensure};
use crate::driver::Driver;
use crate::schedule_script::{self, Schedule, schedules};
use crate::seed;

/// Bytes that hold every recording of these tests.
const ALL: usize = 1 << 24;
const FILE: &str = "BLOCKTABLE_TEST_RECORDING";

#[test]
fn a_random_schedule_is_replayed_bit_for_bit() {
    let plans = Cell::new(0);
    seed::run_cases("replay", 300, &schedules(), |schedule| {
        let bytes = recorded(&schedule, ALL)?;
        plans.set(plans.get() + same(&bytes)?.plans);
        let read = Recording::read(&bytes).or_else(|error| broken("format", error.to_string()))?;
        ensure(read.write() == bytes, "format", || "other bytes mean the same".to_owned())
    });
    assert!(plans.get() > 1_000, "{} plans", plans.get());
}

/// The other process is this test again, which then only replays.
#[test]
fn another_process_replays_the_same() {
    if let Ok(path) = std::env::var(FILE) {
        let replayed = replay(&std::fs::read(path).expect("the file")).expect("a recording");
        assert_eq!(replayed.difference, None);
        assert!(replayed.plans > 0, "{replayed:?}");
        return;
    }
    let bytes = recorded(&busy(), ALL).expect("it runs");
    let changed = wrong_outcome(&bytes);
    for (bytes, is_same) in [(bytes, true), (changed, false)] {
        let path = std::env::temp_dir().join(format!("blocktable-replay-{}-{is_same}", std::process::id()));
        std::fs::write(&path, bytes).expect("a file");
        let mut other = Command::new(std::env::current_exe().expect("this test"));
        other.args(["--exact", "replay::another_process_replays_the_same"]).env(FILE, &path);
        let output = other.output().expect("it runs");
        std::fs::remove_file(&path).expect("the file");
        assert_eq!(output.status.success(), is_same, "{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn a_byte_that_is_changed_left_out_or_added_is_found() {
    let bytes = recorded(&busy(), ALL).expect("it runs");
    for at in (0..bytes.len()).step_by(7) {
        let mut changed = bytes.clone();
        changed[at] ^= 1 << (at % 8);
        // A length that was changed may point behind the end: then the bytes count as cut there, and what is before is whole.
        let is_found = Recording::read(&changed).is_ok_and(|read| !read.is_cut);
        assert!(!is_found, "a change of byte {at} is not found");
    }
    let whole = Recording::read(&bytes).expect("a recording").entries.len();
    for len in (40..bytes.len()).step_by(11) {
        let read = Recording::read(&bytes[..len]);
        assert!(read.is_err() || read.is_ok_and(|read| read.entries.len() < whole), "{len} bytes");
    }
}

#[test]
fn a_recording_that_is_cut_is_replayed_up_to_there() {
    let bytes = recorded(&busy(), ALL).expect("it runs");
    let replayed = replay(&bytes[..bytes.len() - 3]).expect("a recording");
    assert!(replayed.is_cut && replayed.difference.is_none());
    assert_eq!(replayed.calls + 1, replay(&bytes).expect("a recording").calls);
}

#[test]
fn a_ring_keeps_the_last_records_and_says_that_the_first_are_gone() {
    let whole = Recording::read(&recorded(&busy(), ALL).expect("it runs")).expect("a recording");
    let bytes = recorded(&busy(), 2_000).expect("it runs");
    assert!((1_000..3_000).contains(&bytes.len()), "{} bytes", bytes.len());
    let kept = Recording::read(&bytes).expect("a recording");
    assert!(kept.first > 1 && kept.entries.len() > 3);
    assert_eq!(kept.first - 1 + kept.entries.len() as u64, whole.entries.len() as u64);
    let last = |read: &Recording| format!("{:?}", read.entries.last());
    assert_eq!(last(&kept), last(&whole));
    assert_eq!(kept.write(), bytes);
    let refused = replay(&bytes).expect_err("its beginning is gone");
    let Error::InvalidInput { field, value, .. } = refused else { panic!("{refused}") };
    assert_eq!((field, value), ("recording", i128::from(kept.first)));
}

#[test]
fn a_recording_begins_at_the_start() {
    let mut scheduler = Recorded::new(config()).expect("a valid configuration");
    scheduler.record_in_ring(100).expect("nothing was called");
    scheduler.reset_prefix_cache();
    assert!(scheduler.record_in_ring(100).is_err());
    assert_eq!(scheduler.stop_recording(), Some((1, None)));
    assert_eq!((scheduler.stop_recording(), scheduler.recorded()), (None, None));
}

#[test]
fn a_writer_gets_what_a_ring_keeps_and_its_failure_is_told() {
    use std::sync::{Arc, Mutex};
    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>, usize);
    impl std::io::Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let mut all = self.0.lock().expect("nobody panics");
            if all.len() > self.1 {
                return Err(std::io::Error::other("the disk is full"));
            }
            all.extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let run = |start: &dyn Fn(&mut Recorded)| {
        let mut driver = Driver::new(busy().config);
        start(&mut driver.scheduler);
        busy().play(&mut driver).expect("it runs");
        driver
    };
    let ring = run(&|scheduler| scheduler.record_in_ring(ALL).expect("nothing was called"));
    let whole = Shared(Arc::default(), ALL);
    let mut driver = run(&|scheduler| scheduler.record_to(Box::new(whole.clone())).expect("nothing was called"));
    let calls = driver.scheduler.stop_recording().expect("it records");
    assert_eq!(Some(whole.0.lock().expect("nobody panics").clone()), ring.scheduler.recorded());
    assert_eq!(calls.1, None);
    let full = Shared(Arc::default(), 1_000);
    let mut driver = run(&|scheduler| scheduler.record_to(Box::new(full.clone())).expect("nothing was called"));
    assert_eq!(driver.scheduler.stop_recording(), Some((calls.0, Some("the disk is full".to_owned()))));
}

/// A plan into memory that is too small panics. The report holds that call; with enough memory a replay returns from it, and says so.
#[test]
fn a_call_that_never_returned_is_the_last_of_the_report() {
    use blocktable_core::plan::PlanMemory;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    let mut scheduler = Recorded::new(config()).expect("a valid configuration");
    scheduler.record_in_ring(ALL).expect("nothing was called");
    let prompt = scheduler.prompt((0..9).collect(), Identity::of(Domain::Deployment)).expect("a valid prompt");
    scheduler.submit(prompt, Limits { max_tokens: 2, ..Limits::default() }, 5).expect("it fits");
    let (mut staging, mut tables) = (vec![0; 4], vec![0; scheduler.layout().table_entries]);
    let mut plan = || scheduler.plan(6, PlanMemory { staging: &mut staging, tables: &mut tables });
    assert!(catch_unwind(AssertUnwindSafe(&mut plan)).is_err(), "four words are enough for a plan");
    let report = scheduler.recorded().expect("a ring");
    let read = Recording::read(&report).expect("a recording");
    let last = read.entries.last().expect("an entry");
    assert_eq!((last.call.name(), last.outcome), ("plan", NEVER_RETURNED));
    let difference = replay(&report).expect("a recording").difference.expect("it returns now");
    assert_eq!((difference.record, difference.call, difference.what), (2, "plan", "outcome"));
}

/// What depends on more than was recorded, or was not recorded, makes a replay differ.
#[cfg(feature = "mutants")]
#[test]
fn planted_faults_are_found() {
    use blocktable_core::mutant;
    let schedule = busy();
    for fault in ["unrecorded_decision", "recorder_forgets_abort"] {
        assert!(mutant::choose(Some(fault)));
        let replayed = recorded(&schedule, ALL).map(|bytes| replay(&bytes).expect("a recording"));
        assert!(mutant::choose(None));
        let difference = replayed.expect("it runs").difference;
        assert!(difference.is_some(), "{fault} is not found");
    }
}

/// Plays and drains the schedule on a scheduler that keeps the last `most` bytes; those.
fn recorded(schedule: &Schedule, most: usize) -> Checked<Vec<u8>> {
    let mut driver = Driver::new(schedule.config.clone());
    driver.scheduler.record_in_ring(most).or_else(|error| broken("record", error.to_string()))?;
    schedule.play(&mut driver)?;
    Ok(driver.scheduler.recorded().unwrap_or_default())
}

fn same(bytes: &[u8]) -> Checked<Replayed> {
    let replayed = replay(bytes).or_else(|error| broken("replay", error.to_string()))?;
    match &replayed.difference {
        Some(difference) => broken("replay", difference.to_string()),
        None => Ok(replayed),
    }
}

/// The same recording with another outcome of its last call, and right checksums.
fn wrong_outcome(bytes: &[u8]) -> Vec<u8> {
    let mut read = Recording::read(bytes).expect("a recording");
    read.entries.last_mut().expect("an entry").outcome ^= 2;
    read.write()
}

/// Prompts that share prefixes in a small pool: chunks, hits, preemptions, forks, aborts, failures.
fn busy() -> Schedule {
    use crate::schedule_script::Event;
    let mut events = Vec::new();
    for at in 0..12 {
        events.push(Event::Submit(schedule_script::Ask::plain(at as u32 % 3, 7 + at % 5, 4), 1));
        events.extend([Event::Step, Event::Plan]);
        events.extend(match at % 4 {
            0 => vec![Event::Fork(at, 3), Event::Fail],
            1 => vec![Event::Commit { withheld: 2 }, Event::Abort(at / 2)],
            2 => vec![Event::AbortPlanned(1), Event::Step],
            _ => vec![Event::Step, Event::Truncate(at, 100), Event::Pin(at)],
        });
    }
    Schedule { config: config(), events }
}

fn config() -> Config {
    Config {
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_waiting: 8,
        max_preemptions: 4,
        hash_seed: b"seed".to_vec(),
        event_buffer_size: 16,
        weights_version: b"1".to_vec(),
        explain_misses: true,
        pin_budget: 2,
        enable_partial_hits: true,
        ..Config::new(14, 4, 1009, 48)
    }
}

#[test]
fn what_a_prompt_says_is_replayed_as_it_was_said() {
    let mut scheduler = Recorded::new(config()).expect("a valid configuration");
    scheduler.record_in_ring(ALL).expect("nothing was called");
    for name in [&b"a"[..], b"b"] {
        let identity = Identity { public_tokens: 4, ..Identity::of(Domain::Tenant(name.into())) };
        let prompt = scheduler.prompt((0..9).collect(), identity).expect("a valid prompt");
        scheduler.submit(prompt, Limits { max_tokens: 2, ..Limits::default() }, 5).expect("it fits");
    }
    let bytes = scheduler.recorded().expect("a ring");
    assert_eq!(same(&bytes).expect("the same").calls, 2);
    assert!(bytes.windows(2).any(|two| two == [1, b'b']), "the tenant's name");
}

/// A tool, not a test: `cargo test --features mutants --test suite -- --ignored write_the_corpus` after the format has changed.
#[test]
#[ignore = "writes the corpus of the fuzz target anew"]
fn write_the_corpus() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/recording");
    let put = |name: &str, bytes: &[u8]| std::fs::write(folder.join(name), bytes).expect("a file");
    let whole = recorded(&busy(), ALL).expect("it runs");
    put("whole", &whole);
    put("cut", &whole[..whole.len() - 5]);
    put("ring", &recorded(&busy(), 1_000).expect("it runs"));
    let mut scheduler = Recorded::new(config()).expect("a valid configuration");
    scheduler.record_in_ring(ALL).expect("nothing was called");
    scheduler.abort(RequestId(1));
    let short = scheduler.recorded().expect("a ring");
    put("one_call", &short);
    let (before, record) = short.split_at(short.len() - 23);
    let mut long = [before, &[12, 0, 0, 0, 3, 0x81, 0], &record[6..]].concat();
    mend(&mut long);
    put("long_number", &long);
    let groups = vec![GroupSpec::FULL, GroupSpec::sliding(9)];
    let mut scheduler = Recorded::new(Config { enable_partial_hits: false, groups, ..config() }).expect("valid");
    scheduler.record_in_ring(ALL).expect("nothing was called");
    for name in [&b"a"[..], b"b"] {
        let identity = Identity {
            public_tokens: 4,
            adapter: Some(Adapter { name: (*b"x").into(), load: 3, path: (*b"/p").into() }),
            salts: vec![Salt { start: 0, end: usize::MAX, salt: (*b"s").into() }],
            media: vec![Media { start: 1, end: 3, id: (*b"m").into() }],
            ..Identity::of(Domain::Tenant(name.into()))
        };
        let prompt = scheduler.prompt((0..9).collect(), identity).expect("a valid prompt");
        let limits = Limits { max_tokens: 2, min_tokens: 1, stop_tokens: vec![5] };
        let asked = Asked { tenant: "t", turn: Turn { deadline_us: 900, ..Turn::default() }, siblings: 1 };
        let id = scheduler.submit_as(prompt, limits, asked, 5).expect("it fits");
        let range = TokenRange { start: 0, end: Some(5), priority: 80, duration_ms: Some(9) };
        scheduler.set_retention(id, Ranges::new(&[range]).expect("a range")).expect("it lives");
    }
    scheduler.set_weights_version(b"2").expect("nothing is in flight");
    put("said", &scheduler.recorded().expect("a ring"));
}
