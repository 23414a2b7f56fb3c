//! Finds the longest known prefix of a prompt and holds it in the same call: no id of a block that nobody holds leaves here.
//!
//! Before: [`BlockHasher`](crate::block_hash::BlockHasher) made the keys of the prompt. After: a sequence that starts with the blocks
//! that were found. A hit covers at most all tokens but the last, which is always computed (design 5). In a pool that remembers what
//! its blocks hold, tokens are compared, and rows of the next block count too: the sequence shares the block that has them, so whoever appends
//! gets a block of its own and is told to copy them. What was found counts as reused when rows are appended behind it, once.

use crate::block_hash::{BlockHasher, Prompt};
use crate::block_pool::BlockPool;
use crate::block_size::BlockSize;
use crate::error::{Error, Result};
use crate::group::Groups;
use crate::hit::{Hit, Known};
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::partial_hit::Wanted;
use crate::sequence::{Lookup, Sequence};

/// What was looked for and what was reused, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reuse {
    /// Prompts that were looked up and went on.
    pub prompts: u64,
    /// Their tokens.
    pub queries: u64,
    /// Those of them that were found.
    pub hits: u64,
}

/// The cache's view of a pool.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    pub reuse: Reuse,
    groups: Groups,
    /// The hit of the call under way. Kept for its memory.
    hit: Hit,
}

impl PrefixCache {
    /// One over blocks of this size.
    pub fn new(size: BlockSize) -> Self {
        PrefixCache { reuse: Reuse::default(), groups: Groups::full(size), hit: Hit::new(1) }
    }

    /// A sequence over the longest published prefix of `prompt`, with blocks for `reserve` rows in all, one for a copy among them.
    /// `hasher` made the prompt.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] if the reserved blocks, and the hits that are free, are more than the free ones;
    /// [`Error::InvalidInput`] for an empty prompt. Nothing changes then.
    pub fn start(
        &mut self,
        pool: &mut BlockPool,
        size: BlockSize,
        hasher: &mut BlockHasher,
        prompt: &Prompt,
        reserve: usize,
    ) -> Result<Sequence> {
        let queried = prompt.tokens().len();
        if queried == 0 {
            let bound = "must hold at least one token".to_owned();
            return Err(Error::InvalidInput { field: "token_ids", value: 0, bound });
        }
        let known = if mutant::is_on(Mutant::HitWholePrompt) { queried } else { queried - 1 };
        let keys = &prompt.keys()[..size.full_blocks(known)];
        self.hit.find(pool.index(), &self.groups, keys, Known::Published);
        if let Some(at) = pool.partial().and_then(|partial| partial.first_other(self.hit.table(0), prompt.tokens())) {
            self.hit.fit(pool.index(), &self.groups, &keys[..at], Known::Published, 0);
        }
        let part = find_part(pool, size, hasher, prompt, self.hit.len());
        let found = self.hit.len() * size.tokens() + part.map_or(0, |(_, rows)| rows);
        let lacking = if reserve > found { size.blocks_for(reserve) - self.hit.len() } else { 0 } as u32;
        let free_hits = self.hit.num_free(pool) + part.map_or(0, |(source, _)| u32::from(pool.is_free(source)));
        let mut sequence = Sequence::default();
        if lacking > pool.num_free().saturating_sub(free_hits) && !mutant::is_on(Mutant::BlockedKeepsHits) {
            return Err(Error::OutOfBlocks { needed: lacking.saturating_add(free_hits), free: pool.num_free() });
        }
        pool.share_all(&mut sequence.table, self.hit.table(0))?;
        pool.ask_chain(self.hit.table(0), part.map(|(source, _)| source), |_| None);
        sequence.named = self.hit.len();
        sequence.rows = sequence.named * size.tokens();
        if let Some((source, rows)) = part {
            pool.share(&mut sequence.table, source)?;
            sequence.rows += rows;
        }
        // For the copy of a part that has a block already, and for what comes behind.
        sequence.has_spare = part.is_some() && lacking > 0;
        pool.take(&mut sequence.table, lacking)?;
        sequence.lookup = Some(Lookup { queried, found: sequence.rows });
        sequence.chain = (!mutant::is_on(Mutant::ChainForgotten)).then(|| prompt.chain().clone());
        if mutant::is_on(Mutant::RecountQueriesOnRetry) {
            self.count(sequence.lookup);
        }
        Ok(sequence)
    }

    /// A lookup has been used.
    pub fn count(&mut self, lookup: Option<Lookup>) {
        if let Some(Lookup { queried, found }) = lookup {
            self.reuse.prompts += 1;
            self.reuse.queries += queried as u64;
            self.reuse.hits += found as u64;
        }
    }
}

/// The block of which most rows go on behind `hits` full blocks of `prompt`, and how many, in a pool that remembers what its blocks hold.
fn find_part(
    pool: &BlockPool,
    size: BlockSize,
    hasher: &mut BlockHasher,
    prompt: &Prompt,
    hits: usize,
) -> Option<(BlockId, usize)> {
    pool.partial()?;
    let wanted = Wanted::behind(prompt.chain(), &prompt.keys()[..hits], prompt.tokens(), size)?;
    let head = wanted.head(hasher)?;
    wanted.source(pool, hasher, &head, 0)
}
