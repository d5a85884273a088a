use super::lion::Lion;
use crate::error::Result;
use crate::rule::{Elementwise, Flow, Gradient, Parameter, Rule, State, range};
use crate::rules::mars;

crate::hyper_parameters! {
    /// MARS-Lion: the sign of the mean of gradients that are corrected by their change, to reduce variance.
    ///
    /// Source: Yuan et al. 2024, [arXiv 2411.10438](https://arxiv.org/abs/2411.10438).
    ///
    /// ```text
    /// c   = dx + γ·β / (1 - β)·(dx - the gradient of the step before)     0 before the first step
    /// c   = c / max(1, ‖c‖)
    /// m   = β·m + (1 - β)·c
    /// dx' = η·(sign(m) + λ·x)
    /// ```
    ///
    /// ‖c‖ is the 2-norm of one parameter's c, in f64, and costs one more read of the gradients.
    /// [`MarsAdamW`](crate::MarsAdamW) is the other form of MARS.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{MarsLion, setup, update};
    ///
    /// // c is 0.57, then 0.7 + 0.9·0.4, which is clipped to 1, then -1: m is 0.285, 0.6425 and -0.17875.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(MarsLion { beta: 0.5, gamma: 0.9, ..MarsLion::new(0.5) }, &x)?;
    /// for (gradient, expected) in [(0.3f32, -0.5), (0.7, -1.0), (-0.3, -0.5)] {
    ///     update(&mut state, &x, &[("", Tensor::new(&[gradient], &Device::Cpu)?)])?;
    ///     assert_eq!(x.to_vec1::<f32>()?, [expected]);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is the authors' `mars_type="mars-lion"` with `is_approx=True` and `optimize_1d=True`. The
    /// rule has one β: with γ = 0 it is [`Lion::signum`](crate::Lion::signum) after clipping to the norm 1,
    /// not [`Lion`](crate::Lion), which has two β. λ is 0 by default. The rule is checked against
    /// pytorch_optimizer's `MARS`. torch, optax and Optimisers.jl have no counterpart.
    pub struct MarsLion: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 3e-3 => range::non_negative,
        /// β: the decay of the momentum.
        beta: f64 = 0.95 => range::decay,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// γ: the weight of the correction.
        gamma: f64 = 0.025 => range::non_negative,
    }
}

impl MarsLion {
    fn signum(&self) -> Lion {
        Lion {
            lambda: self.lambda,
            ..Lion::signum(self.eta, self.beta)
        }
    }
}

impl Rule for MarsLion {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        mars::init(self.signum().slots(), x)
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        mars::apply(self, &self.signum(), self.gamma, self.beta, state, dx)
    }

    fn is_divisible(&self) -> bool {
        true
    }
}
