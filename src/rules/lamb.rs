use candle_core::Tensor;

use super::adamw::AdamW;
use super::lars::trust_ratio;
use crate::error::Result;
use crate::rule::{Elementwise, Flow, Gradient, Rule, State, counting, range};

crate::hyper_parameters! {
    /// LAMB (You et al. 2019, [arXiv 1904.00962](https://arxiv.org/abs/1904.00962)): AdamW whose step is as long, for each tensor, as a part
    /// of that tensor. For large batches.
    ///
    /// ```text
    /// u   = m̂ / (√v̂ + ε) + λ·x         with the moments of Adam
    /// dx' = η·r·u,   r = ‖x‖ / ‖u‖, or 1 where either is 0
    /// ```
    ///
    /// The norms are 2-norms of one parameter, in f64. They cost one more read of parameter, gradient and state. Biases and norms are usually
    /// given [a rule of their own](crate::setup_with).
    ///
    /// # Departures
    /// optax's `lamb`: the paper's φ is the identity, and the moments are corrected. torch and Optimisers.jl have no counterpart.
    pub struct LAMB {
        /// The learning rate η.
        eta: f64 = 1e-3 => range::non_negative,
        /// The decays of the first and second moment β₁, β₂.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// The weight decay λ.
        lambda: f64 = 0.0 => range::non_negative,
        /// Keeps the denominator from zero ε.
        epsilon: f64 = 1e-6 => range::non_negative,
    }
}

impl LAMB {
    fn direction(&self) -> AdamW {
        AdamW { eta: 1.0, beta: self.beta, lambda: self.lambda, epsilon: self.epsilon, couple: true }
    }
}

impl Rule for LAMB {
    fn init(&self, x: &Tensor) -> Result<State> {
        State::for_slots(x, &self.direction().slots())
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let State { tensors, counters, .. } = state;
        let (dx, t) = dx.next_step(counting(self, counters)?);
        let direction = dx.step_of(&self.direction(), t, tensors);
        Ok(Flow::Step(direction.scale_by_norms(trust_ratio(self.eta, 1.0))))
    }
}
