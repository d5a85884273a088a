use candle_core::Tensor;

use super::moments::{correction, decayed};
use crate::error::Result;
use crate::rule::{Arithmetic, Flow, Gradient, Kind, Rule, Slot, Slots, State, foreign, range};
use crate::value::Value;

crate::hyper_parameters! {
    /// Schedule-free AdamW (Defazio et al. 2024, [arXiv 2405.15682](https://arxiv.org/abs/2405.15682)): no learning-rate schedule, and weights to
    /// evaluate with that are not those that are trained.
    ///
    /// ```text
    /// η_t = η·min(1, (t - 1) / warmup_steps),   w = (largest η so far)²,   W = W + w,   c = w / W
    /// v   = β₂·v + (1 - β₂)·dx²
    /// z   = z - η_t·(dx / (√v̂ + ε) + λ·y),   v̂ = v / (1 - β₂ᵗ)
    /// x̄   = (1 - c)·x̄ + c·z
    /// y   = β₁·x̄ + (1 - β₁)·z
    /// ```
    ///
    /// It is computed in increments, in which x̄ does not occur, so that a parameter without anything to do stays where it is in any precision:
    ///
    /// ```text
    /// u   = η_t·(dx / (√v̂ + ε) + λ·y)
    /// dx' = c·(y - z) + (1 - β₁·(1 - c))·u,   z = z - u
    /// ```
    ///
    /// The parameter is y. The weights to evaluate with are x̄, see [`StateTree::swap_in_averages`](crate::StateTree::swap_in_averages). It is the last of a
    /// chain. x̄ is not stored but found from y and z: x̄ = y + (y - z)·(1 - β₁) / β₁. Where the model is given new weights by
    /// [`set_masters`](crate::StateTree::set_masters) or [`refresh_masters`](crate::StateTree::refresh_masters), x̄ and z start from these, with
    /// W = 0; v, the warm-up and the largest η stay.
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
    /// state.swap_in_averages(&x)?;
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[-0.150]");
    /// state.swap_out_averages(&x)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// As optax's `schedule_free_adamw`. The authors' torch package divides η by the bias correction instead of v. Optimisers.jl has no such rule.
    pub struct ScheduleFree {
        /// η: the learning rate.
        eta: f64 = 2.5e-3 => range::non_negative,
        /// β₁, β₂: the weight of the average in y, above 0, and the decay of the second moment.
        beta: (f64, f64) = (0.9, 0.999) => positive_decays,
        /// λ: the decoupled weight decay.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// How many steps the learning rate takes to come to η.
        warmup_steps: u64 = 0 => range::any,
    }
}

fn positive_decays(beta: (f64, f64)) -> Option<&'static str> {
    let zero = (beta.0 == 0.0).then_some(());
    range::decays(beta).map(|_| ()).or(zero).and(Some("two numbers in [0, 1), the first above 0"))
}

#[derive(Clone, Copy)]
struct ScheduleFreeStep {
    eta: f64,
    beta: (f64, f64),
    lambda: f64,
    epsilon: f64,
    /// 1 / (1 - β₂ᵗ)
    scale: f64,
    c: f64,
}

impl Arithmetic for ScheduleFreeStep {
    type Slots<T> = [T; 2];

    #[inline(always)]
    fn step<V: Value>(self, y: V, dx: V, [z, v]: &mut [V; 2]) -> V {
        *v = decayed(*v, dx * dx, self.beta.1);
        let step = (dx / ((*v * self.scale).sqrt() + self.epsilon) + y * self.lambda) * self.eta;
        let towards = (y - *z) * self.c;
        *z = *z - step;
        towards + step * (1.0 - self.beta.0 * (1.0 - self.c))
    }
}

impl Rule for ScheduleFree {
    fn init(&self, x: &Tensor) -> Result<State> {
        let state = State::for_slots(x, &[Slot::parameter("z"), Slot::zeros("v").second_moment()])?;
        Ok(state.with_number("largest_eta", 0.0).with_number("weights", 0.0).zeroed_by_new_weights("weights"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let State { tensors, counters, numbers, .. } = state;
        let ([(_, t)], [(_, largest), (_, weights)]) = (&mut counters[..], &mut numbers[..]) else {
            return foreign(self);
        };
        if dx.is_missing() {
            return Ok(Flow::Step(dx));
        }
        let step = *t + 1;
        let warm = if self.warmup_steps == 0 { 1.0 } else { (*t as f64 / self.warmup_steps as f64).min(1.0) };
        let eta = self.eta * warm;
        let next_largest = largest.max(eta);
        let weight = next_largest * next_largest;
        let next_weights = *weights + weight;
        let kernel = ScheduleFreeStep {
            eta,
            beta: self.beta,
            lambda: self.lambda,
            epsilon: self.epsilon,
            scale: correction(self.beta.1, step).recip(),
            // With no learning rate so far there is nothing to average.
            c: if next_weights > 0.0 { weight / next_weights } else { 0.0 },
        };
        let dx = dx.set_counter(t, step).set_number(largest, next_largest).set_number(weights, next_weights);
        Ok(Flow::Step(dx.map(kernel, Slots(tensors))))
    }

    fn kind(&self) -> Kind {
        Kind::Elementwise
    }

    fn evaluation(&self, state: &State, y: &Tensor) -> Result<Option<Tensor>> {
        let Some(z) = state.own_tensor("z")? else { return foreign(self) };
        let y = y.to_dtype(z.dtype())?;
        let beyond = ((&y - z)? * ((1.0 - self.beta.0) / self.beta.0))?;
        Ok(Some((y + beyond)?))
    }

    fn is_divisible(&self) -> bool {
        true
    }
}
