use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// Gradient descent with heavy-ball momentum (Polyak 1964).
    ///
    /// ```text
    /// v   = ρ·v + η·dx
    /// dx' = v
    /// ```
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Momentum, setup, update};
    ///
    /// // v = 1, then 0.5·1 + 1.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(Momentum { rho: 0.5, ..Momentum::new(1.0) }, &x)?;
    /// for gradient in [[1f32], [1.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(x.to_vec1::<f32>()?, [-2.5]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// As in Optimisers.jl, η is part of the velocity. torch's `SGD(momentum)` multiplies the velocity by η:
    /// `v = ρ·v + dx`, `dx' = η·v`. Both forms agree as long as η is constant. A change of η rescales torch's
    /// whole velocity at once; here the gradients of earlier steps keep the old η.
    pub struct Momentum: Step {
        /// η: the learning rate.
        eta: f64 = 0.01 => range::non_negative,
        /// ρ: the decay of the velocity.
        rho: f64 = 0.9 => range::decay,
    }
}

impl Elementwise for Momentum {
    type Scalars = (f64, f64);
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::zeros("velocity")]
    }

    fn scalars(&self, _t: u64) -> (f64, f64) {
        (self.eta, self.rho)
    }

    fn step<V: Value>((eta, rho): (f64, f64), _x: V, dx: V, [v]: &mut [V; 1]) -> V {
        *v = *v * rho + dx * eta;
        *v
    }
}
