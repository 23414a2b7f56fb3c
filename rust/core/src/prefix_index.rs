//! Which block holds the content that a key names: pending while its last row is being written, published once confirmed.
//!
//! Before: [`BlockPool`](crate::block_pool::BlockPool) publishes, withdraws and forgets. Several blocks may carry one key
//! (two sequences computed the same content at once); a lookup returns the first published that still lives (design 5).
//! Blocks of one key form a ring through two arrays of ids, oldest first. An entry names a block whose own stored key equals
//! that entry: see [`PrefixIndex::audit`].

use hashbrown::HashTable;

use crate::error::{Error, Result};
use crate::events::{Content, Event, EventLog};
use crate::ids::{BlockId, Key};
use crate::mutant::{self, Mutant};
use crate::watch::Watch;

/// Whether a block's content has a name, and who may rely on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyState {
    /// No name: the content is partial, private or gone.
    Unnamed,
    /// The step in flight writes its last row. Steps may share it; nothing may copy, announce or evict it.
    Pending,
    /// All rows are confirmed. It will not change until the block is handed out again.
    Published,
}

/// A block's neighbours among the blocks of its key.
type Ring = [u32; 2];
const PREV: usize = 0;
const NEXT: usize = 1;

/// The keys of all blocks, and the way back from a key to its blocks.
pub struct PrefixIndex {
    /// The bytes of keys: zeroed memory that is not written before it is used, so that a large pool is cheap to make.
    keys: Box<[[u8; 32]]>,
    states: Box<[KeyState]>,
    /// Zeroed likewise.
    rings: Box<[Ring]>,
    pending: HashTable<u32>,
    published: HashTable<u32>,
    num_published: u32,
    /// Told of every change of the set of published keys, if anybody wants to know.
    events: Option<Box<EventLog>>,
    /// Told of every key that appears or goes.
    pub(crate) watch: Watch,
}

impl PrefixIndex {
    /// An empty index over `num_blocks` blocks. Allocates for all of them, so that nothing grows later.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        let n = num_blocks as usize;
        PrefixIndex {
            keys: bytemuck::zeroed_slice_box(n),
            states: vec![KeyState::Unnamed; n].into(),
            rings: bytemuck::zeroed_slice_box(n),
            pending: HashTable::new(),
            published: HashTable::with_capacity(n),
            num_published: 0,
            events: None,
            watch: Watch::default(),
        }
    }

    /// From now on, when nothing is named yet, `events` is told of every change of the set of published keys.
    pub fn record(&mut self, events: EventLog) {
        debug_assert!(self.pending.is_empty() && self.published.is_empty());
        self.events = Some(Box::new(events));
    }

    /// The changes of the set of published keys, if they are recorded.
    #[must_use]
    pub fn events(&self) -> Option<&EventLog> {
        self.events.as_deref()
    }

    /// State of the name of `block`'s content. A block that this pool does not have has none.
    #[must_use]
    pub fn state(&self, block: BlockId) -> KeyState {
        self.states.get(block.index()).copied().unwrap_or(KeyState::Unnamed)
    }

    /// Every block, named or not.
    pub fn blocks(&self) -> impl Iterator<Item = BlockId> + use<> {
        (0..self.keys.len() as u32).map(BlockId)
    }

    /// Key of `block`'s content, if it has a name.
    #[must_use]
    pub fn key(&self, block: BlockId) -> Option<Key> {
        (self.state(block) != KeyState::Unnamed).then(|| self.key_at(block.index()))
    }

    /// How many blocks carry published content.
    #[must_use]
    pub fn num_published(&self) -> u32 {
        self.num_published
    }

    /// The block that may serve `key`: the first published, else the first pending.
    #[must_use]
    pub fn lookup(&self, key: &Key) -> Option<(BlockId, KeyState)> {
        let found = |table: &HashTable<u32>| table.find(key.short(), |&b| self.keys[b as usize] == key.0).copied();
        if let Some(block) = found(&self.published) {
            return Some((BlockId(block), KeyState::Published));
        }
        found(&self.pending).map(|block| (BlockId(block), KeyState::Pending))
    }

    /// Names the content that the step in flight completes in `block`. A block that has a name keeps it.
    pub(crate) fn make_pending(&mut self, block: BlockId, key: Key) {
        if self.state(block) != KeyState::Unnamed {
            return;
        }
        self.keys[block.index()] = key.0;
        self.join(block, KeyState::Pending);
    }

    /// Says what `block`, which was just made pending under `key`, will hold. Only events need to know.
    pub fn describe(&mut self, block: BlockId, key: Key, content: Content<'_>) {
        if let Some(events) = &mut self.events
            && self.states.get(block.index()) == Some(&KeyState::Pending)
            && self.keys[block.index()] == key.0
        {
            events.describe(block, content);
            if mutant::is_on(Mutant::EventPending) {
                events.stored(block, key);
            }
        }
    }

    /// The pending content of `block` is confirmed. Without a pending name nothing happens.
    pub(crate) fn publish(&mut self, block: BlockId) {
        if self.state(block) != KeyState::Pending {
            return;
        }
        self.leave(block);
        let is_first = self.join(block, KeyState::Published);
        self.num_published += 1;
        if let Some(events) = &mut self.events
            && (is_first || mutant::is_on(Mutant::EventPerBlock))
        {
            events.stored(block, Key(self.keys[block.index()]));
        }
    }

    /// Takes the name of `block`'s content away, if it has one; true if it was published.
    pub(crate) fn forget(&mut self, block: BlockId) -> bool {
        let state = self.state(block);
        if state == KeyState::Unnamed {
            return false;
        }
        let is_last = self.leave(block);
        if state == KeyState::Pending {
            return false;
        }
        self.num_published -= 1;
        if let Some(events) = &mut self.events
            && (is_last || mutant::is_on(Mutant::EventPerBlock))
            && !mutant::is_on(Mutant::EventRemovalForgotten)
        {
            events.removed(block, Key(self.keys[block.index()]));
        }
        true
    }

    /// Runs `forget_all`, which gives every published key up and returns how many blocks lost one: told as one event.
    pub(crate) fn clear(&mut self, forget_all: impl FnOnce(&mut Self) -> u32) -> u32 {
        if let Some(events) = &mut self.events {
            events.begin_clear();
        }
        let forgotten = forget_all(self);
        if let Some(events) = &mut self.events {
            events.end_clear(forgotten > 0);
        }
        forgotten
    }

    /// Tells all that is published as events, if they are recorded: [`Event::Cleared`], then every key once, no key before its
    /// parent. Walks the whole index and allocates: for a reader that starts, or that fell behind.
    pub fn snapshot(&self, mut tell: impl FnMut(Event<'_>)) {
        let Some(events) = &self.events else { return };
        tell(Event::Cleared);
        let mut told = vec![false; self.keys.len()];
        let mut chain = Vec::new();
        let of_key = |key: &Key| self.published.find(key.short(), |&b| self.keys[b as usize] == key.0).copied();
        let blocks = self.keys.len() - usize::from(mutant::is_on(Mutant::SnapshotForgetsOne));
        for id in (0..blocks as u32).filter(|&id| self.states[id as usize] == KeyState::Published) {
            let mut at = of_key(&self.key_at(id as usize));
            while let Some(block) = at.filter(|&block| !std::mem::replace(&mut told[block as usize], true)) {
                chain.push(block);
                at = events.parent(BlockId(block)).and_then(|parent| of_key(&parent));
            }
            for block in chain.drain(..).rev() {
                tell(events.stored_in(BlockId(block), self.key_at(block as usize)));
            }
        }
    }

    /// Bytes that each block costs here.
    #[must_use]
    pub fn bytes_per_block(&self) -> f64 {
        let table = self.published.allocation_size() as f64 / self.keys.len() as f64;
        let events = self.events.as_ref().map_or(0.0, |events| events.bytes_per_block());
        (size_of::<Key>() + size_of::<KeyState>() + size_of::<Ring>()) as f64 + table + events
    }

    /// A4: every entry names a block whose own key equals it, and every named block is reached from its entry, once.
    ///
    /// # Errors
    /// [`Error::Audit`] with what was found.
    pub fn audit(&self) -> Result<()> {
        let wrong = |detail: String| Err(Error::Audit { check: "A4", detail });
        let mut reached = vec![false; self.keys.len()];
        for (table, state) in [(&self.pending, KeyState::Pending), (&self.published, KeyState::Published)] {
            for &first in table {
                let key = self.keys[first as usize];
                let mut block = first;
                loop {
                    let at = block as usize;
                    if self.keys[at] != key || self.states[at] != state {
                        return wrong(format!("block {block} does not carry the {state:?} key of its entry"));
                    }
                    if std::mem::replace(&mut reached[at], true) {
                        return wrong(format!("block {block} is named twice"));
                    }
                    block = self.rings[at][NEXT];
                    if block == first {
                        break;
                    }
                }
            }
        }
        let named = |at: usize| self.states[at] != KeyState::Unnamed;
        if let Some(at) = (0..reached.len()).find(|&at| named(at) != reached[at]) {
            return wrong(format!("block {at} has a key in state {:?} that no entry names", self.states[at]));
        }
        let counted = self.states.iter().filter(|&&state| state == KeyState::Published).count();
        if counted != self.num_published as usize {
            return wrong(format!("{counted} blocks are published, {} are counted", self.num_published));
        }
        Ok(())
    }

    fn key_at(&self, at: usize) -> Key {
        Key(self.keys[at])
    }

    fn table(&mut self, state: KeyState) -> &mut HashTable<u32> {
        match state {
            KeyState::Pending => &mut self.pending,
            _ => &mut self.published,
        }
    }

    /// Puts `block`, whose key is set, at the end of its key's ring in the table of `state`; true if it is the first.
    fn join(&mut self, block: BlockId, state: KeyState) -> bool {
        let key = self.key_at(block.index());
        let id = block.get();
        self.states[block.index()] = state;
        let (keys, table) = match state {
            KeyState::Pending => (&self.keys, &mut self.pending),
            _ => (&self.keys, &mut self.published),
        };
        let Some(&first) = table.find(key.short(), |&b| keys[b as usize] == key.0) else {
            table.insert_unique(key.short(), id, |&b| Key(keys[b as usize]).short());
            self.rings[block.index()] = [id, id];
            self.watch.note(&key);
            return true;
        };
        let last = self.rings[first as usize][PREV];
        self.rings[block.index()] = [last, first];
        self.rings[last as usize][NEXT] = id;
        self.rings[first as usize][PREV] = id;
        false
    }

    /// Takes `block` out of its ring; the entry passes to the next block of the ring or goes: true if it goes.
    fn leave(&mut self, block: BlockId) -> bool {
        let id = block.get();
        let key = self.key_at(block.index());
        let [prev, next] = self.rings[block.index()];
        let state = std::mem::replace(&mut self.states[block.index()], KeyState::Unnamed);
        let table = self.table(state);
        if let Ok(mut entry) = table.find_entry(key.short(), |&b| b == id) {
            if mutant::is_on(Mutant::OrphanEntry) {
                // Planted: the entry goes on naming the block.
            } else if next == id {
                entry.remove();
                self.watch.note(&key);
            } else {
                *entry.get_mut() = next;
            }
        }
        self.rings[prev as usize][NEXT] = next;
        self.rings[next as usize][PREV] = prev;
        next == id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> Key {
        Key([n; 32])
    }

    fn published(index: &mut PrefixIndex, block: u32, name: u8) {
        index.make_pending(BlockId(block), key(name));
        index.publish(BlockId(block));
    }

    #[test]
    fn a_lookup_returns_the_first_published_that_still_lives() {
        let mut index = PrefixIndex::new(8);
        published(&mut index, 3, 1);
        published(&mut index, 5, 1);
        published(&mut index, 2, 1);
        assert_eq!(index.lookup(&key(1)), Some((BlockId(3), KeyState::Published)));
        assert!(index.forget(BlockId(3)));
        assert_eq!(index.lookup(&key(1)), Some((BlockId(5), KeyState::Published)));
        index.audit().unwrap();
        assert!(index.forget(BlockId(2)));
        assert!(index.forget(BlockId(5)));
        assert_eq!(index.lookup(&key(1)), None);
        assert_eq!(index.num_published(), 0);
        index.audit().unwrap();
    }

    #[test]
    fn published_content_comes_before_pending_content() {
        let mut index = PrefixIndex::new(8);
        index.make_pending(BlockId(1), key(1));
        assert_eq!(index.lookup(&key(1)), Some((BlockId(1), KeyState::Pending)));
        published(&mut index, 2, 1);
        assert_eq!(index.lookup(&key(1)), Some((BlockId(2), KeyState::Published)));
        assert!(!index.forget(BlockId(1)), "a withdrawn key was never published");
        index.audit().unwrap();
    }

    #[test]
    fn forgetting_a_block_without_a_name_changes_nothing() {
        let mut index = PrefixIndex::new(4);
        assert!(!index.forget(BlockId(2)));
        index.audit().unwrap();
    }
}
