//! Where atomics come from: the standard library, loom's models of them, or counted ones that can stop a thread.
//!
//! The only file that names their origin. Before: the queue asks for cells. After: in a wheel they are plain words of zeroed memory;
//! with `cfg(loom)` the model checker owns every access; with feature `mutants` each access passes [`crate::access`].

pub(crate) use std::sync::atomic::Ordering;

#[cfg(all(feature = "mutants", not(loom)))]
pub(crate) use crate::access::AtomicU64;
#[cfg(loom)]
pub(crate) use loom::sync::atomic::AtomicU64;
#[cfg(not(any(loom, feature = "mutants")))]
pub(crate) use std::sync::atomic::AtomicU64;

/// `len` groups of three zeros. Memory that the operating system zeroed is not written again, so that a large pool is cheap to make.
#[cfg(not(any(loom, feature = "mutants")))]
pub(crate) fn zeroed(len: usize) -> Box<[[AtomicU64; 3]]> {
    bytemuck::zeroed_slice_box(len)
}

/// `len` groups of three zeros.
#[cfg(any(loom, feature = "mutants"))]
pub(crate) fn zeroed(len: usize) -> Box<[[AtomicU64; 3]]> {
    (0..len).map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect()
}

/// A word that threads fight for, alone in its cache lines (two: processors fetch them in pairs).
#[repr(align(128))]
pub(crate) struct Alone(pub(crate) AtomicU64);
