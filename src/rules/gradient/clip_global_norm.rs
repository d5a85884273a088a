use super::clip_norm::clip_factor;
use crate::error::Result;
use crate::rule::{Flow, Gradient, Kind, NonFinite, Norm, Parameter, Rule, State, range};

crate::hyper_parameters! {
    /// Limits the 2-norm of the gradients of all parameters together.
    ///
    /// Source: Pascanu et al. 2012, [arXiv 1211.5063](https://arxiv.org/abs/1211.5063).
    ///
    /// ```text
    /// dx' = dx·min(1, ω / ‖(dx of every parameter with this rule)‖₂)
    /// ```
    ///
    /// The norm includes all parameters that have this rule and a gradient, after the rules before this one:
    /// after [`AccumGrad`](crate::AccumGrad) the norm is that of the mean. The norm is computed in f64,
    /// reported in [`Outcome::global_norm`](crate::Outcome::global_norm), and costs one more read of the
    /// gradients.
    ///
    /// To give a part of the model a norm of its own, give its parameters a group of their own with
    /// [`setup_with`](crate::setup_with): for example
    /// `ClipGlobalNorm { group: 1, ..ClipGlobalNorm::new(0.5) }` for the paths of an encoder.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{ClipGlobalNorm, Descent, OptimiserChain, setup, update};
    ///
    /// let model = [Var::new(&[0f32], &Device::Cpu)?, Var::new(&[0f32], &Device::Cpu)?];
    /// let mut state = setup(OptimiserChain::new((ClipGlobalNorm::new(2.5), Descent::new(1.0))), &model)?;
    /// let [first, second] = [Tensor::new(&[3f32], &Device::Cpu)?, Tensor::new(&[4f32], &Device::Cpu)?];
    /// let outcome = update(&mut state, &model, &[("0", first), ("1", second)])?;
    /// assert_eq!(outcome.global_norm, Some(5.0));
    /// assert_eq!((model[0].to_vec1::<f32>()?, model[1].to_vec1::<f32>()?), (vec![-1.5], vec![-2.0]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// torch's `clip_grad_norm_` adds 1e-6 to the norm. Optimisers.jl has no such rule.
    pub struct ClipGlobalNorm: Clip {
        /// ω: the largest norm.
        omega: f64 = 1.0 => range::positive,
        /// What happens if the norm is infinite or NaN.
        non_finite: NonFinite = NonFinite::Error => range::any,
        /// The group: parameters whose rules have the same number share one norm.
        group: u64 = 0 => range::any,
    }
}

impl Rule for ClipGlobalNorm {
    fn apply<'a>(&'a self, _state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx.scale_by_norm(
            Norm::new(2.0).of_group(self.group).on_non_finite(self.non_finite),
            clip_factor(self.omega),
        )))
    }

    fn kind(&self) -> Kind {
        Kind::WholeModel
    }

    fn is_divisible(&self) -> bool {
        true
    }
}
