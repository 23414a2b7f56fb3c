//! What a call costs in accesses does not depend on how many blocks there are, nor on how old the queue is.
//!
//! Before: pools of 10,000 to 1,000,000 blocks, fresh and aged (all content published, the lane shuffled). After: each call made the
//! same number of accesses to atomic cells in all of them. Counted, not timed.

#![cfg(all(feature = "mutants", not(loom)))]

use blocktable_core::access::{Watch, end_watch, watch};
use blocktable_core::free_queue::{DEFAULT_LANE, FreeQueue};
use blocktable_core::ids::BlockId;
use blocktable_core::mutant;

fn take(queue: &FreeQueue, count: usize) -> Vec<BlockId> {
    let mut out = vec![BlockId::NULL; count];
    queue.take(&mut out).expect("enough are free");
    out
}

fn accesses(call: impl FnOnce()) -> u64 {
    watch(Watch::default());
    call();
    end_watch()
}

/// A queue full of named blocks, in an order without order.
fn aged(num_blocks: u32) -> FreeQueue {
    let queue = FreeQueue::new(num_blocks);
    let mut blocks = take(&queue, num_blocks as usize - 1);
    blocks.iter().for_each(|&block| queue.name(block).expect("held"));
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    for i in (1..blocks.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        blocks.swap(i, (state % (i as u64 + 1)) as usize);
    }
    queue.release(&blocks, |_| DEFAULT_LANE).expect("held");
    queue
}

/// Accesses of every kind of call.
fn costs(queue: &FreeQueue) -> Vec<(&'static str, u64)> {
    let mut costs = Vec::new();
    for count in [1, 32, 512] {
        let mut blocks = Vec::new();
        costs.push(("take", accesses(|| blocks = take(queue, count))));
        costs.push(("release without names", accesses(|| queue.release(&blocks, |_| DEFAULT_LANE).expect("held"))));
        costs.push(("take again", accesses(|| blocks = take(queue, count))));
        blocks.iter().for_each(|&block| queue.name(block).expect("held"));
        costs.push(("release with names", accesses(|| queue.release(&blocks, |_| DEFAULT_LANE).expect("held"))));
        let middle = blocks[count / 2];
        costs.push(("hit", accesses(|| queue.share(middle).expect("a hit"))));
        costs.push(("second hit", accesses(|| queue.share(middle).expect("a hit"))));
        queue.release(&[middle, middle], |_| DEFAULT_LANE).expect("held");
        costs.push(("hit of a chain", accesses(|| assert_eq!(queue.share_all(&blocks), count))));
        queue.release(&blocks, |_| DEFAULT_LANE).expect("held");
        costs.push(("move", accesses(|| queue.move_to_lane(middle, 90).expect("it is free"))));
        queue.move_to_lane(middle, DEFAULT_LANE).expect("it is free");
    }
    costs
}

#[test]
fn a_call_costs_the_same_in_a_pool_of_any_size_fresh_or_aged() {
    for make in [FreeQueue::new, aged] {
        let expected = costs(&make(10_000));
        for num_blocks in [100_000, 1_000_000] {
            assert_eq!(costs(&make(num_blocks)), expected, "{num_blocks} blocks");
        }
    }
}

#[test]
fn a_take_that_counts_all_free_blocks_is_noticed() {
    let costs = |num_blocks| costs(&aged(num_blocks));
    assert_eq!(costs(2_000), costs(4_000));
    assert!(mutant::choose(Some("take_counts_free")));
    let differ = costs(2_000) != costs(4_000);
    assert!(mutant::choose(None));
    assert!(differ);
}

#[test]
fn a_block_without_content_is_taken_and_released_in_few_accesses() {
    let queue = FreeQueue::new(10_000);
    let blocks = take(&queue, 512);
    queue.release(&blocks, |_| DEFAULT_LANE).expect("held");
    let cost = accesses(|| {
        let blocks = take(&queue, 512);
        queue.release(&blocks, |_| DEFAULT_LANE).expect("held");
    });
    assert!(cost <= 8 * 512, "{cost} accesses for 512 blocks");
}

#[test]
fn blocks_of_a_chain_that_stand_together_are_hit_in_few_accesses() {
    let queue = FreeQueue::new(10_000);
    let blocks = take(&queue, 512);
    blocks.iter().for_each(|&block| queue.name(block).expect("held"));
    queue.release(&blocks, |_| DEFAULT_LANE).expect("held");
    let chain = accesses(|| assert_eq!(queue.share_all(&blocks), 512));
    queue.release(&blocks, |_| DEFAULT_LANE).expect("held");
    let one_by_one = accesses(|| blocks.iter().for_each(|&block| queue.share(block).expect("a hit")));
    assert!(chain <= 14 * 512 && 2 * chain < one_by_one, "{chain} accesses for 512 blocks, {one_by_one} one by one");
}
