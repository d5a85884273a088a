use super::adam::AdamScalars;
use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// LaProp: Adam that divides gradients by the root of the second moment before it takes their mean.
    ///
    /// The two decays can then be chosen independently. Source: Ziyin, Wang and Ueda 2020,
    /// [arXiv 2002.04839](https://arxiv.org/abs/2002.04839).
    ///
    /// ```text
    /// v   = β₂·v + (1 - β₂)·dx²
    /// m   = β₁·m + (1 - β₁)·dx / (√v̂ + ε)
    /// dx' = η·(m̂ + λ·x)                   m̂ = m / (1 - β₁ᵗ),   v̂ = v / (1 - β₂ᵗ)
    /// ```
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{LaProp, setup, update};
    ///
    /// // With β₂ = 0 the steps are those of a mean of signs: 1, then (0.5·1 - 1) / 1.5.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(LaProp { beta: (0.5, 0.0), ..LaProp::new(0.3) }, &x)?;
    /// for (gradient, expected) in [(3f32, "[-0.300]"), (-0.1, "[-0.200]")] {
    ///     update(&mut state, &x, &[("", Tensor::new(&[gradient], &Device::Cpu)?)])?;
    ///     assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), expected);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// As in the paper, η multiplies the mean. In the authors' code η is a factor inside the mean, which
    /// differs only if η changes. The decay comes before the step here, and after the step in the authors'
    /// code, timm 1.0.31 and pytorch_optimizer 4.1.0. Only the authors' code does not multiply λ by η.
    /// Defaults are those of the authors' code, except for λ. The rule is checked against the recurrence, and
    /// against pytorch_optimizer's `LaProp` where the second ε of that rule does not matter. torch, optax and
    /// Optimisers.jl have no counterpart.
    pub struct LaProp: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 4e-4 => range::non_negative,
        /// β₁, β₂: the decays of the mean and of the second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-15 => range::non_negative,
    }
}

impl Elementwise for LaProp {
    /// The scalars of Adam, and η·λ.
    type Scalars = (AdamScalars, f64);
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [Slot::zeros("normed_m"), Slot::zeros("v").second_moment()]
    }

    fn scalars(&self, t: u64) -> Self::Scalars {
        (
            AdamScalars::new(self.eta, self.beta, self.epsilon, t),
            self.eta * self.lambda,
        )
    }

    #[inline(always)]
    fn step<V: Value>((k, decay): Self::Scalars, x: V, dx: V, [normed_m, v]: &mut [V; 2]) -> V {
        k.update_square(v, dx);
        k.update_mean(normed_m, dx / k.denominator(*v));
        k.numerator(*normed_m) + x * decay
    }
}
