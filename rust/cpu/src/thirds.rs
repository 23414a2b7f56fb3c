//! Rows as the tiles of AMX want them: every float32 number as the sum of three of bfloat16, its thirds.
//!
//! Before: `strips`, rows side by side. After: `tiles`, which multiplies thirds with those of a weight. Always: the three of a number add
//! up to it exactly (8 digits each, the sign of the later ones free), save where it is not finite or beside the ends of float32's range.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::mutant::{self, Mutant};
use crate::strips::{Strip, Strips};
use crate::tiles::Tiles;

/// Numbers of a depth that one tile holds, in pairs: number k beside number k + 16.
pub(crate) const BLOCK: usize = 32;
/// Rows and lanes of a tile.
pub(crate) const SIDE: usize = 16;
/// Bytes of a tile's row.
pub(crate) const ROW: usize = 64;
/// Bytes of a tile.
pub(crate) const TILE: usize = SIDE * ROW;
/// Bytes of a block: its first, second and last thirds, a tile each.
pub(crate) const THREE: usize = 3 * TILE;

/// Rows of a strip: two tiles side by side, or one.
const MOST: usize = 2 * SIDE;

/// Memory of strips in thirds.
#[derive(Clone, Copy)]
pub(crate) struct Thirds {
    at: *mut u8,
    /// Blocks of a row.
    blocks: usize,
    /// The proof that the processor has what fills and multiplies them.
    _tiles: Tiles,
}

// SAFETY: every item writes strips and blocks of its own.
unsafe impl Sync for Thirds {}

impl Thirds {
    /// Of rows of `numbers` numbers; `at` is the beginning of a cache line.
    pub(crate) fn new(tiles: Tiles, at: *mut f32, numbers: usize) -> Thirds {
        Thirds { at: at.cast(), blocks: numbers.div_ceil(BLOCK), _tiles: tiles }
    }

    /// Numbers of memory that `rows` rows of `numbers` numbers take.
    pub(crate) fn room(rows: usize, numbers: usize) -> usize {
        rows.next_multiple_of(MOST) / SIDE * numbers.div_ceil(BLOCK) * THREE / size_of::<f32>()
    }

    /// Bytes from a block of a strip to the next.
    pub(crate) fn step(strip: Strip) -> usize {
        strip.width.div_ceil(SIDE) * THREE
    }

    /// Where a block of a strip begins: its thirds, then those of its second 16 lanes.
    pub(crate) fn at(&self, strip: Strip, block: usize) -> *mut u8 {
        let before = strip.first / SIDE * self.blocks * THREE;
        self.at.wrapping_add(before + block * Self::step(strip))
    }

    /// Writes those of a strip's `numbers`, which begin with a block and end with one or with the row.
    ///
    /// # Safety
    /// They are there, and there is room for them that nobody else uses.
    pub(crate) unsafe fn fill(&self, strip: Strip, from: Strips, numbers: Range<usize>) {
        let to = self.at(strip, numbers.start / BLOCK);
        // SAFETY: the caller's; `_tiles` proves that the processor has AVX-512.
        unsafe { fill(to, from.at(strip, numbers.start), strip.width, numbers.len()) };
    }
}

/// Two vectors of numbers as three of pairs, the first thirds first.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn split(a: __m512, b: __m512) -> [__m512i; 3] {
    let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    let half = _mm512_set1_epi32(0x8000);
    let [a1, b1] = [_mm512_add_epi32(_mm512_castps_si512(a), half), _mm512_add_epi32(_mm512_castps_si512(b), half)];
    let a = _mm512_sub_ps(a, _mm512_castsi512_ps(_mm512_and_si512(a1, upper)));
    let b = _mm512_sub_ps(b, _mm512_castsi512_ps(_mm512_and_si512(b1, upper)));
    let [a2, b2] = [_mm512_add_epi32(_mm512_castps_si512(a), half), _mm512_add_epi32(_mm512_castps_si512(b), half)];
    let a3 = _mm512_castps_si512(_mm512_sub_ps(a, _mm512_castsi512_ps(_mm512_and_si512(a2, upper))));
    let b3 = _mm512_castps_si512(_mm512_sub_ps(b, _mm512_castsi512_ps(_mm512_and_si512(b2, upper))));
    let last = if mutant::is(Mutant::LastThirdLeftOut) { _mm512_setzero_si512() } else { join(a3, b3) };
    [join(a1, b1), join(a2, b2), last]
}

/// The upper halves of two vectors in pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn join(a: __m512i, b: __m512i) -> __m512i {
    let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    // (a >> 16) | (b & upper)
    _mm512_ternarylogic_epi32::<0xf8>(_mm512_srli_epi32::<16>(a), b, upper)
}

// SAFETY: the caller's, as `Thirds::fill`; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn fill(to: *mut u8, from: *const f32, width: usize, numbers: usize) {
    let across = width.div_ceil(SIDE);
    for block in 0..numbers.div_ceil(BLOCK) {
        for part in 0..across {
            let lanes = ((1u32 << SIDE.min(width - part * SIDE)) - 1) as u16;
            for i in 0..SIDE {
                let number = |k: usize| {
                    // Behind the row there is nothing, and lanes behind the strip belong to nobody.
                    let mask = if k < numbers { lanes } else { 0 };
                    // SAFETY: the caller's: the lanes of a number that is there; masked ones are not read.
                    unsafe { _mm512_maskz_loadu_ps(mask, from.wrapping_add(k * width + part * SIDE)) }
                };
                let thirds = split(number(block * BLOCK + i), number(block * BLOCK + SIDE + i));
                for (third, pairs) in thirds.into_iter().enumerate() {
                    let at = (block * across + part) * THREE + third * TILE + i * ROW;
                    // SAFETY: the caller's: room for whole blocks.
                    unsafe { _mm512_storeu_si512(to.add(at).cast(), pairs) };
                }
            }
        }
    }
}

/// Splits `numbers` numbers of each of `rows` rows of a weight, which are `step` apart: block b of rows 16 i.. lies at `to + b * to_step + i * THREE`.
/// As each is read, memory is asked for what lies in the same place from `ahead` on.
///
/// # Safety
/// They are there, and `to` has room for whole blocks; the processor has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn split_rows(
    to: *mut u8,
    to_step: usize,
    from: *const f32,
    step: usize,
    rows: usize,
    numbers: usize,
    ahead: *const f32,
) {
    for row in 0..rows {
        let ahead = ahead.wrapping_add(row * step);
        let from = from.wrapping_add(row * step);
        let to = to.wrapping_add(row / SIDE * THREE + row % SIDE * ROW);
        for block in 0..numbers.div_ceil(BLOCK) {
            let (first, left) = (block * BLOCK, numbers - block * BLOCK);
            for line in [0, SIDE] {
                // A prefetch of any address is allowed and changes nothing but caches.
                _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(first + line).cast());
            }
            let whole = left >= BLOCK;
            // SAFETY: the caller's: the numbers are there, masked ones are not read.
            let (a, b) = unsafe {
                if whole {
                    (_mm512_loadu_ps(from.add(first)), _mm512_loadu_ps(from.add(first + SIDE)))
                } else {
                    let left = if mutant::is(Mutant::DepthTailLeftOut) { 0 } else { left };
                    let mask = (1u32 << left) - 1;
                    let (low, high) = (mask as u16, (mask >> SIDE) as u16);
                    let from = from.wrapping_add(first);
                    (_mm512_maskz_loadu_ps(low, from), _mm512_maskz_loadu_ps(high, from.wrapping_add(SIDE)))
                }
            };
            for (third, pairs) in split(a, b).into_iter().enumerate() {
                // SAFETY: the caller's: room for whole blocks.
                unsafe { _mm512_storeu_si512(to.add(block * to_step + third * TILE).cast(), pairs) };
            }
        }
    }
}
