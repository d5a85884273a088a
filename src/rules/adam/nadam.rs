use crate::numbers::value::{Value, above_zero};
use crate::rule::{Elementwise, Slot, range};
use crate::rules::moments::{NesterovWeights, correction, decayed};

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

/// The scalars of one step.
#[derive(Clone, Copy, Debug)]
pub struct NAdamScalars {
    eta: f64,
    beta: (f64, f64),
    epsilon: f64,
    lookahead: NesterovWeights,
    /// β₂ / (1 - β₂ᵗ)
    scale: f64,
}

impl Elementwise for NAdam {
    type Scalars = NAdamScalars;
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [Slot::zeros("m"), Slot::zeros("v").second_moment()]
    }

    fn scalars(&self, t: u64) -> NAdamScalars {
        let NAdam { eta, beta, epsilon } = *self;
        NAdamScalars {
            eta,
            beta,
            epsilon: above_zero(epsilon),
            lookahead: NesterovWeights::new(beta.0, t),
            scale: beta.1 / correction(beta.1, t),
        }
    }

    #[inline(always)]
    fn step<V: Value>(k: NAdamScalars, _x: V, dx: V, [m, v]: &mut [V; 2]) -> V {
        *m = decayed(*m, dx, k.beta.0);
        *v = decayed(*v, dx * dx, k.beta.1);
        k.lookahead.momentum(*m, dx) * k.eta / ((*v * k.scale).sqrt() + k.epsilon)
    }
}
