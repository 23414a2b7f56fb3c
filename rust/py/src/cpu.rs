//! Paged attention and linear layers on the CPU: tensors in by DLPack, and through the door with the interpreter released.

use blocktable_cpu::{
    Activation, AfterAttention, Attention, BeforeAttention, Gated, Isa, Linear, Norm, Refusal, after_attention, attend,
    before_attention, gated, linear, read_sum, store_kv,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::buffer::tensor;
use crate::door::released;

type Object<'py> = Bound<'py, PyAny>;

pub fn refused(refusal: Refusal) -> PyErr {
    PyValueError::new_err(refusal.to_string())
}

pub fn isa(name: Option<&str>) -> PyResult<Isa> {
    let Some(name) = name else { return Ok(Isa::best()) };
    Isa::named(name).ok_or_else(|| {
        let known: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
        PyValueError::new_err(format!("instructions={name}: must be one of {}", known.join(", ")))
    })
}

/// Names of the sets of instructions, the fastest first.
#[pyfunction]
pub fn cpu_instructions(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
    PyTuple::new(py, Isa::available().into_iter().map(Isa::name))
}

/// Attend one layer's queries.
#[pyfunction]
#[pyo3(signature = (q, k_cache, v_cache, out, block_tables, query_starts, seq_lens, *, scale, window, softcap, sinks, threads, instructions=None))]
#[allow(clippy::too_many_arguments)]
pub fn cpu_attention(
    py: Python<'_>,
    q: Object<'_>,
    k_cache: Object<'_>,
    v_cache: Object<'_>,
    out: Object<'_>,
    block_tables: Object<'_>,
    query_starts: Object<'_>,
    seq_lens: Object<'_>,
    scale: f32,
    window: usize,
    softcap: f32,
    sinks: Option<Object<'_>>,
    threads: usize,
    instructions: Option<&str>,
) -> PyResult<()> {
    let isa = isa(instructions)?;
    let inputs = Attention {
        q: tensor("q", &q)?,
        k_cache: tensor("k_cache", &k_cache)?,
        v_cache: tensor("v_cache", &v_cache)?,
        out: tensor("out", &out)?,
        block_tables: tensor("block_tables", &block_tables)?,
        query_starts: tensor("query_starts", &query_starts)?,
        seq_lens: tensor("seq_lens", &seq_lens)?,
        sinks: sinks.as_ref().map(|capsule| tensor("sinks", capsule)).transpose()?,
        scale,
        softcap,
        window,
    };
    released(py, || attend(&inputs, isa, threads)).map_err(refused)
}

/// Store one layer's new keys and values.
#[pyfunction]
#[pyo3(signature = (k, v, k_cache, v_cache, slots, *, threads))]
pub fn cpu_store_kv(
    py: Python<'_>,
    k: Object<'_>,
    v: Object<'_>,
    k_cache: Object<'_>,
    v_cache: Object<'_>,
    slots: Object<'_>,
    threads: usize,
) -> PyResult<()> {
    let (k, v) = (tensor("k", &k)?, tensor("v", &v)?);
    let (k_cache, v_cache, slots) =
        (tensor("k_cache", &k_cache)?, tensor("v_cache", &v_cache)?, tensor("slots", &slots)?);
    released(py, || store_kv(&k, &v, &k_cache, &v_cache, &slots, threads)).map_err(refused)
}

/// Multiply rows with a linear layer's weight.
#[pyfunction]
#[pyo3(signature = (x, weight, out, *, bias=None, threads, instructions=None))]
#[allow(clippy::too_many_arguments)]
pub fn cpu_linear(
    py: Python<'_>,
    x: Object<'_>,
    weight: Object<'_>,
    out: Object<'_>,
    bias: Option<Object<'_>>,
    threads: usize,
    instructions: Option<&str>,
) -> PyResult<()> {
    let isa = isa(instructions)?;
    let inputs = Linear {
        x: tensor("x", &x)?,
        weight: tensor("weight", &weight)?,
        bias: bias.as_ref().map(|capsule| tensor("bias", capsule)).transpose()?,
        out: tensor("out", &out)?,
    };
    released(py, || linear(&inputs, isa, threads)).map_err(refused)
}

/// Multiply rows with two weights and join the answers by a gate.
#[pyfunction]
#[pyo3(signature = (x, gate, up, out, *, activation, threads, instructions=None))]
#[allow(clippy::too_many_arguments)]
pub fn cpu_gated(
    py: Python<'_>,
    x: Object<'_>,
    gate: Object<'_>,
    up: Object<'_>,
    out: Object<'_>,
    activation: &str,
    threads: usize,
    instructions: Option<&str>,
) -> PyResult<()> {
    let isa = isa(instructions)?;
    let inputs = Gated {
        x: tensor("x", &x)?,
        gate: tensor("gate", &gate)?,
        up: tensor("up", &up)?,
        activation: named(activation)?,
        out: tensor("out", &out)?,
    };
    released(py, || gated(&inputs, isa, threads)).map_err(refused)
}

/// The half of a decoder layer before its attention.
#[pyfunction]
#[pyo3(signature = (hidden, norm, q, k, v, cos, sin, out, *, eps, biases=None, threads, instructions=None))]
#[allow(clippy::too_many_arguments)]
pub fn cpu_before_attention(
    py: Python<'_>,
    hidden: Object<'_>,
    norm: Object<'_>,
    q: Object<'_>,
    k: Object<'_>,
    v: Object<'_>,
    cos: Object<'_>,
    sin: Object<'_>,
    out: Object<'_>,
    eps: f32,
    biases: Option<(Object<'_>, Object<'_>, Object<'_>)>,
    threads: usize,
    instructions: Option<&str>,
) -> PyResult<()> {
    let isa = isa(instructions)?;
    let biases = match &biases {
        None => None,
        Some((q, k, v)) => Some([tensor("q_bias", q)?, tensor("k_bias", k)?, tensor("v_bias", v)?]),
    };
    let inputs = BeforeAttention {
        hidden: tensor("hidden", &hidden)?,
        norm: Norm { weight: tensor("norm", &norm)?, eps },
        weights: [tensor("q", &q)?, tensor("k", &k)?, tensor("v", &v)?],
        biases,
        cos: tensor("cos", &cos)?,
        sin: tensor("sin", &sin)?,
        out: tensor("out", &out)?,
    };
    released(py, || before_attention(&inputs, isa, threads)).map_err(refused)
}

/// The half of a decoder layer after its attention.
#[pyfunction]
#[pyo3(signature = (attended, hidden, project, norm, gate, up, down, out, *, eps, activation, threads, instructions=None))]
#[allow(clippy::too_many_arguments)]
pub fn cpu_after_attention(
    py: Python<'_>,
    attended: Object<'_>,
    hidden: Object<'_>,
    project: Object<'_>,
    norm: Object<'_>,
    gate: Object<'_>,
    up: Object<'_>,
    down: Object<'_>,
    out: Object<'_>,
    eps: f32,
    activation: &str,
    threads: usize,
    instructions: Option<&str>,
) -> PyResult<()> {
    let isa = isa(instructions)?;
    let inputs = AfterAttention {
        attended: tensor("attended", &attended)?,
        hidden: tensor("hidden", &hidden)?,
        project: tensor("project", &project)?,
        norm: Norm { weight: tensor("norm", &norm)?, eps },
        gate: tensor("gate", &gate)?,
        up: tensor("up", &up)?,
        activation: named(activation)?,
        down: tensor("down", &down)?,
        out: tensor("out", &out)?,
    };
    released(py, || after_attention(&inputs, isa, threads)).map_err(refused)
}

pub fn named(activation: &str) -> PyResult<Activation> {
    Activation::named(activation)
        .ok_or_else(|| PyValueError::new_err(format!("activation={activation}: must be silu or gelu_tanh")))
}

/// Sum float32 numbers.
#[pyfunction]
#[pyo3(signature = (numbers, *, threads))]
pub fn cpu_read_sum(py: Python<'_>, numbers: Object<'_>, threads: usize) -> PyResult<f64> {
    let numbers = tensor("numbers", &numbers)?.floats().map_err(refused)?;
    Ok(released(py, || read_sum(threads, numbers)))
}
