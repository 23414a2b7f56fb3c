//! A plan, read from the memory that the core wrote it to, into vectors with names.

use blocktable_core::plan::{Layout, Sizes};

/// The arrays of one plan. The persistent block tables stay in the memory of the step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub step: u64,
    pub seq_slots: Vec<i32>,
    pub query_starts: Vec<i32>,
    pub seq_lens: Vec<i32>,
    pub token_ids: Vec<i32>,
    pub positions: Vec<i32>,
    pub token_sources: Vec<i32>,
    /// Of the first group.
    pub slot_mapping: Vec<i64>,
    /// Of every group.
    pub group_slots: Vec<Vec<i64>>,
    pub sample_rows: Vec<i32>,
    pub sample_requests: Vec<i64>,
    /// Group * rows + row, first column, ids.
    pub dirty: Vec<(i32, i32, Vec<i32>)>,
    /// Group, source block, target block, rows.
    pub copies: Vec<[i32; 4]>,
    /// Request id, end code.
    pub ended: Vec<(u64, i64)>,
    /// Request ids.
    pub preempted: Vec<u64>,
    /// Request id, row.
    pub admitted: Vec<(u64, i32)>,
}

impl Plan {
    /// Copies the arrays out of `staging`.
    pub fn read(sizes: &Sizes, layout: &Layout, staging: &[i64]) -> Self {
        let words = |place: &std::ops::Range<usize>, len: usize| staging[place.start..place.start + len].to_vec();
        let halves: &[i32] = bytemuck::cast_slice(staging);
        let halves = |place: &std::ops::Range<usize>, len: usize| halves[place.start..place.start + len].to_vec();
        let pairs = words(&layout.ended, 2 * sizes.ended);
        let preempted = words(&layout.preempted, 2 * sizes.preempted);
        let admitted = words(&layout.admitted, 3 * sizes.admitted);
        let (rows, room) = (layout.seq_slots.len() as i32, layout.token_ids.len());
        let slots_of = |slots: &[i64]| slots[..sizes.tokens].to_vec();
        let group_slots: Vec<Vec<i64>> = staging[layout.slot_mapping.clone()].chunks(room).map(slots_of).collect();
        let mut ids = halves(&layout.dirty_ids, sizes.dirty_ids).into_iter();
        let dirty = halves(&layout.dirty, 4 * sizes.dirty);
        Plan {
            step: sizes.step,
            seq_slots: halves(&layout.seq_slots, sizes.seqs),
            query_starts: halves(&layout.query_starts, sizes.seqs + 1),
            seq_lens: halves(&layout.seq_lens, sizes.seqs),
            token_ids: halves(&layout.token_ids, sizes.tokens),
            positions: halves(&layout.positions, sizes.tokens),
            token_sources: halves(&layout.token_sources, sizes.tokens),
            slot_mapping: group_slots[0].clone(),
            group_slots,
            sample_rows: halves(&layout.sample_rows, sizes.samples),
            sample_requests: words(&layout.sample_requests, sizes.samples),
            dirty: dirty
                .chunks(4)
                .map(|d| (d[0] * rows + d[1], d[2], ids.by_ref().take(d[3] as usize).collect()))
                .collect(),
            copies: halves(&layout.copies, 4 * sizes.copies)
                .chunks(4)
                .map(|copy| std::array::from_fn(|i| copy[i]))
                .collect(),
            ended: pairs.chunks(2).map(|pair| (pair[0] as u64, pair[1])).collect(),
            preempted: preempted.chunks(2).map(|pair| (pair[0] + pair[1]) as u64).collect(),
            admitted: admitted.chunks(3).map(|three| ((three[0] + three[1]) as u64, three[2] as i32)).collect(),
        }
    }

    /// Tokens of each sequence in this step.
    pub fn chunks(&self) -> Vec<usize> {
        self.query_starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect()
    }

    /// Sequences whose prompt goes on in a later step.
    pub fn num_chunks_without_sample(&self) -> usize {
        self.query_starts[1..].iter().filter(|&&end| !self.sample_rows.contains(&(end - 1))).count()
    }

    /// Whether there is nothing for the model to do.
    pub fn is_empty(&self) -> bool {
        self.seq_slots.is_empty()
    }
}
