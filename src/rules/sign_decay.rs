use crate::rule::{Elementwise, Slot, range};
use crate::value::Value;

crate::hyper_parameters! {
    /// Adds the gradient of λ·‖x‖₁ (L1 regularisation).
    ///
    /// ```text
    /// dx' = dx + λ·sign(x),   sign(0) = 0
    /// ```
    ///
    /// torch has no counterpart.
    pub struct SignDecay {
        /// λ: the weight decay.
        lambda: f64 = 1e-3 => range::non_negative,
    }
}

impl Elementwise for SignDecay {
    type Scalars = f64;
    type Slots<T> = [T; 0];

    fn slots(&self) -> [Slot; 0] {
        []
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.lambda
    }

    fn step<V: Value>(lambda: f64, x: V, dx: V, _: &mut [V; 0]) -> V {
        dx + x.sign() * lambda
    }
}
