//! Which block holds the content that a key names: pending while its last row is being written, published once confirmed.
//!
//! Before: [`BlockPool`](crate::block_pool::BlockPool) publishes, withdraws and forgets. Several blocks may carry one key
//! (two sequences computed the same content at once); a lookup returns the first published that still lives (design 5).
//! Blocks of one key form a ring: the published ones first, then the pending ones, each oldest first. The first blocks of all rings stand
//! in a hash table of chains that run through the blocks themselves, so that naming a block touches one bucket beside its own words,
//! and no name is ever copied: see [`PrefixIndex::audit`].

use crate::events::{Content, Event, EventLog};
use crate::ids::{BlockId, Key};
use crate::mutant::{self, Mutant};
use crate::resident::bring_in;
use crate::watch::Watch;

mod audit;
#[cfg(test)]
mod tests;

/// Whether a block's content has a name, and who may rely on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyState {
    /// No name: the content is partial, private or gone.
    Unnamed = 0,
    /// The step in flight writes its last row. Steps may share it; nothing may copy, announce or evict it.
    Pending,
    /// All rows are confirmed. It will not change until the block is handed out again.
    Published,
}

/// Words of a block: its neighbours in the ring of its key; the next block in the chain of its bucket, if it is the first of its ring; and
/// its state, with the tag of its key in the other bits, so that a walk along a chain looks at no other block's key.
type Links = [u32; 4];
const PREV: usize = 0;
const NEXT: usize = 1;
const CHAIN: usize = 2;
const STATE: usize = 3;

/// The bits of a state.
const STATES: u32 = 3;

/// The end of a chain: the null block, which never has a name.
const NONE: u32 = 0;

/// The keys of all blocks, and the way back from a key to its blocks.
pub struct PrefixIndex {
    /// The bytes of keys: zeroed memory that is not written before it is used, so that a large pool is cheap to make.
    keys: Box<[[u8; 32]]>,
    /// Zeroed likewise.
    links: Box<[Links]>,
    /// The first block of the chain of each bucket: a power of two, and a half more than the blocks at least.
    buckets: Box<[u32]>,
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
            links: bytemuck::zeroed_slice_box(n),
            buckets: bytemuck::zeroed_slice_box((n + n / 2).next_power_of_two()),
            num_published: 0,
            events: None,
            watch: Watch::default(),
        }
    }

    /// Brings all its memory in: see [`resident`](crate::resident).
    pub(crate) fn bring_in(&mut self) {
        bring_in(&mut self.keys);
        bring_in(&mut self.links);
        bring_in(&mut self.buckets);
    }

    /// From now on, when nothing is named yet, `events` is told of every change of the set of published keys.
    pub fn record(&mut self, events: EventLog) {
        debug_assert!(self.buckets.iter().all(|&first| first == NONE));
        self.events = Some(Box::new(events));
    }

    /// Everything is forgotten, and told as one event; what records that goes on over another index.
    pub(crate) fn end(&mut self) -> Option<EventLog> {
        let mut events = *self.events.take()?;
        events.begin_clear();
        events.end_clear(self.num_published > 0);
        Some(events)
    }

    /// The changes of the set of published keys, if they are recorded.
    #[must_use]
    pub fn events(&self) -> Option<&EventLog> {
        self.events.as_deref()
    }

    /// State of the name of `block`'s content. A block that this pool does not have has none.
    #[must_use]
    pub fn state(&self, block: BlockId) -> KeyState {
        self.links.get(block.index()).map_or(KeyState::Unnamed, state_in)
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
        self.first(key).map(|block| (BlockId(block), self.state(BlockId(block))))
    }

    /// Names the content that the step in flight completes in `block`. A block that has a name keeps it.
    pub(crate) fn make_pending(&mut self, block: BlockId, key: Key) {
        if self.state(block) != KeyState::Unnamed {
            return;
        }
        self.keys[block.index()] = key.0;
        self.join(block);
    }

    /// Says what `block`, which was just made pending under `key`, will hold. Only events need to know.
    pub fn describe(&mut self, block: BlockId, key: Key, content: Content<'_>) {
        if self.state(block) == KeyState::Pending
            && let Some(events) = &mut self.events
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
        let is_first = self.confirm(block);
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

    /// Reads what is kept of `block`, and makes something of it. For [`BlockPool`](crate::block_pool::BlockPool) to read ahead.
    pub(crate) fn glance(&self, block: BlockId) -> u32 {
        let at = block.index();
        u32::from(self.keys[at][0]) ^ self.links[at][NEXT]
    }

    /// The same of where `key` stands or would stand.
    pub(crate) fn glance_at(&self, key: &Key) -> u32 {
        self.buckets[self.bucket(key)]
    }

    /// The same of the first block that stands there.
    pub(crate) fn glance_behind(&self, key: &Key) -> u32 {
        self.links[self.glance_at(key) as usize][CHAIN]
    }

    /// The same of where the name of `block` stands.
    pub(crate) fn glance_at_name(&self, block: BlockId) -> u32 {
        self.glance_at(&self.key_at(block.index()))
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
        let of_key = |key: &Key| self.first(key).filter(|&block| self.is_published(block));
        let blocks = self.keys.len() - usize::from(mutant::is_on(Mutant::SnapshotForgetsOne));
        for id in (0..blocks as u32).filter(|&id| self.is_published(id)) {
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
        let buckets = size_of_val(&*self.buckets) as f64 / self.keys.len() as f64;
        let events = self.events.as_ref().map_or(0.0, |events| events.bytes_per_block());
        (size_of::<Key>() + size_of::<Links>()) as f64 + buckets + events
    }

    fn key_at(&self, at: usize) -> Key {
        Key(self.keys[at])
    }

    fn bucket(&self, key: &Key) -> usize {
        key.short() as usize & (self.buckets.len() - 1)
    }

    /// The first block of `key`.
    fn first(&self, key: &Key) -> Option<u32> {
        let mut at = self.buckets[self.bucket(key)];
        while at != NONE {
            let links = &self.links[at as usize];
            if links[STATE] & !STATES == tag(key) && self.keys[at as usize] == key.0 {
                return Some(at);
            }
            at = links[CHAIN];
        }
        None
    }

    fn is_published(&self, id: u32) -> bool {
        state_in(&self.links[id as usize]) == KeyState::Published
    }

    fn is_pending(&self, id: u32) -> bool {
        state_in(&self.links[id as usize]) == KeyState::Pending
    }

    fn set_state(&mut self, id: u32, state: KeyState) {
        let word = &mut self.links[id as usize][STATE];
        *word = *word & !STATES | state as u32;
    }

    /// In the chain where it stands, the first block of a key gives its place to another one, or to [`NONE`]. False if it stands in none.
    fn pass_on(&mut self, id: u32, to: u32) -> bool {
        let bucket = self.bucket(&self.key_at(id as usize));
        let (mut before, mut at) = (NONE, self.buckets[bucket]);
        while at != id {
            if at == NONE {
                return false;
            }
            (before, at) = (at, self.links[at as usize][CHAIN]);
        }
        let mut next = self.links[id as usize][CHAIN];
        if to != NONE {
            self.links[to as usize][CHAIN] = next;
            next = to;
        }
        match before {
            NONE => self.buckets[bucket] = next,
            before => self.links[before as usize][CHAIN] = next,
        }
        true
    }

    /// Puts `block`, whose key is set, at the end of its key's ring: it is pending.
    fn join(&mut self, block: BlockId) {
        let (id, key) = (block.get(), self.key_at(block.index()));
        let Some(first) = self.first(&key) else {
            let bucket = self.bucket(&key);
            self.links[block.index()] = [id, id, self.buckets[bucket], tag(&key) | KeyState::Pending as u32];
            self.buckets[bucket] = id;
            self.watch.note(&key);
            return;
        };
        self.links[block.index()][STATE] = tag(&key) | KeyState::Pending as u32;
        let last = self.links[first as usize][PREV];
        self.link(id, last, first);
        if self.is_published(last) {
            self.watch.note(&key);
        }
    }

    /// A pending block is published, behind those of its key that are; true if it is the first.
    fn confirm(&mut self, block: BlockId) -> bool {
        let id = block.get();
        self.set_state(id, KeyState::Published);
        if self.links[block.index()][NEXT] == id {
            self.watch.note(&Key(self.keys[block.index()]));
            return true;
        }
        if mutant::is_on(Mutant::PublishedStaysBehind) {
            return true;
        }
        let key = self.key_at(block.index());
        let first = self.first(&key).unwrap_or(id);
        // The oldest pending block before it.
        let mut oldest = id;
        while oldest != first && self.is_pending(self.links[oldest as usize][PREV]) {
            oldest = self.links[oldest as usize][PREV];
        }
        if oldest != id {
            self.unlink(id);
            self.link(id, self.links[oldest as usize][PREV], oldest);
        }
        let is_first = oldest == first;
        if is_first && first != id {
            self.pass_on(first, id);
        }
        let last = self.links[if is_first { id } else { first } as usize][PREV];
        if is_first || self.is_published(last) {
            self.watch.note(&key);
        }
        is_first
    }

    /// Takes `block` out of its ring; its place in a chain passes to the next block of the ring or goes. True if no block of its key is left
    /// that is pending, or published, as it was.
    fn leave(&mut self, block: BlockId) -> bool {
        let id = block.get();
        let [prev, next, ..] = self.links[block.index()];
        let state = self.state(block);
        let is_like_it = |other: u32| other != id && self.state(BlockId(other)) == state;
        let (before, behind) = (is_like_it(prev), is_like_it(next));
        self.set_state(id, KeyState::Unnamed);
        if mutant::is_on(Mutant::OrphanEntry) {
            return next == id;
        }
        let was_first = self.pass_on(id, if next == id { NONE } else { next });
        self.unlink(id);
        let is_last = !behind && (was_first || !before);
        if is_last {
            self.watch.note(&Key(self.keys[block.index()]));
        }
        is_last
    }

    /// Puts `id` between two neighbours.
    fn link(&mut self, id: u32, prev: u32, next: u32) {
        (self.links[id as usize][PREV], self.links[id as usize][NEXT]) = (prev, next);
        self.links[prev as usize][NEXT] = id;
        self.links[next as usize][PREV] = id;
    }

    /// Joins the neighbours of `id`.
    fn unlink(&mut self, id: u32) {
        let [prev, next, ..] = self.links[id as usize];
        self.links[prev as usize][NEXT] = next;
        self.links[next as usize][PREV] = prev;
    }
}

fn state_in(links: &Links) -> KeyState {
    match links[STATE] & STATES {
        0 => KeyState::Unnamed,
        1 => KeyState::Pending,
        _ => KeyState::Published,
    }
}

/// Bits of `key` that choose no bucket, but for those where a state stands.
fn tag(key: &Key) -> u32 {
    u32::from_le_bytes([key.0[8], key.0[9], key.0[10], key.0[11]]) & !STATES
}
