//! Examples of what the index does, one call after the other.

use super::*;

fn key(n: u8) -> Key {
    Key([n; 32])
}

fn published(index: &mut PrefixIndex, block: u32, name: u8) {
    index.make_pending(BlockId(block), key(name));
    index.publish(BlockId(block));
}

#[test]
fn a_lookup_returns_the_first_published_that_still_lives() {
    let mut index = PrefixIndex::new(8);
    published(&mut index, 3, 1);
    published(&mut index, 5, 1);
    published(&mut index, 2, 1);
    assert_eq!(index.lookup(&key(1)), Some((BlockId(3), KeyState::Published)));
    assert!(index.forget(BlockId(3)));
    assert_eq!(index.lookup(&key(1)), Some((BlockId(5), KeyState::Published)));
    index.audit().unwrap();
    assert!(index.forget(BlockId(2)));
    assert!(index.forget(BlockId(5)));
    assert_eq!(index.lookup(&key(1)), None);
    assert_eq!(index.num_published(), 0);
    index.audit().unwrap();
}

#[test]
fn published_content_comes_before_pending_content() {
    let mut index = PrefixIndex::new(8);
    index.make_pending(BlockId(1), key(1));
    assert_eq!(index.lookup(&key(1)), Some((BlockId(1), KeyState::Pending)));
    published(&mut index, 2, 1);
    assert_eq!(index.lookup(&key(1)), Some((BlockId(2), KeyState::Published)));
    assert!(!index.forget(BlockId(1)), "a withdrawn key was never published");
    index.audit().unwrap();
}

#[test]
fn blocks_of_one_key_come_in_the_order_in_which_they_were_published() {
    let mut index = PrefixIndex::new(8);
    (1..5).for_each(|block| index.make_pending(BlockId(block), key(1)));
    for (block, first) in [(3, 3), (1, 3), (4, 3)] {
        index.publish(BlockId(block));
        index.audit().unwrap();
        assert_eq!(index.lookup(&key(1)), Some((BlockId(first), KeyState::Published)));
    }
    let ring: Vec<u32> = std::iter::successors(Some(3), |&block: &u32| {
        Some(index.links[block as usize][NEXT]).filter(|&next| next != 3)
    })
    .collect();
    assert_eq!(ring, [3, 1, 4, 2]);
    for (block, next) in [(3, 1), (4, 1), (1, 2)] {
        assert!(index.forget(BlockId(block)));
        index.audit().unwrap();
        assert_eq!(index.lookup(&key(1)).map(|(block, _)| block), Some(BlockId(next)));
    }
    assert_eq!(index.lookup(&key(1)), Some((BlockId(2), KeyState::Pending)));
}

#[test]
fn keys_of_one_bucket_stand_in_one_chain() {
    let mut index = PrefixIndex::new(8);
    let key = |n: u8| {
        let mut bytes = [7; 32];
        bytes[31] = n;
        bytes[8] = n << 2;
        Key(bytes)
    };
    (1..7).for_each(|block| index.make_pending(BlockId(block), key(block as u8 % 3)));
    for block in [6, 4, 1, 3, 2, 5] {
        index.audit().unwrap();
        assert!((0..3).all(|n| index.lookup(&key(n)).is_none_or(|(at, _)| index.key(at) == Some(key(n)))));
        assert!(index.lookup(&key(block as u8 % 3)).is_some());
        index.forget(BlockId(block));
    }
    assert!(index.buckets.iter().all(|&first| first == NONE));
}

#[test]
fn forgetting_a_block_without_a_name_changes_nothing() {
    let mut index = PrefixIndex::new(4);
    assert!(!index.forget(BlockId(2)));
    index.audit().unwrap();
}
