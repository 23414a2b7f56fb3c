//! Linear layers: checks the tensors of a call, cuts the work into items and runs them.

use crate::input::{Refusal, Sizes, check_dtype, numbers, refuse};
use crate::isa::{Isa, Job};
use crate::lanes::Lanes;
use crate::mutant::{self, Mutant};
use crate::product::{Block, PANEL, Product, Rows};
use crate::scratch::{Scratch, with_scratch};
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

/// Parts of the outputs, at least where they are whole panels: enough for threads to end at about the same time.
const PARTS: usize = 16;
/// Outputs of a gated item at most: its answers wait for each other in the caches.
const GATED: usize = 96;
/// Products of two numbers below which a second thread costs more than it gives.
const ALONE: usize = 1 << 17;

/// Multiplies, with `isa`'s instructions on up to `threads` threads. Refuses what does not fit before it writes anything.
pub fn linear(inputs: &Linear<'_>, isa: Isa, threads: usize) -> Result<(), Refusal> {
    let mut sizes = Sizes::default();
    sizes.bind("M K", &inputs.x)?;
    sizes.bind("N K", &inputs.weight)?;
    sizes.bind("M N", &inputs.out)?;
    let mut product = Product::of(Rows::of(&inputs.x)?, &inputs.weight)?;
    if let Some(bias) = &inputs.bias {
        sizes.bind("N", bias)?;
        product.bias = Some(numbers(bias, Dtype::F32)?);
    }
    let answers = Answers::of(&inputs.out)?;
    // SAFETY: the sizes are equal where they must be.
    unsafe { multiply_all(&[(product, answers)], sizes.of("M"), isa, threads) };
    Ok(())
}

/// Both products and what joins them, as `linear`.
pub fn gated(inputs: &Gated<'_>, isa: Isa, threads: usize) -> Result<(), Refusal> {
    let mut sizes = Sizes::default();
    sizes.bind("M K", &inputs.x)?;
    sizes.bind("N K", &inputs.gate)?;
    sizes.bind("N K", &inputs.up)?;
    sizes.bind("M N", &inputs.out)?;
    let x = Rows::of(&inputs.x)?;
    let gate = GatedProduct {
        gate: Product::of(x, &inputs.gate)?,
        up: Product::of(x, &inputs.up)?,
        activation: inputs.activation,
        answers: Answers::of(&inputs.out)?,
    };
    // SAFETY: the sizes are equal where they must be.
    unsafe { gate.multiply(sizes.of("M"), isa, threads) };
    Ok(())
}

/// Where the answers of a product go.
#[derive(Clone, Copy)]
pub(crate) struct Answers {
    pub(crate) to: *mut f32,
    /// From a row to the next.
    pub(crate) step: usize,
}

// SAFETY: every item writes the answers of its own block.
unsafe impl Sync for Answers {}

impl Answers {
    pub(crate) fn of(out: &Tensor<'_>) -> Result<Answers, Refusal> {
        check_dtype(out, Dtype::F32, "")?;
        if !out.is_contiguous() {
            return refuse(format!("{} has gaps between its numbers: must be contiguous", out.name));
        }
        Ok(Answers { to: out.data.cast(), step: out.shape[1] })
    }

    /// Where the answer of the block's first row and output goes.
    fn at(&self, block: Block) -> *mut f32 {
        self.to.wrapping_add(block.row * self.step + block.output)
    }
}

/// How the answers of a product are cut into blocks.
struct Cut {
    rows: usize,
    outputs: usize,
    tall: usize,
    wide: usize,
}

impl Cut {
    fn of(product: &Product<'_>, rows: usize, widest: usize) -> Cut {
        let wide = product.outputs.div_ceil(PARTS).next_multiple_of(PANEL).clamp(PANEL, widest);
        Cut { rows, outputs: product.outputs, tall: product.block_rows(), wide }
    }

    fn across(&self) -> usize {
        self.outputs.div_ceil(self.wide)
    }

    fn blocks(&self) -> usize {
        self.rows.div_ceil(self.tall) * self.across()
    }

    fn block(&self, number: usize) -> Block {
        let (row, output) = (number / self.across() * self.tall, number % self.across() * self.wide);
        Block { row, rows: self.tall.min(self.rows - row), output, outputs: self.wide.min(self.outputs - output) }
    }
}

fn worth(threads: usize, rows: usize, product: &Product<'_>) -> usize {
    if rows * product.outputs * product.depth < ALONE { 1 } else { threads }
}

/// Multiplies `rows` rows with several weights at once.
///
/// # Safety
/// The rows of x, the weights and the answers are there, and the answers do not overlap.
pub(crate) unsafe fn multiply_all<const P: usize>(
    products: &[(Product<'_>, Answers); P],
    rows: usize,
    isa: Isa,
    threads: usize,
) {
    let cuts: [Cut; P] = std::array::from_fn(|p| Cut::of(&products[p].0, rows, usize::MAX));
    let threads = products.iter().map(|(product, _)| worth(threads, rows, product)).max().unwrap_or(1);
    team::run(threads, cuts.iter().map(Cut::blocks).sum(), &|mut number| {
        let mut own = 0;
        while number >= cuts[own].blocks() {
            number -= cuts[own].blocks();
            own += 1;
        }
        let (product, answers) = &products[own];
        isa.run(LinearItem { product, answers, block: cuts[own].block(number) });
    });
}

/// Two products of the same rows, joined by a gate.
pub(crate) struct GatedProduct<'a> {
    pub(crate) gate: Product<'a>,
    pub(crate) up: Product<'a>,
    pub(crate) activation: Activation,
    pub(crate) answers: Answers,
}

impl GatedProduct<'_> {
    /// # Safety
    /// As `multiply_all`; both weights have as many outputs.
    pub(crate) unsafe fn multiply(&self, rows: usize, isa: Isa, threads: usize) {
        let cut = Cut::of(&self.gate, rows, GATED);
        team::run(worth(threads, rows, &self.gate), cut.blocks(), &|number| {
            with_scratch(|scratch| isa.run(GatedItem { product: self, block: cut.block(number), scratch }));
        });
    }
}

struct LinearItem<'a> {
    product: &'a Product<'a>,
    answers: &'a Answers,
    block: Block,
}

impl Job for LinearItem<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        // SAFETY: the product and the answers have the rows and outputs that blocks are cut from.
        unsafe { self.product.multiply(lanes, self.block, self.answers.at(self.block), self.answers.step) };
    }
}

struct GatedItem<'a> {
    product: &'a GatedProduct<'a>,
    block: Block,
    scratch: &'a mut Scratch,
}

impl Job for GatedItem<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let GatedItem { product: GatedProduct { gate, up, activation, answers }, block, scratch } = self;
        let wide = block.outputs.next_multiple_of(L::N);
        let ([gates, ups], _) = scratch.parts([block.rows * wide, block.rows * wide]);
        // SAFETY: as in `LinearItem`; the scratch has `wide` numbers for each row.
        unsafe {
            gate.multiply(lanes, block, gates.as_mut_ptr(), wide);
            up.multiply(lanes, block, ups.as_mut_ptr(), wide);
        }
        for row in 0..block.rows {
            let (gates, ups) = (&mut gates[row * wide..][..wide], &ups[row * wide..][..wide]);
            for first in (0..wide).step_by(L::N) {
                // SAFETY: `wide` is a multiple of the lanes.
                unsafe {
                    let own = activation.of(lanes, lanes.load(gates.as_ptr().add(first)));
                    let up = lanes.load(ups.as_ptr().add(first));
                    let both = if mutant::is(Mutant::GateAlone) { own } else { lanes.mul(own, up) };
                    lanes.store(gates.as_mut_ptr().add(first), both);
                }
            }
            // SAFETY: a row of the block's answers.
            unsafe {
                let to = answers.at(block).add(row * answers.step);
                std::ptr::copy_nonoverlapping(gates.as_ptr(), to, block.outputs);
            }
        }
    }
}
