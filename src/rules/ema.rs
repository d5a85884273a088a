use crate::rule::{Elementwise, Slot, range};
use crate::value::Value;

crate::hyper_parameters! {
    /// Keeps an exponential moving average of the parameter, to evaluate the model with.
    ///
    /// ```text
    /// dx' = dx
    /// average = average + f·((x - dx) - average),   f = 1 - δ,   or (1 - δ) / (1 - δᵗ) with `debias`
    /// ```
    ///
    /// It is the last of a chain, `OptimiserChain::new((Adam::new(1e-3), Ema::new(0.999)))`, and costs no pass of its own. The average starts as the
    /// parameter; with `debias` it is the mean of the weights after each step, weighted by δ to the power of their age. Inside
    /// [`MixedPrecision`](crate::MixedPrecision) it is an average of the masters, in their precision.
    /// [`StateTree::swap_in_averages`](crate::StateTree::swap_in_averages) puts it into the model and takes it out again. It starts anew where the
    /// model is given new weights by [`set_masters`](crate::StateTree::set_masters) or [`refresh_masters`](crate::StateTree::refresh_masters).
    ///
    /// # Departures
    /// torch's `swa_utils.AveragedModel` with `get_ema_avg_fn` is the form without `debias`, in a second model. optax's `ema` averages updates.
    pub struct Ema {
        /// The decay of the average δ.
        delta: f64 = 0.999 => range::decay,
        /// Whether the start has no weight.
        debias: bool = false => range::any,
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
        if self.debias { own / (1.0 - self.delta.powf(t as f64)) } else { own }
    }

    #[inline(always)]
    fn step<V: Value>(factor: f64, x: V, dx: V, [average]: &mut [V; 1]) -> V {
        approach(factor, x - dx, average);
        dx
    }
}

/// Moves an average towards a new number.
#[inline(always)]
pub(super) fn approach<V: Value>(factor: f64, new: V, average: &mut V) {
    *average = *average + (new - *average) * factor;
}
