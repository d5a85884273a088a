use std::sync::Arc;

use candle_core::Tensor;

use crate::error::Result;
use crate::rule::{Arithmetic, Flow, Following, Gradient, Kind, Later, Rule, Slot, State, erased, range};
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
    /// x₀ is the parameter at the start. η stays at 1, or follows a schedule that ends at 0. The sums cost one more read of the gradients and the state each.
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
    /// d·η_t
    eta: f64,
    lambda: f64,
    /// d'·ε
    epsilon: f64,
}

impl Arithmetic for Step {
    type Slots<T> = [T; 3];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, slots: &mut [V; 3]) -> V {
        slots[2] = self.path.step(x, dx, slots);
        let [m, v, _] = slots;
        let dx = dx * self.d;
        *m = *m * self.beta.0 + dx * (1.0 - self.beta.0);
        *v = *v * self.beta.1 + dx * dx * (1.0 - self.beta.1);
        (*m / (v.sqrt() + self.epsilon) + x * self.lambda) * self.eta
    }
}

impl Rule for Prodigy {
    fn init(&self, x: &Tensor) -> Result<State> {
        let slots = [Slot::parameter("start"), Slot::zeros("scaled_m"), Slot::zeros("scaled_v"), Slot::zeros("path")];
        Ok(State::for_slots(x, &slots)?.with_number("d", self.estimate).with_number("r", 0.0))
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
        let beta = self.beta.1.sqrt();
        let factor = d / self.estimate * eta;
        let path = Path { beta, factor };

        let (next_r, next_d) = (Later::default(), Later::default());
        let (found_r, found_d) = (Arc::clone(&next_r), Arc::clone(&next_d));
        let known_r = Arc::clone(&next_r);
        let dx = if dx.is_missing() { dx } else { dx.count(t, step as u64) };
        let dx = dx.number(progress, next_r).number(estimate, next_d);
        let progressed = Following::Nothing(Box::new(move |sum| {
            let _ = found_r.set(beta * r + sum);
        }));
        let stepped = Following::Step(Box::new(move |length| {
            let found = self.coefficient * known_r.get().copied().unwrap_or(r) / length;
            // Where all gradients have been zero there is no estimate yet.
            let next = if found > d && found.is_finite() { found } else { d };
            let _ = found_d.set(next);
            erased(Step { path, beta: self.beta, d, eta, lambda: self.lambda, epsilon: next * self.epsilon })
        }));
        let dx = dx.sum("Prodigy: progress", false, Progress { factor }, start, progressed);
        Ok(Flow::Step(dx.sum("Prodigy: path", true, path, moments, stepped)))
    }

    fn kind(&self) -> Kind {
        Kind::WholeModel
    }
}
