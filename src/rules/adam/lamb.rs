use super::adamw::AdamW;
use crate::error::Result;
use crate::rule::{Elementwise, Flow, Gradient, Norm, Parameter, Parts, Rule, State, range};
use crate::rules::descent::lars::trust_ratio;

crate::hyper_parameters! {
    /// LAMB: AdamW with steps whose norm is η times the parameter's norm.
    ///
    /// LAMB is made for large batches. Source: You et al. 2019, [arXiv
    /// 1904.00962](https://arxiv.org/abs/1904.00962).
    ///
    /// ```text
    /// u   = m̂ / (√v̂ + ε) + λ·x         with the moments of Adam
    /// dx' = η·r·u,   r = ‖x‖ / ‖u‖, or 1 where the square of either is 0
    /// ```
    ///
    /// The norms are 2-norms of one parameter, in f64. Their squares are compared with 0 in the dtype of the
    /// arithmetic: in f32 a norm below 2.6e-23 counts as 0, because m has no useful direction long after
    /// gradients have vanished. The norms cost one more read of parameter, gradient and state. Biases and
    /// normalisation layers usually get [a rule of their own](crate::setup_with).
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{LAMB, setup, update};
    ///
    /// // ‖x‖ = 5, so the step is η·5 = 0.5 long, whatever the size of the gradient.
    /// let x = Var::new(&[3f32, 4.0], &Device::Cpu)?;
    /// let mut state = setup(LAMB::new(0.1), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[100f32, 0.0], &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[2.500, 4.000]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is optax's `lamb`: the paper's φ is the identity, and the moments are bias-corrected.
    /// pytorch_optimizer's rule applies the trust ratio, and also divides η by 1 - β₁ᵗ. torch and
    /// Optimisers.jl have no counterpart.
    pub struct LAMB: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// λ: the weight decay.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-6 => range::non_negative,
    }
}

impl LAMB {
    /// AdamW with η = 1, whose step is u.
    fn direction(&self) -> AdamW {
        AdamW::coupled(1.0, self.beta, self.lambda, self.epsilon)
    }
}

impl Rule for LAMB {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::for_slots(x, &self.direction().slots())
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { slots, counters, .. } = state.parts();
        let (dx, t) = dx.next_step(counters)?;
        let direction = dx.step_of(&self.direction(), t, slots);
        Ok(Flow::Step(direction.scale_by_norm(
            Norm::new(2.0).with_parameter(),
            trust_ratio(self.eta, 1.0),
        )))
    }

    fn is_divisible(&self) -> bool {
        true
    }
}
