use crate::error::Result;
use crate::rule::{Flow, Gradient, Kind, NonFinite, Norm, Parameter, Rule, State, range};

crate::hyper_parameters! {
    /// Skips a call if the norm of all its gradients is far above the norms of earlier calls.
    ///
    /// A batch that would cause a spike of the loss then has no effect. Source: OLMo et al. 2024,
    /// [arXiv 2501.00656](https://arxiv.org/abs/2501.00656).
    ///
    /// ```text
    /// norm  = ‖(dx of every parameter with this rule)‖₂
    /// limit = mean + σ·max(deviation, 10⁻⁶·mean)      of the last n norms;
    ///         none with fewer than min(n, max(20, n/2) - 1)
    /// norm > limit:  nothing moves
    /// ```
    ///
    /// The deviation is that of a sample (divided by one less than the number of norms). As in
    /// [`ClipGlobalNorm`](crate::ClipGlobalNorm), the norm is that of the gradients after the rules before
    /// this one, in f64 and without the loss scale. The two rules share nothing: a parameter can have one of
    /// them without the other. The norm costs one more read of the gradients.
    ///
    /// The reason of a [skipped](crate::Outcome::skipped) call is [`Outlier`](crate::SkipReason::Outlier),
    /// which has norm and limit. Parameters, state, counters and schedules stay as they are.
    ///
    /// # Which norms count
    /// Every finite norm counts, also that of a skipped call. Otherwise a training whose norms have risen for
    /// good would never go on. The limit therefore rises with each outlier. With the defaults, at most four
    /// outliers of one size in a row are skipped, however large they are.
    ///
    /// A call with an infinite number or NaN does not count. This rule or a [`LossScaler`](crate::LossScaler)
    /// skips it as [`NotFinite`](crate::SkipReason::NotFinite). Each group has norms of its own. If the norm
    /// of one group is an outlier, the norms of all groups in this call still count.
    ///
    /// The norms belong to the state as a whole, not to a leaf. While a parameter is frozen or has no
    /// gradient, the norms do not include it. Checkpoints contain the norms, and all
    /// [ranks](crate::Setup::over) have the same norms.
    ///
    /// # With accumulation
    /// After [`AccumGrad`](crate::AccumGrad) the norm is that of the mean. If this norm is an outlier, all
    /// windows begin anew with the next call. Before `AccumGrad` each micro-batch has a norm of its own. If
    /// this norm is an outlier, the micro-batch is not collected, and its window needs one more micro-batch.
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
    /// The statistic is that of OLMo-core's `SkipStepOptimizer`, with whose formula it was compared.
    /// OLMo-core also judges losses, and in some versions skips a norm far below the others. If the last n
    /// norms are equal, OLMo-core finds any other norm an outlier. If n is 40 or more, OLMo-core waits for
    /// the same number of norms as this rule. For a smaller n its older form waits for 19 norms, hence never
    /// judges if n < 19; its newer form waits for max(2, n/2) - 1. llm.c includes the judged norm in mean and
    /// deviation. torch, optax and Optimisers.jl have no such rule; optax's `apply_if_finite` only skips
    /// gradients that are not finite.
    pub struct SkipOutliers {
        /// σ: how many standard deviations above the mean a norm may be.
        sigma: f64 = 6.0 => range::positive,
        /// n: the number of last norms with which a norm is compared.
        window: u64 = 128 => from_2_to_65536,
        /// The group: parameters whose rules have the same number share one norm.
        group: u64 = 0 => range::any,
    }
}

/// Limits the window, because each checkpoint contains all norms of the window.
fn from_2_to_65536(window: u64) -> Option<&'static str> {
    (!(2..=65536).contains(&window)).then_some("a count from 2 to 65536")
}

impl Rule for SkipOutliers {
    fn apply<'a>(&'a self, _state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let norm = Norm::new(2.0)
            .of_group(self.group)
            .on_non_finite(NonFinite::Skip)
            .limited(self.sigma, self.window as usize);
        // The factor is 1, because the norm only decides whether the call is skipped.
        Ok(Flow::Step(dx.scale_by_norm(norm, |_| 1.0)))
    }

    fn kind(&self) -> Kind {
        Kind::WholeModel
    }

    fn is_divisible(&self) -> bool {
        true
    }
}
