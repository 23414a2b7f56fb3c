//! The pool as Python sees it on its own, without a scheduler.

use blocktable_core::block_pool::BlockPool as Blocks;
use blocktable_core::ids::BlockId;
use blocktable_core::prefix_index::KeyState;
use blocktable_core::sequences::Sequences;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::block_ref::BlockRef;
use crate::door::Door;
use crate::plan::array;
use crate::table::BlockTable;
use crate::tokens::{count, number, token_ids};

/// Physical KV blocks and who holds them.
#[pyclass(frozen, weakref, module = "blocktable._core")]
pub struct BlockPool {
    pub door: Door<Sequences>,
    num_blocks: u32,
    pub block_size: u32,
}

#[pymethods]
impl BlockPool {
    #[new]
    #[pyo3(
        signature = (num_blocks, block_size, *, event_buffer_size=None, enable_partial_hits=false),
        text_signature = "(num_blocks, block_size, *, event_buffer_size=0, enable_partial_hits=False)"
    )]
    fn new(
        num_blocks: &Bound<'_, PyAny>,
        block_size: &Bound<'_, PyAny>,
        event_buffer_size: Option<&Bound<'_, PyAny>>,
        enable_partial_hits: bool,
    ) -> PyResult<Self> {
        let py = num_blocks.py();
        let (num_blocks, block_size) = (count("num_blocks", num_blocks)?, count("block_size", block_size)?);
        let events = event_buffer_size.map_or(Ok(0), |events| count("event_buffer_size", events))?;
        let core = Sequences::new(num_blocks, block_size).and_then(|core| core.recording(events));
        let mut core = core.map_err(|refusal| crate::error::to_python(py, refusal))?;
        if enable_partial_hits {
            core = core.remembering();
        }
        Ok(BlockPool { door: Door::new(core), num_blocks, block_size })
    }

    fn table(slf: Bound<'_, Self>) -> PyResult<BlockTable> {
        let id = slf.get().door.held(slf.py(), |core| Ok(core.begin()))?;
        Ok(BlockTable::new(slf.unbind(), id))
    }

    #[pyo3(name = "take")]
    fn py_take<'py>(&self, py: Python<'py>, num_blocks: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let num_blocks = count("num_blocks", num_blocks)?;
        let ids = self.door.held(py, |core| core.take(num_blocks).map(numbers))?;
        array(py, ids, "int32")
    }

    fn take_ref(slf: Bound<'_, Self>) -> PyResult<BlockRef> {
        let id = slf.get().door.held(slf.py(), |core| core.guard())?;
        Ok(BlockRef::new(slf.unbind(), id))
    }

    fn share(&self, py: Python<'_>, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids = token_ids("block_ids", block_ids)?;
        self.door.held(py, |core| core.share_blocks(ids))
    }

    fn release(&self, py: Python<'_>, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids = token_ids("block_ids", block_ids)?;
        self.door.held(py, |core| core.release_blocks(ids))
    }

    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.door.held(py, |core| {
            core.reset();
            Ok(())
        })
    }

    fn tell_time(&self, py: Python<'_>, now_us: &Bound<'_, PyAny>) -> PyResult<()> {
        let now_us = number("now_us", now_us)?;
        self.door.held(py, |core| {
            core.tell_time(now_us);
            Ok(())
        })
    }

    fn read_events<'py>(&self, py: Python<'py>, since: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (since, mut bytes) = (number("since", since)?, Vec::new());
        let came = self.door.held(py, |core| core.pool().read_events(since, &mut bytes))?;
        Ok(came.map(|_| PyBytes::new(py, &bytes)))
    }

    fn event_snapshot<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let mut bytes = Vec::new();
        let told = self.door.held(py, |core| Ok(core.pool().event_snapshot(&mut bytes)))?;
        Ok(told.map(|_| PyBytes::new(py, &bytes)))
    }

    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        self.door.held(py, |core| core.audit())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (gauges, reuse) = self.door.held(py, |core| {
            let pool = core.pool();
            let gauges = [
                ("num_blocks", u64::from(pool.num_blocks())),
                ("free_blocks", u64::from(pool.num_free())),
                ("used_blocks", u64::from(pool.num_held())),
                ("published_blocks", u64::from(pool.index().num_published())),
                ("tables", core.len() as u64),
                ("evictions", pool.evictions()),
            ];
            Ok((gauges, core.reuse()))
        })?;
        let counters =
            [("prefix_queries", reuse.queries), ("prefix_hits", reuse.hits), ("prefix_prompts", reuse.prompts)];
        let dict = PyDict::new(py);
        for (name, value) in gauges.into_iter().chain(counters) {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    fn free_queue<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let ids = self.door.held(py, |core| Ok(free_queue(core.pool())))?;
        array(py, ids, "int32")
    }

    fn block_refs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let holders = self.door.held(py, |core| block_refs(core.pool()))?;
        array(py, holders, "int32")
    }

    fn published_blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let ids = self.door.held(py, |core| Ok(published_blocks(core.pool())))?;
        array(py, ids, "int32")
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    #[getter]
    fn block_size(&self) -> u32 {
        self.block_size
    }

    #[getter]
    fn num_free(&self, py: Python<'_>) -> PyResult<u32> {
        self.door.held(py, |core| Ok(core.pool().num_free()))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let free = self.num_free(py)?;
        Ok(format!("BlockPool(num_blocks={}, block_size={}, num_free={free})", self.num_blocks, self.block_size))
    }
}

/// Block ids as plain numbers.
pub fn numbers(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.get()).collect()
}

/// Ids of the free blocks, the next one to be taken first.
pub fn free_queue(pool: &Blocks) -> Vec<u32> {
    pool.free_blocks().map(BlockId::get).collect()
}

/// Holders of each block.
pub fn block_refs(pool: &Blocks) -> blocktable_core::Result<Vec<u32>> {
    (0..pool.num_blocks()).map(|id| Ok(pool.holders(pool.block(id)?))).collect()
}

/// Ids of the blocks with published content, ascending.
pub fn published_blocks(pool: &Blocks) -> Vec<u32> {
    let published = |&id: &u32| pool.block(id).is_ok_and(|block| pool.index().state(block) == KeyState::Published);
    (0..pool.num_blocks()).filter(published).collect()
}
