//! All memory of this library comes from the allocator of `blocktable-cpu`, where `unsafe` may live; how often it was asked.

use blocktable_cpu::Allocator;
use pyo3::prelude::*;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// Heap allocations of Rust so far, counted only in a build with feature `bench`; 0 otherwise.
#[pyfunction]
pub fn allocations() -> u64 {
    blocktable_cpu::allocations()
}
