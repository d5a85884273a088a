use super::adamw::AdamW;
use crate::error::Result;
use crate::rule::{Elementwise, Flow, Gradient, Parameter, Rule, State, range};
use crate::rules::mars;

crate::hyper_parameters! {
    /// MARS-AdamW: AdamW of a gradient that is corrected by its change, to reduce variance.
    ///
    /// Source: Yuan et al. 2024, [arXiv 2411.10438](https://arxiv.org/abs/2411.10438).
    ///
    /// ```text
    /// c   = dx + γ·β₁ / (1 - β₁)·(dx - the gradient of the step before)     0 before the first step
    /// c   = c / max(1, ‖c‖)
    /// m   = β₁·m + (1 - β₁)·c
    /// v   = β₂·v + (1 - β₂)·c²
    /// dx' = η·(m̂ / (√v̂ + ε) + λ·x)                             m̂ = m / (1 - β₁ᵗ),   v̂ = v / (1 - β₂ᵗ)
    /// ```
    ///
    /// ‖c‖ is the 2-norm of one parameter's c, in f64, and costs one more read of the gradients. The authors
    /// train vectors by AdamW with another β: see [a rule for some paths](crate::setup_with).
    /// [`MarsLion`](crate::MarsLion) is the other form of MARS.
    ///
    /// Weight decay is on by default, with λ = 0.01. `MarsAdamW { lambda: 0.0, ..MarsAdamW::new(eta) }`
    /// switches it off.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{MarsAdamW, setup, update};
    ///
    /// // c is 0.3 + 0.5·0.3, then 0.1 + 0.5·(0.1 - 0.3) = 0: only the memory makes the second step, m̂ = 0.15.
    /// let x = Var::new(&[0f64], &Device::Cpu)?;
    /// let mut state = setup(MarsAdamW { beta: (0.5, 0.5), gamma: 0.5, lambda: 0.0, ..MarsAdamW::new(0.3) }, &x)?;
    /// for (gradient, expected) in [(0.3, "[-0.300]"), (0.1, "[-0.473]")] {
    ///     update(&mut state, &x, &[("", Tensor::new(&[gradient], &Device::Cpu)?)])?;
    ///     assert_eq!(format!("{:.3?}", x.to_vec1::<f64>()?), expected);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is the authors' `mars_type="mars-adamw"` with `is_approx=True` and `optimize_1d=True`: the
    /// gradient of the step before is that of the batch before. The exact form computes a second gradient of
    /// each batch. λ is 0.01 by default, as for [`AdamW`](crate::AdamW). The rule is checked against
    /// pytorch_optimizer's `MARS`, except for the second ε of that rule. torch, optax and Optimisers.jl have
    /// no counterpart.
    pub struct MarsAdamW: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 3e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.95, 0.99) => range::decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.01 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// γ: the weight of the correction. With 0 the rule is AdamW after clipping to the norm 1.
        gamma: f64 = 0.025 => range::non_negative,
    }
}

impl MarsAdamW {
    fn adamw(&self) -> AdamW {
        AdamW::coupled(self.eta, self.beta, self.lambda, self.epsilon)
    }
}

impl Rule for MarsAdamW {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        mars::init(self.adamw().slots(), x)
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        mars::apply(self, &self.adamw(), self.gamma, self.beta.0, state, dx)
    }

    fn is_divisible(&self) -> bool {
        true
    }
}
