//! Where Rust's memory comes from: the system, on huge pages what is large. In a build with feature `counted` allocations are counted.
//!
//! A step reads a few words of each of many blocks and requests, in arrays of megabytes: on pages of 4 KiB most of those reads wait for
//! the address too. A step takes 0.87 of the time with 8,192 decoding in a fresh pool of 1M blocks and 0.97 in an aged one, 0.94 and
//! 0.95 with 1,024 (2026-11-30, two cores of a Xeon with AVX-512, Linux 6.18: the least p50 of 2 or 3 runs of `blocktable bench
//! scheduler`, in turn with runs without huge pages).

use std::alloc::{GlobalAlloc, Layout, System};
#[cfg(feature = "counted")]
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(feature = "counted")]
static COUNT: AtomicU64 = AtomicU64::new(0);

/// What a library names as its global allocator.
pub struct Allocator;

// SAFETY: passes every call on to the system allocator unchanged, and what it returns back.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's duties are the system allocator's.
        advise(unsafe { System.alloc(layout) }, layout.size())
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        advise(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }
    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        advise(unsafe { System.realloc(old, layout, size) }, size)
    }
    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(old, layout) }
    }
}

#[inline]
fn count() {
    #[cfg(feature = "counted")]
    COUNT.fetch_add(1, Ordering::Relaxed);
}

/// Asks for huge pages under the whole ones of these bytes, if they are many. Without any the memory is what it was.
#[inline]
fn advise(start: *mut u8, bytes: usize) -> *mut u8 {
    #[cfg(target_os = "linux")]
    if bytes >= huge::LEAST && !start.is_null() {
        huge::advise(start, bytes);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = bytes;
    start
}

#[cfg(target_os = "linux")]
mod huge {
    use std::ffi::c_int;

    /// Bytes of a huge page. Where they are larger the system takes those that fit.
    const PAGE: usize = 2 << 20;

    /// Fewer bytes may hold no whole page.
    pub const LEAST: usize = 2 * PAGE;

    const MADV_HUGEPAGE: c_int = 14;

    // SAFETY: as the C library has it.
    unsafe extern "C" {
        fn madvise(start: *mut u8, bytes: usize, advice: c_int) -> c_int;
    }

    #[cold]
    pub fn advise(start: *mut u8, bytes: usize) {
        let first = start.align_offset(PAGE);
        let whole = (bytes - first) / PAGE * PAGE;
        // SAFETY: the range lies in the allocation; the advice changes what stands behind its addresses and not what they hold. A
        // system that knows no such pages refuses it, which changes nothing either.
        unsafe { madvise(start.add(first), whole, MADV_HUGEPAGE) };
    }
}

/// Heap allocations so far through [`Allocator`], counted only with feature `counted`; 0 otherwise.
pub fn allocations() -> u64 {
    #[cfg(feature = "counted")]
    return COUNT.load(Ordering::Relaxed);
    #[cfg(not(feature = "counted"))]
    0
}
