//! 8 lanes: AVX2 with FMA and F16C.

use std::arch::x86_64::*;

use crate::lanes::{Lanes, MOST_LANES, accesses, instructions};

/// The processor has AVX2, FMA and F16C. Made by [`crate::isa`] alone.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        let has =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has.then_some(Avx2(()))
    }
}

impl Lanes for Avx2 {
    type V = __m256;
    const N: usize = 8;
    const WIDE: bool = false;
    const HEADS: usize = 4;

    instructions! {
        fn splat(x: f32) -> __m256 { _mm256_set1_ps(x) }
        fn add(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        fn sub(a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
        fn mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        fn div(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
        fn max(a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
        fn min(a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        fn round(a: __m256) -> __m256 { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
        fn times_power_of_two(a: __m256, n: __m256) -> __m256 {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
        }
        fn where_below(x: __m256, bound: f32, yes: __m256, no: __m256) -> __m256 {
            _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(bound)))
        }
        fn where_within(v: __m256, first: i32, low: i32, high: i32, other: f32) -> __m256 {
            let index = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
            let before = _mm256_cmpgt_epi32(_mm256_set1_epi32(low), index);
            let inside = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(high), index));
            _mm256_blendv_ps(_mm256_set1_ps(other), v, _mm256_castsi256_ps(inside))
        }
        fn sum(v: __m256) -> f32 {
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
        fn largest(v: __m256) -> f32 {
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        }
        fn sum4(v: [__m256; 4]) -> [f32; 4] {
            let pairs = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
            let sums = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), sums);
            out
        }
    }

    accesses! {
        fn load(from: *const f32) -> __m256 { _mm256_loadu_ps(from) }
        fn load_bf16(from: *const u16) -> __m256 {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
        fn load_f16(from: *const u16) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
        fn load_part(from: *const f32, count: usize) -> __m256 {
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_maskload_ps(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lane))
        }
        fn load_bf16_part(from: *const u16, count: usize) -> __m256 {
            let mut bits = [0u16; 8];
            std::ptr::copy_nonoverlapping(from, bits.as_mut_ptr(), count);
            Avx2(()).load_bf16(bits.as_ptr())
        }
        fn load_f16_part(from: *const u16, count: usize) -> __m256 {
            let mut bits = [0u16; 8];
            std::ptr::copy_nonoverlapping(from, bits.as_mut_ptr(), count);
            Avx2(()).load_f16(bits.as_ptr())
        }
        fn store(to: *mut f32, v: __m256) -> () { _mm256_storeu_ps(to, v) }
        fn columns(from: *const f32, step: usize, rows: usize) -> [__m256; MOST_LANES] {
            let mut row = [from; 8];
            for (i, row) in row.iter_mut().enumerate() {
                *row = from.add(i.min(rows - 1) * step);
            }
            let mut columns = [_mm256_setzero_ps(); MOST_LANES];
            for q in 0..2 {
                // Row i, then every fourth: a square of four columns in each four lanes, which is turned there.
                let mut v = [_mm256_setzero_ps(); 4];
                for (i, v) in v.iter_mut().enumerate() {
                    *v = _mm256_castps128_ps256(_mm_loadu_ps(row[i].add(4 * q)));
                    *v = _mm256_insertf128_ps::<1>(*v, _mm_loadu_ps(row[4 + i].add(4 * q)));
                }
                let (a, b) = (_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
                let (c, d) = (_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
                columns[4 * q] = _mm256_shuffle_ps::<0x44>(a, c);
                columns[4 * q + 1] = _mm256_shuffle_ps::<0xee>(a, c);
                columns[4 * q + 2] = _mm256_shuffle_ps::<0x44>(b, d);
                columns[4 * q + 3] = _mm256_shuffle_ps::<0xee>(b, d);
            }
            columns
        }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch of any address is allowed and changes nothing but caches.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
}
