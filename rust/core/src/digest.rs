//! Digests of what a plan holds and of the counters, to compare a replay with its recording: quick, and no protection against anybody.
//!
//! Before: a plan was written to its memory. After: a number of 32 bits for each array of the plan, in the order of [`NAMES`].

use crate::commit::Committed;
use crate::plan::{Layout, Sizes};
use crate::scheduler::Scheduler;

/// What a plan's digests are of.
pub const NAMES: [&str; 17] = [
    "sizes",
    "seq_slots",
    "query_starts",
    "seq_lens",
    "token_ids",
    "positions",
    "token_sources",
    "slot_mapping",
    "dirty",
    "dirty_ids",
    "copies",
    "sample_rows",
    "sample_requests",
    "ended",
    "preempted",
    "admitted",
    "counters",
];

/// Folds numbers into one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Digest(u64);

impl Digest {
    pub fn new() -> Self {
        Digest(0x243F_6A88_85A3_08D3)
    }

    /// Adds one number. Multiplication is by 2^64 / golden ratio.
    pub fn add(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(29) ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    /// The digest of `bytes`, whose number is added too.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut digest = Digest::new();
        digest.add(bytes.len() as u64);
        let (words, rest) = bytes.as_chunks();
        words.iter().for_each(|&word| digest.add(u64::from_le_bytes(word)));
        rest.iter().for_each(|&byte| digest.add(u64::from(byte)));
        digest.end()
    }

    pub fn end(self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}

fn of_sizes(sizes: &Sizes) -> u64 {
    let Sizes { step, seqs, tokens, samples, dirty, dirty_ids, copies, ended, preempted, admitted } = *sizes;
    let mut digest = Digest::new();
    digest.add(step);
    for size in [seqs, tokens, samples, dirty, dirty_ids, copies, ended, preempted, admitted] {
        digest.add(size as u64);
    }
    digest.end()
}

/// Of what a commit changed.
pub(crate) fn of_committed(committed: &Committed) -> u64 {
    let Committed { ended, accepted, dropped } = committed;
    let mut digest = Digest::new();
    digest.add(*accepted as u64);
    digest.add(Digest::of(bytemuck::cast_slice(ended)));
    digest.add(Digest::of(bytemuck::cast_slice(dropped)));
    digest.end()
}

/// Digests of the plan of `sizes` that stands in `staging`, and of what `scheduler` has counted, in the order of [`NAMES`].
pub(crate) fn of_plan(scheduler: &Scheduler, sizes: &Sizes, staging: &[i64], digests: &mut Vec<u32>) {
    let layout: &Layout = scheduler.layout();
    let groups = scheduler.config().groups.len();
    let halves: &[i32] = bytemuck::cast_slice(staging);
    let wide = |place: &std::ops::Range<usize>, len: usize| {
        Digest::of(bytemuck::cast_slice(&staging[place.start..place.start + len])) as u32
    };
    let narrow = |place: &std::ops::Range<usize>, len: usize| {
        Digest::of(bytemuck::cast_slice(&halves[place.start..place.start + len])) as u32
    };
    let mut slots = Digest::new();
    let room = layout.slot_mapping.len() / groups;
    for group in 0..groups {
        let start = layout.slot_mapping.start + group * room;
        slots.add(Digest::of(bytemuck::cast_slice(&staging[start..start + sizes.tokens])));
    }
    let mut counted = Digest::new();
    scheduler.counters().named().iter().for_each(|&(_, count)| counted.add(count));
    let pool = scheduler.pool();
    for number in [pool.num_free(), pool.num_parked(), pool.num_held(), scheduler.promised] {
        counted.add(u64::from(number));
    }
    for number in [pool.evictions(), scheduler.num_running() as u64, scheduler.num_waiting() as u64] {
        counted.add(number);
    }
    digests.clear();
    digests.extend([
        of_sizes(sizes) as u32,
        narrow(&layout.seq_slots, sizes.seqs),
        narrow(&layout.query_starts, sizes.seqs + 1),
        narrow(&layout.seq_lens, sizes.seqs),
        narrow(&layout.token_ids, sizes.tokens),
        narrow(&layout.positions, sizes.tokens),
        narrow(&layout.token_sources, sizes.tokens),
        slots.end() as u32,
        narrow(&layout.dirty, 4 * sizes.dirty),
        narrow(&layout.dirty_ids, sizes.dirty_ids),
        narrow(&layout.copies, 4 * sizes.copies),
        narrow(&layout.sample_rows, sizes.samples),
        wide(&layout.sample_requests, sizes.samples),
        wide(&layout.ended, 2 * sizes.ended),
        wide(&layout.preempted, 2 * sizes.preempted),
        wide(&layout.admitted, 3 * sizes.admitted),
        counted.end() as u32,
    ]);
}
