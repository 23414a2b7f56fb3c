//! The prefix cache of a pool as Python sees it. Keys are made outside the door, with the interpreter released if that takes long.

use blocktable_core::block_hash::BlockHasher;
use blocktable_core::retention::Ranges;
use blocktable_core::sequences::Sequences;
use pyo3::prelude::*;

use crate::door::released;
use crate::error::{invalid, to_python};
use crate::hasher::algorithm;
use crate::identity::Said;
use crate::pool::BlockPool;
use crate::table::BlockTable;
use crate::tokens::{count, token_ids, token_ranges};

/// Token lists from here on are hashed with the interpreter released: about 10 us of work.
const LONG: usize = 1024;

/// Finds the longest known prefix of a prompt, and makes full blocks findable.
#[pyclass(frozen, module = "blocktable._core")]
pub struct PrefixCache {
    pool: Py<BlockPool>,
    hasher: BlockHasher,
}

#[pymethods]
impl PrefixCache {
    #[new]
    #[pyo3(
        signature = (pool, *, algorithm="sha256", seed=None),
        text_signature = "(pool, *, algorithm='sha256', seed=b'')"
    )]
    fn new(py: Python<'_>, pool: Py<BlockPool>, algorithm: &str, seed: Option<&[u8]>) -> PyResult<Self> {
        let algorithm = self::algorithm(py, "algorithm", algorithm)?;
        let hasher = BlockHasher::new(algorithm, pool.get().block_size, seed.unwrap_or_default());
        Ok(PrefixCache { pool, hasher })
    }

    #[pyo3(
        name = "match",
        signature = (token_ids, *, reserve=None, domain=None, public_tokens=None, adapter=None, cache_salt=None, media=None),
        text_signature = "($self, token_ids, *, reserve=0, domain=None, public_tokens=0, adapter=None, cache_salt=None, media=())"
    )]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one prompt")]
    fn py_match(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        reserve: Option<&Bound<'_, PyAny>>,
        domain: Option<&Bound<'_, PyAny>>,
        public_tokens: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        media: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(BlockTable, usize)> {
        let tokens = self::token_ids("token_ids", token_ids)?;
        let reserve = reserve.map_or(Ok(0), |reserve| count("reserve", reserve))? as usize;
        let identity = Said { domain, public_tokens, adapter, cache_salt, media }.identity()?;
        let mut hasher = self.hasher.clone();
        let prompt = work_out(py, tokens.len(), || hasher.prompt(tokens, identity))?;
        let (id, found) = self.pool.get().door.held(py, |core| core.find(&mut hasher, &prompt, reserve))?;
        Ok((BlockTable::new(self.pool.clone_ref(py), id), found))
    }

    #[pyo3(
        name = "publish",
        signature = (table, token_ids, *, start=None, retention=None),
        text_signature = "($self, table, token_ids, *, start=0, retention=())"
    )]
    fn py_publish(
        &self,
        py: Python<'_>,
        table: &BlockTable,
        token_ids: &Bound<'_, PyAny>,
        start: Option<&Bound<'_, PyAny>>,
        retention: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u32> {
        let tokens = self::token_ids("token_ids", token_ids)?;
        let ranges = retention.map_or(Ok(Vec::new()), token_ranges)?;
        let kept = if ranges.is_empty() { Ok(None) } else { Ranges::new(&ranges).map(Some) };
        let kept = kept.map_err(|refusal| to_python(py, refusal))?;
        let start = start.map_or(Ok(0), |start| count("start", start))?;
        let size = self.pool.get().block_size;
        if start % size != 0 {
            return Err(invalid(py, "start", start, &format!("must be a multiple of the block size, {size}")));
        }
        let first = (start / size) as usize;
        let ask = |core: &mut Sequences| Ok((core.chain(table.id(), first)?, core.finds_parts()));
        let ((chain, parent), finds_parts) = self.pool.get().door.held(py, ask)?;
        let chain = chain.unwrap_or_else(|| self.hasher.plain_chain());
        let work = || self.hasher.names_from(&chain, first, parent.as_ref(), &tokens, finds_parts);
        let names = work_out(py, tokens.len(), work)?;
        self.pool.get().door.held(py, |core| core.publish(table.id(), &names, &tokens, kept.as_ref()))
    }

    fn reset(&self, py: Python<'_>) -> PyResult<u32> {
        self.pool.get().door.held(py, |core| Ok(core.forget_unheld()))
    }

    #[getter]
    fn pool(&self, py: Python<'_>) -> Py<BlockPool> {
        self.pool.clone_ref(py)
    }
}

/// Hashes so many tokens, with the interpreter released if that takes long, and maps the refusal.
fn work_out<R: Send>(
    py: Python<'_>,
    num_tokens: usize,
    work: impl FnOnce() -> blocktable_core::Result<R> + Send,
) -> PyResult<R> {
    let result = if num_tokens < LONG { work() } else { released(py, work) };
    result.map_err(|refusal| to_python(py, refusal))
}
