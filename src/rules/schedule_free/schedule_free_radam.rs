use super::interpolation::{Interpolates, Interpolation, positive_decays};
use crate::numbers::value::Value;
use crate::rule::{Arithmetic, Slot, range};
use crate::rules::adam::adam::AdamScalars;
use crate::rules::adam::radam::rectification;
use crate::rules::rule_by;

crate::hyper_parameters! {
    /// Schedule-free RAdam: neither a schedule nor a warm-up to choose.
    ///
    /// The factor r is that of [`RAdam`](crate::RAdam). Source: Defazio et al. 2024, [arXiv
    /// 2405.15682](https://arxiv.org/abs/2405.15682).
    ///
    /// ```text
    /// v   = β₂·v + (1 - β₂)·dx²
    /// η_t = r·η,  u = dx / (√v̂ + ε)      if r is known: with the default β₂ from the fifth step on
    /// η_t = 0                             if r is not known and silent = true
    /// η_t = η,    u = dx                  if r is not known and silent = false
    /// w   = (largest η_t so far)²,   W = W + w,   c = w / W
    /// z   = z - η_t·(u + λ·y)
    /// x̄   = (1 - c)·x̄ + c·z
    /// y   = β₁·x̄ + (1 - β₁)·z
    /// ```
    ///
    /// with v̂ = v / (1 - β₂ᵗ). The parameter is y. [`ScheduleFree`](crate::ScheduleFree) describes how to
    /// evaluate with x̄, and what x̄ and z become if the model gets new weights.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{ScheduleFreeRAdam, setup, update};
    ///
    /// // Four steps do nothing; the fifth is short.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(ScheduleFreeRAdam::new(0.1), &x)?;
    /// for _ in 0..4 {
    ///     update(&mut state, &x, &[("", Tensor::new(&[2f32], &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(x.to_vec1::<f32>()?, [0.0]);
    /// update(&mut state, &x, &[("", Tensor::new(&[2f32], &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.4?}", x.to_vec1::<f32>()?), "[-0.0017]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is that of the authors' torch package, where `silent` is `silent_sgd_phase`. The rule is
    /// checked against pytorch_optimizer's `ScheduleFreeRAdam`. If `silent` is true, both rules agree. If
    /// `silent` is false, pytorch_optimizer has η_t = 1 until r is known. optax and Optimisers.jl have no
    /// such rule.
    pub struct ScheduleFreeRAdam: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 2.5e-3 => range::non_negative,
        /// β₁, β₂: the weight of the average in y, and the decay of the second moment. β₁ is above 0, because
        /// x̄ is computed from y and z by a division by β₁.
        beta: (f64, f64) = (0.9, 0.999) => positive_decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// Whether the first steps, for which r is not known, do nothing. If false, they are gradient
        /// descent.
        silent: bool = true => range::any,
    }
}

/// r is known if the ρ of [`RAdam`](crate::RAdam) is above this number, as in the authors' package.
const THRESHOLD: f64 = 4.0;

#[derive(Clone, Copy)]
pub(crate) struct ScheduleFreeRAdamStep {
    adam: AdamScalars,
    /// η_t
    eta: f64,
    lambda: f64,
    is_rectified: bool,
    interpolation: Interpolation,
}

impl Arithmetic for ScheduleFreeRAdamStep {
    type Slots<T> = [T; 2];

    #[inline(always)]
    fn step<V: Value>(self, y: V, dx: V, [z, v]: &mut [V; 2]) -> V {
        self.adam.update_square(v, dx);
        let direction = if self.is_rectified {
            dx / self.adam.denominator(*v)
        } else {
            dx
        };
        self.interpolation
            .step_of_y(y, z, (direction + y * self.lambda) * self.eta)
    }
}

impl Interpolates for ScheduleFreeRAdam {
    type Step = ScheduleFreeRAdamStep;

    fn extra_slots(&self) -> Vec<Slot> {
        vec![Slot::zeros("v").second_moment()]
    }

    fn weight_of_mean(&self) -> f64 {
        self.beta.0
    }

    fn eta_at(&self, t: u64) -> f64 {
        let factor_without_r = if self.silent { 0.0 } else { 1.0 };
        self.eta * rectification(self.beta.1, t, THRESHOLD).unwrap_or(factor_without_r)
    }

    fn step_at(&self, t: u64, eta: f64, interpolation: Interpolation) -> ScheduleFreeRAdamStep {
        let adam = AdamScalars::new(eta, (0.0, self.beta.1), self.epsilon, t);
        let is_rectified = rectification(self.beta.1, t, THRESHOLD).is_some();
        ScheduleFreeRAdamStep {
            adam,
            eta,
            lambda: self.lambda,
            is_rectified,
            interpolation,
        }
    }
}

rule_by!(ScheduleFreeRAdam, super::interpolation);
