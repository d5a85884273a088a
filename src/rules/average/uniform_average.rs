use super::averaged::Averages;
use crate::rule::range;
use crate::rules::rule_by;

crate::hyper_parameters! {
    /// Keeps the mean of the parameter after each step, to evaluate the model with.
    ///
    /// Source: Polyak and Juditsky 1992; stochastic weight averaging, Izmailov et al. 2018,
    /// [arXiv 1803.05407](https://arxiv.org/abs/1803.05407).
    ///
    /// ```text
    /// dx' = dx
    /// average = average + f·((x - dx) - average),   f = 1 up to step `start`, then 1 / (t - start)
    /// ```
    ///
    /// Like [`Ema`](crate::Ema), `UniformAverage` is the last rule of a chain. Masters, evaluation, new
    /// weights and steps in which the parameter does not move are as for `Ema`. The mean leaves out the first
    /// `start` steps, also those after new weights.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Descent, OptimiserChain, UniformAverage, setup, update};
    ///
    /// let x = Var::new(&[4f32], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((Descent::new(1.0), UniformAverage::default())), &x)?;
    /// for gradient in [[1f32], [1.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(x.to_vec1::<f32>()?, [2.0]);
    /// // The mean of 3 and 2.
    /// assert_eq!(state.averages(&x)?[""].to_vec1::<f32>()?, [2.5]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// torch's `swa_utils.AveragedModel` averages whenever the program calls it, usually once per epoch.
    pub struct UniformAverage: Average {
        /// The number of first steps that the mean leaves out.
        start: u64 = 0 => range::any,
    }
}

impl Averages for UniformAverage {
    fn factor(&self, t: u64) -> f64 {
        (t.saturating_sub(self.start).max(1) as f64).recip()
    }

    fn old_weight(&self, t: u64, missed: u64) -> f64 {
        let averaged_steps = t.saturating_sub(self.start) as f64;
        // The factors are 1 - 1 / t = (t - 1) / t, and their product telescopes.
        averaged_steps / (averaged_steps + missed as f64)
    }
}

rule_by!(UniformAverage, super::averaged);
