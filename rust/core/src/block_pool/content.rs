//! The names of blocks' contents: pending, published, withdrawn, forgotten.
//!
//! Before: a step completes a block that somebody holds. After: the index, what remembers parts of blocks, and the shares agree about
//! what each block holds and whose it is.

use crate::block_pool::BlockPool;
use crate::block_pool::ledger::Ledger;
use crate::error::Result;
use crate::event_bytes::Encoder;
use crate::events::Content;
use crate::free_queue::Freed;
use crate::ids::{BlockId, Key};
use crate::mutant::{self, Mutant};
use crate::prefix_index::{KeyState, PrefixIndex};

impl BlockPool {
    /// Names the content that the step in flight completes in `block`. A block that nobody holds gets no name, nor does the null block.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id of another pool.
    pub fn make_pending(&mut self, block: BlockId, key: Key) -> Result<()> {
        self.block(block.get())?;
        if self.queue.name(block).is_ok() {
            self.index.make_pending(block, key);
        }
        Ok(())
    }

    /// Says what `block`, which was just made pending under `key`, will hold. Only events need to know.
    pub fn describe(&mut self, block: BlockId, key: Key, content: Content<'_>) {
        self.index.describe(block, key, content);
    }

    /// Puts the KV events from number `since` on into `bytes` (cleared before); the number to read on from. None if they are not
    /// recorded, or if there are none and none were lost; `bytes` is as it was then. See [`event_bytes`](crate::event_bytes).
    ///
    /// # Errors
    /// [`Error::InvalidInput`](crate::Error::InvalidInput) for a number that no event has had yet.
    pub fn read_events(&self, since: u64, bytes: &mut Vec<u8>) -> Result<Option<u64>> {
        let Some(events) = self.index.events() else { return Ok(None) };
        if since == events.next() {
            return Ok(None);
        }
        let reading = events.since(since)?;
        let mut encoder = Encoder::new(bytes, events.next(), reading.lost, events.block_size());
        reading.events().for_each(|event| encoder.push(&event));
        encoder.finish();
        Ok(Some(events.next()))
    }

    /// Puts all that is published into `bytes` (cleared before), as events: everything is cleared, then each key is stored, parents
    /// first. The number to read on from; none if events are not recorded. Walks the whole pool.
    pub fn event_snapshot(&self, bytes: &mut Vec<u8>) -> Option<u64> {
        let events = self.index.events()?;
        let mut encoder = Encoder::new(bytes, events.next(), 0, events.block_size());
        self.index.snapshot(|event| encoder.push(&event));
        encoder.finish();
        Some(events.next())
    }

    /// The content of `block` is confirmed and may be found by its key. Without a pending name nothing happens.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id of another pool.
    pub fn publish(&mut self, block: BlockId) -> Result<()> {
        self.block(block.get())?;
        let was_pending = self.index.state(block) == KeyState::Pending;
        self.index.publish(block);
        if was_pending && let Some(ledger) = &mut self.ledger {
            ledger.published(block, &self.index);
        }
        Ok(())
    }

    /// Takes a name away: the step that writes the content failed, or its writer is gone.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] for an id of another pool.
    pub fn withdraw(&mut self, block: BlockId) -> Result<()> {
        self.queue.unname(block)?;
        self.forget(block);
        Ok(())
    }

    /// Forgets all published content that nobody holds; returns how many blocks forgot theirs. Those that were worth more than the
    /// default join the tail of its lane, in order of their ids.
    pub fn forget_unheld(&mut self) -> u32 {
        (1..self.num_blocks()).map(BlockId).for_each(|block| self.level(block));
        let (queue, ledger) = (&self.queue, &mut self.ledger);
        let all = || (1..queue.num_blocks()).map(BlockId);
        let is_unheld = |block: &BlockId| queue.holders(*block) == 0;
        let mut forget_all = |index: &mut PrefixIndex| {
            let unname = |block| queue.unname(block).map_or(0, |()| u32::from(forget(index, ledger, block)));
            all().filter(is_unheld).map(unname).sum()
        };
        let mut kept = all().filter(|block| !is_unheld(block));
        let keeps_some = kept.any(|block| self.index.state(block) == KeyState::Published);
        if keeps_some && !mutant::is_on(Mutant::EventClearsHeld) {
            return forget_all(&mut self.index);
        }
        self.index.clear(forget_all)
    }

    /// The same of the blocks in the free queue, one by one.
    #[cold]
    #[inline(never)]
    pub(crate) fn forget_free(&mut self) {
        for block in self.queue.iter().collect::<Vec<_>>() {
            self.level(block);
            self.withdraw(block).expect("a block of this pool");
        }
    }

    /// What `block`, which was just made pending under `key`, will hold. `mark` is a hash of its parent, its fields and its first tokens.
    pub(crate) fn remember(&mut self, block: BlockId, key: Key, mark: u64, tokens: &[crate::ids::TokenId]) {
        if let Some(ledger) = &mut self.ledger
            && let Some(partial) = &mut ledger.partial
            && self.index.state(block) == KeyState::Pending
            && self.index.key(block) == Some(key)
        {
            partial.describe(block, mark, tokens);
        }
    }

    pub(super) fn forget(&mut self, block: BlockId) -> bool {
        forget(&mut self.index, &mut self.ledger, block)
    }

    /// A pending name whose last holder is gone: nobody writes its content any more.
    pub(super) fn withdraw_pending(&mut self, freed: &Freed) {
        for block in self.queue.freed_ids(freed) {
            if self.index.state(block) == KeyState::Pending {
                self.index.forget(block);
                self.queue.unname(block).expect("a block of this pool");
            }
        }
    }
}

/// Takes the name of a block's content away; true if it was published.
fn forget(index: &mut PrefixIndex, ledger: &mut Option<Box<Ledger>>, block: BlockId) -> bool {
    match ledger {
        None => index.forget(block),
        Some(ledger) => ledger.forget(index, block),
    }
}
