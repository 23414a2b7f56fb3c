//! A pool, and everybody who holds blocks of it: sequences by their ids, and blocks that a caller holds one by one.
//!
//! Before: an engine of its own, which schedules for itself and wants blocks, prefixes and forks; Python's `BlockPool`, `BlockTable`
//! and `PrefixCache` are views of it. [`Scheduler`](crate::Scheduler) keeps its requests itself and does not need this.
//! Always: an id names one sequence of one pool, from its start to its release, and nothing else ever; so a second release, a use
//! after a release or a reset, and a table of another pool are refused. [`Sequences::audit`] recounts it all.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::block_hash::{BlockHasher, Names, Prompt};
use crate::block_pool::{BlockPool, Release};
use crate::block_size::BlockSize;
use crate::block_table::BlockTable;
use crate::chain::Chain;
use crate::error::{Error, Result};
use crate::events::{EventLog, MAX_EVENTS};
use crate::ids::{BlockId, Key, TokenId};
use crate::mutant::{self, Mutant};
use crate::prefix_cache::{PrefixCache, Reuse};
use crate::prefix_index::KeyState;
use crate::retention::Ranges;
use crate::sequence::{RowCopy, Sequence};

/// Tells pools apart. Relaxed: only the number matters, and no two are equal.
static POOLS: AtomicU64 = AtomicU64::new(0);

/// Name of a sequence: never given again, nor by another pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceId {
    pool: u64,
    seat: u32,
    serial: u64,
}

struct Seat {
    serial: u64,
    sequence: Option<Sequence>,
}

/// A pool and its holders.
pub struct Sequences {
    number: u64,
    size: BlockSize,
    pool: BlockPool,
    cache: PrefixCache,
    seats: Vec<Seat>,
    free_seats: Vec<u32>,
    serial: u64,
    /// Holders of each block that belong to no sequence; empty as long as there never was one.
    loose: Vec<u32>,
    /// Blocks of the call under way. Kept for its memory.
    list: Vec<BlockId>,
}

impl Sequences {
    /// A pool of `num_blocks` blocks, the null block among them, each of `block_size` tokens.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if either is out of range.
    pub fn new(num_blocks: u32, block_size: u32) -> Result<Self> {
        if !(1..=4096).contains(&block_size) {
            let bound = "must be 1..=4096".to_owned();
            return Err(Error::InvalidInput { field: "block_size", value: i128::from(block_size), bound });
        }
        let size = BlockSize::new(block_size);
        Ok(Sequences {
            number: POOLS.fetch_add(1, Ordering::Relaxed),
            size,
            pool: BlockPool::new(num_blocks)?,
            cache: PrefixCache::new(size),
            seats: Vec::new(),
            free_seats: Vec::new(),
            serial: 0,
            loose: Vec::new(),
            list: Vec::new(),
        })
    }

    /// The same, which has named nothing yet, recording the last `capacity` changes of what can be found; 0: none.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for more than [`MAX_EVENTS`](crate::events::MAX_EVENTS).
    pub fn recording(mut self, capacity: u32) -> Result<Self> {
        if capacity > MAX_EVENTS {
            let bound = format!("must be 0..={MAX_EVENTS}");
            return Err(Error::InvalidInput { field: "event_buffer_size", value: i128::from(capacity), bound });
        }
        if capacity > 0 {
            let events = EventLog::new(self.pool.num_blocks(), self.size.tokens() as u32, capacity);
            self.pool = self.pool.recording(events);
        }
        Ok(self)
    }

    /// The same, which has named nothing yet, remembering what its blocks hold, so that rows of a block that is only in part what a
    /// prompt asks for are found.
    #[must_use]
    pub fn remembering(mut self) -> Self {
        self.pool = self.pool.remembering(self.size);
        self
    }

    /// Whether parts of blocks are found.
    #[must_use]
    pub fn finds_parts(&self) -> bool {
        self.pool.partial().is_some()
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Tokens a block.
    #[must_use]
    pub fn block_size(&self) -> BlockSize {
        self.size
    }

    /// What the prefix cache saved.
    #[must_use]
    pub fn reuse(&self) -> Reuse {
        self.cache.reuse
    }

    /// Sequences that are alive.
    #[must_use]
    pub fn len(&self) -> usize {
        self.seats.len() - self.free_seats.len()
    }

    /// Whether no sequence is alive.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A sequence without tokens.
    pub fn begin(&mut self) -> SequenceId {
        self.keep(Sequence::default())
    }

    /// A sequence of one full block: a guard of that block, which [`fork`](Self::fork) shares and [`release`](Self::release) gives back.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`]; nothing is taken then.
    pub fn guard(&mut self) -> Result<SequenceId> {
        let mut sequence = Sequence::default();
        sequence.append(&mut self.pool, self.size, self.size.tokens())?;
        Ok(self.keep(sequence))
    }

    /// A sequence that starts with the longest published prefix of `prompt`, which `hasher` made, held from here on, and has blocks for
    /// `reserve` tokens in all; and how many tokens were found. Where they end inside a block, [`append`](Self::append) says what to copy.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`], counting hits that were free as needed; [`Error::InvalidInput`] for an empty prompt. Nothing changes then.
    pub fn find(&mut self, hasher: &mut BlockHasher, prompt: &Prompt, reserve: usize) -> Result<(SequenceId, usize)> {
        let sequence = self.cache.start(&mut self.pool, self.size, hasher, prompt, reserve)?;
        let found = sequence.rows;
        Ok((self.keep(sequence), found))
    }

    /// Makes room for `count` tokens more, and says which rows must be copied before they are written.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`], [`Error::Released`], [`Error::ForeignTable`], or [`Error::InvalidInput`] for more tokens than a table
    /// may have. Nothing changes then.
    pub fn append(&mut self, id: SequenceId, count: usize) -> Result<Option<RowCopy>> {
        let seat = self.seat(id)?;
        let sequence = live(&mut self.seats, seat);
        let copy = sequence.append(&mut self.pool, self.size, count)?;
        let lookup = if count > 0 { sequence.lookup.take() } else { None };
        if !mutant::is_on(Mutant::RecountQueriesOnRetry) {
            self.cache.count(lookup);
        }
        Ok(copy)
    }

    /// Takes blocks for `rows` tokens in all, so that appending up to there cannot fail.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn reserve(&mut self, id: SequenceId, rows: usize) -> Result<()> {
        let seat = self.seat(id)?;
        live(&mut self.seats, seat).reserve(&mut self.pool, self.size, rows)
    }

    /// A sequence that is as `id` is now, over the same blocks: neither writes over what both see. Costs O(blocks) and copies no row.
    ///
    /// # Errors
    /// [`Error::Released`], [`Error::ForeignTable`].
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let seat = self.seat(id)?;
        let child = live(&mut self.seats, seat).fork(&mut self.pool, self.size)?;
        Ok(self.keep(child))
    }

    /// Gives up all tokens from `rows` on, and the blocks that the others do not need, as one list, last block first.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if there are fewer, [`Error::Released`], [`Error::ForeignTable`]. Nothing changes then.
    pub fn truncate(&mut self, id: SequenceId, rows: usize) -> Result<()> {
        let seat = self.seat(id)?;
        live(&mut self.seats, seat).truncate(&mut self.pool, self.size, rows)
    }

    /// Gives back all blocks of a sequence, as one list, last block first.
    ///
    /// # Errors
    /// [`Error::Released`], [`Error::ForeignTable`]. Nothing changes then.
    pub fn release(&mut self, id: SequenceId) -> Result<()> {
        let seat = self.seat(id)?;
        let sequence = std::mem::take(live(&mut self.seats, seat));
        self.pool.release(sequence.table, Release::Now);
        if !mutant::is_on(Mutant::ReleaseKeepsSeat) {
            self.seats[seat].sequence = None;
            self.free_seats.push(seat as u32);
        }
        Ok(())
    }

    /// Gives back what a sequence still has, if it lives: for the end of whoever holds its id.
    ///
    /// # Errors
    /// None but those of a fault of ours.
    pub fn release_if_live(&mut self, id: SequenceId) -> Result<()> {
        match self.release(id) {
            Err(Error::Released) => Ok(()),
            other => other,
        }
    }

    /// Publishes full blocks under `names`, made of its [`chain`](Self::chain); how many had no name before. `tokens` are those from the
    /// first of them on whose rows have been written. What is published of the sequence is worth what
    /// `ranges` asks from now on, if that is more than it was.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if rows were not appended yet, if blocks before `start` have no name, or if a block is published under
    /// another key; [`Error::Released`], [`Error::ForeignTable`]. Nothing changes then.
    pub fn publish(
        &mut self,
        id: SequenceId,
        names: &Names,
        tokens: &[TokenId],
        ranges: Option<&Ranges>,
    ) -> Result<u32> {
        let seat = self.seat(id)?;
        live(&mut self.seats, seat).publish(&mut self.pool, self.size, names, tokens, ranges)
    }

    /// Tells the time, by which what [`publish`](Self::publish) asked for ends. It never goes back.
    pub fn tell_time(&mut self, now_us: u64) {
        self.pool.expire(now_us);
    }

    /// What the keys from block number `start` on are made of, beside tokens: the chain, none for a plain one, and the key of the
    /// block before.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if blocks before `start` have no name, [`Error::Released`], [`Error::ForeignTable`].
    pub fn chain(&self, id: SequenceId, start: usize) -> Result<(Option<Chain>, Option<Key>)> {
        let sequence = self.sequence(id)?;
        Ok((sequence.chain.clone(), sequence.parent(&self.pool, self.size, start)?))
    }

    /// Blocks of a sequence, in the order of its tokens; reserved ones stand behind.
    ///
    /// # Errors
    /// [`Error::Released`], [`Error::ForeignTable`].
    pub fn blocks(&self, id: SequenceId) -> Result<&[BlockId]> {
        Ok(self.sequence(id)?.table.blocks())
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::Released`], [`Error::ForeignTable`].
    pub fn rows(&self, id: SequenceId) -> Result<usize> {
        Ok(self.sequence(id)?.rows)
    }

    /// Leading blocks of a sequence that are published.
    ///
    /// # Errors
    /// [`Error::Released`], [`Error::ForeignTable`].
    pub fn named(&self, id: SequenceId) -> Result<usize> {
        Ok(self.sequence(id)?.named)
    }

    /// Rows of KV memory of the tokens `start..stop`.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] unless `start <= stop <=` the tokens of the sequence; [`Error::Released`], [`Error::ForeignTable`].
    pub fn slots(&self, id: SequenceId, start: usize, stop: usize) -> Result<impl Iterator<Item = i64> + '_> {
        let sequence = self.sequence(id)?;
        let bound = |high: usize| format!("must be 0..={high}");
        if stop > sequence.rows {
            return Err(Error::InvalidInput { field: "stop", value: stop as i128, bound: bound(sequence.rows) });
        }
        if start > stop {
            return Err(Error::InvalidInput { field: "start", value: start as i128, bound: bound(stop) });
        }
        Ok((start..stop).map(|row| sequence.table.slot(row, self.size)))
    }

    /// Takes `count` blocks that belong to no sequence.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`]; nothing is taken then.
    pub fn take(&mut self, count: u32) -> Result<&[BlockId]> {
        let mut table = BlockTable { blocks: std::mem::take(&mut self.list) };
        table.blocks.clear();
        let taken = self.pool.take(&mut table, count);
        self.list = table.blocks;
        taken?;
        self.loose.resize(self.pool.num_blocks() as usize, 0);
        for block in &self.list {
            self.loose[block.index()] += 1;
        }
        Ok(&self.list)
    }

    /// One holder more for each entry of `ids`: only of blocks that the caller holds so already. Null blocks are passed over.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`], [`Error::NotHeld`]; nothing changes then.
    pub fn share_blocks(&mut self, ids: impl IntoIterator<Item = u32>) -> Result<()> {
        let table = BlockTable { blocks: self.known(ids)? };
        if let Some(&block) = table.blocks().iter().find(|&&block| !self.is_loose(block)) {
            return Err(Error::NotHeld { block });
        }
        for block in self.pool.fork(&table)?.blocks.into_iter().filter(|&block| block != BlockId::NULL) {
            self.loose[block.index()] += 1;
        }
        Ok(())
    }

    /// Drops one holder for each entry of `ids`, last entry first: only holders that [`take`](Self::take) made. Null blocks are passed
    /// over.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`], [`Error::NotHeld`]; nothing changes then.
    pub fn release_blocks(&mut self, ids: impl IntoIterator<Item = u32>) -> Result<()> {
        let list = self.known(ids)?;
        self.drop_loose(&list)
    }

    /// Forgets all published content that nobody holds; returns how many blocks forgot theirs.
    pub fn forget_unheld(&mut self) -> u32 {
        self.pool.forget_unheld()
    }

    /// Everything as it was at the start: all blocks are free in their first order, all content is forgotten, all ids are dead.
    pub fn reset(&mut self) {
        self.pool.reset();
        self.cache = PrefixCache::new(self.size);
        self.loose.clear();
        if mutant::is_on(Mutant::ResetKeepsTables) {
            self.seats.iter_mut().for_each(|seat| seat.sequence = seat.sequence.take().map(|_| Sequence::default()));
            return;
        }
        self.seats.clear();
        self.free_seats.clear();
    }

    /// Recounts A1 to A4 from all holders, and A7: rows have places, and what counts as published is.
    ///
    /// # Errors
    /// [`Error::Audit`] with the first invariant that does not hold.
    pub fn audit(&self) -> Result<()> {
        let mut loose = BlockTable::new();
        for (id, &holders) in self.loose.iter().enumerate() {
            loose.blocks.extend(std::iter::repeat_n(BlockId(id as u32), holders as usize));
        }
        let sequences = || self.seats.iter().filter_map(|seat| seat.sequence.as_ref());
        self.pool.audit(sequences().map(|sequence| &sequence.table).chain([&loose]))?;
        let wrong = |detail: String| Err(Error::Audit { check: "A7", detail });
        for sequence in sequences() {
            let (rows, named, blocks) = (sequence.rows, sequence.named, sequence.table.blocks());
            if rows > blocks.len() * self.size.tokens() || named > self.size.full_blocks(rows) {
                return wrong(format!("{rows} rows, {named} published blocks, {} blocks", blocks.len()));
            }
            let unnamed = |block: &&BlockId| self.pool.index().state(**block) != KeyState::Published;
            if let Some(block) = blocks[..named].iter().find(unnamed) {
                return wrong(format!("block {} counts as published and is not", block.get()));
            }
        }
        Ok(())
    }

    /// Drops holders that belong to no sequence, all or none.
    fn drop_loose(&mut self, list: &[BlockId]) -> Result<()> {
        for (at, &block) in list.iter().enumerate() {
            if !self.is_loose(block) && !mutant::is_on(Mutant::LooseDropsOthers) {
                self.restore_loose(&list[..at]);
                return Err(Error::NotHeld { block });
            }
            if block != BlockId::NULL && self.is_loose(block) {
                self.loose[block.index()] -= 1;
            }
        }
        self.pool.release_blocks(list, Release::Now)
    }

    /// Whether the caller holds `block` outside of any sequence, or it is the null block, which nobody holds.
    fn is_loose(&self, block: BlockId) -> bool {
        block == BlockId::NULL || self.loose.get(block.index()).is_some_and(|&holders| holders > 0)
    }

    /// Ids from outside as blocks of this pool.
    fn known(&self, ids: impl IntoIterator<Item = u32>) -> Result<Vec<BlockId>> {
        ids.into_iter().map(|id| self.pool.block(id)).collect()
    }

    fn restore_loose(&mut self, list: &[BlockId]) {
        for block in list.iter().filter(|&&block| block != BlockId::NULL) {
            self.loose[block.index()] += 1;
        }
    }

    fn keep(&mut self, sequence: Sequence) -> SequenceId {
        self.serial += 1;
        let seat = Seat { serial: self.serial, sequence: Some(sequence) };
        let at = match self.free_seats.pop() {
            Some(at) => {
                self.seats[at as usize] = seat;
                at
            }
            None => {
                self.seats.push(seat);
                self.seats.len() as u32 - 1
            }
        };
        SequenceId { pool: self.number, seat: at, serial: self.serial }
    }

    /// The seat of a living sequence of this pool.
    fn seat(&self, id: SequenceId) -> Result<usize> {
        if id.pool != self.number && !mutant::is_on(Mutant::ForeignTableTaken) {
            return Err(Error::ForeignTable);
        }
        let at = id.seat as usize;
        let is_live = |seat: &&Seat| {
            (seat.serial == id.serial || mutant::is_on(Mutant::ForeignTableTaken)) && seat.sequence.is_some()
        };
        self.seats.get(at).filter(is_live).map(|_| at).ok_or(Error::Released)
    }

    fn sequence(&self, id: SequenceId) -> Result<&Sequence> {
        let at = self.seat(id)?;
        Ok(self.seats[at].sequence.as_ref().expect("a living sequence"))
    }
}

fn live(seats: &mut [Seat], at: usize) -> &mut Sequence {
    seats[at].sequence.as_mut().expect("a living sequence")
}
