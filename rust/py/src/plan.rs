//! A plan's arrays as numpy views into the arena they were written to, and what a commit changed.

use std::ops::Range;
use std::sync::Arc;

use blocktable_core::Config;
use blocktable_core::ids::StepId;
use blocktable_core::plan::{Layout, Sizes};
use bytemuck::NoUninit;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PySlice, PyTuple};

use crate::buffer::{Arena, Memory};
use crate::scheduler::Scheduler;
use crate::tokens::count;

/// The two memories of one of the two sets of arrays, and a numpy view of each array at its full size.
pub struct ArraySet {
    pub staging: Arc<Arena>,
    pub tables: Arc<Arena>,
    views: Views,
}

struct Views {
    seq_slots: Py<PyAny>,
    query_starts: Py<PyAny>,
    seq_lens: Py<PyAny>,
    token_ids: Py<PyAny>,
    positions: Py<PyAny>,
    token_sources: Py<PyAny>,
    slot_mapping: Py<PyAny>,
    block_tables: Py<PyAny>,
    dirty: Py<PyAny>,
    dirty_ids: Py<PyAny>,
    copies: Py<PyAny>,
    sample_rows: Py<PyAny>,
    sample_requests: Py<PyAny>,
    ended: Py<PyAny>,
    preempted: Py<PyAny>,
    admitted: Py<PyAny>,
}

impl ArraySet {
    pub fn new(py: Python<'_>, config: &Config, layout: &Layout) -> PyResult<Self> {
        let staging = Arena::new(layout.words);
        let tables = Arena::new(layout.table_entries.div_ceil(2));
        let numpy = py.import("numpy")?;
        let view = |arena: &Arc<Arena>, dtype: &str| -> PyResult<Bound<'_, PyAny>> {
            numpy.call_method1("frombuffer", (Memory(Arc::clone(arena)), dtype))
        };
        let (wide, narrow, entries) = (view(&staging, "int64")?, view(&staging, "int32")?, view(&tables, "int32")?);
        let part = |base: &Bound<'_, PyAny>, place: &Range<usize>, shape: &[isize]| -> PyResult<Py<PyAny>> {
            let part = base.get_item(PySlice::new(py, place.start as isize, place.end as isize, 1))?;
            Ok(part.call_method1("reshape", (PyTuple::new(py, shape)?,))?.unbind())
        };
        let groups = config.groups.len() as isize;
        let views = Views {
            seq_slots: part(&narrow, &layout.seq_slots, &[-1])?,
            query_starts: part(&narrow, &layout.query_starts, &[-1])?,
            seq_lens: part(&narrow, &layout.seq_lens, &[-1])?,
            token_ids: part(&narrow, &layout.token_ids, &[-1])?,
            positions: part(&narrow, &layout.positions, &[-1])?,
            token_sources: part(&narrow, &layout.token_sources, &[-1])?,
            slot_mapping: part(&wide, &layout.slot_mapping, &[groups, -1])?,
            block_tables: part(
                &entries,
                &(0..layout.table_entries),
                &[groups, config.rows() as isize, config.max_blocks() as isize],
            )?,
            dirty: part(&narrow, &layout.dirty, &[-1, 4])?,
            dirty_ids: part(&narrow, &layout.dirty_ids, &[-1])?,
            copies: part(&narrow, &layout.copies, &[-1, 4])?,
            sample_rows: part(&narrow, &layout.sample_rows, &[-1])?,
            sample_requests: part(&wide, &layout.sample_requests, &[-1])?,
            ended: part(&wide, &layout.ended, &[-1, 2])?,
            preempted: part(&wide, &layout.preempted, &[-1, 2])?,
            admitted: part(&wide, &layout.admitted, &[-1, 3])?,
        };
        Ok(ArraySet { staging, tables, views })
    }
}

/// What one step runs. Views; valid until the step's commit or failure.
#[pyclass(frozen, module = "blocktable._core")]
pub struct Plan {
    /// Who made it.
    pub scheduler: Py<Scheduler>,
    pub set: Arc<ArraySet>,
    pub sizes: Sizes,
}

/// The first `len` entries of a view.
fn first<'py>(py: Python<'py>, view: &Py<PyAny>, len: usize) -> PyResult<Bound<'py, PyAny>> {
    view.bind(py).get_item(PySlice::new(py, 0, len as isize, 1))
}

#[pymethods]
impl Plan {
    #[getter]
    fn step(&self) -> u64 {
        self.sizes.step
    }
    #[getter]
    fn num_seqs(&self) -> usize {
        self.sizes.seqs
    }
    #[getter]
    fn num_tokens(&self) -> usize {
        self.sizes.tokens
    }
    #[getter]
    fn seq_slots<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.seq_slots, self.sizes.seqs)
    }
    #[getter]
    fn query_starts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.query_starts, self.sizes.seqs + 1)
    }
    #[getter]
    fn seq_lens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.seq_lens, self.sizes.seqs)
    }
    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.token_ids, self.sizes.tokens)
    }
    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.positions, self.sizes.tokens)
    }
    #[getter]
    fn token_sources<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.token_sources, self.sizes.tokens)
    }
    #[getter]
    fn slot_mapping<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let tokens = PySlice::new(py, 0, self.sizes.tokens as isize, 1);
        self.set.views.slot_mapping.bind(py).get_item((PySlice::full(py), tokens))
    }
    #[getter]
    fn block_tables(&self, py: Python<'_>) -> Py<PyAny> {
        self.set.views.block_tables.clone_ref(py)
    }
    #[getter]
    fn dirty<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.dirty, self.sizes.dirty)
    }
    #[getter]
    fn dirty_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.dirty_ids, self.sizes.dirty_ids)
    }
    #[getter]
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.copies, self.sizes.copies)
    }
    #[getter]
    fn sample_rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.sample_rows, self.sizes.samples)
    }
    #[getter]
    fn sample_requests<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.sample_requests, self.sizes.samples)
    }
    #[getter]
    fn ended<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.ended, self.sizes.ended)
    }
    #[getter]
    fn preempted<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.preempted, self.sizes.preempted)
    }
    #[getter]
    fn admitted<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        first(py, &self.set.views.admitted, self.sizes.admitted)
    }
    #[pyo3(signature = (*, group=None, min_blocks=None), text_signature = "($self, *, group=0, min_blocks=1)")]
    fn prefix_groups<'py>(
        &self,
        py: Python<'py>,
        group: Option<&Bound<'_, PyAny>>,
        min_blocks: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let group = group.map_or(Ok(0), |given| count("group", given))? as usize;
        let min_blocks = min_blocks.map_or(Ok(1), |given| count("min_blocks", given))? as usize;
        let found = self.scheduler.get().prefix_groups(py, StepId(self.sizes.step), group, min_blocks)?;
        Ok((array(py, found.members, "int32")?, array(py, found.starts, "int32")?, array(py, found.blocks, "int32")?))
    }
}

/// What a commit changed.
#[pyclass(frozen, module = "blocktable._core")]
pub struct Commit {
    pub step: u64,
    pub ended: Vec<[i64; 2]>,
    pub accepted: usize,
    pub dropped: Vec<i32>,
}

#[pymethods]
impl Commit {
    #[getter]
    fn step(&self) -> u64 {
        self.step
    }
    #[getter]
    fn ended<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let pairs = array(py, self.ended.as_flattened().to_vec(), "int64")?;
        pairs.call_method1("reshape", (-1, 2))
    }
    #[getter]
    fn dropped<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        array(py, self.dropped.clone(), "int32")
    }
    #[getter]
    fn num_accepted(&self) -> usize {
        self.accepted
    }
}

/// A numpy array of its own, made without an object for each value. `dtype` has the size of `T`.
pub fn array<'py, T: NoUninit>(py: Python<'py>, values: Vec<T>, dtype: &str) -> PyResult<Bound<'py, PyAny>> {
    static FROM_BUFFER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let bytes = PyByteArray::new(py, bytemuck::cast_slice(&values));
    FROM_BUFFER.import(py, "numpy", "frombuffer")?.call1((bytes, dtype))
}
