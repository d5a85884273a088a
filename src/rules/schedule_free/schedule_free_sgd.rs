use super::interpolation::{Interpolates, Interpolation, positive_decay, warmed_rate};
use crate::numbers::value::Value;
use crate::rule::{Arithmetic, Slot, range};
use crate::rules::rule_by;

crate::hyper_parameters! {
    /// Schedule-free gradient descent: no schedule, and averaging instead of momentum.
    ///
    /// Source: Defazio et al. 2024, [arXiv 2405.15682](https://arxiv.org/abs/2405.15682).
    ///
    /// ```text
    /// η_t = η·min(1, t / warmup_steps),   w = (largest η so far)²,   W = W + w,   c = w / W
    /// z   = z - η_t·(dx + λ·y)
    /// x̄   = (1 - c)·x̄ + c·z
    /// y   = β·x̄ + (1 - β)·z
    /// ```
    ///
    /// The parameter is y. x̄, z and new weights are as for [`ScheduleFree`](crate::ScheduleFree). The state
    /// is z, one tensor. Learning rates are larger than those of momentum with the same β: the paper's are 10
    /// to 50 times as large.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{ScheduleFreeSGD, setup, update};
    ///
    /// // z goes from -0.2 to -0.4, x̄ is the mean of both, and y lies halfway between x̄ and z.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(ScheduleFreeSGD { beta: 0.5, ..ScheduleFreeSGD::new(0.1) }, &x)?;
    /// for _ in 0..2 {
    ///     update(&mut state, &x, &[("", Tensor::new(&[2f32], &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[-0.350]");
    /// let average = state.with_averages(&x, || x.to_vec1::<f32>())?;
    /// assert_eq!(format!("{average:.3?}"), "[-0.300]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is the authors' `SGDScheduleFree` (schedulefree 1.4.1), with and without a warm-up, and
    /// optax's `schedule_free_sgd` without a warm-up. [`ScheduleFree`](crate::ScheduleFree) describes optax's
    /// warm-up. Optimisers.jl has no such rule.
    pub struct ScheduleFreeSGD: Step {
        /// η: the learning rate.
        eta: f64 = 1.0 => range::non_negative,
        /// β: the weight of the average in y, above 0.
        beta: f64 = 0.9 => positive_decay,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// The number of steps in which the learning rate rises to η.
        warmup_steps: u64 = 0 => range::any,
    }
}

#[derive(Clone, Copy)]
pub(crate) struct ScheduleFreeSGDStep {
    /// η_t
    eta: f64,
    lambda: f64,
    interpolation: Interpolation,
}

impl Arithmetic for ScheduleFreeSGDStep {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, y: V, dx: V, [z]: &mut [V; 1]) -> V {
        self.interpolation
            .step_of_y(y, z, (dx + y * self.lambda) * self.eta)
    }
}

impl Interpolates for ScheduleFreeSGD {
    type Step = ScheduleFreeSGDStep;

    fn extra_slots(&self) -> Vec<Slot> {
        Vec::new()
    }

    fn weight_of_mean(&self) -> f64 {
        self.beta
    }

    fn eta_at(&self, t: u64) -> f64 {
        warmed_rate(self.eta, t, self.warmup_steps)
    }

    fn step_at(&self, _t: u64, eta: f64, interpolation: Interpolation) -> ScheduleFreeSGDStep {
        ScheduleFreeSGDStep {
            eta,
            lambda: self.lambda,
            interpolation,
        }
    }
}

rule_by!(ScheduleFreeSGD, super::interpolation);
