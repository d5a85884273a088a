use candle_core::{Result as Candle, Tensor};

use super::MatrixForm;
use super::bases::{eigenvectors, nearer, picked};
use super::stack::{Side, SideNames, SideStep, with_sides};
use super::tensors::{toward, whole_direction};
use crate::error::Result;
use crate::rule::{Flow, Gradient, Parameter, Parts, Rule, Slot, Slots, State, range, state_of_another_rule};
use crate::rules::adam::adamw::AdamW;
use crate::rules::gradient::weight_decay::WeightDecay;
use crate::rules::moments::correction;

const NAMES: SideNames = [(Side::Left, ["left", "left_basis"]), (Side::Right, ["right", "right_basis"])];

crate::hyper_parameters! {
    /// SOAP: Adam in the eigenvectors of [`Shampoo`](crate::Shampoo)'s matrices.
    ///
    /// Source: Vyas et al. 2024, [arXiv 2409.11321](https://arxiv.org/abs/2409.11321).
    ///
    /// ```text
    /// first:  L = (1 - β₃)·dx·dxᵀ,  R = (1 - β₃)·dxᵀ·dx,  Q, S their eigenvectors, dx' = 0; then
    /// m   = β₁·m + (1 - β₁)·dx
    /// v   = β₂·v + (1 - β₂)·(Qᵀ·dx·S)²                     of numbers in the eigenvectors
    /// u   = Q·((Qᵀ·m̂·S) / (√v̂ + ε))·Sᵀ                     m̂ = m / (1 - β₁ᵗ⁻¹), v̂ = v / (1 - β₂ᵗ⁻¹)
    /// dx' = η·(u + λ·x)
    /// L   = β₃·L + (1 - β₃)·dx·dxᵀ,  R = β₃·R + (1 - β₃)·dxᵀ·dx
    /// after each `interval` such steps: Q, S = the bases of L·Q and R·S (QR decomposition),
    ///                                   from the largest eigenvalue on
    /// ```
    ///
    /// The first gradient only makes the first eigenvectors: the parameter stays. A matrix is the last two
    /// dimensions. A tensor with more is a stack of matrices, unless `matrix` makes it one matrix. A side
    /// with more than `max_size` elements has no eigenvectors: Q or S is 1 there. Vectors and numbers, and
    /// matrices of which both sides are larger, have [`AdamW`](crate::AdamW)'s step, from the second gradient
    /// on.
    ///
    /// # What it costs
    /// State of rows·columns parameters, in numbers of the compute dtype:
    /// 2·rows·columns + 2·(rows² + columns²). That is 6 for each parameter of a square matrix, 24 bytes in
    /// F32. A step is 3 products with each side's basis and 1 for its mean: 8·rows + 8·columns operations for
    /// each parameter. Every `interval` steps there is a QR decomposition of each side, and once its
    /// eigenvectors. Both are on the host in F64, a matrix in each thread. On one core of a server, for one
    /// matrix:
    ///
    /// | side | eigenvectors | QR |
    /// | --- | --- | --- |
    /// | 64 | 0.3 ms | 0.1 ms |
    /// | 256 | 13 ms | 6 ms |
    /// | 1024 | 0.95 s | 0.5 s |
    /// | 2048 | 13 s | 5.6 s |
    ///
    /// That is why `max_size` is 1024. Means and bases need their precision: to make the state smaller with
    /// [`StoreAs`](crate::StoreAs), name `m` and `eigen_v` only.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{SOAP, setup, update};
    ///
    /// // Along the eigenvectors of a gradient that stays the same, each step is η, however large the eigenvalue is.
    /// let x = Var::zeros((2, 2), DType::F64, &Device::Cpu)?;
    /// let mut state = setup(SOAP::new(0.5), &x)?;
    /// for _ in 0..2 {
    ///     update(&mut state, &x, &[("", Tensor::new(&[[100f64, 0.0], [0.0, -0.01]], &Device::Cpu)?)])?;
    /// }
    /// assert!(x.to_vec2::<f64>()?.concat().iter().zip([-0.5, 0.0, 0.0, 0.5]).all(|(x, expected)| (x - expected).abs() < 1e-5));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Bits
    /// The sums and matrix products are candle's. In F32 they follow the kind of processor, whatever
    /// [`Isa`](crate::Isa) is chosen. Without the feature `candle` the rule is not there.
    ///
    /// # Departures
    /// As the authors' code does it, checked against pytorch_optimizer's `SOAP` with its QR decomposition in
    /// F64. There ε is added before v is corrected for its start, the decay is applied to the parameter after
    /// the step, λ is 0.01 and `max_precond_dim` 10000, and each dimension of a tensor with more than two has
    /// a basis of its own. The paper does take a step with the first gradient. torch, optax and Optimisers.jl
    /// have no such rule. If a side is larger than the rank of the first gradient, some of its eigenvectors
    /// are arbitrary, only orthogonal to the others: another library has others.
    pub struct SOAP: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 3e-3 => range::non_negative,
        /// β₁, β₂, β₃: the decays of both moments, and of the means whose eigenvectors are taken.
        beta: (f64, f64, f64) = (0.95, 0.95, 0.95) => range::three_decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// After how many steps the eigenvectors are brought nearer to those of the means.
        interval: u64 = 10 => range::at_least_one,
        /// The largest side that has eigenvectors. It decides the state when that is made.
        max_size: u64 = 1024 => range::any,
        /// Which dimensions are rows and columns. It decides the state when that is made.
        matrix: MatrixForm = MatrixForm::Stack => range::any,
    }
}

impl SOAP {
    fn step(
        &self,
        t: u64,
        dx: &Tensor,
        moments: &mut [Tensor; 2],
        sides: &mut [SideStep<'_>],
    ) -> Candle<Tensor> {
        let (b1, b2, b3) = self.beta;
        let [m, v] = moments;
        let stacked = |x: &Tensor| self.matrix.stacked(x);
        let gradient = stacked(dx)?;
        if t == 0 {
            for side in sides {
                side.collect(&gradient, |mean, product| toward(mean, product, 1.0 - b3))?;
                *side.matrix = eigenvectors(side.mean)?;
            }
            // Not zeros: NaN and infinity have to show.
            return dx * 0.0;
        }
        let turned = |x: Tensor| sides.iter().try_fold(x, |x, side| side.side.turned(&x, side.matrix));
        *m = toward(m, dx, 1.0 - b1)?;
        let mut next_v = toward(&stacked(v)?, &turned(gradient.clone())?.sqr()?, 1.0 - b2)?;
        let inside = whole_direction(
            (&turned(stacked(m)?)?, correction(b1, t)),
            (&next_v, correction(b2, t)),
            self.epsilon,
        )?;
        let step = sides.iter().try_fold(inside, |x, side| side.side.turned_back(&x, side.matrix))?;
        for side in sides {
            side.collect(&gradient, |mean, product| toward(mean, product, 1.0 - b3))?;
            if t.is_multiple_of(self.interval) {
                let (basis, order) = nearer(side.mean, side.matrix)?;
                *side.matrix = basis;
                next_v = picked(&next_v, &order, side.side.dimension())?;
            }
        }
        *v = next_v.reshape(v.shape())?;
        step.reshape(dx.shape())? * self.eta
    }

    /// The step of a parameter without matrices.
    fn plain(&self) -> AdamW {
        let (b1, b2, _) = self.beta;
        AdamW {
            eta: self.eta,
            beta: (b1, b2),
            lambda: self.lambda,
            epsilon: self.epsilon,
            ..AdamW::default()
        }
    }
}

impl Rule for SOAP {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        let [m, v, eigen_v] = ["m", "v", "eigen_v"].map(Slot::zeros);
        if self.matrix.dims(x.shape()).is_none() {
            return State::for_slots(x, &[m, v.second_moment()]);
        }
        let state = State::for_slots(x, &[m, eigen_v.second_moment()])?.restarted_by_new_rows("eigen_v");
        with_sides(state, x, self.matrix, self.max_size, &NAMES)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Some(sides) = Side::of_state(state, x, self.matrix, &NAMES) else {
            return state_of_another_rule(self);
        };
        let Parts { slots, counters, .. } = state.parts();
        let (dx, calls) = dx.next_step(counters)?;
        let t = calls - 1;
        if self.matrix.dims(x.shape()).is_none() {
            return Ok(Flow::Step(if t == 0 { dx.scale(0.0) } else { dx.step_of(&self.plain(), t, slots) }));
        }
        let decay = if t == 0 { 0.0 } else { self.eta * self.lambda };
        let step = dx.through(slots.0, false, move |_, dx, tensors| {
            let Some((moments, others)) = tensors.split_first_chunk_mut() else {
                return state_of_another_rule(self);
            };
            Ok(self.step(t, &dx, moments, &mut SideStep::all(&sides, others))?)
        });
        Ok(Flow::Step(step.step_of(&WeightDecay::new(decay), t, Slots::none())))
    }
}
