//! Whole decoder layers on the CPU: their parameters kept as long-lived views, so that a step hands over its rows alone.

use blocktable_cpu::{Activation, DecoderLayer, DecoderLayers, Isa, Norm, Step, decoder_layers};
use pyo3::prelude::*;

use crate::buffer::tensor;
use crate::cpu::{isa, named, refused};
use crate::door::released;

type Held = Py<PyAny>;
type Lent<'py> = Bound<'py, PyAny>;
/// k_cache and v_cache.
type Pages<'py> = (Lent<'py>, Lent<'py>);
/// block_tables, query_starts, seq_lens and slots.
type Tables<'py> = (Lent<'py>, Lent<'py>, Lent<'py>, Lent<'py>);

/// A decoder layer's parameters, and how it attends.
#[pyclass(frozen, module = "blocktable._core")]
pub struct CpuLayer {
    norms: [Held; 2],
    eps: [f32; 2],
    weights: [Held; 3],
    biases: Option<[Held; 3]>,
    project: Held,
    gate: Held,
    up: Held,
    down: Held,
    activation: Activation,
    scale: f32,
    window: usize,
    softcap: f32,
}

#[pymethods]
impl CpuLayer {
    #[new]
    #[pyo3(signature = (norms, weights, project, gate, up, down, *, eps, activation, scale, window=0, softcap=0.0, biases=None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        norms: [Held; 2],
        weights: [Held; 3],
        project: Held,
        gate: Held,
        up: Held,
        down: Held,
        eps: [f32; 2],
        activation: &str,
        scale: f32,
        window: usize,
        softcap: f32,
        biases: Option<[Held; 3]>,
    ) -> PyResult<CpuLayer> {
        let activation = named(activation)?;
        Ok(CpuLayer { norms, eps, weights, biases, project, gate, up, down, activation, scale, window, softcap })
    }
}

/// A layer's views, bound to the interpreter for one call.
struct Bindings<'py> {
    norms: [Lent<'py>; 2],
    weights: [Lent<'py>; 3],
    biases: Option<[Lent<'py>; 3]>,
    others: [Lent<'py>; 4],
}

impl CpuLayer {
    fn bindings<'py>(&self, py: Python<'py>) -> Bindings<'py> {
        let lent = |held: &Held| held.bind(py).clone();
        Bindings {
            norms: self.norms.each_ref().map(lent),
            weights: self.weights.each_ref().map(lent),
            biases: self.biases.as_ref().map(|biases| biases.each_ref().map(lent)),
            others: [&self.project, &self.gate, &self.up, &self.down].map(lent),
        }
    }

    fn layer<'a>(&self, own: &'a Bindings<'_>, pages: &'a Pages<'_>, step: usize) -> PyResult<DecoderLayer<'a>> {
        let norm = |at: usize| Ok::<_, PyErr>(Norm { weight: tensor("norm", &own.norms[at])?, eps: self.eps[at] });
        let three = |names: [&'static str; 3], held: &'a [Lent<'_>; 3]| {
            Ok::<_, PyErr>([tensor(names[0], &held[0])?, tensor(names[1], &held[1])?, tensor(names[2], &held[2])?])
        };
        let biases = own.biases.as_ref();
        Ok(DecoderLayer {
            norms: [norm(0)?, norm(1)?],
            weights: three(["q", "k", "v"], &own.weights)?,
            biases: biases.map(|biases| three(["q_bias", "k_bias", "v_bias"], biases)).transpose()?,
            project: tensor("project", &own.others[0])?,
            gate: tensor("gate", &own.others[1])?,
            up: tensor("up", &own.others[2])?,
            activation: self.activation,
            down: tensor("down", &own.others[3])?,
            k_cache: tensor("k_cache", &pages.0)?,
            v_cache: tensor("v_cache", &pages.1)?,
            scale: self.scale,
            softcap: self.softcap,
            window: self.window,
            step,
        })
    }
}

/// Rows through whole decoder layers.
#[pyfunction]
#[pyo3(signature = (hidden, cos, sin, out, layers, pages, tables, steps, *, threads, instructions=None))]
#[allow(clippy::too_many_arguments)]
pub fn cpu_layers(
    py: Python<'_>,
    hidden: Lent<'_>,
    cos: Lent<'_>,
    sin: Lent<'_>,
    out: Lent<'_>,
    layers: Vec<Py<CpuLayer>>,
    pages: Vec<Pages<'_>>,
    tables: Vec<Tables<'_>>,
    steps: Vec<usize>,
    threads: usize,
    instructions: Option<&str>,
) -> PyResult<f64> {
    let isa = instructions.map_or_else(|| Ok(Isa::best_of_layers()), |name| isa(Some(name)))?;
    for (name, found) in [("pages", pages.len()), ("steps", steps.len())] {
        if found != layers.len() {
            let wanted = layers.len();
            return Err(pyo3::exceptions::PyValueError::new_err(format!(
                "{name} has {found} entries: must have {wanted}, one a layer"
            )));
        }
    }
    let bindings: Vec<_> = layers.iter().map(|layer| layer.get().bindings(py)).collect();
    let mut all = Vec::with_capacity(layers.len());
    for (number, layer) in layers.iter().enumerate() {
        all.push(layer.get().layer(&bindings[number], &pages[number], steps[number])?);
    }
    let mut groups = Vec::with_capacity(tables.len());
    for (block_tables, query_starts, seq_lens, slots) in &tables {
        groups.push(Step {
            block_tables: tensor("block_tables", block_tables)?,
            query_starts: tensor("query_starts", query_starts)?,
            seq_lens: tensor("seq_lens", seq_lens)?,
            slots: tensor("slots", slots)?,
        });
    }
    let inputs = DecoderLayers {
        hidden: tensor("hidden", &hidden)?,
        cos: tensor("cos", &cos)?,
        sin: tensor("sin", &sin)?,
        layers: &all,
        steps: &groups,
        out: tensor("out", &out)?,
    };
    Ok(released(py, || decoder_layers(&inputs, isa, threads)).map_err(refused)?.as_secs_f64())
}
