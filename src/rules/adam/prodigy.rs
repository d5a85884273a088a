use crate::error::Result;
use crate::numbers::value::{Value, above_zero};
use crate::rule::{
    Arithmetic, Flow, Gradient, Kind, Numbers, Parameter, Resolved, Rule, Slot, Slots, State, Sums, range,
    state_of_another_rule,
};
use crate::rules::moments::{correction, decayed, t_for_correction};

crate::hyper_parameters! {
    /// Prodigy: Adam that finds its learning rate itself.
    ///
    /// The rate follows from an estimate d of the distance to the solution, one number for the whole model.
    /// Source: Mishchenko and Defazio 2023, [arXiv 2306.06101](https://arxiv.org/abs/2306.06101).
    ///
    /// ```text
    /// η_t = η·√(1 - β₂ᵗ) / (1 - β₁ᵗ)                  η without bias_correction
    /// β₃  = √β₂
    /// r   = β₃·r + (d / d₀)·d·η_t·Σ dx·(x₀ - x)      summed over the elements of all parameters
    /// s   = β₃·s + (d / d₀)·d·η_t·dx
    /// m   = β₁·m + (1 - β₁)·d·dx
    /// v   = β₂·v + (1 - β₂)·(d·dx)²
    /// d'  = max(d, c·r / Σ |s|)
    /// dx' = d·η_t·(m / (√v + d'·ε) + λ·x)
    /// ```
    ///
    /// x₀ is the parameter at the start. If [`set_masters`](crate::StateTree::set_masters) or
    /// [`refresh_masters`](crate::StateTree::refresh_masters) gives the model new weights, x₀ becomes these
    /// weights, r and s start again at 0, and d stays. Leave η at 1, or let it follow a schedule that ends at
    /// zero. Each sum costs one more read of the gradients and the state.
    ///
    /// All parameters have one d and one r:
    ///
    /// - A parameter without a gradient and one that is [frozen](crate::Selection::freeze) add nothing to the
    ///   estimate, but their d and r become those of the other parameters.
    /// - If a parameter joins later, by [`StateTree::add`](crate::StateTree::add) or
    ///   [`Selection::replace`](crate::Selection::replace), its first step uses d₀, and later steps use the
    ///   estimate of all parameters.
    /// - If the settings of parameters differ, so do their estimates, and the largest estimate becomes that
    ///   of all parameters.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Prodigy, setup, update};
    ///
    /// let x = Var::new(&[10f64], &Device::Cpu)?;
    /// let mut state = setup(Prodigy::default(), &x)?;
    /// for _ in 0..500 {
    ///     update(&mut state, &x, &(x.as_tensor() - 3.0)?.sqr()?.sum_all()?.backward()?)?;
    /// }
    /// // No setting says how far away 3 is.
    /// assert_eq!(format!("{:.1?}", x.to_vec1::<f64>()?), "[3.0]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is optax's `prodigy`, without its option `safeguard_warmup`. The authors' prodigyopt has
    /// `use_bias_correction=False` by default, here `bias_correction: false`. Sums are in f64. torch and
    /// Optimisers.jl have no such rule.
    pub struct Prodigy: AdaptiveStep {
        /// η: a factor on the learning rate that the rule finds.
        eta: f64 = 1.0 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// λ: the decoupled weight decay.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// d₀: the first estimate. A small number is right; its exact value matters little.
        estimate: f64 = 1e-6 => up_to_largest,
        /// c: a factor on the estimate.
        coefficient: f64 = 1.0 => range::finite_positive,
        /// Whether η_t corrects the moments for their start at 0.
        bias_correction: bool = true => range::any,
    }
}

/// The largest d. Its square, divided by a usual d₀, is a number of F32. A larger estimate counts as this
/// number.
const LARGEST_ESTIMATE: f64 = 1e15;

/// The check of d and d₀.
fn up_to_largest(value: f64) -> Option<&'static str> {
    (!(value > 0.0 && value <= LARGEST_ESTIMATE)).then_some("a number above 0, and at most 1e15")
}

/// `(d / d₀)·d·η_t·dx·(x₀ - x)`
#[derive(Clone, Copy)]
struct ProgressTerm {
    factor: f64,
}

impl Arithmetic for ProgressTerm {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, [start]: &mut [V; 1]) -> V {
        dx * (*start - x) * self.factor
    }
}

/// The next s.
#[derive(Clone, Copy)]
struct PathTerm {
    beta: f64,
    factor: f64,
}

impl Arithmetic for PathTerm {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [s]: &mut [V; 1]) -> V {
        *s * self.beta + dx * self.factor
    }
}

/// The step once the estimate is known.
#[derive(Clone, Copy)]
struct ProdigyStep {
    path: PathTerm,
    beta: (f64, f64),
    d: f64,
    /// d·η_t
    eta: f64,
    lambda: f64,
    /// d'·ε
    epsilon: f64,
}

impl Arithmetic for ProdigyStep {
    type Slots<T> = [T; 3];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, [m, v, s]: &mut [V; 3]) -> V {
        // The sum of |s| was computed from the next s, which was not stored. So s moves here, by the same
        // arithmetic.
        *s = self.path.step(x, dx, &mut [*s]);
        let dx = dx * self.d;
        *m = decayed(*m, dx, self.beta.0);
        *v = decayed(*v, dx * dx, self.beta.1);
        (*m / (v.sqrt() + self.epsilon) + x * self.lambda) * self.eta
    }
}

impl Rule for Prodigy {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        let slots = [
            Slot::parameter("start"),
            Slot::zeros("scaled_m"),
            Slot::zeros("scaled_v").second_moment(),
            Slot::zeros("path"),
        ];
        let state = State::for_slots(x, &slots)?
            .with_number("d", self.estimate, up_to_largest)
            .with_number("r", 0.0, range::finite);
        Ok(state
            .zeroed_by_new_weights("path")
            .zeroed_by_new_weights("r")
            .shared_by_model("d")
            .shared_by_model("r"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let State {
            tensors,
            counters,
            numbers,
            ..
        } = state;
        let ([(_, t)], [(_, d), (_, r)], [_, _, _, _]) =
            (&mut counters[..], &mut numbers[..], &mut tensors[..])
        else {
            return state_of_another_rule(self);
        };
        let (d, r) = (*d, *r);
        let (dx, next_t) = dx.count_step(t);
        let Prodigy {
            beta,
            lambda,
            epsilon,
            coefficient,
            ..
        } = *self;
        let corrected_t = t_for_correction(next_t, self.bias_correction);
        let eta = d * self.eta * correction(beta.1, corrected_t).sqrt() / correction(beta.0, corrected_t);
        let factor = d / self.estimate * eta;
        let path = PathTerm {
            beta: beta.1.sqrt(),
            factor,
        };

        let sums = Sums::new(Slots(tensors), Numbers(numbers))
            .sum(ProgressTerm { factor }, 0..1)
            .sum_of_absolutes(path, 3..4)
            .step_on(1..4)
            // One group for the whole model: all parameters have one d and one r.
            .of_group(self, 0);
        Ok(Flow::Step(dx.map_with_sums(sums, move |sums| {
            let next_r = sums[0] + path.beta * r;
            let estimate = next_r * coefficient / sums[1];
            // If all gradients have been zero, `estimate` is 0 / 0, and d stays as it is.
            let next_d = if estimate.is_finite() && estimate > d {
                estimate.min(LARGEST_ESTIMATE)
            } else {
                d
            };
            let step = ProdigyStep {
                path,
                beta,
                d,
                eta,
                lambda,
                epsilon: above_zero(next_d * epsilon),
            };
            Resolved::new(step, [next_d, next_r])
        })))
    }

    fn kind(&self) -> Kind {
        Kind::WholeModel
    }

    fn is_divisible(&self) -> bool {
        true
    }
}
