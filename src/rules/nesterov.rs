use crate::rule::{Elementwise, Slot, range};
use crate::value::Value;

crate::hyper_parameters! {
    /// Gradient descent with Nesterov momentum (Nesterov 1983, in the form of Sutskever et al. 2013).
    ///
    /// ```text
    /// v   = ρ·v - η·dx
    /// dx' = η·dx - ρ·v
    /// ```
    ///
    /// # Departures
    /// Equal to torch's `SGD(momentum, nesterov=True)` while η is constant; the learning rate is inside the velocity, see
    /// [`Momentum`](crate::Momentum).
    pub struct Nesterov {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// ρ: the decay of the velocity.
        rho: f64 = 0.9 => range::decay,
    }
}

impl Elementwise for Nesterov {
    type Scalars = (f64, f64);
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::zeros("displacement")]
    }

    fn scalars(&self, _t: u64) -> (f64, f64) {
        (self.eta, self.rho)
    }

    fn step<V: Value>((eta, rho): (f64, f64), _x: V, dx: V, [v]: &mut [V; 1]) -> V {
        *v = *v * rho - dx * eta;
        dx * eta - *v * rho
    }
}
