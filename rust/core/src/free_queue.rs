//! The order in which free blocks are handed out: a doubly linked list through two arrays of ids.
//!
//! Before: [`BlockPool`](crate::block_pool::BlockPool) decides which end a released block joins (design 1).
//! Block 0 is never free, so its links are the two ends of the list. Every operation is O(1) and allocates nothing.

use crate::ids::BlockId;
use crate::mutant::{self, Mutant};

/// A block that is not in the queue.
const OUT: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Links {
    prev: u32,
    next: u32,
}

/// Free blocks, the next one to be taken first.
pub struct FreeQueue {
    links: Box<[Links]>,
    len: u32,
}

impl FreeQueue {
    /// All blocks but the null block, in ascending order.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        let last = num_blocks - 1;
        let links = (0..num_blocks)
            .map(|i| Links { prev: if i == 0 { last } else { i - 1 }, next: if i == last { 0 } else { i + 1 } })
            .collect();
        FreeQueue { links, len: last }
    }

    /// How many blocks are free.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether no block is free.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `block` is free.
    #[must_use]
    pub fn contains(&self, block: BlockId) -> bool {
        block != BlockId::NULL && self.links[block.index()].next != OUT
    }

    /// Takes the block at the head.
    pub fn pop_front(&mut self) -> Option<BlockId> {
        let mut first = self.links[0].next;
        if first == 0 {
            return None;
        }
        if mutant::is_on(Mutant::FreeQueueSkipsOne) && self.links[first as usize].next != 0 {
            first = self.links[first as usize].next;
        }
        self.unlink(first);
        Some(BlockId(first))
    }

    /// Puts `block`, which is not in the queue, before the head.
    pub fn push_front(&mut self, block: BlockId) {
        self.link_between(0, block.0, self.links[0].next);
    }

    /// Puts `block`, which is not in the queue, behind the tail.
    pub fn push_back(&mut self, block: BlockId) {
        self.link_between(self.links[0].prev, block.0, 0);
    }

    /// Takes `block`, which is in the queue, out of the middle.
    pub fn remove(&mut self, block: BlockId) {
        debug_assert!(self.contains(block));
        self.unlink(block.0);
    }

    /// From head to tail. Stops after `num_blocks` steps, so that a broken list cannot hang an audit.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.walk(|links| links.next)
    }

    /// From tail to head, likewise.
    pub fn iter_back(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.walk(|links| links.prev)
    }

    fn walk(&self, step: fn(&Links) -> u32) -> impl Iterator<Item = BlockId> + '_ {
        let mut at = step(&self.links[0]);
        std::iter::from_fn(move || {
            if at == 0 || at == OUT {
                return None;
            }
            let block = BlockId(at);
            at = step(&self.links[block.index()]);
            Some(block)
        })
        .take(self.links.len())
    }

    fn link_between(&mut self, prev: u32, block: u32, next: u32) {
        debug_assert!(block != 0 && self.links[block as usize].next == OUT);
        self.links[block as usize] = Links { prev, next };
        self.links[prev as usize].next = block;
        self.links[next as usize].prev = block;
        self.len += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Links { prev, next } = self.links[block as usize];
        self.links[prev as usize].next = next;
        if !mutant::is_on(Mutant::OneWayLink) {
            self.links[next as usize].prev = prev;
        }
        self.links[block as usize] = Links { prev: OUT, next: OUT };
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(queue: &FreeQueue) -> Vec<u32> {
        queue.iter().map(BlockId::get).collect()
    }

    #[test]
    fn a_fresh_queue_hands_out_ascending_ids_and_never_the_null_block() {
        let mut queue = FreeQueue::new(4);
        let taken: Vec<u32> = std::iter::from_fn(|| queue.pop_front()).map(BlockId::get).collect();
        assert_eq!(taken, [1, 2, 3]);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_block_leaves_the_middle_and_joins_either_end() {
        let mut queue = FreeQueue::new(6);
        queue.remove(BlockId(3));
        assert_eq!(ids(&queue), [1, 2, 4, 5]);
        queue.push_front(BlockId(3));
        queue.remove(BlockId(5));
        queue.push_back(BlockId(5));
        assert_eq!(ids(&queue), [3, 1, 2, 4, 5]);
        let back: Vec<u32> = queue.iter_back().map(BlockId::get).collect();
        assert_eq!(back, [5, 4, 2, 1, 3]);
        assert_eq!(queue.len(), 5);
    }

    #[test]
    fn a_pool_of_one_has_nothing_to_give() {
        let mut queue = FreeQueue::new(1);
        assert_eq!(queue.pop_front(), None);
        assert_eq!(queue.len(), 0);
    }
}
