use candle_core::{Result as Candle, Tensor};

use super::bases::inverse_power;
use super::stack::{Side, SideNames, SideStep, ratio, with_sides};
use super::tensors::{toward, whole_direction};
use super::{MatrixForm, both_non_negative, norms};
use crate::error::Result;
use crate::rule::{Flow, Gradient, Parameter, Parts, Rule, Slot, Slots, State, range, state_of_another_rule};
use crate::rules::gradient::weight_decay::WeightDecay;
use crate::rules::moments::correction;

const NAMES: SideNames = [(Side::Left, ["left", "left_root"]), (Side::Right, ["right", "right_root"])];

crate::hyper_parameters! {
    /// Shampoo, with the moments and the grafting of its distributed form.
    ///
    /// Source: Gupta, Koren and Singer 2018, [arXiv 1802.09568](https://arxiv.org/abs/1802.09568); the
    /// distributed form: Shi et al. 2023, [arXiv 2309.06497](https://arxiv.org/abs/2309.06497).
    ///
    /// ```text
    /// m   = β₁·m + (1 - β₁)·dx,  v = β₂·v + (1 - β₂)·dx²
    /// L   = β₂·L + (1 - β₂)·dx·dxᵀ,  R = β₂·R + (1 - β₂)·dxᵀ·dx
    /// in each step whose number `interval` divides:
    /// A   = (L / (1 - β₂ᵗ) + ε₁)^-p,  B = (R / (1 - β₂ᵗ) + ε₁)^-p    p = exponent
    /// a   = m̂ / (√v̂ + ε₂)                                            m̂ = m / (1 - β₁ᵗ), v̂ = v / (1 - β₂ᵗ)
    /// u   = A·m̂·B                                                    a before the first A and B
    /// u   = u·‖a‖ / ‖u‖                                               not without graft
    /// dx' = η·(u + λ·x)
    /// ```
    ///
    /// With β₂ = 1 the moments v, L and R are sums without correction, as in the paper: AdaGrad with
    /// matrices, whose step gets shorter. With the norm of Adam's step (`graft`) learning rates of
    /// [`AdamW`](crate::AdamW) are right.
    ///
    /// A matrix is the last two dimensions. A tensor with more is a stack of matrices, unless `matrix` makes
    /// it one matrix. A side with more than `max_size` elements has no root, and the other then has twice the
    /// exponent. Vectors and numbers, and matrices of which both sides are larger, have the step a: the
    /// diagonal form.
    ///
    /// # What it costs
    /// State of rows·columns parameters, in numbers of the compute dtype:
    /// 2·rows·columns + 2·(rows² + columns²). That is 6 for each parameter of a square matrix, 24 bytes in
    /// F32. A step is 2 products for each side, 4·rows + 4·columns operations for each parameter. Every
    /// `interval` steps each side needs its eigenvectors, on the host in F64: [`SOAP`](crate::SOAP) says how
    /// long that takes, 0.95 s for a side of 1024. A larger `interval` has shorter steps and older roots; 100
    /// is usual for networks.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{Shampoo, setup, update};
    ///
    /// // Of the first gradient the roots leave an orthogonal matrix, here as long as Adam's step.
    /// let x = Var::zeros((2, 2), DType::F64, &Device::Cpu)?;
    /// let mut state = setup(Shampoo { interval: 1, ..Shampoo::new(0.5) }, &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[[3f64, 4.0], [-40.0, 30.0]], &Device::Cpu)?)])?;
    /// let expected = [-0.6, -0.8, 0.8, -0.6].map(|x| x * 0.5f64 * 2f64.sqrt());
    /// assert!(x.to_vec2::<f64>()?.concat().iter().zip(expected).all(|(x, expected)| (x - expected).abs() < 1e-5));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Bits
    /// The sums and matrix products are candle's. In F32 they follow the kind of processor, whatever
    /// [`Isa`](crate::Isa) is chosen. Without the feature `candle` the rule is not there.
    ///
    /// # Departures
    /// With β = (0, 1), one step per interval and no grafting it is the paper's, whose p is 1/4 and which
    /// adds ε₁ once, at the start. So it was checked against pytorch_optimizer's `Shampoo`. There and in the
    /// distributed form a vector has a full matrix, and each dimension of a tensor with more than two has a
    /// matrix of its own. The distributed form cuts matrices larger than 1024 into blocks.
    ///
    /// Before the first roots, in the first `interval` - 1 steps, the step is a. The distributed form has
    /// that of its grafting until `start_preconditioning_step`, by default its interval. pytorch_optimizer's
    /// `Shampoo` has roots of zeros until then, so that nothing moves. torch, optax and Optimisers.jl have no
    /// such rule.
    pub struct Shampoo: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first moment and of all second moments; with β₂ = 1 these are sums.
        beta: (f64, f64) = (0.9, 0.999) => decay_and_sum,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε₁, ε₂: what is added to eigenvalues, and what keeps the denominator of Adam's step from zero.
        epsilon: (f64, f64) = (1e-12, 1e-8) => both_non_negative,
        /// After how many steps the roots are computed again.
        interval: u64 = 10 => range::at_least_one,
        /// p: the power of each of two sides, above 0 and at most 1.
        exponent: f64 = 0.25 => up_to_one,
        /// Whether steps have the norm of Adam's.
        graft: bool = true => range::any,
        /// The largest side that has a root. It decides the state when that is made.
        max_size: u64 = 1024 => range::any,
        /// Which dimensions are rows and columns. It decides the state when that is made.
        matrix: MatrixForm = MatrixForm::Stack => range::any,
    }
}

fn decay_and_sum((first, second): (f64, f64)) -> Option<&'static str> {
    let is_right = range::decay(first).is_none() && (0.0..=1.0).contains(&second);
    (!is_right).then_some("a number in [0, 1), and one in [0, 1]")
}

fn up_to_one(value: f64) -> Option<&'static str> {
    (!(value > 0.0 && value <= 1.0)).then_some("a number above 0, and at most 1")
}

/// Second moments in step t: decayed means, or sums.
#[derive(Clone, Copy)]
struct Gathering {
    decay: f64,
    weight: f64,
    correction: f64,
}

impl Gathering {
    fn new(beta: f64, t: u64) -> Self {
        let (weight, correction) = if beta == 1.0 { (1.0, 1.0) } else { (1.0 - beta, correction(beta, t)) };
        Gathering { decay: beta, weight, correction }
    }

    fn with(self, old: &Tensor, new: &Tensor) -> Candle<Tensor> {
        (old * self.decay)? + (new * self.weight)?
    }
}

impl Shampoo {
    fn step(
        &self,
        t: u64,
        is_due: bool,
        has_roots: bool,
        dx: &Tensor,
        tensors: &mut [Tensor; 2],
        sides: &mut [SideStep<'_>],
    ) -> Candle<Tensor> {
        let stacked = |x: &Tensor| self.matrix.stacked(x);
        let [m, v] = tensors;
        let (second, of_mean) = (Gathering::new(self.beta.1, t), correction(self.beta.0, t));
        *m = toward(m, dx, 1.0 - self.beta.0)?;
        *v = second.with(v, &dx.sqr()?)?;
        let adam = whole_direction((m, of_mean), (v, second.correction), self.epsilon.1)?;
        let power = if sides.len() == 1 { 2.0 * self.exponent } else { self.exponent };
        for side in sides.iter_mut() {
            side.collect(&stacked(dx)?, |mean, product| second.with(mean, product))?;
            if is_due {
                *side.matrix = inverse_power(&(&*side.mean / second.correction)?, self.epsilon.0, power)?;
            }
        }
        if sides.is_empty() || !has_roots {
            return adam * self.eta;
        }
        let mean = (stacked(m)? / of_mean)?;
        let step = sides.iter().try_fold(mean, |x, side| side.side.turned(&x, side.matrix))?;
        let step = if self.graft {
            step.broadcast_mul(&ratio(&norms(&stacked(&adam)?)?, &norms(&step)?)?)?
        } else {
            step
        };
        step.reshape(dx.shape())? * self.eta
    }
}

impl Rule for Shampoo {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        let state = State::for_slots(x, &[Slot::zeros("m"), Slot::zeros("v").second_moment()])?;
        Ok(with_sides(state, x, self.matrix, self.max_size, &NAMES)?.with_counter("roots"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Some(sides) = Side::of_state(state, x, self.matrix, &NAMES) else {
            return state_of_another_rule(self);
        };
        let Parts { slots, counters, .. } = state.parts();
        let [calls, roots] = counters.array()?;
        let t = *calls + 1;
        // The first roots may be late, if the interval has been made shorter.
        let is_due = t.is_multiple_of(self.interval) || *roots == 0 && t > self.interval;
        let next_roots = *roots + u64::from(is_due);
        let dx = if dx.is_missing() { dx } else { dx.set_counter(calls, t).set_counter(roots, next_roots) };
        let step = dx.through(slots.0, false, move |_, dx, tensors| {
            let Some((moments, others)) = tensors.split_first_chunk_mut() else {
                return state_of_another_rule(self);
            };
            Ok(self.step(t, is_due, next_roots > 0, &dx, moments, &mut SideStep::all(&sides, others))?)
        });
        Ok(Flow::Step(step.step_of(&WeightDecay::new(self.eta * self.lambda), t, Slots::none())))
    }
}
