use super::momentum::Momentum;
use crate::error::Result;
use crate::numbers::has_square;
use crate::rule::{Elementwise, Flow, Gradient, Norm, Norms, Parameter, Parts, Rule, State, range};
use crate::rules::gradient::weight_decay::with_decay;

crate::hyper_parameters! {
    /// LARS: momentum of steps whose norm is a fixed fraction of the parameter's norm.
    ///
    /// LARS is made for large batches. Source: You, Gitman and Ginsburg 2017, [arXiv
    /// 1708.03888](https://arxiv.org/abs/1708.03888).
    ///
    /// ```text
    /// u   = dx + λ·x
    /// v   = ρ·v + η·r·u,   r = trust·‖x‖ / ‖u‖, or 1 where ‖x‖² or ‖u‖² is 0
    /// dx' = v
    /// ```
    ///
    /// The norms are 2-norms of one parameter, in f64. Their squares are compared with 0 in the dtype of the
    /// arithmetic: in f32 a norm below 2.6e-23 counts as 0, because a gradient that has almost vanished has
    /// no useful direction. The norms cost one more read of parameter and gradient. Biases and normalisation
    /// layers usually get [a rule of their own](crate::setup_with).
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{LARS, setup, update};
    ///
    /// // ‖x‖ = 5, so the step is trust·5 = 1 long, whatever the size of the gradient.
    /// let x = Var::new(&[3f32, 4.0], &Device::Cpu)?;
    /// let mut state = setup(LARS { trust: 0.2, ..LARS::new(1.0) }, &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[0f32, 100.0], &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[3.000, 3.000]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is optax's `lars`. The paper has ‖dx‖ + λ·‖x‖ instead of ‖u‖. torch and Optimisers.jl have no
    /// counterpart.
    pub struct LARS: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1.0 => range::non_negative,
        /// ρ: the decay of the velocity.
        rho: f64 = 0.9 => range::decay,
        /// λ: the weight decay.
        lambda: f64 = 0.0 => range::non_negative,
        /// The norm of r·u, as a fraction of the parameter's norm.
        trust: f64 = 1e-3 => range::non_negative,
    }
}

/// `eta`·`trust`·‖x‖ / ‖u‖, or `eta` if the square of one of the norms is 0 in the dtype of the arithmetic.
pub(crate) fn trust_ratio(eta: f64, trust: f64) -> impl FnOnce(Norms) -> f64 {
    move |Norms {
              parameter,
              gradient,
              compute,
              ..
          }| {
        let has_both = has_square(parameter, compute) && has_square(gradient, compute);
        (if has_both {
            parameter * trust / gradient
        } else {
            1.0
        }) * eta
    }
}

impl LARS {
    fn momentum(&self) -> Momentum {
        Momentum {
            eta: self.eta,
            rho: self.rho,
        }
    }
}

impl Rule for LARS {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::for_slots(x, &self.momentum().slots())
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { slots, counters, .. } = state.parts();
        let (dx, t) = dx.next_step(counters)?;
        let trusted = with_decay(dx, self.lambda)
            .scale_by_norm(Norm::new(2.0).with_parameter(), trust_ratio(1.0, self.trust));
        Ok(Flow::Step(trusted.step_of(&self.momentum(), t, slots)))
    }

    fn is_divisible(&self) -> bool {
        true
    }
}
