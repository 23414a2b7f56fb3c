//! Every race of the free queue and of the holders, in every interleaving: one model a race, named after it.
//!
//! Before: two or three threads on a few blocks, under loom. After: the outcome is one that some order of the calls has, and the
//! audit finds every block in one place. Each race is run again with a planted fault, which it must find. `make loom` runs them;
//! without `--cfg loom` this file is empty. Interleavings with more preemptions than the bound of a race are not explored.

#![cfg(loom)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use blocktable_core::error::{Error, Result};
use blocktable_core::free_queue::{DEFAULT_LANE, FreeQueue};
use blocktable_core::ids::BlockId;
use blocktable_core::mutant::{self, Mutant};
use loom::sync::Arc;
use loom::thread;

/// One test a race, and one for each fault that it must find.
macro_rules! races {
    ($($name:ident, $preemptions:literal, [$($fault:ident),*];)*) => {
        $(
            #[test]
            fn $name() {
                explore($preemptions, races::$name);
            }
        )*

        mod finds {
            $(
                #[test]
                fn $name() {
                    for fault in [$(super::Mutant::$fault),*] {
                        super::must_find(fault, $preemptions, super::races::$name);
                    }
                }
            )*
        }
    };
}

races! {
    two_takes_of_the_last_block, 3, [PermitsWithoutCompare];
    two_hits_of_one_chain, 2, [LanesIgnoreOthers];
    a_chain_and_its_middle_are_hit_together, 2, [LanesIgnoreOthers];
    a_take_and_a_hit_of_one_chain, 2, [LanesIgnoreOthers, TakeKeepsName];
    two_takes_of_fresh_blocks, 3, [PermitsWithoutCompare];
    a_take_and_a_hit_of_one_block, 3, [HitTrustsFirstLook, TakeKeepsName];
    two_hits_of_one_free_block, 3, [HitTrustsFirstLook, WaitForOthers];
    two_hits_of_one_held_block, 3, [CountWithoutCompare];
    two_releases_of_the_last_holders, 3, [DropWithoutCompare];
    a_release_and_a_hit_of_one_block, 3, [DropWithoutCompare];
    a_fork_and_a_release_of_one_block, 3, [CountWithoutCompare, DropWithoutCompare];
    a_name_goes_while_its_block_is_hit, 3, [UnnameWithoutCompare];
    two_releases_to_one_tail, 2, [HelpersNeverStop];
    two_releases_to_the_head, 3, [StackIgnoresOthers];
    neighbours_are_hit_together, 2, [LanesIgnoreOthers];
    the_head_of_the_stack_goes_and_comes_back, 3, [StackForgetsVersion];
    a_list_comes_back_while_a_batch_is_taken, 3, [StackIgnoresOthers];
    a_release_and_the_take_that_needs_it, 3, [PermitsFirst];
    a_helper_comes_late, 2, [LanesIgnoreOthers];
    a_released_list_is_taken_before_it_is_open, 1, [LanesIgnoreOthers];
    a_move_and_a_take_of_one_block, 2, [HitTrustsFirstLook];
    two_moves_of_one_block, 1, [HitTrustsFirstLook];
    three_threads_take_and_release, 2, [PermitsWithoutCompare];
    three_hits_of_one_free_block, 2, [LanesIgnoreOthers];
}

mod races {
    use super::*;

    pub fn two_takes_of_the_last_block() {
        let queue = Arc::new(FreeQueue::new(2));
        let (one, two) = both(&queue, |queue| take(queue, 1), |queue| take(queue, 1));
        assert_eq!([one.is_ok(), two.is_ok()].iter().filter(|&&ok| ok).count(), 1);
        settled(&queue, &[held(&one), held(&two)]);
    }

    pub fn two_takes_of_fresh_blocks() {
        let queue = Arc::new(FreeQueue::new(4));
        let (one, two) = both(&queue, |queue| take(queue, 2), |queue| take(queue, 2));
        assert_ne!(one.is_ok(), two.is_ok(), "three blocks serve one take of two");
        settled(&queue, &[held(&one), held(&two)]);
    }

    pub fn a_take_and_a_hit_of_one_block() {
        let queue = lane_of(2);
        let (taken, hit) = both(&queue, |queue| take(queue, 1), |queue| share(queue, 1));
        let taken = taken.expect("two are free");
        assert_eq!(hit.is_err(), taken == [block(&queue, 1)], "the block is one thread's, the other sees it");
        assert!(!queue.is_named(taken[0]));
        settled(&queue, &[taken, held(&hit)]);
    }

    pub fn two_hits_of_one_free_block() {
        let queue = lane_of(2);
        let (one, two) = both(&queue, |queue| share(queue, 1), |queue| share(queue, 1));
        settled(&queue, &[one.expect("a hit"), two.expect("a hit")]);
    }

    pub fn two_hits_of_one_chain() {
        let queue = lane_of(3);
        let hit = |queue: &FreeQueue| share_all(queue, &[3, 2]);
        let (one, two) = both(&queue, hit, hit);
        assert_eq!(one.len().max(two.len()), 2, "who finds fewer lacked a permit that the other had");
        settled(&queue, &[one, two]);
    }

    pub fn a_chain_and_its_middle_are_hit_together() {
        let queue = lane_of(4);
        let (chain, one) = both(&queue, |queue| share_all(queue, &[3, 2, 1]), |queue| share(queue, 2));
        assert_eq!(chain.len(), 3, "four permits serve both");
        settled(&queue, &[chain, one.expect("a hit")]);
    }

    /// The take has the end of the chain first, or too few permits are left for it.
    pub fn a_take_and_a_hit_of_one_chain() {
        let queue = lane_of(2);
        let (taken, chain) = both(&queue, |queue| take(queue, 1), |queue| share_all(queue, &[2, 1]));
        let taken = held(&taken);
        assert!(taken.iter().all(|block| !chain.contains(block) && !queue.is_named(*block)));
        settled(&queue, &[taken, chain]);
    }

    pub fn two_hits_of_one_held_block() {
        let queue = lane_of(1);
        let first = share(&queue, 1).expect("a hit");
        let (one, two) = both(&queue, |queue| share(queue, 1), |queue| share(queue, 1));
        settled(&queue, &[first, one.expect("a hit"), two.expect("a hit")]);
    }

    pub fn two_releases_of_the_last_holders() {
        let queue = Arc::new(FreeQueue::new(2));
        let blocks = take(&queue, 1).expect("it is free");
        queue.hold(blocks[0]).expect("it is held");
        both(&queue, |queue| release(queue, &[1]), |queue| release(queue, &[1]));
        settled(&queue, &[]);
    }

    pub fn a_release_and_a_hit_of_one_block() {
        let queue = lane_of(1);
        share(&queue, 1).expect("a hit");
        let (_, hit) = both(&queue, |queue| release(queue, &[1]), |queue| share(queue, 1));
        settled(&queue, &[held(&hit)]);
    }

    pub fn a_fork_and_a_release_of_one_block() {
        let queue = Arc::new(FreeQueue::new(2));
        let blocks = take(&queue, 1).expect("it is free");
        queue.hold(blocks[0]).expect("it is held");
        let fork = |queue: &FreeQueue| queue.hold(block(queue, 1)).expect("this thread holds it");
        both(&queue, fork, |queue| release(queue, &[1]));
        settled(&queue, &[blocks.clone(), blocks]);
    }

    pub fn a_name_goes_while_its_block_is_hit() {
        let queue = lane_of(2);
        let forget = |queue: &FreeQueue| {
            queue.unname(block(queue, 1)).expect("a block of this pool");
            share(queue, 1)
        };
        let (own, hit) = both(&queue, forget, |queue| share(queue, 1));
        assert!(own.is_err(), "it has no name any more");
        settled(&queue, &[held(&hit)]);
    }

    pub fn two_releases_to_one_tail() {
        let queue = lane_of(2);
        for id in [1, 2] {
            share(&queue, id).expect("a hit");
        }
        both(&queue, |queue| release(queue, &[1]), |queue| release(queue, &[2]));
        settled(&queue, &[]);
    }

    pub fn two_releases_to_the_head() {
        let queue = Arc::new(FreeQueue::new(4));
        take(&queue, 3).expect("they are free");
        both(&queue, |queue| release(queue, &[2, 1]), |queue| release(queue, &[3]));
        let order: Vec<u32> = queue.iter().map(BlockId::get).collect();
        assert!(order == [1, 2, 3] || order == [3, 1, 2], "a list stays together: {order:?}");
        settled(&queue, &[]);
    }

    pub fn neighbours_are_hit_together() {
        let queue = lane_of(3);
        let (one, two) = both(&queue, |queue| share(queue, 1), |queue| share(queue, 2));
        settled(&queue, &[one.expect("a hit"), two.expect("a hit")]);
    }

    pub fn the_head_of_the_stack_goes_and_comes_back() {
        let queue = stack_of(3);
        let there_and_back = |queue: &FreeQueue| {
            let mut taken = take(queue, 2).ok()?;
            let first = taken.remove(0);
            release(queue, &[first.get()]);
            Some(taken)
        };
        let (one, rest) = both(&queue, |queue| take(queue, 1), there_and_back);
        settled(&queue, &[held(&one), rest.unwrap_or_default()]);
    }

    pub fn a_list_comes_back_while_a_batch_is_taken() {
        let queue = stack_of(4);
        let there_and_back = |queue: &FreeQueue| {
            let taken = take(queue, 2).expect("two of four are left");
            release(queue, &[taken[1].get(), taken[0].get()]);
        };
        let (taken, ()) = both(&queue, |queue| take(queue, 2), there_and_back);
        settled(&queue, &[taken.expect("two of four are left")]);
    }

    pub fn a_release_and_the_take_that_needs_it() {
        let queue = Arc::new(FreeQueue::new(2));
        take(&queue, 1).expect("it is free");
        let (_, taken) = both(&queue, |queue| release(queue, &[1]), |queue| take(queue, 1));
        settled(&queue, &[held(&taken)]);
    }

    /// The lane goes empty and gets the same first block again while a helper sleeps.
    pub fn a_helper_comes_late() {
        let queue = lane_and_fresh(2, 2);
        let there_and_back = |queue: &FreeQueue| {
            let hit = share(queue, 1);
            let others = take(queue, 3);
            if hit.is_ok() {
                release(queue, &[1]);
            }
            held(&others)
        };
        let (others, hit) = both(&queue, there_and_back, |queue| share(queue, 1));
        settled(&queue, &[others, held(&hit)]);
    }

    /// The list is linked into the lowest lane but not open for hits; its first block is taken and comes back elsewhere.
    pub fn a_released_list_is_taken_before_it_is_open() {
        let queue = lane_of(3);
        for id in [1, 2] {
            share(&queue, id).expect("a hit");
        }
        let there_and_back = |queue: &FreeQueue| {
            let mine = take(queue, 1).expect("block 3 is free");
            queue.name(mine[0]).expect("it is held");
            release(queue, &[mine[0].get()]);
        };
        let to_lowest = |queue: &FreeQueue| {
            queue.release(&[block(queue, 2), block(queue, 1)], |_| 0).expect("this thread holds them");
        };
        both(&queue, to_lowest, there_and_back);
        settled(&queue, &[]);
    }

    pub fn a_move_and_a_take_of_one_block() {
        let queue = lane_of(2);
        let (moved, taken) =
            both(&queue, |queue| queue.move_to_lane(block(queue, 1), DEFAULT_LANE + 1), |queue| take(queue, 1));
        let taken = taken.unwrap_or_default();
        assert!(
            moved.is_err() || queue.lane(block(&queue, 1)) == Some(DEFAULT_LANE + 1) || taken == [block(&queue, 1)]
        );
        settled(&queue, &[taken]);
    }

    pub fn two_moves_of_one_block() {
        let queue = lane_of(2);
        let to = |lane| move |queue: &FreeQueue| queue.move_to_lane(block(queue, 1), lane);
        let (up, down) = both(&queue, to(DEFAULT_LANE + 1), to(DEFAULT_LANE - 1));
        assert!(up.is_ok() || down.is_ok());
        settled(&queue, &[]);
    }

    pub fn three_threads_take_and_release() {
        let queue = stack_of(3);
        let mine = take(&queue, 1).expect("it is free");
        let third = Arc::clone(&queue);
        let releases = thread::spawn(move || release(&third, &[mine[0].get()]));
        let (one, two) = both(&queue, |queue| take(queue, 1), |queue| take(queue, 1));
        releases.join().expect("the thread ends");
        settled(&queue, &[one.expect("two are free"), two.expect("two are free")]);
    }

    /// One takes it out of its lane, and either of the others may have to carry that out.
    pub fn three_hits_of_one_free_block() {
        let queue = lane_of(2);
        let third = Arc::clone(&queue);
        let hits = thread::spawn(move || share(&third, 1));
        let (one, two) = both(&queue, |queue| share(queue, 1), |queue| share(queue, 1));
        let three = hits.join().expect("the thread ends");
        let found = [one, two, three].map(|hit| held(&hit));
        assert!(found.iter().filter(|hit| !hit.is_empty()).count() >= 2, "there are two permits for them: {found:?}");
        settled(&queue, &found);
    }
}

fn explore(preemptions: usize, race: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.max_branches = 5_000;
    model.check(race);
}

fn must_find(fault: Mutant, preemptions: usize, race: impl Fn() + Sync + Send + 'static) {
    assert!(mutant::choose(Some(fault.name())));
    let outcome = catch_unwind(AssertUnwindSafe(|| explore(preemptions, race)));
    assert!(mutant::choose(None));
    assert!(outcome.is_err(), "{} is not found", fault.name());
}

/// Runs two calls at once.
fn both<A: 'static, B>(
    queue: &Arc<FreeQueue>,
    one: impl FnOnce(&FreeQueue) -> A + 'static,
    two: impl FnOnce(&FreeQueue) -> B,
) -> (A, B) {
    let other = Arc::clone(queue);
    let one = thread::spawn(move || one(&other));
    let two = two(queue);
    (one.join().expect("the thread ends"), two)
}

/// Blocks 1, 2, …, all named, in the default lane in this order, and fresh ones before them.
fn lane_and_fresh(blocks: u32, fresh: u32) -> Arc<FreeQueue> {
    let queue = FreeQueue::new(blocks + fresh + 1);
    for block in take(&queue, blocks as usize).expect("all are free") {
        queue.name(block).expect("it is held");
    }
    release(&queue, &(1..=blocks).rev().collect::<Vec<_>>());
    Arc::new(queue)
}

fn lane_of(blocks: u32) -> Arc<FreeQueue> {
    lane_and_fresh(blocks, 0)
}

/// Blocks 1, 2, … without names, in the stack in this order.
fn stack_of(blocks: u32) -> Arc<FreeQueue> {
    let queue = FreeQueue::new(blocks + 1);
    take(&queue, blocks as usize).expect("all are free");
    release(&queue, &(1..=blocks).rev().collect::<Vec<_>>());
    Arc::new(queue)
}

fn block(queue: &FreeQueue, id: u32) -> BlockId {
    queue.block(id).expect("a block of this pool")
}

fn take(queue: &FreeQueue, count: usize) -> Result<Vec<BlockId>> {
    let mut out = vec![BlockId::NULL; count];
    match queue.take(&mut out) {
        Ok(()) => Ok(out),
        Err(error @ Error::OutOfBlocks { .. }) => Err(error),
        Err(other) => panic!("{other}"),
    }
}

fn share(queue: &FreeQueue, id: u32) -> Result<Vec<BlockId>> {
    let block = block(queue, id);
    queue.share(block).map(|()| vec![block])
}

/// The head of the chain that was hit.
fn share_all(queue: &FreeQueue, ids: &[u32]) -> Vec<BlockId> {
    let blocks: Vec<BlockId> = ids.iter().map(|&id| block(queue, id)).collect();
    blocks[..queue.share_all(&blocks)].to_vec()
}

fn release(queue: &FreeQueue, ids: &[u32]) {
    let blocks: Vec<BlockId> = ids.iter().map(|&id| block(queue, id)).collect();
    queue.release(&blocks, |_| DEFAULT_LANE).expect("this thread holds them");
}

fn held(outcome: &Result<Vec<BlockId>>) -> Vec<BlockId> {
    outcome.clone().unwrap_or_default()
}

/// All threads are done: each block has as many holders as these lists name it; what has none is in the queue, once.
fn settled(queue: &FreeQueue, holders: &[Vec<BlockId>]) {
    let names = |block| holders.iter().flatten().filter(|&&other| other == block).count();
    for id in 1..queue.num_blocks() {
        let block = block(queue, id);
        assert_eq!(queue.holders(block) as usize, names(block), "holders of block {id}");
    }
    queue.audit().expect("the queue is sound");
    let unheld = (1..queue.num_blocks()).filter(|&id| names(block(queue, id)) == 0).count();
    assert_eq!(queue.len() as usize, unheld, "all that nobody holds is free");
}
