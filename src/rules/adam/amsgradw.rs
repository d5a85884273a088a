use super::adam::AdamScalars;
use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// AdamW with a second moment that never shrinks, as in torch.
    ///
    /// The rule is [AMSGrad](https://arxiv.org/abs/1904.09237) (Reddi, Kale and Kumar 2018) with bias
    /// corrections and decoupled weight decay.
    ///
    /// Weight decay is on by default, with λ = 0.01. `AMSGradW { lambda: 0.0, ..AMSGradW::new(eta) }`
    /// switches it off.
    ///
    /// ```text
    /// m   = β₁·m + (1 - β₁)·dx
    /// v   = β₂·v + (1 - β₂)·dx²
    /// w   = max(w, v)
    /// dx' = η·(m̂ / (√ŵ + ε) + λ·x)        m̂ = m / (1 - β₁ᵗ),   ŵ = w / (1 - β₂ᵗ)
    /// ```
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AMSGradW, setup, update};
    ///
    /// // The rule remembers the gradient of 4: its second step is 2 / 4, where Adam's would be 1.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(AMSGradW { beta: (0.0, 0.0), lambda: 0.0, ..AMSGradW::new(1.0) }, &x)?;
    /// for gradient in [[4f32], [2.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[-1.500]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is torch's `AdamW(amsgrad=True)`, with λ = 0 torch's `Adam(amsgrad=True)`.
    /// [`AMSGrad`](crate::AMSGrad) is the form of the paper and of Optimisers.jl, without bias corrections.
    /// The rule is checked against torch.
    pub struct AMSGradW: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.01 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
    }
}

impl Elementwise for AMSGradW {
    /// The scalars of Adam, and η·λ.
    type Scalars = (AdamScalars, f64);
    type Slots<T> = [T; 3];

    fn slots(&self) -> [Slot; 3] {
        [
            Slot::zeros("m"),
            Slot::zeros("v").second_moment(),
            Slot::zeros("largest_v").second_moment(),
        ]
    }

    fn scalars(&self, t: u64) -> Self::Scalars {
        (
            AdamScalars::new(self.eta, self.beta, self.epsilon, t),
            self.eta * self.lambda,
        )
    }

    #[inline(always)]
    fn step<V: Value>((k, decay): Self::Scalars, x: V, dx: V, [m, v, largest]: &mut [V; 3]) -> V {
        k.update_mean(m, dx);
        k.update_square(v, dx);
        *largest = largest.max(*v);
        k.numerator(*m) / k.denominator(*largest) + x * decay
    }
}
