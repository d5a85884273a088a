use crate::rule::{Elementwise, Slot, range};
use crate::value::Value;

crate::hyper_parameters! {
    /// Gradient descent.
    ///
    /// ```text
    /// dx' = η·dx
    /// ```
    ///
    /// The same as torch's `SGD` without momentum.
    pub struct Descent {
        /// η: the learning rate.
        eta: f64 = 0.1 => range::non_negative,
    }
}

impl Elementwise for Descent {
    type Scalars = f64;
    type Slots<T> = [T; 0];

    fn slots(&self) -> [Slot; 0] {
        []
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.eta
    }

    fn step<V: Value>(eta: f64, _x: V, dx: V, _: &mut [V; 0]) -> V {
        dx * eta
    }
}
