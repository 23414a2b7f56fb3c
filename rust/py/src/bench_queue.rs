//! Take and release on one to many threads: our free queue beside a locked deque and a bounded queue of crossbeam's.
//!
//! Before: `blocktable bench pool`. After: figures of one implementation. Each checks that no block was lost before it tells a time.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::Instant;

use blocktable_core::free_queue::{DEFAULT_LANE, FreeQueue};
use blocktable_core::ids::BlockId;
use crossbeam_queue::ArrayQueue;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::door::released;
use crate::error::invalid;

type Figures = HashMap<&'static str, f64>;

/// What is timed: blocks that are free or held, with a count each.
trait Blocks: Sync {
    fn new(num_blocks: u32) -> Self;
    /// Fills `out`. There are always enough.
    fn take(&self, out: &mut [BlockId]);
    /// Drops one holder each, last block first; with `published` content they go behind the tail.
    fn release(&self, blocks: &[BlockId], published: bool);
    fn num_free(&self) -> usize;
    fn bytes_per_block() -> usize;
}

impl Blocks for FreeQueue {
    fn new(num_blocks: u32) -> Self {
        FreeQueue::new(num_blocks)
    }

    fn take(&self, out: &mut [BlockId]) {
        FreeQueue::take(self, out).expect("enough are free");
    }

    fn release(&self, blocks: &[BlockId], published: bool) {
        if published {
            blocks.iter().for_each(|&block| self.name(block).expect("held"));
        }
        FreeQueue::release(self, blocks, |_| DEFAULT_LANE).expect("held");
    }

    fn num_free(&self) -> usize {
        self.len() as usize
    }

    fn bytes_per_block() -> usize {
        FreeQueue::bytes_per_block()
    }
}

/// A deque and counts behind one lock. It cannot take a hit out of the middle in constant time.
struct Locked(Mutex<(VecDeque<BlockId>, Box<[u32]>)>);

impl Blocks for Locked {
    fn new(num_blocks: u32) -> Self {
        let ids = FreeQueue::new(num_blocks);
        Locked(Mutex::new((ids.iter().collect(), vec![0; num_blocks as usize].into())))
    }

    fn take(&self, out: &mut [BlockId]) {
        let (queue, holders) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for out in out {
            *out = queue.pop_front().expect("enough are free");
            holders[out.get() as usize] = 1;
        }
    }

    fn release(&self, blocks: &[BlockId], published: bool) {
        let (queue, holders) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for &block in blocks.iter().rev() {
            holders[block.get() as usize] -= 1;
            if published {
                queue.push_back(block);
            }
        }
        if !published {
            blocks.iter().for_each(|&block| queue.push_front(block));
        }
    }

    fn num_free(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.len()
    }

    fn bytes_per_block() -> usize {
        size_of::<BlockId>() + size_of::<u32>()
    }
}

/// A bounded ring and atomic counts: first in, first out, whatever the content; no removal from the middle.
struct Ring(ArrayQueue<BlockId>, Box<[AtomicU32]>);

impl Blocks for Ring {
    fn new(num_blocks: u32) -> Self {
        let ring = ArrayQueue::new(num_blocks as usize);
        FreeQueue::new(num_blocks).iter().for_each(|block| ring.push(block).expect("room for all"));
        Ring(ring, (0..num_blocks).map(|_| AtomicU32::new(0)).collect())
    }

    fn take(&self, out: &mut [BlockId]) {
        for out in out {
            *out = self.0.pop().expect("enough are free");
            self.1[out.get() as usize].store(1, Ordering::Relaxed);
        }
    }

    fn release(&self, blocks: &[BlockId], _published: bool) {
        for &block in blocks.iter().rev() {
            self.1[block.get() as usize].fetch_sub(1, Ordering::AcqRel);
            self.0.push(block).expect("room for all");
        }
    }

    fn num_free(&self) -> usize {
        self.0.len()
    }

    fn bytes_per_block() -> usize {
        2 * size_of::<usize>() + size_of::<u32>()
    }
}

fn time<B: Blocks>(num_blocks: u32, batch: usize, published: bool, threads: usize, rounds: u32) -> Option<Figures> {
    let start = Instant::now();
    let blocks = B::new(num_blocks);
    let init_ms = start.elapsed().as_secs_f64() * 1e3;
    let start = Instant::now();
    let mut all = vec![BlockId::NULL; num_blocks as usize - 1];
    blocks.take(&mut all);
    let ascending = all.iter().map(|block| block.get()).eq(1..num_blocks);
    blocks.release(&all, published);
    let first_pass_ms = start.elapsed().as_secs_f64() * 1e3;
    let barrier = Barrier::new(threads);
    let work = || {
        let mut out = vec![BlockId::NULL; batch];
        barrier.wait();
        let start = Instant::now();
        for _ in 0..rounds {
            blocks.take(&mut out);
            blocks.release(std::hint::black_box(&out), published);
        }
        (start, Instant::now())
    };
    let times: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().map(|worker| worker.join().expect("a loop that ends")).collect()
    });
    // From the first start to the last end: who times from outside may wake up when all is over.
    let start = times.iter().map(|time| time.0).min()?;
    let elapsed = times.iter().map(|time| time.1).max()? - start;
    let is_whole = blocks.num_free() == num_blocks as usize - 1;
    (ascending && is_whole).then(|| {
        let moved = f64::from(rounds) * batch as f64 * threads as f64;
        HashMap::from([
            ("ns_per_block", elapsed.as_secs_f64() * 1e9 / moved),
            ("init_ms", init_ms),
            ("first_pass_ms", first_pass_ms),
            ("bytes_per_block", B::bytes_per_block() as f64),
        ])
    })
}

/// Time take + release of one implementation. The time of a block is wall time over all blocks that all threads moved.
#[pyfunction]
#[pyo3(signature = (*, implementation, num_blocks, batch, published, threads, rounds))]
pub fn bench_queue(
    py: Python<'_>,
    implementation: &str,
    num_blocks: u32,
    batch: u32,
    published: bool,
    threads: u32,
    rounds: u32,
) -> PyResult<Figures> {
    if batch == 0 || threads == 0 || rounds == 0 || u64::from(batch) * u64::from(threads) >= u64::from(num_blocks) {
        let bound = "batch, threads and rounds must be at least 1, batch * threads below num_blocks";
        return Err(invalid(py, "batch", batch, bound));
    }
    let run = match implementation {
        "ours" => time::<FreeQueue>,
        "mutex" => time::<Locked>,
        "crossbeam" => time::<Ring>,
        other => return Err(invalid(py, "implementation", other, "must be ours, mutex or crossbeam")),
    };
    let figures = released(py, || run(num_blocks, batch as usize, published, threads as usize, rounds));
    figures.ok_or_else(|| PyRuntimeError::new_err("wrong answer, not timed: blocks are out of order or lost"))
}
