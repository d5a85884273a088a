//! Ways to keep, or to make up for, the bits that a low-precision parameter cannot hold: for one element.

use half::{bf16, f16};

/// An f32 as the bf16 that is nearest to it, ties away from zero, and what is missing, in units of the last place of the f32.
///
/// It is the only rounding to nearest that 16 bits can undo: the distance is at most half a unit of the bf16, 0x8000, in either direction, and one of
/// the two ends has to go. NaN keeps nothing but being NaN.
#[inline(always)]
pub(crate) fn split(value: f32) -> (bf16, i16) {
    let bits = value.to_bits();
    let high = (bits.wrapping_add(0x8000) >> 16) as u16;
    let rest = bits as u16 as i16;
    if value.is_nan() { (bf16::NAN, 0) } else { (bf16::from_bits(high), rest) }
}

/// The f32 that was [`split`].
#[inline(always)]
pub(crate) fn join(high: bf16, rest: i16) -> f32 {
    let bits = u32::from(high.to_bits()) << 16;
    f32::from_bits(bits.wrapping_add_signed(i32::from(rest)))
}

/// Two words that decide, with an element's number, its random bits: from a seed, a step and a path.
///
/// The path is hashed by FNV-1a (Fowler, Noll, Vo) and everything mixed by SplitMix64 (Steele, Lea, Flood 2014).
pub(crate) fn random_key(seed: u64, step: u64, path: &str) -> [u32; 2] {
    let named = path.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let mixed = [step, named].into_iter().fold(mix(seed), |hash, part| mix(hash ^ part));
    [mixed as u32, (mixed >> 32) as u32]
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// 32 random bits for an element: the integer hash `lowbias32` (Wellons 2018) between the two words of the key.
#[inline(always)]
pub(crate) fn random_bits([before, after]: [u32; 2], element: u32) -> u32 {
    let mut x = element ^ before;
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^= x >> 16;
    x.wrapping_add(after)
}

/// The key for elements from `start` on, whose number within 2³² elements is what [`random_bits`] takes.
#[inline(always)]
pub(crate) fn key_at([before, after]: [u32; 2], start: usize) -> [u32; 2] {
    [before, after ^ ((start as u64) >> 32) as u32]
}

/// A number from the standard normal distribution for an element, by the formula of Box and Muller (1958).
pub(crate) fn gaussian([low, high]: [u32; 2], element: usize) -> f64 {
    let bits = mix((u64::from(high) << 32 | u64::from(low)) ^ element as u64);
    let uniform = |bits: u32| (f64::from(bits) + 0.5) / 2f64.powi(32);
    let (radius, angle) = (uniform(bits as u32), uniform((bits >> 32) as u32));
    (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}

/// One of the two bf16 next to a number, the nearer with the greater probability, so that the mean is the number.
#[inline(always)]
pub(crate) fn stochastic_bf16(value: f32, random: u32) -> bf16 {
    let bits = value.to_bits();
    // Adding to the magnitude what is cut off afterwards; an infinity has nothing to add to, and NaN becomes quiet.
    let more = if value.is_finite() { random >> 16 } else { 0 };
    let quiet = u32::from(value.is_nan()) << 22;
    bf16::from_bits(((bits | quiet).wrapping_add(more) >> 16) as u16)
}

/// One of the two f16 next to a number, as [`stochastic_bf16`]. What is beyond all of them becomes infinite.
#[inline(always)]
pub(crate) fn stochastic_f16(value: f32, random: u32) -> f16 {
    /// 2^-14, below which f16 has a fixed unit of 2^-24.
    const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;
    const UNIT: f32 = 5.960_464_5e-8;
    let bits = value.to_bits();
    let normal = f32::from_bits(bits.wrapping_add(random >> 19) & !0x1fff);
    // In units, plus a number in [0, 1) of 11 bits, which an f32 below 1024 has room for.
    let part = (random >> 21) as f32 * (1.0 / 2048.0);
    let subnormal = ((value.abs() / UNIT + part).floor() * UNIT).copysign(value);
    let rounded = if value.abs() < SMALLEST_NORMAL { subnormal } else { normal };
    f16::from_f32_const(if value.is_finite() { rounded } else { value })
}

/// f64 to f32 so that a second rounding to 16 bits equals one rounding from f64: an inexact result gets an odd last bit, which no
/// tie of a narrower type has. (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008.)
#[inline(always)]
pub(crate) fn round_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let back = f64::from(nearest);
    if back == value || value.is_nan() || nearest.to_bits() & 1 == 1 {
        return nearest;
    }
    if nearest.is_infinite() {
        return f32::MAX.copysign(nearest);
    }
    // The nearest is even and inexact: the odd neighbour lies on the other side of the value.
    let bits = nearest.to_bits();
    let outwards = value.abs() > back.abs();
    f32::from_bits(if outwards { bits + 1 } else { bits - 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> impl Iterator<Item = f32> {
        (0..=u32::from(u16::MAX)).flat_map(|high| [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| f32::from_bits(high << 16 | low)))
    }

    #[test]
    fn a_split_number_comes_back() {
        for value in samples() {
            let (high, rest) = split(value);
            if value.is_nan() {
                assert!(join(high, rest).is_nan());
                continue;
            }
            assert_eq!(join(high, rest).to_bits(), value.to_bits());
            let nearest = bf16::from_f32(value);
            let is_tie = value.to_bits() & 0xffff == 0x8000;
            assert!(high == nearest || is_tie, "{value:e}");
            assert!(!is_tie || high.to_f32().abs() >= value.abs(), "{value:e}");
        }
    }

    #[test]
    fn stochastic_rounding_stays_next_to_the_number() {
        for value in samples().filter(|value| value.is_finite()) {
            for random in [0, 1 << 16, 0x1234_5678, 0x8000_0000, u32::MAX] {
                let brain = stochastic_bf16(value, random);
                let exact = bf16::from_bits((value.to_bits() >> 16) as u16);
                assert!(brain == exact || brain.to_bits() == exact.to_bits() + 1, "{value:e}");
                assert!(value.to_bits() & 0xffff != 0 || brain == exact, "{value:e} is a bf16");

                let half = stochastic_f16(value, random);
                let below = |h: f16| f64::from(h.to_f32_const());
                let distance = (below(half) - f64::from(value)).abs();
                let unit = f64::from(value.abs()).log2().floor().max(-14.0).exp2() / 1024.0;
                assert!(distance < unit || half.is_infinite(), "{value:e} {half}");
                assert!(!half.is_infinite() || value.abs() > 65504.0, "{value:e}");
            }
        }
        for value in [f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!((stochastic_bf16(value, u32::MAX).to_f32(), stochastic_f16(value, u32::MAX).to_f32()), (value, value));
        }
        assert!(stochastic_bf16(f32::NAN, u32::MAX).is_nan() && stochastic_f16(f32::NAN, u32::MAX).is_nan());
    }

    /// The mean over all values of the random bits that count is the number itself, to the resolution of these bits.
    #[test]
    fn stochastic_rounding_is_exact_in_the_mean() {
        for value in [1.0 + 3e-4, -0.1, 1e-3, 3e-6, -4.1e-8, 65000.3f32] {
            let mean = |round: &dyn Fn(u32) -> f64, bits: u32| {
                (0..1u32 << bits).map(|random| round(random << (32 - bits))).sum::<f64>() / f64::from(1u32 << bits)
            };
            let brain = mean(&|random| stochastic_bf16(value, random).to_f64(), 16);
            assert!((brain - f64::from(value)).abs() <= f64::from(value.abs()) * 2f64.powi(-22), "{value:e} {brain:e}");
            let half = mean(&|random| stochastic_f16(value, random).to_f64(), 13);
            assert!(
                (half - f64::from(value)).abs() <= (f64::from(value.abs()) * 2f64.powi(-20)).max(2f64.powi(-24 - 10)),
                "{value:e} {half:e}"
            );
        }
    }

    #[test]
    fn keys_and_elements_decide_the_bits() {
        let key = random_key(0, 1, "a");
        assert_ne!(key, random_key(1, 1, "a"));
        assert_ne!(key, random_key(0, 2, "a"));
        assert_ne!(key, random_key(0, 1, "b"));
        assert_ne!(gaussian(key, 0), gaussian(key, 1));
        assert_ne!(gaussian(key, 0), gaussian(random_key(0, 2, "a"), 0));
        let ones: u32 = (0..1000).map(|element| random_bits(key, element).count_ones()).sum();
        assert!((15_500..16_500).contains(&ones), "{ones} of 32000");
    }
    /// Mean, variance, fourth moment and the correlation of neighbours.
    #[test]
    fn the_normal_distribution() {
        const COUNT: usize = 100_000;
        let key = random_key(7, 1, "a");
        let mean = |f: &dyn Fn(f64, f64) -> f64| {
            (0..COUNT).map(|element| f(gaussian(key, element), gaussian(key, element + 1))).sum::<f64>() / COUNT as f64
        };
        for (got, expected) in
            [(mean(&|z, _| z), 0.0), (mean(&|z, _| z * z), 1.0), (mean(&|z, _| z.powi(4)), 3.0), (mean(&|z, next| z * next), 0.0)]
        {
            assert!((got - expected).abs() < 0.05, "{got} for {expected}");
        }
    }
}
