//! Examples of the order, the counts and the refusals, one thread.

use super::*;

fn ids(queue: &FreeQueue) -> Vec<u32> {
    queue.iter().map(BlockId::get).collect()
}

fn take(queue: &FreeQueue, count: usize) -> Vec<BlockId> {
    let mut out = vec![BlockId::NULL; count];
    queue.take(&mut out).unwrap();
    out
}

fn block(id: u32) -> BlockId {
    BlockId(id)
}

/// Takes every block, names those of `named`, and releases all of them so that the queue is 1, 2, 3, … in each part.
fn queue_of(num_blocks: u32, named: &[u32], lane: impl Fn(BlockId) -> u16) -> FreeQueue {
    let queue = FreeQueue::new(num_blocks);
    let mut blocks = take(&queue, num_blocks as usize - 1);
    named.iter().for_each(|&id| queue.name(block(id)).unwrap());
    blocks.reverse();
    queue.release(&blocks, lane).unwrap();
    queue.audit().unwrap();
    queue
}

#[test]
fn a_fresh_queue_hands_out_ascending_ids_and_never_the_null_block() {
    let queue = FreeQueue::new(4);
    assert_eq!(ids(&queue), [1, 2, 3]);
    assert_eq!(take(&queue, 3), [block(1), block(2), block(3)]);
    assert!(queue.is_empty());
    queue.audit().unwrap();
}

#[test]
fn a_pool_of_one_has_nothing_to_give() {
    let queue = FreeQueue::new(1);
    assert_eq!(queue.take(&mut [BlockId::NULL]), Err(Error::OutOfBlocks { needed: 1, free: 0 }));
    assert_eq!(queue.len(), 0);
    queue.take(&mut []).unwrap();
}

#[test]
fn unnamed_blocks_go_before_the_head_and_named_ones_behind_the_tail_last_block_first() {
    let queue = FreeQueue::new(11);
    let blocks = take(&queue, 4);
    blocks[..3].iter().for_each(|&block| queue.name(block).unwrap());
    queue.release(&blocks, |_| DEFAULT_LANE).unwrap();
    assert_eq!(ids(&queue), [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]);
    let mut back: Vec<u32> = queue.iter_back().map(BlockId::get).collect();
    back.reverse();
    assert_eq!(back, ids(&queue));
}

#[test]
fn a_hit_leaves_the_front_the_middle_and_the_end_of_a_lane() {
    let queue = queue_of(7, &[1, 2, 3, 4, 5, 6], |_| DEFAULT_LANE);
    for (id, rest) in [(3, vec![1, 2, 4, 5, 6]), (1, vec![2, 4, 5, 6]), (6, vec![2, 4, 5])] {
        queue.share(block(id)).unwrap();
        assert_eq!(ids(&queue), rest);
        queue.audit().unwrap();
    }
    queue.share(block(3)).unwrap();
    assert_eq!(queue.holders(block(3)), 2);
}

#[test]
fn what_is_taken_has_no_name_and_cannot_be_hit() {
    let queue = queue_of(4, &[1, 2, 3], |_| DEFAULT_LANE);
    assert_eq!(take(&queue, 2), [block(1), block(2)]);
    assert_eq!(queue.share(block(1)), Err(Error::NotHeld { block: block(1) }));
    queue.hold(block(1)).unwrap();
    assert_eq!((queue.holders(block(1)), queue.holders(block(3))), (2, 0));
    assert_eq!(queue.hold(block(3)), Err(Error::NotHeld { block: block(3) }));
}

#[test]
fn lanes_are_emptied_from_the_lowest_and_a_moved_block_joins_the_tail_of_its_new_lane() {
    let queue = queue_of(7, &[1, 2, 3, 4, 5, 6], |block| [90, 0][block.index() % 2]);
    assert_eq!(ids(&queue), [1, 3, 5, 2, 4, 6]);
    queue.move_to_lane(block(2), 0).unwrap();
    queue.move_to_lane(block(1), 100).unwrap();
    assert_eq!(ids(&queue), [3, 5, 2, 4, 6, 1]);
    assert_eq!((queue.lane(block(1)), queue.len()), (Some(100), 6));
    queue.audit().unwrap();
    assert_eq!(take(&queue, 6).iter().map(|block| block.get()).collect::<Vec<_>>(), [3, 5, 2, 4, 6, 1]);
}

#[test]
fn a_block_that_lost_its_name_keeps_its_place() {
    let queue = queue_of(4, &[1, 2, 3], |_| DEFAULT_LANE);
    queue.unname(block(2)).unwrap();
    assert_eq!(queue.share(block(2)), Err(Error::NotHeld { block: block(2) }));
    assert_eq!(ids(&queue), [1, 2, 3]);
    queue.audit().unwrap();
}

#[test]
fn a_refused_release_gives_every_holder_back() {
    let queue = FreeQueue::new(6);
    let blocks = take(&queue, 4);
    queue.name(blocks[1]).unwrap();
    queue.share(blocks[1]).unwrap();
    let list = [block(5), blocks[0], blocks[1], BlockId::NULL, blocks[2], blocks[1], blocks[3]];
    assert_eq!(queue.release(&list, |_| DEFAULT_LANE), Err(Error::NotHeld { block: block(5) }));
    assert_eq!([1, 2, 3, 4, 5].map(|id| queue.holders(block(id))), [1, 2, 1, 1, 0]);
    assert_eq!((ids(&queue), queue.is_named(blocks[1])), (vec![5], true));
    queue.audit().unwrap();
    let foreign = Err(Error::NoSuchBlock { block: 6, num_blocks: 6 });
    assert_eq!(queue.release(&[blocks[0], block(6)], |_| DEFAULT_LANE), foreign);
    assert_eq!(
        (queue.share(block(6)), queue.hold(block(6)), queue.name(block(6))),
        (foreign.clone(), foreign.clone(), foreign)
    );
    queue.release(&list[1..], |_| DEFAULT_LANE).unwrap();
    assert_eq!(ids(&queue), [4, 3, 1, 5, 2]);
    assert_eq!(queue.name(block(2)), Err(Error::NotHeld { block: block(2) }));
}

#[test]
fn a_refused_fork_gives_every_holder_back() {
    let queue = FreeQueue::new(200);
    let blocks = take(&queue, 150);
    let list = [&blocks[..], &[block(160)]].concat();
    assert_eq!(queue.hold_all(&list), Err(Error::NotHeld { block: block(160) }));
    assert_eq!(queue.hold_all(&[blocks[0], block(200)]), Err(Error::NoSuchBlock { block: 200, num_blocks: 200 }));
    assert!(blocks.iter().all(|&block| queue.holders(block) == 1));
    queue.hold_all(&[&blocks[..], &[BlockId::NULL]].concat()).unwrap();
    assert!(blocks.iter().all(|&block| queue.holders(block) == 2));
    queue.audit().unwrap();
}

#[test]
fn a_chain_that_stands_in_pieces_is_hit_whole() {
    let queue = queue_of(60, &(1..60).collect::<Vec<_>>(), |_| DEFAULT_LANE);
    queue.share(block(30)).unwrap();
    queue.move_to_lane(block(20), 90).unwrap();
    let chain: Vec<BlockId> = (10..50).rev().map(block).collect();
    assert_eq!(queue.share_all(&chain), 40);
    assert_eq!((queue.holders(block(30)), queue.holders(block(20)), queue.len()), (2, 1, 19));
    assert_eq!(ids(&queue), (1..10).chain(50..60).collect::<Vec<_>>());
    queue.unname(block(5)).unwrap();
    assert_eq!(queue.share_all(&[7, 6, 5, 4].map(block)), 2, "it ends at what cannot be hit");
    assert_eq!(queue.len(), 17);
    queue.audit().unwrap();
}

#[test]
fn a_list_longer_than_a_run_comes_out_in_order() {
    for named in [false, true] {
        let all: Vec<u32> = (1..200).collect();
        let queue = queue_of(200, if named { &all } else { &[] }, |_| DEFAULT_LANE);
        let taken: Vec<u32> = take(&queue, 150).iter().map(|block| block.get()).collect();
        assert_eq!(taken, all[..150]);
        queue.audit().unwrap();
    }
}
