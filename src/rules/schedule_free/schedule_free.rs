use super::interpolation::{Interpolates, Interpolation, positive_decays, warmed_rate};
use crate::numbers::value::Value;
use crate::rule::{Arithmetic, Slot, range};
use crate::rules::adam::adam::AdamScalars;
use crate::rules::rule_by;

crate::hyper_parameters! {
    /// Schedule-free AdamW: no learning-rate schedule.
    ///
    /// The model is evaluated with other weights (x̄) than those that are trained (y). Source: Defazio et al.
    /// 2024, [arXiv 2405.15682](https://arxiv.org/abs/2405.15682).
    ///
    /// ```text
    /// η_t = η·min(1, t / warmup_steps),   w = (largest η so far)²,   W = W + w,   c = w / W
    /// v   = β₂·v + (1 - β₂)·dx²
    /// z   = z - η_t·(dx / (√v̂ + ε) + λ·y),   v̂ = v / (1 - β₂ᵗ)
    /// x̄   = (1 - c)·x̄ + c·z
    /// y   = β₁·x̄ + (1 - β₁)·z
    /// ```
    ///
    /// The rule computes increments without x̄, so that a parameter whose steps are all 0 keeps its bits in
    /// any precision:
    ///
    /// ```text
    /// u   = η_t·(dx / (√v̂ + ε) + λ·y)
    /// dx' = c·(y - z) + (1 - β₁·(1 - c))·u,   z = z - u
    /// ```
    ///
    /// The parameter is y. To evaluate with x̄ use
    /// [`StateTree::with_averages`](crate::StateTree::with_averages). x̄ is not stored but computed from y
    /// and z: x̄ = y + (y - z)·(1 - β₁) / β₁, with the β₁ of the last step (at least 1e-3). So if β₁ changes,
    /// the next step moves y, and x̄ stays. What y has lost by rounding is divided by that β₁, so a parameter
    /// in 16 bits needs a master before a small β₁ grows. Put this rule last in a chain.
    ///
    /// If [`set_masters`](crate::StateTree::set_masters) or
    /// [`refresh_masters`](crate::StateTree::refresh_masters) gives the model new weights, x̄ and z start
    /// from these, with W = 0; v, the warm-up and the largest η stay. Without such a call the next update
    /// refuses new weights, because the rule would lead y back to the old z.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{ScheduleFree, setup, update};
    ///
    /// // z goes from -0.1 to -0.2, x̄ is the mean of both, and y lies halfway between x̄ and z.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(ScheduleFree { beta: (0.5, 0.999), ..ScheduleFree::new(0.1) }, &x)?;
    /// for gradient in [[1f32], [1.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[-0.175]");
    /// let average = state.with_averages(&x, || x.to_vec1::<f32>())?;
    /// assert_eq!(format!("{average:.3?}"), "[-0.150]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is the authors' `AdamWScheduleFree` (schedulefree 1.4.1) with `r` = 0 and `weight_lr_power`
    /// = 2. Without a warm-up the rule is also optax's `schedule_free_adamw`. With a warm-up optax steps with
    /// η·(t - 1) / warmup_steps, so that its first step has no length, and weighs the mean by η·t /
    /// warmup_steps. Optimisers.jl has no such rule. [`ScheduleFreeSGD`](crate::ScheduleFreeSGD) and
    /// [`ScheduleFreeRAdam`](crate::ScheduleFreeRAdam) differ only in the step of z.
    pub struct ScheduleFree: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 2.5e-3 => range::non_negative,
        /// β₁, β₂: the weight of the average in y, above 0, and the decay of the second moment.
        beta: (f64, f64) = (0.9, 0.999) => positive_decays,
        /// λ: the decoupled weight decay.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// The number of steps in which the learning rate rises to η.
        warmup_steps: u64 = 0 => range::any,
    }
}

/// A step of z by Adam without momentum, and the step of y that follows.
#[derive(Clone, Copy)]
pub(crate) struct ScheduleFreeStep {
    adam: AdamScalars,
    /// η_t
    eta: f64,
    lambda: f64,
    interpolation: Interpolation,
}

impl Arithmetic for ScheduleFreeStep {
    type Slots<T> = [T; 2];
    const TAKES_PROLOGUE: bool = true;

    #[inline(always)]
    fn step<V: Value>(self, y: V, dx: V, [z, v]: &mut [V; 2]) -> V {
        self.adam.update_square(v, dx);
        let step = (dx / self.adam.denominator(*v) + y * self.lambda) * self.eta;
        self.interpolation.step_of_y(y, z, step)
    }
}

impl Interpolates for ScheduleFree {
    type Step = ScheduleFreeStep;

    fn extra_slots(&self) -> Vec<Slot> {
        vec![Slot::zeros("v").second_moment()]
    }

    fn weight_of_mean(&self) -> f64 {
        self.beta.0
    }

    fn eta_at(&self, t: u64) -> f64 {
        warmed_rate(self.eta, t, self.warmup_steps)
    }

    fn step_at(&self, t: u64, eta: f64, interpolation: Interpolation) -> ScheduleFreeStep {
        let adam = AdamScalars::new(eta, (0.0, self.beta.1), self.epsilon, t);
        ScheduleFreeStep {
            adam,
            eta,
            lambda: self.lambda,
            interpolation,
        }
    }
}

rule_by!(ScheduleFree, super::interpolation);
