//! What the queries of a group see, and all that follows from it: what is kept, what a hit must have, what a request needs.
//!
//! A group is the layers that share one geometry; it has its own tables over the common pool, with the block size and the bytes of a
//! block of every other group. There is one rule, [`GroupSpec::first_visible`]. Keeping, looking up, sizing, and the reader's mask all
//! ask it, so they cannot disagree (I48 to I51 of the catalogue of faults).

use std::ops::Range;

use crate::block_size::BlockSize;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::mutant::{self, Mutant};

/// Groups of one pool at most.
pub const MAX_GROUPS: usize = 16;

/// What the queries of one group see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupSpec {
    /// A query sees so many rows, its own the last of them. `None`: all rows up to its own.
    pub window: Option<u32>,
}

impl GroupSpec {
    /// A group whose queries see everything before them.
    pub const FULL: GroupSpec = GroupSpec { window: None };

    /// A group whose queries see `window` rows, their own the last of them.
    #[must_use]
    pub const fn sliding(window: u32) -> Self {
        GroupSpec { window: Some(window) }
    }

    /// The first row that the query at `position` sees: the rule. It never falls as the position rises.
    #[must_use]
    pub fn first_visible(self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window as usize))
    }

    /// The number of the block that holds that row: the first block that the query at `position`, or one behind it, needs.
    #[must_use]
    pub fn first_block(self, position: usize, size: BlockSize) -> usize {
        size.full_blocks(self.first_visible(position))
    }

    /// Blocks that one sequence needs at once at most, if a step computes at most `chunk` of its rows: the rows that the queries of
    /// one step see, wherever they lie. `None` if there is no bound but its length.
    #[must_use]
    pub fn most_blocks(self, chunk: usize, size: BlockSize) -> Option<usize> {
        self.window.map(|window| size.most_touched(window as usize - 1 + chunk))
    }
}

/// The groups of a scheduler, with what does not change.
#[derive(Clone, Debug)]
pub(crate) struct Groups {
    specs: Box<[GroupSpec]>,
    /// For each group [`GroupSpec::most_blocks`]; without a bound the largest number.
    most: Box<[usize]>,
    size: BlockSize,
    has_window: bool,
}

impl Groups {
    pub fn new(config: &Config) -> Self {
        let size = BlockSize::new(config.block_size);
        let specs: Box<[GroupSpec]> = config.groups.clone().into();
        let most = specs.iter().map(|spec| spec.most_blocks(config.max_chunk(), size).unwrap_or(usize::MAX)).collect();
        Groups { most, size, has_window: specs.iter().any(|spec| spec.window.is_some()), specs }
    }

    /// One group that sees everything.
    pub fn full(size: BlockSize) -> Self {
        Groups { specs: [GroupSpec::FULL].into(), most: [usize::MAX].into(), size, has_window: false }
    }

    pub fn len(&self) -> usize {
        self.specs.len()
    }

    /// Whether some group ever gives blocks back before its sequence ends.
    pub fn has_window(&self) -> bool {
        self.has_window
    }

    pub fn specs(&self) -> &[GroupSpec] {
        &self.specs
    }

    /// The first block that group `group` keeps for a sequence whose next query is at `position`.
    pub fn first_kept(&self, group: usize, position: usize) -> usize {
        let first = self.specs[group].first_block(position, self.size);
        first + usize::from(mutant::is_on(Mutant::FreeInSight) && first > 0)
    }

    /// The first block that a hit of `blocks` blocks, and `rows` rows of the next one, must have in group `group`: what the next query
    /// sees.
    pub fn first_hit(&self, group: usize, blocks: usize, rows: usize) -> usize {
        let first = self.specs[group].first_block(blocks * self.size.tokens() + rows, self.size);
        first + usize::from(mutant::is_on(Mutant::ShortWindowHit) && first < blocks)
    }

    /// The full blocks before row `position` that its query sees in group `group` and that of the last of `rows` rows does not: they leave
    /// in between. Who shares them gets nothing for those that it lets go before others.
    pub fn leaving(&self, group: usize, position: usize, rows: usize) -> Range<usize> {
        let first = |position| self.specs[group].first_block(position, self.size);
        let end = self.size.full_blocks(position).min(first(rows.saturating_sub(1)));
        first(position)..end.max(first(position))
    }

    /// The need of a second sequence over the first `position` rows of another one until it has `rows`: beside its growth, a copy of the block
    /// that is begun, and what stands in for that which it may let go before the other one.
    pub fn need_behind(&self, position: usize, rows: usize) -> usize {
        let leaving: usize = (0..self.specs.len()).map(|group| self.leaving(group, position, rows).len()).sum();
        self.need(position, self.size.blocks_for(position), rows) + self.tail_blocks(position) + leaving
    }

    /// Blocks, one a group, into which the last of `rows` rows are copied by all that share them but one; none if they end with a block.
    pub fn tail_blocks(&self, rows: usize) -> usize {
        if self.size.offset(rows) > 0 { self.specs.len() } else { 0 }
    }

    /// The need of a request (I16): blocks that it must be able to take, in all groups together, beside those that its tables name in
    /// sight of `position`, its next query, until `rows` rows are computed. Its tables have `len` entries each.
    pub fn need(&self, position: usize, len: usize, rows: usize) -> usize {
        let all = self.size.blocks_for(rows);
        let beyond = |group: usize| {
            let last = self.specs[group].first_block(position, self.size).saturating_add(self.most[group]);
            last.min(all).saturating_sub(len)
        };
        let counted = if mutant::is_on(Mutant::NeedOfOneGroup) { 1 } else { self.specs.len() };
        (0..counted).map(beyond).sum()
    }
}

/// Checks the groups of a configuration.
///
/// # Errors
/// [`Error::InvalidInput`] for none, too many, or a window without a row.
pub(crate) fn check(specs: &[GroupSpec]) -> Result<()> {
    if !(1..=MAX_GROUPS).contains(&specs.len()) {
        let bound = format!("there must be 1..={MAX_GROUPS} groups");
        return Err(Error::InvalidInput { field: "groups", value: specs.len() as i128, bound });
    }
    let is_wrong = |window: &u32| !(1..=i32::MAX as u32).contains(window);
    if let Some(window) = specs.iter().filter_map(|spec| spec.window).find(is_wrong) {
        let bound = format!("a window must be 1..={} rows", i32::MAX);
        return Err(Error::InvalidInput { field: "groups", value: i128::from(window), bound });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows that the query at `position` sees, by definition: itself and the `window - 1` before it.
    fn visible(window: Option<u32>, position: usize) -> Vec<usize> {
        (0..=position).filter(|row| window.is_none_or(|window| position - row < window as usize)).collect()
    }

    #[test]
    fn the_rule_is_the_definition_for_every_window_block_and_position() {
        for tokens in [1, 2, 3, 4, 7, 16, 17, 64] {
            let size = BlockSize::new(tokens);
            for window in (1..=200).map(Some).chain([None]) {
                let spec = GroupSpec { window };
                for position in 0..150 {
                    let rows = visible(window, position);
                    assert_eq!(spec.first_visible(position), rows[0], "window {window:?}, query {position}");
                    assert_eq!(spec.first_block(position, size), rows[0] / tokens as usize);
                }
            }
        }
    }

    #[test]
    fn the_bound_on_blocks_is_reached_and_never_passed() {
        for tokens in [1, 2, 3, 5, 8, 16, 48] {
            let size = BlockSize::new(tokens);
            for window in (1..=70).chain([127, 128, 129, 200]) {
                for chunk in [1, 2, 3, 7, 16, 33] {
                    let spec = GroupSpec::sliding(window);
                    // The rows that the queries of one step see, at every offset: block by block.
                    let touched = |first: usize| {
                        let last = first + chunk - 1;
                        last / tokens as usize - spec.first_visible(first) / tokens as usize + 1
                    };
                    let start = window as usize;
                    let most = (start..start + 2 * tokens as usize).map(touched).max();
                    assert_eq!(spec.most_blocks(chunk, size), most, "window {window}, block {tokens}, chunk {chunk}");
                    let stated = (window as usize - 1 + chunk).div_ceil(tokens as usize) + 1;
                    assert!(most.unwrap() <= stated);
                }
            }
        }
    }
}
