//! The longest known prefix of a chain that every group accepts, and the blocks that hold it.
//!
//! Before: an admission asks with the keys of its request. After: the blocks go into the request's tables in the same call, or are
//! forgotten. A group accepts a length if it knows every block that the next query sees there ([`Groups::first_hit`]); entries
//! before those are null. Key `i` of a chain stands for block `i` of every group ([`Key::in_group`]).

use crate::block_pool::BlockPool;
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
    /// For each group at least `len` entries, those that are not needed null. What the confirmed part needs is here too, if it is
    /// known. Groups without a window name all that they know.
    tables: Box<[Vec<BlockId>]>,
    /// Blocks that all groups without a window know, and those of them before the first that is pending.
    reach: usize,
    sure: usize,
}

/// What counts as known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// What is published, and what will be at the end of a step in flight.
    Pending,
    /// What is published alone: all of it is confirmed.
    Published,
}

impl Hit {
    pub fn new(groups: usize) -> Self {
        Hit { len: 0, confirmed: 0, tables: vec![Vec::new(); groups].into(), reach: 0, sure: 0 }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn confirmed(&self) -> usize {
        self.confirmed
    }

    /// Entries of group `group`.
    pub fn table(&self, group: usize) -> &[BlockId] {
        &self.tables[group][..self.len]
    }

    /// The blocks that it names, in all groups.
    pub fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        (0..self.tables.len()).flat_map(|group| self.table(group)).copied().filter(|&block| block != BlockId::NULL)
    }

    /// How many of them leave the free queue when it is held.
    pub fn num_free(&self, pool: &BlockPool) -> u32 {
        self.blocks().filter(|&block| pool.takes_free(block)).count() as u32
    }

    /// Finds the longest head of `keys` that every group accepts.
    pub fn find(&mut self, index: &PrefixIndex, groups: &Groups, keys: &[Key], known: Known) {
        let lookup = |key: &Key| known.lookup(index, key);
        self.tables.iter_mut().for_each(Vec::clear);
        (self.reach, self.sure) = (keys.len(), keys.len());
        for (group, table) in self.tables.iter_mut().enumerate() {
            if groups.specs()[group].window.is_some() {
                continue;
            }
            for key in &keys[..self.reach] {
                let Some((block, state)) = lookup(&key.in_group(group)) else { break };
                if state == KeyState::Pending {
                    self.sure = self.sure.min(table.len());
                }
                table.push(block);
            }
            self.reach = table.len();
            if mutant::is_on(Mutant::FirstGroupDecides) {
                break;
            }
        }
        self.fit(index, groups, keys, known, 0);
    }

    /// Finds, after [`Hit::find`], the longest head of `keys`, now perhaps fewer, that every group accepts if the query behind it sees
    /// `rows` rows of the next block as well.
    pub fn fit(&mut self, index: &PrefixIndex, groups: &Groups, keys: &[Key], known: Known, rows: usize) {
        self.len = self.reach.min(keys.len());
        self.confirmed = self.sure.min(self.len);
        if groups.has_window() && !mutant::is_on(Mutant::FirstGroupDecides) {
            self.fit_windows(groups, rows, |group, number| known.lookup(index, &keys[number].in_group(group)));
        }
        for (table, spec) in self.tables.iter_mut().zip(groups.specs()) {
            if spec.window.is_some() || mutant::is_on(Mutant::FirstGroupDecides) {
                table.resize(self.len, BlockId::NULL);
            }
        }
    }

    fn fit_windows(
        &mut self,
        groups: &Groups,
        rows: usize,
        lookup: impl Fn(usize, usize) -> Option<(BlockId, KeyState)>,
    ) {
        self.len = accepted(groups, self.len, rows, |group, number| lookup(group, number).is_some());
        self.confirmed = self.confirmed.min(self.len);
        loop {
            let confirmed = self.confirmed;
            for (group, table) in self.tables.iter_mut().enumerate() {
                if groups.specs()[group].window.is_none() {
                    continue;
                }
                table.clear();
                table.resize(self.len, BlockId::NULL);
                let mut number = self.len;
                let first = match self.confirmed {
                    confirmed if confirmed < self.len => groups.first_hit(group, confirmed, 0),
                    _ => groups.first_hit(group, self.len, rows),
                };
                // What the hit needs is there; what only its confirmed part needs may have a gap.
                while number > first {
                    number -= 1;
                    let Some((block, state)) = lookup(group, number) else { break };
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

impl Known {
    fn lookup(self, index: &PrefixIndex, key: &Key) -> Option<(BlockId, KeyState)> {
        index.lookup(key).filter(|&(_, state)| self == Known::Pending || state == KeyState::Published)
    }
}

/// The longest length up to `longest` blocks that every group with a window accepts, where `has` tells whether a block is there and the
/// query behind stands `rows` rows further. Each round looks a block up once and ends lower, or is the last.
fn accepted(groups: &Groups, longest: usize, rows: usize, has: impl Fn(usize, usize) -> bool) -> usize {
    let mut len = longest;
    loop {
        let before = len;
        for group in 0..groups.len() {
            if groups.specs()[group].window.is_some() {
                len = accepted_by(groups, group, len, rows, |number| has(group, number));
            }
        }
        if len == before {
            return len;
        }
    }
}

/// The same for one group: from behind, the first run of blocks that reaches as far as the next query behind it sees.
fn accepted_by(groups: &Groups, group: usize, longest: usize, rows: usize, has: impl Fn(usize) -> bool) -> usize {
    let mut len = longest;
    let mut number = longest;
    while number > groups.first_hit(group, len, rows) {
        number -= 1;
        if !has(number) {
            len = number;
        }
    }
    len
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::group::GroupSpec;

    const BLOCKS: usize = 7;

    fn groups(block_size: u32, specs: &[GroupSpec]) -> Groups {
        Groups::new(&Config { max_num_batched_tokens: 64, groups: specs.to_vec(), ..Config::new(2, block_size, 2, 64) })
    }

    /// An index in which block `1 + number + BLOCKS * group` holds content `number` of a group, if its bit is set in `known`.
    fn index(keys: &[Key], known: &[usize], pending: usize) -> PrefixIndex {
        let mut index = PrefixIndex::new(1 + (BLOCKS * known.len()) as u32);
        for (group, bits) in known.iter().enumerate() {
            for number in (0..BLOCKS).filter(|number| bits >> number & 1 == 1) {
                let block = BlockId((1 + number + BLOCKS * group) as u32);
                index.make_pending(block, keys[number].in_group(group));
                if number < pending {
                    index.publish(block);
                }
            }
        }
        index
    }

    fn keys() -> Vec<Key> {
        (0..BLOCKS).map(|number| Key([number as u8 + 1; 32])).collect()
    }

    /// By definition: the first block with a row that the query behind `len` blocks sees.
    fn first(spec: GroupSpec, len: usize, size: usize) -> usize {
        let query = len * size;
        let sees = |row: &usize| spec.window.is_none_or(|window| query - row < window as usize);
        (0..=query).find(sees).expect("itself") / size
    }

    #[test]
    fn every_pattern_of_known_blocks_gives_the_longest_length_that_all_groups_accept() {
        let keys = keys();
        for size in [1, 2, 3] {
            for window in [None, Some(1), Some(2), Some(3), Some(4), Some(5), Some(9), Some(30)] {
                let specs = [GroupSpec::FULL, GroupSpec { window }];
                let groups = groups(size, &specs);
                for known in 0..1 << BLOCKS {
                    // The first group knows a head of the chain; the second any set of blocks.
                    for head in [0, 3, BLOCKS] {
                        let bits = [(1 << head) - 1, known];
                        let index = index(&keys, &bits, BLOCKS);
                        let accepts = |group: usize, len: usize| {
                            let needed = first(specs[group], len, size as usize)..len;
                            needed.clone().all(|number| bits[group] >> number & 1 == 1)
                        };
                        let longest =
                            (0..=BLOCKS).rev().find(|&len| accepts(0, len) && accepts(1, len)).expect("nothing");
                        let mut hit = Hit::new(2);
                        hit.find(&index, &groups, &keys, Known::Pending);
                        assert_eq!(hit.len(), longest, "size {size}, {window:?}, {head} and {known:b}");
                        assert_eq!(hit.confirmed(), longest);
                        let needed = first(specs[1], longest, size as usize);
                        for (number, &block) in hit.table(1).iter().enumerate() {
                            let due = if number < needed { 0 } else { 1 + number + BLOCKS };
                            assert_eq!(block.get() as usize, due, "entry {number} of {:?}", hit.table(1));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_pending_counts_and_what_its_loss_would_need_is_held() {
        let keys = keys();
        let specs = [GroupSpec::FULL, GroupSpec::sliding(3)];
        let groups = groups(1, &specs);
        let all = (1 << BLOCKS) - 1;
        let mut hit = Hit::new(2);
        hit.find(&index(&keys, &[all, all], 5), &groups, &keys, Known::Pending);
        assert_eq!((hit.len(), hit.confirmed()), (BLOCKS, 5));
        // The query at 7 sees from 5 on, the one at 5, if the pending blocks are lost, from 3 on.
        let named: Vec<usize> = (0..BLOCKS).filter(|&number| hit.table(1)[number] != BlockId::NULL).collect();
        assert_eq!(named, [3, 4, 5, 6]);
        // Block 4 of the second group is unknown: its loss cannot be made up for.
        let gap = index(&keys, &[all, all & !(1 << 4)], 5);
        hit.find(&gap, &groups, &keys, Known::Pending);
        assert_eq!((hit.len(), hit.confirmed()), (BLOCKS, 5));
        let named: Vec<usize> = (0..BLOCKS).filter(|&number| hit.table(1)[number] != BlockId::NULL).collect();
        assert_eq!(named, [5, 6]);
        // Published blocks alone serve up to there; the query at 4 sees from 2 on.
        hit.find(&gap, &groups, &keys, Known::Published);
        assert_eq!((hit.len(), hit.confirmed()), (4, 4));
        assert_eq!(hit.table(1)[1], BlockId::NULL);
        assert!(hit.table(1)[2..].iter().all(|&block| block != BlockId::NULL));
    }

    #[test]
    fn the_blocks_of_one_group_are_no_hit_in_another() {
        let keys = keys();
        let groups = groups(1, &[GroupSpec::FULL, GroupSpec::FULL]);
        let mut hit = Hit::new(2);
        hit.find(&index(&keys, &[0b111, 0b11], BLOCKS), &groups, &keys, Known::Pending);
        assert_eq!(hit.len(), 2);
        hit.find(&index(&keys, &[0b111, 0], BLOCKS), &groups, &keys, Known::Pending);
        assert_eq!((hit.len(), hit.blocks().count()), (0, 0));
    }
}
