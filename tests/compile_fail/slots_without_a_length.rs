//! The slots of a rule are an array, whose length every loop trusts.

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
    type Slots<T> = Vec<T>;

    fn slots(&self) -> Vec<Slot> {
        Vec::new()
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.eta
    }

    fn step<V: Value>(eta: f64, _x: V, dx: V, _: &mut Vec<V>) -> V {
        dx * eta
    }
}
