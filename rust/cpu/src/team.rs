//! Threads for one call: those of the OpenMP runtime that is already in the process (torch's own), or new ones.
//!
//! Why: a second pool would fight with torch's for the cores, since OpenMP's idle threads keep spinning for a while, and starting
//! threads takes tens of microseconds at each layer. The runtime keeps one pool for each thread that opens parallel regions, so a call
//! from the thread that runs the model gets the very threads that its products run in.

use std::any::Any;
use std::ffi::{c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs `work` for every number below `items`, each once, on up to `threads` threads, of which this is one. Each thread begins with
/// neighbours, so that what an item asks memory for ahead serves the next one, and then helps the others; which thread takes which item
/// is open. A panic of `work` comes out of here.
pub(crate) fn run(threads: usize, items: usize, work: &(dyn Fn(usize) + Sync)) {
    let threads = threads.min(items);
    if threads <= 1 {
        (0..items).for_each(work);
        return;
    }
    // Equal parts, of which the first ones are one longer.
    let ends = |part: usize| part * (items / threads) + part.min(items % threads);
    let parts = (0..threads).map(|part| Part { next: AtomicUsize::new(ends(part)), end: ends(part + 1) }).collect();
    let shared = Shared { threads: AtomicUsize::new(0), parts, work, panic: Mutex::new(None) };
    match runtime() {
        // SAFETY: the runtime calls `in_region` on each of its threads with this pointer and returns when all have ended.
        Some(parallel) => unsafe { parallel(in_region, (&raw const shared).cast_mut().cast(), threads as c_uint, 0) },
        None => std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(|| shared.take_items());
            }
            shared.take_items();
        }),
    }
    if let Some(panic) = shared.panic.into_inner().unwrap_or_else(|held| held.into_inner()) {
        resume_unwind(panic);
    }
}

/// What the threads of one call share.
struct Shared<'a> {
    /// How many have come.
    threads: AtomicUsize,
    parts: Vec<Part>,
    work: &'a (dyn Fn(usize) + Sync),
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Neighbouring items, on a cache line of their own.
#[repr(align(64))]
struct Part {
    next: AtomicUsize,
    end: usize,
}

impl Shared<'_> {
    fn take_items(&self) {
        let all = catch_unwind(AssertUnwindSafe(|| {
            let own = self.threads.fetch_add(1, Ordering::Relaxed);
            for part in 0..self.parts.len() {
                let Part { next, end } = &self.parts[(own + part) % self.parts.len()];
                loop {
                    let item = next.fetch_add(1, Ordering::Relaxed);
                    if item >= *end {
                        break;
                    }
                    (self.work)(item);
                }
            }
        }));
        if let Err(panic) = all {
            self.parts.iter().for_each(|part| part.next.store(part.end, Ordering::Relaxed));
            *self.panic.lock().unwrap_or_else(|held| held.into_inner()) = Some(panic);
        }
    }
}

extern "C" fn in_region(shared: *mut c_void) {
    // SAFETY: `run` passes a pointer to its `Shared`, which lives until the region has ended, and only shared references are made.
    let shared = unsafe { &*shared.cast_const().cast::<Shared<'_>>() };
    shared.take_items();
}

/// `GOMP_parallel(function, data, threads, flags)`, which GNU's, LLVM's and Intel's runtimes have.
// SAFETY: to call it, the function must be fit to run on several threads at once with `data`.
type Parallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// The entry of the OpenMP runtime of this process, if one is loaded. Looked up at each call: it may be loaded at any time.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn runtime() -> Option<Parallel> {
    use std::ffi::c_char;
    // SAFETY: the declaration is that of POSIX; null stands for the symbols of the whole process.
    unsafe extern "C" {
        fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void;
    }
    static FOUND: AtomicUsize = AtomicUsize::new(0);
    let mut address = FOUND.load(Ordering::Relaxed);
    if address == 0 {
        // SAFETY: a look-up of a name that ends in a zero.
        address = unsafe { dlsym(std::ptr::null_mut(), c"GOMP_parallel".as_ptr()) } as usize;
        FOUND.store(address, Ordering::Relaxed);
    }
    let address = address as *mut c_void;
    // SAFETY: a symbol of this name is that function, whose signature is part of the runtimes' stable interface.
    (!address.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Parallel>(address) })
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn runtime() -> Option<Parallel> {
    None
}

/// Sums `numbers` on `threads` threads: as fast as memory can be read, to compare with.
pub fn read_sum(threads: usize, numbers: &[f32]) -> f64 {
    const PART: usize = 1 << 18;
    let total = Mutex::new(0.0);
    run(threads, numbers.len().div_ceil(PART), &|item| {
        let part = &numbers[item * PART..numbers.len().min((item + 1) * PART)];
        let mut sums = [0f32; 64];
        for line in part.chunks_exact(64) {
            sums.iter_mut().zip(line).for_each(|(sum, x)| *sum += x);
        }
        let rest: f32 = part.chunks_exact(64).remainder().iter().sum();
        *total.lock().unwrap_or_else(|held| held.into_inner()) += f64::from(sums.iter().sum::<f32>() + rest);
    });
    total.into_inner().unwrap_or_else(|held| held.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_runs_once_on_any_number_of_threads() {
        for threads in [0, 1, 2, 7, 100] {
            for items in [0, 1, 2, 50] {
                let seen: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                run(threads, items, &|item| {
                    seen[item].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    seen.iter().all(|count| count.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {items} items"
                );
            }
        }
    }

    #[test]
    fn a_panic_comes_out() {
        let caught = catch_unwind(|| run(2, 8, &|item| assert_ne!(item, 5)));
        assert!(caught.is_err());
    }

    #[test]
    fn a_read_sum_is_the_sum() {
        let numbers: Vec<f32> = (0..300_001).map(|i| (i % 7) as f32).collect();
        assert_eq!(read_sum(2, &numbers), numbers.iter().map(|&x| f64::from(x)).sum::<f64>());
    }
}
