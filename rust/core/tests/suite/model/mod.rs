//! The block pool and its prefix index once more, with plain collections and nothing clever.
//!
//! Before: a test does the same thing to the pool and to this. After: it compares all that can be seen. Written to be obviously
//! right, not fast: every question is a walk over a list. The order of the free queue is the one that
//! [`blocktable_core::block_pool`] promises: what a release frees joins the queue last block first, unpublished content before the
//! head, published content behind the tail.

use std::collections::VecDeque;

use blocktable_core::ids::Key;
use blocktable_core::prefix_index::KeyState;

/// The names of the blocks' contents, in the order in which they got their present state.
#[derive(Clone, Debug, Default)]
pub struct IndexModel {
    named: Vec<(u32, Key, KeyState)>,
}

impl IndexModel {
    pub fn state(&self, block: u32) -> KeyState {
        self.named.iter().find(|name| name.0 == block).map_or(KeyState::Unnamed, |name| name.2)
    }

    /// The name of the block's content.
    pub fn key(&self, block: u32) -> Option<Key> {
        self.named.iter().find(|name| name.0 == block).map(|name| name.1)
    }

    /// The first published block of this key, else the first pending one.
    pub fn lookup(&self, key: &Key) -> Option<(u32, KeyState)> {
        let first = |state| self.named.iter().find(|name| name.1 == *key && name.2 == state);
        first(KeyState::Published).or(first(KeyState::Pending)).map(|name| (name.0, name.2))
    }

    pub fn num_published(&self) -> u32 {
        self.named.iter().filter(|name| name.2 == KeyState::Published).count() as u32
    }

    pub fn make_pending(&mut self, block: u32, key: Key) {
        if self.state(block) == KeyState::Unnamed {
            self.named.push((block, key, KeyState::Pending));
        }
    }

    pub fn publish(&mut self, block: u32) {
        if let Some(at) = self.named.iter().position(|name| name.0 == block && name.2 == KeyState::Pending) {
            let (block, key, _) = self.named.remove(at);
            self.named.push((block, key, KeyState::Published));
        }
    }

    /// True if the block was published.
    pub fn forget(&mut self, block: u32) -> bool {
        let was_published = self.state(block) == KeyState::Published;
        self.named.retain(|name| name.0 != block);
        was_published
    }
}

/// Who holds what, and which blocks are free. Block tables are lists of ids, kept by the test.
#[derive(Clone, Debug)]
pub struct PoolModel {
    pub holders: Vec<u32>,
    /// The next block to be taken first.
    pub queue: VecDeque<u32>,
    /// Lists that a step in flight still names, oldest first, each last block first.
    pub parked: Vec<Vec<u32>>,
    pub index: IndexModel,
    pub evictions: u64,
}

/// The block that has no holder to drop, or whose content has no name to be shared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotHeld(pub u32);

/// Why a table's entry cannot be made writable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    NoSuchEntry,
    /// A step writes this block.
    BeingWritten(u32),
    NoneFree,
}

impl PoolModel {
    pub fn new(num_blocks: u32) -> Self {
        PoolModel {
            holders: vec![0; num_blocks as usize],
            queue: (1..num_blocks).collect(),
            parked: Vec::new(),
            index: IndexModel::default(),
            evictions: 0,
        }
    }

    pub fn num_parked(&self) -> u32 {
        self.parked.iter().map(Vec::len).sum::<usize>() as u32
    }

    pub fn num_held(&self) -> u32 {
        self.holders.iter().filter(|&&holders| holders > 0).count() as u32
    }

    /// Content gets its name while somebody holds the block.
    pub fn make_pending(&mut self, block: u32, key: Key) {
        if self.holders[block as usize] > 0 {
            self.index.make_pending(block, key);
        }
    }

    /// None, and nothing changes, if fewer blocks are free.
    pub fn take(&mut self, count: u32) -> Option<Vec<u32>> {
        if self.queue.len() < count as usize {
            return None;
        }
        let taken: Vec<u32> = self.queue.drain(..count as usize).collect();
        for &block in &taken {
            self.holders[block as usize] = 1;
            self.evictions += u64::from(self.index.forget(block));
        }
        Some(taken)
    }

    /// One holder more for a block that has a name. A free or parked one leaves its place.
    pub fn share(&mut self, block: u32) -> Result<(), NotHeld> {
        if self.index.state(block) == KeyState::Unnamed {
            return Err(NotHeld(block));
        }
        self.queue.retain(|&other| other != block);
        for list in &mut self.parked {
            list.retain(|&other| other != block);
        }
        self.holders[block as usize] += 1;
        Ok(())
    }

    /// One holder less for each entry that is not the null block, all or nothing; the last entry goes first.
    pub fn release(&mut self, blocks: &[u32], park: bool) -> Result<(), NotHeld> {
        let mut holders = self.holders.clone();
        let mut freed = Vec::new();
        for &block in blocks.iter().rev().filter(|&&block| block != 0) {
            let left = holders[block as usize].checked_sub(1).ok_or(NotHeld(block))?;
            holders[block as usize] = left;
            if left == 0 {
                freed.push(block);
            }
        }
        self.holders = holders;
        for &block in &freed {
            // Nobody is left who writes it.
            if self.index.state(block) == KeyState::Pending {
                self.index.forget(block);
            }
        }
        if park {
            self.parked.push(freed)
        } else {
            self.enqueue(&freed)
        }
        Ok(())
    }

    pub fn fork(&mut self, blocks: &[u32]) {
        for &block in blocks {
            self.holders[block as usize] += 1;
        }
    }

    /// Entry `index` of `table` gets a block of its own, unless it is that already: (source, target) of the copy.
    pub fn make_writable(
        &mut self,
        table: &mut [u32],
        index: usize,
        park: bool,
    ) -> Result<Option<(u32, u32)>, Refusal> {
        let source = *table.get(index).ok_or(Refusal::NoSuchEntry)?;
        let state = self.index.state(source);
        if self.holders[source as usize] == 1 && state == KeyState::Unnamed {
            return Ok(None);
        }
        if state == KeyState::Pending {
            return Err(Refusal::BeingWritten(source));
        }
        let target = self.take(1).ok_or(Refusal::NoneFree)?[0];
        table[index] = target;
        self.release(&[source], park).expect("the table holds it");
        Ok(Some((source, target)))
    }

    pub fn end_leases(&mut self) {
        for list in std::mem::take(&mut self.parked) {
            self.enqueue(&list);
        }
    }

    /// How many blocks without holders forgot published content.
    pub fn forget_unheld(&mut self) -> u32 {
        let unheld = (1..self.holders.len() as u32).filter(|&block| self.holders[block as usize] == 0);
        unheld.collect::<Vec<_>>().into_iter().map(|block| u32::from(self.index.forget(block))).sum()
    }

    fn enqueue(&mut self, freed: &[u32]) {
        let is_published = |block: &u32| self.index.state(*block) == KeyState::Published;
        let (published, private): (Vec<u32>, Vec<u32>) = freed.iter().partition(|block| is_published(block));
        self.queue = private.into_iter().chain(self.queue.drain(..)).chain(published).collect();
    }
}
