//! Which block's time is over next: a heap of blocks by deadline, at most one entry a block.
//!
//! Before: [`Retention`](crate::retention::Retention) sets, refreshes and clears deadlines. After: it asks for what is over. A refresh
//! only notes the later deadline and leaves the entry where it is; the entry moves when its old time has come. So an entry is never
//! later than the deadline of its block. Of equal deadlines the block that is deeper in its chain comes first. Nothing is allocated after the start.

use crate::ids::BlockId;
use crate::mutant::{self, Mutant};

/// No deadline.
pub const FOREVER: u64 = u64::MAX;

/// Not in the heap.
const NOWHERE: u32 = u32::MAX;

/// Deadlines of blocks, in microseconds of the caller's clock.
pub struct Deadlines {
    /// A binary heap of blocks, the earliest entry first.
    heap: Vec<u32>,
    /// Where each block stands in it.
    places: Box<[u32]>,
    /// The time of each block's entry.
    entries: Box<[u64]>,
    /// The deadline of each block.
    due: Box<[u64]>,
    /// Number of each block in its chain.
    depths: Box<[u32]>,
}

impl Deadlines {
    /// No block has one.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        let blocks = num_blocks as usize;
        Deadlines {
            heap: Vec::with_capacity(blocks),
            places: vec![NOWHERE; blocks].into(),
            entries: vec![FOREVER; blocks].into(),
            due: vec![FOREVER; blocks].into(),
            depths: vec![0; blocks].into(),
        }
    }

    /// The deadline of `block`.
    #[must_use]
    pub fn due(&self, block: BlockId) -> u64 {
        self.due[block.index()]
    }

    /// `block` is number `depth` of its chain, as long as it has the content that it has.
    pub fn place(&mut self, block: BlockId, depth: u32) {
        debug_assert!(self.places[block.index()] == NOWHERE || self.depths[block.index()] == depth);
        self.depths[block.index()] = depth;
    }

    /// `block` has until `due`: later than before, if it had a deadline.
    pub fn set(&mut self, block: BlockId, due: u64) {
        self.due[block.index()] = due;
        if due == FOREVER || self.places[block.index()] != NOWHERE {
            return;
        }
        self.entries[block.index()] = due;
        self.heap.push(block.get());
        self.rise(self.heap.len() - 1);
    }

    /// `block` has no deadline.
    pub fn clear(&mut self, block: BlockId) {
        self.due[block.index()] = FOREVER;
        let at = std::mem::replace(&mut self.places[block.index()], NOWHERE);
        if at != NOWHERE {
            self.take_out(at as usize);
        }
    }

    /// The next block whose deadline is `now` or earlier, and that deadline; it has none afterwards.
    pub fn pop(&mut self, now: u64) -> Option<(BlockId, u64)> {
        loop {
            let first = *self.heap.first()? as usize;
            if self.entries[first] > now {
                return None;
            }
            let due = self.due[first];
            if due == FOREVER || due <= self.entries[first] {
                let block = BlockId(first as u32);
                self.clear(block);
                if due != FOREVER {
                    return Some((block, due));
                }
            } else {
                self.entries[first] = due;
                self.sink(0);
            }
        }
    }

    /// Takes the entry at `at`, whose block has no place any more, out of the heap.
    fn take_out(&mut self, at: usize) {
        let last = self.heap.pop().expect("an entry");
        if at < self.heap.len() {
            self.heap[at] = last;
            self.sink(at);
            self.rise(self.places[last as usize] as usize);
        }
    }

    /// Whether entry `a` comes before entry `b`.
    fn is_before(&self, a: u32, b: u32) -> bool {
        let key = |block: u32| {
            let at = block as usize;
            let depth = if mutant::is_on(Mutant::ShallowFirst) { u32::MAX - self.depths[at] } else { self.depths[at] };
            (self.entries[at], std::cmp::Reverse(depth), block)
        };
        key(a) < key(b)
    }

    fn rise(&mut self, mut at: usize) {
        let block = self.heap[at];
        while at > 0 && self.is_before(block, self.heap[(at - 1) / 2]) {
            self.put(at, self.heap[(at - 1) / 2]);
            at = (at - 1) / 2;
        }
        self.put(at, block);
    }

    fn sink(&mut self, mut at: usize) {
        let block = self.heap[at];
        loop {
            let (left, right) = (2 * at + 1, 2 * at + 2);
            let Some(&first) = self.heap.get(left) else { break };
            let child = match self.heap.get(right) {
                Some(&second) if self.is_before(second, first) => right,
                _ => left,
            };
            if !self.is_before(self.heap[child], block) {
                break;
            }
            self.put(at, self.heap[child]);
            at = child;
        }
        self.put(at, block);
    }

    fn put(&mut self, at: usize, block: u32) {
        self.heap[at] = block;
        self.places[block as usize] = at as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn popped(deadlines: &mut Deadlines, now: u64) -> Vec<u32> {
        std::iter::from_fn(|| deadlines.pop(now)).map(|(block, _)| block.get()).collect()
    }

    #[test]
    fn the_earliest_is_over_first_and_of_equal_ones_the_deepest() {
        let mut deadlines = Deadlines::new(8);
        for (block, depth, due) in [(1, 0, 30), (2, 1, 20), (3, 2, 20), (4, 0, 10), (5, 0, 40)] {
            deadlines.place(BlockId(block), depth);
            deadlines.set(BlockId(block), due);
        }
        assert_eq!(popped(&mut deadlines, 9), []);
        assert_eq!(popped(&mut deadlines, 30), [4, 3, 2, 1]);
        assert_eq!(popped(&mut deadlines, 100), [5]);
    }

    #[test]
    fn a_refreshed_deadline_counts_and_a_cleared_one_does_not() {
        let mut deadlines = Deadlines::new(8);
        (1..6).for_each(|block| deadlines.set(BlockId(block), 10));
        deadlines.set(BlockId(1), 25);
        deadlines.set(BlockId(2), FOREVER);
        deadlines.clear(BlockId(3));
        assert_eq!(popped(&mut deadlines, 20), [4, 5]);
        deadlines.set(BlockId(3), 22);
        assert_eq!(popped(&mut deadlines, 99), [3, 1]);
        assert_eq!(deadlines.due(BlockId(1)), FOREVER);
    }

    #[test]
    fn the_heap_never_holds_a_block_twice() {
        let mut deadlines = Deadlines::new(4);
        for round in 0..1000 {
            deadlines.set(BlockId(1 + round % 3), u64::from(round) + 10);
            assert!(deadlines.heap.len() <= 3 && deadlines.heap.capacity() == 4);
        }
    }
}
