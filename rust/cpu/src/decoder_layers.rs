//! Whole decoder layers, one after the other, in one call: the half before attention, stores, attention, the half after it.
//!
//! Before: the rows of a step behind their embedding. After: the model's last norm. Always: what comes out is, to the last bit, what the
//! calls for each part give in this order; all of them are checked before the first one begins. Tiles multiply the rows of sequences that
//! bring several, and never a row that comes alone: so a sequence answers as it does in any batch.

use std::time::{Duration, Instant};

use crate::around_attention::{After, AfterAttention, Before, BeforeAttention, Norm};
use crate::attention::{Attention, Checked};
use crate::input::{Refusal, refuse};
use crate::isa::Isa;
use crate::linear::Activation;
use crate::mutant::{self, Mutant};
use crate::store::Store;
use crate::tensor::{Dtype, Tensor};

/// One layer: its parameters, as `BeforeAttention` and `AfterAttention` tell them, its memory and how it attends.
pub struct DecoderLayer<'a> {
    /// Of the layer's input, and before the gated part.
    pub norms: [Norm<'a>; 2],
    /// Of q, k and v.
    pub weights: [Tensor<'a>; 3],
    /// All or none.
    pub biases: Option<[Tensor<'a>; 3]>,
    /// The output projection.
    pub project: Tensor<'a>,
    /// The gated part.
    pub gate: Tensor<'a>,
    /// Likewise.
    pub up: Tensor<'a>,
    /// Of the gate.
    pub activation: Activation,
    /// Back to the width of a row.
    pub down: Tensor<'a>,
    /// [N, Hkv, B, D] float32, the last dimension without gaps.
    pub k_cache: Tensor<'a>,
    /// [N, Hkv, B, Dv], likewise.
    pub v_cache: Tensor<'a>,
    /// As `Attention`.
    pub scale: f32,
    /// As `Attention`.
    pub softcap: f32,
    /// As `Attention`.
    pub window: usize,
    /// Which of the steps tells where its rows lie.
    pub step: usize,
}

/// Where the rows of a group of layers lie, as `Attention` and `store_kv` tell it.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    /// [S, C] int32.
    pub block_tables: Tensor<'a>,
    /// [S+1] int32.
    pub query_starts: Tensor<'a>,
    /// [S] int32.
    pub seq_lens: Tensor<'a>,
    /// [M] int64.
    pub slots: Tensor<'a>,
}

/// Rows on their way through all layers.
pub struct DecoderLayers<'a> {
    /// [M, K] float32, the last dimension without gaps.
    pub hidden: Tensor<'a>,
    /// [M, D], of every layer.
    pub cos: Tensor<'a>,
    /// [M, D].
    pub sin: Tensor<'a>,
    /// At least one.
    pub layers: &'a [DecoderLayer<'a>],
    /// Of the groups.
    pub steps: &'a [Step<'a>],
    /// [M, K], contiguous, not the memory of `hidden`; every number is written.
    pub out: Tensor<'a>,
}

/// With `isa`'s instructions on up to `threads` threads; returns the time that the halves took, which are what is not attention. Refuses
/// what does not fit before it writes anything.
pub fn decoder_layers(inputs: &DecoderLayers<'_>, isa: Isa, threads: usize) -> Result<Duration, Refusal> {
    let (rows, width) = (inputs.hidden.shape[0], inputs.hidden.shape[1]);
    let mut memory = Memory::new(inputs, rows, width);
    let mut checked = Vec::with_capacity(inputs.layers.len());
    let mut hidden = inputs.hidden;
    for (number, layer) in inputs.layers.iter().enumerate() {
        // The last layer answers, and the others so that each finds its input where it does not write.
        let is_last_in_turn = (inputs.layers.len() - number) % 2 == 1;
        let out = if is_last_in_turn { inputs.out } else { memory.hidden(rows, width) };
        let one = check(inputs, layer, hidden, out, &mut memory);
        checked.push(one.map_err(|refusal| refusal.of_layer(number))?);
        hidden = out;
    }
    if checked.is_empty() {
        return refuse("layers is empty: must hold at least one".to_owned());
    }
    let (begun, mut between) = (Instant::now(), Duration::ZERO);
    for (before, store, attention, after) in &checked {
        // SAFETY: all were checked, of memory that is still there, and each part writes what the next one reads.
        unsafe {
            let runs = attention.runs();
            let in_tiles = mutant::is(Mutant::SinglesInTiles);
            let on = |is_chunk: bool| if is_chunk || in_tiles { isa } else { isa.without_tiles() };
            for (rows, is_chunk) in &runs {
                before.part(rows.clone()).run(on(*is_chunk), threads);
            }
            let stored = Instant::now();
            if !mutant::is(Mutant::LayersStoreNothing) {
                store.run(threads);
            }
            attention.run(isa, threads);
            between += stored.elapsed();
            for (rows, is_chunk) in runs {
                after.part(rows).run(on(is_chunk), threads);
            }
        }
    }
    Ok(begun.elapsed().saturating_sub(between))
}

type Parts<'a> = (Before<'a>, Store<'a>, Checked<'a>, After<'a>);

fn check<'a>(
    inputs: &DecoderLayers<'a>,
    layer: &DecoderLayer<'a>,
    hidden: Tensor<'a>,
    out: Tensor<'a>,
    memory: &mut Memory,
) -> Result<Parts<'a>, Refusal> {
    let Some(step) = inputs.steps.get(layer.step) else {
        return refuse(format!("step={}: must be below {} (steps)", layer.step, inputs.steps.len()));
    };
    let [queries, keys, values] = layer.weights.map(|weight| weight.shape[0]);
    let (rows, all) = (inputs.hidden.shape[0], queries + keys + values);
    let between = memory.rows(rows, all);
    let before = Before::check(&BeforeAttention {
        hidden,
        norm: layer.norms[0],
        weights: layer.weights,
        biases: layer.biases,
        cos: inputs.cos,
        sin: inputs.sin,
        out: between,
    })?;
    // Just checked: a width divides both.
    let (key_width, heads) = (inputs.cos.shape[1], layer.k_cache.shape[1]);
    let value_width = layer.v_cache.shape[3];
    if heads * value_width != values {
        let wanted = heads * value_width;
        return refuse(format!("v has Nv={values} in dimension 0: must be {wanted} (heads and width of v_cache)"));
    }
    let part = |name, first: usize, heads: usize, width: usize| {
        // SAFETY: within the rows, which lie `all` numbers apart.
        let tensor = unsafe {
            let data = between.data.wrapping_add(first * size_of::<f32>());
            Tensor::new(name, data, Dtype::F32, &[rows, heads, width], &[all, width, 1])
        };
        tensor.expect("three dimensions")
    };
    let k = part("k", queries, keys / key_width, key_width);
    let v = part("v", queries + keys, heads, value_width);
    let store = Store::check(&k, &v, &layer.k_cache, &layer.v_cache, &step.slots)?;
    let query_heads = queries / key_width;
    let attended = memory.attended(rows, query_heads, value_width);
    let attention = Checked::of(&Attention {
        q: part("q", 0, query_heads, key_width),
        k_cache: layer.k_cache,
        v_cache: layer.v_cache,
        out: attended,
        block_tables: step.block_tables,
        query_starts: step.query_starts,
        seq_lens: step.seq_lens,
        sinks: None,
        scale: layer.scale,
        softcap: layer.softcap,
        window: layer.window,
    })?;
    let after = After::check(&AfterAttention {
        attended: attended.flat(),
        hidden,
        project: layer.project,
        norm: layer.norms[1],
        gate: layer.gate,
        up: layer.up,
        activation: layer.activation,
        down: layer.down,
        out,
    })?;
    Ok((before, store, attention, after))
}

/// What lies between the parts of a layer, and between layers. All layers use the same.
struct Memory {
    rows: Vec<f32>,
    attended: Vec<f32>,
    hidden: Vec<f32>,
}

impl Memory {
    /// Enough for the widest layer.
    fn new(inputs: &DecoderLayers<'_>, rows: usize, width: usize) -> Memory {
        let most = |of: &dyn Fn(&DecoderLayer<'_>) -> usize| rows * inputs.layers.iter().map(of).max().unwrap_or(0);
        let all = most(&|layer| layer.weights.iter().map(|weight| weight.shape[0]).sum());
        let least = inputs.cos.shape[1].max(1);
        let attended = most(&|layer| layer.weights[0].shape[0] / least * layer.v_cache.shape[3]);
        Memory { rows: vec![0.0; all], attended: vec![0.0; attended], hidden: vec![0.0; rows * width] }
    }

    fn rows<'a>(&mut self, rows: usize, width: usize) -> Tensor<'a> {
        whole("rows", &mut self.rows, &[rows, width], &[width, 1])
    }

    fn attended<'a>(&mut self, rows: usize, heads: usize, width: usize) -> Tensor<'a> {
        whole("attended", &mut self.attended, &[rows, heads, width], &[heads * width, width, 1])
    }

    fn hidden<'a>(&mut self, rows: usize, width: usize) -> Tensor<'a> {
        whole("hidden", &mut self.hidden, &[rows, width], &[width, 1])
    }
}

/// Memory as a tensor; the caller keeps the memory and uses it through such tensors alone.
fn whole<'a>(name: &'static str, memory: &mut [f32], shape: &[usize], strides: &[usize]) -> Tensor<'a> {
    assert!(memory.len() >= shape.iter().product(), "room for {name}");
    // SAFETY: as long as the shape says, and `decoder_layers` keeps it until the last part has run; parts run one after the other.
    unsafe { Tensor::new(name, memory.as_mut_ptr().cast(), Dtype::F32, shape, strides) }.expect("few dimensions")
}
