//! The guard of one block as Python sees it: held from `BlockPool.take_ref` to its release, which comes once.

use blocktable_core::sequences::SequenceId;
use pyo3::prelude::*;

use crate::pool::BlockPool;

/// Holds one block. Nobody makes a second one of it but by `share`.
#[pyclass(frozen, weakref, module = "blocktable._core")]
pub struct BlockRef {
    pool: Py<BlockPool>,
    id: SequenceId,
}

impl BlockRef {
    pub fn new(pool: Py<BlockPool>, id: SequenceId) -> Self {
        BlockRef { pool, id }
    }

    fn pool(&self) -> &BlockPool {
        self.pool.get()
    }
}

#[pymethods]
impl BlockRef {
    fn share(&self, py: Python<'_>) -> PyResult<BlockRef> {
        let id = self.pool().door.held(py, |core| core.fork(self.id))?;
        Ok(BlockRef::new(self.pool.clone_ref(py), id))
    }

    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.pool().door.held(py, |core| core.release(self.id))
    }

    #[getter]
    fn block(&self, py: Python<'_>) -> PyResult<u32> {
        self.pool().door.held(py, |core| Ok(core.blocks(self.id)?[0].get()))
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
            Ok(match core.blocks(self.id) {
                Ok(blocks) => format!("BlockRef(block={})", blocks[0].get()),
                Err(_) => "BlockRef(released)".to_owned(),
            })
        })
    }
}

impl Drop for BlockRef {
    fn drop(&mut self) {
        self.pool().door.last(|core| core.release_if_live(self.id));
    }
}
