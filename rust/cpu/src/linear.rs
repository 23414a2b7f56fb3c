//! Linear layers: checks the tensors of a call, cuts the work into items and runs them.

use std::ops::Range;

use crate::input::{Refusal, Sizes, check_dtype, numbers, refuse};
use crate::isa::{Isa, Job};
use crate::lanes::Lanes;
use crate::left::Left;
use crate::mutant::{self, Mutant};
use crate::product::{Product, Start, Weight};
use crate::scratch::{Scratch, with_call_memory, with_scratch};
use crate::strips::{Rows, Strip, Strips, load, most, store};
use crate::team;
use crate::tensor::{Dtype, Tensor};

/// out = x times the transposed weight, plus the bias: torch's `linear`.
pub struct Linear<'a> {
    /// [M, K] float32, the last dimension without gaps.
    pub x: Tensor<'a>,
    /// [N, K] float32, likewise.
    pub weight: Tensor<'a>,
    /// [N] float32, contiguous.
    pub bias: Option<Tensor<'a>>,
    /// [M, N] float32, contiguous; every number is written.
    pub out: Tensor<'a>,
}

/// What a gate's answer goes through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// x / (1 + e^-x).
    Silu,
    /// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
    GeluTanh,
}

impl Activation {
    /// The one of this name of torch: `silu` or `gelu_tanh`.
    pub fn named(name: &str) -> Option<Activation> {
        match name {
            "silu" => Some(Activation::Silu),
            "gelu_tanh" => Some(Activation::GeluTanh),
            _ => None,
        }
    }

    #[inline(always)]
    fn of<L: Lanes>(self, lanes: L, x: L::V) -> L::V {
        match self {
            Activation::Silu => {
                let minus = lanes.min(lanes.splat(88.0), lanes.sub(lanes.splat(0.0), x));
                let whole = lanes.div(x, lanes.add(lanes.splat(1.0), lanes.exp(minus)));
                lanes.where_below(x, -88.0, lanes.splat(0.0), whole)
            }
            Activation::GeluTanh => {
                let cube = lanes.mul(lanes.mul(x, x), x);
                let inner = lanes.fma(cube, lanes.splat(0.044_715), x);
                let tanh = lanes.tanh(lanes.mul(inner, lanes.splat(0.797_884_6)));
                lanes.mul(lanes.mul(x, lanes.splat(0.5)), lanes.add(tanh, lanes.splat(1.0)))
            }
        }
    }
}

/// out = activation(x times the transposed gate) * (x times the transposed up), number by number.
pub struct Gated<'a> {
    /// [M, K] float32, the last dimension without gaps.
    pub x: Tensor<'a>,
    /// [N, K] float32, likewise.
    pub gate: Tensor<'a>,
    /// [N, K] float32, likewise.
    pub up: Tensor<'a>,
    /// Of the gate's answers.
    pub activation: Activation,
    /// [M, N] float32, contiguous; every number is written.
    pub out: Tensor<'a>,
}

/// Rows that are laid side by side and multiplied together.
pub(crate) const ROWS: usize = 256;
/// Parts of the outputs, at least where they are whole panels: enough for threads to end at about the same time.
const PARTS: usize = 16;
/// Outputs of an item at most: its answers wait in the caches until they are written as rows.
const WIDEST: usize = 192;
/// Outputs of a gated item at most: both answers wait.
const GATED: usize = 96;
/// Products of two numbers below which a second thread costs more than it gives.
const ALONE: usize = 1 << 17;
/// Numbers below which a second thread costs more than it gives, where they are only moved.
pub(crate) const MOVED_ALONE: usize = 1 << 15;

/// Multiplies, with `isa`'s instructions on up to `threads` threads. Refuses what does not fit before it writes anything.
pub fn linear(inputs: &Linear<'_>, isa: Isa, threads: usize) -> Result<(), Refusal> {
    let mut sizes = Sizes::default();
    sizes.bind("M K", &inputs.x)?;
    sizes.bind("N K", &inputs.weight)?;
    sizes.bind("M N", &inputs.out)?;
    let (x, weight) = (Rows::of(&inputs.x)?, Weight::of(&inputs.weight)?);
    let start = match &inputs.bias {
        Some(bias) => {
            sizes.bind("N", bias)?;
            Start::Bias(numbers(bias, Dtype::F32)?)
        }
        None => Start::Zero,
    };
    let answers = Answers::of(&inputs.out)?;
    in_blocks(x, sizes.of("M"), isa, threads, |x, first, rows| {
        let to = Target::Rows(answers.from(first));
        // SAFETY: the sizes are equal where they must be.
        unsafe { multiply_all(&[(Product { x, weight, start }, to)], rows, isa, threads) };
    });
    Ok(())
}

/// Both products and what joins them, as `linear`.
pub fn gated(inputs: &Gated<'_>, isa: Isa, threads: usize) -> Result<(), Refusal> {
    let mut sizes = Sizes::default();
    sizes.bind("M K", &inputs.x)?;
    sizes.bind("N K", &inputs.gate)?;
    sizes.bind("N K", &inputs.up)?;
    sizes.bind("M N", &inputs.out)?;
    let (x, gate, up) = (Rows::of(&inputs.x)?, Weight::of(&inputs.gate)?, Weight::of(&inputs.up)?);
    let answers = Answers::of(&inputs.out)?;
    in_blocks(x, sizes.of("M"), isa, threads, |x, first, rows| {
        let both = GatedProduct { x, gate, up, activation: inputs.activation, to: Target::Rows(answers.from(first)) };
        // SAFETY: the sizes are equal where they must be.
        unsafe { both.multiply(rows, isa, threads) };
    });
    Ok(())
}

/// Lays the `rows` rows of x side by side, a block of them at a time, and runs `work` with each block, its first row and its rows.
fn in_blocks(x: Rows, rows: usize, isa: Isa, threads: usize, mut work: impl FnMut(Left, usize, usize)) {
    let most = ROWS.min(rows);
    with_call_memory(Left::room(most, x.width, isa), |memory| {
        for first in (0..rows).step_by(ROWS) {
            let block = ROWS.min(rows - first);
            let left = Left::new(memory.as_mut_ptr(), most, x.width, isa);
            each_strip(block, x.width, isa, threads, |strip| {
                isa.run(Packed { strips: left.strips, strip, from: x.from(first) });
                // SAFETY: `block` rows of x are there, and memory for as many.
                unsafe { left.fill(strip, 0..x.width) };
            });
            work(left, first, block);
        }
    });
}

/// Runs `work`, which moves `numbers` numbers for each row, for every strip of some rows.
pub(crate) fn each_strip(rows: usize, numbers: usize, isa: Isa, threads: usize, work: impl Fn(Strip) + Sync) {
    let threads = if rows * numbers < MOVED_ALONE { 1 } else { threads };
    team::run(threads, Strip::count(rows, isa.lanes()), &|number| work(Strip::of(number, rows, isa.lanes())));
}

/// Lays the rows of a strip side by side.
pub(crate) struct Packed {
    pub(crate) strips: Strips,
    pub(crate) strip: Strip,
    pub(crate) from: Rows,
}

impl Job for Packed {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        // SAFETY: whoever made it has looked: the rows are there, and room for them.
        unsafe { self.strips.pack(lanes, self.strip, self.from) };
    }
}

/// Where answers go as rows.
#[derive(Clone, Copy)]
pub(crate) struct Answers {
    pub(crate) to: *mut f32,
    /// From a row to the next.
    pub(crate) step: usize,
}

// SAFETY: every item writes the answers of its own rows and outputs.
unsafe impl Sync for Answers {}

impl Answers {
    pub(crate) fn of(out: &Tensor<'_>) -> Result<Answers, Refusal> {
        check_dtype(out, Dtype::F32, "")?;
        if !out.is_contiguous() {
            return refuse(format!("{} has gaps between its numbers: must be contiguous", out.name));
        }
        Ok(Answers { to: out.data.cast(), step: out.shape[1] })
    }

    /// Those from `row` on.
    pub(crate) fn from(self, row: usize) -> Answers {
        self.at(row, 0)
    }

    /// Those from an answer on.
    pub(crate) fn at(self, row: usize, output: usize) -> Answers {
        Answers { to: self.to.wrapping_add(row * self.step + output), ..self }
    }
}

/// Where answers go.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    Rows(Answers),
    Strips(Strips),
    /// To be multiplied.
    Left(Left),
}

impl Target {
    /// Where they go as strips, if they do.
    fn strips(&self) -> Option<Strips> {
        match self {
            Target::Rows(_) => None,
            Target::Strips(strips) => Some(*strips),
            Target::Left(left) => Some(left.strips),
        }
    }
}

/// How the answers of a product are cut into blocks of whole strips.
struct Cut {
    rows: usize,
    outputs: usize,
    /// Strips of a block.
    tall: usize,
    /// Outputs of a block.
    wide: usize,
    lanes: usize,
}

/// Some strips and outputs.
struct Block {
    strips: Range<usize>,
    outputs: Range<usize>,
}

impl Cut {
    fn of(weight: &Weight, rows: usize, widest: usize, isa: Isa) -> Cut {
        let lanes = isa.lanes();
        let panel = isa.panel();
        let tall = isa.row_bytes() / (weight.depth() * most(lanes) * size_of::<f32>()).max(1);
        let tall = tall.max(1);
        let wide = (weight.outputs.div_ceil(PARTS) / panel * panel).clamp(panel, widest / panel * panel);
        Cut { rows, outputs: weight.outputs, tall, wide, lanes }
    }

    fn across(&self) -> usize {
        self.outputs.div_ceil(self.wide)
    }

    fn blocks(&self) -> usize {
        Strip::count(self.rows, self.lanes).div_ceil(self.tall) * self.across()
    }

    fn block(&self, number: usize) -> Block {
        let (strip, output) = (number / self.across() * self.tall, number % self.across() * self.wide);
        Block {
            strips: strip..(strip + self.tall).min(Strip::count(self.rows, self.lanes)),
            outputs: output..(output + self.wide).min(self.outputs),
        }
    }
}

impl Block {
    fn first_row(&self, lanes: usize) -> usize {
        self.strips.start * most(lanes)
    }

    /// Numbers of memory for its answers.
    fn room(&self, lanes: usize) -> usize {
        self.strips.len() * most(lanes) * self.outputs.len()
    }

    /// Writes its answers, which are in `strips`, as rows.
    // SAFETY: the caller's: they are there, and room for them.
    #[inline(always)]
    unsafe fn unpack<L: Lanes>(&self, lanes: L, rows: usize, strips: Strips, to: Answers) {
        for number in self.strips.clone() {
            let strip = Strip::of(number, rows, L::N);
            let to = to.at(strip.first, self.outputs.start);
            // SAFETY: the caller's.
            unsafe { strips.unpack(lanes, strip, self.outputs.start, self.outputs.len(), to) };
        }
    }
}

fn worth(threads: usize, rows: usize, weight: &Weight) -> usize {
    if rows * weight.outputs * weight.depth() < ALONE { 1 } else { threads }
}

/// Multiplies `rows` rows with several weights at once.
///
/// # Safety
/// The rows of x, the weights and the room for the answers are there, and the answers do not overlap.
pub(crate) unsafe fn multiply_all<const P: usize>(
    products: &[(Product<'_>, Target); P],
    rows: usize,
    isa: Isa,
    threads: usize,
) {
    let cuts: [Cut; P] = std::array::from_fn(|p| Cut::of(&products[p].0.weight, rows, WIDEST, isa));
    let threads = products.iter().map(|(product, _)| worth(threads, rows, &product.weight)).max().unwrap_or(1);
    team::run(threads, cuts.iter().map(Cut::blocks).sum(), &|mut number| {
        let mut own = 0;
        while number >= cuts[own].blocks() {
            number -= cuts[own].blocks();
            own += 1;
        }
        let (product, target) = &products[own];
        let block = cuts[own].block(number);
        with_scratch(|scratch| isa.run(LinearItem { product, target: *target, rows, block, scratch }));
    });
}

/// Two products of the same rows, joined by a gate.
pub(crate) struct GatedProduct {
    pub(crate) x: Left,
    pub(crate) gate: Weight,
    pub(crate) up: Weight,
    pub(crate) activation: Activation,
    pub(crate) to: Target,
}

impl GatedProduct {
    /// # Safety
    /// As `multiply_all`; both weights have as many outputs.
    pub(crate) unsafe fn multiply(&self, rows: usize, isa: Isa, threads: usize) {
        let cut = Cut::of(&self.gate, rows, GATED, isa);
        team::run(worth(threads, rows, &self.gate), cut.blocks(), &|number| {
            let block = cut.block(number);
            with_scratch(|scratch| isa.run(GatedItem { product: self, rows, block, scratch }));
        });
    }
}

struct LinearItem<'a> {
    product: &'a Product<'a>,
    target: Target,
    rows: usize,
    block: Block,
    scratch: &'a mut Scratch,
}

impl Job for LinearItem<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let LinearItem { product, target, rows, block, scratch } = self;
        let ([memory, rest], _) = scratch.parts([block.room(L::N), product.room()]);
        let own = Strips::part(memory.as_mut_ptr(), block.outputs.len(), block.first_row(L::N), block.outputs.start);
        let to = target.strips().unwrap_or(own);
        // SAFETY: the product and the answers have the rows and outputs that blocks are cut from.
        unsafe {
            product.multiply(lanes, rows, block.strips.clone(), block.outputs.clone(), to, rest);
            if let Target::Rows(answers) = target {
                block.unpack(lanes, rows, own, answers);
            }
        }
    }
}

struct GatedItem<'a> {
    product: &'a GatedProduct,
    rows: usize,
    block: Block,
    scratch: &'a mut Scratch,
}

impl Job for GatedItem<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let GatedItem { product: GatedProduct { x, gate, up, activation, to: target }, rows, block, scratch } = self;
        let products = [gate, up].map(|weight| Product { x: *x, weight: *weight, start: Start::Zero });
        let ([gates, ups, rest], _) = scratch.parts([block.room(L::N), block.room(L::N), products[0].room()]);
        let part = |memory: &mut [f32]| {
            Strips::part(memory.as_mut_ptr(), block.outputs.len(), block.first_row(L::N), block.outputs.start)
        };
        let (own, ups) = (part(gates), part(ups));
        let to = target.strips().unwrap_or(own);
        for (product, to) in products.into_iter().zip([to, ups]) {
            // SAFETY: as in `LinearItem`; the scratch has room for both.
            unsafe { product.multiply(lanes, rows, block.strips.clone(), block.outputs.clone(), to, rest) };
        }
        for number in block.strips.clone() {
            let strip = Strip::of(number, rows, L::N);
            // The outputs of a strip lie one behind the other.
            let all = block.outputs.len() * strip.width;
            let (gates, ups) = (to.at(strip, block.outputs.start), ups.at(strip, block.outputs.start));
            for first in (0..all).step_by(L::N) {
                let count = L::N.min(all - first);
                // SAFETY: the answers that were just written.
                unsafe {
                    let own = activation.of(lanes, load(lanes, gates.add(first), count));
                    let up = load(lanes, ups.add(first), count);
                    let both = if mutant::is(Mutant::GateAlone) { own } else { lanes.mul(own, up) };
                    store(lanes, gates.add(first), both, count);
                }
            }
            if let Target::Left(left) = target {
                // SAFETY: as above; items begin with a block and end with one or with the row.
                unsafe { left.fill(strip, block.outputs.clone()) };
            }
        }
        if let Target::Rows(answers) = target {
            // SAFETY: as above.
            unsafe { block.unpack(lanes, rows, own, *answers) };
        }
    }
}
