//! A thread that stops for ever, at any access to the queue's memory, stops nobody else.
//!
//! Before: an operation, and a number n. After: thread A stopped at its n-th access to an atomic cell; B and C finished 1,000 operations
//! each within a bound of accesses; and when A is let go at last, it finishes too, and every block and permit is in its place. n runs
//! from 1 until the operation ends without stopping, so that A stops at every access that the operation makes; and no access in the
//! queue's source is left out. Each is done once more behind a thread D that stopped in the middle of an operation on the lanes.

#![cfg(all(feature = "mutants", not(loom)))]

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use blocktable_core::access::{Gate, Watch, end_watch, watch};
use blocktable_core::error::Result;
use blocktable_core::free_queue::{DEFAULT_LANE, FreeQueue};
use blocktable_core::ids::BlockId;
use blocktable_core::mutant;

const OPERATIONS: u64 = 1_000;
/// Accesses that an operation of B or C may need on average. Alone it needs some 30.
const ACCESSES: u64 = 300;
const NUM_BLOCKS: u32 = 40;
/// A block with a name, in the middle of its lane.
const FREE: u32 = 12;
/// The access of a hit of a free block that is the first one after its operation is written.
const HIT_UNDER_WAY: u64 = 7;

type Operation = fn(&FreeQueue);

/// What A does in a [`scene`].
const OF_A: &[(&str, Operation)] = &[
    ("take from the stack", |queue| drop(take(queue, 2))),
    ("take from everywhere", |queue| drop(take(queue, 34))),
    ("take too many", |queue| drop(take(queue, 1_000))),
    ("hit of a free block", |queue| drop(queue.share(block(queue, FREE)))),
    ("hit of a chain", |queue| {
        let hits = queue.share_all(&[4, FREE, FREE - 1, FREE - 2, 15].map(|id| block(queue, id)));
        assert!(hits <= 5);
    }),
    ("hit of a held block", |queue| drop(queue.share(block(queue, 4)))),
    ("fork", |queue| queue.hold(block(queue, 1)).expect("held")),
    ("fork of a table", |queue| queue.hold_all(&[1, 0, 2, 3].map(|id| block(queue, id))).expect("held")),
    ("fork that may be refused", |queue| drop(queue.hold_all(&[1, 2, FREE].map(|id| block(queue, id))))),
    ("release of unnamed blocks", |queue| release(queue, &[1, 2], DEFAULT_LANE)),
    ("release of named blocks", |queue| release(queue, &[3, 4], DEFAULT_LANE)),
    ("release of both", |queue| release(queue, &[1, 3, 2, 4], DEFAULT_LANE)),
    ("release to another lane", |queue| release(queue, &[3, 4], 7)),
    ("refused release", |queue| {
        let blocks = [1, 1, 3, 2].map(|id| block(queue, id));
        assert!(queue.drop_holders(&blocks, |_| DEFAULT_LANE).is_err());
    }),
    ("name", |queue| queue.name(block(queue, 1)).expect("held")),
    ("unname", |queue| queue.unname(block(queue, 3)).expect("a block of this pool")),
    ("move", |queue| drop(queue.move_to_lane(block(queue, FREE), 90))),
    ("look", |queue| assert!(queue.len() < NUM_BLOCKS && queue.holders(block(queue, 1)) < 9)),
];

/// Held: 1 to 4, of which 3 and 4 have names. Stack: 5 to 8. Lane: 9 to 15. Fresh: the rest.
fn scene() -> Arc<FreeQueue> {
    let queue = FreeQueue::new(NUM_BLOCKS);
    let all = take(&queue, 15).expect("they are free");
    for &block in all.iter().filter(|block| matches!(block.get(), 3 | 4 | 9..)) {
        queue.name(block).expect("held");
    }
    release(&queue, &(5..=15).rev().collect::<Vec<_>>(), DEFAULT_LANE);
    Arc::new(queue)
}

#[test]
fn wherever_a_thread_stops_for_ever_the_others_go_on() {
    let mut places = BTreeSet::new();
    for (name, operation) in OF_A {
        for behind_another in [false, true] {
            places.extend(everywhere(name, *operation, behind_another));
        }
    }
    let missed: Vec<_> = accesses_in_source().into_iter().filter(|access| !places.contains(access)).collect();
    assert!(missed.is_empty(), "no thread stopped at {missed:?}");
}

#[test]
fn a_helper_that_slept_changes_nothing() {
    helpers_sleep().unwrap_or_else(|why| panic!("{why}"));
}

#[test]
fn a_queue_that_waits_for_another_thread_is_found() {
    assert!(mutant::choose(Some("wait_for_others")));
    let outcome = catch_unwind(AssertUnwindSafe(|| everywhere(OF_A[3].0, OF_A[3].1, false)));
    assert!(mutant::choose(None));
    assert!(outcome.is_err());
}

#[test]
fn a_late_helper_that_changes_what_has_changed_since_is_found() {
    assert!(mutant::choose(Some("links_forget_version")));
    let outcome = helpers_sleep();
    assert!(mutant::choose(None));
    assert!(outcome.is_err());
}

/// A helps with D's hit and stops at each access in turn; D goes on, empties the lane and brings the block back; then A goes on.
fn helpers_sleep() -> std::result::Result<(), String> {
    let there_and_back: Operation = |queue| {
        let hit = queue.share(block(queue, 1));
        let _ = take(queue, 1);
        hit.iter().for_each(|()| release(queue, &[1], DEFAULT_LANE));
    };
    for n in 1.. {
        let queue = FreeQueue::new(4);
        let named = take(&queue, 3).expect("they are free");
        named.iter().for_each(|&block| queue.name(block).expect("held"));
        release(&queue, &[2, 1], DEFAULT_LANE);
        // For A's permit.
        release(&queue, &[3], 90);
        let queue = Arc::new(queue);
        let d = Stopped::at(&queue, HIT_UNDER_WAY, there_and_back);
        let a = Stopped::at(&queue, n, |queue| drop(queue.share(block(queue, 1))));
        let (place, done) = (a.place.clone(), d.go_on());
        if !(a.go_on() && done) {
            return Err(format!("access {n}, {place:?}: a thread fails"));
        }
        queue.audit().map_err(|error| format!("access {n}, {place:?}: {error}"))?;
        let unheld = (1..4).filter(|&id| queue.holders(block(&queue, id)) == 0).count();
        if queue.len() as usize != unheld {
            return Err(format!("access {n}, {place:?}: {} are free, nobody holds {unheld}", queue.len()));
        }
        if place.is_none() {
            break;
        }
    }
    Ok(())
}

/// Stops `operation` at each of its accesses in turn, in a new scene each time; returns where it stopped.
fn everywhere(name: &str, operation: Operation, behind_another: bool) -> BTreeSet<(String, u32)> {
    let mut places = BTreeSet::new();
    for n in 1.. {
        let queue = scene();
        let hit: Operation = |queue| drop(queue.share(block(queue, FREE + 1)));
        let d = behind_another.then(|| Stopped::at(&queue, HIT_UNDER_WAY, hit));
        let a = Stopped::at(&queue, n, operation);
        let others = [1, 2].map(|seed| on_a_thread(&queue, move |queue| work(queue, seed)));
        let others = others.map(JoinHandle::join);
        // Let them go before anything is judged: nobody may be left behind if the test fails.
        let place = a.place.clone();
        let gone_on = [d, Some(a)].into_iter().flatten().all(Stopped::go_on);
        let at = format!("{name}, stopped at access {n}, {place:?}, behind another: {behind_another}");
        let held: Vec<BlockId> = others
            .into_iter()
            .flat_map(|other| other.unwrap_or_else(|_| panic!("{at}: the others do not go on")))
            .collect();
        assert!(gone_on, "{at}: who had stopped fails");
        for block in &held {
            let times = held.iter().filter(|&other| other == block).count();
            assert!(queue.holders(*block) as usize >= times, "{at}: {block:?} is held {times} times");
        }
        held.iter().for_each(|block| release(&queue, &[block.get()], DEFAULT_LANE));
        queue.audit().unwrap_or_else(|error| panic!("{at}: {error}"));
        let unheld = (1..NUM_BLOCKS).filter(|&id| queue.holders(block(&queue, id)) == 0).count();
        assert_eq!(queue.len() as usize, unheld, "{at}: a block or a permit is lost");
        match place {
            Some(place) => places.insert(place),
            None => break,
        };
    }
    places
}

/// A thread that has stopped, or has ended without.
struct Stopped {
    gate: Arc<Gate>,
    thread: JoinHandle<()>,
    place: Option<(String, u32)>,
}

impl Stopped {
    /// At its `n`-th access.
    fn at(queue: &Arc<FreeQueue>, n: u64, operation: Operation) -> Stopped {
        let gate = Arc::new(Gate::default());
        let its = Arc::clone(&gate);
        let thread = on_a_thread(queue, move |queue| {
            watch(Watch { stop_at: Some((n, Arc::clone(&its))), limit: Some(100_000), ..Watch::default() });
            let outcome = catch_unwind(AssertUnwindSafe(|| operation(queue)));
            end_watch();
            its.finish();
            assert!(outcome.is_ok());
        });
        let place = gate.wait_until_stopped().map(|place| (file_name(place.file()), place.line()));
        Stopped { gate, thread, place }
    }

    /// False if it fails.
    fn go_on(self) -> bool {
        self.gate.open();
        self.thread.join().is_ok()
    }
}

/// Runs `task` with the fault that this thread has chosen.
fn on_a_thread<T: Send + 'static>(
    queue: &Arc<FreeQueue>,
    task: impl FnOnce(&FreeQueue) -> T + Send + 'static,
) -> JoinHandle<T> {
    let queue = Arc::clone(queue);
    let fault = mutant::available().iter().find(|&&fault| mutant::is_on(fault));
    thread::spawn(move || {
        assert!(mutant::choose(fault.map(|fault| fault.name())));
        task(&queue)
    })
}

/// Takes, names, hits, moves and releases, as `seed` has it. Returns what it holds in the end.
fn work(queue: &FreeQueue, seed: u64) -> Vec<BlockId> {
    watch(Watch { limit: Some(OPERATIONS * ACCESSES), ..Watch::default() });
    let mut held: Vec<BlockId> = Vec::new();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut number = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    for _ in 0..OPERATIONS {
        let any = block(queue, number(NUM_BLOCKS as usize) as u32);
        match number(8) {
            0 | 1 => held.extend(take(queue, 1 + number(3)).unwrap_or_default()),
            2 | 3 => held.extend(queue.share(any).map(|()| any)),
            4 => held.iter().take(1).for_each(|&block| queue.name(block).expect("held")),
            5 => drop(queue.move_to_lane(any, [DEFAULT_LANE, 90][number(2)])),
            _ => {
                let rest = held.split_off(held.len().saturating_sub(1 + number(4)));
                rest.iter().skip(1).for_each(|&block| queue.name(block).expect("held"));
                queue.release(&rest, |_| DEFAULT_LANE).expect("held");
            }
        }
    }
    end_watch();
    held
}

/// Every line of the queue's source that touches an atomic cell, but those that only audits and planted faults reach.
fn accesses_in_source() -> BTreeSet<(String, u32)> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = vec![source.join("free_queue.rs")];
    files.extend(["holders", "lanes", "node", "stack"].map(|name| source.join(format!("free_queue/{name}.rs"))));
    let mut accesses = BTreeSet::new();
    for path in files {
        let text = std::fs::read_to_string(&path).expect("the source is here");
        let file = file_name(path.to_str().expect("a plain path"));
        let mut before = "";
        for (number, line) in (1..).zip(text.lines()) {
            if line.contains("fn iter") || line.contains("pub fn used") || line.contains("mod tests") {
                break;
            }
            let is_access =
                [".load(", ".store(", ".compare_exchange(", ".fetch_"].iter().any(|call| line.contains(call));
            // A planted fault's own accesses stand by themselves, in the block that asks for it.
            if is_access && !before.contains("mutant::is_on") {
                accesses.insert((file.clone(), number));
            }
            before = line;
        }
    }
    assert!(accesses.len() > 20);
    accesses
}

fn file_name(path: &str) -> String {
    Path::new(path).file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn block(queue: &FreeQueue, id: u32) -> BlockId {
    queue.block(id).expect("a block of this pool")
}

fn take(queue: &FreeQueue, count: usize) -> Result<Vec<BlockId>> {
    let mut out = vec![BlockId::NULL; count];
    queue.take(&mut out).map(|()| out)
}

fn release(queue: &FreeQueue, ids: &[u32], lane: u16) {
    let blocks: Vec<BlockId> = ids.iter().map(|&id| block(queue, id)).collect();
    queue.release(&blocks, |_| lane).expect("held");
}
