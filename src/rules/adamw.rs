use super::adam::{AdamScalars, direction};
use crate::rule::{Elementwise, Slot, range};
use crate::value::Value;

crate::hyper_parameters! {
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2017, [arXiv 1711.05101](https://arxiv.org/abs/1711.05101)).
    ///
    /// ```text
    /// dx' = η·(m̂ / (√v̂ + ε) + λ·x)     couple = true
    /// dx' = η·m̂ / (√v̂ + ε) + λ·x       couple = false
    /// ```
    ///
    /// with the moments of [`Adam`](crate::Adam).
    ///
    /// # Departures
    /// λ is 0 by default, as in Optimisers.jl; torch's default is 0.01. `couple = true` is torch's `AdamW`; `couple = false` is the
    /// paper's, where the decay does not follow the learning rate.
    pub struct AdamW {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// λ: the weight decay.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// Whether the decay is multiplied by the learning rate.
        couple: bool = true => range::any,
    }
}

impl Elementwise for AdamW {
    type Scalars = (AdamScalars, f64);
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [Slot::zeros("m"), Slot::zeros("v").second_moment()]
    }

    fn scalars(&self, t: u64) -> Self::Scalars {
        let decay = if self.couple { self.eta * self.lambda } else { self.lambda };
        (AdamScalars::new(self.eta, self.beta, self.epsilon, t), decay)
    }

    #[inline(always)]
    fn step<V: Value>((k, decay): Self::Scalars, x: V, dx: V, moments: &mut [V; 2]) -> V {
        direction(k, dx, moments) + x * decay
    }
}
