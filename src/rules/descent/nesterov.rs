use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// Gradient descent with Nesterov momentum (Nesterov 1983, in the form of Sutskever et al. 2013).
    ///
    /// ```text
    /// v   = ρ·v - η·dx
    /// dx' = η·dx - ρ·v
    /// ```
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Nesterov, setup, update};
    ///
    /// // v = -1, dx' = 1.5; then v = -1.5, dx' = 1.75.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(Nesterov { rho: 0.5, ..Nesterov::new(1.0) }, &x)?;
    /// for gradient in [[1f32], [1.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(x.to_vec1::<f32>()?, [-3.25]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule equals torch's `SGD(momentum, nesterov=True)` as long as η is constant. η is part of the
    /// velocity: see [`Momentum`](crate::Momentum).
    pub struct Nesterov: Step {
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
