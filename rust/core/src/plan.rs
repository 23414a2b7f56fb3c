//! What one step runs, as flat arrays: their places in the memory that the model reads.
//!
//! Before: [`Scheduler::plan`](crate::scheduler::Scheduler::plan) fills them. After: the border shows them without a copy.
//! One staging buffer of 64-bit words holds every array of a plan at a fixed place, so that one copy brings a plan to a device and
//! captured graphs find it where it was; the persistent block tables lie beside it. The caller owns both memories, twice: plan
//! k writes the set that plan k - 1 does not use.

use std::ops::Range;

use crate::block_size::BlockSize;
use crate::block_table::BlockTable;
use crate::config::Config;
use crate::mutant::{self, Mutant};
use crate::request::Request;

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

/// A plan while it is made. Its memory is kept from step to step, so that a steady step allocates nothing.
#[derive(Debug, Default)]
pub struct Draft {
    /// S so far: so many entries of the arrays with one entry a sequence are filled.
    seqs: usize,
    /// T so far.
    tokens: usize,
    /// K so far.
    samples: usize,
    seq_slots: Box<[i32]>,
    query_starts: Box<[i32]>,
    seq_lens: Box<[i32]>,
    token_ids: Box<[i32]>,
    positions: Box<[i32]>,
    token_sources: Box<[i32]>,
    /// Slots in the first group.
    slots: Box<[i64]>,
    /// Slots in the groups behind it.
    other_slots: Box<[Box<[i64]>]>,
    sample_rows: Box<[i32]>,
    sample_requests: Box<[i64]>,
    pub(crate) dirty: Vec<[i32; 4]>,
    pub(crate) dirty_ids: Vec<i32>,
    /// Group, source block, target block, rows.
    pub(crate) copies: Vec<[i32; 4]>,
    pub(crate) preempted: Vec<[i64; 2]>,
    pub(crate) admitted: Vec<[i64; 3]>,
    pub(crate) ended: Vec<[i64; 2]>,
}

/// The next entries of a draft's arrays, to be filled.
pub(crate) struct Rows<'a> {
    /// T before them.
    pub first_token: usize,
    /// K before them.
    pub first_sample: usize,
    pub seq_slots: &'a mut [i32],
    /// Where the tokens of each sequence end.
    pub query_ends: &'a mut [i32],
    pub seq_lens: &'a mut [i32],
    pub token_ids: &'a mut [i32],
    pub positions: &'a mut [i32],
    pub token_sources: &'a mut [i32],
    pub slots: &'a mut [i64],
    pub sample_rows: &'a mut [i32],
    pub sample_requests: &'a mut [i64],
}

impl Draft {
    /// A draft with room for the largest plan but the lists that are rarely long.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let rows = config.rows() as usize;
        let tokens = config.max_num_batched_tokens as usize;
        let narrow = |len: usize| vec![0; len].into();
        let wide = |len: usize| vec![0; len].into();
        Draft {
            seqs: 0,
            tokens: 0,
            samples: 0,
            seq_slots: narrow(rows),
            query_starts: narrow(rows + 1),
            seq_lens: narrow(rows),
            token_ids: narrow(tokens),
            positions: narrow(tokens),
            token_sources: narrow(tokens),
            slots: wide(tokens),
            other_slots: (1..config.groups.len()).map(|_| wide(tokens)).collect(),
            sample_rows: narrow(config.samples()),
            sample_requests: wide(config.samples()),
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
        (self.seqs, self.tokens, self.samples) = (0, 0, 0);
        self.dirty.clear();
        self.dirty_ids.clear();
        self.copies.clear();
        self.preempted.clear();
        self.admitted.clear();
        self.ended.clear();
    }

    /// T so far.
    pub(crate) fn num_tokens(&self) -> usize {
        self.tokens
    }

    /// K so far.
    pub(crate) fn num_samples(&self) -> usize {
        self.samples
    }

    /// The entries of so many more sequences, tokens and samples.
    #[inline(always)]
    pub(crate) fn more(&mut self, seqs: usize, tokens: usize, samples: usize) -> Rows<'_> {
        let (seq, token, sample) = (self.seqs, self.tokens, self.samples);
        (self.seqs, self.tokens, self.samples) = (seq + seqs, token + tokens, sample + samples);
        Rows {
            first_token: token,
            first_sample: sample,
            seq_slots: &mut self.seq_slots[seq..][..seqs],
            query_ends: &mut self.query_starts[seq + 1..][..seqs],
            seq_lens: &mut self.seq_lens[seq..][..seqs],
            token_ids: &mut self.token_ids[token..][..tokens],
            positions: &mut self.positions[token..][..tokens],
            token_sources: &mut self.token_sources[token..][..tokens],
            slots: &mut self.slots[token..][..tokens],
            sample_rows: &mut self.sample_rows[sample..][..samples],
            sample_requests: &mut self.sample_requests[sample..][..samples],
        }
    }

    /// The last `count` sequences, of one token and one sample each, were not filled after all.
    pub(crate) fn give_back(&mut self, count: usize) {
        self.seqs -= count;
        self.tokens -= count;
        self.samples -= count;
    }

    /// Fills positions and slots of the last tokens, which are these rows of a request. It has blocks for them.
    pub(crate) fn put_rows(&mut self, request: &Request, rows: Range<usize>, size: BlockSize) {
        let tokens = self.tokens - rows.len()..self.tokens;
        let positions = self.positions[tokens.clone()].iter_mut();
        positions.zip(rows.clone()).for_each(|(to, position)| *to = position as i32);
        let fill = |slots: &mut [i64], table: &BlockTable| {
            let slots = slots[tokens.clone()].iter_mut();
            if mutant::is_on(Mutant::ShortSlot) {
                slots.zip(table.slot(rows.start, size)..).for_each(|(to, slot)| *to = slot);
            } else {
                slots.zip(rows.clone()).for_each(|(to, position)| *to = table.slot(position, size));
            }
        };
        fill(&mut self.slots, &request.table);
        for (slots, table) in self.other_slots.iter_mut().zip(&request.others) {
            fill(slots, if mutant::is_on(Mutant::SlotsOfFirstGroup) { &request.table } else { table });
        }
    }

    /// Copies the lists to their places; returns how much of each place is filled.
    pub(crate) fn write(&self, step: u64, layout: &Layout, staging: &mut [i64]) -> Sizes {
        fn put<T: Copy>(to: &mut [T], place: &Range<usize>, from: &[T]) {
            to[place.clone()][..from.len()].copy_from_slice(from);
        }
        put(staging, &layout.slot_mapping, &self.slots[..self.tokens]);
        let room = layout.slot_mapping.len() / (self.other_slots.len() + 1);
        for (group, slots) in (1..).zip(&self.other_slots) {
            let start = layout.slot_mapping.start + group * room;
            put(staging, &(start..start + room), &slots[..self.tokens]);
        }
        put(staging, &layout.sample_requests, &self.sample_requests[..self.samples]);
        put(staging, &layout.preempted, self.preempted.as_flattened());
        put(staging, &layout.admitted, self.admitted.as_flattened());
        put(staging, &layout.ended, self.ended.as_flattened());
        let halves: &mut [i32] = bytemuck::cast_slice_mut(staging);
        put(halves, &layout.seq_slots, &self.seq_slots[..self.seqs]);
        put(halves, &layout.query_starts, &self.query_starts[..=self.seqs]);
        put(halves, &layout.seq_lens, &self.seq_lens[..self.seqs]);
        put(halves, &layout.sample_rows, &self.sample_rows[..self.samples]);
        put(halves, &layout.token_ids, &self.token_ids[..self.tokens]);
        put(halves, &layout.positions, &self.positions[..self.tokens]);
        put(halves, &layout.token_sources, &self.token_sources[..self.tokens]);
        put(halves, &layout.dirty, self.dirty.as_flattened());
        put(halves, &layout.dirty_ids, &self.dirty_ids);
        put(halves, &layout.copies, self.copies.as_flattened());
        Sizes {
            step,
            seqs: self.seqs,
            tokens: self.tokens,
            samples: self.samples,
            dirty: self.dirty.len(),
            dirty_ids: self.dirty_ids.len(),
            copies: self.copies.len(),
            ended: self.ended.len(),
            preempted: self.preempted.len(),
            admitted: self.admitted.len(),
        }
    }

    /// Writes the changes of this plan to the block tables of a memory.
    pub(crate) fn apply_to_tables(&self, shape: TableShape, tables: &mut [i32]) {
        shape.apply(&self.dirty, &self.dirty_ids, tables);
    }
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
            tables[to..to + count].copy_from_slice(&ids[from..from + count]);
            from += count;
        }
    }
}
