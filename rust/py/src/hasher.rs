//! Chained keys of full blocks, for whoever wants to compute them outside a scheduler.

use blocktable_core::block_hash::{self, Algorithm};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::door::released;
use crate::error::invalid;
use crate::tokens::{count, token_ids};

/// The algorithm of this name.
pub fn algorithm(py: Python<'_>, field: &str, name: &str) -> PyResult<Algorithm> {
    Algorithm::from_name(name).ok_or_else(|| invalid(py, field, name, "must be sha256 or blake3"))
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

    #[pyo3(name = "keys")]
    fn py_keys<'py>(&self, py: Python<'py>, token_ids: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let tokens = self::token_ids("token_ids", token_ids)?;
        let prompt = released(py, || self.0.prompt(tokens));
        Ok(prompt.keys().iter().map(|key| PyBytes::new(py, &key.0)).collect())
    }
}
