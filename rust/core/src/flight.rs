//! The steps in flight: what they compute for whom, and which blocks they still name.
//!
//! Before: a plan fills one. After: commit or fail empties it, the older one first. While a step is in flight, a block that it names
//! cannot be handed out (design 14), and its results count only for requests whose epoch is still the one of the plan.

use std::fmt;
use std::ops::Range;

use crate::ids::{BlockId, StepId, TokenId};
use crate::resident::bring_in;

/// Steps in flight at most.
pub const MAX_DEPTH: u32 = 2;

/// What a step computes for one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub epoch: u64,
    /// Seat of the request.
    seat: u32,
    /// First row that the step writes.
    start: u32,
    /// Rows that it writes, and [`SAMPLES`] if the step brings a token for it.
    chunk: u32,
    /// Its place among [`Flight::rare`]; or [`FILLS`] and the place of the one block that it fills among [`Flight::pending`], if nothing
    /// else is to be said of it; or [`ORDINARY`].
    rare: u32,
}

/// Beside the rows of an entry: the step brings a token for it.
const SAMPLES: u32 = 1 << 31;

/// From here on `rare` is no place among [`Flight::rare`].
const FILLS: u32 = 1 << 31;

/// Nothing is to be said of an entry beside its rows.
const ORDINARY: u32 = u32::MAX;

impl Entry {
    /// Rows `start..start + chunk` of the request at `seat`, and nothing else.
    pub fn new(seat: usize, epoch: u64, start: usize, chunk: usize, samples: bool) -> Self {
        let samples = if samples { SAMPLES } else { 0 };
        Entry { epoch, seat: seat as u32, start: start as u32, chunk: chunk as u32 | samples, rare: ORDINARY }
    }

    /// One row, which brings a token, and nothing else.
    pub fn decode(seat: usize, epoch: u64, start: usize) -> Self {
        Entry::new(seat, epoch, start, 1, true)
    }

    pub fn seat(&self) -> usize {
        self.seat as usize
    }

    pub fn start(&self) -> usize {
        self.start as usize
    }

    pub fn chunk(&self) -> usize {
        (self.chunk & !SAMPLES) as usize
    }

    /// Whether the step brings a token for it.
    pub fn samples(&self) -> bool {
        self.chunk & SAMPLES > 0
    }

    /// Reads it, and makes something of it.
    pub fn glance(&self) -> u32 {
        self.rare
    }

    /// Whether it is one row that brings a token, and [`Flight::rare`] says nothing of it.
    pub fn is_plain_decode(&self) -> bool {
        self.chunk == 1 | SAMPLES && self.rare >= FILLS
    }

    /// Place among [`Flight::pending`] of the one block that it fills, if that is all that is to be said of it.
    pub fn filled(&self) -> Option<usize> {
        (FILLS..ORDINARY).contains(&self.rare).then_some((self.rare & !FILLS) as usize)
    }
}

/// What is to be said of few entries.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rare {
    /// The step copies rows of the block that it writes first: they are there when the step is committed.
    pub copied: bool,
    /// Rows among them that a partial hit brings.
    pub partial: usize,
    /// It was forked since: who shares its last block was not there when the step was planned.
    pub forked: bool,
    /// Sequences that get their first token from its last row, beside itself.
    pub siblings: u32,
    /// Its drafts among [`Flight::drafts`], and how many of the blocks for them it had been promised.
    pub drafts: Range<usize>,
    pub lent: u32,
    /// Its blocks among [`Flight::pending`].
    pub pending: Range<usize>,
    /// Table entries that were pending when they were hit: the first, and the end of all hits. Empty if there are none.
    pub shared: Range<usize>,
}

/// One step: in flight, being planned, or over and empty.
#[derive(Debug)]
pub(crate) struct Flight {
    /// In the order of the plan: who shares a pending block comes behind its writer.
    pub entries: Vec<Entry>,
    rare: Vec<Rare>,
    /// Blocks whose last row the step writes.
    pub pending: Vec<BlockId>,
    /// Tokens that are not known to follow: see [`speculation`](crate::speculation).
    pub drafts: Vec<TokenId>,
    /// Blocks that were taken for them.
    pub lookahead: u32,
    /// Entries of the plan's `sample_rows`.
    pub samples: usize,
    /// Blocks that left their table while this step was the last to name them.
    orphans: Vec<BlockId>,
}

impl Flight {
    fn new(rows: usize) -> Self {
        Flight {
            entries: Vec::with_capacity(rows),
            rare: Vec::with_capacity(rows),
            pending: Vec::with_capacity(rows),
            drafts: Vec::new(),
            lookahead: 0,
            samples: 0,
            orphans: Vec::new(),
        }
    }

    /// What is to be said of `entry` beside its rows.
    pub fn rare(&self, entry: &Entry) -> Rare {
        match entry.filled() {
            Some(at) => Rare { pending: at..at + 1, ..Rare::default() },
            None => self.rare.get(entry.rare as usize).cloned().unwrap_or_default(),
        }
    }

    /// Entry `at` fills these of [`Flight::pending`].
    pub fn fill(&mut self, at: usize, pending: Range<usize>) {
        let entry = &mut self.entries[at];
        if entry.rare == ORDINARY && pending.len() == 1 {
            entry.rare = FILLS | pending.start as u32;
        } else {
            self.rare_mut(at).pending = pending;
        }
    }

    /// The same of entry `at`, to change it.
    pub fn rare_mut(&mut self, at: usize) -> &mut Rare {
        let entry = self.entries[at];
        if entry.rare >= FILLS {
            self.entries[at].rare = self.rare.len() as u32;
            self.rare.push(self.rare(&entry));
        }
        &mut self.rare[self.entries[at].rare as usize]
    }

    /// Forgets everything but orphans.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.rare.clear();
        self.pending.clear();
        self.drafts.clear();
        self.lookahead = 0;
        self.samples = 0;
    }
}

/// The steps in flight, by number: every other one shares its memory.
pub(crate) struct Flights {
    steps: [Flight; MAX_DEPTH as usize],
    /// Every step up to this one has ended.
    landed: u64,
    /// The last plan, made or under way.
    newest: u64,
    /// For each block the steps that orphaned it: a bit for even numbers, one for odd ones.
    is_orphan: Box<[u8]>,
}

impl fmt::Debug for Flights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.in_flight().map(|step| (step, self.of(step)))).finish()
    }
}

impl Flights {
    pub fn new(num_blocks: u32, rows: usize) -> Self {
        let mut is_orphan: Box<[u8]> = vec![0; num_blocks as usize].into();
        bring_in(&mut is_orphan);
        Flights { steps: std::array::from_fn(|_| Flight::new(rows)), landed: 0, newest: 0, is_orphan }
    }

    /// Step `step`, which is in flight or being planned, or ended in this call.
    pub fn of(&self, step: u64) -> &Flight {
        &self.steps[(step % u64::from(MAX_DEPTH)) as usize]
    }

    /// The same, to change it.
    pub fn of_mut(&mut self, step: u64) -> &mut Flight {
        &mut self.steps[(step % u64::from(MAX_DEPTH)) as usize]
    }

    /// Steps in flight from `first` on, or `first` itself if it ended in this call.
    pub fn since(&self, first: u64) -> impl Iterator<Item = u64> + use<> {
        let newest = self.newest;
        first..=newest
    }

    /// Steps in flight, the oldest first, and the plan under way if it runs something so far.
    pub fn in_flight(&self) -> impl Iterator<Item = u64> + '_ {
        self.since(self.landed + 1).filter(|&step| !self.of(step).entries.is_empty())
    }

    /// The oldest step in flight.
    pub fn oldest(&self) -> Option<StepId> {
        self.in_flight().next().map(StepId)
    }

    /// Blocks that the steps in flight took for drafts: most are given back when they end.
    pub fn lookahead(&self) -> u32 {
        self.in_flight().map(|step| self.of(step).lookahead).sum()
    }

    /// Whether a step in flight runs, or the plan under way, what was last planned in step `planned_in`.
    pub fn runs(&self, planned_in: u64) -> bool {
        planned_in > self.landed
    }

    /// The last step that has not ended and that named `block` when it left its table; 0 if there is none.
    pub fn orphaned_until(&self, block: BlockId) -> u64 {
        match self.is_orphan[block.index()] {
            0 => 0,
            bits => {
                let next = self.landed + 1;
                if (bits >> ((next + 1) % 2)) & 1 == 1 { next + 1 } else { next }
            }
        }
    }

    /// Whether `block` left its table while a step that has not ended named it.
    pub fn is_orphan(&self, block: BlockId) -> bool {
        self.is_orphan[block.index()] > 0
    }

    /// `blocks` leave a table that step `step`, and none behind it, names.
    pub fn orphan(&mut self, blocks: &[BlockId], step: u64) {
        let bit = 1 << (step % 2);
        for &block in blocks {
            let bits = &mut self.is_orphan[block.index()];
            if *bits & bit == 0 {
                *bits |= bit;
                self.steps[(step % 2) as usize].orphans.push(block);
            }
        }
    }

    /// Makes room for plan number `step`. If nothing is in flight, all before it have ended.
    pub fn begin(&mut self, step: u64) {
        if self.oldest().is_none() {
            self.landed = step - 1;
        }
        self.newest = step;
        self.of_mut(step).clear();
    }

    /// Step `step`, the oldest, has ended: it names nothing any more. What it computed is still here.
    pub fn land(&mut self, step: u64) {
        self.landed = step;
        let bit = 1 << (step % 2);
        for block in self.steps[(step % 2) as usize].orphans.drain(..) {
            self.is_orphan[block.index()] &= !bit;
        }
    }
}
