use super::adam::AdamScalars;
use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// Grams: the lengths of Adam's steps, with the signs of the gradient.
    ///
    /// Source: Cao, Li and Song 2024, [arXiv 2412.17107](https://arxiv.org/abs/2412.17107).
    ///
    /// ```text
    /// dx' = η·(|m̂ / (√v̂ + ε)|·sign(dx) + λ·x)
    /// ```
    ///
    /// with the moments of [`Adam`](crate::Adam). Where the gradient is zero, only weight decay moves an
    /// element.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Grams, setup, update};
    ///
    /// // The mean has another sign than the second gradient, and gives only the length: 0.5·1 / 1.5.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(Grams { beta: (0.5, 0.5), ..Grams::new(0.3) }, &x)?;
    /// for (gradient, expected) in [(2f32, "[-0.300]"), (-2.0, "[-0.200]")] {
    ///     update(&mut state, &x, &[("", Tensor::new(&[gradient], &Device::Cpu)?)])?;
    ///     assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), expected);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// Defaults are the authors'. Their package (grams-pytorch 0.0.2) adds ε before the bias correction of v;
    /// the paper, this rule and `Grams` of pytorch_optimizer 4.1.0 add ε after it. The rule is checked
    /// against pytorch_optimizer. torch, optax and Optimisers.jl have no counterpart.
    pub struct Grams: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-6 => range::non_negative,
    }
}

impl Elementwise for Grams {
    /// The scalars of Adam, and η·λ.
    type Scalars = (AdamScalars, f64);
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [Slot::zeros("m"), Slot::zeros("v").second_moment()]
    }

    fn scalars(&self, t: u64) -> Self::Scalars {
        (
            AdamScalars::new(self.eta, self.beta, self.epsilon, t),
            self.eta * self.lambda,
        )
    }

    #[inline(always)]
    fn step<V: Value>((k, decay): Self::Scalars, x: V, dx: V, [m, v]: &mut [V; 2]) -> V {
        k.step(dx, m, v).abs() * dx.sign() + x * decay
    }
}
