use super::adam::AdamScalars;
use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// AdaBelief: Adam that divides by how much the gradient differs from its mean.
    ///
    /// Source: Zhuang et al. 2020, [arXiv 2010.07468](https://arxiv.org/abs/2010.07468).
    ///
    /// ```text
    /// m   = β₁·m + (1 - β₁)·dx
    /// s   = β₂·s + (1 - β₂)·(dx - m)² + ε
    /// dx' = η·m̂ / (√ŝ + ε),   m̂ = m / (1 - β₁ᵗ),   ŝ = s / (1 - β₂ᵗ)
    /// ```
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AdaBelief, setup, update};
    ///
    /// // The second gradient is as expected, so its step is longer: √7·η after 2·η.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(AdaBelief { beta: (0.5, 0.75), ..AdaBelief::new(0.1) }, &x)?;
    /// for gradient in [[1f32], [1.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[-0.465]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// Defaults and definition are those of Optimisers.jl. torch has no counterpart. optax has two ε, both
    /// 1e-16 by default.
    pub struct AdaBelief: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the mean and of the variance.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-16 => range::non_negative,
    }
}

impl Elementwise for AdaBelief {
    type Scalars = (AdamScalars, f64);
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [Slot::zeros("m"), Slot::zeros("variance").second_moment()]
    }

    fn scalars(&self, t: u64) -> Self::Scalars {
        (
            AdamScalars::new(self.eta, self.beta, self.epsilon, t),
            self.epsilon,
        )
    }

    #[inline(always)]
    fn step<V: Value>((k, epsilon): Self::Scalars, _x: V, dx: V, [m, s]: &mut [V; 2]) -> V {
        k.update_mean(m, dx);
        k.update_square(s, dx - *m);
        *s = *s + epsilon;
        k.numerator(*m) / k.denominator(*s)
    }
}
