//! The longest known prefix of a chain that every group accepts, and the blocks that hold it.
//!
//! Before: an admission asks with the keys of its request. After: the blocks go into the request's tables in the same call, or are
//! forgotten. A group accepts a length if it knows every block that the next query sees there ([`Groups::first_hit`]); entries
//! before those are null. Key `i` of a chain stands for block `i` of every group ([`Key::in_group`]).

use crate::group::Groups;
use crate::ids::{BlockId, Key};
use crate::mutant::{self, Mutant};
use crate::prefix_index::{KeyState, PrefixIndex};

/// What was found. Kept for its memory.
#[derive(Debug)]
pub(crate) struct Hit {
    /// Blocks of the prefix.
    len: usize,
    /// Blocks before the first that is pending: as far as it is confirmed.
    confirmed: usize,
    /// For each group `len` entries, those that are not needed null. What the confirmed part needs is here too, if it is known.
    tables: Box<[Vec<BlockId>]>,
}

impl Hit {
    pub fn new(groups: usize) -> Self {
        Hit { len: 0, confirmed: 0, tables: vec![Vec::new(); groups].into() }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn confirmed(&self) -> usize {
        self.confirmed
    }

    /// Entries of group `group`.
    pub fn table(&self, group: usize) -> &[BlockId] {
        &self.tables[group]
    }

    /// The blocks that it names, in all groups.
    pub fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.tables.iter().flatten().copied().filter(|&block| block != BlockId::NULL)
    }

    /// Finds the longest head of `keys` that every group accepts. Pending blocks count, and so does what waits for them.
    pub fn find(&mut self, index: &PrefixIndex, groups: &Groups, keys: &[Key]) {
        self.tables.iter_mut().for_each(Vec::clear);
        let mut longest = keys.len();
        let mut confirmed = keys.len();
        for (group, table) in self.tables.iter_mut().enumerate() {
            if groups.specs()[group].window.is_some() {
                continue;
            }
            for key in &keys[..longest] {
                let Some((block, state)) = index.lookup(&key.in_group(group)) else { break };
                if state == KeyState::Pending {
                    confirmed = confirmed.min(table.len());
                }
                table.push(block);
            }
            longest = table.len();
            if mutant::is_on(Mutant::FirstGroupDecides) {
                break;
            }
        }
        self.confirmed = confirmed.min(longest);
        self.len = longest;
        if groups.has_window() && !mutant::is_on(Mutant::FirstGroupDecides) {
            self.fit_windows(index, groups, keys);
        }
        for table in &mut self.tables {
            table.resize(self.len, BlockId::NULL);
        }
    }

    fn fit_windows(&mut self, index: &PrefixIndex, groups: &Groups, keys: &[Key]) {
        let known = |group: usize, number: usize| index.lookup(&keys[number].in_group(group));
        self.len = accepted(groups, self.len, |group, number| known(group, number).is_some());
        self.confirmed = self.confirmed.min(self.len);
        loop {
            let confirmed = self.confirmed;
            for (group, table) in self.tables.iter_mut().enumerate() {
                if groups.specs()[group].window.is_none() {
                    continue;
                }
                table.resize(self.len, BlockId::NULL);
                let mut number = self.len;
                // What the hit needs is there; what only its confirmed part needs may have a gap.
                while number > groups.first_hit(group, self.confirmed) {
                    number -= 1;
                    let Some((block, state)) = known(group, number) else { break };
                    table[number] = block;
                    if state == KeyState::Pending {
                        self.confirmed = self.confirmed.min(number);
                    }
                }
            }
            if self.confirmed == confirmed {
                return;
            }
        }
    }
}

/// The longest length up to `longest` blocks that every group with a window accepts, where `has` tells whether a block is there.
/// Each round looks a block up once and ends lower, or is the last.
fn accepted(groups: &Groups, longest: usize, has: impl Fn(usize, usize) -> bool) -> usize {
    let mut len = longest;
    loop {
        let before = len;
        for group in 0..groups.len() {
            if groups.specs()[group].window.is_some() {
                len = accepted_by(groups, group, len, |number| has(group, number));
            }
        }
        if len == before {
            return len;
        }
    }
}

/// The same for one group: from behind, the first run of blocks that reaches as far as the next query behind it sees.
fn accepted_by(groups: &Groups, group: usize, longest: usize, has: impl Fn(usize) -> bool) -> usize {
    let mut len = longest;
    let mut number = longest;
    while number > groups.first_hit(group, len) {
        number -= 1;
        if !has(number) {
            len = number;
        }
    }
    len
}
