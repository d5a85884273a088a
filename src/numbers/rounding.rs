//! Rounding to 16 bits: to nearest, at random, and once from f64.

use half::{bf16, f16};

use super::DType;

/// The value of `random` that rounds to nearest: half a unit.
const HALF: u32 = 1 << 31;

/// One of the two bf16 next to a number. The nearer has the greater probability, so that the mean over all
/// random bits is the number. Numbers beyond the largest bf16 are rounded to nearest, because no mean with
/// infinity is a number.
#[inline(always)]
pub(crate) fn stochastic_bf16(value: f32, random: u32) -> bf16 {
    const LARGEST: f32 = f32::from_bits(0x7f7f_0000);
    let bits = value.to_bits();
    let random = if value.abs() > LARGEST { HALF } else { random };
    // Random bits are added to the bits that are cut off, so that the sum carries into the bf16 with the
    // right probability. Infinity and NaN get no random bits, because a carry could turn a NaN into a number.
    // A NaN gets the quiet bit, because its other bits may all be cut off.
    let addend = if value.is_finite() { random >> 16 } else { 0 };
    let quiet = u32::from(value.is_nan()) << 22;
    bf16::from_bits(((bits | quiet).wrapping_add(addend) >> 16) as u16)
}

/// [`stochastic_bf16`] for f16.
#[inline(always)]
pub(crate) fn stochastic_f16(value: f32, random: u32) -> f16 {
    /// 2^-14, below which f16 has a fixed unit of 2^-24.
    const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;
    const UNIT: f32 = 5.960_464_5e-8;
    const LARGEST: f32 = 65504.0;
    let bits = value.to_bits();
    let random = if value.abs() > LARGEST { HALF } else { random };
    let normal = f32::from_bits(bits.wrapping_add(random >> 19) & !0x1fff);
    // The number is counted in units. The random number in [0, 1) that is added has 11 bits, for which an f32
    // below 1024 has room.
    let fraction = (random >> 21) as f32 * (1.0 / 2048.0);
    let subnormal = ((value.abs() / UNIT + fraction).floor() * UNIT).copysign(value);
    let rounded = if value.abs() < SMALLEST_NORMAL {
        subnormal
    } else {
        normal
    };
    f16::from_f32_const(if value.is_finite() { rounded } else { value })
}

/// The bf16 that is nearest to the f32 with these bits, ties to even. The f32 must not be NaN.
#[inline(always)]
pub(crate) fn nearest_bf16(bits: u32) -> bf16 {
    bf16::from_bits((bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16)
}

/// The number of a float dtype that is nearest to a number, ties to even.
pub(crate) fn rounded_once(number: f64, dtype: DType) -> f64 {
    match dtype {
        // `round_to_odd` comes first, because a conversion from f64 by f32 to 16 bits would round twice.
        DType::F16 => f16::from_f32(round_to_odd(number)).into(),
        DType::BF16 => bf16::from_f32(round_to_odd(number)).into(),
        DType::F32 => (number as f32).into(),
        _ => number,
    }
}

/// Rounds f64 to f32 so that a second rounding, to 16 bits, gives the result of one rounding from f64.
///
/// An inexact result gets an odd last bit (Boldo and Melquiond, "Emulation of FMA and correctly rounded
/// sums", 2008). No number halfway between two numbers of a narrower type has an odd last bit, so the second
/// rounding finds no tie that the f64 did not have.
#[inline(always)]
pub(crate) fn round_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let back = f64::from(nearest);
    if back == value || value.is_nan() || nearest.to_bits() & 1 == 1 {
        return nearest;
    }
    // The largest f32 is the odd neighbour of infinity.
    if nearest.is_infinite() {
        return f32::MAX.copysign(nearest);
    }
    // The nearest f32 is even and inexact, so the odd neighbour lies on the other side of the value.
    let bits = nearest.to_bits();
    let outwards = value.abs() > back.abs();
    f32::from_bits(if outwards { bits + 1 } else { bits - 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> impl Iterator<Item = f32> {
        (0..=u32::from(u16::MAX)).flat_map(|high| {
            [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| f32::from_bits(high << 16 | low))
        })
    }

    #[test]
    fn stochastic_rounding_stays_next_to_the_number() {
        for value in samples().filter(|value| value.is_finite()) {
            for random in [0, 1 << 16, 0x1234_5678, 0x8000_0000, u32::MAX] {
                let brain = stochastic_bf16(value, random);
                let exact = bf16::from_bits((value.to_bits() >> 16) as u16);
                assert!(
                    brain == exact || brain.to_bits() == exact.to_bits() + 1,
                    "{value:e}"
                );
                assert!(
                    value.to_bits() & 0xffff != 0 || brain == exact,
                    "{value:e} is a bf16"
                );

                let half = stochastic_f16(value, random);
                let widen = |h: f16| f64::from(h.to_f32_const());
                let distance = (widen(half) - f64::from(value)).abs();
                let unit = f64::from(value.abs()).log2().floor().max(-14.0).exp2() / 1024.0;
                assert!(distance < unit || half.is_infinite(), "{value:e} {half}");
                assert!(!half.is_infinite() || value.abs() > 65504.0, "{value:e}");
            }
        }
        for value in [f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(
                (
                    stochastic_bf16(value, u32::MAX).to_f32(),
                    stochastic_f16(value, u32::MAX).to_f32()
                ),
                (value, value)
            );
        }
        assert!(stochastic_bf16(f32::NAN, u32::MAX).is_nan() && stochastic_f16(f32::NAN, u32::MAX).is_nan());
    }

    /// The mean over all values of the random bits that count is the number itself, to the resolution of
    /// these bits.
    #[test]
    fn stochastic_rounding_is_exact_in_the_mean() {
        for value in [1.0 + 3e-4, -0.1, 1e-3, 3e-6, -4.1e-8, 65000.3f32] {
            let mean = |round: &dyn Fn(u32) -> f64, bits: u32| {
                (0..1u32 << bits)
                    .map(|random| round(random << (32 - bits)))
                    .sum::<f64>()
                    / f64::from(1u32 << bits)
            };
            let brain = mean(&|random| stochastic_bf16(value, random).to_f64(), 16);
            assert!(
                (brain - f64::from(value)).abs() <= f64::from(value.abs()) * 2f64.powi(-22),
                "{value:e} {brain:e}"
            );
            let half = mean(&|random| stochastic_f16(value, random).to_f64(), 13);
            assert!(
                (half - f64::from(value)).abs()
                    <= (f64::from(value.abs()) * 2f64.powi(-20)).max(2f64.powi(-24 - 10)),
                "{value:e} {half:e}"
            );
        }
    }
}
