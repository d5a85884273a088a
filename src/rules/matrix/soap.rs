use candle_core::{Result as Candle, Tensor};

use super::MatrixForm;
use super::bases::{eigenvectors, iterate_basis, reordered};
use super::stack::{Side, SideNames, SideStep, with_sides};
use super::tensors::{lerp, whole_direction};
use crate::error::Result;
use crate::rule::{Flow, Gradient, Parameter, Parts, Rule, Slot, State, range, state_of_another_rule};
use crate::rules::adam::adamw::AdamW;
use crate::rules::gradient::weight_decay::with_decay;
use crate::rules::moments::correction;

const NAMES: SideNames = [
    (Side::Left, ["left", "left_basis"]),
    (Side::Right, ["right", "right_basis"]),
];

crate::hyper_parameters! {
    /// SOAP: Adam in the eigenvectors of [`Shampoo`](crate::Shampoo)'s matrices.
    ///
    /// Source: Vyas et al. 2024, [arXiv 2409.11321](https://arxiv.org/abs/2409.11321).
    ///
    /// ```text
    /// first:  L = (1 - β₃)·dx·dxᵀ,  R = (1 - β₃)·dxᵀ·dx,  Q, S their eigenvectors, dx' = 0; then
    /// m   = β₁·m + (1 - β₁)·dx
    /// v   = β₂·v + (1 - β₂)·(Qᵀ·dx·S)²                     v is in the coordinates of Q and S
    /// u   = Q·((Qᵀ·m̂·S) / (√v̂ + ε))·Sᵀ                     m̂ = m / (1 - β₁ᵗ⁻¹), v̂ = v / (1 - β₂ᵗ⁻¹)
    /// dx' = η·(u + λ·x)
    /// L   = β₃·L + (1 - β₃)·dx·dxᵀ,  R = β₃·R + (1 - β₃)·dxᵀ·dx
    /// after every `interval` of these steps: Q, S = the bases of L·Q and R·S (QR decomposition),
    ///                                        sorted, the largest eigenvalue first
    /// ```
    ///
    /// The first gradient only makes the first eigenvectors: the parameter stays. Rows and columns are the
    /// last two dimensions. A tensor with more dimensions is a stack of matrices, unless `matrix` makes it
    /// one matrix. A side longer than `max_size` has no eigenvectors: its Q or S is the identity. If both
    /// sides are longer, the matrix gets [`AdamW`](crate::AdamW)'s step from the second gradient on. Vectors
    /// and numbers get this step, too.
    ///
    /// # What it costs
    /// A matrix has a state of 2·rows·columns + 2·(rows² + columns²) numbers in the compute dtype. For a
    /// square matrix that is 6 numbers for each parameter, 24 bytes in F32. A step takes, for each side, 3
    /// products with the basis and 1 product for the mean: 8·rows + 8·columns operations for each parameter.
    /// The first gradient costs the eigenvectors of each side, and every `interval` steps cost a QR
    /// decomposition of each side. The host computes both in F64, one matrix in each thread. On one core of a
    /// server, one matrix needs:
    ///
    /// | side | eigenvectors | QR |
    /// | --- | --- | --- |
    /// | 64 | 0.3 ms | 0.1 ms |
    /// | 256 | 13 ms | 6 ms |
    /// | 1024 | 0.95 s | 0.5 s |
    /// | 2048 | 13 s | 5.6 s |
    ///
    /// Therefore the default of `max_size` is 1024. Means and bases need their precision:
    /// [`StoreAs`](crate::StoreAs) stores only `m` and `eigen_v` in fewer bits.
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
    /// Sums and matrix products are candle's. In F32 their bits depend on the kind of processor, whatever
    /// [`Isa`](crate::Isa) is chosen. The rule needs the feature `candle`.
    ///
    /// # Departures
    /// The rule was checked against pytorch_optimizer's `SOAP` with its QR decomposition in F64. The rule is
    /// that of the authors' code, except that the authors' code adds ε before it corrects v for its start,
    /// applies the decay to the parameter after the step, has λ = 0.01 and `max_precond_dim` = 10000, and
    /// gives a tensor of more than two dimensions one basis for each dimension. The paper takes a step with
    /// the first gradient. torch, optax and Optimisers.jl have no such rule.
    ///
    /// If a side is longer than the rank of the first gradient, some of its eigenvectors are arbitrary, only
    /// orthogonal to the others. Other libraries then find different eigenvectors.
    pub struct SOAP: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 3e-3 => range::non_negative,
        /// β₁, β₂, β₃: the decays of both moments, and of the means L and R.
        beta: (f64, f64, f64) = (0.95, 0.95, 0.95) => range::three_decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// The number of steps after which the bases are brought nearer to the eigenvectors of the means.
        interval: u64 = 10 => range::at_least_one,
        /// The longest side that has eigenvectors. Choose `max_size` before `setup`: it decides the state's
        /// shape.
        max_size: u64 = 1024 => range::any,
        /// Which dimensions are rows and columns. Choose `matrix` before `setup`: it decides the state's
        /// shape.
        matrix: MatrixForm = MatrixForm::Stack => range::any,
    }
}

impl SOAP {
    fn step(
        &self,
        steps: u64,
        dx: &Tensor,
        moments: &mut [Tensor; 2],
        sides: &mut [SideStep<'_>],
    ) -> Candle<Tensor> {
        let (b1, b2, b3) = self.beta;
        let [m, v] = moments;
        let stacked = |x: &Tensor| self.matrix.stacked(x);
        let stacked_dx = stacked(dx)?;
        if steps == 0 {
            for side_step in sides {
                side_step.update_mean(&stacked_dx, |mean, product| lerp(mean, product, 1.0 - b3))?;
                *side_step.transform = eigenvectors(side_step.mean)?;
            }
            // The result is a product instead of zeros, so that NaN and infinity in the gradient reach the
            // parameter.
            return dx * 0.0;
        }
        let rotated = |x: Tensor| {
            sides
                .iter()
                .try_fold(x, |x, side_step| side_step.side.rotate(&x, side_step.transform))
        };
        // m is stored in the parameter's coordinates, and rotated in each step, so that new bases do not
        // change m.
        *m = lerp(m, dx, 1.0 - b1)?;
        let mut next_v = lerp(&stacked(v)?, &rotated(stacked_dx.clone())?.sqr()?, 1.0 - b2)?;
        let rotated_step = whole_direction(
            (&rotated(stacked(m)?)?, correction(b1, steps)),
            (&next_v, correction(b2, steps)),
            self.epsilon,
        )?;
        let step = sides.iter().try_fold(rotated_step, |x, side_step| {
            side_step.side.rotate_back(&x, side_step.transform)
        })?;
        for side_step in sides {
            side_step.update_mean(&stacked_dx, |mean, product| lerp(mean, product, 1.0 - b3))?;
            if steps.is_multiple_of(self.interval) {
                let (basis, order) = iterate_basis(side_step.mean, side_step.transform)?;
                *side_step.transform = basis;
                // v has a number for each eigenvector, and `iterate_basis` has sorted the eigenvectors again.
                next_v = reordered(&next_v, &order, side_step.side.dimension())?;
            }
        }
        *v = next_v.reshape(v.shape())?;
        step.reshape(dx.shape())? * self.eta
    }
}

impl Rule for SOAP {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        // A v in the coordinates of eigenvectors has another name, so that no rule takes it over as Adam's
        // second moment.
        let [m, v, eigen_v] = ["m", "v", "eigen_v"].map(Slot::zeros);
        if self.matrix.dims(x.shape()).is_none() {
            return State::for_slots(x, &[m, v.second_moment()]);
        }
        let state = State::for_slots(x, &[m, eigen_v.second_moment()])?.restarted_by_new_rows("eigen_v");
        with_sides(state, x, self.matrix, self.max_size, &NAMES)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Some(sides) = Side::from_state(state, x, self.matrix, &NAMES) else {
            return state_of_another_rule(self);
        };
        let Parts { slots, counters, .. } = state.parts();
        let (dx, calls) = dx.next_step(counters)?;
        // The first gradient makes no step, so that corrections count from the second.
        let steps = calls - 1;
        if self.matrix.dims(x.shape()).is_none() {
            let adam_step = if steps == 0 {
                dx.scale(0.0)
            } else {
                let (b1, b2, _) = self.beta;
                let adam = AdamW::coupled(self.eta, (b1, b2), self.lambda, self.epsilon);
                dx.step_of(&adam, steps, slots)
            };
            return Ok(Flow::Step(adam_step));
        }
        let decay = if steps == 0 { 0.0 } else { self.eta * self.lambda };
        let adaptive_step = dx.append_function(slots.0, false, move |_, dx, tensors| {
            let Some((moments, side_tensors)) = tensors.split_first_chunk_mut() else {
                return state_of_another_rule(self);
            };
            Ok(self.step(steps, &dx, moments, &mut SideStep::all(&sides, side_tensors))?)
        });
        Ok(Flow::Step(with_decay(adaptive_step, decay)))
    }
}
