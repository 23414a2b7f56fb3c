//! Rows times the rows of a weight [outputs, depth], which stays as torch keeps it.
//!
//! Before: `linear` has checked everything, laid the rows side by side and cut the work. Always: what comes out for a row and an output
//! depends on that row, that output's weights and nothing else, to the last bit: neither on the other rows nor on where tiles begin,
//! for every sum is taken in the order of the depth. So a request answers alone as it does in any batch.
//!
//! Weights are not packed: they are streamed once for each block of rows. A tile of one or two vectors of rows and a few outputs holds
//! its sums in registers over the whole depth, and each weight is one number for all lanes. Of few rows, which would leave lanes empty,
//! the outputs take the lanes, and the weights are turned on their way to the registers.

use std::hint::black_box;
use std::ops::Range;

use crate::input::Refusal;
use crate::lanes::{Lanes, MOST_LANES};
use crate::left::Left;
use crate::mutant::{self, Mutant};
use crate::strips::{FEW, Rows, Strip, Strips, load, store};
use crate::tensor::Tensor;
#[cfg(target_arch = "x86_64")]
use crate::tiles;

/// Numbers of a row that are added up by themselves: long sums of single numbers would lose digits.
const DEPTH: usize = 512;
/// Numbers of a cache line.
const LINE: usize = 16;
/// Numbers that few rows ask for ahead: more come too early, fewer too late (measured on Sapphire Rapids).
const AHEAD: usize = 6 * LINE;

/// A checked weight: one row of `rows.width` numbers for each output.
#[derive(Clone, Copy)]
pub(crate) struct Weight {
    pub(crate) rows: Rows,
    pub(crate) outputs: usize,
}

impl Weight {
    /// Refused as `Rows::of` does.
    pub(crate) fn of(tensor: &Tensor<'_>) -> Result<Weight, Refusal> {
        Ok(Weight { rows: Rows::of(tensor)?, outputs: tensor.shape[0] })
    }

    pub(crate) fn depth(&self) -> usize {
        self.rows.width
    }
}

/// What sums are added to.
#[derive(Clone, Copy)]
pub(crate) enum Start<'a> {
    Zero,
    /// [outputs].
    Bias(&'a [f32]),
    /// The same rows and outputs; may be where the answers go.
    Before(Strips),
}

/// Rows in strips, and a weight.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) x: Left,
    pub(crate) weight: Weight,
    pub(crate) start: Start<'a>,
}

// SAFETY: threads only read what it names, save what is before and each overwrites with its own answers; the caller of a call keeps the
// memory alive and leaves it alone (`Tensor::new`).
unsafe impl Sync for Product<'_> {}

impl Product<'_> {
    /// Writes the answers of some strips of `rows` rows and of some outputs, with `memory` of [`Product::room`] numbers.
    ///
    /// # Safety
    /// They are there, and `to` has room for them that nobody else uses.
    #[inline(always)]
    pub(crate) unsafe fn multiply<L: Lanes>(
        &self,
        lanes: L,
        rows: usize,
        strips: Range<usize>,
        outputs: Range<usize>,
        to: Strips,
        memory: &mut [f32],
    ) {
        #[cfg(target_arch = "x86_64")]
        if let Some(thirds) = self.x.thirds {
            // SAFETY: the caller's.
            unsafe { tiles::multiply(self, thirds, rows, strips, outputs, to, memory) };
            return;
        }
        let _ = memory;
        // SAFETY: the caller's.
        unsafe {
            if L::WIDE {
                self.multiply_by::<L, 12, 4>(lanes, rows, strips, outputs, to);
            } else {
                self.multiply_by::<L, 6, 2>(lanes, rows, strips, outputs, to);
            }
        }
    }

    /// Numbers of memory that an item needs beside that of its answers.
    pub(crate) fn room(&self) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.x.thirds.is_some() {
            return tiles::ROOM;
        }
        0
    }

    /// With tiles of `C` outputs, then of `D`, then of one. The weights of a tile stay in the first-level cache while all strips pass.
    // SAFETY: as `multiply`.
    #[inline(always)]
    unsafe fn multiply_by<L: Lanes, const C: usize, const D: usize>(
        &self,
        lanes: L,
        rows: usize,
        strips: Range<usize>,
        outputs: Range<usize>,
        to: Strips,
    ) {
        let few = Strip::of(strips.start, rows, L::N);
        if few.width < FEW {
            // SAFETY: the caller's.
            unsafe { self.few_rows(lanes, few, outputs, to) };
            return;
        }
        let mut output = outputs.start;
        while output < outputs.end {
            let left = outputs.end - output;
            let wide = [C, D, 1].into_iter().find(|&wide| wide <= left).unwrap_or(1);
            for number in strips.clone() {
                let strip = Strip::of(number, rows, L::N);
                let asks = Asks { strip: number - strips.start, strips: strips.len(), until: left - wide };
                let tile = Tile { product: self, strip, output, asks, to };
                // SAFETY: the caller's: these outputs and rows are there.
                unsafe {
                    if strip.width < FEW {
                        self.few_rows(lanes, strip, output..output + wide, to);
                    } else if wide == C {
                        tile.multiply_strip::<L, C>(lanes);
                    } else if wide == D {
                        tile.multiply_strip::<L, D>(lanes);
                    } else {
                        tile.multiply_strip::<L, 1>(lanes);
                    }
                }
            }
            output += wide;
        }
    }

    /// As `multiply`, for a strip with a lane for each row.
    // SAFETY: as `multiply`.
    #[inline(always)]
    unsafe fn few_rows<L: Lanes>(&self, lanes: L, strip: Strip, outputs: Range<usize>, to: Strips) {
        let mut output = outputs.start;
        while output < outputs.end {
            let some = L::N.min(outputs.end - output);
            // SAFETY: the caller's: these outputs and rows are there.
            unsafe {
                match strip.width {
                    1 => self.turned::<L, 1>(lanes, strip, output, some, to),
                    2 => self.turned::<L, 2>(lanes, strip, output, some, to),
                    3 => self.turned::<L, 3>(lanes, strip, output, some, to),
                    4 => self.turned::<L, 4>(lanes, strip, output, some, to),
                    5 => self.turned::<L, 5>(lanes, strip, output, some, to),
                    6 => self.turned::<L, 6>(lanes, strip, output, some, to),
                    _ => self.turned::<L, 7>(lanes, strip, output, some, to),
                }
            }
            output += some;
        }
    }

    /// `R` rows times `some` outputs from `output` on, at most a vector of them, which take the lanes.
    // SAFETY: as `multiply`.
    #[inline(always)]
    unsafe fn turned<L: Lanes, const R: usize>(&self, lanes: L, strip: Strip, output: usize, some: usize, to: Strips) {
        let (depth, step) = (self.weight.depth(), self.weight.rows.step);
        let (x, weight) = (self.x.strips.at(strip, 0), self.weight.rows.row(output));
        let mut totals = [lanes.splat(0.0); R];
        for (row, total) in totals.iter_mut().enumerate() {
            let mut start = [0.0; MOST_LANES];
            match self.start {
                Start::Zero => {}
                Start::Bias(_) if mutant::is(Mutant::BiasLeftOut) => {}
                Start::Bias(bias) => start[..some].copy_from_slice(&bias[output..output + some]),
                Start::Before(before) => {
                    for (at, start) in start.iter_mut().enumerate().take(some) {
                        // SAFETY: the caller's: the row and the output are there.
                        *start = unsafe { *before.at(strip, output + at).add(row) };
                    }
                }
            }
            // SAFETY: `start` has room for a vector.
            *total = unsafe { lanes.load(start.as_ptr()) };
        }
        for part in (0..depth).step_by(DEPTH) {
            let mut sums = [lanes.splat(0.0); R];
            let end = depth.min(part + DEPTH);
            for first in (part..end).step_by(L::N) {
                if first % LINE == 0 {
                    let ahead = first + AHEAD;
                    let (row, k) = if ahead < depth { (0, ahead) } else { (L::N, ahead - depth) };
                    for c in 0..some {
                        lanes.prefetch(weight.wrapping_add((c + row) * step + k).cast());
                    }
                }
                let near = L::N.min(end - first);
                if near < L::N && mutant::is(Mutant::DepthTailLeftOut) {
                    break;
                }
                // SAFETY: the caller's: `some` outputs with `near` weights from `first` on, and `R` rows with as many numbers.
                unsafe {
                    if near == L::N {
                        let right = lanes.columns(weight.add(first), step, some);
                        for (k, &right) in right.iter().enumerate().take(L::N) {
                            for (row, sum) in sums.iter_mut().enumerate() {
                                *sum = lanes.fma(lanes.splat(*x.add((first + k) * R + row)), right, *sum);
                            }
                        }
                        continue;
                    }
                    for k in first..end {
                        let mut right = [0.0; MOST_LANES];
                        for (c, right) in right.iter_mut().enumerate().take(some) {
                            *right = *weight.add(c * step + k);
                        }
                        let right = lanes.load(right.as_ptr());
                        for (row, sum) in sums.iter_mut().enumerate() {
                            *sum = lanes.fma(lanes.splat(*x.add(k * R + row)), right, *sum);
                        }
                    }
                }
            }
            for (total, sum) in totals.iter_mut().zip(sums) {
                *total = lanes.add(*total, sum);
            }
            if mutant::is(Mutant::DepthCut) {
                break;
            }
        }
        for (row, total) in totals.into_iter().enumerate() {
            let mut all = [0.0; MOST_LANES];
            // SAFETY: `all` has room for a vector; the caller's for the answers.
            unsafe {
                lanes.store(all.as_mut_ptr(), total);
                for (at, &answer) in all.iter().enumerate().take(some) {
                    *to.at(strip, output + at).add(row) = answer;
                }
            }
        }
    }
}

/// Which of the outputs that come next a tile asks memory for, a line at a time: all strips over the same weights share them, so that memory
/// is asked for evenly.
#[derive(Clone, Copy)]
struct Asks {
    strip: usize,
    strips: usize,
    /// Outputs that come.
    until: usize,
}

impl Asks {
    /// Of the next `wide` outputs.
    fn of(self, wide: usize) -> Range<usize> {
        let all = wide.min(self.until);
        all * self.strip / self.strips..all * (self.strip + 1) / self.strips
    }
}

/// One strip times some outputs.
struct Tile<'a> {
    product: &'a Product<'a>,
    strip: Strip,
    output: usize,
    asks: Asks,
    to: Strips,
}

impl Tile<'_> {
    // SAFETY: as `Product::multiply`.
    #[inline(always)]
    unsafe fn multiply_strip<L: Lanes, const C: usize>(&self, lanes: L) {
        // SAFETY: the caller's.
        unsafe {
            if self.strip.width == L::N {
                self.multiply::<L, 1, C>(lanes);
            } else {
                self.multiply::<L, 2, C>(lanes);
            }
        }
    }

    /// `V` vectors of rows times `C` outputs.
    // SAFETY: as `Product::multiply`.
    #[inline(always)]
    unsafe fn multiply<L: Lanes, const V: usize, const C: usize>(&self, lanes: L) {
        let Tile { product: Product { x, weight, start }, strip, output, asks, to } = *self;
        let (depth, step, width) = (weight.depth(), weight.rows.step, V * L::N);
        let mut totals = [[lanes.splat(0.0); V]; C];
        for (c, total) in totals.iter_mut().enumerate() {
            for (v, total) in total.iter_mut().enumerate() {
                *total = match start {
                    Start::Zero => lanes.splat(0.0),
                    Start::Bias(_) if mutant::is(Mutant::BiasLeftOut) => lanes.splat(0.0),
                    Start::Bias(bias) => lanes.splat(bias[output + c]),
                    // SAFETY: the caller's: the rows and the output are there.
                    Start::Before(before) => unsafe { lanes.load(before.at(strip, output + c).add(v * L::N)) },
                };
            }
        }
        let x = x.strips.at(strip, 0).cast_const();
        // Known to be a step apart each would be found from the one before, in a chain of additions: products with AVX2 would have
        // 0.8 to 0.9 of their speed (256 rows, one Zen 3 core).
        let weights: [*const f32; C] = black_box(std::array::from_fn(|c| weight.rows.row(output + c)));
        let next = weight.rows.row(output + C);
        let asked = asks.of(C);
        for part in (0..depth).step_by(DEPTH) {
            let mut sums = [[lanes.splat(0.0); V]; C];
            let end = depth.min(part + DEPTH);
            for line in (part..end).step_by(LINE) {
                let mut ahead = next.wrapping_add(asked.start * step + line);
                for (at, k) in (line..end.min(line + LINE)).enumerate() {
                    if at < asked.len() {
                        lanes.prefetch(ahead.cast());
                        ahead = ahead.wrapping_add(step);
                    }
                    // SAFETY: the caller's: numbers of rows and weights that are there.
                    unsafe {
                        let left: [L::V; V] = std::array::from_fn(|v| lanes.load(x.add(k * width + v * L::N)));
                        for c in 0..C {
                            let right = lanes.splat(*weights[c].add(k));
                            for v in 0..V {
                                sums[c][v] = lanes.fma(left[v], right, sums[c][v]);
                            }
                        }
                    }
                }
            }
            for (total, sum) in totals.iter_mut().zip(sums) {
                for (total, sum) in total.iter_mut().zip(sum) {
                    *total = lanes.add(*total, sum);
                }
            }
            if mutant::is(Mutant::DepthCut) {
                break;
            }
        }
        for (c, total) in totals.into_iter().enumerate() {
            for (v, total) in total.into_iter().enumerate() {
                // SAFETY: the caller's.
                unsafe { lanes.store(to.at(strip, output + c).add(v * L::N), total) };
            }
        }
    }
}

/// Rows over the root of the mean of their squares, times a weight for each number: a root mean square norm. `to` may be `from`.
///
/// # Safety
/// The strip is there in both, and nobody else uses it in `to`; they have as many numbers as the weight.
#[inline(always)]
pub(crate) unsafe fn norm<L: Lanes>(lanes: L, strip: Strip, from: Strips, to: Strips, weight: &[f32], eps: f32) {
    const CHAINS: usize = 4;
    let (from, to, width) = (from.at(strip, 0), to.at(strip, 0), strip.width);
    for lane in (0..width).step_by(L::N) {
        let count = L::N.min(width - lane);
        let mut chains = [lanes.splat(0.0); CHAINS];
        for k in 0..weight.len() {
            // SAFETY: the caller's; so for what follows.
            let x = unsafe { load(lanes, from.add(k * width + lane), count) };
            chains[k % CHAINS] = lanes.fma(x, x, chains[k % CHAINS]);
        }
        let squares = lanes.add(lanes.add(chains[0], chains[1]), lanes.add(chains[2], chains[3]));
        let mut shares = [0.0; MOST_LANES];
        // SAFETY: `shares` has room for a vector.
        unsafe { lanes.store(shares.as_mut_ptr(), squares) };
        let eps = if mutant::is(Mutant::NoEps) { 0.0 } else { eps };
        for share in &mut shares {
            *share = 1.0 / (*share / weight.len() as f32 + eps).sqrt();
        }
        // SAFETY: as above.
        let share = unsafe { lanes.load(shares.as_ptr()) };
        for (k, &weight) in weight.iter().enumerate() {
            // SAFETY: the caller's.
            unsafe {
                let x = lanes.mul(load(lanes, from.add(k * width + lane), count), share);
                store(lanes, to.add(k * width + lane), lanes.mul(lanes.splat(weight), x), count);
            }
        }
    }
}
