//! The step in flight: what it computes for whom, and which blocks it still names.
//!
//! Before: a plan fills it. After: commit or fail empties it. While a step is in flight, a block that it names cannot be handed
//! out (design 14), and its results count only for requests whose epoch is still the one of the plan.

use std::ops::Range;

use crate::ids::{BlockId, StepId};

/// What the step in flight computes for one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub epoch: u64,
    /// Seat of the request.
    seat: u32,
    /// First row that the step writes.
    start: u32,
    /// Rows that it writes.
    chunk: u32,
    /// Its place among [`Flight::rare`], or [`ORDINARY`].
    rare: u32,
    /// Whether the step brings a token for it.
    pub samples: bool,
}

/// Nothing is to be said of an entry beside its rows.
const ORDINARY: u32 = u32::MAX;

impl Entry {
    /// Rows `start..start + chunk` of the request at `seat`, and nothing else.
    pub fn new(seat: usize, epoch: u64, start: usize, chunk: usize, samples: bool) -> Self {
        Entry { epoch, seat: seat as u32, start: start as u32, chunk: chunk as u32, rare: ORDINARY, samples }
    }

    pub fn seat(&self) -> usize {
        self.seat as usize
    }

    pub fn start(&self) -> usize {
        self.start as usize
    }

    pub fn chunk(&self) -> usize {
        self.chunk as usize
    }

    /// Whether [`Flight::rare`] says nothing of it.
    pub fn is_ordinary(&self) -> bool {
        self.rare == ORDINARY
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
    /// Its blocks among [`Flight::pending`].
    pub pending: Range<usize>,
    /// Table entries that were pending when they were hit: the first, and the end of all hits. Empty if there are none.
    pub shared: Range<usize>,
}

/// The step in flight, if there is one.
#[derive(Debug)]
pub(crate) struct Flight {
    pub step: Option<StepId>,
    /// In the order of the plan: who shares a pending block comes behind its writer.
    pub entries: Vec<Entry>,
    rare: Vec<Rare>,
    /// Blocks whose last row the step writes.
    pub pending: Vec<BlockId>,
    /// Blocks that the step names and that left their table since.
    orphans: Vec<BlockId>,
    is_orphan: Box<[bool]>,
}

impl Flight {
    pub fn new(num_blocks: u32, rows: usize) -> Self {
        Flight {
            step: None,
            entries: Vec::with_capacity(rows),
            rare: Vec::with_capacity(rows),
            pending: Vec::with_capacity(rows),
            orphans: Vec::new(),
            is_orphan: vec![false; num_blocks as usize].into(),
        }
    }

    /// What is to be said of `entry` beside its rows.
    pub fn rare(&self, entry: &Entry) -> Rare {
        self.rare.get(entry.rare as usize).cloned().unwrap_or_default()
    }

    /// The same of entry `at`, to change it.
    pub fn rare_mut(&mut self, at: usize) -> &mut Rare {
        let entry = &mut self.entries[at];
        if entry.rare == ORDINARY {
            entry.rare = self.rare.len() as u32;
            self.rare.push(Rare::default());
        }
        &mut self.rare[entry.rare as usize]
    }

    /// Whether the step in flight runs what was last planned in step `planned_in`.
    pub fn runs(&self, planned_in: u64) -> bool {
        self.step == Some(StepId(planned_in))
    }

    /// Whether `block` left its table while the step in flight named it.
    pub fn is_orphan(&self, block: BlockId) -> bool {
        self.is_orphan[block.index()]
    }

    /// `blocks` leave a table that the step in flight names.
    pub fn orphan(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            if !std::mem::replace(&mut self.is_orphan[block.index()], true) {
                self.orphans.push(block);
            }
        }
    }

    /// The step has ended: it names nothing any more. What it computed is still here.
    pub fn land(&mut self) {
        self.step = None;
        for block in self.orphans.drain(..) {
            self.is_orphan[block.index()] = false;
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.land();
        self.entries.clear();
        self.rare.clear();
        self.pending.clear();
    }
}
