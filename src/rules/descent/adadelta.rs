use crate::numbers::value::{Value, above_zero};
use crate::rule::{Elementwise, Slot, range};
use crate::rules::moments::decayed;

crate::hyper_parameters! {
    /// AdaDelta (Zeiler 2012, [arXiv 1212.5701](https://arxiv.org/abs/1212.5701)), which needs no learning
    /// rate.
    ///
    /// ```text
    /// v   = ρ·v + (1 - ρ)·dx²
    /// dx' = dx·√(u + ε) / √(v + ε)
    /// u   = ρ·u + (1 - ρ)·dx'²
    /// ```
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AdaDelta, setup, update};
    ///
    /// // The scale of the loss does not matter. The first step is √(ε / (1 - ρ)).
    /// let x = Var::new(&[0f64, 0.0], &Device::Cpu)?;
    /// let mut state = setup(AdaDelta::new(0.9), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[1f64, 1000.0], &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.6?}", x.to_vec1::<f64>()?), "[-0.000316, -0.000316]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// Defaults are those of Optimisers.jl; torch multiplies dx' by a learning rate, 1 by default, and its ε
    /// is 1e-6.
    pub struct AdaDelta: AdaptiveStep {
        /// ρ: the decay of both means.
        rho: f64 = 0.9 => range::decay,
        /// ε: keeps the denominator from zero, and the steps too: with ε = 0 each step would be 0.
        epsilon: f64 = 1e-8 => range::finite_positive,
    }
}

impl Elementwise for AdaDelta {
    type Scalars = (f64, f64);
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        ["v", "square_of_steps"].map(|name| Slot::zeros(name).second_moment())
    }

    fn scalars(&self, _t: u64) -> Self::Scalars {
        (self.rho, above_zero(self.epsilon))
    }

    #[inline(always)]
    fn step<V: Value>((rho, epsilon): (f64, f64), _x: V, dx: V, [v, u]: &mut [V; 2]) -> V {
        *v = decayed(*v, dx * dx, rho);
        let step = dx * (*u + epsilon).sqrt() / (*v + epsilon).sqrt();
        *u = decayed(*u, step * step, rho);
        step
    }
}
