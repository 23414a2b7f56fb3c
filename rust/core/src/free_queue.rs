//! The free blocks in the order in which they are handed out, and the holders of all others: lock-free, shared by any threads.
//!
//! Before: [`BlockPool`](crate::block_pool::BlockPool) and every thread that takes, shares or releases. After: block tables name what
//! they hold. Between calls each block but the null block is fresh, in the stack, in one lane, held, or out (its last holder gave it
//! up and has not queued it yet): see [`FreeQueue::audit`].
//!
//! # The order
//!
//! One deque (design 1): a released list goes last block first, unnamed blocks before the head, named ones behind the tail; takes come
//! from the head; a hit takes a named block out of the middle. Its three parts keep it in that order:
//!
//! ```text
//! head → [stack: released without content] [fresh: never handed out, ascending] [lanes: named content, oldest first] ← tail
//! ```
//!
//! Only the head gets unnamed blocks and only the tail named ones, so "the stack, then fresh ids, then the lanes from the lowest" is the
//! whole order, and exact while one thread calls. A block gets a name only while it is held, so what is hit stands in a lane or is held.
//!
//! # The parts
//!
//! - **stack**: Treiber's stack (1986) with a version in its head; a list goes in, and up to 32 blocks come out, with one exchange.
//! - **fresh**: a counter. A new pool is zeroed memory.
//! - **lanes**: rings linked both ways. Linked lists with removal from the middle usually mark a node before it leaves, and mend the
//!   neighbours' links afterwards (Harris 2001 one way; Sundell and Tsigas 2008 both ways, the link backwards being a hint). Then a
//!   node may not be used again while a stalled thread can still reach it, which needs a scheme to reclaim nodes. Here the nodes are
//!   the blocks and are wanted back at once, so the lanes take one operation at a time: it stands in one word, and who finds it there
//!   carries it out first (Barnes 1993, "A method for implementing lock-free shared data structures"). Both links are always exact.
//! - **permits**: a counter of blocks that can be taken. A take of n, or a hit of a free block, gets its permits first and then finds
//!   its blocks without fail; a release queues its blocks first and then adds permits. So there are never more permits than blocks.
//! - **holders**: a count in the block's state word, changed by compared exchanges: it never falls below zero.
//!
//! # When a call takes effect
//!
//! A take: for its refusal, when it finds too few permits; else for each block when the exchange of the stack's head, of the fresh
//! counter, or the writing of a lane operation succeeds. A hit: when the count of the held block grows, or the lane operation is
//! written. A release: for its counts one by one; for its blocks when the list is on the stack, or the push stands in the word. Another
//! thread may see the two ends of one release one after the other.
//!
//! # Progress
//!
//! An exchange fails only because another one succeeded, and a lane operation that is under way is carried out by whoever meets it,
//! in at most 35 exchanges for a take of 32, 19 for hits of 16 blocks of a chain, and 5 otherwise. So some call always ends, whoever has stopped, and wherever; tested at every
//! access. Nothing is allocated. Memory is three words a block. A thread that stops for ever keeps the blocks and permits of its call.
//!
//! # Limits
//!
//! - A take that runs beside a hit may be refused although a block is free: the hit held a permit at that moment and lost its race.
//!   A hit of a chain holds up to 16 permits, and some of them may be more than it needs.
//!   A hit may likewise miss: the content stands in a list that is just being released, or takes hold all permits.
//! - Takes look at the parts one after the other. A take that found the stack empty goes on behind it although a block comes there
//!   meanwhile; a take of many blocks is many takes of one. Lists that are released at once may interleave as whole chains.
//! - A version is 32 bits (31 for operations): a thread would have to sleep through exactly 2³² changes of one word to be misled.
//! - What is released must be held by who releases it. One release too many is refused if nobody holds the block; of a block that
//!   another holds it takes that holder away.

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::sync::{Alone, AtomicU64, Ordering};

mod holders;
mod lanes;
mod node;
mod stack;
#[cfg(all(test, not(loom)))]
mod tests;
mod walk;

use lanes::Lanes;
pub use lanes::{DEFAULT_LANE, LANES, MAX_BLOCKS};
pub(crate) use node::MAX_HOLDERS;
use node::{Nodes, Place, State, low};
use stack::Stack;

/// The queue and the counts. Lock-free: see the module.
pub struct FreeQueue {
    nodes: Nodes,
    permits: Alone,
    /// Ids that were handed out for the first time: 1 to this.
    fresh: Alone,
    stack: Stack,
    lanes: Lanes,
}

/// Blocks that lost their last holder in one call, in order, and are in no queue yet: a chain through their links.
#[must_use = "the blocks are lost"]
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Freed {
    first: u32,
    last: u32,
    len: u32,
    /// How many had a name when they lost their last holder.
    named: u32,
}

impl Freed {
    /// How many blocks.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether some had a name.
    pub(crate) fn has_named(&self) -> bool {
        self.named > 0
    }
}

impl FreeQueue {
    /// All blocks but the null block, in ascending order.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        FreeQueue::with_owners(num_blocks, 1)
    }

    /// The same, with lanes for each of `owners`, at most 40: those of owner `n` are [`LANES`] from lane `n * LANES` on.
    #[must_use]
    pub(crate) fn with_owners(num_blocks: u32, owners: usize) -> Self {
        FreeQueue {
            nodes: Nodes::new(num_blocks, LANES * owners),
            permits: Alone(AtomicU64::new(u64::from(num_blocks - 1))),
            fresh: Alone(AtomicU64::new(0)),
            stack: Stack::new(),
            lanes: Lanes::new(owners),
        }
    }

    /// Brings all its memory in: see [`resident`](crate::resident).
    pub(crate) fn bring_in(&self) {
        self.nodes.bring_in();
    }

    /// Blocks in all, the null block among them.
    #[must_use]
    pub fn num_blocks(&self) -> u32 {
        self.nodes.num_blocks()
    }

    /// A block id from outside.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] at or past the end of the pool.
    pub fn block(&self, id: u32) -> Result<BlockId> {
        let block = BlockId(id);
        self.check(block).map(|()| block)
    }

    /// How many blocks can be taken.
    #[must_use]
    pub fn len(&self) -> u32 {
        // Relaxed: a number that may be old when it is read.
        self.permits.0.load(Ordering::Relaxed) as u32
    }

    /// Whether no block can be taken.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Holders of `block`.
    #[must_use]
    pub fn holders(&self, block: BlockId) -> u32 {
        match self.state(block).place {
            Place::Held(holders) => holders,
            _ => 0,
        }
    }

    /// Reads the state of `block`, and makes something of it. For [`BlockPool`](crate::block_pool::BlockPool) to read ahead.
    pub(crate) fn glance(&self, block: BlockId) -> u32 {
        // Relaxed: nothing follows from it.
        low(self.nodes.state(block.get()).load(Ordering::Relaxed))
    }

    /// Bytes that the queue keeps for each block.
    #[must_use]
    pub const fn bytes_per_block() -> usize {
        3 * size_of::<u64>()
    }

    /// Takes blocks from the head, as many as `out` has room for; each has one holder and no name.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] if fewer are free; nothing is taken then.
    pub fn take(&self, out: &mut [BlockId]) -> Result<()> {
        let count = out.len() as u64;
        self.reserve(count).map_err(|free| Error::OutOfBlocks { needed: count as u32, free })?;
        if mutant::is_on(Mutant::TakeCountsFree) {
            let _ = self.iter().count();
        }
        let mut skipped = [BlockId::NULL];
        if mutant::is_on(Mutant::FreeQueueSkipsOne) && self.reserve(1).is_ok() {
            while self.take_some(&mut skipped) == 0 {}
        }
        let mut taken = 0;
        // The permits say that so many blocks stand somewhere. A round finds none only if others moved them meanwhile.
        while taken < out.len() {
            taken += self.take_some(&mut out[taken..]);
        }
        if skipped != [BlockId::NULL] {
            return self.release(&skipped, |_| DEFAULT_LANE);
        }
        Ok(())
    }

    fn take_some(&self, out: &mut [BlockId]) -> usize {
        match self.take_empty(out) {
            0 => {
                let of = |owner| self.lanes.pop(&self.nodes, owner, out);
                (0..self.lanes.owners()).map(of).find(|&count| count > 0).unwrap_or(0)
            }
            count => count,
        }
    }

    /// Takes some of the blocks that never had content or lost it before they were released, as many permits as there are places in
    /// `out`; returns how many.
    pub(crate) fn take_empty(&self, out: &mut [BlockId]) -> usize {
        let count = match self.stack.pop(&self.nodes, out) {
            0 => self.take_fresh(out),
            count => count,
        };
        for block in &out[..count] {
            self.nodes.set_state(block.get(), State { place: Place::Held(1), named: false });
        }
        count
    }

    /// The same for some of the blocks in the lanes of `owner`, the lowest first.
    pub(crate) fn take_of(&self, owner: usize, out: &mut [BlockId]) -> usize {
        self.lanes.pop(&self.nodes, owner, out)
    }

    fn take_fresh(&self, out: &mut [BlockId]) -> usize {
        let fresh = &self.fresh.0;
        // Relaxed, here and below: a fresh block comes from nobody.
        let mut used = fresh.load(Ordering::Relaxed);
        loop {
            let count = (u64::from(self.num_blocks() - 1) - used).min(out.len() as u64);
            if count == 0 {
                return 0;
            }
            match fresh.compare_exchange(used, used + count, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    out.iter_mut().zip(used + 1..=used + count).for_each(|(out, id)| *out = BlockId(id as u32));
                    return count as usize;
                }
                Err(found) => used = found,
            }
        }
    }

    /// Drops one holder for each entry of `blocks`, last entry first, and queues those that lost their last one (see the module); a
    /// named one goes to the lane that `lane` gives it. Null blocks are passed over.
    ///
    /// # Errors
    /// As [`FreeQueue::drop_holders`].
    pub fn release(&self, blocks: &[BlockId], lane: impl Fn(BlockId) -> u16) -> Result<()> {
        let freed = self.drop_holders(blocks, lane)?;
        self.enqueue(freed);
        Ok(())
    }

    fn append(&self, freed: &mut Freed, id: u32, named: bool) {
        if freed.len == 0 {
            freed.first = id;
        } else {
            self.nodes.set_next(freed.last, id);
        }
        freed.last = id;
        freed.len += 1;
        freed.named += u32::from(named);
    }

    /// The second half of a release: unnamed blocks go, in order, before the head, named ones, in order, behind the tail of their lane.
    pub fn enqueue(&self, freed: Freed) {
        if freed.len == 0 {
            return;
        }
        let mut queued = freed.len;
        if mutant::is_on(Mutant::PermitsFirst) {
            self.add_permits(queued);
        }
        if freed.named == 0 && !mutant::is_on(Mutant::UnpublishedToTail) {
            self.stack.push(&self.nodes, freed.first, freed.last);
        } else {
            queued -= self.enqueue_apart(&freed);
        }
        if !mutant::is_on(Mutant::PermitsFirst) {
            self.add_permits(queued);
        }
    }

    /// Parts the chain into one for the stack and one for each run of blocks with the same lane. Returns how many blocks it lost: none.
    fn enqueue_apart(&self, freed: &Freed) -> u32 {
        let (mut front, mut lost) = (Freed::default(), 0);
        let (mut back, mut back_lane) = (Freed::default(), 0);
        let mut next = freed.first;
        for at in 0..freed.len {
            let id = next;
            // Relaxed, here and below: the blocks are the caller's.
            next = low(self.nodes.next(id).load(Ordering::Relaxed));
            let State { place, named } = State::of(self.nodes.state(id).load(Ordering::Relaxed));
            let Place::Out(lane) = place else { unreachable!("block {id} of a freed list is {place:?}") };
            if named && mutant::is_on(Mutant::LostBlock) && at == 0 {
                lost += 1;
            } else if named && !mutant::is_on(Mutant::HeadOrder) || mutant::is_on(Mutant::UnpublishedToTail) {
                if back.len > 0 && back_lane != lane {
                    self.lanes.push(&self.nodes, back_lane, back.first, back.last);
                    back = Freed::default();
                }
                back_lane = lane;
                if back.len > 0 {
                    self.nodes.set_prev(id, back.last);
                }
                self.append(&mut back, id, named);
            } else {
                self.append(&mut front, id, named);
            }
        }
        if front.len > 0 {
            self.stack.push(&self.nodes, front.first, front.last);
        }
        if back.len > 0 {
            self.lanes.push(&self.nodes, back_lane, back.first, back.last);
        }
        lost
    }

    /// Moves a free named block to the tail of another lane: a hit, and the release of it. A held block is left as it is.
    ///
    /// # Errors
    /// As [`FreeQueue::share`]: the block is not free, or was not just now.
    pub fn move_to_lane(&self, block: BlockId, lane: u16) -> Result<()> {
        self.share(block)?;
        self.release(&[block], |_| lane)
    }

    fn check(&self, block: BlockId) -> Result<()> {
        if block.get() < self.num_blocks() {
            return Ok(());
        }
        Err(Error::NoSuchBlock { block: block.get(), num_blocks: self.num_blocks() })
    }

    fn state(&self, block: BlockId) -> State {
        State::of(self.nodes.state(block.get()).load(Ordering::Acquire))
    }

    /// Takes `count` permits, or says how many there are.
    pub(crate) fn reserve(&self, count: u64) -> std::result::Result<(), u32> {
        let permits = &self.permits.0;
        let mut free = permits.load(Ordering::Relaxed);
        loop {
            if free < count {
                return Err(free as u32);
            }
            if mutant::is_on(Mutant::PermitsWithoutCompare) {
                permits.store(free - count, Ordering::Release);
                return Ok(());
            }
            // Acquire: pairs with `add_permits`, so that the blocks are found. Others that add go on releasing through this exchange.
            match permits.compare_exchange(free, free - count, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(found) => free = found,
            }
        }
    }

    /// Takes as many permits as there are, at most `most`.
    fn reserve_some(&self, most: usize) -> usize {
        let mut wanted = most as u64;
        loop {
            match self.reserve(wanted) {
                Ok(()) => return wanted as usize,
                Err(0) => return 0,
                Err(free) => wanted = u64::from(free),
            }
        }
    }

    fn add_permits(&self, count: u32) {
        // Release: the blocks are where they can be found.
        self.permits.0.fetch_add(u64::from(count), Ordering::Release);
    }
}
