//! One sequence's table as Python sees it: a name for what lives behind the pool's door, given back when Python forgets it.

use blocktable_core::sequence::RowCopy;
use blocktable_core::sequences::SequenceId;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::plan::array;
use crate::pool::{BlockPool, numbers};
use crate::tokens::count;

/// Where one sequence's rows live.
#[pyclass(frozen, weakref, module = "blocktable._core")]
pub struct BlockTable {
    pool: Py<BlockPool>,
    id: SequenceId,
}

impl BlockTable {
    pub fn new(pool: Py<BlockPool>, id: SequenceId) -> Self {
        BlockTable { pool, id }
    }

    pub fn id(&self) -> SequenceId {
        self.id
    }

    fn pool(&self) -> &BlockPool {
        self.pool.get()
    }
}

#[pymethods]
impl BlockTable {
    fn append<'py>(
        &self,
        py: Python<'py>,
        num_tokens: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyList>)> {
        let num_tokens = count("num_tokens", num_tokens)? as usize;
        let (slots, copy) = self.pool().door.held(py, |core| {
            let start = core.rows(self.id)?;
            let copy = core.append(self.id, num_tokens)?;
            Ok((core.slots(self.id, start, start + num_tokens)?.collect(), copy))
        })?;
        Ok((array::<i64>(py, slots, "int64")?, copies(py, copy)?))
    }

    fn reserve(&self, py: Python<'_>, num_tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let num_tokens = count("num_tokens", num_tokens)? as usize;
        self.pool().door.held(py, |core| core.reserve(self.id, num_tokens))
    }

    fn fork(&self, py: Python<'_>) -> PyResult<BlockTable> {
        let child = self.pool().door.held(py, |core| core.fork(self.id))?;
        Ok(BlockTable::new(self.pool.clone_ref(py), child))
    }

    fn truncate(&self, py: Python<'_>, num_tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let num_tokens = count("num_tokens", num_tokens)? as usize;
        self.pool().door.held(py, |core| core.truncate(self.id, num_tokens))
    }

    #[pyo3(signature = (start=None, stop=None), text_signature = "($self, start=0, stop=None)")]
    fn slots<'py>(
        &self,
        py: Python<'py>,
        start: Option<&Bound<'py, PyAny>>,
        stop: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let start = start.map_or(Ok(0), |start| count("start", start))? as usize;
        let stop = stop.map(|stop| count("stop", stop)).transpose()?;
        let slots = self.pool().door.held(py, |core| {
            let stop = stop.map_or_else(|| core.rows(self.id), |stop| Ok(stop as usize))?;
            Ok(core.slots(self.id, start, stop)?.collect())
        })?;
        array::<i64>(py, slots, "int64")
    }

    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.pool().door.held(py, |core| core.release(self.id))
    }

    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let ids = self.pool().door.held(py, |core| core.blocks(self.id).map(numbers))?;
        array(py, ids, "int32")
    }

    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.pool().door.held(py, |core| core.rows(self.id))
    }

    #[getter]
    fn num_blocks(&self, py: Python<'_>) -> PyResult<usize> {
        self.pool().door.held(py, |core| Ok(core.blocks(self.id)?.len()))
    }

    #[getter]
    fn num_published(&self, py: Python<'_>) -> PyResult<usize> {
        self.pool().door.held(py, |core| core.named(self.id))
    }

    #[getter]
    fn is_released(&self, py: Python<'_>) -> PyResult<bool> {
        self.pool().door.held(py, |core| Ok(core.rows(self.id).is_err()))
    }

    #[getter(pool)]
    fn py_pool(&self, py: Python<'_>) -> Py<BlockPool> {
        self.pool.clone_ref(py)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (_kind, _error, _traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.pool().door.held(py, |core| core.release_if_live(self.id))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        self.pool().door.held(py, |core| {
            let Ok(blocks) = core.blocks(self.id) else { return Ok("BlockTable(released)".to_owned()) };
            Ok(format!("BlockTable(num_tokens={}, num_blocks={})", core.rows(self.id)?, blocks.len()))
        })
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        self.pool().door.last(|core| core.release_if_live(self.id));
    }
}

/// (source, target, rows) of each copy.
fn copies<'py>(py: Python<'py>, copy: Option<RowCopy>) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, copy.map(|copy| (copy.source.get(), copy.target.get(), copy.rows)))
}
