//! A rule has as many names of slots as its arithmetic has slots.

use optimisers::{Elementwise, Slot, hyper_parameters, range, value::Value};

hyper_parameters! {
    /// A rule.
    pub struct Own {
        /// A number.
        eta: f64 = 0.1 => range::any,
    }
}

impl Elementwise for Own {
    type Scalars = f64;
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [Slot::zeros("m")]
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.eta
    }

    fn step<V: Value>(eta: f64, _x: V, dx: V, [m, _v]: &mut [V; 2]) -> V {
        *m = dx;
        dx * eta
    }
}
