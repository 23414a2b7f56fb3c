//! The arrays of a plan that have an entry for each sequence, token or sample, while the plan is made, in the memory that the model reads.
//!
//! Before: a plan begins. After: the scheduler has added rows, for one request or for many decodes at once, and what is left of the budget
//! says how many tokens it might still add.

use std::ops::Range;

use crate::block_size::BlockSize;
use crate::block_table::BlockTable;
use crate::mutant::{self, Mutant};
use crate::plan::{Layout, Sizes};
use crate::request::Request;

/// The arrays, and how far they are filled.
#[derive(Debug)]
pub(crate) struct RowArrays<'a> {
    /// Tokens that may still be added.
    pub budget: usize,
    /// S so far: so many entries of the arrays with one entry a sequence are filled.
    seqs: usize,
    /// T so far.
    tokens: usize,
    /// K so far.
    samples: usize,
    seq_slots: &'a mut [i32],
    query_starts: &'a mut [i32],
    seq_lens: &'a mut [i32],
    token_ids: &'a mut [i32],
    positions: &'a mut [i32],
    token_sources: &'a mut [i32],
    /// Of each group, as long as `token_ids`.
    slots: &'a mut [i64],
    sample_rows: &'a mut [i32],
    sample_requests: &'a mut [i64],
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

impl<'a> RowArrays<'a> {
    /// The empty arrays of a plan of `budget` tokens at most, at their places in its memory.
    pub fn new(layout: &Layout, staging: &'a mut [i64], budget: usize) -> Self {
        let (wide, narrow) = staging.split_at_mut(layout.ended.end);
        let [slots, sample_requests] = parts(wide, 0, [&layout.slot_mapping, &layout.sample_requests]);
        let narrow = bytemuck::cast_slice_mut(narrow);
        let places = [
            &layout.seq_slots,
            &layout.query_starts,
            &layout.seq_lens,
            &layout.sample_rows,
            &layout.token_ids,
            &layout.positions,
            &layout.token_sources,
        ];
        let [seq_slots, query_starts, seq_lens, sample_rows, token_ids, positions, token_sources] =
            parts(narrow, 2 * layout.ended.end, places);
        query_starts[0] = 0;
        RowArrays {
            budget,
            seqs: 0,
            tokens: 0,
            samples: 0,
            seq_slots,
            query_starts,
            seq_lens,
            token_ids,
            positions,
            token_sources,
            slots,
            sample_rows,
            sample_requests,
        }
    }

    /// How much of the arrays plan number `step` fills.
    pub fn sizes(&self, step: u64) -> Sizes {
        Sizes { step, seqs: self.seqs, tokens: self.tokens, samples: self.samples, ..Sizes::default() }
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
        let mut fill = |group: usize, table: &BlockTable| {
            let first = group * self.token_ids.len();
            let slots = self.slots[first + tokens.start..first + tokens.end].iter_mut();
            if mutant::is_on(Mutant::ShortSlot) {
                slots.zip(table.slot(rows.start, size)..).for_each(|(to, slot)| *to = slot);
            } else {
                slots.zip(rows.clone()).for_each(|(to, position)| *to = table.slot(position, size));
            }
        };
        fill(0, &request.table);
        for (group, table) in (1..).zip(&request.others) {
            fill(group, if mutant::is_on(Mutant::SlotsOfFirstGroup) { &request.table } else { table });
        }
    }
}

/// The parts of `memory`, which begins at `start`, that lie at `places`, one behind the other.
fn parts<'a, T, const N: usize>(memory: &'a mut [T], start: usize, places: [&Range<usize>; N]) -> [&'a mut [T]; N] {
    let (mut rest, mut at) = (memory, start);
    places.map(|place| {
        let (before, behind) = std::mem::take(&mut rest).split_at_mut(place.end - at);
        (rest, at) = (behind, place.end);
        let len = before.len() - place.len();
        &mut before[len..]
    })
}
