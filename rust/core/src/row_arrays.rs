//! The arrays of a plan that have an entry for each sequence, token or sample, while the plan is made.
//!
//! Before: the scheduler adds rows, for one request or for many decodes at once. After: [`RowArrays::write`] copies them to the memory
//! that the model reads. They have room for the largest plan from the start.

use std::ops::Range;

use crate::block_size::BlockSize;
use crate::block_table::BlockTable;
use crate::config::Config;
use crate::mutant::{self, Mutant};
use crate::plan::{Layout, put};
use crate::request::Request;

/// The arrays, and how far they are filled.
#[derive(Debug, Default)]
pub(crate) struct RowArrays {
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
}

/// The next entries of the arrays, to be filled.
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

impl Rows<'_> {
    /// What follows from the positions of the first `count` of these sequences, each of which has one token and one sample.
    pub fn follow_positions(&mut self, count: usize) {
        let first = self.first_token as i32;
        self.seq_lens.iter_mut().zip(&self.positions[..count]).for_each(|(to, position)| *to = position + 1);
        // Counted one by one, which the compiler turns into many at a time.
        self.sample_rows[..count].iter_mut().enumerate().for_each(|(at, to)| *to = first + at as i32);
        self.query_ends[..count].iter_mut().enumerate().for_each(|(at, to)| *to = first + at as i32 + 1);
    }
}

impl RowArrays {
    /// Arrays with room for the largest plan that `config` allows.
    pub fn new(config: &Config) -> Self {
        let rows = config.rows() as usize;
        let tokens = config.max_num_batched_tokens as usize;
        let narrow = |len: usize| vec![0; len].into();
        let wide = |len: usize| vec![0; len].into();
        RowArrays {
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
        }
    }

    /// Empties every array.
    pub fn clear(&mut self) {
        (self.seqs, self.tokens, self.samples) = (0, 0, 0);
    }

    /// S so far.
    pub fn num_seqs(&self) -> usize {
        self.seqs
    }

    /// T so far.
    pub fn num_tokens(&self) -> usize {
        self.tokens
    }

    /// K so far.
    pub fn num_samples(&self) -> usize {
        self.samples
    }

    /// The entries of so many more sequences, tokens and samples.
    #[inline(always)]
    pub fn more(&mut self, seqs: usize, tokens: usize, samples: usize) -> Rows<'_> {
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
    pub fn give_back(&mut self, count: usize) {
        self.seqs -= count;
        self.tokens -= count;
        self.samples -= count;
    }

    /// Fills positions and slots of the last tokens, which are these rows of a request. It has blocks for them.
    pub fn put(&mut self, request: &Request, rows: Range<usize>, size: BlockSize) {
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

    /// Copies what is filled to its places.
    pub fn write(&self, layout: &Layout, staging: &mut [i64]) {
        put(staging, &layout.slot_mapping, &self.slots[..self.tokens]);
        let room = layout.slot_mapping.len() / (self.other_slots.len() + 1);
        for (group, slots) in (1..).zip(&self.other_slots) {
            let start = layout.slot_mapping.start + group * room;
            put(staging, &(start..start + room), &slots[..self.tokens]);
        }
        put(staging, &layout.sample_requests, &self.sample_requests[..self.samples]);
        let halves: &mut [i32] = bytemuck::cast_slice_mut(staging);
        put(halves, &layout.seq_slots, &self.seq_slots[..self.seqs]);
        put(halves, &layout.query_starts, &self.query_starts[..=self.seqs]);
        put(halves, &layout.seq_lens, &self.seq_lens[..self.seqs]);
        put(halves, &layout.sample_rows, &self.sample_rows[..self.samples]);
        put(halves, &layout.token_ids, &self.token_ids[..self.tokens]);
        put(halves, &layout.positions, &self.positions[..self.tokens]);
        put(halves, &layout.token_sources, &self.token_sources[..self.tokens]);
    }
}
