//! Owns every physical KV block: who holds it, what its content is called, and the order in which free ones are handed out.
//!
//! Before: the scheduler asks. After: block tables remember the answer. Between calls
//! `free + held + parked + 1 null == num_blocks`; [`BlockPool::audit`] recounts it from the tables that are alive.
//! Every mutator is all-or-nothing: a refused call leaves counts, queue order and tables as they were.

use crate::block_size::BlockSize;
use crate::block_table::BlockTable;
use crate::error::{Error, Result};
use crate::events::{Content, EventLog};
use crate::free_queue::{DEFAULT_LANE, FreeQueue, Freed, MAX_BLOCKS};
use crate::ids::{BlockId, Key};
use crate::mutant::{self, Mutant};
use crate::partial_index::PartialIndex;
use crate::prefix_index::{KeyState, PrefixIndex};
use crate::retention::{self, Kept, Retention, Worth};
use crate::watch::Watch;

/// What happens to blocks that lose their last holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// They enter the free queue at once.
    Now,
    /// A step in flight still names them: they wait, as one list, for [`BlockPool::end_leases`].
    Parked,
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
    /// What blocks hold, if parts of them may be reused.
    partial: Option<Box<PartialIndex>>,
    /// Lists of blocks without holders that a step in flight still names, in order of release, each last block first.
    /// A block that was hit since left the null block in its place.
    parked: Vec<BlockId>,
    /// Where each parked list ends.
    parked_ends: Vec<usize>,
    /// Where each block stands in `parked`.
    parked_at: Box<[u32]>,
    num_parked: u32,
    evictions: u64,
    /// What blocks are worth, from the first request on that asks for something.
    retention: Option<Kept>,
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
            partial: None,
            parked: Vec::new(),
            parked_ends: Vec::new(),
            parked_at: vec![NOT_PARKED; num_blocks as usize].into(),
            num_parked: 0,
            evictions: 0,
            retention: None,
        })
    }

    /// The same pool, which has named nothing yet, telling `events` of every change of the set of published keys.
    #[must_use]
    pub fn recording(mut self, events: EventLog) -> Self {
        self.index.record(events);
        self
    }

    /// The same pool, which has named nothing yet, remembering what its blocks hold, so that parts of them are found.
    #[must_use]
    pub(crate) fn remembering(mut self, size: BlockSize) -> Self {
        self.partial = Some(Box::new(PartialIndex::new(self.num_blocks(), size)));
        self
    }

    /// What blocks hold, if that is remembered.
    pub(crate) fn partial(&self) -> Option<&PartialIndex> {
        self.partial.as_deref()
    }

    /// What `block`, which was just made pending under `key`, will hold. `mark` is a hash of its parent, its fields and its first tokens.
    pub(crate) fn remember(&mut self, block: BlockId, key: Key, mark: u64, tokens: &[crate::ids::TokenId]) {
        if let Some(partial) = &mut self.partial
            && self.index.state(block) == KeyState::Pending
            && self.index.key(block) == Some(key)
        {
            partial.describe(block, mark, tokens);
        }
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

    /// Free blocks, the next one to be taken first.
    pub fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.queue.iter()
    }

    /// Bytes that the pool keeps for each block.
    #[must_use]
    pub fn bytes_per_block(&self) -> f64 {
        let partial = self.partial.as_ref().map_or(0.0, |partial| partial.bytes_per_block());
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
        let start = table.blocks.len();
        let (needed, free) = (count, self.queue.len());
        let count = if mutant::is_on(Mutant::PartialTake) { needed.min(free) } else { needed };
        if count > free {
            return Err(Error::OutOfBlocks { needed, free });
        }
        table.blocks.resize(start + count as usize, BlockId::NULL);
        if let Err(error) = self.queue.take(&mut table.blocks[start..]) {
            table.blocks.truncate(start);
            return Err(error);
        }
        for &block in &table.blocks[start..] {
            if !mutant::is_on(Mutant::KeepKeyOnReuse) && forget(&mut self.index, &mut self.partial, block) {
                self.evictions += 1;
            }
        }
        if count < needed { Err(Error::OutOfBlocks { needed, free }) } else { Ok(()) }
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
        }
        let mut rest = blocks;
        while let Some(&block) = rest.first() {
            let len = match block {
                BlockId::NULL => 1,
                _ => self.hit_head(rest),
            };
            rest = &rest[len..];
        }
        if let Some(retention) = &mut self.retention {
            blocks.iter().for_each(|&block| retention.hit(block));
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
        let freed = match &mut self.retention {
            None => self.queue.drop_holders(blocks, |_| DEFAULT_LANE)?,
            Some(retention) => {
                let freed = self.queue.drop_holders(blocks, |block| retention.worth(block).priority)?;
                self.queue.freed_ids(&freed).for_each(|block| retention.released(block));
                freed
            }
        };
        if freed.has_named() {
            self.withdraw_pending(&freed);
        }
        match when {
            Release::Now => self.queue.enqueue(freed),
            Release::Parked => self.park(&freed),
        }
        Ok(())
    }

    /// From now on blocks may be worth more or less than the default. Takes the memory for that, once.
    pub fn use_retention(&mut self) {
        if self.retention.is_none() {
            self.retention = retention::keep(self.num_blocks());
        }
    }

    /// What blocks are worth, if that is in use.
    #[must_use]
    pub fn retention(&self) -> Option<&Retention> {
        self.retention.as_deref()
    }

    /// Who writes or hits the content of `block`, number `number` of its chain, asks `asked` for it. Without retention in use nothing
    /// happens.
    pub fn ask(&mut self, block: BlockId, number: usize, asked: Worth) {
        if let Some(retention) = &mut self.retention
            && block != BlockId::NULL
        {
            retention.ask(block, number, asked);
        }
    }

    /// Tells the time, from which releases count.
    pub fn tell_time(&mut self, now_us: u64) {
        if let Some(retention) = &mut self.retention {
            retention.tell_time(now_us);
        }
    }

    /// Free blocks whose time is over at `now_us` join the tail of the default lane, in the order in which their times ended.
    pub fn expire(&mut self, now_us: u64) {
        let Some(retention) = &mut self.retention else { return };
        retention.begin_expiry(now_us);
        while let Some((block, due_us)) = retention.next_over() {
            if self.queue.is_out(block) {
                retention.wait(block, due_us);
            } else if self.queue.lane(block).is_some() && !mutant::is_on(Mutant::NothingExpires) {
                retention.fall(block);
                self.queue.move_to_lane(block, DEFAULT_LANE).expect("a block in a lane is free");
            }
        }
    }

    /// A second table over the blocks of `table`, each with one holder more. Costs O(blocks) and copies no row.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] or [`Error::NotHeld`] for the table of another pool; nothing changes then.
    pub fn fork(&mut self, table: &BlockTable) -> Result<BlockTable> {
        self.fork_head(table, table.len())
    }

    /// The same for the first `len` entries of `table`, or all if there are fewer.
    ///
    /// # Errors
    /// As [`BlockPool::fork`].
    pub fn fork_head(&mut self, table: &BlockTable, len: usize) -> Result<BlockTable> {
        let head = &table.blocks[..len.min(table.len())];
        let missed = usize::from(mutant::is_on(Mutant::ForkMissesLast)).min(head.len());
        self.queue.hold_all(&head[..head.len() - missed])?;
        Ok(BlockTable { blocks: head.to_vec() })
    }

    /// Cuts `table` to the blocks of its first `rows` rows. The others are given back as one list, last block first. The rows that
    /// are cut off inside the last block stay written; who writes over them asks [`BlockPool::make_writable`] first.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if the table has fewer rows; [`Error::NotHeld`] or [`Error::NoSuchBlock`] for the table of another
    /// pool. Nothing changes then.
    pub fn truncate(&mut self, table: &mut BlockTable, rows: usize, size: BlockSize, when: Release) -> Result<()> {
        if rows > table.len() * size.tokens() {
            let bound = format!("must be at most {}, the rows of the table", table.len() * size.tokens());
            return Err(Error::InvalidInput { field: "rows", value: rows as i128, bound });
        }
        let kept =
            if mutant::is_on(Mutant::TruncateKeepsBlock) { rows / size.tokens() + 1 } else { size.blocks_for(rows) };
        let cut = table.blocks.get(kept..).unwrap_or(&[]);
        self.release_blocks(cut, when)?;
        table.blocks.truncate(kept);
        Ok(())
    }

    /// Makes entry `index` of `table` a block that this table alone holds and that nobody can find by a key, so that its rows may be
    /// written. A block that is so already stays: the last owner writes in place. Otherwise a free block takes its place, the
    /// old one loses a holder, and the rows to be kept must be copied before the write; `when` says from when on the old one may be
    /// handed out, should nobody hold it any more.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`]; [`Error::InvalidInput`] if the table has no such entry; [`Error::NotHeld`] or
    /// [`Error::NoSuchBlock`] if the entry is the null block or of another pool; [`Error::BeingWritten`] if a step in flight writes
    /// the rows that would be copied. Nothing changes then.
    pub fn make_writable(&mut self, table: &mut BlockTable, index: usize, when: Release) -> Result<Option<BlockCopy>> {
        let Some(&source) = table.blocks.get(index) else {
            let bound = format!("must be below {}, the blocks of the table", table.len());
            return Err(Error::InvalidInput { field: "index", value: index as i128, bound });
        };
        self.block(source.get())?;
        match (self.holders(source), self.index.state(source)) {
            (0, _) => return Err(Error::NotHeld { block: source }),
            (1, KeyState::Unnamed) => return Ok(None),
            (_, KeyState::Pending) => return Err(Error::BeingWritten { block: source }),
            _ if mutant::is_on(Mutant::WriteInPlace) => return Ok(None),
            _ => {}
        }
        self.take(table, 1)?;
        let target = table.blocks.pop().expect("the block just taken");
        table.blocks[index] = target;
        if !mutant::is_on(Mutant::CopyKeepsHolder) {
            self.release_blocks(&[source], when)?;
        }
        Ok(Some(BlockCopy { source, target }))
    }

    /// The step in flight has ended: parked lists enter the queue, in order of their release.
    pub fn end_leases(&mut self) {
        let mut start = 0;
        for &end in &self.parked_ends {
            for block in self.parked[start..end].iter().filter(|&&block| block != BlockId::NULL) {
                self.parked_at[block.index()] = NOT_PARKED;
            }
            self.queue.enqueue(self.queue.freed_again(&self.parked[start..end]));
            start = end;
        }
        self.parked.clear();
        self.parked_ends.clear();
        self.num_parked = 0;
    }

    /// Names the content that the step in flight completes in `block`. A block that nobody holds gets no name, nor does the null block.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id of another pool.
    pub fn make_pending(&mut self, block: BlockId, key: Key) -> Result<()> {
        self.block(block.get())?;
        if self.queue.name(block).is_ok() {
            if let Some(retention) = &mut self.retention
                && self.index.state(block) == KeyState::Unnamed
            {
                retention.begin(block);
            }
            self.index.make_pending(block, key);
        }
        Ok(())
    }

    /// Says what `block`, which was just made pending under `key`, will hold. Only events need to know.
    pub fn describe(&mut self, block: BlockId, key: Key, content: Content<'_>) {
        self.index.describe(block, key, content);
    }

    /// The content of `block` is confirmed and may be found by its key. Without a pending name nothing happens.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id of another pool.
    pub fn publish(&mut self, block: BlockId) -> Result<()> {
        self.block(block.get())?;
        let was_pending = self.index.state(block) == KeyState::Pending;
        self.index.publish(block);
        if was_pending
            && let Some(partial) = &mut self.partial
            && self.index.key(block).and_then(|key| self.index.lookup(&key)) == Some((block, KeyState::Published))
        {
            partial.insert(block, &self.index);
        }
        Ok(())
    }

    /// Takes a name away: the step that writes the content failed, or its writer is gone.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id of another pool.
    pub fn withdraw(&mut self, block: BlockId) -> Result<()> {
        self.queue.unname(block)?;
        forget(&mut self.index, &mut self.partial, block);
        Ok(())
    }

    /// Forgets all published content that nobody holds; returns how many blocks forgot theirs. Those that were worth more than the
    /// default join the tail of its lane, in order of their ids.
    pub fn forget_unheld(&mut self) -> u32 {
        self.level_unheld();
        let (queue, partial) = (&self.queue, &mut self.partial);
        let all = || (1..queue.num_blocks()).map(BlockId);
        let is_unheld = |block: &BlockId| queue.holders(*block) == 0;
        let mut forget_all = |index: &mut PrefixIndex| {
            let unname = |block: BlockId| queue.unname(block).map_or(0, |()| u32::from(forget(index, partial, block)));
            all().filter(is_unheld).map(unname).sum()
        };
        let mut kept = all().filter(|block| !is_unheld(block));
        let keeps_some = kept.any(|block| self.index.state(block) == KeyState::Published);
        if keeps_some && !mutant::is_on(Mutant::EventClearsHeld) {
            return forget_all(&mut self.index);
        }
        self.index.clear(forget_all)
    }

    /// What nobody holds is worth the default: its content is about to be forgotten.
    fn level_unheld(&mut self) {
        let Some(retention) = &mut self.retention else { return };
        for block in (1..self.queue.num_blocks()).map(BlockId).filter(|&block| self.queue.holders(block) == 0) {
            retention.forget(block);
            if self.index.state(block) == KeyState::Published
                && self.queue.lane(block).is_some_and(|lane| lane > DEFAULT_LANE)
            {
                self.queue.move_to_lane(block, DEFAULT_LANE).expect("a named block in a lane is free");
            }
        }
    }

    /// Recounts A1 to A4 from `tables`, all tables that are alive.
    ///
    /// # Errors
    /// [`Error::Audit`] with the first invariant that does not hold.
    pub fn audit<'a>(&self, tables: impl IntoIterator<Item = &'a BlockTable>) -> Result<()> {
        let wrong = |check: &'static str, detail: String| Err(Error::Audit { check, detail });
        let mut named = vec![0u32; self.num_blocks() as usize];
        for block in tables.into_iter().flat_map(|table| &table.blocks) {
            named[block.index()] += u32::from(*block != BlockId::NULL);
        }
        let holders: Vec<u32> = (0..self.num_blocks()).map(|id| self.holders(BlockId(id))).collect();
        if let Some(id) = (0..named.len()).find(|&id| named[id] != holders[id]) {
            return wrong("A2", format!("block {id} has {} holders, tables name it {} times", holders[id], named[id]));
        }
        self.queue.audit_walks()?;
        let mut places = vec![0u32; holders.len()];
        let parked = self.parked.iter().copied().filter(|&block| block != BlockId::NULL);
        for block in self.queue.iter().chain(parked) {
            places[block.index()] += 1;
        }
        let stand = |id: &usize| self.parked_at[*id] != NOT_PARKED;
        let misplaced = |id: &usize| self.parked[self.parked_at[*id] as usize].index() != *id;
        if let Some(id) = (0..named.len()).filter(stand).find(misplaced) {
            return wrong("A3", format!("block {id} does not stand at its place among the parked blocks"));
        }
        let held = holders.iter().filter(|&&holders| holders > 0).count();
        let total = self.queue.len() as usize + held + self.num_parked as usize + 1;
        if total != holders.len() || holders[0] != 0 || places[0] != 0 {
            return wrong("A1", format!("free + held + parked + null is {total} of {}", holders.len()));
        }
        for (id, (&places, &holders)) in places.iter().zip(&holders).enumerate().skip(1) {
            if places != u32::from(holders == 0) {
                return wrong(
                    "A3",
                    format!("block {id} has {holders} holders and stands in {places} places of the queue"),
                );
            }
        }
        self.queue.audit_places()?;
        self.index.audit()?;
        self.partial.as_ref().map_or(Ok(()), |partial| partial.audit(&self.index))
    }

    /// A pending name whose last holder is gone: nobody writes its content any more.
    fn withdraw_pending(&mut self, freed: &Freed) {
        for block in self.queue.freed_ids(freed) {
            if self.index.state(block) == KeyState::Pending {
                self.index.forget(block);
                self.queue.unname(block).expect("a block of this pool");
            }
        }
    }

    /// Whether `block` waits for the end of a step and its content has a name.
    fn is_parked_hit(&self, block: BlockId) -> bool {
        self.parked_at[block.index()] != NOT_PARKED && self.queue.is_named(block)
    }

    /// Takes a block, hit while it was parked, out of its list: it enters the queue when that hit ends (design 14).
    fn unpark(&mut self, block: BlockId) {
        let at = std::mem::replace(&mut self.parked_at[block.index()], NOT_PARKED);
        assert!(at != NOT_PARKED, "{block:?} can be hit");
        if !mutant::is_on(Mutant::HitStaysParked) {
            self.parked[at as usize] = BlockId::NULL;
            self.num_parked -= 1;
        }
        self.queue.hold_freed(block);
    }

    fn park(&mut self, freed: &Freed) {
        if freed.is_empty() {
            return;
        }
        for block in self.queue.freed_ids(freed) {
            self.parked_at[block.index()] = self.parked.len() as u32;
            self.parked.push(block);
        }
        self.num_parked += freed.len();
        self.parked_ends.push(self.parked.len());
    }
}

/// Takes the name of a block's content away; true if it was published. Another block may stand for its key from now on.
fn forget(index: &mut PrefixIndex, partial: &mut Option<Box<PartialIndex>>, block: BlockId) -> bool {
    let Some(partial) = partial else { return index.forget(block) };
    let stood_for = index.key(block).filter(|key| index.lookup(key) == Some((block, KeyState::Published)));
    let was_published = index.forget(block);
    if let Some(key) = stood_for
        && !mutant::is_on(Mutant::PartialKeepsForgotten)
    {
        match index.lookup(&key) {
            Some((next, KeyState::Published)) => partial.replace(block, next),
            _ => partial.remove(block, index),
        }
    }
    was_published
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(num_blocks: u32) -> BlockPool {
        BlockPool::new(num_blocks).unwrap()
    }

    fn taken(pool: &mut BlockPool, count: u32) -> BlockTable {
        let mut table = BlockTable::new();
        pool.take(&mut table, count).unwrap();
        table
    }

    fn publish(pool: &mut BlockPool, block: BlockId, name: u8) {
        pool.make_pending(block, Key([name; 32])).unwrap();
        pool.publish(block).unwrap();
    }

    fn free(pool: &BlockPool) -> Vec<u32> {
        pool.free_blocks().map(BlockId::get).collect()
    }

    #[test]
    fn released_blocks_join_the_end_that_their_content_deserves_last_block_first() {
        let mut pool = pool(11);
        let table = taken(&mut pool, 4);
        for (name, &block) in table.blocks()[..3].iter().enumerate() {
            publish(&mut pool, block, name as u8);
        }
        pool.release(table, Release::Now);
        assert_eq!(free(&pool), [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]);
        pool.audit([]).unwrap();
    }

    #[test]
    fn a_take_that_does_not_fit_changes_nothing() {
        let mut pool = pool(4);
        let mut table = taken(&mut pool, 2);
        assert_eq!(pool.take(&mut table, 2), Err(Error::OutOfBlocks { needed: 2, free: 1 }));
        assert_eq!((table.len(), free(&pool)), (2, vec![3]));
        pool.audit([&table]).unwrap();
    }

    #[test]
    fn a_block_listed_twice_is_queued_once_and_a_release_too_many_is_refused_as_a_whole() {
        let mut pool = pool(5);
        let mut first = taken(&mut pool, 2);
        let b = first.blocks()[0];
        publish(&mut pool, b, 1);
        pool.share(&mut first, b).unwrap();
        let list = [b, BlockId::NULL, BlockId::NULL, b];
        pool.release_blocks(&list, Release::Now).unwrap();
        assert_eq!(free(&pool), [3, 4, 1]);
        let before = free(&pool);
        let other = first.blocks()[1];
        assert_eq!(pool.release_blocks(&[b, other], Release::Now), Err(Error::NotHeld { block: b }));
        assert_eq!(pool.holders(other), 1, "the refused call gave its other block back to its holder");
        assert_eq!(free(&pool), before);
    }

    #[test]
    fn a_hit_leaves_the_middle_of_the_queue_and_what_is_handed_out_is_forgotten() {
        let mut pool = pool(4);
        let table = taken(&mut pool, 3);
        for (name, &block) in table.blocks().iter().enumerate() {
            publish(&mut pool, block, name as u8);
        }
        pool.release(table, Release::Now);
        assert_eq!(free(&pool), [3, 2, 1]);
        let (hit, state) = pool.index().lookup(&Key([1; 32])).unwrap();
        assert_eq!((hit.get(), state), (2, KeyState::Published));
        let mut table = BlockTable::new();
        pool.share(&mut table, hit).unwrap();
        assert_eq!(free(&pool), [3, 1]);
        let other = taken(&mut pool, 2);
        assert_eq!(pool.index().lookup(&Key([0; 32])), None);
        assert_eq!(pool.evictions(), 2);
        pool.audit([&table, &other]).unwrap();
    }

    #[test]
    fn a_hit_whose_content_is_gone_is_refused() {
        let mut pool = pool(3);
        let mut table = BlockTable::new();
        let block = pool.block(1).unwrap();
        assert_eq!(pool.share(&mut table, block), Err(Error::NotHeld { block }));
        assert_eq!(pool.block(3), Err(Error::NoSuchBlock { block: 3, num_blocks: 3 }));
        pool.audit([&table]).unwrap();
    }

    #[test]
    fn parked_lists_enter_the_queue_in_order_when_their_step_has_ended() {
        let mut pool = pool(6);
        let (first, second) = (taken(&mut pool, 2), taken(&mut pool, 2));
        pool.release(first, Release::Parked);
        pool.release(second, Release::Parked);
        assert_eq!((free(&pool), pool.num_parked()), (vec![5], 4));
        pool.audit([]).unwrap();
        pool.end_leases();
        assert_eq!((free(&pool), pool.num_parked()), (vec![4, 3, 2, 1, 5], 0));
        pool.audit([]).unwrap();
    }

    #[test]
    fn a_block_hit_while_it_is_parked_leaves_its_list() {
        let mut pool = pool(5);
        let table = taken(&mut pool, 3);
        let hit = table.blocks()[1];
        publish(&mut pool, hit, 1);
        pool.release(table, Release::Parked);
        let mut table = BlockTable::new();
        pool.share(&mut table, hit).unwrap();
        pool.audit([&table]).unwrap();
        pool.end_leases();
        assert_eq!(free(&pool), [3, 1, 4]);
        pool.release(table, Release::Now);
        assert_eq!(free(&pool), [3, 1, 4, 2]);
        pool.audit([]).unwrap();
    }

    #[test]
    fn ids_of_another_pool_and_names_of_the_null_block_change_nothing() {
        let mut pool = pool(4);
        let foreign = BlockPool::new(50).unwrap().block(40).unwrap();
        let refused = Err(Error::NoSuchBlock { block: 40, num_blocks: 4 });
        let mut table = taken(&mut pool, 1);
        assert_eq!(pool.share(&mut table, foreign), refused);
        assert_eq!(pool.release_blocks(&[table.blocks()[0], foreign], Release::Now), refused);
        assert_eq!(pool.make_pending(foreign, Key([1; 32])), refused);
        assert_eq!((pool.publish(foreign), pool.withdraw(foreign)), (refused.clone(), refused.clone()));
        assert_eq!((pool.holders(foreign), pool.index().state(foreign)), (0, KeyState::Unnamed));
        pool.make_pending(BlockId::NULL, Key([1; 32])).unwrap();
        assert_eq!(pool.index().lookup(&Key([1; 32])), None);
        pool.audit([&table]).unwrap();
    }

    #[test]
    fn content_that_is_forgotten_is_worth_the_default_and_its_time_is_never_over() {
        let mut pool = pool(5);
        pool.use_retention();
        let table = taken(&mut pool, 2);
        for (name, &block) in table.blocks().iter().enumerate() {
            publish(&mut pool, block, name as u8);
            pool.ask(block, name, Worth { priority: 80, time_us: 10 });
        }
        let held = taken(&mut pool, 1);
        publish(&mut pool, held.blocks()[0], 9);
        pool.release(table, Release::Now);
        assert_eq!(pool.forget_unheld(), 2);
        pool.expire(20);
        pool.release(held, Release::Now);
        assert_eq!(free(&pool), [4, 1, 2, 3], "what holds nothing goes before what is cached");
        pool.audit([]).unwrap();
    }

    #[test]
    fn a_pool_without_a_usable_block_is_refused() {
        for num_blocks in [0, 1, u32::MAX] {
            assert!(matches!(BlockPool::new(num_blocks), Err(Error::InvalidInput { field: "num_blocks", .. })));
        }
    }

    #[test]
    fn uncached_blocks_are_reused_at_once_whatever_the_pool_size() {
        let mut pool = pool(1000);
        for _ in 0..100 {
            let table = taken(&mut pool, 1);
            assert_eq!(table.blocks()[0].get(), 1);
            pool.release(table, Release::Now);
        }
    }

    #[test]
    fn hits_refresh_recency_so_the_least_recently_used_goes_first() {
        let mut pool = pool(5);
        let table = taken(&mut pool, 4);
        for (name, &block) in table.blocks().iter().enumerate() {
            publish(&mut pool, block, name as u8);
            pool.release_blocks(&[block], Release::Now).unwrap();
        }
        let (a, _) = pool.index().lookup(&Key([0; 32])).unwrap();
        let mut hit = BlockTable::new();
        pool.share(&mut hit, a).unwrap();
        pool.release(hit, Release::Now);
        let victims: Vec<u32> = taken(&mut pool, 2).blocks().iter().map(|block| block.get()).collect();
        assert_eq!(victims, [2, 3], "b, then c; a was used last");
    }
}
