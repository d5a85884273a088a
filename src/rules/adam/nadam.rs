use super::adam::AdamScalars;
use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};
use crate::rules::moments::{NesterovWeights, correction};

crate::hyper_parameters! {
    /// Adam with Nesterov's momentum (Dozat 2016,
    /// ["Incorporating Nesterov Momentum into Adam"](https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ)).
    ///
    /// ```text
    /// dx' = η·(β₁·m / (1 - β₁ᵗ⁺¹) + (1 - β₁)·dx / (1 - β₁ᵗ)) / (√(β₂·v / (1 - β₂ᵗ)) + ε)
    /// ```
    ///
    /// with the moments of [`Adam`](crate::Adam).
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{NAdam, setup, update};
    ///
    /// // The first step is (0.5·0.5 / (1 - 0.5²) + 0.5 / 0.5) / √0.25 = 8 / 3 times η.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(NAdam { beta: (0.5, 0.25), ..NAdam::new(0.3) }, &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[1f32], &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[-0.800]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is the form of Optimisers.jl, with a factor β₂ under the root as in the paper's pseudo-code.
    /// torch has no such factor, its β₁ grows from step to step (`momentum_decay`), and its default η is
    /// 0.002.
    pub struct NAdam: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
    }
}

impl Elementwise for NAdam {
    /// The scalars of Adam, η, and the weights of Nesterov's momentum.
    type Scalars = (AdamScalars, f64, NesterovWeights);
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [Slot::zeros("m"), Slot::zeros("v").second_moment()]
    }

    fn scalars(&self, t: u64) -> Self::Scalars {
        let NAdam { eta, beta, epsilon } = *self;
        let mut adam = AdamScalars::new(eta, beta, epsilon, t);
        // v̂ has the factor β₂.
        adam.scale = beta.1 / correction(beta.1, t);
        (adam, eta, NesterovWeights::new(beta.0, t))
    }

    #[inline(always)]
    fn step<V: Value>((adam, eta, lookahead): Self::Scalars, _x: V, dx: V, [m, v]: &mut [V; 2]) -> V {
        adam.update_mean(m, dx);
        adam.update_square(v, dx);
        lookahead.momentum(*m, dx) * eta / adam.denominator(*v)
    }
}
