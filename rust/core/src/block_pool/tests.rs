//! Examples of what the pool does, one call after the other.

use super::*;
use crate::ids::Key;
use crate::prefix_index::KeyState;
use crate::retention::Worth;

fn pool(num_blocks: u32) -> BlockPool {
    BlockPool::new(num_blocks).unwrap()
}

fn taken(pool: &mut BlockPool, count: u32) -> BlockTable {
    let mut table = BlockTable::new();
    pool.take(&mut table, count).unwrap();
    table
}

fn publish(pool: &mut BlockPool, block: BlockId, name: u8) {
    pool.make_pending(block, Key([name; 32])).unwrap();
    pool.publish(block).unwrap();
}

fn free(pool: &BlockPool) -> Vec<u32> {
    pool.free_blocks().map(BlockId::get).collect()
}

#[test]
fn released_blocks_join_the_end_that_their_content_deserves_last_block_first() {
    let mut pool = pool(11);
    let table = taken(&mut pool, 4);
    for (name, &block) in table.blocks()[..3].iter().enumerate() {
        publish(&mut pool, block, name as u8);
    }
    pool.release(table, Release::Now);
    assert_eq!(free(&pool), [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]);
    pool.audit([]).unwrap();
}

#[test]
fn a_take_that_does_not_fit_changes_nothing() {
    let mut pool = pool(4);
    let mut table = taken(&mut pool, 2);
    assert_eq!(pool.take(&mut table, 2), Err(Error::OutOfBlocks { needed: 2, free: 1 }));
    assert_eq!((table.len(), free(&pool)), (2, vec![3]));
    pool.audit([&table]).unwrap();
}

#[test]
fn a_block_listed_twice_is_queued_once_and_a_release_too_many_is_refused_as_a_whole() {
    let mut pool = pool(5);
    let mut first = taken(&mut pool, 2);
    let b = first.blocks()[0];
    publish(&mut pool, b, 1);
    pool.share(&mut first, b).unwrap();
    let list = [b, BlockId::NULL, BlockId::NULL, b];
    pool.release_blocks(&list, Release::Now).unwrap();
    assert_eq!(free(&pool), [3, 4, 1]);
    let before = free(&pool);
    let other = first.blocks()[1];
    assert_eq!(pool.release_blocks(&[b, other], Release::Now), Err(Error::NotHeld { block: b }));
    assert_eq!(pool.holders(other), 1, "the refused call gave its other block back to its holder");
    assert_eq!(free(&pool), before);
}

#[test]
fn a_hit_leaves_the_middle_of_the_queue_and_what_is_handed_out_is_forgotten() {
    let mut pool = pool(4);
    let table = taken(&mut pool, 3);
    for (name, &block) in table.blocks().iter().enumerate() {
        publish(&mut pool, block, name as u8);
    }
    pool.release(table, Release::Now);
    assert_eq!(free(&pool), [3, 2, 1]);
    let (hit, state) = pool.index().lookup(&Key([1; 32])).unwrap();
    assert_eq!((hit.get(), state), (2, KeyState::Published));
    let mut table = BlockTable::new();
    pool.share(&mut table, hit).unwrap();
    assert_eq!(free(&pool), [3, 1]);
    let other = taken(&mut pool, 2);
    assert_eq!(pool.index().lookup(&Key([0; 32])), None);
    assert_eq!(pool.evictions(), 2);
    pool.audit([&table, &other]).unwrap();
}

#[test]
fn a_hit_whose_content_is_gone_is_refused() {
    let mut pool = pool(3);
    let mut table = BlockTable::new();
    let block = pool.block(1).unwrap();
    assert_eq!(pool.share(&mut table, block), Err(Error::NotHeld { block }));
    assert_eq!(pool.block(3), Err(Error::NoSuchBlock { block: 3, num_blocks: 3 }));
    pool.audit([&table]).unwrap();
}

#[test]
fn parked_lists_enter_the_queue_in_order_when_their_step_has_ended() {
    let mut pool = pool(6);
    let (first, second) = (taken(&mut pool, 2), taken(&mut pool, 2));
    pool.release(first, Release::Until(2));
    pool.release(second, Release::Until(1));
    assert_eq!((free(&pool), pool.num_parked()), (vec![5], 4));
    pool.audit([]).unwrap();
    pool.end_leases(1);
    assert_eq!((free(&pool), pool.num_parked()), (vec![4, 3, 5], 2));
    pool.audit([]).unwrap();
    pool.end_leases(2);
    assert_eq!((free(&pool), pool.num_parked()), (vec![2, 1, 4, 3, 5], 0));
    pool.audit([]).unwrap();
}

#[test]
fn a_block_hit_while_it_is_parked_leaves_its_list() {
    let mut pool = pool(5);
    let table = taken(&mut pool, 3);
    let hit = table.blocks()[1];
    publish(&mut pool, hit, 1);
    pool.release(table, Release::Until(2));
    let mut table = BlockTable::new();
    pool.share(&mut table, hit).unwrap();
    pool.audit([&table]).unwrap();
    pool.end_leases(1);
    assert_eq!((free(&pool), pool.num_parked()), (vec![4], 2));
    pool.audit([&table]).unwrap();
    pool.end_leases(2);
    assert_eq!(free(&pool), [3, 1, 4]);
    pool.release(table, Release::Now);
    assert_eq!(free(&pool), [3, 1, 4, 2]);
    pool.audit([]).unwrap();
}

#[test]
fn ids_of_another_pool_and_names_of_the_null_block_change_nothing() {
    let mut pool = pool(4);
    let foreign = BlockPool::new(50).unwrap().block(40).unwrap();
    let refused = Err(Error::NoSuchBlock { block: 40, num_blocks: 4 });
    let mut table = taken(&mut pool, 1);
    assert_eq!(pool.share(&mut table, foreign), refused);
    assert_eq!(pool.release_blocks(&[table.blocks()[0], foreign], Release::Now), refused);
    assert_eq!(pool.make_pending(foreign, Key([1; 32])), refused);
    assert_eq!((pool.publish(foreign), pool.withdraw(foreign)), (refused.clone(), refused.clone()));
    assert_eq!((pool.holders(foreign), pool.index().state(foreign)), (0, KeyState::Unnamed));
    pool.make_pending(BlockId::NULL, Key([1; 32])).unwrap();
    assert_eq!(pool.index().lookup(&Key([1; 32])), None);
    pool.audit([&table]).unwrap();
}

#[test]
fn content_that_is_forgotten_is_worth_the_default_and_its_time_is_never_over() {
    let mut pool = pool(5);
    pool.use_retention();
    let table = taken(&mut pool, 2);
    for (name, &block) in table.blocks().iter().enumerate() {
        publish(&mut pool, block, name as u8);
        pool.ask(block, name, Worth { priority: 80, time_us: 10 });
    }
    let held = taken(&mut pool, 1);
    publish(&mut pool, held.blocks()[0], 9);
    pool.release(table, Release::Now);
    assert_eq!(pool.forget_unheld(), 2);
    pool.expire(20);
    pool.release(held, Release::Now);
    assert_eq!(free(&pool), [4, 1, 2, 3], "what holds nothing goes before what is cached");
    pool.audit([]).unwrap();
}

#[test]
#[cfg(feature = "mutants")]
fn content_that_keeps_its_worth_when_it_is_forgotten_is_noticed() {
    use crate::mutant;

    assert!(mutant::choose(Some("forgotten_keeps_worth")));
    let outcome = std::panic::catch_unwind(content_that_is_forgotten_is_worth_the_default_and_its_time_is_never_over);
    assert!(mutant::choose(None));
    assert!(outcome.is_err());
}

#[test]
fn a_pool_without_a_usable_block_is_refused() {
    for num_blocks in [0, 1, u32::MAX] {
        assert!(matches!(BlockPool::new(num_blocks), Err(Error::InvalidInput { field: "num_blocks", .. })));
    }
}

#[test]
fn uncached_blocks_are_reused_at_once_whatever_the_pool_size() {
    let mut pool = pool(1000);
    for _ in 0..100 {
        let table = taken(&mut pool, 1);
        assert_eq!(table.blocks()[0].get(), 1);
        pool.release(table, Release::Now);
    }
}

#[test]
fn hits_refresh_recency_so_the_least_recently_used_goes_first() {
    let mut pool = pool(5);
    let table = taken(&mut pool, 4);
    for (name, &block) in table.blocks().iter().enumerate() {
        publish(&mut pool, block, name as u8);
        pool.release_blocks(&[block], Release::Now).unwrap();
    }
    let (a, _) = pool.index().lookup(&Key([0; 32])).unwrap();
    let mut hit = BlockTable::new();
    pool.share(&mut hit, a).unwrap();
    pool.release(hit, Release::Now);
    let victims: Vec<u32> = taken(&mut pool, 2).blocks().iter().map(|block| block.get()).collect();
    assert_eq!(victims, [2, 3], "b, then c; a was used last");
}
