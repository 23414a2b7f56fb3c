//! What a decoder layer does before its attention and after it, each in one call: norms, products, rotary positions, residuals.
//!
//! Before: the layer's input. After: stores and attention, then the next layer. Always: as in `product`, what comes out for a row
//! depends on no other row. Rows go through a half in blocks, so that what lies between its steps stays in the caches.

use std::ops::Range;

use crate::input::{Refusal, Sizes, check_dtype, numbers, refuse};
use crate::isa::{Isa, Job};
use crate::lanes::Lanes;
use crate::left::Left;
use crate::linear::{Activation, Answers, GatedProduct, MOVED_ALONE, Packed, ROWS, Target, each_strip, multiply_all};
use crate::mutant::{self, Mutant};
use crate::product::{Product, Start, Weight, norm};
use crate::scratch::with_call_memory;
use crate::strips::{Rows, Strip, Strips};
use crate::team;
use crate::tensor::{Dtype, Tensor};

/// Rows of an item that turns them.
const ITEM: usize = 16;

/// A root mean square norm: x / sqrt(mean(x^2) + eps) * weight.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    /// [K] float32, contiguous.
    pub weight: Tensor<'a>,
    /// Above 0.
    pub eps: f32,
}

/// q, k and v of a layer, with rotary positions in q and k.
pub struct BeforeAttention<'a> {
    /// [M, K] float32, the last dimension without gaps; so for every matrix here.
    pub hidden: Tensor<'a>,
    /// Of the layer's input.
    pub norm: Norm<'a>,
    /// [Nq, K], [Nk, K] and [Nv, K].
    pub weights: [Tensor<'a>; 3],
    /// [Nq], [Nk] and [Nv], contiguous; all or none.
    pub biases: Option<[Tensor<'a>; 3]>,
    /// [M, D]: x becomes x * cos + turned(x) * sin, where turned(x) is the second half, negated, then the first.
    pub cos: Tensor<'a>,
    /// [M, D].
    pub sin: Tensor<'a>,
    /// [M, Nq + Nk + Nv], contiguous; every number is written.
    pub out: Tensor<'a>,
}

/// The output projection, the residual, and the gated part with its own.
pub struct AfterAttention<'a> {
    /// [M, A] float32, the last dimension without gaps; so for every matrix here.
    pub attended: Tensor<'a>,
    /// [M, K]: the layer's input.
    pub hidden: Tensor<'a>,
    /// [K, A].
    pub project: Tensor<'a>,
    /// Before the gated part.
    pub norm: Norm<'a>,
    /// [N, K].
    pub gate: Tensor<'a>,
    /// [N, K].
    pub up: Tensor<'a>,
    /// Of the gate.
    pub activation: Activation,
    /// [K, N].
    pub down: Tensor<'a>,
    /// [M, K], contiguous, not the memory of `hidden`; every number is written.
    pub out: Tensor<'a>,
}

/// With `isa`'s instructions on up to `threads` threads. Refuses what does not fit before it writes anything.
pub fn before_attention(inputs: &BeforeAttention<'_>, isa: Isa, threads: usize) -> Result<(), Refusal> {
    let checked = Before::check(inputs)?;
    // SAFETY: just checked.
    unsafe { checked.run(isa, threads) };
    Ok(())
}

/// As `before_attention`.
pub fn after_attention(inputs: &AfterAttention<'_>, isa: Isa, threads: usize) -> Result<(), Refusal> {
    let checked = After::check(inputs)?;
    // SAFETY: just checked.
    unsafe { checked.run(isa, threads) };
    Ok(())
}

/// A first half whose sizes fit.
#[derive(Clone, Copy)]
pub(crate) struct Before<'a> {
    hidden: Rows,
    rows: usize,
    norm: (&'a [f32], f32),
    weights: [Weight; 3],
    biases: [Option<&'a [f32]>; 3],
    cos: Rows,
    sin: Rows,
    out: Answers,
}

/// A second half whose sizes fit.
#[derive(Clone, Copy)]
pub(crate) struct After<'a> {
    attended: Rows,
    hidden: Rows,
    rows: usize,
    project: Weight,
    norm: (&'a [f32], f32),
    gate: Weight,
    up: Weight,
    activation: Activation,
    down: Weight,
    out: Answers,
}

impl<'a> Before<'a> {
    pub(crate) fn check(inputs: &BeforeAttention<'a>) -> Result<Before<'a>, Refusal> {
        let mut sizes = Sizes::default();
        sizes.bind("M K", &inputs.hidden)?;
        let letters = ["Nq", "Nk", "Nv"];
        for (weight, letters) in inputs.weights.iter().zip(["Nq K", "Nk K", "Nv K"]) {
            sizes.bind(letters, weight)?;
        }
        sizes.bind("M D", &inputs.cos)?;
        sizes.bind("M D", &inputs.sin)?;
        sizes.bind("M N", &inputs.out)?;
        let norm = checked_norm(&inputs.norm, &mut sizes)?;
        let (hidden, cos, sin) = (Rows::of(&inputs.hidden)?, Rows::of(&inputs.cos)?, Rows::of(&inputs.sin)?);
        let outputs = letters.map(|letter| sizes.of(letter));
        let (all, found) = (outputs.iter().sum::<usize>(), sizes.of("N"));
        if found != all {
            return refuse(format!("out has N={found} in dimension 1: must be {all} (outputs of all weights)"));
        }
        let width = cos.width;
        if width < 2 || width % 2 > 0 || outputs[0] % width > 0 || outputs[1] % width > 0 {
            let [queries, keys, _] = outputs;
            return refuse(format!(
                "cos has D={width} in dimension 1: must be even and divide Nq={queries} and Nk={keys}"
            ));
        }
        let mut biases = [None; 3];
        if let Some(tensors) = &inputs.biases {
            for (at, tensor) in tensors.iter().enumerate() {
                sizes.bind(letters[at], tensor)?;
                biases[at] = Some(numbers::<f32>(tensor, Dtype::F32)?);
            }
        }
        let out = Answers::of(&inputs.out)?;
        let [q, k, v] = &inputs.weights;
        let weights = [Weight::of(q)?, Weight::of(k)?, Weight::of(v)?];
        Ok(Before { hidden, rows: sizes.of("M"), norm, weights, biases, cos, sin, out })
    }

    /// Some of its rows.
    pub(crate) fn part(&self, rows: Range<usize>) -> Before<'a> {
        let Before { hidden, cos, sin, out, .. } = *self;
        let first = rows.start;
        let (hidden, cos, sin) = (hidden.from(first), cos.from(first), sin.from(first));
        Before { hidden, rows: rows.len(), cos, sin, out: out.from(first), ..*self }
    }

    // SAFETY: to call it, the memory must still be what it was when it was checked.
    pub(crate) unsafe fn run(&self, isa: Isa, threads: usize) {
        let Before { hidden, rows, norm, weights, biases, cos, sin, out } = *self;
        let firsts = [0, weights[0].outputs, weights[0].outputs + weights[1].outputs];
        let most = ROWS.min(rows);
        with_call_memory(Left::room(most, hidden.width, isa), |memory| {
            for row in (0..rows).step_by(ROWS) {
                let block = ROWS.min(rows - row);
                let x = Left::new(memory.as_mut_ptr(), most, hidden.width, isa);
                each_strip(block, hidden.width, isa, threads, |strip| {
                    // SAFETY: `block` rows of hidden are there, and memory for as many.
                    isa.run(Packed { strips: x.strips, strip, from: hidden.from(row) });
                    isa.run(Normed { strip, from: x.strips, norm, to: x });
                });
                let own = out.from(row);
                let products: [(Product<'_>, Target); 3] = std::array::from_fn(|at| {
                    let start = biases[at].map_or(Start::Zero, Start::Bias);
                    (Product { x, weight: weights[at], start }, Target::Rows(own.at(0, firsts[at])))
                });
                // SAFETY: every size was checked; the products' answers lie beside each other.
                unsafe { multiply_all(&products, block, isa, threads) };
                let turned = Turned { to: own, cos: cos.from(row), sin: sin.from(row), heads: firsts[2] / cos.width };
                // SAFETY: as above; the answers' first numbers are those of the query and key heads.
                unsafe { turned.all(block, isa, threads) };
            }
        });
    }
}

impl<'a> After<'a> {
    pub(crate) fn check(inputs: &AfterAttention<'a>) -> Result<After<'a>, Refusal> {
        let mut sizes = Sizes::default();
        sizes.bind("M A", &inputs.attended)?;
        sizes.bind("M K", &inputs.hidden)?;
        sizes.bind("K A", &inputs.project)?;
        sizes.bind("N K", &inputs.gate)?;
        sizes.bind("N K", &inputs.up)?;
        sizes.bind("K N", &inputs.down)?;
        sizes.bind("M K", &inputs.out)?;
        let norm = checked_norm(&inputs.norm, &mut sizes)?;
        let (attended, hidden) = (Rows::of(&inputs.attended)?, Rows::of(&inputs.hidden)?);
        let [project, gate, up, down] = [
            Weight::of(&inputs.project)?,
            Weight::of(&inputs.gate)?,
            Weight::of(&inputs.up)?,
            Weight::of(&inputs.down)?,
        ];
        let out = Answers::of(&inputs.out)?;
        let activation = inputs.activation;
        Ok(After { attended, hidden, rows: sizes.of("M"), project, norm, gate, up, activation, down, out })
    }

    /// Some of its rows.
    pub(crate) fn part(&self, rows: Range<usize>) -> After<'a> {
        let After { attended, hidden, out, .. } = *self;
        let first = rows.start;
        let (attended, hidden, out) = (attended.from(first), hidden.from(first), out.from(first));
        After { attended, hidden, rows: rows.len(), out, ..*self }
    }

    // SAFETY: as `Before::run`.
    pub(crate) unsafe fn run(&self, isa: Isa, threads: usize) {
        let After { attended, hidden, rows, project, norm, gate, up, activation, down, out } = *self;
        let (width, between) = (hidden.width, gate.outputs);
        let most = ROWS.min(rows);
        let widths = [attended.width, width, between];
        let rooms = widths.map(|numbers| Left::room(most, numbers, isa));
        with_call_memory(rooms.iter().sum::<usize>() + Strips::room(most, width, isa.lanes()), |memory| {
            let mut rest = memory.as_mut_ptr();
            let [x, normed, gated] = std::array::from_fn(|part| {
                let own = rest;
                rest = rest.wrapping_add(rooms[part]);
                Left::new(own, most, widths[part], isa)
            });
            let sums = Strips::whole(rest, width);
            for row in (0..rows).step_by(ROWS) {
                let block = ROWS.min(rows - row);
                each_strip(block, attended.width + width, isa, threads, |strip| {
                    // SAFETY: `block` rows are there, and memory for as many; so for the calls below, and every size was checked.
                    isa.run(Packed { strips: x.strips, strip, from: attended.from(row) });
                    // SAFETY: as above.
                    unsafe { x.fill(strip, 0..attended.width) };
                    isa.run(Packed { strips: sums, strip, from: hidden.from(row) });
                });
                let start = if mutant::is(Mutant::NoResidual) { Start::Zero } else { Start::Before(sums) };
                // SAFETY: as above.
                unsafe {
                    multiply_all(&[(Product { x, weight: project, start }, Target::Strips(sums))], block, isa, threads)
                };
                each_strip(block, width, isa, threads, |strip| isa.run(Normed { strip, from: sums, norm, to: normed }));
                let to = Target::Left(gated);
                let down = Product { x: gated, weight: down, start: Start::Before(sums) };
                // SAFETY: as above.
                unsafe {
                    GatedProduct { x: normed, gate, up, activation, to }.multiply(block, isa, threads);
                    multiply_all(&[(down, Target::Rows(out.from(row)))], block, isa, threads);
                }
            }
        });
    }
}

fn checked_norm<'a>(norm: &Norm<'a>, sizes: &mut Sizes) -> Result<(&'a [f32], f32), Refusal> {
    check_dtype(&norm.weight, Dtype::F32, "")?;
    sizes.bind("K", &norm.weight)?;
    if !(norm.eps > 0.0 && norm.eps.is_finite()) {
        return refuse(format!("eps={}: must be a finite number above 0", norm.eps));
    }
    Ok((numbers(&norm.weight, Dtype::F32)?, norm.eps))
}

/// A strip on its way through a norm.
struct Normed<'a> {
    strip: Strip,
    from: Strips,
    norm: (&'a [f32], f32),
    to: Left,
}

impl Job for Normed<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Normed { strip, from, norm: (weight, eps), to } = self;
        // SAFETY: whoever made it has looked: the strip is there in both.
        unsafe {
            norm(lanes, strip, from, to.strips, weight, eps);
            to.fill(strip, 0..weight.len());
        }
    }
}

/// Rows whose first heads get rotary positions, in place.
struct Turned {
    to: Answers,
    cos: Rows,
    sin: Rows,
    /// Of `cos.width` numbers each.
    heads: usize,
}

// SAFETY: every item turns its own rows.
unsafe impl Sync for Turned {}

impl Turned {
    // SAFETY: the caller's: `rows` rows are there.
    unsafe fn all(&self, rows: usize, isa: Isa, threads: usize) {
        let threads = if rows * self.heads * self.cos.width < MOVED_ALONE { 1 } else { threads };
        team::run(threads, rows.div_ceil(ITEM), &|item| {
            isa.run(TurnedItem { whole: self, first: item * ITEM, rows: ITEM.min(rows - item * ITEM) });
        });
    }
}

struct TurnedItem<'a> {
    whole: &'a Turned,
    first: usize,
    rows: usize,
}

impl Job for TurnedItem<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Turned { to, cos, sin, heads } = self.whole;
        let half = cos.width / 2;
        let whole = half / L::N * L::N;
        let minus = if mutant::is(Mutant::TurnedBack) { 1.0 } else { -1.0 };
        for row in self.first..self.first + self.rows {
            let (cos, sin) = (cos.at.wrapping_add(row * cos.step), sin.at.wrapping_add(row * sin.step));
            for head in 0..*heads {
                let low = to.to.wrapping_add(row * to.step + head * 2 * half);
                let high = low.wrapping_add(half);
                for d in (0..whole).step_by(L::N) {
                    // SAFETY: `L::N` numbers of each half of this head, and of this row's cos and sin.
                    unsafe {
                        let (a, b) = (lanes.load(low.add(d)), lanes.load(high.add(d)));
                        let turned = lanes.mul(lanes.mul(b, lanes.splat(minus)), lanes.load(sin.add(d)));
                        lanes.store(low.add(d), lanes.fma(a, lanes.load(cos.add(d)), turned));
                        let turned = lanes.mul(a, lanes.load(sin.add(half + d)));
                        lanes.store(high.add(d), lanes.fma(b, lanes.load(cos.add(half + d)), turned));
                    }
                }
                for d in whole..half {
                    // SAFETY: as above.
                    unsafe {
                        let (a, b) = (*low.add(d), *high.add(d));
                        *low.add(d) = a * *cos.add(d) + minus * b * *sin.add(d);
                        *high.add(d) = b * *cos.add(half + d) + a * *sin.add(half + d);
                    }
                }
            }
        }
    }
}
