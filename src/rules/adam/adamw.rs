use super::adam::AdamScalars;
use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};
use crate::rules::moments::t_for_correction;

crate::hyper_parameters! {
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2017,
    /// [arXiv 1711.05101](https://arxiv.org/abs/1711.05101)).
    ///
    /// ```text
    /// dx' = η·(m̂ / (√v̂ + ε) + λ·x)     couple = true
    /// dx' = η·m̂ / (√v̂ + ε) + λ·x       couple = false
    /// ```
    ///
    /// with the moments of [`Adam`](crate::Adam). λ is 0.01 by default, as in torch and candle-nn, so
    /// parameters decay. With λ = 0 (`AdamW { lambda: 0.0, ..AdamW::new(eta) }`) the rule is
    /// [`Adam`](crate::Adam). AdamC, whose decay is corrected for a schedule, is
    /// [`DecoupledDecay::corrected`](crate::DecoupledDecay::corrected) around [`Adam`](crate::Adam).
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AdamW, setup, update};
    ///
    /// // With a gradient of 0 only the decay changes the parameter, by the factor 1 - η·λ.
    /// let x = Var::new(&[1f32], &Device::Cpu)?;
    /// let mut state = setup(AdamW { lambda: 0.5, ..AdamW::new(0.5) }, &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[0f32], &Device::Cpu)?)])?;
    /// assert_eq!(x.to_vec1::<f32>()?, [0.75]);
    /// assert_eq!(AdamW::new(0.5).lambda, 0.01);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// Optimisers.jl's default λ is 0. `couple = true` is torch's `AdamW`; `couple = false` is the
    /// paper's, where the decay does not follow the learning rate.
    pub struct AdamW: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// λ: the weight decay.
        lambda: f64 = 0.01 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// Whether the decay is multiplied by the learning rate.
        couple: bool = true => range::any,
        /// Whether the moments are corrected for their start at 0; bullet's `AdamW` does not correct them.
        bias_correction: bool = true => range::any,
    }
}

impl AdamW {
    /// AdamW as a part of another rule: the decay follows the learning rate, and the moments are corrected.
    pub(crate) fn coupled(eta: f64, beta: (f64, f64), lambda: f64, epsilon: f64) -> Self {
        AdamW {
            eta,
            beta,
            lambda,
            epsilon,
            ..AdamW::default()
        }
    }
}

impl Elementwise for AdamW {
    type Scalars = (AdamScalars, f64);
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [Slot::zeros("m"), Slot::zeros("v").second_moment()]
    }

    fn scalars(&self, t: u64) -> Self::Scalars {
        let decay = if self.couple {
            self.eta * self.lambda
        } else {
            self.lambda
        };
        let t = t_for_correction(t, self.bias_correction);
        (AdamScalars::new(self.eta, self.beta, self.epsilon, t), decay)
    }

    #[inline(always)]
    fn step<V: Value>((k, decay): Self::Scalars, x: V, dx: V, [m, v]: &mut [V; 2]) -> V {
        k.step(dx, m, v) + x * decay
    }
}
