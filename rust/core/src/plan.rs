//! What one step runs, as flat arrays: their places in the memory that the model reads.
//!
//! Before: [`Scheduler::plan`](crate::scheduler::Scheduler::plan) fills them. After: the border shows them without a copy.
//! One staging buffer of 64-bit words holds every array of a plan at a fixed place, so that one copy brings a plan to a device and
//! captured graphs find it where it was; the persistent block tables lie beside it. The caller owns both memories, twice: plan
//! k writes the set that plan k - 1 does not use.

use std::ops::Range;

use crate::config::Config;

/// Places of the arrays in the staging buffer. 64-bit arrays are counted in words, 32-bit arrays in half words.
#[derive(Clone, Debug)]
pub struct Layout {
    /// [G, T] int64; the part of each group has room for the largest T.
    pub slot_mapping: Range<usize>,
    /// [K] int64.
    pub sample_requests: Range<usize>,
    /// [P, 2] int64.
    pub preempted: Range<usize>,
    /// [A, 3] int64.
    pub admitted: Range<usize>,
    /// [E, 2] int64.
    pub ended: Range<usize>,
    /// [S] int32.
    pub seq_slots: Range<usize>,
    /// [S + 1] int32.
    pub query_starts: Range<usize>,
    /// [S] int32.
    pub seq_lens: Range<usize>,
    /// [K] int32.
    pub sample_rows: Range<usize>,
    /// [T] int32.
    pub token_ids: Range<usize>,
    /// [T] int32.
    pub positions: Range<usize>,
    /// [T] int32.
    pub token_sources: Range<usize>,
    /// [D, 4] int32.
    pub dirty: Range<usize>,
    /// [sum of counts] int32.
    pub dirty_ids: Range<usize>,
    /// [C, 4] int32.
    pub copies: Range<usize>,
    /// Words of the staging buffer.
    pub words: usize,
    /// Entries of the block tables: [G, rows, max_blocks] int32.
    pub table_entries: usize,
}

impl Layout {
    /// The places for the largest plan that `config` allows.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let rows = config.rows() as usize;
        let tokens = config.max_num_batched_tokens as usize;
        let max_blocks = config.max_blocks() as usize;
        let groups = config.groups.len();
        let windows = config.groups.iter().filter(|spec| spec.window.is_some()).count();
        // The last request of all may lose sight of blocks, end for want of memory, and leave its row to another one in one plan.
        let twice = if windows > 0 { groups } else { 0 };
        // Blocks for drafts are taken after those of the row before them.
        let for_drafts = if config.max_draft_tokens > 0 { groups } else { 0 };
        let mut at = 0;
        let mut place = |len: usize| {
            at += len;
            at - len..at
        };
        let slot_mapping = place(groups * tokens);
        let sample_requests = place(config.samples());
        let preempted = place(2 * rows);
        let admitted = place(3 * rows);
        let ended = place(2 * (2 * rows + config.max_waiting as usize));
        let start = 2 * ended.end;
        let mut at = start;
        let mut place = |len: usize| {
            at += len;
            at - len..at
        };
        Layout {
            slot_mapping,
            sample_requests,
            preempted,
            admitted,
            ended,
            seq_slots: place(rows),
            query_starts: place(rows + 1),
            seq_lens: place(rows),
            sample_rows: place(config.samples()),
            token_ids: place(tokens),
            positions: place(tokens),
            token_sources: place(tokens),
            dirty: place(4 * (rows * (groups + windows + for_drafts) + twice)),
            dirty_ids: place((rows * groups + twice) * max_blocks),
            copies: place(4 * rows * groups),
            words: at.div_ceil(2),
            table_entries: groups * rows * max_blocks,
        }
    }
}

/// One of the two memories that plans are written to. Owned by the caller.
pub struct PlanMemory<'a> {
    /// [`Layout::words`] words.
    pub staging: &'a mut [i64],
    /// [`Layout::table_entries`] entries.
    pub tables: &'a mut [i32],
}

/// How much of each array a plan fills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Number of the plan.
    pub step: u64,
    /// S.
    pub seqs: usize,
    /// T.
    pub tokens: usize,
    /// K.
    pub samples: usize,
    /// D.
    pub dirty: usize,
    /// Sum of the counts of `dirty`.
    pub dirty_ids: usize,
    /// C.
    pub copies: usize,
    /// E.
    pub ended: usize,
    /// P.
    pub preempted: usize,
    /// A.
    pub admitted: usize,
}

/// What a plan tells beside its rows, while it is made. Its memory is kept from step to step, so that a steady step allocates nothing.
#[derive(Debug, Default)]
pub struct Draft {
    pub(crate) dirty: Vec<[i32; 4]>,
    pub(crate) dirty_ids: Vec<i32>,
    /// Group, source block, target block, rows.
    pub(crate) copies: Vec<[i32; 4]>,
    pub(crate) preempted: Vec<[i64; 2]>,
    pub(crate) admitted: Vec<[i64; 3]>,
    pub(crate) ended: Vec<[i64; 2]>,
}

impl Draft {
    /// A draft with room for the largest plan but the lists that are rarely long.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let rows = config.rows() as usize;
        Draft {
            dirty: Vec::with_capacity(rows),
            dirty_ids: Vec::with_capacity(rows),
            copies: Vec::with_capacity(rows),
            preempted: Vec::with_capacity(rows),
            admitted: Vec::with_capacity(rows),
            ended: Vec::with_capacity(rows),
        }
    }

    /// Empties every list.
    pub(crate) fn clear(&mut self) {
        self.dirty.clear();
        self.dirty_ids.clear();
        self.copies.clear();
        self.preempted.clear();
        self.admitted.clear();
        self.ended.clear();
    }

    /// Copies the lists to their places beside the rows, of which there are as many as `sizes` says, and adds their own sizes.
    pub(crate) fn write(&self, sizes: Sizes, layout: &Layout, staging: &mut [i64]) -> Sizes {
        let halves: &mut [i32] = bytemuck::cast_slice_mut(staging);
        put(halves, &layout.dirty, self.dirty.as_flattened());
        put(halves, &layout.dirty_ids, &self.dirty_ids);
        put(halves, &layout.copies, self.copies.as_flattened());
        put(staging, &layout.preempted, self.preempted.as_flattened());
        put(staging, &layout.admitted, self.admitted.as_flattened());
        put(staging, &layout.ended, self.ended.as_flattened());
        Sizes {
            dirty: self.dirty.len(),
            dirty_ids: self.dirty_ids.len(),
            copies: self.copies.len(),
            ended: self.ended.len(),
            preempted: self.preempted.len(),
            admitted: self.admitted.len(),
            ..sizes
        }
    }

    /// Writes the changes of this plan to the block tables of a memory.
    pub(crate) fn apply_to_tables(&self, shape: TableShape, tables: &mut [i32]) {
        shape.apply(&self.dirty, &self.dirty_ids, tables);
    }
}

/// Copies `from` to the start of `place`.
pub(crate) fn put<T: Copy>(to: &mut [T], place: &Range<usize>, from: &[T]) {
    to[place.clone()][..from.len()].copy_from_slice(from);
}

/// The shape of the block tables: [G, rows, max_blocks].
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableShape {
    pub rows: usize,
    pub max_blocks: usize,
}

impl TableShape {
    /// The shape for `config`.
    pub fn new(config: &Config) -> Self {
        TableShape { rows: config.rows() as usize, max_blocks: config.max_blocks() as usize }
    }

    /// Writes table changes, as in a plan's `dirty` and `dirty_ids`, to a block table memory.
    pub fn apply(self, dirty: &[[i32; 4]], ids: &[i32], tables: &mut [i32]) {
        let mut from = 0;
        for &[group, row, first, count] in dirty {
            let line = group as usize * self.rows + row as usize;
            let (to, count) = (line * self.max_blocks + first as usize, count as usize);
            if count == 1 {
                // Nearly always: a decode began a block.
                tables[to] = ids[from];
            } else {
                tables[to..to + count].copy_from_slice(&ids[from..from + count]);
            }
            from += count;
        }
    }
}
