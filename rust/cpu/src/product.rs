//! x [rows, depth] times the rows of a weight [outputs, depth], both as torch keeps them: dot products of rows with rows.
//!
//! Before: `linear` has checked everything and cut the work. Always: what comes out for a row and an output depends on that row, that
//! output's weights and nothing else, to the last bit: neither on the other rows nor on where tiles begin. So a request answers alone
//! as it does in any batch.
//!
//! Nothing is packed: weights stay as they are loaded and are streamed once for each block of rows, which stays in the second-level
//! cache; a tile of a few rows and a few outputs holds its sums in registers over the whole depth.

use crate::input::{Refusal, check_dtype, check_rows};
use crate::lanes::Lanes;
use crate::mutant::{self, Mutant};
use crate::tensor::{Dtype, Tensor};

/// Rows of a tile.
const ROWS: usize = 4;
/// Numbers of a row that a tile goes over at a time, at most: as many as keep its rows in the first-level cache.
const DEPTH: usize = 768;
/// Outputs of a panel: its weights and the block of rows stay in the second-level cache.
pub(crate) const PANEL: usize = 24;
/// Bytes of a block of rows.
const ROW_BYTES: usize = 200 << 10;
const LINE: usize = 64;

/// Rows of float32 numbers: row r begins at `at + r * step`.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) at: *const f32,
    pub(crate) step: usize,
    /// Numbers of a row.
    pub(crate) width: usize,
}

impl Rows {
    /// The rows of a matrix, refused if it is not one of float32 without gaps in its rows.
    pub(crate) fn of(tensor: &Tensor<'_>) -> Result<Rows, Refusal> {
        check_dtype(tensor, Dtype::F32, "")?;
        check_rows(tensor)?;
        Ok(Rows { at: tensor.data.cast_const().cast(), step: tensor.strides[0], width: tensor.shape[1] })
    }
}

/// One checked product. Row r of x begins at `x + r * x_step`, output n's weights at `weight + n * weight_step`.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) x: *const f32,
    pub(crate) x_step: usize,
    pub(crate) weight: *const f32,
    pub(crate) weight_step: usize,
    pub(crate) depth: usize,
    pub(crate) outputs: usize,
    /// [outputs].
    pub(crate) bias: Option<&'a [f32]>,
    /// The answers are added to what is there.
    pub(crate) adds: bool,
}

// SAFETY: threads only read what it names; the caller of a call keeps the memory alive and leaves it alone (`Tensor::new`).
unsafe impl Sync for Product<'_> {}

/// Some rows and outputs of a product.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) row: usize,
    pub(crate) rows: usize,
    pub(crate) output: usize,
    pub(crate) outputs: usize,
}

impl<'a> Product<'a> {
    /// x times the rows of `weight`, which is refused as `Rows::of` does.
    pub(crate) fn of(x: Rows, weight: &Tensor<'a>) -> Result<Product<'a>, Refusal> {
        let Rows { at, step, width } = Rows::of(weight)?;
        let (weight, weight_step, outputs) = (at, step, weight.shape[0]);
        Ok(Product { x: x.at, x_step: x.step, weight, weight_step, depth: width, outputs, bias: None, adds: false })
    }

    /// Parts of about equal size that the depth is cut into, and the size of all but the last.
    fn chunks(&self) -> (usize, usize) {
        let parts = self.depth.div_ceil(DEPTH).max(1);
        (parts, self.depth.div_ceil(parts).next_multiple_of(LINE / size_of::<f32>()))
    }

    /// Rows of a block: as many as stay in the second-level cache.
    pub(crate) fn block_rows(&self) -> usize {
        (ROW_BYTES / (self.depth * size_of::<f32>()).max(1)).clamp(ROWS, 256) / ROWS * ROWS
    }

    /// Writes a block of answers: that of its first row and output to `to`, the next output's behind it, the next row's `to_step` on.
    ///
    /// # Safety
    /// The block lies inside the product, and its answers inside memory that nobody else uses.
    #[inline(always)]
    pub(crate) unsafe fn multiply<L: Lanes>(&self, lanes: L, block: Block, to: *mut f32, to_step: usize) {
        // SAFETY: the caller's.
        unsafe {
            if L::WIDE {
                self.multiply_by::<L, 6>(lanes, block, to, to_step);
            } else {
                self.multiply_by::<L, 3>(lanes, block, to, to_step);
            }
        }
    }

    /// With tiles of `C` outputs, whose weights stay in the first-level cache while all rows of the block pass.
    // SAFETY: as `multiply`.
    #[inline(always)]
    unsafe fn multiply_by<L: Lanes, const C: usize>(&self, lanes: L, block: Block, to: *mut f32, to_step: usize) {
        let (_, chunk) = self.chunks();
        let mut column = 0;
        while column < block.outputs {
            let wide = if column + C <= block.outputs { C } else { 1 };
            let output = block.output + column;
            let next = wide * self.weight_step;
            let mut first = 0;
            loop {
                let depth = chunk.min(self.depth - first);
                let is_last = first + depth >= self.depth || mutant::is(Mutant::DepthCut);
                let part = Part {
                    x: self.x.wrapping_add(block.row * self.x_step + first),
                    x_step: self.x_step,
                    weight: self.weight.wrapping_add(output * self.weight_step + first),
                    weight_step: self.weight_step,
                    depth,
                    start: match self.bias {
                        _ if self.adds || first > 0 => Start::Before,
                        Some(bias) => Start::Bias(&bias[output..]),
                        None => Start::Zero,
                    },
                    to: to.wrapping_add(column),
                    to_step,
                    ahead: if is_last { next.wrapping_sub(first) } else { depth },
                };
                // SAFETY: these outputs and rows are inside the block, and this part inside the depth.
                unsafe {
                    if wide == C {
                        part.multiply::<L, C>(lanes, block.rows);
                    } else {
                        part.multiply::<L, 1>(lanes, block.rows);
                    }
                }
                if is_last {
                    break;
                }
                first += depth;
            }
            column += wide;
        }
    }
}

/// What the sums of a tile are added to.
#[derive(Clone, Copy)]
enum Start<'a> {
    Zero,
    Bias(&'a [f32]),
    /// What is there: written for an earlier part of the depth, or by the caller.
    Before,
}

/// Which of the outputs that come next a tile asks for, a line at each of its steps: all tiles over the same weights share them, so that
/// memory is asked for evenly.
#[derive(Clone, Copy)]
struct Asks {
    first: usize,
    step: usize,
}

/// All rows of a block times a tile's outputs, over one part of the depth.
struct Part<'a> {
    x: *const f32,
    x_step: usize,
    weight: *const f32,
    weight_step: usize,
    depth: usize,
    start: Start<'a>,
    to: *mut f32,
    to_step: usize,
    /// Numbers from a weight to the one that is at its place in the part that comes next.
    ahead: usize,
}

impl Part<'_> {
    // SAFETY: the caller's: `rows` rows and `C` outputs are there to read and to write.
    #[inline(always)]
    unsafe fn multiply<L: Lanes, const C: usize>(&self, lanes: L, rows: usize) {
        let tiles = rows.div_ceil(ROWS);
        for tile in 0..tiles {
            let row = tile * ROWS;
            let asks = Asks { first: tile, step: tiles };
            // SAFETY: the caller's.
            unsafe {
                match rows - row {
                    1 => self.tile::<L, 1, C>(lanes, row, asks),
                    2 => self.tile::<L, 2, C>(lanes, row, asks),
                    3 => self.tile::<L, 3, C>(lanes, row, asks),
                    _ => self.tile::<L, ROWS, C>(lanes, row, asks),
                }
            }
        }
    }

    /// `R` rows from `row` on times `C` outputs, asking for its share of the weights that come next.
    // SAFETY: as `multiply`.
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const C: usize>(&self, lanes: L, row: usize, asks: Asks) {
        let mut sums = [[lanes.splat(0.0); C]; R];
        let x: [*const f32; R] = std::array::from_fn(|r| self.x.wrapping_add((row + r) * self.x_step));
        let weight: [*const f32; C] =
            std::array::from_fn(|c| self.weight.wrapping_add(c * self.weight_step));
        let whole = self.depth / L::N * L::N;
        let mut k = 0;
        while k < whole {
            if (k * size_of::<f32>()).is_multiple_of(LINE) {
                for c in (asks.first..C).step_by(asks.step) {
                    lanes.prefetch(self.weight.wrapping_add(c * self.weight_step + k).wrapping_add(self.ahead).cast());
                }
            }
            // SAFETY: `L::N` numbers of rows that are there.
            unsafe {
                let right: [L::V; C] = std::array::from_fn(|c| lanes.load(weight[c].add(k)));
                for r in 0..R {
                    let left = lanes.load(x[r].add(k));
                    for c in 0..C {
                        sums[r][c] = lanes.fma(left, right[c], sums[r][c]);
                    }
                }
            }
            k += L::N;
        }
        let rest = self.depth - whole;
        if rest > 0 && !mutant::is(Mutant::DepthTailLeftOut) {
            // SAFETY: `rest` numbers of rows that are there.
            unsafe {
                let right: [L::V; C] = std::array::from_fn(|c| lanes.load_part(weight[c].add(k), rest));
                for r in 0..R {
                    let left = lanes.load_part(x[r].add(k), rest);
                    for c in 0..C {
                        sums[r][c] = lanes.fma(left, right[c], sums[r][c]);
                    }
                }
            }
        }
        // Four sums at a time, each added up in the same order wherever it stands.
        for first in (0..R * C).step_by(4) {
            let of = |sum: usize| (sum / C, sum % C);
            let four = lanes.sum4(std::array::from_fn(|i| {
                let (r, c) = of(first + i);
                if r < R { sums[r][c] } else { lanes.splat(0.0) }
            }));
            for (i, sum) in four.iter().enumerate().take(R * C - first) {
                let (r, c) = of(first + i);
                // SAFETY: an answer of this block.
                unsafe {
                    let to = self.to.add((row + r) * self.to_step + c);
                    let before = match self.start {
                        Start::Zero => 0.0,
                        Start::Bias(bias) => bias[c],
                        Start::Before => *to,
                    };
                    *to = before + sum;
                }
            }
        }
    }
}
