//! Four threads take, share, fork, name, move and release at random. Nothing is lost, and nothing is had twice.
//!
//! Before: seeds. After: no block was ever in the hands of two threads that both took it, each has as many holders as the threads say,
//! and the audit finds all others in the queue, once. `BLOCKTABLE_CASES` says how many thousand calls each thread makes (default 50).

#![cfg(not(loom))]

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use blocktable_core::free_queue::{DEFAULT_LANE, FreeQueue};
use blocktable_core::ids::BlockId;
use blocktable_core::mutant;

const THREADS: u64 = 4;

/// A thread, and what it holds: one entry a holder.
struct Worker<'a> {
    queue: &'a FreeQueue,
    /// Which thread took a block and is alone with it: 0 is nobody.
    owner: &'a [AtomicU32],
    name: u32,
    random: u64,
    held: Vec<BlockId>,
}

impl Worker<'_> {
    fn number(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % below as u64) as usize
    }

    fn take(&mut self, count: usize) {
        let mut out = vec![BlockId::NULL; count];
        if self.queue.take(&mut out).is_err() {
            return;
        }
        for &block in &out {
            assert_eq!(self.queue.holders(block), 1);
            let before = self.owner[block.get() as usize].swap(self.name, Ordering::Relaxed);
            assert_eq!(before, 0, "{block:?} is had by thread {before} already");
            assert_eq!(self.owner[block.get() as usize].swap(0, Ordering::Relaxed), self.name);
        }
        self.held.extend(out);
    }

    fn step(&mut self) {
        let any = self.queue.block(self.number(self.owner.len()) as u32).expect("a block of this pool");
        match self.number(11) {
            0..=2 => {
                let count = self.number(40);
                self.take(count);
            }
            3 | 4 => self.held.extend(self.queue.share(any).map(|()| any)),
            10 => {
                // As a release of three or more in this order has queued them.
                let chain: Vec<BlockId> =
                    (0..3).filter_map(|less| self.queue.block(any.get().checked_sub(less)?).ok()).collect();
                let hits = self.queue.share_all(&chain);
                self.held.extend(&chain[..hits]);
            }
            5 => {
                if let Some(&block) = self.held.first() {
                    self.queue.hold(block).expect("this thread holds it");
                    self.held.push(block);
                }
            }
            6 => {
                let lane = [0, DEFAULT_LANE, 100][self.number(3)];
                let _ = self.queue.move_to_lane(any, lane);
            }
            7 => self.held.iter().take(3).for_each(|&block| self.queue.name(block).expect("this thread holds it")),
            _ => {
                let count = self.number(40);
                let rest = self.held.split_off(self.held.len().saturating_sub(count));
                rest.iter().step_by(2).for_each(|&block| self.queue.name(block).expect("this thread holds it"));
                self.queue.release(&rest, |_| DEFAULT_LANE).expect("this thread holds them");
            }
        }
    }
}

#[test]
fn four_threads_lose_no_block_and_have_none_twice() {
    let cases = std::env::var("BLOCKTABLE_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(50_u64);
    let calls = 1_000 * cases.min(20_000);
    for num_blocks in [9, 150, 5_000] {
        run(num_blocks, calls / 3, None);
    }
}

/// The races have their faults in `loom_queue.rs`: here threads that lose a race may never end.
#[test]
#[cfg(feature = "mutants")]
fn a_block_that_is_lost_is_noticed() {
    assert!(std::panic::catch_unwind(|| run(9, 10_000, Some("lost_block"))).is_err());
}

/// Four threads make `calls` calls each, under a planted fault if one is named. Panics at what must not be.
fn run(num_blocks: u32, calls: u64, fault: Option<&'static str>) {
    let queue = FreeQueue::new(num_blocks);
    let owner: Vec<AtomicU32> = (0..num_blocks).map(|_| AtomicU32::new(0)).collect();
    let held: Vec<BlockId> = thread::scope(|scope| {
        let workers: Vec<_> = (1..=THREADS)
            .map(|name| {
                let random = name.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                let mut worker = Worker { queue: &queue, owner: &owner, name: name as u32, random, held: Vec::new() };
                scope.spawn(move || {
                    assert!(fault.is_none() || mutant::choose(fault));
                    (0..calls).for_each(|_| worker.step());
                    worker.held
                })
            })
            .collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a thread that ends")).collect()
    });
    let mut holders = vec![0; num_blocks as usize];
    held.iter().for_each(|block| holders[block.get() as usize] += 1);
    for id in 1..num_blocks {
        let block = queue.block(id).expect("a block of this pool");
        assert_eq!(queue.holders(block), holders[id as usize], "holders of block {id}");
    }
    queue.audit().expect("the queue is sound");
    let unheld = holders.iter().skip(1).filter(|&&holders| holders == 0).count();
    assert_eq!(queue.len() as usize, unheld, "all that nobody holds is free");
}
