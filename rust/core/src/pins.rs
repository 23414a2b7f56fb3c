//! Prefixes that are held although no sequence runs over them: pinned, within a budget of blocks.
//!
//! Before: a caller names tokens whose blocks are published. After: those blocks have one holder more until [`Scheduler::unpin`], so
//! nothing evicts them. `pinned blocks <= pin_budget`, each counted once however many pins name it.

use std::collections::BTreeMap;

use crate::block_hash::Prompt;
use crate::block_table::BlockTable;
use crate::error::{Error, Result};
use crate::hit::Known;
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::refusal::Granted;
use crate::scheduler::Scheduler;

/// What a pin holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// Its name, never given again.
    pub id: u64,
    /// Tokens of the prefix, whole blocks.
    pub tokens: usize,
    /// Blocks that it holds, in all groups.
    pub blocks: u32,
}

/// All pins.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    /// The blocks of each pin, in all groups, in the order of the tokens.
    tables: BTreeMap<u64, BlockTable>,
    /// Pins that name each block. Empty until the first pin.
    counts: Vec<u32>,
    /// Blocks that at least one pin names.
    blocks: u32,
    last_id: u64,
}

impl Pins {
    /// The tables of all pins.
    pub fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        self.tables.values()
    }

    /// Blocks that at least one pin names.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    fn is_pinned(&self, block: BlockId) -> bool {
        self.counts.get(block.index()).is_some_and(|&count| count > 0)
    }

    fn add(&mut self, table: BlockTable, num_blocks: u32) -> u64 {
        self.counts.resize(num_blocks as usize, 0);
        for block in table.blocks() {
            self.blocks += u32::from(self.counts[block.index()] == 0);
            self.counts[block.index()] += 1;
        }
        self.last_id += 1;
        self.tables.insert(self.last_id, table);
        self.last_id
    }

    fn remove(&mut self, id: u64) -> Option<BlockTable> {
        let table = self.tables.remove(&id)?;
        for block in table.blocks() {
            self.counts[block.index()] -= 1;
            self.blocks -= u32::from(self.counts[block.index()] == 0);
        }
        Some(table)
    }
}

impl Scheduler {
    /// Holds the longest published prefix of `prompt`, in whole blocks, until [`Scheduler::unpin`]. Of a group with a window it holds
    /// what the next token sees.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if nothing of it is published; [`Error::OverPinBudget`]; [`Error::OutOfBlocks`] if the free blocks among
    /// them were promised to running requests. Nothing changes then.
    pub fn pin(&mut self, prompt: &Prompt) -> Result<Pinned> {
        let size = self.block_size;
        let mut keys = Vec::new();
        let is_old = prompt.generation != self.hasher.generation && self.config.enable_prefix_caching;
        if is_old && !mutant::is_on(Mutant::PinKeepsOldKeys) {
            // The weights changed since it was hashed.
            self.hasher.extend(&prompt.chain, &mut keys, &prompt.tokens);
        } else {
            keys.extend_from_slice(prompt.keys());
        }
        self.hit.find(self.pool.index(), &self.groups, &keys, Known::Published);
        let kept = self.hit.len();
        if kept == 0 {
            let bound = "must begin with a whole block that is published".to_owned();
            return Err(Error::InvalidInput { field: "token_ids", value: prompt.tokens.len() as i128, bound });
        }
        let seen = |group: usize, number: usize| number >= self.groups.first_hit(group, kept, 0);
        let at = |number: usize| {
            (0..self.groups.len()).filter(move |&group| seen(group, number)).map(move |group| (group, number))
        };
        let all = || (0..kept).flat_map(at).map(|(group, number)| self.hit.table(group)[number]);
        let (pinned, budget) = (self.pins.blocks(), self.config.pin_budget);
        let needed = all().filter(|&block| !self.pins.is_pinned(block)).count() as u32;
        if needed > budget.saturating_sub(pinned) && !mutant::is_on(Mutant::PinOverBudget) {
            return Err(Error::OverPinBudget { needed, pinned, budget });
        }
        let free_hits = all().filter(|&block| self.pool.takes_free(block)).count() as u32;
        let free = self.pool.num_free().saturating_sub(self.promised);
        if free_hits > free {
            return Err(Error::OutOfBlocks { needed: free_hits, free });
        }
        let blocks: Vec<BlockId> = all().collect();
        let _granted = Granted::begin();
        blocks.iter().try_for_each(|&block| self.pool.may_share(block))?;
        self.pool.may_take(free_hits)?;
        let mut table = BlockTable::new();
        self.pool.share_all(&mut table, &blocks).expect("hits of this call");
        for group in 0..self.groups.len() {
            self.pool.ask_chain(self.hit.table(group), None, |_| None);
        }
        let id = self.pins.add(table, self.config.num_blocks);
        Ok(Pinned { id, tokens: kept * size.tokens(), blocks: blocks.len() as u32 })
    }

    /// Gives the blocks of a pin back.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if there is no such pin (any more).
    pub fn unpin(&mut self, id: u64) -> Result<()> {
        let Some(table) = self.pins.remove(id) else {
            let bound = "must be the id of a pin that was not given back".to_owned();
            return Err(Error::InvalidInput { field: "pin", value: i128::from(id), bound });
        };
        if !mutant::is_on(Mutant::UnpinKeepsHolder) {
            let when = self.when_free(0, table.blocks());
            self.pool.release(table, when);
        }
        Ok(())
    }

    /// The blocks that pins hold, each once, ascending.
    pub fn pinned_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let ids = 0..self.pins.counts.len() as u32;
        ids.map(BlockId).filter(|&block| self.pins.is_pinned(block))
    }

    /// Blocks that pins hold; never more than `pin_budget`.
    #[must_use]
    pub fn num_pinned(&self) -> u32 {
        self.pins.blocks()
    }
}
