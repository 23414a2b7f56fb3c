//! What a decoder layer does before its attention and after it, each in one call: norms, products, rotary positions, residuals.
//!
//! Before: the layer's input. After: stores and attention, then the next layer. Always: as in `product`, what comes out for a row
//! depends on no other row. Rows go through a half in blocks, so that what lies between its steps stays in the caches.

use crate::input::{Refusal, Sizes, check_dtype, numbers, refuse};
use crate::isa::{Isa, Job};
use crate::lanes::Lanes;
use crate::linear::{Activation, Answers, GatedProduct, multiply_all};
use crate::mutant::{self, Mutant};
use crate::product::{Product, Rows};
use crate::scratch::with_call_memory;
use crate::team;
use crate::tensor::{Dtype, Tensor};

/// Rows that go through a half together.
const ROWS: usize = 256;
/// Rows of an item of the steps without products.
const ITEM: usize = 16;
/// Numbers below which a second thread costs more than it gives there.
const ALONE: usize = 1 << 15;

/// A root mean square norm: x / sqrt(mean(x^2) + eps) * weight.
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
        return refuse(format!("cos has D={width} in dimension 1: must be even and divide Nq={queries} and Nk={keys}"));
    }
    let mut biases = [None; 3];
    if let Some(tensors) = &inputs.biases {
        for (at, tensor) in tensors.iter().enumerate() {
            sizes.bind(letters[at], tensor)?;
            biases[at] = Some(numbers::<f32>(tensor, Dtype::F32)?);
        }
    }
    let out = Answers::of(&inputs.out)?;
    let mut products = Vec::with_capacity(3);
    for weight in &inputs.weights {
        products.push(Product::of(hidden, weight)?);
    }
    let firsts = [0, outputs[0], outputs[0] + outputs[1]];
    let rows = sizes.of("M");
    with_call_memory(ROWS.min(rows) * hidden.width, |normed| {
        for row in (0..rows).step_by(ROWS) {
            let block = ROWS.min(rows - row);
            let x = Normed { from: rows_from(hidden, row), norm, to: normed.as_mut_ptr() };
            // SAFETY: `block` rows of hidden are there, and memory for as many.
            unsafe { x.all(block, isa, threads) };
            let own: [(Product<'_>, Answers); 3] = std::array::from_fn(|at| {
                let product = Product { x: x.to, x_step: hidden.width, bias: biases[at], ..products[at] };
                (product, Answers { to: out.to.wrapping_add(row * out.step + firsts[at]), step: out.step })
            });
            // SAFETY: every size was checked; the products' answers lie beside each other.
            unsafe { multiply_all(&own, block, isa, threads) };
            let turned = Turned {
                to: Answers { to: out.to.wrapping_add(row * out.step), step: out.step },
                cos: rows_from(cos, row),
                sin: rows_from(sin, row),
                heads: firsts[2] / width,
            };
            // SAFETY: as above; the answers' first numbers are those of the query and key heads.
            unsafe { turned.all(block, isa, threads) };
        }
    });
    Ok(())
}

/// As `before_attention`.
pub fn after_attention(inputs: &AfterAttention<'_>, isa: Isa, threads: usize) -> Result<(), Refusal> {
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
    let project = Product::of(attended, &inputs.project)?;
    let (gate, up) = (Product::of(hidden, &inputs.gate)?, Product::of(hidden, &inputs.up)?);
    let down = Product::of(hidden, &inputs.down)?;
    let out = Answers::of(&inputs.out)?;
    let (rows, width, between) = (sizes.of("M"), sizes.of("K"), sizes.of("N"));
    let most = ROWS.min(rows);
    with_call_memory(most * (width + between), |memory| {
        let (normed, gated) = memory.split_at_mut(most * width);
        for row in (0..rows).step_by(ROWS) {
            let block = ROWS.min(rows - row);
            let own = Answers { to: out.to.wrapping_add(row * out.step), step: out.step };
            let residual = rows_from(hidden, row);
            for at in 0..block {
                // SAFETY: rows of hidden and of out, which is other memory.
                unsafe {
                    let (from, to) = (residual.at.add(at * residual.step), own.to.add(at * own.step));
                    std::ptr::copy_nonoverlapping(from, to, width);
                }
            }
            let project =
                Product { x: attended.at.wrapping_add(row * attended.step), adds: !is_without_residual(), ..project };
            // SAFETY: every size was checked; so for the calls below.
            unsafe { multiply_all(&[(project, own)], block, isa, threads) };
            let sums = Rows { at: own.to.cast_const(), step: own.step, width };
            let x = Normed { from: sums, norm, to: normed.as_mut_ptr() };
            let (x_at, x_step) = (x.to.cast_const(), width);
            let gate = GatedProduct {
                gate: Product { x: x_at, x_step, ..gate },
                up: Product { x: x_at, x_step, ..up },
                activation: inputs.activation,
                answers: Answers { to: gated.as_mut_ptr(), step: between },
            };
            let down = Product { x: gate.answers.to, x_step: between, adds: true, ..down };
            // SAFETY: as above.
            unsafe {
                x.all(block, isa, threads);
                gate.multiply(block, isa, threads);
                multiply_all(&[(down, own)], block, isa, threads);
            }
        }
    });
    Ok(())
}

fn is_without_residual() -> bool {
    mutant::is(Mutant::NoResidual)
}

fn checked_norm<'a>(norm: &Norm<'a>, sizes: &mut Sizes) -> Result<(&'a [f32], f32), Refusal> {
    check_dtype(&norm.weight, Dtype::F32, "")?;
    sizes.bind("K", &norm.weight)?;
    if !(norm.eps > 0.0 && norm.eps.is_finite()) {
        return refuse(format!("eps={}: must be a finite number above 0", norm.eps));
    }
    Ok((numbers(&norm.weight, Dtype::F32)?, norm.eps))
}

fn rows_from(rows: Rows, row: usize) -> Rows {
    Rows { at: rows.at.wrapping_add(row * rows.step), ..rows }
}

/// Rows on their way through a norm, to memory without gaps.
struct Normed<'a> {
    from: Rows,
    norm: (&'a [f32], f32),
    to: *mut f32,
}

// SAFETY: every item writes its own rows.
unsafe impl Sync for Normed<'_> {}

impl Normed<'_> {
    // SAFETY: the caller's: `rows` rows are there to read and to write.
    unsafe fn all(&self, rows: usize, isa: Isa, threads: usize) {
        let threads = if rows * self.from.width < ALONE { 1 } else { threads };
        team::run(threads, rows.div_ceil(ITEM), &|item| {
            isa.run(NormedItem { whole: self, first: item * ITEM, rows: ITEM.min(rows - item * ITEM) });
        });
    }
}

struct NormedItem<'a> {
    whole: &'a Normed<'a>,
    first: usize,
    rows: usize,
}

impl Job for NormedItem<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Normed { from, norm: (weight, eps), to } = self.whole;
        let width = from.width;
        let whole = width / L::N * L::N;
        for row in self.first..self.first + self.rows {
            let (from, to) = (from.at.wrapping_add(row * from.step), to.wrapping_add(row * width));
            let mut squares = lanes.splat(0.0);
            for k in (0..whole).step_by(L::N) {
                // SAFETY: `L::N` numbers of a row that is there.
                let x = unsafe { lanes.load(from.add(k)) };
                squares = lanes.fma(x, x, squares);
            }
            let mut sum = lanes.sum(squares);
            for k in whole..width {
                // SAFETY: as above.
                let x = unsafe { *from.add(k) };
                sum += x * x;
            }
            let eps = if mutant::is(Mutant::NoEps) { 0.0 } else { *eps };
            let share = 1.0 / (sum / width as f32 + eps).sqrt();
            for k in (0..whole).step_by(L::N) {
                // SAFETY: as above; the weight has as many numbers.
                unsafe {
                    let x = lanes.mul(lanes.load(from.add(k)), lanes.splat(share));
                    lanes.store(to.add(k), lanes.mul(lanes.load(weight.as_ptr().add(k)), x));
                }
            }
            for k in whole..width {
                // SAFETY: as above.
                unsafe { *to.add(k) = weight[k] * (*from.add(k) * share) };
            }
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
        let threads = if rows * self.heads * self.cos.width < ALONE { 1 } else { threads };
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
