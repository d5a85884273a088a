use candle_core::{Result as Candle, Tensor};

use super::bases::inverse_power;
use super::stack::{Side, SideNames, SideStep, ratio, with_sides};
use super::tensors::{lerp, whole_direction};
use super::{MatrixForm, both_non_negative, norms};
use crate::error::Result;
use crate::numbers::counts;
use crate::rule::{Flow, Gradient, Parameter, Parts, Rule, Slot, State, range, state_of_another_rule};
use crate::rules::gradient::weight_decay::with_decay;
use crate::rules::moments::correction;

const NAMES: SideNames = [
    (Side::Left, ["left", "left_root"]),
    (Side::Right, ["right", "right_root"]),
];

crate::hyper_parameters! {
    /// Shampoo, with the moments and the grafting of its distributed form.
    ///
    /// Source: Gupta, Koren and Singer 2018, [arXiv 1802.09568](https://arxiv.org/abs/1802.09568); the
    /// distributed form: Shi et al. 2023, [arXiv 2309.06497](https://arxiv.org/abs/2309.06497).
    ///
    /// ```text
    /// m   = β₁·m + (1 - β₁)·dx,  v = β₂·v + (1 - β₂)·dx²
    /// L   = β₂·L + (1 - β₂)·dx·dxᵀ,  R = β₂·R + (1 - β₂)·dxᵀ·dx
    /// in each step t that is a multiple of `interval`:
    /// A   = (L / (1 - β₂ᵗ) + ε₁)^-p,  B = (R / (1 - β₂ᵗ) + ε₁)^-p    p = exponent
    /// a   = m̂ / (√v̂ + ε₂)                                            m̂ = m / (1 - β₁ᵗ), v̂ = v / (1 - β₂ᵗ)
    /// u   = A·m̂·B                                                    u = a before the first A and B
    /// u   = u·‖a‖ / ‖u‖                                               only with `graft`
    /// dx' = η·(u + λ·x)
    /// ```
    ///
    /// If β₂ = 1, then v, L and R are sums without correction, as in the paper. This is AdaGrad with
    /// matrices, and its steps get shorter. If `graft` is on, a step has the norm of Adam's step, so that
    /// learning rates of [`AdamW`](crate::AdamW) fit.
    ///
    /// Rows and columns are the last two dimensions. A tensor with more dimensions is a stack of matrices,
    /// unless `matrix` makes it one matrix. A side longer than `max_size` has no root, and the other side
    /// then has twice the exponent. If both sides are longer, the matrix gets the step a (the diagonal form).
    /// Vectors and numbers get this step, too.
    ///
    /// # What it costs
    /// A matrix has a state of 2·rows·columns + 2·(rows² + columns²) numbers in the compute dtype. For a
    /// square matrix that is 6 numbers for each parameter, 24 bytes in F32. A step takes 2 products for each
    /// side, 4·rows + 4·columns operations for each parameter. Every `interval` steps the host computes the
    /// eigenvectors of each side in F64: 0.95 s for a side of 1024, see the table of [`SOAP`](crate::SOAP). A
    /// larger `interval` makes steps faster and roots older; 100 is usual for networks.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{Shampoo, setup, update};
    ///
    /// // The roots make the first gradient orthogonal, and `graft` makes it as long as Adam's step.
    /// let x = Var::zeros((2, 2), DType::F64, &Device::Cpu)?;
    /// let mut state = setup(Shampoo { interval: 1, ..Shampoo::new(0.5) }, &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[[3f64, 4.0], [-40.0, 30.0]], &Device::Cpu)?)])?;
    /// let expected = [-0.6, -0.8, 0.8, -0.6].map(|x| x * 0.5f64 * 2f64.sqrt());
    /// assert!(x.to_vec2::<f64>()?.concat().iter().zip(expected).all(|(x, expected)| (x - expected).abs() < 1e-5));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Bits
    /// Sums and matrix products are candle's. In F32 their bits depend on the kind of processor, whatever
    /// [`Isa`](crate::Isa) is chosen. The rule needs the feature `candle`.
    ///
    /// # Departures
    /// With β = (0, 1), `interval` 1 and no grafting the rule is the paper's, whose p is 1/4, except that
    /// the paper adds ε₁ once, at the start. With these settings the rule was checked against
    /// pytorch_optimizer's `Shampoo`. In that rule and in the distributed form a vector has a full matrix,
    /// and a tensor of more than two dimensions has one matrix for each dimension. The distributed form cuts
    /// matrices larger than 1024 into blocks.
    ///
    /// The state has no roots in the first `interval` - 1 steps, and the step is a. The distributed form
    /// takes the step of its grafting until `start_preconditioning_step`, by default its interval. In
    /// pytorch_optimizer's `Shampoo` the roots are zeros at the start, so that nothing moves until roots are
    /// computed. torch, optax and Optimisers.jl have no such rule.
    pub struct Shampoo: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first moment and of all second moments. If β₂ = 1, second moments are
        /// sums.
        beta: (f64, f64) = (0.9, 0.999) => decay_and_sum,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε₁, ε₂: the number added to eigenvalues, and the number that keeps the denominator of Adam's step
        /// from zero.
        epsilon: (f64, f64) = (1e-12, 1e-8) => both_non_negative,
        /// The number of steps from one computation of the roots to the next.
        interval: u64 = 10 => range::at_least_one,
        /// p: the exponent of each of two sides, above 0 and at most 1.
        exponent: f64 = 0.25 => up_to_one,
        /// Whether a step is scaled to the norm of Adam's step.
        graft: bool = true => range::any,
        /// The longest side that has a root. Choose `max_size` before `setup`: it decides the state's shape.
        max_size: u64 = 1024 => range::any,
        /// Which dimensions are rows and columns. Choose `matrix` before `setup`: it decides the state's
        /// shape.
        matrix: MatrixForm = MatrixForm::Stack => range::any,
    }
}

fn decay_and_sum((first, second): (f64, f64)) -> Option<&'static str> {
    let is_valid = range::decay(first).is_none() && (0.0..=1.0).contains(&second);
    (!is_valid).then_some("a number in [0, 1), and one in [0, 1]")
}

fn up_to_one(value: f64) -> Option<&'static str> {
    (!(value > 0.0 && value <= 1.0)).then_some("a number above 0, and at most 1")
}

/// How second moments change in step t: as decayed means, or as sums if β₂ = 1.
#[derive(Clone, Copy)]
struct MomentWeights {
    decay: f64,
    weight: f64,
    correction: f64,
}

impl MomentWeights {
    fn new(beta: f64, t: u64) -> Self {
        let (weight, correction) = if beta == 1.0 {
            (1.0, 1.0)
        } else {
            (1.0 - beta, correction(beta, t))
        };
        MomentWeights {
            decay: beta,
            weight,
            correction,
        }
    }

    fn add(self, old: &Tensor, new: &Tensor) -> Candle<Tensor> {
        (old * self.decay)? + (new * self.weight)?
    }
}

impl Shampoo {
    fn step(
        &self,
        t: u64,
        are_roots_due: bool,
        has_roots: bool,
        dx: &Tensor,
        tensors: &mut [Tensor; 2],
        sides: &mut [SideStep<'_>],
    ) -> Candle<Tensor> {
        let stacked = |x: &Tensor| self.matrix.stacked(x);
        let [m, v] = tensors;
        let (weights, first_correction) = (MomentWeights::new(self.beta.1, t), correction(self.beta.0, t));
        *m = lerp(m, dx, 1.0 - self.beta.0)?;
        *v = weights.add(v, &dx.sqr()?)?;
        let adam_step = whole_direction((m, first_correction), (v, weights.correction), self.epsilon.1)?;
        // The exponents of all sides add up to 2·p, so a single side has 2·p.
        let power = if sides.len() == 1 {
            2.0 * self.exponent
        } else {
            self.exponent
        };
        for side_step in sides.iter_mut() {
            side_step.update_mean(&stacked(dx)?, |mean, product| weights.add(mean, product))?;
            if are_roots_due {
                let mean = (&*side_step.mean / weights.correction)?;
                *side_step.transform = inverse_power(&mean, self.epsilon.0, power)?;
            }
        }
        // Before the first roots the matrices are zeros, and the step would be zero, too.
        if sides.is_empty() || !has_roots {
            return adam_step * self.eta;
        }
        let mean = (stacked(m)? / first_correction)?;
        let preconditioned = sides.iter().try_fold(mean, |x, side_step| {
            side_step.side.rotate(&x, side_step.transform)
        })?;
        let step = if self.graft {
            preconditioned.broadcast_mul(&ratio(&norms(&stacked(&adam_step)?)?, &norms(&preconditioned)?)?)?
        } else {
            preconditioned
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
        let Some(sides) = Side::from_state(state, x, self.matrix, &NAMES) else {
            return state_of_another_rule(self);
        };
        let Parts { slots, counters, .. } = state.parts();
        let [calls, roots] = counters.array()?;
        let (dx, t) = dx.count_step(calls);
        // If `interval` was shortened before the first roots, t can be above `interval`: roots are then due
        // at once.
        let are_roots_due = t.is_multiple_of(self.interval) || *roots == 0 && t > self.interval;
        let next_roots = counts::add(*roots, are_roots_due.into());
        // A missing gradient is no step, so no roots are computed.
        let dx = if dx.is_missing() {
            dx
        } else {
            dx.set_counter(roots, next_roots)
        };
        let adaptive_step = dx.append_function(slots.0, false, move |_, dx, tensors| {
            let Some((moments, side_tensors)) = tensors.split_first_chunk_mut() else {
                return state_of_another_rule(self);
            };
            Ok(self.step(
                t,
                are_roots_due,
                next_roots > 0,
                &dx,
                moments,
                &mut SideStep::all(&sides, side_tensors),
            )?)
        });
        Ok(Flow::Step(with_decay(adaptive_step, self.eta * self.lambda)))
    }
}
