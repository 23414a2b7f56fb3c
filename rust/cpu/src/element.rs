//! The number formats of keys, values, queries and answers; all arithmetic is in float32.

use crate::lanes::Lanes;

/// A number format in memory.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// # Safety
    /// `from` has `L::N` numbers.
    unsafe fn load<L: Lanes>(lanes: L, from: *const Self) -> L::V;
    /// The first `count` < `L::N` lanes, zeros behind them.
    ///
    /// # Safety
    /// `from` has `count` numbers.
    unsafe fn load_part<L: Lanes>(lanes: L, from: *const Self, count: usize) -> L::V;
    /// The nearest number of this format, the even one of two.
    fn narrow(x: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    // SAFETY: the caller's.
    unsafe fn load<L: Lanes>(lanes: L, from: *const f32) -> L::V {
        // SAFETY: as above.
        unsafe { lanes.load(from) }
    }
    #[inline(always)]
    // SAFETY: the caller's.
    unsafe fn load_part<L: Lanes>(lanes: L, from: *const f32, count: usize) -> L::V {
        // SAFETY: as above.
        unsafe { lanes.load_part(from, count) }
    }
    #[inline(always)]
    fn narrow(x: f32) -> f32 {
        x
    }
}

/// The upper half of a float32.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bf16(pub(crate) u16);

impl Element for Bf16 {
    #[inline(always)]
    // SAFETY: the caller's.
    unsafe fn load<L: Lanes>(lanes: L, from: *const Bf16) -> L::V {
        // SAFETY: as above.
        unsafe { lanes.load_bf16(from.cast()) }
    }
    #[inline(always)]
    // SAFETY: the caller's.
    unsafe fn load_part<L: Lanes>(lanes: L, from: *const Bf16, count: usize) -> L::V {
        // SAFETY: as above.
        unsafe { lanes.load_bf16_part(from.cast(), count) }
    }
    #[inline(always)]
    fn narrow(x: f32) -> Bf16 {
        let bits = x.to_bits();
        if x.is_nan() {
            return Bf16((bits >> 16) as u16 | 0x40);
        }
        Bf16(((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16)
    }
}

/// IEEE 754's binary16.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F16(pub(crate) u16);

impl Element for F16 {
    #[inline(always)]
    // SAFETY: the caller's.
    unsafe fn load<L: Lanes>(lanes: L, from: *const F16) -> L::V {
        // SAFETY: as above.
        unsafe { lanes.load_f16(from.cast()) }
    }
    #[inline(always)]
    // SAFETY: the caller's.
    unsafe fn load_part<L: Lanes>(lanes: L, from: *const F16, count: usize) -> L::V {
        // SAFETY: as above.
        unsafe { lanes.load_f16_part(from.cast(), count) }
    }
    #[inline(always)]
    fn narrow(x: f32) -> F16 {
        F16(f32_to_f16(x))
    }
}

#[inline(always)]
pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let (sign, rest) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff));
    if rest >= 0x7c00 {
        return f32::from_bits(sign | 0x7f80_0000 | ((rest & 0x3ff) << 13));
    }
    // 2^112 moves the exponent from a bias of 15 to one of 127, also for numbers below the normal ones.
    let size = f32::from_bits(rest << 13) * f32::from_bits((254 - 15) << 23);
    f32::from_bits(sign | size.to_bits())
}

#[inline(always)]
fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let (sign, rest) = (((bits >> 16) & 0x8000) as u16, bits & 0x7fff_ffff);
    if rest > 0x7f80_0000 {
        return sign | 0x7e00;
    }
    if rest >= 0x4780_0000 {
        return sign | 0x7c00; // 65536 and above
    }
    if rest < 0x3880_0000 {
        // Below 2^-14: adding 0.5 leaves the number, rounded to whole multiples of 2^-24, in the lowest bits.
        let whole = f32::from_bits(rest) + 0.5;
        return sign | (whole.to_bits() - 0.5f32.to_bits()) as u16;
    }
    // May carry into the exponent, up to infinity: that is how 65520 rounds.
    let rounded = rest - ((127 - 15) << 23) + 0xfff + ((rest >> 13) & 1);
    sign | (rounded >> 13) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_survives_the_way_through_f32() {
        for bits in 0..=u16::MAX {
            let x = f16_to_f32(bits);
            if x.is_nan() {
                assert_eq!(F16::narrow(x).0 & 0x7e00, 0x7e00);
            } else {
                assert_eq!(F16::narrow(x).0, bits, "{x}");
            }
        }
    }

    #[test]
    fn halves_round_to_even_and_large_numbers_to_infinity() {
        assert_eq!(F16::narrow(1.0 + f32::EPSILON * 4096.0).0, 0x3c00);
        assert_eq!(F16::narrow(1.0 + f32::EPSILON * 12288.0).0, 0x3c02);
        assert_eq!(F16::narrow(65519.0).0, 0x7bff);
        assert_eq!(F16::narrow(-65520.0).0, 0xfc00);
        assert_eq!(F16::narrow(2f32.powi(-25)).0, 0);
        assert_eq!(F16::narrow(3.0 * 2f32.powi(-25)).0, 2);
        assert_eq!(Bf16::narrow(1.0 + 2f32.powi(-8)).0, 0x3f80);
        assert_eq!(Bf16::narrow(1.0 + 3.0 * 2f32.powi(-8)).0, 0x3f82);
        assert_eq!(Bf16::narrow(f32::MAX).0, 0x7f80);
        assert!(bf16_to_f32(Bf16::narrow(f32::NAN).0).is_nan());
    }
}
