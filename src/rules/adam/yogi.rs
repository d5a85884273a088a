use super::adam::AdamScalars;
use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};

/// The start of both moments.
const START: f64 = 1e-6;

crate::hyper_parameters! {
    /// Yogi: Adam with a second moment whose change does not depend on its own size.
    ///
    /// Source: Zaheer et al. 2018, ["Adaptive Methods for Nonconvex
    /// Optimization"](https://papers.nips.cc/paper/8186-adaptive-methods-for-nonconvex-optimization).
    ///
    /// ```text
    /// m   = β₁·m + (1 - β₁)·dx
    /// v   = v - (1 - β₂)·sign(v - dx²)·dx²
    /// dx' = η·m̂ / (√v̂ + ε),   m̂ = m / (1 - β₁ᵗ),   v̂ = v / (1 - β₂ᵗ),   m₀ = v₀ = 1e-6
    /// ```
    ///
    /// Because m starts above 0, a parameter moves even if all its gradients are zero. With the defaults all
    /// its steps then add up to 0.0016·η.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Yogi, setup, update};
    ///
    /// let x = Var::new(&[0f64], &Device::Cpu)?;
    /// let mut state = setup(Yogi::new(0.1), &x)?;
    /// for gradient in [[100f64], [1.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// // v falls from 10 by (1 - β₂)·1² = 0.001. Adam's v would fall by about a thousandth of 10.
    /// let v = state.leaf("").expect("the leaf").tensor("v")?.to_vec1::<f64>()?;
    /// assert_eq!(format!("{:.3?}", v), "[9.999]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The start and the bias corrections are those of optax; the paper has neither. ε = 0.001 is the
    /// paper's. torch and Optimisers.jl have no counterpart.
    pub struct Yogi: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-2 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-3 => range::non_negative,
    }
}

impl Elementwise for Yogi {
    /// The scalars of Adam, and 1 - β₂.
    type Scalars = (AdamScalars, f64);
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [Slot::full("m", START), Slot::full("v", START).second_moment()]
    }

    fn scalars(&self, t: u64) -> Self::Scalars {
        (
            AdamScalars::new(self.eta, self.beta, self.epsilon, t),
            1.0 - self.beta.1,
        )
    }

    #[inline(always)]
    fn step<V: Value>((k, rate): Self::Scalars, _x: V, dx: V, [m, v]: &mut [V; 2]) -> V {
        let square = dx * dx;
        k.update_mean(m, dx);
        *v = *v - (*v - square).sign() * square * rate;
        k.numerator(*m) / k.denominator(*v)
    }
}
