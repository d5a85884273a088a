use candle_core::Tensor;

use super::momentum::Momentum;
use super::weight_decay::WeightDecay;
use crate::error::Result;
use crate::rule::{Elementwise, Flow, Gradient, Norms, Rule, State, counting, range};

crate::hyper_parameters! {
    /// LARS (You, Gitman and Ginsburg 2017, [arXiv 1708.03888](https://arxiv.org/abs/1708.03888)): momentum whose step is as long, for
    /// each tensor, as a part of that tensor. For large batches.
    ///
    /// ```text
    /// u   = dx + λ·x
    /// v   = ρ·v + η·r·u,   r = trust·‖x‖ / ‖u‖, or 1 where ‖x‖ or ‖u‖ is 0
    /// dx' = v
    /// ```
    ///
    /// The norms are 2-norms of one parameter, in f64. They cost one more read of parameter and gradient. Biases and norms are usually given
    /// [a rule of their own](crate::setup_with).
    ///
    /// # Departures
    /// optax's `lars`. The paper has ‖dx‖ + λ·‖x‖ in place of ‖u‖. torch and Optimisers.jl have no counterpart.
    pub struct LARS {
        /// The learning rate η.
        eta: f64 = 1.0 => range::non_negative,
        /// The decay of the velocity ρ.
        rho: f64 = 0.9 => range::decay,
        /// The weight decay λ.
        lambda: f64 = 0.0 => range::non_negative,
        /// How long a step is, as a part of the parameter.
        trust: f64 = 1e-3 => range::non_negative,
    }
}

/// `eta`·`trust`·‖x‖ / ‖u‖, or `eta` if one of the norms is 0.
pub(super) fn trust_ratio(eta: f64, trust: f64) -> impl FnOnce(Norms) -> f64 {
    move |Norms { parameter, gradient }| {
        let ratio = if gradient > 0.0 { parameter * trust / gradient } else { 1.0 };
        (if parameter > 0.0 { ratio } else { 1.0 }) * eta
    }
}

impl LARS {
    fn momentum(&self) -> Momentum {
        Momentum { eta: self.eta, rho: self.rho }
    }
}

impl Rule for LARS {
    fn init(&self, x: &Tensor) -> Result<State> {
        State::for_slots(x, &self.momentum().slots())
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let State { tensors, counters, .. } = state;
        let (dx, t) = dx.next_step(counting(self, counters)?);
        let decayed = dx.step_of(&WeightDecay::new(self.lambda), t, &mut []);
        let trusted = decayed.scale_by_norms(trust_ratio(1.0, self.trust));
        Ok(Flow::Step(trusted.step_of(&self.momentum(), t, tensors)))
    }
}
