use crate::rule::{Elementwise, Slot, range};
use crate::value::Value;

crate::hyper_parameters! {
    /// Limits every element of the gradient.
    ///
    /// ```text
    /// dx' = clamp(dx, -δ, δ)
    /// ```
    ///
    /// NaN stays NaN. torch's counterpart is `clip_grad_value_`.
    pub struct ClipGrad {
        /// δ: the largest absolute value.
        delta: f64 = 10.0 => range::positive,
    }
}

impl Elementwise for ClipGrad {
    type Scalars = f64;
    type Slots<T> = [T; 0];

    fn slots(&self) -> [Slot; 0] {
        []
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.delta
    }

    fn step<V: Value>(delta: f64, _x: V, dx: V, _: &mut [V; 0]) -> V {
        dx.clamp(-delta, delta)
    }
}
