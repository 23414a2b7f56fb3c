//! Which published block begins with most of the tokens that a prompt goes on with, behind the same parent and with the same fields.
//!
//! Before: [`BlockPool`](crate::block_pool::BlockPool) tells what a block will hold, and when its key gets or loses its first published
//! block. After: an admission copies the rows that agree. One block stands for each key. Blocks that agree in parent, fields and their first
//! ⌈block_size / 4⌉ tokens, by a hash of these (their *mark*), form one treap in the order of their tokens; a search path holds the
//! neighbours of what is sought, so the longest common prefix is among them. All memory is taken at the start.

use hashbrown::HashTable;

use crate::block_size::BlockSize;
use crate::error::{Error, Result};
use crate::ids::{BlockId, TokenId};
use crate::mutant::{self, Mutant};
use crate::prefix_index::{KeyState, PrefixIndex};

/// No block.
const NONE: u32 = 0;

/// The tokens of all blocks, and one treap for each mark.
pub(crate) struct PartialIndex {
    size: usize,
    /// `[num_blocks, block_size]`: the tokens of each block that has a name.
    tokens: Box<[TokenId]>,
    marks: Box<[u64]>,
    left: Box<[u32]>,
    right: Box<[u32]>,
    /// The roots by mark.
    roots: HashTable<u32>,
}

/// Tokens of a block that must agree for a part of it to be reused.
#[must_use]
pub fn least_rows(size: BlockSize) -> usize {
    size.tokens().div_ceil(4)
}

impl PartialIndex {
    pub fn new(num_blocks: u32, size: BlockSize) -> Self {
        let (blocks, size) = (num_blocks as usize, size.tokens());
        PartialIndex {
            size,
            tokens: vec![0; blocks * size].into(),
            marks: vec![0; blocks].into(),
            left: vec![NONE; blocks].into(),
            right: vec![NONE; blocks].into(),
            roots: HashTable::with_capacity(blocks),
        }
    }

    /// Tokens a block.
    pub fn block_size(&self) -> BlockSize {
        BlockSize::new(self.size as u32)
    }

    /// What `block`, which was just made pending, will hold.
    pub fn describe(&mut self, block: BlockId, mark: u64, tokens: &[TokenId]) {
        self.tokens[block.index() * self.size..][..self.size].copy_from_slice(tokens);
        self.marks[block.index()] = mark;
    }

    /// The tokens of a block that has a name.
    pub fn tokens(&self, block: BlockId) -> &[TokenId] {
        &self.tokens[block.index() * self.size..][..self.size]
    }

    /// Bytes that each block costs here.
    pub fn bytes_per_block(&self) -> f64 {
        let table = self.roots.allocation_size() as f64 / self.marks.len() as f64;
        (self.size * size_of::<TokenId>() + size_of::<u64>() + 2 * size_of::<u32>()) as f64 + table
    }

    /// The block of this mark with the longest common prefix with `wanted`, and its length: one of the two between which `wanted` would
    /// stand, the first of them if both have as much.
    pub fn find(&self, mark: u64, wanted: &[TokenId]) -> Option<(BlockId, usize)> {
        let mut at = *self.roots.find(mark, |&root| self.marks[root as usize] == mark)?;
        let (mut before, mut behind) = (NONE, NONE);
        while at != NONE {
            let is_behind = wanted < self.tokens(BlockId(at));
            *if is_behind { &mut behind } else { &mut before } = at;
            at = if is_behind { self.left[at as usize] } else { self.right[at as usize] };
            if mutant::is_on(Mutant::PartialFirstOnly) {
                break;
            }
        }
        let shares = |&block: &BlockId| {
            let both = self.tokens(block).iter().zip(wanted);
            both.take_while(|(ours, theirs)| ours == theirs).count()
        };
        let neighbours = [behind, before].map(BlockId).into_iter().filter(|&block| block.get() != NONE);
        neighbours.max_by_key(shares).map(|block| (block, shares(&block)))
    }

    /// The number of the first of `blocks` whose tokens are not those that stand there in `tokens`. Null blocks hold what they like.
    pub fn first_other(&self, blocks: &[BlockId], tokens: &[TokenId]) -> Option<usize> {
        let is_other =
            |(&block, wanted): (&BlockId, &[TokenId])| block != BlockId::NULL && self.tokens(block) != wanted;
        blocks.iter().zip(tokens.chunks_exact(self.size)).position(is_other)
    }

    /// `block` is the first published one of its key.
    pub fn insert(&mut self, block: BlockId, index: &PrefixIndex) {
        let (id, mark) = (block.get(), self.marks[block.index()]);
        (self.left[block.index()], self.right[block.index()]) = (NONE, NONE);
        let root = self.roots.find(mark, |&root| self.marks[root as usize] == mark).copied();
        let new = self.insert_under(root.unwrap_or(NONE), id, index);
        self.set_root(mark, new);
    }

    /// `block` stood for its key, which has no other published block.
    pub fn remove(&mut self, block: BlockId, index: &PrefixIndex) {
        self.change(block, |this| {
            let (left, right) = (this.left[block.index()], this.right[block.index()]);
            this.merge(left, right, index)
        });
    }

    /// `next` stands for the key of `block` from now on.
    pub fn replace(&mut self, block: BlockId, next: BlockId) {
        self.left[next.index()] = self.left[block.index()];
        self.right[next.index()] = self.right[block.index()];
        self.change(block, |_| next.get());
    }

    /// Every published key's first block stands in the treap of its mark, in order, and nothing else does.
    pub fn audit(&self, index: &PrefixIndex) -> Result<()> {
        let wrong = |detail: String| Err(Error::Audit { check: "A4", detail });
        let mut stands = vec![false; self.marks.len()];
        for &root in &self.roots {
            let mut stack = vec![(root, None::<u32>, None::<u32>)];
            while let Some((at, low, high)) = stack.pop() {
                if at == NONE {
                    continue;
                }
                let block = BlockId(at);
                let is_first =
                    index.key(block).and_then(|key| index.lookup(&key)) == Some((block, KeyState::Published));
                let is_below = |bound: Option<u32>, above: bool| {
                    bound.is_none_or(|bound| (self.tokens(BlockId(bound)) < self.tokens(block)) == above)
                };
                let is_right = self.marks[at as usize] == self.marks[root as usize]
                    && is_below(low, true)
                    && is_below(high, false);
                if !is_first || !is_right || std::mem::replace(&mut stands[at as usize], true) {
                    return wrong(format!("block {at} does not belong where it stands among the blocks of its mark"));
                }
                stack.push((self.left[at as usize], low, Some(at)));
                stack.push((self.right[at as usize], Some(at), high));
            }
        }
        let is_first = |block: BlockId| {
            let found = index.key(block).and_then(|key| index.lookup(&key));
            found == Some((block, KeyState::Published))
        };
        match index.blocks().find(|&block| is_first(block) != stands[block.index()]) {
            Some(block) => {
                wrong(format!("block {} is not found by the head of its content, or is no more", block.get()))
            }
            None => Ok(()),
        }
    }

    fn set_root(&mut self, mark: u64, root: u32) {
        let marks = &self.marks;
        match (self.roots.find_entry(mark, |&root| marks[root as usize] == mark), root) {
            (Ok(entry), NONE) => drop(entry.remove()),
            (Ok(mut entry), root) => *entry.get_mut() = root,
            (Err(_), NONE) => {}
            (Err(_), root) => {
                let marks = &self.marks;
                self.roots.insert_unique(mark, root, |&root| marks[root as usize]);
            }
        }
    }

    /// Puts what `by` gives in the place of `block`.
    fn change(&mut self, block: BlockId, by: impl FnOnce(&mut Self) -> u32) {
        let (id, mark) = (block.get(), self.marks[block.index()]);
        let root =
            *self.roots.find(mark, |&root| self.marks[root as usize] == mark).expect("a block that stands for its key");
        let (mut above, mut at, mut is_left) = (NONE, root, false);
        while at != id {
            above = at;
            is_left = self.tokens(block) < self.tokens(BlockId(at));
            at = if is_left { self.left[at as usize] } else { self.right[at as usize] };
            assert!(at != NONE, "a block that stands for its key is found by its tokens");
        }
        let new = by(self);
        match (above, is_left) {
            (NONE, _) => {
                // The entry is found by what it named until now.
                self.set_root(mark, new);
            }
            (above, true) => self.left[above as usize] = new,
            (above, false) => self.right[above as usize] = new,
        }
    }

    fn priority(index: &PrefixIndex, block: u32) -> u64 {
        index.key(BlockId(block)).map_or(0, |key| priority_of(&key))
    }

    fn insert_under(&mut self, root: u32, block: u32, index: &PrefixIndex) -> u32 {
        if root == NONE {
            return block;
        }
        if Self::priority(index, block) > Self::priority(index, root) {
            let (left, right) = self.split(root, BlockId(block));
            (self.left[block as usize], self.right[block as usize]) = (left, right);
            return block;
        }
        if self.tokens(BlockId(block)) < self.tokens(BlockId(root)) {
            self.left[root as usize] = self.insert_under(self.left[root as usize], block, index);
        } else {
            self.right[root as usize] = self.insert_under(self.right[root as usize], block, index);
        }
        root
    }

    /// What stands before `block` and behind it.
    fn split(&mut self, root: u32, block: BlockId) -> (u32, u32) {
        if root == NONE {
            return (NONE, NONE);
        }
        if self.tokens(BlockId(root)) < self.tokens(block) {
            let (left, right) = self.split(self.right[root as usize], block);
            self.right[root as usize] = left;
            (root, right)
        } else {
            let (left, right) = self.split(self.left[root as usize], block);
            self.left[root as usize] = right;
            (left, root)
        }
    }

    /// All of `left` stands before all of `right`.
    fn merge(&mut self, left: u32, right: u32, index: &PrefixIndex) -> u32 {
        if left == NONE || right == NONE {
            return left.max(right);
        }
        if Self::priority(index, left) > Self::priority(index, right) {
            self.right[left as usize] = self.merge(self.right[left as usize], right, index);
            left
        } else {
            self.left[right as usize] = self.merge(left, self.left[right as usize], index);
            right
        }
    }
}

/// Keys are uniform and nobody can choose them, so that no choice of prompts makes a treap deep.
fn priority_of(key: &crate::ids::Key) -> u64 {
    key.short().rotate_left(32)
}
