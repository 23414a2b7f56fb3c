//! The prefix cache of a pool as Python sees it. Keys are made outside the door, with the interpreter released if that takes long.

use blocktable_core::block_hash::{BlockHasher, Prompt};
use blocktable_core::chain::Chain;
use blocktable_core::ids::Key;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::door::released;
use crate::error::{invalid, to_python};
use crate::hasher::algorithm;
use crate::identity::Said;
use crate::pool::BlockPool;
use crate::table::BlockTable;
use crate::tokens::{count, token_ids};

/// Token lists from here on are hashed with the interpreter released: about 10 us of work.
const LONG: usize = 1024;

/// Finds the longest known prefix of a prompt, and makes full blocks findable.
#[pyclass(frozen, module = "blocktable._core")]
pub struct PrefixCache {
    pool: Py<BlockPool>,
    hasher: BlockHasher,
    chain: Chain,
}

#[pymethods]
impl PrefixCache {
    #[new]
    #[pyo3(
        signature = (pool, *, algorithm="sha256", seed=None, domain=None, adapter=None, cache_salt=None),
        text_signature = "(pool, *, algorithm='sha256', seed=b'', domain=None, adapter=None, cache_salt=None)"
    )]
    fn new(
        py: Python<'_>,
        pool: Py<BlockPool>,
        algorithm: &str,
        seed: Option<&[u8]>,
        domain: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        cache_salt: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let algorithm = self::algorithm(py, "algorithm", algorithm)?;
        let mut hasher = BlockHasher::new(algorithm, pool.get().block_size, seed.unwrap_or_default());
        if let Some(given) = cache_salt.filter(|given| !given.is_instance_of::<PyString>()) {
            return Err(invalid(py, "cache_salt", given, "must be a text"));
        }
        let identity = Said { domain, public_tokens: None, adapter, cache_salt, media: None }.identity()?;
        // Every chain of this cache: a salt for all of it fits a prompt of one token too.
        let chain = hasher.chain(identity, 1).map_err(|refusal| to_python(py, refusal))?;
        Ok(PrefixCache { pool, hasher, chain })
    }

    #[pyo3(
        name = "match",
        signature = (token_ids, *, reserve=None),
        text_signature = "($self, token_ids, *, reserve=0)"
    )]
    fn py_match(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        reserve: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(BlockTable, usize)> {
        let tokens = self::token_ids("token_ids", token_ids)?;
        let reserve = reserve.map_or(Ok(0), |reserve| count("reserve", reserve))? as usize;
        let prompt = self.prompt(py, tokens);
        let (id, found) = self.pool.get().door.held(py, |core| core.find(&prompt, reserve))?;
        Ok((BlockTable::new(self.pool.clone_ref(py), id), found))
    }

    #[pyo3(
        name = "publish",
        signature = (table, token_ids, *, start=None),
        text_signature = "($self, table, token_ids, *, start=0)"
    )]
    fn py_publish(
        &self,
        py: Python<'_>,
        table: &BlockTable,
        token_ids: &Bound<'_, PyAny>,
        start: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u32> {
        let tokens = self::token_ids("token_ids", token_ids)?;
        let start = start.map_or(Ok(0), |start| count("start", start))?;
        let size = self.pool.get().block_size;
        if start % size != 0 {
            return Err(invalid(py, "start", start, &format!("must be a multiple of the block size, {size}")));
        }
        let (first, end) = ((start / size) as usize, start as usize + tokens.len());
        let parent = self.pool.get().door.held(py, |core| core.parent(table.id(), first))?;
        let keys = self.keys(py, parent, tokens);
        self.pool.get().door.held(py, |core| core.publish(table.id(), first, &keys, end))
    }

    fn reset(&self, py: Python<'_>) -> PyResult<u32> {
        self.pool.get().door.held(py, |core| Ok(core.forget_unheld()))
    }

    #[getter]
    fn pool(&self, py: Python<'_>) -> Py<BlockPool> {
        self.pool.clone_ref(py)
    }
}

impl PrefixCache {
    fn prompt(&self, py: Python<'_>, tokens: Vec<u32>) -> Prompt {
        let is_long = tokens.len() >= LONG;
        let work = || self.hasher.prompt_of(&self.chain, tokens);
        if is_long { released(py, work) } else { work() }
    }

    fn keys(&self, py: Python<'_>, parent: Option<Key>, tokens: Vec<u32>) -> Vec<Key> {
        let work = || self.hasher.keys_behind(&self.chain, parent.as_ref(), &tokens);
        if tokens.len() < LONG { work() } else { released(py, work) }
    }
}
