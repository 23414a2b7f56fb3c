//! Module `blocktable._core`: the Python face of `blocktable-core`. Converts in, goes through one door, converts out; decides nothing.

#![deny(unsafe_code)]

use pyo3::prelude::*;

mod allocations;
mod bench;
mod bench_queue;
mod block_ref;
mod buffer;
mod cache;
mod cpu;
mod cpu_layers;
mod door;
mod error;
mod explain;
mod hasher;
mod identity;
mod plan;
mod pool;
mod recording;
mod scheduler;
mod table;
mod tokens;
mod turn;

/// The compiled core of blocktable.
#[pymodule]
mod _core {
    use super::*;
    use blocktable_core::mutant;
    use blocktable_core::request::End;
    use pyo3::types::PyTuple;

    #[pymodule_export]
    use super::allocations::allocations;
    #[pymodule_export]
    use super::bench::{bench_hash, bench_match, bench_pool};
    #[pymodule_export]
    use super::bench_queue::bench_queue;
    #[pymodule_export]
    use super::block_ref::BlockRef;
    #[pymodule_export]
    use super::cache::PrefixCache;
    #[pymodule_export]
    use super::cpu::{
        cpu_after_attention, cpu_attention, cpu_before_attention, cpu_gated, cpu_instructions, cpu_linear,
        cpu_read_sum, cpu_store_kv,
    };
    #[pymodule_export]
    use super::cpu_layers::{CpuLayer, cpu_layers};
    #[pymodule_export]
    use super::hasher::BlockHasher;
    #[pymodule_export]
    use super::plan::{Commit, Plan};
    #[pymodule_export]
    use super::pool::BlockPool;
    #[pymodule_export]
    use super::recording::{py_replay, read_recording};
    #[pymodule_export]
    use super::scheduler::Scheduler;
    #[pymodule_export]
    use super::table::BlockTable;

    /// Choose the planted fault of this thread, or none.
    #[pyfunction]
    #[pyo3(signature = (name))]
    fn set_mutant(py: Python<'_>, name: Option<&str>) -> PyResult<()> {
        if mutant::choose(name) {
            return Ok(());
        }
        let names: Vec<&str> = mutant::available().iter().map(|mutant| mutant.name()).collect();
        let bound = if names.is_empty() { "this build has no planted faults".to_owned() } else { names.join(", ") };
        Err(error::invalid(py, "name", name, &bound))
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let names = mutant::available().iter().map(|mutant| mutant.name());
        module.add("MUTANTS", PyTuple::new(module.py(), names.collect::<Vec<_>>())?)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("REASONS", explain::all_reasons(module.py())?)?;
        module.add("END_FINISHED_STOP", End::Stop as i64)?;
        module.add("END_FINISHED_LENGTH", End::Length as i64)?;
        module.add("END_ABORTED", End::Aborted as i64)?;
        module.add("END_ABORTED_CAPACITY", End::Capacity as i64)?;
        module.add("END_ABORTED_DEADLINE", End::Expired as i64)?;
        module.add("END_REFUSED_QUEUE_DEADLINE", End::Refused as i64)?;
        // The stub is the list of what is public.
        module.delattr("__all__")
    }
}
