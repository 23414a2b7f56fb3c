//! Finds the longest known prefix of a prompt and holds it in the same call: no id of a block that nobody holds leaves here.
//!
//! Before: [`BlockHasher`](crate::block_hash::BlockHasher) made the keys of the prompt. After: a sequence that starts with the blocks
//! that were found. A hit covers at most all tokens but the last, which is always computed (design 5). What was found counts as
//! reused when rows are appended behind it, once.

use crate::block_hash::Prompt;
use crate::block_pool::BlockPool;
use crate::block_size::BlockSize;
use crate::error::{Error, Result};
use crate::group::Groups;
use crate::hit::{Hit, Known};
use crate::mutant::{self, Mutant};
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

    /// A sequence over the longest published prefix of `prompt`, with blocks for `reserve` rows in all.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] if the reserved blocks, and the hits that are free, are more than the free ones;
    /// [`Error::InvalidInput`] for an empty prompt. Nothing changes then.
    pub fn start(
        &mut self,
        pool: &mut BlockPool,
        size: BlockSize,
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
        let lacking = size.blocks_for(reserve).saturating_sub(self.hit.len()) as u32;
        let free_hits = self.hit.num_free(pool);
        let mut sequence = Sequence::default();
        if lacking > pool.num_free().saturating_sub(free_hits) && !mutant::is_on(Mutant::BlockedKeepsHits) {
            return Err(Error::OutOfBlocks { needed: lacking.saturating_add(free_hits), free: pool.num_free() });
        }
        pool.share_all(&mut sequence.table, self.hit.table(0))?;
        pool.take(&mut sequence.table, lacking)?;
        sequence.named = self.hit.len();
        sequence.rows = sequence.named * size.tokens();
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
