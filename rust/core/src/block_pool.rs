//! Owns every physical KV block: who holds it, what its content is called, and the order in which free ones are handed out.
//!
//! Before: the scheduler asks. After: block tables remember the answer. Between calls
//! `free + held + parked + 1 null == num_blocks`; [`BlockPool::audit`] recounts it from the tables that are alive.
//! Every mutator is all-or-nothing: a refused call leaves counts, queue order and tables as they were.

use crate::block_size::BlockSize;
use crate::block_table::BlockTable;
use crate::error::{Error, Result};
use crate::events::EventLog;
use crate::free_queue::{DEFAULT_LANE, FreeQueue, MAX_BLOCKS};
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::partial_index::PartialIndex;
use crate::prefix_index::PrefixIndex;
use crate::refusal::Act;
use crate::watch::Watch;

mod ahead;
mod audit;
mod content;
mod ledger;
mod owners;
mod parked;
mod retained;
mod tables;
#[cfg(test)]
mod tests;

use ledger::Ledger;

/// What happens to blocks that lose their last holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// They enter the free queue at once.
    Now,
    /// Steps in flight still name them: they wait, as one list, until [`BlockPool::end_leases`] has told of this one's end.
    Until(u64),
}

/// Rows to be copied from one block to another before anything is written: the copy that a write into shared content needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Where the rows are. Its lease must outlive the copy.
    pub source: BlockId,
    /// Where they go: a block with one holder and no name.
    pub target: BlockId,
}

/// Not in a parked list.
const NOT_PARKED: u32 = u32::MAX;

/// The pool.
pub struct BlockPool {
    queue: FreeQueue,
    index: PrefixIndex,
    /// Lists of blocks without holders that a step in flight still names, in order of release, each last block first.
    /// A block that was hit since left the null block in its place.
    parked: Vec<BlockId>,
    /// Where each parked list ends, and the step that it waits for.
    parked_ends: Vec<(usize, u64)>,
    /// Where each block stands in `parked`.
    parked_at: Box<[u32]>,
    num_parked: u32,
    evictions: u64,
    /// What is written down of blocks' contents, if anything is.
    ledger: Option<Box<Ledger>>,
    /// The last time that a plan, a submit or a commit brought.
    now_us: u64,
    /// Its owner asks for everything first: see [`Granted`](crate::refusal::Granted).
    #[cfg(feature = "mutants")]
    asked_first: bool,
}

impl BlockPool {
    /// A pool of `num_blocks` blocks, the null block among them.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if there is no block but the null block, or more of them than the free queue can name.
    pub fn new(num_blocks: u32) -> Result<Self> {
        if !(2..=MAX_BLOCKS).contains(&num_blocks) {
            let bound = format!("must be 2..={MAX_BLOCKS}: block 0 is the null block");
            return Err(Error::InvalidInput { field: "num_blocks", value: i128::from(num_blocks), bound });
        }
        Ok(BlockPool {
            queue: FreeQueue::new(num_blocks),
            index: PrefixIndex::new(num_blocks),
            parked: Vec::new(),
            parked_ends: Vec::new(),
            parked_at: vec![NOT_PARKED; num_blocks as usize].into(),
            num_parked: 0,
            evictions: 0,
            ledger: None,
            now_us: 0,
            #[cfg(feature = "mutants")]
            asked_first: false,
        })
    }

    /// The same pool, which has named nothing yet, telling `events` of every change of the set of published keys.
    #[must_use]
    pub fn recording(mut self, events: EventLog) -> Self {
        self.index.record(events);
        self
    }

    /// Everything as it was at the start, but for the time, and for the events: they tell that all is gone, and their numbers go on.
    pub(crate) fn reset(&mut self) {
        let events = self.index.end();
        let mut fresh = BlockPool::new(self.num_blocks()).expect("the size of the pool that was");
        fresh.ledger = self.ledger.as_ref().and_then(|ledger| ledger.renewed(self.num_blocks()));
        fresh.now_us = self.now_us;
        *self = match events {
            Some(events) => fresh.recording(events),
            None => fresh,
        };
    }

    /// The same pool, which has named nothing yet, remembering what its blocks hold, so that parts of them are found.
    #[must_use]
    pub(crate) fn remembering(mut self, size: BlockSize) -> Self {
        let num_blocks = self.num_blocks();
        self.keep_ledger().remember(num_blocks, size);
        self
    }

    /// The same pool, all of whose memory is there: see [`resident`](crate::resident).
    #[must_use]
    pub(crate) fn brought_in(mut self) -> Self {
        self.queue.bring_in();
        self.index.bring_in();
        self
    }

    /// The same pool, whose owner asks before it does anything that may be refused; a build with faults holds it to that.
    #[must_use]
    #[cfg_attr(not(feature = "mutants"), allow(unused_mut, reason = "nothing is held to anything"))]
    pub(crate) fn asked_first(mut self) -> Self {
        #[cfg(feature = "mutants")]
        {
            self.asked_first = true;
        }
        self
    }

    /// Whether its owner is held to that.
    #[inline(always)]
    pub(crate) const fn is_asked_first(&self) -> bool {
        #[cfg(feature = "mutants")]
        return self.asked_first;
        #[cfg(not(feature = "mutants"))]
        return false;
    }

    /// What blocks hold, if that is remembered.
    pub(crate) fn partial(&self) -> Option<&PartialIndex> {
        self.ledger.as_ref()?.partial.as_ref()
    }

    /// Whether anything is written down of blocks' contents: if not, nothing need be told of them.
    pub(crate) fn has_ledger(&self) -> bool {
        self.ledger.is_some()
    }

    fn keep_ledger(&mut self) -> &mut Ledger {
        self.ledger.get_or_insert_default()
    }

    /// Blocks in all, the null block among them.
    #[must_use]
    pub fn num_blocks(&self) -> u32 {
        self.queue.num_blocks()
    }

    /// Blocks that can ever be handed out.
    #[must_use]
    pub fn usable(&self) -> u32 {
        self.num_blocks() - 1
    }

    /// Blocks in the free queue.
    #[must_use]
    pub fn num_free(&self) -> u32 {
        self.queue.len()
    }

    /// Blocks without holders that a step in flight still names.
    #[must_use]
    pub fn num_parked(&self) -> u32 {
        self.num_parked
    }

    /// Blocks that somebody holds.
    #[must_use]
    pub fn num_held(&self) -> u32 {
        self.usable() - self.num_free() - self.num_parked()
    }

    /// How often published content was given up because its block was handed out.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Holders of `block`; none of a block that this pool does not have.
    #[must_use]
    pub fn holders(&self, block: BlockId) -> u32 {
        if block.get() < self.num_blocks() { self.queue.holders(block) } else { 0 }
    }

    /// The names of the blocks' contents.
    #[must_use]
    pub fn index(&self) -> &PrefixIndex {
        &self.index
    }

    /// Who wants to know when a key appears or goes.
    pub(crate) fn watch_mut(&mut self) -> &mut Watch {
        &mut self.index.watch
    }

    /// Whether `block` stands in the free queue.
    #[must_use]
    pub fn is_free(&self, block: BlockId) -> bool {
        block != BlockId::NULL && self.holders(block) == 0 && self.parked_at.get(block.index()) == Some(&NOT_PARKED)
    }

    /// Whether a hit of `block` takes a free block away: nobody holds it, and it is not parked.
    pub(crate) fn takes_free(&self, block: BlockId) -> bool {
        if mutant::is_on(Mutant::ParkedHitTakesFree) { self.holders(block) == 0 } else { self.is_free(block) }
    }

    /// Free blocks, the next one to be taken first.
    pub fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.queue.iter()
    }

    /// Bytes that the pool keeps for each block.
    #[must_use]
    pub fn bytes_per_block(&self) -> f64 {
        let partial = self.partial().map_or(0.0, |partial| partial.bytes_per_block());
        (FreeQueue::bytes_per_block() + size_of::<u32>()) as f64 + self.index.bytes_per_block() + partial
    }

    /// A block id from outside.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] at or past the end of the pool.
    pub fn block(&self, id: u32) -> Result<BlockId> {
        if id < self.num_blocks() {
            return Ok(BlockId(id));
        }
        Err(Error::NoSuchBlock { block: id, num_blocks: self.num_blocks() })
    }

    /// Appends `count` blocks from the head of the queue to `table`. What was published in them is forgotten.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] if fewer are free; nothing is taken then.
    pub fn take(&mut self, table: &mut BlockTable, count: u32) -> Result<()> {
        self.take_run(table, count).map(|_lost| ())
    }

    /// The same; which of the first 64 lost published content, a bit for each. With shares it is one bit for all.
    ///
    /// # Errors
    /// As [`BlockPool::take`].
    pub(crate) fn take_run(&mut self, table: &mut BlockTable, count: u32) -> Result<u64> {
        let start = table.blocks.len();
        let (needed, free) = (count, self.queue.len());
        let count = if mutant::is_on(Mutant::PartialTake) { needed.min(free) } else { needed };
        if count > free {
            return Err(Error::OutOfBlocks { needed, free });
        }
        self.must_be_granted_blocks(count);
        table.blocks.resize(start + count as usize, BlockId::NULL);
        let (out, before) = (&mut table.blocks[start..], self.evictions);
        let taken = if self.shares().is_some() { self.take_by_share(out) } else { self.queue.take(out) };
        if let Err(error) = taken {
            table.blocks.truncate(start);
            return Err(error);
        }
        let lost = self.evict(&table.blocks[start..]) | u64::from(self.shares().is_some() && self.evictions > before);
        if count < needed { Err(Error::OutOfBlocks { needed, free }) } else { Ok(lost) }
    }

    /// Blocks were handed out: what was in them is forgotten. Which of the first 64 lost published content, a bit for each.
    fn evict(&mut self, blocks: &[BlockId]) -> u64 {
        let mut lost = 0;
        for (at, &block) in blocks.iter().enumerate() {
            if !mutant::is_on(Mutant::KeepKeyOnReuse) && self.forget(block) {
                self.evictions += 1;
                lost |= 1_u64.checked_shl(at as u32).unwrap_or_default();
            }
        }
        lost
    }

    /// Appends a block that holds wanted content to `table`: one holder more. A free one leaves the queue, a parked one its list.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id of another pool; [`Error::NotHeld`] if the content has no name (any more): a hit is looked up and held in one call, or not at all.
    pub fn share(&mut self, table: &mut BlockTable, block: BlockId) -> Result<()> {
        if block == BlockId::NULL {
            return Err(Error::NotHeld { block });
        }
        self.share_all(table, &[block])
    }

    /// The same for blocks of a chain, in its order. Null blocks are appended as they are. Costs least where the blocks stand in the
    /// queue as a release of the chain put them there.
    ///
    /// # Errors
    /// As [`BlockPool::share`], for any of them. Nothing changes then.
    pub fn share_all(&mut self, table: &mut BlockTable, blocks: &[BlockId]) -> Result<()> {
        for &block in blocks.iter().filter(|&&block| block != BlockId::NULL) {
            self.block(block.get())?;
            if !self.queue.is_hittable(block) && !self.is_parked_hit(block) {
                return Err(Error::NotHeld { block });
            }
            self.must_be_granted(Act::Share, block);
            self.must_be_granted_blocks(u32::from(self.is_free(block)));
        }
        let mut rest = blocks;
        while let Some(&block) = rest.first() {
            let len = match block {
                BlockId::NULL => 1,
                _ => self.hit_head(rest),
            };
            rest = &rest[len..];
        }
        table.blocks.extend_from_slice(blocks);
        Ok(())
    }

    /// Hits at least the first of `blocks`, which can be hit; returns how many.
    fn hit_head(&mut self, blocks: &[BlockId]) -> usize {
        let block = blocks[0];
        if mutant::is_on(Mutant::HitKeepsInQueue) && self.queue.lane(block).is_some() {
            self.queue.hold_freed(block);
            return 1;
        }
        let mut hit = self.queue.share_all(if mutant::is_on(Mutant::SkipRefOnHit) { &blocks[..1] } else { blocks });
        if hit == 0 {
            self.unpark(block);
            hit = 1;
        }
        if mutant::is_on(Mutant::SkipRefOnHit) {
            let _ = self.queue.drop_holders(&[block], |_| DEFAULT_LANE);
        }
        hit
    }

    /// Gives back all blocks of `table`, last block first, as one list (design 1, 14).
    pub fn release(&mut self, mut table: BlockTable, when: Release) {
        if mutant::is_on(Mutant::LeakBlockOnFinish) {
            table.blocks.pop();
        }
        let again = mutant::is_on(Mutant::DoubleFree).then(|| table.blocks.clone());
        self.release_blocks(&table.blocks, when).expect("a table holds what it names");
        if let Some(blocks) = again {
            let _ = self.release_blocks(&blocks, when);
        }
    }

    /// Drops one holder for each entry of `blocks`, last entry first. Null blocks are passed over, as tables may name them.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id of another pool; [`Error::NotHeld`] if an entry has no holder left. Nothing changes then.
    pub fn release_blocks(&mut self, blocks: &[BlockId], when: Release) -> Result<()> {
        let freed = match &self.ledger {
            None => self.queue.drop_holders(blocks, |_| DEFAULT_LANE)?,
            Some(_) => self.drop_in_ledger(blocks)?,
        };
        if freed.has_named() {
            self.withdraw_pending(&freed);
        }
        match when {
            Release::Now => self.queue.enqueue(freed),
            Release::Until(step) => self.park(&freed, step),
        }
        Ok(())
    }
}
