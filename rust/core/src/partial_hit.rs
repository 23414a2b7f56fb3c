//! The rows that a prompt shares with the first block in which it differs from what is cached, and proof that what is cached is what
//! was asked for.
//!
//! Before: an admission found its full blocks. After: a published block behind the same parent, with the same fields, whose first rows hold
//! the next tokens of the prompt, is the source of a copy into the request's own next block. It is leased until the step has
//! ended, and then stands in the free queue as if it had been hit and released. Its key is made anew from our parent, our fields
//! and its tokens, so a hash that collides brings a miss and never a foreign row.
//!
//! Each group has a source of its own, which need not hold the same content as that of another group: as many rows are copied as all of
//! them have. A group whose queries see themselves only needs none.

use crate::block_hash::BlockHasher;
use crate::block_pool::{BlockPool, Release};
use crate::block_size::BlockSize;
use crate::block_table::BlockTable;
use crate::chain::Chain;
use crate::group::MAX_GROUPS;
use crate::ids::{BlockId, Key, TokenId};
use crate::mutant::{self, Mutant};
use crate::partial_index::least_rows;
use crate::prefix_index::KeyState;
use crate::scheduler::Scheduler;

/// The tokens that go on behind full blocks which were found, the last one of all left out: some row must be computed.
pub(crate) struct Wanted<'a> {
    chain: &'a Chain,
    /// Number of their block.
    at: usize,
    parent: Option<Key>,
    pub tokens: &'a [TokenId],
    least: usize,
}

impl<'a> Wanted<'a> {
    /// Behind the blocks of these keys, the first of `chain`, whose tokens begin with `tokens`; none if they are too few for a hit.
    pub fn behind(chain: &'a Chain, keys: &[Key], tokens: &'a [TokenId], size: BlockSize) -> Option<Self> {
        let (at, least) = (keys.len(), least_rows(size));
        let end = ((at + 1) * size.tokens()).min(tokens.len() - 1);
        let tokens = tokens.get(at * size.tokens()..end).filter(|wanted| wanted.len() >= least)?;
        Some(Wanted { chain, at, parent: keys.last().copied(), tokens, least })
    }

    /// The key of the head that a block must share.
    pub fn head(&self, hasher: &mut BlockHasher) -> Option<Key> {
        hasher.head_key(self.chain, self.at, self.parent.as_ref(), &self.tokens[..self.least]).ok()
    }

    /// The published block of `group` that holds most of them, and how many. Its key must be that of its tokens behind our parent.
    pub fn source(
        &self,
        pool: &BlockPool,
        hasher: &mut BlockHasher,
        head: &Key,
        group: usize,
    ) -> Option<(BlockId, usize)> {
        let (partial, index) = (pool.partial()?, pool.index());
        let found = partial.find(mark_of(head, group, self.tokens), self.tokens);
        let (source, rows) = found.filter(|(_, rows)| *rows >= self.least)?;
        let key = hasher.block_key(self.chain, self.at, self.parent.as_ref(), partial.tokens(source)).ok()?;
        let is_ours = index.key(source) == Some(key.in_group(group)) || mutant::is_on(Mutant::PartialOfAnybody);
        (is_ours && index.state(source) == KeyState::Published).then_some((source, rows))
    }
}

/// What blocks of a group have in common whose heads have the key `head`.
pub(crate) fn mark_of(head: &Key, group: usize, tokens: &[TokenId]) -> u64 {
    if mutant::is_on(Mutant::PartialOfAnybody) { u64::from(tokens[0]) } else { head.in_group(group).short() }
}

/// What can be copied for an admission.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartialHit {
    /// By group; null where none is needed.
    sources: [BlockId; MAX_GROUPS],
    pub rows: usize,
}

impl PartialHit {
    /// The blocks that are read, each with its group.
    pub fn sources(&self) -> impl Iterator<Item = (usize, BlockId)> {
        self.sources.into_iter().enumerate().filter(|&(_, source)| source != BlockId::NULL)
    }

    /// The block that is read in `group`, if one is.
    pub fn source_of(&self, group: usize) -> Option<BlockId> {
        Some(self.sources[group]).filter(|&source| source != BlockId::NULL)
    }
}

impl Scheduler {
    /// The longest head of the next block that every group has in some published block, behind `hits` full blocks.
    pub(crate) fn find_partial(&mut self, seat: usize, hits: usize) -> Option<PartialHit> {
        self.pool.partial()?;
        let request = self.seats[seat].as_ref().expect("a seat in use");
        let wanted = Wanted::behind(&request.chain, &request.keys[..hits], request.tokens(), self.block_size)?;
        let head = wanted.head(&mut self.hasher)?;
        let mut found = PartialHit { sources: [BlockId::NULL; MAX_GROUPS], rows: wanted.tokens.len() };
        for (group, spec) in self.groups.specs().iter().enumerate() {
            // The query behind one row of the block.
            if spec.first_visible(1) > 0 {
                continue;
            }
            let (source, rows) = wanted.source(&self.pool, &mut self.hasher, &head, group)?;
            found.sources[group] = source;
            found.rows = found.rows.min(rows);
            if mutant::is_on(Mutant::PartialOfFirstGroup) {
                break;
            }
        }
        found.rows += usize::from(mutant::is_on(Mutant::PartialRowTooMany) && found.rows < wanted.tokens.len());
        Some(found)
    }

    /// What stands for the head of block `at` of a request, in the hash that finds it again.
    pub(crate) fn remember_block(&mut self, seat: usize, at: usize) {
        if self.pool.partial().is_none() {
            return;
        }
        let (size, least) = (self.block_size.tokens(), least_rows(self.block_size));
        let request = self.seats[seat].as_ref().expect("a seat in use");
        let Some(tokens) = request.tokens().get(at * size..(at + 1) * size) else { return };
        let parent = at.checked_sub(1).map(|before| request.keys[before]);
        let Ok(head) = self.hasher.head_key(&request.chain, at, parent.as_ref(), &tokens[..least]) else { return };
        for (group, table) in request.tables().enumerate() {
            let mark = mark_of(&head, group, tokens);
            self.pool.remember(table.blocks()[at], request.keys[at].in_group(group), mark, tokens);
        }
    }

    /// The sources of a partial hit cannot be handed out until the step has ended.
    pub(crate) fn lease_sources(&mut self, hit: PartialHit) {
        if mutant::is_on(Mutant::PartialWithoutLease) {
            return;
        }
        let mut table = BlockTable::new();
        for (_, source) in hit.sources() {
            self.pool.share(&mut table, source).expect("found in this very call");
        }
        let step = self.steps + 1;
        self.flight.orphan(table.blocks(), step);
        self.pool.release(table, Release::Until(step));
    }

    /// Tells the plan to copy a partial hit into the first blocks behind the full ones.
    pub(crate) fn copy_partial(&mut self, seat: usize, hits: usize, hit: PartialHit) {
        for (group, source) in hit.sources() {
            let target = self.request(seat).table_of(group).blocks()[hits];
            self.draft.copies.push([group as i32, source.get() as i32, target.get() as i32, hit.rows as i32]);
            self.copied = true;
        }
        self.partial_rows = hit.rows;
    }

    /// The first block number of the hit that was just found of which some group's content is not what its key says.
    pub(crate) fn first_forged(&self, seat: usize) -> Option<usize> {
        let partial = self.pool.partial().filter(|_| !mutant::is_on(Mutant::TokensNotCompared))?;
        let request = self.request(seat);
        let compared = if mutant::is_on(Mutant::TokensOfFirstGroup) { 1 } else { self.groups.len() };
        let forged_in = |group: usize| partial.first_other(self.hit.table(group), request.tokens());
        (0..compared).filter_map(forged_in).min()
    }
}
