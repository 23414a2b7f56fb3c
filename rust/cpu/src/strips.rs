//! Rows of numbers side by side: what lies in the lanes of one vector is the same number of neighbouring rows.
//!
//! Before: rows as torch keeps them, one behind the other. After: `product`, which reads a vector of rows and one weight at a time, so
//! that nothing has to be added up across lanes. Always: a row shares its vectors with others and nothing else.

use crate::input::{Refusal, check_dtype, check_rows};
use crate::lanes::{Lanes, MOST_LANES};
use crate::linear::Answers;
use crate::mutant::{self, Mutant};
use crate::tensor::{Dtype, Tensor};

/// Rows below which a strip has no more lanes than rows.
pub(crate) const FEW: usize = 8;

/// Rows of float32 numbers: row r begins at `at + r * step`.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) at: *const f32,
    pub(crate) step: usize,
    /// Numbers of a row.
    pub(crate) width: usize,
}

// SAFETY: threads only read what it names; the caller of a call keeps the memory alive and leaves it alone (`Tensor::new`).
unsafe impl Sync for Rows {}

impl Rows {
    /// The rows of a matrix, refused if it is not one of float32 without gaps in its rows.
    pub(crate) fn of(tensor: &Tensor<'_>) -> Result<Rows, Refusal> {
        check_dtype(tensor, Dtype::F32, "")?;
        check_rows(tensor)?;
        Ok(Rows { at: tensor.data.cast_const().cast(), step: tensor.strides[0], width: tensor.shape[1] })
    }

    pub(crate) fn row(&self, row: usize) -> *const f32 {
        self.at.wrapping_add(row * self.step)
    }

    /// Those from `row` on.
    pub(crate) fn from(self, row: usize) -> Rows {
        Rows { at: self.row(row), ..self }
    }
}

/// Neighbouring rows that lie side by side.
#[derive(Clone, Copy)]
pub(crate) struct Strip {
    pub(crate) first: usize,
    pub(crate) rows: usize,
    /// Lanes of a number: one or two vectors, of which the last lanes may belong to no row; or one for each of few rows.
    pub(crate) width: usize,
}

impl Strip {
    /// Of `rows` rows the strip `number`, for vectors of `lanes`.
    pub(crate) fn of(number: usize, rows: usize, lanes: usize) -> Strip {
        let first = number * most(lanes);
        let rows = (rows - first).min(most(lanes));
        let width = if rows > lanes {
            2 * lanes
        } else if rows < FEW {
            rows
        } else {
            lanes
        };
        Strip { first, rows, width }
    }

    pub(crate) fn count(rows: usize, lanes: usize) -> usize {
        rows.div_ceil(most(lanes))
    }
}

/// Rows of a strip at most.
pub(crate) const fn most(lanes: usize) -> usize {
    2 * lanes
}

/// Memory of strips: number k of a strip's row r lies at `k * width + r` from where the strip begins.
#[derive(Clone, Copy)]
pub(crate) struct Strips {
    at: *mut f32,
    /// Of a row.
    numbers: usize,
    /// The first row and number that are there.
    row: usize,
    number: usize,
}

// SAFETY: every item writes rows and numbers of its own.
unsafe impl Sync for Strips {}

impl Strips {
    /// Of rows of `numbers` numbers, the whole of them.
    pub(crate) fn whole(at: *mut f32, numbers: usize) -> Strips {
        Strips { at, numbers, row: 0, number: 0 }
    }

    /// Of rows from `row` on the `numbers` numbers from `number` on.
    pub(crate) fn part(at: *mut f32, numbers: usize, row: usize, number: usize) -> Strips {
        Strips { at, numbers, row, number }
    }

    /// Numbers of memory that `rows` rows of `numbers` numbers take at most.
    pub(crate) fn room(rows: usize, numbers: usize, lanes: usize) -> usize {
        rows.next_multiple_of(most(lanes)) * numbers
    }

    /// Where the lanes of a number begin.
    pub(crate) fn at(&self, strip: Strip, number: usize) -> *mut f32 {
        self.at.wrapping_add((strip.first - self.row) * self.numbers + (number - self.number) * strip.width)
    }

    /// Writes the rows of a strip. Lanes behind them get those of its last row.
    ///
    /// # Safety
    /// The strip's rows are there to read, and there is room for them that nobody else uses.
    #[inline(always)]
    pub(crate) unsafe fn pack<L: Lanes>(&self, lanes: L, strip: Strip, from: Rows) {
        let Strip { first, rows, width } = strip;
        let whole = if width < L::N { 0 } else { from.width / L::N * L::N };
        let to = self.at(strip, 0);
        for lane in (0..width).step_by(L::N) {
            let row = first + lane;
            let near = if mutant::is(Mutant::FirstRowInAllLanes) { 1 } else { (rows - lane).min(L::N) };
            for k in (0..whole).step_by(L::N) {
                // SAFETY: the caller's: `near` rows of `L::N` numbers, and `L::N` lanes of as many.
                unsafe { lanes.transpose(from.row(row).add(k), from.step, near, to.add(k * width + lane), width) };
            }
        }
        for k in whole..from.width {
            for lane in 0..width {
                // SAFETY: as above.
                unsafe { *to.add(k * width + lane) = *from.row(first + lane.min(rows - 1)).add(k) };
            }
        }
    }

    /// Writes a strip's `numbers` numbers from `number` on as rows: that of its first row goes to `to`, row by row `step` on.
    ///
    /// # Safety
    /// They are there, and `to` has room that nobody else uses.
    #[inline(always)]
    pub(crate) unsafe fn unpack<L: Lanes>(&self, lanes: L, strip: Strip, number: usize, numbers: usize, to: Answers) {
        let (from, width) = (self.at(strip, number), strip.width);
        let (down, across) = (strip.rows / L::N * L::N, numbers / L::N * L::N);
        for row in (0..down).step_by(L::N) {
            for k in (0..across).step_by(L::N) {
                // SAFETY: the caller's: `L::N` numbers of as many rows.
                unsafe {
                    let at = to.to.add(row * to.step + k);
                    lanes.transpose(from.add(k * width + row), width, L::N, at, to.step);
                }
            }
        }
        for row in 0..strip.rows {
            for k in if row < down { across } else { 0 }..numbers {
                // SAFETY: as above.
                unsafe { *to.to.add(row * to.step + k) = *from.add(k * width + row) };
            }
        }
    }
}

/// `count` lanes, `L::N` at most.
///
/// # Safety
/// They are there.
#[inline(always)]
pub(crate) unsafe fn load<L: Lanes>(lanes: L, from: *const f32, count: usize) -> L::V {
    // SAFETY: the caller's.
    unsafe { if count == L::N { lanes.load(from) } else { lanes.load_part(from, count) } }
}

/// As `load`.
///
/// # Safety
/// There is room for them.
#[inline(always)]
pub(crate) unsafe fn store<L: Lanes>(lanes: L, to: *mut f32, v: L::V, count: usize) {
    if count == L::N {
        // SAFETY: the caller's.
        unsafe { lanes.store(to, v) };
        return;
    }
    let mut all = [0.0; MOST_LANES];
    // SAFETY: `all` has room for a vector, `to` for `count` numbers.
    unsafe {
        lanes.store(all.as_mut_ptr(), v);
        std::ptr::copy_nonoverlapping(all.as_ptr(), to, count);
    }
}
