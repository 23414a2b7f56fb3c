//! What the prefix index gains and loses, as a ring of plain, numbered records: whoever applies them in order has the index.
//!
//! Before: [`PrefixIndex`](crate::prefix_index::PrefixIndex) tells when a key gets its first published block and when it loses its
//! last. After: readers, each with a number of its own, take what came since ([`EventLog::since`]). The ring is allocated once; a
//! reader that fell behind is told how many records it lost and starts again from a snapshot. Events are numbered from 0 without a
//! gap, so number `n` lies in place `n % capacity`, and the oldest that is still there is `next - capacity`.
//! Pending keys are never told.

use crate::error::{Error, Result};
use crate::ids::{BlockId, Key, TokenId};
use crate::mutant::{self, Mutant};

/// Changes that a log keeps at most.
pub const MAX_EVENTS: u32 = 1 << 24;

/// One change of the set of published keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A key got its first published block.
    Stored {
        /// The key of the chain, the same in every group.
        key: Key,
        /// Key of the block before it; `None` at the start of a chain.
        parent: Option<Key>,
        /// The tokens of the block: exactly `block_size`.
        tokens: &'a [TokenId],
        /// Group of layers that the block belongs to.
        group: u8,
    },
    /// A key lost its last published block.
    Removed {
        /// The key of the chain, the same in every group.
        key: Key,
        /// Group of layers that the block belonged to.
        group: u8,
    },
    /// Every key is gone.
    Cleared,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Stored,
    Removed,
    Cleared,
}

/// A record of the ring. Its tokens lie in a place of their own.
#[derive(Clone, Copy)]
struct Record {
    kind: Kind,
    group: u8,
    has_parent: bool,
    key: Key,
    parent: Key,
}

const NOTHING: Record = Record { kind: Kind::Cleared, group: 0, has_parent: false, key: Key::ROOT, parent: Key::ROOT };

/// What a named block holds, beside its key.
#[derive(Clone, Copy)]
pub struct Content<'a> {
    /// Key of the block before it, as the index has it; `None` at the start of a chain.
    pub parent: Option<Key>,
    /// Its tokens.
    pub tokens: &'a [TokenId],
    /// Group of layers that it belongs to.
    pub group: u8,
}

/// The ring, and what each named block holds.
pub struct EventLog {
    block_size: usize,
    records: Box<[Record]>,
    /// `[capacity, block_size]`: tokens of the records.
    tokens: Box<[TokenId]>,
    /// Number of the next event: how many there were.
    next: u64,
    /// Of each block: key of the block before it, as the index has it.
    parents: Box<[Option<Key>]>,
    /// `[num_blocks, block_size]`: tokens of the blocks.
    contents: Box<[TokenId]>,
    groups: Box<[u8]>,
    /// Removals are not told one by one: see [`EventLog::begin_clear`].
    is_clearing: bool,
}

/// What a reader gets: the events from `first` on, oldest first.
pub struct Reading<'a> {
    /// Number of the first event.
    pub first: u64,
    /// Events that were overwritten before this reader came. If there are any, it must start again from a snapshot.
    pub lost: u64,
    log: &'a EventLog,
}

impl EventLog {
    /// A ring of `capacity` records over the blocks of a pool. All memory is taken here.
    #[must_use]
    pub fn new(num_blocks: u32, block_size: u32, capacity: u32) -> Self {
        let (blocks, block_size, capacity) = (num_blocks as usize, block_size as usize, capacity as usize);
        EventLog {
            block_size,
            records: vec![NOTHING; capacity].into(),
            tokens: vec![0; capacity * block_size].into(),
            next: 0,
            parents: vec![None; blocks].into(),
            contents: vec![0; blocks * block_size].into(),
            groups: vec![0; blocks].into(),
            is_clearing: false,
        }
    }

    /// Tokens a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Number that the next event will have: how many there were.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Events that a reader can be behind without losing any.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.records.len()
    }

    /// Bytes that each block costs here.
    #[must_use]
    pub fn bytes_per_block(&self) -> f64 {
        (size_of::<Option<Key>>() + self.block_size * size_of::<TokenId>() + 1) as f64
    }

    /// The events from number `from` on.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for a number that no event has had yet.
    pub fn since(&self, from: u64) -> Result<Reading<'_>> {
        if from > self.next {
            let bound = format!("must be 0..={}, the number of the next event", self.next);
            return Err(Error::InvalidInput { field: "since", value: i128::from(from), bound });
        }
        let oldest = self.next.saturating_sub(self.records.len() as u64);
        let first = from.max(oldest);
        let lost = if mutant::is_on(Mutant::EventGapSilent) { 0 } else { first - from };
        Ok(Reading { first, lost, log: self })
    }

    /// What `block` holds, for the event that tells its key and for snapshots. Its content is complete with the step in flight.
    pub(crate) fn describe(&mut self, block: BlockId, content: Content<'_>) {
        debug_assert_eq!(content.tokens.len(), self.block_size);
        let at = block.index() * self.block_size;
        self.contents[at..at + self.block_size].copy_from_slice(content.tokens);
        self.parents[block.index()] = content.parent;
        self.groups[block.index()] = content.group;
    }

    /// The event that tells `key`, whose content `block` holds. What sets its group apart comes off the way it came on.
    pub(crate) fn stored_in(&self, block: BlockId, key: Key) -> Event<'_> {
        let at = block.index() * self.block_size;
        let (parent, group) = (self.parents[block.index()], self.groups[block.index()]);
        let parent = if mutant::is_on(Mutant::EventWrongParent) { parent.map(|_| key) } else { parent };
        Event::Stored {
            key: key.in_group(usize::from(group)),
            parent: parent.map(|parent| parent.in_group(usize::from(group))),
            tokens: &self.contents[at..at + self.block_size],
            group,
        }
    }

    /// Key of the block before `block`, as the index has it.
    pub(crate) fn parent(&self, block: BlockId) -> Option<Key> {
        self.parents[block.index()]
    }

    /// `key` got its first published block.
    pub(crate) fn stored(&mut self, block: BlockId, key: Key) {
        let Event::Stored { key, parent, group, .. } = self.stored_in(block, key) else { return };
        let at = self.push(Record {
            kind: Kind::Stored,
            group,
            has_parent: parent.is_some(),
            key,
            parent: parent.unwrap_or(Key::ROOT),
        });
        let (from, to, size) = (block.index() * self.block_size, at * self.block_size, self.block_size);
        if !mutant::is_on(Mutant::EventOldTokens) {
            self.tokens[to..to + size].copy_from_slice(&self.contents[from..from + size]);
        }
    }

    /// `key` lost its last published block, which was `block`.
    pub(crate) fn removed(&mut self, block: BlockId, key: Key) {
        if !self.is_clearing {
            self.next += u64::from(mutant::is_on(Mutant::EventNumberSkipped));
            let group = self.groups[block.index()];
            self.push(Record { kind: Kind::Removed, group, key: key.in_group(usize::from(group)), ..NOTHING });
        }
    }

    /// From here to [`EventLog::end_clear`] every key goes, which one event tells.
    pub(crate) fn begin_clear(&mut self) {
        self.is_clearing = true;
    }

    /// Tells that every key is gone, if there was `any`.
    pub(crate) fn end_clear(&mut self, any: bool) {
        self.is_clearing = false;
        if any {
            self.push(NOTHING);
        }
    }

    /// Writes a record over the oldest; returns its place.
    fn push(&mut self, record: Record) -> usize {
        let at = (self.next % self.records.len() as u64) as usize;
        self.records[at] = record;
        self.next += 1;
        at
    }

    fn event(&self, number: u64) -> Event<'_> {
        let at = (number % self.records.len() as u64) as usize;
        let Record { kind, group, has_parent, key, parent } = self.records[at];
        match kind {
            Kind::Stored => Event::Stored {
                key,
                parent: has_parent.then_some(parent),
                tokens: &self.tokens[at * self.block_size..(at + 1) * self.block_size],
                group,
            },
            Kind::Removed => Event::Removed { key, group },
            Kind::Cleared => Event::Cleared,
        }
    }
}

impl<'a> Reading<'a> {
    /// The events, in the order in which they happened; as many as lie between `first` and the log's `next`.
    pub fn events(&self) -> impl ExactSizeIterator<Item = Event<'a>> + use<'a> {
        let (first, log) = (self.first, self.log);
        (0..(log.next - first) as usize).map(move |at| log.event(first + at as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Key = Key([1; 32]);
    const B: Key = Key([2; 32]);

    fn log(capacity: u32) -> EventLog {
        let mut log = EventLog::new(4, 2, capacity);
        log.describe(BlockId(1), Content { parent: None, tokens: &[7, 8], group: 0 });
        log.describe(BlockId(2), Content { parent: Some(A), tokens: &[9, 10], group: 3 });
        log
    }

    #[test]
    fn events_come_in_order_with_what_their_blocks_held_then() {
        let mut log = log(8);
        log.stored(BlockId(1), A);
        log.stored(BlockId(2), B);
        log.describe(BlockId(1), Content { parent: Some(B), tokens: &[1, 1], group: 0 });
        log.removed(BlockId(2), B);
        let all: Vec<Event> = log.since(0).unwrap().events().collect();
        let stored = |key, parent, tokens, group| Event::Stored { key, parent, tokens, group };
        let second = stored(B.in_group(3), Some(A.in_group(3)), &[9, 10], 3);
        assert_eq!(all[..2], [stored(A, None, &[7, 8], 0), second]);
        assert_eq!(all[2..], [Event::Removed { key: B.in_group(3), group: 3 }]);
        assert_eq!(log.since(3).unwrap().events().len(), 0);
    }

    #[test]
    fn a_reader_that_fell_behind_is_told_what_it_lost() {
        let mut log = log(2);
        for _ in 0..5 {
            log.removed(BlockId(1), A);
        }
        let reading = log.since(1).unwrap();
        assert_eq!((reading.first, reading.lost, reading.events().len()), (3, 2, 2));
        let reading = log.since(3).unwrap();
        assert_eq!((reading.first, reading.lost), (3, 0));
    }

    #[test]
    fn nobody_reads_what_has_not_happened() {
        let found = log(2).since(1).map(|reading| reading.first);
        assert!(matches!(found, Err(Error::InvalidInput { field: "since", value: 1, .. })));
    }

    #[test]
    fn a_clear_is_one_event() {
        let mut log = log(4);
        log.begin_clear();
        log.removed(BlockId(1), A);
        log.removed(BlockId(2), B);
        log.end_clear(true);
        assert_eq!(log.since(0).unwrap().events().collect::<Vec<_>>(), [Event::Cleared]);
        log.begin_clear();
        log.end_clear(false);
        assert_eq!(log.next(), 1, "nothing was cleared, so nothing is told");
    }
}
