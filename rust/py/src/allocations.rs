//! Counts heap allocations of Rust, in a build with feature `bench` only.

use pyo3::prelude::*;

#[cfg(feature = "bench")]
#[allow(unsafe_code)]
mod counting {
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::sync::atomic::{AtomicU64, Ordering};

    pub static COUNT: AtomicU64 = AtomicU64::new(0);

    struct Counting;

    // SAFETY: passes every call on to the system allocator unchanged.
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            COUNT.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the caller's duties are the system allocator's.
            unsafe { System.alloc(layout) }
        }
        unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
            COUNT.fetch_add(1, Ordering::Relaxed);
            // SAFETY: as above.
            unsafe { System.alloc_zeroed(layout) }
        }
        unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
            COUNT.fetch_add(1, Ordering::Relaxed);
            // SAFETY: as above.
            unsafe { System.realloc(old, layout, size) }
        }
        unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
            // SAFETY: as above.
            unsafe { System.dealloc(old, layout) }
        }
    }

    #[global_allocator]
    static ALLOCATOR: Counting = Counting;
}

/// Heap allocations of Rust so far, counted only in a build with feature `bench`; 0 otherwise.
#[pyfunction]
pub fn allocations() -> u64 {
    #[cfg(feature = "bench")]
    return counting::COUNT.load(std::sync::atomic::Ordering::Relaxed);
    #[cfg(not(feature = "bench"))]
    0
}
