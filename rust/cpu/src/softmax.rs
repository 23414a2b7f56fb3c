//! Scores to weights, tile by tile: the running maximum and sum of one row.

use crate::lanes::Lanes;
use crate::mutant::{self, Mutant};

/// What one row of scores has come to so far.
#[derive(Clone, Copy)]
pub(crate) struct Running {
    pub(crate) max: f32,
    pub(crate) sum: f32,
}

impl Running {
    pub(crate) const NONE: Running = Running { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// Turns the scores `row` [width] into weights, in place; those outside of `low..high` get weight 0. Returns what earlier sums must
/// be multiplied with.
///
/// # Safety
/// `row` has `width` numbers, a multiple of `L::N`.
#[inline(always)]
pub(crate) unsafe fn weigh_scores<L: Lanes>(
    lanes: L,
    row: *mut f32,
    width: usize,
    low: usize,
    high: usize,
    softcap: f32,
    running: &mut Running,
) -> f32 {
    let mut top = lanes.splat(f32::NEG_INFINITY);
    let high = if mutant::is(Mutant::TileTailSeen) { width } else { high };
    let all = low == 0 && high == width;
    let mut column = 0;
    while column < width {
        // SAFETY: `width` is a multiple of the lanes.
        let mut v = unsafe { lanes.load(row.add(column)) };
        if softcap > 0.0 {
            v = lanes.tanh(lanes.div(v, lanes.splat(softcap)));
            v = lanes.mul(v, lanes.splat(if mutant::is(Mutant::CapNotMultiplied) { 1.0 } else { softcap }));
        }
        if !all {
            v = lanes.where_within(v, column as i32, low as i32, high as i32, f32::NEG_INFINITY);
        }
        // SAFETY: as above.
        unsafe { lanes.store(row.add(column), v) };
        top = lanes.max(top, v);
        column += L::N;
    }
    let max = running.max.max(lanes.largest(top));
    // Where nothing is seen yet there is nothing to subtract: -inf - -inf is no number.
    let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
    let mut total = lanes.splat(0.0);
    column = 0;
    while column < width {
        // SAFETY: as above.
        let weights = lanes.exp(lanes.sub(unsafe { lanes.load(row.add(column)) }, lanes.splat(shift)));
        // SAFETY: as above.
        unsafe { lanes.store(row.add(column), weights) };
        total = lanes.add(total, weights);
        column += L::N;
    }
    // Most tiles leave the maximum as it is.
    let is_same = running.max == shift || mutant::is(Mutant::NoCorrection);
    let correction = if is_same { 1.0 } else { (running.max - shift).exp() };
    *running = Running { max, sum: running.sum * correction + lanes.sum(total) };
    correction
}
