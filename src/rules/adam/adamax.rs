use crate::numbers::value::{Value, above_zero};
use crate::rule::{Elementwise, Slot, range};
use crate::rules::moments::{correction, decayed};

crate::hyper_parameters! {
    /// AdaMax: Adam with the ∞-norm (Kingma and Ba 2014, [arXiv 1412.6980](https://arxiv.org/abs/1412.6980)).
    ///
    /// ```text
    /// m       = β₁·m + (1 - β₁)·dx
    /// largest = max(β₂·largest, |dx|)
    /// dx'     = η·m̂ / (largest + ε),   m̂ = m / (1 - β₁ᵗ)
    /// ```
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AdaMax, setup, update};
    ///
    /// // m̂ is 4 and then 1 / 0.75; the largest gradient is 4, and decays to 2 in the second step.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(AdaMax { beta: (0.5, 0.5), ..AdaMax::new(3.0) }, &x)?;
    /// for gradient in [[4f32], [0.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[-5.000]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// ε is in the denominator, as in Optimisers.jl; torch adds ε to |dx| in the maximum, and its default η
    /// is 0.002.
    pub struct AdaMax: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the mean and of the largest gradient.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
    }
}

impl Elementwise for AdaMax {
    /// η / (1 - β₁ᵗ), β, ε
    type Scalars = (f64, (f64, f64), f64);
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [Slot::zeros("m"), Slot::zeros("largest").non_negative()]
    }

    fn scalars(&self, t: u64) -> Self::Scalars {
        (
            self.eta / correction(self.beta.0, t),
            self.beta,
            above_zero(self.epsilon),
        )
    }

    #[inline(always)]
    fn step<V: Value>((eta, beta, epsilon): Self::Scalars, _x: V, dx: V, [m, largest]: &mut [V; 2]) -> V {
        *m = decayed(*m, dx, beta.0);
        *largest = (*largest * beta.1).max(dx.abs());
        *m * eta / (*largest + epsilon)
    }
}
