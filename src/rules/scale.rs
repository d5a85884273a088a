use crate::rule::{Elementwise, Slot, range};
use crate::value::Value;

crate::hyper_parameters! {
    /// Multiplies the gradient by a number.
    ///
    /// ```text
    /// dx' = α·dx
    /// ```
    ///
    /// With α = -1 before another rule the objective is maximised, see [`maximise`](crate::maximise).
    ///
    /// # Departures
    /// optax's `scale`. Optimisers.jl has no such rule; torch has `maximize=True` for α = -1.
    pub struct Scale {
        /// α: the factor.
        alpha: f64 = 1.0 => range::finite,
    }
}

impl Elementwise for Scale {
    type Scalars = f64;
    type Slots<T> = [T; 0];

    fn slots(&self) -> [Slot; 0] {
        []
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.alpha
    }

    #[inline(always)]
    fn step<V: Value>(alpha: f64, _x: V, dx: V, _: &mut [V; 0]) -> V {
        dx * alpha
    }
}
