use crate::error::Result;
use crate::rule::{Flow, Gradient, NonFinite, Norm, Norms, Parameter, Rule, State, range};

crate::hyper_parameters! {
    /// Limits the p-norm of each parameter's gradient (Pascanu et al. 2012,
    /// [arXiv 1211.5063](https://arxiv.org/abs/1211.5063)).
    ///
    /// ```text
    /// dx' = dx·min(1, ω / ‖dx‖ₚ)
    /// ```
    ///
    /// The norm is that of one parameter's gradient after the rules before this one, in f64. The norm costs
    /// one more read of the gradient, and of the state of the rules before this one. An exponent other than
    /// 1, 2 and infinity costs two reads, because all elements are first divided by the largest element, so
    /// that their powers neither overflow nor vanish. For one norm of all gradients see
    /// [`ClipGlobalNorm`](crate::ClipGlobalNorm).
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{ClipNorm, Descent, OptimiserChain, setup, update};
    ///
    /// // The norm of 5 is halved.
    /// let x = Var::new(&[0f32, 0.0], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((ClipNorm::new(2.5), Descent::new(1.0))), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[3f32, 4.0], &Device::Cpu)?)])?;
    /// assert_eq!(x.to_vec1::<f32>()?, [-1.5, -2.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// torch's `clip_grad_norm_` takes the norm of all parameters and adds 1e-6 to it. Optimisers.jl's
    /// `throw = false` is `non_finite: NonFinite::Pass`.
    pub struct ClipNorm: Clip {
        /// ω: the largest norm.
        omega: f64 = 10.0 => range::positive,
        /// p: the exponent, which is 1, 2, infinity or any positive number.
        p: f64 = 2.0 => range::positive,
        /// What happens if the norm is infinite or NaN.
        non_finite: NonFinite = NonFinite::Error => range::any,
    }
}

/// The function from a norm to the factor that reduces the norm to `omega`: 0 for an infinite norm, NaN for
/// NaN.
pub(crate) fn clip_factor(omega: f64) -> impl FnOnce(Norms) -> f64 {
    move |norms| {
        if norms.gradient <= omega {
            1.0
        } else {
            omega / norms.gradient
        }
    }
}

impl Rule for ClipNorm {
    fn apply<'a>(&'a self, _state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx.scale_by_norm(
            Norm::new(self.p).on_non_finite(self.non_finite),
            clip_factor(self.omega),
        )))
    }

    fn is_divisible(&self) -> bool {
        true
    }
}
