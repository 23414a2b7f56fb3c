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
const DEPTH: usize = 1536;
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

    /// With tiles of `C` outputs.
    // SAFETY: as `multiply`.
    #[inline(always)]
    unsafe fn multiply_by<L: Lanes, const C: usize>(&self, lanes: L, block: Block, to: *mut f32, to_step: usize) {
        let (_, chunk) = self.chunks();
        for column in (0..block.outputs).step_by(PANEL) {
            let outputs = PANEL.min(block.outputs - column);
            let output = block.output + column;
            let mut panel = Panel {
                x: self.x.wrapping_add(block.row * self.x_step),
                x_step: self.x_step,
                weight: self.weight.wrapping_add(output * self.weight_step),
                weight_step: self.weight_step,
                depth: chunk.min(self.depth),
                start: match self.bias {
                    _ if self.adds => Start::Before,
                    Some(bias) => Start::Bias(&bias[output..]),
                    None => Start::Zero,
                },
                to: to.wrapping_add(column),
                to_step,
                ahead: outputs * self.weight_step,
            };
            let mut first = 0;
            loop {
                // SAFETY: these outputs and rows are inside the block, and this part inside the depth.
                unsafe { panel.multiply::<L, C>(lanes, block.rows, outputs) };
                first += chunk;
                if first >= self.depth || mutant::is(Mutant::DepthCut) {
                    break;
                }
                panel.x = panel.x.wrapping_add(chunk);
                panel.weight = panel.weight.wrapping_add(chunk);
                panel.depth = chunk.min(self.depth - first);
                panel.start = Start::Before;
            }
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

/// All rows of a block times a panel of outputs, over one part of the depth.
struct Panel<'a> {
    x: *const f32,
    x_step: usize,
    weight: *const f32,
    weight_step: usize,
    depth: usize,
    start: Start<'a>,
    to: *mut f32,
    to_step: usize,
    /// Numbers from a weight to the one that is at its place in the next panel.
    ahead: usize,
}

impl Panel<'_> {
    // SAFETY: the caller's: `rows` rows and `outputs` outputs are there to read and to write.
    #[inline(always)]
    unsafe fn multiply<L: Lanes, const C: usize>(&self, lanes: L, rows: usize, outputs: usize) {
        for row in (0..rows).step_by(ROWS) {
            let near = ROWS.min(rows - row);
            let mut column = 0;
            while column < outputs {
                // SAFETY: the caller's.
                unsafe {
                    if column + C <= outputs {
                        self.few_rows::<L, C>(lanes, row, near, column);
                        column += C;
                    } else {
                        self.few_rows::<L, 1>(lanes, row, near, column);
                        column += 1;
                    }
                }
            }
        }
    }

    /// `rows` rows from `row` on, a tile's at most, times `C` outputs from `column` on. The first tile over some weights asks for those of
    /// the next panel, which come from memory, a line for each that it uses: asked for at once they would wait for each other.
    // SAFETY: as `multiply`.
    #[inline(always)]
    unsafe fn few_rows<L: Lanes, const C: usize>(&self, lanes: L, row: usize, rows: usize, column: usize) {
        // SAFETY: the caller's.
        unsafe {
            match (rows, row) {
                (1, 0) => self.tile::<L, 1, C, true>(lanes, 0, column),
                (2, 0) => self.tile::<L, 2, C, true>(lanes, 0, column),
                (3, 0) => self.tile::<L, 3, C, true>(lanes, 0, column),
                (_, 0) => self.tile::<L, ROWS, C, true>(lanes, 0, column),
                (1, row) => self.tile::<L, 1, C, false>(lanes, row, column),
                (2, row) => self.tile::<L, 2, C, false>(lanes, row, column),
                (3, row) => self.tile::<L, 3, C, false>(lanes, row, column),
                (_, row) => self.tile::<L, ROWS, C, false>(lanes, row, column),
            }
        }
    }

    /// `R` rows from `row` on times `C` outputs from `column` on.
    // SAFETY: as `multiply`.
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const C: usize, const AHEAD: bool>(
        &self,
        lanes: L,
        row: usize,
        column: usize,
    ) {
        let mut sums = [[lanes.splat(0.0); C]; R];
        let x: [*const f32; R] = std::array::from_fn(|r| self.x.wrapping_add((row + r) * self.x_step));
        let weight: [*const f32; C] =
            std::array::from_fn(|c| self.weight.wrapping_add((column + c) * self.weight_step));
        let whole = self.depth / L::N * L::N;
        let mut k = 0;
        while k < whole {
            if AHEAD && (k * size_of::<f32>()).is_multiple_of(LINE) {
                for c in 0..C {
                    lanes.prefetch(weight[c].wrapping_add(k + self.ahead).cast());
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
                    let to = self.to.add((row + r) * self.to_step + column + c);
                    let before = match self.start {
                        Start::Zero => 0.0,
                        Start::Bias(bias) => bias[column + c],
                        Start::Before => *to,
                    };
                    *to = before + sum;
                }
            }
        }
    }
}
