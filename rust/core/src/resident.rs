//! Memory that is there before it is used.
//!
//! The system finds a page when it is written for the first time, and fills it with zeros: a microsecond, or hundreds for a huge page or
//! in a virtual machine whose host has to find one too. Before: a pool has made its arrays, of which no page has been found. After: who
//! serves from the pool has paid for all of them at the start, and no step ever does. A pool that is made for a moment leaves it.

use std::hint::black_box;

use bytemuck::Pod;

use crate::sync::{AtomicU64, Ordering};

/// Bytes of the smallest page of any system.
const PAGE: usize = 4096;

/// Writes to each page of `memory` what stands there.
pub(crate) fn bring_in<T: Pod>(memory: &mut [T]) {
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(memory);
    bytes.iter_mut().step_by(PAGE).for_each(|byte| *byte = black_box(*byte));
}

/// The same of words that threads share.
pub(crate) fn bring_in_words(memory: &[[AtomicU64; 3]]) {
    for words in memory.iter().step_by(PAGE / size_of::<[AtomicU64; 3]>()) {
        words[0].fetch_or(black_box(0), Ordering::Relaxed);
    }
}
