use crate::numbers::value::{Value, above_zero};
use crate::rule::{Elementwise, Slot, range};
use crate::rules::moments::{correction, decayed, t_for_correction};

crate::hyper_parameters! {
    /// Adam (Kingma and Ba 2014, [arXiv 1412.6980](https://arxiv.org/abs/1412.6980)).
    ///
    /// ```text
    /// m   = β₁·m + (1 - β₁)·dx
    /// v   = β₂·v + (1 - β₂)·dx²
    /// dx' = η·m̂ / (√v̂ + ε),   m̂ = m / (1 - β₁ᵗ),   v̂ = v / (1 - β₂ᵗ)
    /// ```
    ///
    /// Without `bias_correction` m̂ is m, and v̂ is v.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Adam, setup, update};
    ///
    /// // The first step of each element is η long, whatever the size of the gradient.
    /// let x = Var::new(&[0f32, 0.0], &Device::Cpu)?;
    /// let mut state = setup(Adam::new(0.1), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[2f32, -300.0], &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[-0.100, 0.100]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// Defaults and definition are torch's. torch always corrects the moments; apex and DeepSpeed have an
    /// option `bias_correction`. Bias corrections use the current β, as in torch. Optimisers.jl multiplies
    /// the β of all steps, which differs only after an [`adjust`](crate::Adjust::adjust_field) of `beta`.
    pub struct Adam: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// Whether the moments are corrected for their start at 0.
        bias_correction: bool = true => range::any,
    }
}

/// The scalars of one step of the Adam family.
#[derive(Clone, Copy, Debug)]
pub struct AdamScalars {
    beta: (f64, f64),
    epsilon: f64,
    /// η / (1 - β₁ᵗ)
    rate: f64,
    /// 1 / (1 - β₂ᵗ); for `NAdam` β₂ / (1 - β₂ᵗ)
    pub(super) scale: f64,
}

impl AdamScalars {
    pub(crate) fn new(eta: f64, beta: (f64, f64), epsilon: f64, t: u64) -> Self {
        AdamScalars {
            beta,
            // With ε = 0, the step of an element whose gradients are all 0 would be 0 / 0.
            epsilon: above_zero(epsilon),
            rate: eta / correction(beta.0, t),
            scale: 1.0 / correction(beta.1, t),
        }
    }

    /// Updates the first moment.
    #[inline(always)]
    pub(crate) fn update_mean<V: Value>(self, m: &mut V, dx: V) {
        *m = decayed(*m, dx, self.beta.0);
    }

    /// Updates the second moment with `dx`, which need not be the gradient.
    #[inline(always)]
    pub(crate) fn update_square<V: Value>(self, v: &mut V, dx: V) {
        *v = decayed(*v, dx * dx, self.beta.1);
    }

    /// η·m̂
    #[inline(always)]
    pub(crate) fn numerator<V: Value>(self, m: V) -> V {
        m * self.rate
    }

    /// v̂
    #[inline(always)]
    pub(crate) fn corrected_square<V: Value>(self, v: V) -> V {
        v * self.scale
    }

    /// √v̂ + ε
    #[inline(always)]
    pub(crate) fn denominator<V: Value>(self, v: V) -> V {
        self.corrected_square(v).sqrt() + self.epsilon
    }

    /// Updates both moments, and returns η·m̂ / (√v̂ + ε).
    #[inline(always)]
    pub(crate) fn step<V: Value>(self, dx: V, m: &mut V, v: &mut V) -> V {
        self.update_mean(m, dx);
        self.update_square(v, dx);
        self.numerator(*m) / self.denominator(*v)
    }
}

impl Elementwise for Adam {
    type Scalars = AdamScalars;
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [Slot::zeros("m"), Slot::zeros("v").second_moment()]
    }

    fn scalars(&self, t: u64) -> AdamScalars {
        AdamScalars::new(
            self.eta,
            self.beta,
            self.epsilon,
            t_for_correction(t, self.bias_correction),
        )
    }

    #[inline(always)]
    fn step<V: Value>(scalars: AdamScalars, _x: V, dx: V, [m, v]: &mut [V; 2]) -> V {
        scalars.step(dx, m, v)
    }
}
