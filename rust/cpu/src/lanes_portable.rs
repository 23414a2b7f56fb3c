//! 8 lanes in plain Rust, for every processor; the compiler makes of it what it can (SSE2, NEON).

use crate::element::{bf16_to_f32, f16_to_f32};
use crate::lanes::{Lanes, MOST_LANES};

/// Needs nothing.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

const N: usize = 8;

#[inline(always)]
fn each(a: [f32; N], b: [f32; N], of: impl Fn(f32, f32) -> f32) -> [f32; N] {
    let mut out = [0.0; N];
    for lane in 0..N {
        out[lane] = of(a[lane], b[lane]);
    }
    out
}

impl Lanes for Portable {
    type V = [f32; N];
    const N: usize = N;
    const WIDE: bool = false;
    const HEADS: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; N] {
        [x; N]
    }
    #[inline(always)]
    fn add(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        each(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        each(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        each(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        each(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        each(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        each(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn fma(self, a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
        // Not `mul_add`, which is a call where the processor has no such instruction.
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn round(self, a: [f32; N]) -> [f32; N] {
        // Adding and taking away 1.5 * 2^23 rounds to the nearest even for |a| < 2^22, which exponents are.
        each(a, a, |a, _| (a + 12_582_912.0) - 12_582_912.0)
    }
    #[inline(always)]
    fn times_power_of_two(self, a: [f32; N], n: [f32; N]) -> [f32; N] {
        each(a, n, |a, n| a * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn where_below(self, x: [f32; N], bound: f32, yes: [f32; N], no: [f32; N]) -> [f32; N] {
        let mut out = no;
        for lane in 0..N {
            if x[lane] < bound {
                out[lane] = yes[lane];
            }
        }
        out
    }
    #[inline(always)]
    fn where_within(self, v: [f32; N], first: i32, low: i32, high: i32, other: f32) -> [f32; N] {
        let mut out = v;
        for (lane, number) in out.iter_mut().enumerate() {
            if !(low..high).contains(&(first + lane as i32)) {
                *number = other;
            }
        }
        out
    }
    #[inline(always)]
    fn sum(self, v: [f32; N]) -> f32 {
        ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
    }
    #[inline(always)]
    fn largest(self, v: [f32; N]) -> f32 {
        v.iter().fold(f32::NEG_INFINITY, |a, &b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn sum4(self, v: [[f32; N]; 4]) -> [f32; 4] {
        [self.sum(v[0]), self.sum(v[1]), self.sum(v[2]), self.sum(v[3])]
    }

    #[inline(always)]
    // SAFETY: the caller's: there are `N` numbers at `from`.
    unsafe fn load(self, from: *const f32) -> [f32; N] {
        // SAFETY: as above.
        unsafe { from.cast::<[f32; N]>().read_unaligned() }
    }
    #[inline(always)]
    // SAFETY: the caller's: there are `N` numbers at `from`.
    unsafe fn load_bf16(self, from: *const u16) -> [f32; N] {
        // SAFETY: as above.
        let bits = unsafe { from.cast::<[u16; N]>().read_unaligned() };
        bits.map(bf16_to_f32)
    }
    #[inline(always)]
    // SAFETY: the caller's: there are `N` numbers at `from`.
    unsafe fn load_f16(self, from: *const u16) -> [f32; N] {
        // SAFETY: as above.
        let bits = unsafe { from.cast::<[u16; N]>().read_unaligned() };
        bits.map(f16_to_f32)
    }
    #[inline(always)]
    // SAFETY: the caller's: there are `count` < `N` numbers at `from`.
    unsafe fn load_part(self, from: *const f32, count: usize) -> [f32; N] {
        let mut out = [0.0; N];
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), count) };
        out
    }
    #[inline(always)]
    // SAFETY: the caller's: there are `count` < `N` numbers at `from`.
    unsafe fn load_bf16_part(self, from: *const u16, count: usize) -> [f32; N] {
        let mut bits = [0u16; N];
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from, bits.as_mut_ptr(), count) };
        bits.map(bf16_to_f32)
    }
    #[inline(always)]
    // SAFETY: the caller's: there are `count` < `N` numbers at `from`.
    unsafe fn load_f16_part(self, from: *const u16, count: usize) -> [f32; N] {
        let mut bits = [0u16; N];
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from, bits.as_mut_ptr(), count) };
        bits.map(f16_to_f32)
    }
    #[inline(always)]
    // SAFETY: the caller's: there is room for `N` numbers at `to`.
    unsafe fn store(self, to: *mut f32, v: [f32; N]) {
        // SAFETY: as above.
        unsafe { to.cast::<[f32; N]>().write_unaligned(v) }
    }
    #[inline(always)]
    // SAFETY: the caller's: `rows` rows of `N` numbers.
    unsafe fn columns(self, from: *const f32, step: usize, rows: usize) -> [[f32; N]; MOST_LANES] {
        let mut columns = [[0.0; N]; MOST_LANES];
        for (j, column) in columns.iter_mut().enumerate().take(N) {
            for (i, number) in column.iter_mut().enumerate() {
                // SAFETY: as above.
                *number = unsafe { *from.add(i.min(rows - 1) * step + j) };
            }
        }
        columns
    }
    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}
}
