use candle_core::Tensor;

use crate::error::Result;
use crate::rule::{Addend, Arithmetic, Flow, FromSums, Gradient, Kind, Rule, Slot, State, Summed, erased, range};
use crate::value::Value;

crate::hyper_parameters! {
    /// Prodigy (Mishchenko and Defazio 2023, [arXiv 2306.06101](https://arxiv.org/abs/2306.06101)): Adam with a learning rate that it finds itself, from an
    /// estimate d of the distance to the solution, which is one number for the whole model.
    ///
    /// ```text
    /// η_t = η·√(1 - β₂ᵗ) / (1 - β₁ᵗ),   β₃ = √β₂
    /// r   = β₃·r + (d / d₀)·d·η_t·Σ dx·(x₀ - x)      summed over the elements of all parameters
    /// s   = β₃·s + (d / d₀)·d·η_t·dx
    /// m   = β₁·m + (1 - β₁)·d·dx
    /// v   = β₂·v + (1 - β₂)·(d·dx)²
    /// d'  = max(d, c·r / Σ |s|)
    /// dx' = d·η_t·(m / (√v + d'·ε) + λ·x)
    /// ```
    ///
    /// x₀ is the parameter at the start. Where the model is given new weights by [`set_masters`](crate::StateTree::set_masters) or
    /// [`refresh_masters`](crate::StateTree::refresh_masters), x₀ becomes these, r and s start anew, and d stays. η stays at 1, or follows a schedule
    /// that ends at 0. The sums cost one more read of the gradients and the state each.
    ///
    /// A parameter without a gradient takes part in the estimate with nothing. A frozen one does not hear of it; after the thaw it goes on from the
    /// estimate it had.
    ///
    /// # Departures
    /// As optax's `prodigy`, without its option `safeguard_warmup`. The sums are taken in f64. torch and Optimisers.jl have no such rule.
    pub struct Prodigy {
        /// A factor on the learning rate that is found η.
        eta: f64 = 1.0 => range::non_negative,
        /// The decays of the first and second moment β₁, β₂.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// The decoupled weight decay λ.
        lambda: f64 = 0.0 => range::non_negative,
        /// Keeps the denominator from zero ε.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// The first estimate d₀; it does not matter much if it is small.
        estimate: f64 = 1e-6 => range::positive,
        /// A factor on the estimate c.
        coefficient: f64 = 1.0 => range::positive,
    }
}

/// `(d / d₀)·d·η_t·dx·(x₀ - x)`
#[derive(Clone, Copy)]
struct Progress {
    factor: f64,
}

impl Arithmetic for Progress {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, [start]: &mut [V; 1]) -> V {
        dx * (*start - x) * self.factor
    }
}

/// The next s.
#[derive(Clone, Copy)]
struct Path {
    beta: f64,
    factor: f64,
}

impl Arithmetic for Path {
    type Slots<T> = [T; 3];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [_, _, s]: &mut [V; 3]) -> V {
        *s * self.beta + dx * self.factor
    }
}

#[derive(Clone, Copy)]
struct Step {
    path: Path,
    beta: (f64, f64),
    d: f64,
    r: f64,
    coefficient: f64,
    /// d·η_t
    eta: f64,
    lambda: f64,
    epsilon: f64,
}

impl FromSums for Step {
    type Slots<T> = [T; 3];

    /// The next d and r, and d'·ε.
    fn summed<V: Value>(self, [progress, path_length]: [V; 2]) -> Summed<V> {
        let r = progress + self.path.beta * self.r;
        let found = r * self.coefficient / path_length;
        let [old, largest] = [self.d, f64::MAX].map(|number| found.constant(number));
        // Where all gradients have been zero there is no estimate yet.
        let finite = V::select(found.le(largest), found, old);
        let d = V::select(finite.gt(old), finite, old);
        Summed { numbers: [d, r], scalar: d * self.epsilon }
    }

    #[inline(always)]
    fn step<V: Value>(self, epsilon: V, x: V, dx: V, slots: &mut [V; 3]) -> V {
        slots[2] = self.path.step(x, dx, slots);
        let [m, v, _] = slots;
        let dx = dx * self.d;
        *m = *m * self.beta.0 + dx * (1.0 - self.beta.0);
        *v = *v * self.beta.1 + dx * dx * (1.0 - self.beta.1);
        (*m / (v.sqrt() + epsilon) + x * self.lambda) * self.eta
    }
}

impl Rule for Prodigy {
    fn init(&self, x: &Tensor) -> Result<State> {
        let slots = [Slot::parameter("start"), Slot::zeros("scaled_m"), Slot::zeros("scaled_v"), Slot::zeros("path")];
        let state = State::for_slots(x, &slots)?.with_number("d", self.estimate).with_number("r", 0.0);
        Ok(state.zeroed_by_new_weights("path").zeroed_by_new_weights("r"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let State { tensors, counters, numbers, .. } = state;
        let ([(_, t)], [(_, estimate), (_, progress)], Some((start, moments))) =
            (&mut counters[..], &mut numbers[..], tensors.split_at_mut_checked(1))
        else {
            return Ok(Flow::Step(dx));
        };
        let (d, r, step) = (*estimate, *progress, (*t + 1) as f64);
        let eta = d * self.eta * (1.0 - self.beta.1.powf(step)).sqrt() / (1.0 - self.beta.0.powf(step));
        let factor = d / self.estimate * eta;
        let path = Path { beta: self.beta.1.sqrt(), factor };

        let dx = if dx.is_missing() { dx } else { dx.count(t, step as u64) };
        let addends = [
            Addend { magnitudes: false, probe: erased(Progress { factor }), slots: start },
            Addend { magnitudes: true, probe: erased(path), slots: moments },
        ];
        let Prodigy { beta, lambda, epsilon, coefficient, .. } = *self;
        let following = Step { path, beta, d, r, coefficient, eta, lambda, epsilon };
        Ok(Flow::Step(dx.step_of_sums("Prodigy", addends, [estimate, progress], following)))
    }

    fn kind(&self) -> Kind {
        Kind::WholeModel
    }
}
