//! 16 lanes: AVX-512 (F, BW, DQ, VL).

use std::arch::x86_64::*;

use crate::lanes::{Lanes, MOST_LANES, accesses, instructions};

/// The processor has AVX-512 F, BW, DQ and VL. Made by [`crate::isa`] alone.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Avx512(()))
    }
}

impl Lanes for Avx512 {
    type V = __m512;
    const N: usize = 16;
    const WIDE: bool = true;
    const HEADS: usize = 4;

    instructions! {
        fn splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fn max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        fn min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn round(a: __m512) -> __m512 { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
        fn times_power_of_two(a: __m512, n: __m512) -> __m512 { _mm512_scalef_ps(a, n) }
        fn where_below(x: __m512, bound: f32, yes: __m512, no: __m512) -> __m512 {
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, _mm512_set1_ps(bound)), no, yes)
        }
        fn where_within(v: __m512, first: i32, low: i32, high: i32, other: f32) -> __m512 {
            let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let index = _mm512_add_epi32(lane, _mm512_set1_epi32(first));
            let inside = _mm512_cmpge_epi32_mask(index, _mm512_set1_epi32(low))
                & _mm512_cmplt_epi32_mask(index, _mm512_set1_epi32(high));
            _mm512_mask_blend_ps(inside, _mm512_set1_ps(other), v)
        }
        fn sum(v: __m512) -> f32 { _mm512_reduce_add_ps(v) }
        fn largest(v: __m512) -> f32 { _mm512_reduce_max_ps(v) }
        fn sum4(v: [__m512; 4]) -> [f32; 4] {
            let mut half = [_mm256_setzero_ps(); 4];
            for (half, v) in half.iter_mut().zip(v) {
                *half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            }
            let pairs = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
            let sums = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), sums);
            out
        }
    }

    accesses! {
        fn load(from: *const f32) -> __m512 { _mm512_loadu_ps(from) }
        fn load_bf16(from: *const u16) -> __m512 {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
        fn load_f16(from: *const u16) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
        fn load_part(from: *const f32, count: usize) -> __m512 {
            _mm512_maskz_loadu_ps(((1u32 << count) - 1) as u16, from)
        }
        fn load_bf16_part(from: *const u16, count: usize) -> __m512 {
            let bits = _mm256_maskz_loadu_epi16(((1u32 << count) - 1) as u16, from.cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
        }
        fn load_f16_part(from: *const u16, count: usize) -> __m512 {
            _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(((1u32 << count) - 1) as u16, from.cast()))
        }
        fn store(to: *mut f32, v: __m512) -> () { _mm512_storeu_ps(to, v) }
        fn columns(from: *const f32, step: usize, rows: usize) -> [__m512; MOST_LANES] {
            let mut row = [from; 16];
            for (i, row) in row.iter_mut().enumerate() {
                *row = from.add(i.min(rows - 1) * step);
            }
            let mut columns = [_mm512_setzero_ps(); MOST_LANES];
            for q in 0..4 {
                // Row i, then every fourth: a square of four columns in each four lanes, which is turned there.
                let mut v = [_mm512_setzero_ps(); 4];
                for (i, v) in v.iter_mut().enumerate() {
                    *v = _mm512_castps128_ps512(_mm_loadu_ps(row[i].add(4 * q)));
                    *v = _mm512_insertf32x4::<1>(*v, _mm_loadu_ps(row[4 + i].add(4 * q)));
                    *v = _mm512_insertf32x4::<2>(*v, _mm_loadu_ps(row[8 + i].add(4 * q)));
                    *v = _mm512_insertf32x4::<3>(*v, _mm_loadu_ps(row[12 + i].add(4 * q)));
                }
                let (a, b) = (_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
                let (c, d) = (_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
                columns[4 * q] = _mm512_shuffle_ps::<0x44>(a, c);
                columns[4 * q + 1] = _mm512_shuffle_ps::<0xee>(a, c);
                columns[4 * q + 2] = _mm512_shuffle_ps::<0x44>(b, d);
                columns[4 * q + 3] = _mm512_shuffle_ps::<0xee>(b, d);
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
