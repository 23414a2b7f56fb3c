//! The door of the crate: checks a layer's inputs, cuts the work into items and runs them.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::chunk::{Chunk, attend_chunk};
use crate::decode::{Single, Target, attend_single};
use crate::element::{Bf16, Element, F16};
use crate::input::{Refusal, Sizes, check_dtype, check_rows, numbers, refuse};
use crate::isa::{Isa, Job};
use crate::lanes::Lanes;
use crate::layer::{Layer, Pages};
use crate::mutant::{self, Mutant};
use crate::scratch::{Scratch, with_scratch};
use crate::softmax::Running;
use crate::team;
use crate::tensor::{Dtype, Tensor};

/// One layer's attention over the rows that a step sees.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// [T, Hq, Dk], the last dimension without gaps.
    pub q: Tensor<'a>,
    /// [N, Hkv, B, Dk] of q's format, any strides, the last dimension without gaps.
    pub k_cache: Tensor<'a>,
    /// [N, Hkv, B, Dv], likewise.
    pub v_cache: Tensor<'a>,
    /// [T, Hq, Dv] of q's format, contiguous; every number is written.
    pub out: Tensor<'a>,
    /// [S, C] int32, contiguous; columns behind a sequence's last block, and before its window, may hold anything.
    pub block_tables: Tensor<'a>,
    /// [S+1] int32: sequence i has the queries of q from `query_starts[i]` to `query_starts[i + 1]`.
    pub query_starts: Tensor<'a>,
    /// [S] int32: positions that its last query sees.
    pub seq_lens: Tensor<'a>,
    /// [Hq] float32: one more logit of each head, which takes weight and gives nothing.
    pub sinks: Option<Tensor<'a>>,
    /// A score is scale * q.k ...
    pub scale: f32,
    /// ... then softcap * tanh(score / softcap), if this is above 0.
    pub softcap: f32,
    /// A query at p sees positions up to p, and with a window above 0 only those above p - window.
    pub window: usize,
}

/// Positions of a single query's part. A longer context is cut into parts that can run on several threads; where it is cut depends
/// on nothing but its own length, and so does the answer.
const PART: usize = 512;
/// Rows (queries times query heads of a KV head) of a chunk's item: enough to pay for turning the keys over, few enough to stay in
/// the second-level cache.
const CHUNK_ROWS: usize = 144;
/// (query, position, number) triples below which a second thread costs more than it gives.
const ALONE: usize = 1 << 17;

/// Attends every query, with `isa`'s instructions on up to `threads` threads. Refuses what does not fit before it writes anything.
pub fn attend(inputs: &Attention<'_>, isa: Isa, threads: usize) -> Result<(), Refusal> {
    Checked::of(inputs)?.run(isa, threads);
    Ok(())
}

/// A checked call, and its integers.
pub(crate) struct Checked<'a> {
    inputs: Attention<'a>,
    tables: &'a [i32],
    columns: usize,
    starts: &'a [i32],
    lens: &'a [i32],
    sinks: Option<&'a [f32]>,
}

impl<'a> Checked<'a> {
    pub(crate) fn of(inputs: &Attention<'a>) -> Result<Checked<'a>, Refusal> {
        if !matches!(inputs.q.dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16) {
            let found = inputs.q.dtype.name();
            return refuse(format!("q has dtype {found}: must be float32, bfloat16 or float16"));
        }
        let mut sizes = Sizes::default();
        sizes.bind("T Hq Dk", &inputs.q)?;
        sizes.bind("N Hkv B Dk", &inputs.k_cache)?;
        sizes.bind("N Hkv B Dv", &inputs.v_cache)?;
        sizes.bind("T Hq Dv", &inputs.out)?;
        sizes.bind("S C", &inputs.block_tables)?;
        sizes.bind("S+1", &inputs.query_starts)?;
        sizes.bind("S", &inputs.seq_lens)?;
        for tensor in [&inputs.k_cache, &inputs.v_cache, &inputs.out] {
            check_dtype(tensor, inputs.q.dtype, ", the dtype of q")?;
        }
        for tensor in [&inputs.q, &inputs.k_cache, &inputs.v_cache] {
            check_rows(tensor)?;
        }
        if !inputs.out.is_contiguous() {
            return refuse("out has gaps between its numbers: must be contiguous".to_owned());
        }
        let mut sinks = None;
        if let Some(tensor) = &inputs.sinks {
            sizes.bind("Hq", tensor)?;
            sinks = Some(numbers::<f32>(tensor, Dtype::F32)?);
        }
        let (heads, kv_heads) = (sizes.of("Hq"), sizes.of("Hkv"));
        if kv_heads < 1 || !heads.is_multiple_of(kv_heads) {
            return refuse(format!("q has Hq={heads}: must be a multiple of Hkv={kv_heads}"));
        }
        if sizes.of("B") < 1 {
            return refuse("k_cache has B=0 in dimension 2: must be at least 1".to_owned());
        }
        if !inputs.scale.is_finite() {
            return refuse(format!("scale={}: must be finite", inputs.scale));
        }
        if !(inputs.softcap >= 0.0 && inputs.softcap.is_finite()) {
            return refuse(format!("softcap={}: must be 0 (none) or a finite number above it", inputs.softcap));
        }
        let checked = Checked {
            inputs: *inputs,
            tables: numbers(&inputs.block_tables, Dtype::I32)?,
            columns: sizes.of("C"),
            starts: numbers(&inputs.query_starts, Dtype::I32)?,
            lens: numbers(&inputs.seq_lens, Dtype::I32)?,
            sinks,
        };
        check_sequences(&checked, &sizes, inputs.window)?;
        Ok(checked)
    }

    /// Rows of sequences that have one query, and of those that have several, in turn, each with whether it is of several.
    pub(crate) fn runs(&self) -> Vec<(Range<usize>, bool)> {
        let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
        for bounds in self.starts.windows(2) {
            let rows = bounds[0] as usize..bounds[1] as usize;
            let is_chunk = rows.len() > 1;
            match runs.last_mut() {
                _ if rows.is_empty() => {}
                Some((before, was_chunk)) if *was_chunk == is_chunk => before.end = rows.end,
                _ => runs.push((rows, is_chunk)),
            }
        }
        runs
    }

    pub(crate) fn run(&self, isa: Isa, threads: usize) {
        match self.inputs.q.dtype {
            Dtype::Bf16 => attend_as::<Bf16>(self, isa, threads),
            Dtype::F16 => attend_as::<F16>(self, isa, threads),
            _ => attend_as::<f32>(self, isa, threads),
        }
    }
}

/// Refuses lengths that contradict each other, and block ids that the cache does not have.
fn check_sequences(checked: &Checked<'_>, sizes: &Sizes, window: usize) -> Result<(), Refusal> {
    let (tokens, blocks, size) = (sizes.of("T"), sizes.of("N"), sizes.of("B"));
    if checked.starts[0] != 0 {
        return refuse(format!("query_starts[0]={}: must be 0", checked.starts[0]));
    }
    for (row, &len) in checked.lens.iter().enumerate() {
        let (start, end) = (checked.starts[row], checked.starts[row + 1]);
        if end < start {
            return refuse(format!("query_starts[{}]={end}: must be at least {start}", row + 1));
        }
        let (queries, most) = (end - start, checked.columns * size);
        if len < queries || len as usize > most {
            return refuse(format!(
                "seq_lens[{row}]={len}: must be {queries} (its queries) to {most} (its table's rows)"
            ));
        }
        if queries == 0 {
            continue;
        }
        let earliest = (len - queries) as usize + 1;
        let low = if window == 0 { 0 } else { earliest.saturating_sub(window) };
        let needed = low / size..(len as usize).div_ceil(size);
        let ids = &checked.tables[row * checked.columns..][needed.clone()];
        if let Some(wrong) = ids.iter().position(|&id| id < 0 || id as usize >= blocks) {
            let (column, id) = (needed.start + wrong, ids[wrong]);
            return refuse(format!("block_tables[{row}, {column}]={id}: must be a block id below {blocks}"));
        }
    }
    let last = checked.starts[checked.lens.len()];
    if last as usize != tokens {
        return refuse(format!("q has T={tokens}: must be {last}, the last of query_starts"));
    }
    Ok(())
}

fn attend_as<E: Element>(checked: &Checked<'_>, isa: Isa, threads: usize) {
    let inputs = &checked.inputs;
    let key_width = inputs.q.shape[2];
    let kv_heads = inputs.k_cache.shape[1];
    let layer = Layer::<E> {
        q: inputs.q.data.cast_const().cast(),
        q_token_step: inputs.q.strides[0],
        q_head_step: inputs.q.strides[1],
        out: inputs.out.data.cast(),
        keys: pages(&inputs.k_cache),
        values: pages(&inputs.v_cache),
        block_size: inputs.k_cache.shape[2],
        kv_heads,
        grouped: inputs.q.shape[1] / kv_heads,
        key_width,
        value_width: inputs.v_cache.shape[3],
        scale: inputs.scale,
        softcap: inputs.softcap,
        window: inputs.window,
        sinks: checked.sinks,
    };
    if inputs.out.is_empty() {
        return;
    }
    let plan = Work::cut(&layer, checked);
    let threads =
        if plan.triples * layer.query_heads() * (key_width + layer.value_width) < ALONE { 1 } else { threads };
    team::run(threads, plan.items.len(), &|item| {
        with_scratch(|scratch| isa.run(OneItem { layer: &layer, work: &plan, item: &plan.items[item], scratch }));
    });
}

fn pages<E>(cache: &Tensor<'_>) -> Pages<E> {
    Pages {
        base: cache.data.cast_const().cast(),
        block_step: cache.strides[0],
        head_step: cache.strides[1],
        row_step: cache.strides[2],
    }
}

/// What one thread does at a time.
enum Item<'a> {
    Chunk(Chunk<'a>),
    Single(Single<'a>),
    /// One part of a single query: which of the long ones, which part.
    Part(Single<'a>, usize, usize),
}

/// A single query over a context of several parts.
struct Long {
    token: usize,
    /// The results of its parts, one behind the other, each with its running softmax of every query head.
    parts: Vec<Mutex<PartResult>>,
    left: AtomicUsize,
}

#[derive(Default)]
struct PartResult {
    running: Vec<Running>,
    sums: Vec<f32>,
}

struct Work<'a> {
    items: Vec<Item<'a>>,
    long: Vec<Long>,
    /// (query, position) pairs.
    triples: usize,
}

impl<'a> Work<'a> {
    fn cut<E: Element>(layer: &Layer<'_, E>, checked: &Checked<'a>) -> Work<'a> {
        let mut work = Work { items: Vec::new(), long: Vec::new(), triples: 0 };
        let tile = (CHUNK_ROWS / layer.grouped).max(1);
        for (row, &len) in checked.lens.iter().enumerate() {
            let (start, end) = (checked.starts[row] as usize, checked.starts[row + 1] as usize);
            let (queries, len) = (end - start, len as usize);
            let table = &checked.tables[row * checked.columns..][..checked.columns];
            work.triples += queries * (len - if queries == 0 { len } else { layer.first_seen(len - queries) });
            if queries == 1 {
                work.cut_single(layer, start, len, table);
            }
            if queries < 2 {
                continue;
            }
            // The last ones see most: they go first, so that no thread is left with a large one at the end.
            for first in (0..queries).step_by(tile).rev() {
                for kv_head in 0..layer.kv_heads {
                    work.items.push(Item::Chunk(Chunk {
                        token: start + first,
                        position: len - queries + first,
                        queries: tile.min(queries - first),
                        kv_head,
                        table,
                    }));
                }
            }
        }
        work
    }

    fn cut_single<E: Element>(&mut self, layer: &Layer<'_, E>, token: usize, len: usize, table: &'a [i32]) {
        let mut low = layer.first_seen(len - 1);
        if mutant::is(Mutant::DecodeWindowLonger) {
            low = low.saturating_sub(1);
        }
        if len - low <= PART {
            self.items.push(Item::Single(Single { token, table, low, high: len }));
            return;
        }
        let bounds: Vec<usize> = (low..len).step_by(PART).collect();
        let (number, parts) = (self.long.len(), bounds.len());
        self.long.push(Long {
            token,
            parts: (0..parts).map(|_| Mutex::default()).collect(),
            left: AtomicUsize::new(parts),
        });
        for (part, &low) in bounds.iter().enumerate() {
            let single = Single { token, table, low, high: len.min(low + PART) };
            self.items.push(Item::Part(single, number, part));
        }
    }
}

struct OneItem<'a, E> {
    layer: &'a Layer<'a, E>,
    work: &'a Work<'a>,
    item: &'a Item<'a>,
    scratch: &'a mut Scratch,
}

impl<E: Element> Job for OneItem<'_, E> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let OneItem { layer, work, item, scratch } = self;
        match item {
            // SAFETY: `check` accepted every size, length and id behind `layer` and the items; no two items answer the same query and
            // head.
            Item::Chunk(chunk) => unsafe { attend_chunk(lanes, layer, chunk, scratch) },
            // SAFETY: as above.
            Item::Single(single) => unsafe { attend_single(lanes, layer, single, scratch, Target::Answer) },
            Item::Part(single, number, part) => {
                let long = &work.long[*number];
                let heads = layer.query_heads();
                let mut result =
                    PartResult { running: vec![Running::NONE; heads], sums: vec![0.0; heads * layer.value_width] };
                let target =
                    Target::Part { running: &mut result.running, sums: &mut result.sums, sum_step: layer.value_width };
                // SAFETY: as above; a part writes no answer.
                unsafe { attend_single(lanes, layer, single, scratch, target) };
                *long.parts[*part].lock().unwrap_or_else(|held| held.into_inner()) = result;
                if long.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                    join_parts(layer, long);
                }
            }
        }
    }
}

/// Adds up the parts of a query, each by its weight, in their order.
fn join_parts<E: Element>(layer: &Layer<'_, E>, long: &Long) {
    let parts: Vec<PartResult> = long
        .parts
        .iter()
        .map(|part| std::mem::take(&mut *part.lock().unwrap_or_else(|held| held.into_inner())))
        .collect();
    let mut sums = vec![0.0; layer.value_width];
    for head in 0..layer.query_heads() {
        let max = parts.iter().fold(f32::NEG_INFINITY, |max, part| max.max(part.running[head].max));
        let mut total = layer.sink(head, max);
        if mutant::is(Mutant::SinkInEveryPart) {
            total *= parts.len() as f32;
        }
        sums.fill(0.0);
        for part in &parts {
            let own = part.running[head];
            let weight = if mutant::is(Mutant::PartsUnweighted) { 1.0 } else { (own.max - max).exp() };
            total += weight * own.sum;
            let values = &part.sums[head * layer.value_width..][..layer.value_width];
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
        }
        // SAFETY: the last part to end answers, alone.
        unsafe { layer.answer(long.token, head, &sums, total) };
    }
}
