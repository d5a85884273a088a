//! Random numbers of the standard normal distribution, for rules of whole tensors.

use super::random::mix;

/// A normally distributed number for an element, by the formula of Box and Muller (1958).
pub(crate) fn gaussian(key: u64, element: usize) -> f64 {
    let bits = mix(key ^ element as u64);
    // Half a unit is added, because the logarithm of 0 is infinite.
    let uniform = |bits: u32| (f64::from(bits) + 0.5) / 2f64.powi(32);
    let (radius, angle) = (uniform(bits as u32), uniform((bits >> 32) as u32));
    (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::random_key;

    /// Mean, variance, fourth moment and the correlation of neighbours.
    #[test]
    fn the_normal_distribution() {
        const COUNT: usize = 100_000;
        let key = random_key(7, 1, "a");
        assert_ne!(gaussian(key, 0), gaussian(key, 1));
        assert_ne!(gaussian(key, 0), gaussian(random_key(7, 2, "a"), 0));
        let mean = |f: &dyn Fn(f64, f64) -> f64| {
            (0..COUNT)
                .map(|element| f(gaussian(key, element), gaussian(key, element + 1)))
                .sum::<f64>()
                / COUNT as f64
        };
        for (got, expected) in [
            (mean(&|z, _| z), 0.0),
            (mean(&|z, _| z * z), 1.0),
            (mean(&|z, _| z.powi(4)), 3.0),
            (mean(&|z, next| z * next), 0.0),
        ] {
            assert!((got - expected).abs() < 0.05, "{got} for {expected}");
        }
    }
}
