//! Chained keys of full blocks, for whoever wants to compute them outside a scheduler.

use blocktable_core::block_hash::{self, Algorithm};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::door::released;
use crate::error::{invalid, to_python};
use crate::identity::Said;
use crate::tokens::{count, token_ids};

/// The algorithm of this name.
pub fn algorithm(py: Python<'_>, field: &str, name: &str) -> PyResult<Algorithm> {
    Algorithm::from_name(name)
        .ok_or_else(|| invalid(py, field, name, "must be sha256, blake3, sha256_cbor or vllm_sha256"))
}

/// Chained keys of full blocks (design 4).
#[pyclass(frozen, module = "blocktable._core")]
pub struct BlockHasher(block_hash::BlockHasher);

#[pymethods]
impl BlockHasher {
    #[new]
    #[pyo3(
        signature = (*, block_size, algorithm="sha256", seed=None),
        text_signature = "(*, block_size, algorithm='sha256', seed=b'')"
    )]
    fn new(block_size: &Bound<'_, PyAny>, algorithm: &str, seed: Option<&[u8]>) -> PyResult<Self> {
        let py = block_size.py();
        let size = count("block_size", block_size)?;
        if !(1..=4096).contains(&size) {
            return Err(invalid(py, "block_size", size, "must be 1..=4096"));
        }
        let algorithm = self::algorithm(py, "algorithm", algorithm)?;
        Ok(BlockHasher(block_hash::BlockHasher::new(algorithm, size, seed.unwrap_or_default())))
    }

    #[pyo3(
        name = "keys",
        signature = (token_ids, *, domain=None, public_tokens=None, adapter=None, cache_salt=None, media=None),
        text_signature = "($self, token_ids, *, domain=None, public_tokens=0, adapter=None, cache_salt=None, media=())"
    )]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one prompt")]
    fn py_keys<'py>(
        &self,
        py: Python<'py>,
        token_ids: &Bound<'py, PyAny>,
        domain: Option<&Bound<'py, PyAny>>,
        public_tokens: Option<&Bound<'py, PyAny>>,
        adapter: Option<&Bound<'py, PyAny>>,
        cache_salt: Option<&Bound<'py, PyAny>>,
        media: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let tokens = self::token_ids("token_ids", token_ids)?;
        let identity = Said { domain, public_tokens, adapter, cache_salt, media }.identity()?;
        let mut hasher = self.0.clone();
        let prompt = released(py, || hasher.prompt(tokens, identity)).map_err(|refusal| to_python(py, refusal))?;
        Ok(prompt.keys().iter().map(|key| PyBytes::new(py, &key.0)).collect())
    }
}
