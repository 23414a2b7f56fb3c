//! One chain of tokens on blocks of a pool: how many rows it has, and how many of its blocks have a published name.
//!
//! Before: [`Sequences`](crate::sequences::Sequences) keeps it and hands it the pool. Every mutator is all-or-nothing.
//! Always: rows fit the blocks; the first `named` blocks are full, and published under the keys of this chain.

use crate::block_hash::Names;
use crate::block_pool::{BlockCopy, BlockPool, Release};
use crate::block_size::BlockSize;
use crate::block_table::BlockTable;
use crate::chain::Chain;
use crate::error::{Error, Result};
use crate::events::Content;
use crate::ids::{BlockId, Key, TokenId};
use crate::mutant::{self, Mutant};
use crate::partial_hit::mark_of;
use crate::prefix_index::KeyState;
use crate::retention::{Ranges, Worth};

/// Most rows of a chain: positions fit 31 bits.
const MAX_ROWS: usize = i32::MAX as usize;

/// Rows that must be copied before anything else is written: what was shared, or can be found by its key, is not written over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCopy {
    /// The block that holds the rows.
    pub source: BlockId,
    /// The block that takes its place in the table.
    pub target: BlockId,
    /// How many rows, from the first on.
    pub rows: u32,
}

/// What a lookup found, until it is known whether it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lookup {
    /// Tokens that were looked for.
    pub queried: usize,
    /// Tokens that were found.
    pub found: usize,
}

/// One chain of tokens.
#[derive(Debug, Default)]
pub(crate) struct Sequence {
    pub table: BlockTable,
    /// Tokens whose rows have a place.
    pub rows: usize,
    /// Leading blocks that are published.
    pub named: usize,
    /// The last block of the table stands by for the copy that the next row needs.
    pub has_spare: bool,
    /// Counted when the first row is appended behind it.
    pub lookup: Option<Lookup>,
    /// What the keys of its blocks depend on beside tokens; none for a plain chain.
    pub chain: Option<Chain>,
}

impl Sequence {
    /// Makes room for `count` rows more. A block that must not be written over is replaced; the rows to be copied are returned.
    pub fn append(&mut self, pool: &mut BlockPool, size: BlockSize, count: usize) -> Result<Option<RowCopy>> {
        let end = self.end(count)?;
        let tail = size.full_blocks(self.rows);
        let is_shared = count > 0 && self.is_tail_shared(pool, size);
        let lacking = self.lacking(pool, size, end, is_shared)?;
        if count > 0 && std::mem::take(&mut self.has_spare) && is_shared {
            let spare = self.table.blocks.pop().expect("it stands by");
            // The next to be taken.
            pool.release_blocks(&[spare], Release::Now)?;
        }
        let copied = if is_shared { pool.make_writable(&mut self.table, tail, Release::Now)? } else { None };
        pool.take(&mut self.table, lacking)?;
        let rows = size.offset(self.rows) as u32;
        self.rows = end;
        Ok(copied.filter(|_| rows > 0).map(|BlockCopy { source, target }| RowCopy { source, target, rows }))
    }

    /// Takes blocks for `rows` rows in all, and one for the copy that the next of them needs, if it needs one.
    pub fn reserve(&mut self, pool: &mut BlockPool, size: BlockSize, rows: usize) -> Result<()> {
        let end = self.end(rows.saturating_sub(self.rows))?;
        let needs_spare =
            end > self.rows && self.is_tail_shared(pool, size) && !mutant::is_on(Mutant::ReserveForgetsCopy);
        let lacking = self.lacking(pool, size, end, needs_spare)?;
        let spare = u32::from(needs_spare && !self.has_spare);
        pool.take(&mut self.table, lacking + spare)?;
        self.has_spare |= needs_spare;
        Ok(())
    }

    /// Whether the block that the next row goes to is there and must not be written over.
    fn is_tail_shared(&self, pool: &BlockPool, size: BlockSize) -> bool {
        let tail = size.full_blocks(self.rows);
        tail < self.num_for_rows() && !is_private(pool, self.table.blocks()[tail])
    }

    /// Blocks of the table that have rows or will have them.
    fn num_for_rows(&self) -> usize {
        self.table.len() - usize::from(self.has_spare)
    }

    /// A second sequence over the blocks of all rows; reserved blocks stay with the first. Neither writes over what both see.
    pub fn fork(&self, pool: &mut BlockPool, size: BlockSize) -> Result<Sequence> {
        let mut table = pool.fork(&self.table)?;
        pool.truncate(&mut table, self.rows, size, Release::Now)?;
        let chain = self.chain.clone();
        Ok(Sequence { table, rows: self.rows, named: self.named, has_spare: false, lookup: None, chain })
    }

    /// Gives up all rows from `rows` on, and every block that is not needed for the others.
    pub fn truncate(&mut self, pool: &mut BlockPool, size: BlockSize, rows: usize) -> Result<()> {
        if rows > self.rows {
            let bound = format!("must be at most {}, the tokens of the table", self.rows);
            return Err(Error::InvalidInput { field: "num_tokens", value: rows as i128, bound });
        }
        pool.truncate(&mut self.table, rows, size, Release::Now)?;
        self.rows = rows;
        self.named = self.named.min(size.full_blocks(rows));
        self.has_spare = false;
        Ok(())
    }

    /// Publishes the full blocks that `names` names; how many had no name before. `tokens` are those from the first of them on whose rows
    /// have been written. All that is published of the chain, from its first block on, is worth what `ranges` asks, if it is more.
    pub fn publish(
        &mut self,
        pool: &mut BlockPool,
        size: BlockSize,
        names: &Names,
        tokens: &[TokenId],
        ranges: Option<&Ranges>,
    ) -> Result<u32> {
        let (start, keys) = (names.first, &names.keys);
        let end = start * size.tokens() + tokens.len();
        if end > self.rows && !mutant::is_on(Mutant::PublishUnwritten) {
            let bound = format!("must end at {} or before, where the tokens of the table end", self.rows);
            return Err(Error::InvalidInput { field: "token_ids", value: end as i128, bound });
        }
        let mut parent = self.parent(pool, size, start)?;
        let blocks = &self.table.blocks()[start..];
        let differs = |(block, key): &(&BlockId, &Key)| pool.index().key(**block).is_some_and(|old| old != **key);
        if let Some(at) = blocks.iter().zip(keys).position(|pair| differs(&pair))
            && !mutant::is_on(Mutant::PublishOtherTokens)
        {
            let first = (start + at) * size.tokens();
            let bound = "the tokens from this position on are not those under which the block is published".to_owned();
            return Err(Error::InvalidInput { field: "token_ids", value: first as i128, bound });
        }
        if ranges.is_some() {
            pool.use_retention();
        }
        let before = pool.index().num_published();
        let mut heads = names.heads.iter();
        for ((&block, key), tokens) in blocks.iter().zip(keys).zip(tokens.chunks_exact(size.tokens())) {
            pool.make_pending(block, *key)?;
            if let Some(head) = heads.next() {
                pool.remember(block, *key, mark_of(head, 0, tokens), tokens);
            }
            pool.describe(block, *key, Content { parent, tokens, group: 0 });
            pool.publish(block)?;
            parent = Some(*key);
        }
        self.named = self.named.max(start + keys.len().min(blocks.len()));
        // Who asks for a block asks for those before it too: values never rise along a chain.
        let first = if ranges.is_some() { 0 } else { start };
        for (number, &block) in self.table.blocks().iter().enumerate().take(self.named).skip(first) {
            pool.ask(block, number, ranges.map_or(Worth::DEFAULT, |ranges| ranges.worth(number * size.tokens())));
        }
        Ok(pool.index().num_published() - before)
    }

    /// A start that leaves no block without a name before it.
    pub fn check_start(&self, size: BlockSize, start: usize) -> Result<()> {
        if start <= self.named {
            return Ok(());
        }
        let bound = format!("must be at most {}, where the published blocks end", self.named * size.tokens());
        Err(Error::InvalidInput { field: "start", value: (start * size.tokens()) as i128, bound })
    }

    /// Key of the block before number `start`; none at the start of the chain.
    pub fn parent(&self, pool: &BlockPool, size: BlockSize, start: usize) -> Result<Option<Key>> {
        self.check_start(size, start)?;
        Ok(start.checked_sub(1).and_then(|last| pool.index().key(self.table.blocks()[last])))
    }

    fn end(&self, count: usize) -> Result<usize> {
        let end = self.rows.saturating_add(count);
        if end > MAX_ROWS {
            let bound = format!("a table has at most {MAX_ROWS} tokens");
            return Err(Error::InvalidInput { field: "num_tokens", value: count as i128, bound });
        }
        Ok(end)
    }

    /// Blocks that `rows` rows in all lack, if they are free, and one more if a copy needs it that does not stand by.
    fn lacking(&self, pool: &BlockPool, size: BlockSize, rows: usize, is_copied: bool) -> Result<u32> {
        // One that stands by for no copy is for rows.
        let len = self.table.len() - usize::from(self.has_spare && is_copied);
        let lacking = size.blocks_for(rows).saturating_sub(len) as u32;
        let needed = lacking.saturating_add(u32::from(is_copied && !self.has_spare));
        if needed > pool.num_free() {
            return Err(Error::OutOfBlocks { needed, free: pool.num_free() });
        }
        Ok(lacking)
    }
}

/// Whether rows of `block` may be written: one holder, and nobody can find it.
fn is_private(pool: &BlockPool, block: BlockId) -> bool {
    pool.holders(block) == 1 && pool.index().state(block) == KeyState::Unnamed
}
