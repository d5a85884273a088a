use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};
use crate::rules::moments::correction;

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
    /// It is the last of a chain, `OptimiserChain::new((Adam::new(1e-3), Ema::new(0.999)))`, and costs no
    /// pass of its own. What the average starts as:
    ///
    /// - the parameter before the first step, with `start` = 0 and no `debias` (the default): it has the
    ///   weight δᵗ after t steps;
    /// - the weights after step `start`, without `debias`: `start` = 1 is torch's form, and with more the
    ///   first steps are left out;
    /// - nothing, with `debias`: the average is the mean of the weights after each step, weighted by δ to the
    ///   power of their age.
    ///
    /// Inside [`MixedPrecision`](crate::MixedPrecision) it is an average of the masters, in their precision.
    /// [`StateTree::with_averages`](crate::StateTree::with_averages) evaluates the model with it. It starts
    /// anew when the model is given new weights by [`set_masters`](crate::StateTree::set_masters) or
    /// [`refresh_masters`](crate::StateTree::refresh_masters). A frozen parameter takes no steps, and neither
    /// does its average: it stays where it was, and does not come closer to the parameter.
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
    /// torch's `swa_utils.AveragedModel` with `get_ema_avg_fn` copies the model in its first call and
    /// averages from the second on, which is `start` = 1 if it is called after every step; it keeps a second
    /// model. optax's `ema` averages updates.
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
        /// Whether the start has no weight.
        debias: bool = false => range::any,
        /// The step up to which the average is the parameter.
        start: u64 = 0 => range::any,
    }
}

impl Elementwise for Ema {
    type Scalars = f64;
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::average("average")]
    }

    fn scalars(&self, t: u64) -> f64 {
        let own = 1.0 - self.delta;
        match t.saturating_sub(self.start) {
            0 => 1.0,
            averaged if self.debias => own / correction(self.delta, averaged),
            _ => own,
        }
    }

    #[inline(always)]
    fn step<V: Value>(factor: f64, x: V, dx: V, [average]: &mut [V; 1]) -> V {
        approach(factor, x - dx, average);
        dx
    }
}

/// Moves an average towards a new number.
#[inline(always)]
pub(crate) fn approach<V: Value>(factor: f64, new: V, average: &mut V) {
    *average = *average + (new - *average) * factor;
}
