use crate::error::Result;
use crate::rule::{Flow, Gradient, Kind, NonFinite, Norm, Parameter, Rule, State, range};

crate::hyper_parameters! {
    /// Skips a call whose gradients together have a norm far above those of the calls before.
    ///
    /// So a batch that would bring about a spike of the loss has no effect. Source: OLMo et al. 2024,
    /// [arXiv 2501.00656](https://arxiv.org/abs/2501.00656).
    ///
    /// ```text
    /// norm  = ‖(dx of every parameter with this rule)‖₂
    /// limit = mean + σ·max(deviation, 10⁻⁶·mean)      of the last n norms;
    ///         none with fewer than min(n, max(20, n/2) - 1)
    /// norm > limit:  nothing moves
    /// ```
    ///
    /// The deviation is that of a sample (divided by one less than the number of norms). The norm runs over
    /// gradients as the rules before left them, in f64 and without the loss scale, as that of
    /// [`ClipGlobalNorm`](crate::ClipGlobalNorm). The two share nothing: parameters that have the one rule
    /// need not have the other. It costs one more read of the gradients.
    ///
    /// A call is [skipped](crate::Outcome::skipped) for an [`Outlier`](crate::SkipReason::Outlier), which has
    /// norm and limit. Parameters, state, counters and schedules stay.
    ///
    /// # What counts as a norm before
    /// Every finite norm counts, that of a skipped call too. Were it left out, a training whose norms have
    /// risen for good would never go on. So the limit rises with each outlier. With the defaults the fifth in
    /// a row of one size is taken at the latest, however large it is.
    ///
    /// A call with a number that is infinite or NaN does not count. This rule or a
    /// [`LossScaler`](crate::LossScaler) skips it as [`NotFinite`](crate::SkipReason::NotFinite). Each group
    /// has norms of its own, and all norms of a call count, whichever makes it an outlier.
    ///
    /// The norms belong to the state as a whole, not to a leaf: a frozen parameter, or one without a
    /// gradient, has no part in them meanwhile. Checkpoints have them, and over [ranks](crate::Setup::over)
    /// all have the same.
    ///
    /// # With accumulation
    /// Behind [`AccumGrad`](crate::AccumGrad) the norm is that of the mean. If an outlier's norm is of what
    /// windows collected, all windows begin anew with the next call. Before `AccumGrad` each micro-batch has
    /// its norm. One that is an outlier does not count, so its window needs one more.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AdamW, ClipGlobalNorm, OptimiserChain, SkipOutliers, SkipReason, setup, update};
    ///
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let rule = OptimiserChain::new((SkipOutliers { window: 32, ..SkipOutliers::default() }, ClipGlobalNorm::new(1.0), AdamW::new(1e-3)));
    /// let mut state = setup(rule, &x)?;
    /// for call in 0..40 {
    ///     let norm = if call == 30 { 50.0 } else { 1.0 + 0.1 * (call % 3) as f32 };
    ///     let outcome = update(&mut state, &x, &[("", Tensor::new(&[norm], &Device::Cpu)?)])?;
    ///     assert_eq!(outcome.has_stepped(), call != 30);
    ///     if let Some(SkipReason::Outlier(outlier)) = outcome.skipped() {
    ///         assert_eq!(outlier.norm, 50.0);
    ///         assert!(outlier.limit < 2.0);
    ///     }
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The statistic is that of OLMo-core's `SkipStepOptimizer`, and compared with its formula. There, some
    /// versions skip a norm far below the others, losses are judged in the same way, and any other norm is an
    /// outlier in a window of equal ones. It waits for as many norms from n = 40 on. In a shorter window its
    /// older form waits for 19, so one of fewer than 19 never judges; its newer form waits for max(2,
    /// n/2) - 1. llm.c counts the norm that is judged among those that it is judged by. torch, optax and
    /// Optimisers.jl have no such rule; optax's `apply_if_finite` is about what is not finite.
    pub struct SkipOutliers {
        /// σ: how many standard deviations above the mean a norm may be.
        sigma: f64 = 6.0 => range::positive,
        /// n: how many of the last norms a norm is compared with.
        window: u64 = 128 => enough,
        /// The group: parameters whose rules have the same number share one norm.
        group: u64 = 0 => range::any,
    }
}

/// Limited, as each checkpoint has all of the norms.
fn enough(window: u64) -> Option<&'static str> {
    (!(2..=65536).contains(&window)).then_some("a count from 2 to 65536")
}

impl Rule for SkipOutliers {
    fn apply<'a>(&'a self, _state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let norm = Norm::new(2.0)
            .of_group(self.group)
            .on_non_finite(NonFinite::Skip)
            .limited(self.sigma, self.window as usize);
        Ok(Flow::Step(dx.scale_by_norm(norm, |_| 1.0)))
    }

    fn kind(&self) -> Kind {
        Kind::WholeModel
    }

    fn is_divisible(&self) -> bool {
        true
    }
}
