//! Blocks with published content, in lanes: in each the one that waits longest is taken first, and a hit takes one out of the middle.
//!
//! A lane is a ring of blocks around a sentinel, linked both ways. One operation at a time changes the rings: it is written, as kind
//! and block, into one word, and whoever finds it there carries it out before starting its own. So nobody waits for the thread that
//! wrote it, and neighbours never leave at the same time. Each step is an exchange of a word that has a version, so that a step that
//! has been done cannot be done again by a late helper.
//!
//! An operation takes effect when its word is written: it was made from links and states that were read behind the idle word it
//! replaces, and rings and states in lanes change by operations only. It ends when the word is idle again, under the next version.

use crate::free_queue::node::{Nodes, Place, State, after, low};
use crate::free_queue::stack::RUN;
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::sync::{Alone, AtomicU64, Ordering};

/// Lanes of an owner: retention values 0 to 100. The model checker gets by with few.
pub const LANES: usize = if cfg!(loom) { 3 } else { 101 };

/// The lane of blocks that nobody gave another.
pub const DEFAULT_LANE: u16 = if cfg!(loom) { 1 } else { 35 };

/// Blocks that one hit takes out of a lane at most.
pub(super) const HITS: usize = 16;

/// Bits of a block in an operation.
const ID_BITS: u32 = 27;
const ID: u64 = (1 << ID_BITS) - 1;
/// How many blocks before it leave too.
const MORE: u64 = (HITS as u64 - 1) << ID_BITS;
const KIND: u64 = 3 << 31;
/// Take a block, and as many before it as the word says, out of wherever they stand; their names stay.
const REMOVE: u64 = 1 << 31;
/// Append the chain that ends with this block to the lane in its state. Its last link leads back to its first block until then.
const PUSH: u64 = 2 << 31;
/// Take all blocks from the front of a lane up to this one; their names go.
const POP: u64 = 3 << 31;
const VERSION: u64 = !0 << 33;

/// Blocks that a queue can have: as many as an operation can name.
pub const MAX_BLOCKS: u32 = ID as u32;

/// Words that say which lanes of an owner ever had a block.
const WORDS: usize = 2;

/// All lanes, those of one owner behind those of another.
pub(super) struct Lanes {
    /// The operation under way: 31 bits of version, 2 of kind (0: idle), 4 of how many more, 27 of block.
    operation: Alone,
    /// Lanes that ever had a block: [`WORDS`] words an owner. A lane that nobody uses is never looked at.
    used: Box<[AtomicU64]>,
}

impl Lanes {
    pub fn new(owners: usize) -> Self {
        let used = (0..WORDS * owners).map(|_| AtomicU64::new(0)).collect();
        Lanes { operation: Alone(AtomicU64::new(0)), used }
    }

    /// How many have lanes of their own.
    pub fn owners(&self) -> usize {
        self.used.len() / WORDS
    }

    /// Where it stands that `lane` had a block.
    fn used_bit(&self, lane: u16) -> (&AtomicU64, u64) {
        let (owner, value) = (usize::from(lane) / LANES, usize::from(lane) % LANES);
        (&self.used[WORDS * owner + value / 64], 1 << (value % 64))
    }

    /// Appends the chain from `first` to `last`, linked both ways, whose blocks are the caller's and out for `lane`.
    pub fn push(&self, nodes: &Nodes, lane: u16, first: u32, last: u32) {
        let (used, bit) = self.used_bit(lane);
        // Relaxed, here and below: the permits for these blocks bring the bit to whoever has to find them.
        if used.load(Ordering::Relaxed) & bit == 0 {
            used.fetch_or(bit, Ordering::Relaxed);
        }
        let sentinel = nodes.sentinel(lane);
        nodes.set_next(last, first);
        // Relaxed: the block is the caller's.
        let word = nodes.state(last).load(Ordering::Relaxed);
        loop {
            let idle = self.settle(nodes);
            // Acquire: like every read of a link in a ring, see `read`.
            let end = nodes.link(nodes.prev(sentinel).load(Ordering::Acquire), sentinel);
            nodes.set_prev(first, end);
            if self.start(nodes, idle, PUSH, last) {
                break;
            }
        }
        self.open(nodes, first, last, word);
    }

    /// The chain can be hit from now on. From the back: blocks are taken from the front, so the first one that has gone ends it.
    fn open(&self, nodes: &Nodes, first: u32, last: u32, last_word: u64) {
        let (mut at, mut word) = (last, last_word);
        loop {
            let before = if at == first { None } else { Self::before(nodes, at) };
            if !Self::open_one(nodes.state(at), word) {
                return;
            }
            let Some(next) = before else { return };
            (at, word) = next;
        }
    }

    /// The block before `at` and its state as it went in. True of a block that [`Lanes::open_one`] finds in its lane thereafter; None:
    /// all before it have been taken.
    fn before(nodes: &Nodes, at: u32) -> Option<(u32, u64)> {
        let link = nodes.prev(at);
        // Relaxed: nobody but who takes the block before changes it, and the second look cannot miss that.
        let id = low(link.load(Ordering::Relaxed));
        // Acquire: had the block been taken and come back, its new state would bring along what its taking did to the link.
        let word = nodes.state(id).load(Ordering::Acquire);
        (low(link.load(Ordering::Relaxed)) == id && !nodes.is_sentinel(id)).then_some((id, word))
    }

    /// False: the block was taken since its state was `word`.
    fn open_one(state: &AtomicU64, mut word: u64) -> bool {
        loop {
            let State { place: Place::Out(lane), named } = State::of(word) else { return false };
            let open = State { place: Place::Lane(lane), named }.in_word(word);
            // Release: who hits the block finds it in its ring.
            match state.compare_exchange(word, open, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(found) if found >> 32 == word >> 32 => word = found,
                Err(_) => return false,
            }
        }
    }

    /// Takes blocks from the front of `owner`'s lowest lane that has any into `out`, at most [`RUN`]; returns how many. They are held
    /// once.
    pub fn pop(&self, nodes: &Nodes, owner: usize, out: &mut [BlockId]) -> usize {
        for (word, used) in self.used[WORDS * owner..WORDS * (owner + 1)].iter().enumerate() {
            let mut bits = used.load(Ordering::Relaxed);
            while bits != 0 {
                let lane = (LANES * owner + 64 * word) as u16 + bits.trailing_zeros() as u16;
                bits &= bits - 1;
                let count = self.pop_lane(nodes, nodes.sentinel(lane), out);
                if count > 0 {
                    return count;
                }
            }
        }
        0
    }

    fn pop_lane(&self, nodes: &Nodes, sentinel: u32, out: &mut [BlockId]) -> usize {
        loop {
            let idle = self.settle(nodes);
            let (mut at, mut count) = (sentinel, 0);
            while count < out.len().min(RUN) {
                // Should another operation start meanwhile, this may lead anywhere among the nodes, and ours cannot start.
                let next = nodes.link(nodes.next(at).load(Ordering::Acquire), at);
                if nodes.is_sentinel(next) || next == 0 {
                    break;
                }
                out[count] = BlockId(next);
                count += 1;
                at = next;
            }
            if count == 0 || self.start(nodes, idle, POP, at) {
                return count;
            }
        }
    }

    /// Takes the longest head of `ids`, at most [`HITS`], of which each stands right before the one that it follows, out of its lane and
    /// makes the caller the holder; returns how many. None: the first is in no lane any more, or another operation came first.
    pub fn remove(&self, nodes: &Nodes, ids: &[BlockId]) -> usize {
        let idle = self.settle(nodes);
        let mut count = 0;
        for (at, id) in ids[..ids.len().min(HITS)].iter().map(|id| id.get()).enumerate() {
            // Acquire: the ring in which the block was opened.
            let state = State::of(nodes.state(id).load(Ordering::Acquire));
            let is_in_lane = matches!(state, State { place: Place::Lane(_), named: true });
            let is_trusted = at == 0 && mutant::is_on(Mutant::HitTrustsFirstLook);
            // Acquire: like every read of a link in a ring, see `read`.
            let follows = at == 0
                || low(nodes.prev(ids[at - 1].get()).load(Ordering::Acquire)) == id
                || mutant::is_on(Mutant::HitTakesNeighbours);
            if !(is_in_lane && follows || is_trusted) {
                break;
            }
            count += 1;
        }
        // Should another operation have started meanwhile, what was read is worth nothing, and ours cannot start.
        let is_done = count > 0 && self.start(nodes, idle, REMOVE | (count as u64 - 1) << ID_BITS, ids[0].get());
        if is_done { count } else { 0 }
    }

    /// The word while no operation is under way. One that is gets carried out here.
    fn settle(&self, nodes: &Nodes) -> u64 {
        loop {
            // Acquire: all that the operations so far have done.
            let word = self.operation.0.load(Ordering::Acquire);
            if word & KIND == 0 {
                return word;
            }
            if mutant::is_on(Mutant::WaitForOthers) {
                continue;
            }
            self.help(nodes, word);
        }
    }

    /// Writes an operation in place of the `idle` word and carries it out. False: another one came first, nothing was done.
    fn start(&self, nodes: &Nodes, idle: u64, kind: u64, id: u32) -> bool {
        let word = idle & VERSION | kind | u64::from(id);
        if mutant::is_on(Mutant::LanesIgnoreOthers) {
            self.operation.0.store(word, Ordering::Release);
            self.help(nodes, word);
            return true;
        }
        // Release: the chain of a push. Acquire: nothing was added since `idle`, but the word is read on from here.
        let started = self.operation.0.compare_exchange(idle, word, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if started {
            self.help(nodes, word);
        }
        started
    }

    /// Carries out the operation in `word`. It is over when this returns.
    fn help(&self, nodes: &Nodes, word: u64) {
        let id = (word & ID) as u32;
        let done = match word & KIND {
            REMOVE => self.help_remove(nodes, word, id, (word & MORE) >> ID_BITS),
            PUSH => self.help_push(nodes, word, id),
            _ => self.help_pop(nodes, word, id),
        };
        if done.is_some() {
            let idle = (word & VERSION).wrapping_add(1 << 33);
            // Release: what was done, here or seen here, comes before. Acquire: if another helper ended it, what that one did.
            let _ = self.operation.0.compare_exchange(word, idle, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    fn help_remove(&self, nodes: &Nodes, word: u64, last: u32, more: u64) -> Option<()> {
        let next = low(self.read(nodes.next(last), word)?);
        let mut first = last;
        for _ in 0..more {
            first = low(self.read(nodes.prev(first), word)?);
        }
        let prev = low(self.read(nodes.prev(first), word)?);
        self.swing(nodes, word, (nodes.next(prev), prev), first, next)?;
        if !mutant::is_on(Mutant::OneWayLink) {
            self.swing(nodes, word, (nodes.prev(next), next), last, prev)?;
        }
        // The links of those that leave stay as they were until the operation is over.
        let mut at = last;
        for _ in 0..more {
            self.hold(nodes, word, at, true)?;
            at = low(self.read(nodes.prev(at), word)?);
        }
        self.hold(nodes, word, at, true)
    }

    fn help_push(&self, nodes: &Nodes, word: u64, last: u32) -> Option<()> {
        let Place::Out(lane) = State::of(self.read(nodes.state(last), word)?).place else { return None };
        let sentinel = nodes.sentinel(lane);
        let first = low(self.read(nodes.next(last), word)?);
        if first == sentinel {
            return Some(());
        }
        let end = low(self.read(nodes.prev(first), word)?);
        self.swing(nodes, word, (nodes.next(end), end), sentinel, first)?;
        self.swing(nodes, word, (nodes.prev(sentinel), sentinel), end, last)?;
        self.swing(nodes, word, (nodes.next(last), last), first, sentinel)
    }

    fn help_pop(&self, nodes: &Nodes, word: u64, last: u32) -> Option<()> {
        let next = low(self.read(nodes.next(last), word)?);
        let mut first = last;
        let sentinel = loop {
            let prev = low(self.read(nodes.prev(first), word)?);
            self.hold(nodes, word, first, mutant::is_on(Mutant::TakeKeepsName))?;
            if nodes.is_sentinel(prev) {
                break prev;
            }
            first = prev;
        };
        self.swing(nodes, word, (nodes.next(sentinel), sentinel), first, next)?;
        if mutant::is_on(Mutant::OneWayLink) {
            return Some(());
        }
        self.swing(nodes, word, (nodes.prev(next), next), last, sentinel)
    }

    /// What `cell` holds while the operation in `word` is under way; None if that is over.
    ///
    /// The answer may be old by the time it is used, but never newer than the operation: every later change is a Release by a
    /// thread that has seen the operation end, so whoever reads it by Acquire sees the end too.
    fn read(&self, cell: &AtomicU64, word: u64) -> Option<u64> {
        let found = cell.load(Ordering::Acquire);
        // Acquire: if another helper ended the operation, who started it goes on with what that one did.
        let under_way = self.operation.0.load(Ordering::Acquire) == word;
        (under_way || mutant::is_on(Mutant::HelpersNeverStop)).then_some(found)
    }

    /// Turns a link of `id` from one node to another, once for all helpers. When this returns, it is done.
    fn swing(&self, nodes: &Nodes, word: u64, (link, id): (&AtomicU64, u32), from: u32, to: u32) -> Option<()> {
        let found = self.read(link, word)?;
        if nodes.link(found, id) == from {
            let version = if mutant::is_on(Mutant::LinksForgetVersion) { 0 } else { found };
            // Release: what made the new link right comes before. Acquire: if another helper was faster, what that one did.
            let _ = link.compare_exchange(found, after(version, to), Ordering::AcqRel, Ordering::Acquire);
        }
        Some(())
    }

    /// Makes who started the operation the holder of `id`, once for all helpers.
    fn hold(&self, nodes: &Nodes, word: u64, id: u32, keep_name: bool) -> Option<()> {
        let state = nodes.state(id);
        loop {
            let found = self.read(state, word)?;
            let State { place: Place::Lane(_) | Place::Out(_), named } = State::of(found) else { return Some(()) };
            let held = State { place: Place::Held(1), named: named && keep_name };
            // The version: a pusher that comes late to open the block fails. AcqRel as in `swing`.
            let new = held.in_word(after(found, 0));
            if state.compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return Some(());
            }
            // It was opened, or its name went, meanwhile.
        }
    }

    /// Every lane that was ever used, from the lowest.
    pub fn used(&self) -> impl DoubleEndedIterator<Item = u16> + '_ {
        let is_used = |lane: &u16| {
            let (used, bit) = self.used_bit(*lane);
            used.load(Ordering::Relaxed) & bit != 0
        };
        (0..(LANES * self.owners()) as u16).filter(is_used)
    }

    /// The blocks of `lane` from its front, or from its back. Exact while nobody else is at work.
    pub fn iter<'a>(&'a self, nodes: &'a Nodes, lane: u16, backwards: bool) -> impl Iterator<Item = u32> + 'a {
        let sentinel = nodes.sentinel(lane);
        let step = move |id: u32| {
            let link = if backwards { nodes.prev(id) } else { nodes.next(id) };
            nodes.link(link.load(Ordering::Acquire), id)
        };
        let mut at = step(sentinel);
        std::iter::from_fn(move || {
            let id = at;
            (!nodes.is_sentinel(id)).then(|| {
                at = step(id);
                id
            })
        })
        .take(nodes.num_blocks() as usize)
    }
}
