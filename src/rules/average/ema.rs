use super::averaged::Averages;
use crate::rule::range;
use crate::rules::moments::correction;
use crate::rules::rule_by;

crate::hyper_parameters! {
    /// Keeps an exponential moving average of the parameter, to evaluate the model with.
    ///
    /// ```text
    /// dx' = dx
    /// average = average + f·((x - dx) - average)
    ///
    /// f = 1                         up to step `start`
    /// f = 1 - δ                     after it
    /// f = (1 - δ) / (1 - δᵗ)        after it with `debias`, t counted from `start`
    /// ```
    ///
    /// `Ema` is the last rule of a chain, `OptimiserChain::new((Adam::new(1e-3), Ema::new(0.999)))`, and
    /// costs no pass of its own. The fields decide what the average starts as:
    ///
    /// - With `start` = 0 and no `debias` (the default), the average starts as the parameter before the first
    ///   step, which has the weight δᵗ after t steps.
    /// - With a larger `start` and no `debias`, the average starts as the weights after step `start`. A
    ///   `start` of 1 is torch's form, and a larger `start` leaves out the first steps.
    /// - With `debias`, the average has no start: it is the mean of the weights after each step, weighted by
    ///   δ to the power of their age.
    ///
    /// Inside [`MixedPrecision`](crate::MixedPrecision) the average is that of the masters, in their
    /// precision. [`StateTree::with_averages`](crate::StateTree::with_averages) evaluates the model with the
    /// average. An `Ema` with δ = 1-τ is a [target network](crate::guide::recipes#several-networks). If
    /// [`set_masters`](crate::StateTree::set_masters) or
    /// [`refresh_masters`](crate::StateTree::refresh_masters) gives the model new weights, the average starts
    /// anew.
    ///
    /// t counts the steps of the model. If the parameter does not move in a step, because it is frozen or has
    /// no gradient, the average still comes closer to the parameter. Such a step only raises the counter
    /// `missed` of the state. The next step that moves the parameter, or an evaluation, makes up for all
    /// missed steps, with the δ that the rule has then.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Descent, Ema, OptimiserChain, setup, update};
    ///
    /// let x = Var::new(&[4f32], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((Descent::new(1.0), Ema::new(0.5))), &x)?;
    /// for gradient in [[1f32], [1.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(x.to_vec1::<f32>()?, [2.0]);
    /// // 4, then (4 + 3) / 2, then (3.5 + 2) / 2.
    /// assert_eq!(state.with_averages(&x, || x.to_vec1::<f32>())?, [2.75]);
    /// assert_eq!(x.to_vec1::<f32>()?, [2.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// torch's `swa_utils.AveragedModel` with `get_ema_avg_fn` keeps a second model. Its first call copies
    /// the model, and later calls average: with a call after every step, the average is that of a `start` of
    /// 1. optax's `ema` averages updates.
    ///
    /// ```
    /// use optimisers::Ema;
    ///
    /// let torch = Ema { start: 1, ..Ema::new(0.999) };
    /// # assert!(!torch.debias);
    /// ```
    pub struct Ema: Average {
        /// δ: the decay of the average.
        delta: f64 = 0.999 => range::decay,
        /// Whether only the weights after steps are averaged, so that the start has no weight.
        debias: bool = false => range::any,
        /// The step up to which the average is a copy of the parameter.
        start: u64 = 0 => range::any,
    }
}

impl Averages for Ema {
    fn factor(&self, t: u64) -> f64 {
        let factor = 1.0 - self.delta;
        match t.saturating_sub(self.start) {
            0 => 1.0,
            averaged_steps if self.debias => factor / correction(self.delta, averaged_steps),
            _ => factor,
        }
    }

    fn old_weight(&self, t: u64, missed: u64) -> f64 {
        let (averaged_steps, decay) = (t.saturating_sub(self.start), self.delta.powf(missed as f64));
        match averaged_steps {
            // Step t + 1 copies the parameter, so the old average has no weight.
            _ if t < self.start => 0.0,
            // The factors are 1 - f = δ·(1 - δᵗ⁻¹) / (1 - δᵗ), and their product telescopes.
            _ if self.debias => {
                decay * correction(self.delta, averaged_steps)
                    / correction(self.delta, averaged_steps + missed)
            }
            _ => decay,
        }
    }
}

rule_by!(Ema, super::averaged);
