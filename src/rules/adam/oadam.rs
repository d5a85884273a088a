use super::adam::AdamScalars;
use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// Optimistic Adam (Daskalakis et al. 2017, [arXiv 1711.00141](https://arxiv.org/abs/1711.00141)), for
    /// games such as the training of GANs.
    ///
    /// ```text
    /// uₜ  = η·m̂ / (√v̂ + ε)     with the moments of Adam
    /// dx' = 2·uₜ - uₜ₋₁,   u₀ = 0
    /// ```
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{OAdam, setup, update};
    ///
    /// // The first step is twice Adam's, 2·0.1. The second step is 2·0.1 - 0.1.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(OAdam::new(0.1), &x)?;
    /// for gradient in [[1f32], [1.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[-0.300]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// Defaults and definition are those of Optimisers.jl. torch has no counterpart.
    pub struct OAdam: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.5, 0.9) => range::decays,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
    }
}

impl Elementwise for OAdam {
    type Scalars = AdamScalars;
    type Slots<T> = [T; 3];

    fn slots(&self) -> [Slot; 3] {
        [
            Slot::zeros("m"),
            Slot::zeros("v").second_moment(),
            Slot::zeros("last_step"),
        ]
    }

    fn scalars(&self, t: u64) -> AdamScalars {
        AdamScalars::new(self.eta, self.beta, self.epsilon, t)
    }

    #[inline(always)]
    fn step<V: Value>(k: AdamScalars, _x: V, dx: V, [m, v, last_step]: &mut [V; 3]) -> V {
        let adam = k.step(dx, m, v);
        let optimistic = adam * 2.0 - *last_step;
        *last_step = adam;
        optimistic
    }
}
