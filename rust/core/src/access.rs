//! Atomic cells whose every access is counted, and at which a test can stop a thread for as long as it likes.
//!
//! Before: a test gives the calling thread a [`Watch`]. After: it reads how many accesses were made, or has seen the thread stop at the
//! n-th one. Only in builds with feature `mutants`; a wheel has plain atomics. Nothing here changes what an access does.

use std::cell::RefCell;
use std::panic::Location;
use std::sync::atomic::{self, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// What happens to the accesses of one thread.
#[derive(Default)]
pub struct Watch {
    /// Accesses so far.
    pub count: u64,
    /// The thread stops before this access, counted from 1.
    pub stop_at: Option<(u64, Arc<Gate>)>,
    /// The thread panics at its first access beyond this one: it makes no progress.
    pub limit: Option<u64>,
}

/// Where a stopped thread waits.
#[derive(Default)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    stopped_at: Option<&'static Location<'static>>,
    finished: bool,
    open: bool,
}

impl Gate {
    /// Waits until the thread has stopped, and says at which line; or until it has finished without stopping.
    #[must_use]
    pub fn wait_until_stopped(&self) -> Option<&'static Location<'static>> {
        let state = self.state.lock().expect("no thread panics here");
        let state = self.changed.wait_while(state, |state| state.stopped_at.is_none() && !state.finished);
        state.expect("no thread panics here").stopped_at
    }

    /// The watched thread is done.
    pub fn finish(&self) {
        self.state.lock().expect("no thread panics here").finished = true;
        self.changed.notify_all();
    }

    /// Lets the thread go on.
    pub fn open(&self) {
        self.state.lock().expect("no thread panics here").open = true;
        self.changed.notify_all();
    }

    fn stop(&self, at: &'static Location<'static>) {
        let mut state = self.state.lock().expect("no thread panics here");
        state.stopped_at = Some(at);
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |state| !state.open));
    }
}

thread_local! {
    static WATCH: RefCell<Option<Watch>> = const { RefCell::new(None) };
}

/// Watches the accesses of this thread from now on.
pub fn watch(watch: Watch) {
    WATCH.with(|cell| *cell.borrow_mut() = Some(watch));
}

/// Ends the watch of this thread; returns how many accesses it saw.
pub fn end_watch() -> u64 {
    WATCH.with(|cell| cell.borrow_mut().take()).map_or(0, |watch| watch.count)
}

#[track_caller]
fn step() {
    let at = Location::caller();
    let gate = WATCH.with(|cell| {
        let mut cell = cell.borrow_mut();
        let watch = cell.as_mut()?;
        watch.count += 1;
        assert!(watch.limit.is_none_or(|limit| watch.count <= limit), "no progress: stuck at {at}");
        watch.stop_at.as_ref().filter(|(n, _)| *n == watch.count).map(|(_, gate)| Arc::clone(gate))
    });
    if let Some(gate) = gate {
        gate.stop(at);
    }
}

/// A 64-bit cell, like the standard library's.
#[derive(Debug, Default)]
pub struct AtomicU64(atomic::AtomicU64);

#[allow(missing_docs, reason = "the standard library's names")]
impl AtomicU64 {
    #[must_use]
    pub const fn new(value: u64) -> Self {
        AtomicU64(atomic::AtomicU64::new(value))
    }

    #[track_caller]
    pub fn load(&self, order: Ordering) -> u64 {
        step();
        self.0.load(order)
    }

    #[track_caller]
    pub fn store(&self, value: u64, order: Ordering) {
        step();
        self.0.store(value, order);
    }

    #[track_caller]
    pub fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        step();
        self.0.fetch_add(value, order)
    }

    #[track_caller]
    pub fn fetch_or(&self, value: u64, order: Ordering) -> u64 {
        step();
        self.0.fetch_or(value, order)
    }

    #[track_caller]
    pub fn fetch_and(&self, value: u64, order: Ordering) -> u64 {
        step();
        self.0.fetch_and(value, order)
    }

    /// # Errors
    /// The value that was found instead.
    #[track_caller]
    pub fn compare_exchange(&self, old: u64, new: u64, done: Ordering, refused: Ordering) -> Result<u64, u64> {
        step();
        self.0.compare_exchange(old, new, done, refused)
    }
}
