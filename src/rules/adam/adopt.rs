use crate::numbers::value::{Value, above_zero};
use crate::rule::{Elementwise, Slot, range};
use crate::rules::moments::decayed;

crate::hyper_parameters! {
    /// ADOPT: Adam that converges with any β₂.
    ///
    /// ADOPT divides a gradient by the root of the second moment of earlier gradients, and takes the mean
    /// afterwards. Source: Taniguchi et al. 2024, [arXiv 2411.02853](https://arxiv.org/abs/2411.02853).
    ///
    /// ```text
    /// the first step:   v = dx²,   dx' = 0
    /// all others:       u = clamp(dx / max(√v, ε), -c, c),   c = (t - 1)^¼
    ///                   m = β₁·m + (1 - β₁)·u
    ///                   dx' = η·(m + λ·x)
    ///                   v = β₂·v + (1 - β₂)·dx²
    /// ```
    ///
    /// The first gradient of a parameter only sets v: the parameter neither moves nor decays. There is no
    /// bias correction.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{ADOPT, setup, update};
    ///
    /// // The second gradient is 2 times the first, which is clipped to 1; the mean takes up a tenth.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(ADOPT::new(0.5), &x)?;
    /// for (gradient, expected) in [(3f32, "[0.000]"), (6.0, "[-0.050]")] {
    ///     update(&mut state, &x, &[("", Tensor::new(&[gradient], &Device::Cpu)?)])?;
    ///     assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), expected);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is that of the authors' current code. The first version of the paper has no clipping (`clip:
    /// false`). Decoupled decay is off by default, as in that code; for an L2 term put
    /// [`WeightDecay`](crate::WeightDecay) before this rule. The rule is checked against optax's `adopt`.
    /// torch and Optimisers.jl have no counterpart.
    pub struct ADOPT: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the mean and of the second moment.
        beta: (f64, f64) = (0.9, 0.9999) => range::decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: the smallest divisor.
        epsilon: f64 = 1e-6 => range::non_negative,
        /// Whether divided gradients are limited to ±(t - 1)^¼, which grows from step to step.
        clip: bool = true => range::any,
    }
}

/// The scalars of one step.
#[derive(Clone, Copy, Debug)]
pub struct ADOPTScalars {
    eta: f64,
    beta: (f64, f64),
    epsilon: f64,
    /// η·λ
    decay: f64,
    /// c, or infinity without `clip`.
    limit: f64,
    is_first: bool,
}

impl Elementwise for ADOPT {
    type Scalars = ADOPTScalars;
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [Slot::zeros("normed_m"), Slot::zeros("v").second_moment()]
    }

    fn scalars(&self, t: u64) -> ADOPTScalars {
        let ADOPT {
            eta,
            beta,
            lambda,
            epsilon,
            clip,
        } = *self;
        let limit = if clip {
            ((t - 1) as f64).powf(0.25)
        } else {
            f64::INFINITY
        };
        ADOPTScalars {
            eta,
            beta,
            epsilon: above_zero(epsilon),
            decay: eta * lambda,
            limit,
            is_first: t == 1,
        }
    }

    #[inline(always)]
    fn step<V: Value>(k: ADOPTScalars, x: V, dx: V, [normed_m, v]: &mut [V; 2]) -> V {
        if k.is_first {
            *v = dx * dx;
            return dx.constant(0.0);
        }
        let normed = (dx / v.sqrt().max(dx.constant(k.epsilon))).clamp(-k.limit, k.limit);
        *normed_m = decayed(*normed_m, normed, k.beta.0);
        *v = decayed(*v, dx * dx, k.beta.1);
        *normed_m * k.eta + x * k.decay
    }
}
