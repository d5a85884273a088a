use candle_core::{Result as Candle, Tensor};

use super::MatrixForm;
use super::low_rank::{ProjectedStep, direction, projected_step, with_moments};
use crate::error::Result;
use crate::rule::{Flow, Gradient, Parameter, Rule, State, range};
use crate::rules::adam::adamw::AdamW;

crate::hyper_parameters! {
    /// GaLore with random projections: Adam on `rank` directions of the gradient at a time.
    ///
    /// GaLore is made for matrices whose moments would take too much memory. Source: Zhao et al. 2024, [arXiv
    /// 2403.03507](https://arxiv.org/abs/2403.03507).
    ///
    /// ```text
    /// g   = P·dx                                   dx·Pᵀ where a matrix has at least as many rows as columns
    /// m   = β₁·m + (1 - β₁)·g,  v = β₂·v + (1 - β₂)·g²
    /// u   = m̂ / (√v̂ + ε)                           m̂ = m / (1 - β₁ᵗ), v̂ = v / (1 - β₂ᵗ)
    /// dx' = η·(α·Pᵀ·u + λ·x)                       α·u·P
    /// ```
    ///
    /// P has `rank` rows, which are as long as the shorter side of the matrix. The numbers of P are
    /// independent, from N(0, 1 / length), so that the rows are nearly orthogonal and of length 1. P is
    /// replaced every `interval` steps; m and v stay. Each number is a hash of seed, path, interval and
    /// index. Therefore the numbers are not stored, and they are the same with any engine, on any rank and
    /// after a restart.
    ///
    /// Rows and columns are the last two dimensions. A tensor with more dimensions is a stack of matrices,
    /// unless `matrix` makes it one matrix. Vectors and numbers, and matrices whose shorter side is not
    /// longer than `rank`, have [`AdamW`](crate::AdamW)'s step.
    ///
    /// # What it costs
    /// The state has 2·rank numbers for each element of the longer side. In F32 this is 8·rank / (length of
    /// the shorter side) bytes per element of the parameter, instead of 8. A step costs two products, 4·rank
    /// operations per element, and rank·(length of the shorter side) random numbers. The host makes each
    /// number in about 60 ns, and divides the numbers among its cores.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{GaLore, setup, update};
    ///
    /// let x = Var::zeros((64, 256), DType::F32, &Device::Cpu)?;
    /// let mut state = setup(GaLore { rank: 8, ..GaLore::new(0.01) }, &x)?;
    /// assert_eq!(state.bytes(), 8 * (8 * 256));
    /// update(&mut state, &x, &[("", Tensor::ones((64, 256), DType::F32, &Device::Cpu)?)])?;
    /// // The step has 8 of 64 directions, and leads downwards.
    /// assert!(x.sum_all()?.to_scalar::<f32>()? < 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Bits
    /// candle computes sums and matrix products. In F32 their bits depend on the kind of processor, whatever
    /// [`Isa`](crate::Isa) is chosen. The rule needs the feature `candle`.
    ///
    /// # Departures
    /// The paper's P has the first singular vectors of the gradient, which cost a decomposition in each
    /// interval and the memory of P. Random vectors are in the paper's ablation and in Flora (Hao et al.
    /// 2024, [arXiv 2402.03293](https://arxiv.org/abs/2402.03293)). Random vectors need more steps and a
    /// larger rank. The rule is checked against pytorch_optimizer's `GaLore` with this P, except for two
    /// differences: that rule decays after the step, and adds ε before the bias correction of v. torch, optax
    /// and Optimisers.jl have no such rule.
    pub struct GaLore: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 0.01 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// The number of directions. Choose `rank` before `setup`: it decides the state's shape.
        rank: u64 = 128 => range::at_least_one,
        /// The number of steps after which P is replaced.
        interval: u64 = 200 => range::at_least_one,
        /// α: the size of projected steps, relative to those of vectors.
        alpha: f64 = 0.25 => range::non_negative,
        /// The seed of the directions.
        seed: u64 = 0 => range::any,
        /// Which dimensions are rows and columns. Choose `matrix` before `setup`: it decides the state's
        /// shape.
        matrix: MatrixForm = MatrixForm::Stack => range::any,
    }
}

impl GaLore {
    fn step(
        &self,
        ProjectedStep { t, path, projection }: ProjectedStep<'_>,
        dx: &Tensor,
        [m, v]: &mut [Tensor; 2],
    ) -> Candle<Tensor> {
        let mut adam = |gradient: &Tensor| direction(gradient, [m, v], self.beta, self.epsilon, t);
        let Some(projection) = projection else {
            return adam(dx)? * self.eta;
        };
        let vectors = projection.random_vectors(self.seed, path, (t - 1) / self.interval, dx)?;
        let step = adam(&projection.project(&self.matrix.stacked(dx)?, &vectors)?)?;
        projection.project_back(&step, &vectors)?.reshape(dx.shape())? * (self.eta * self.alpha)
    }
}

impl Rule for GaLore {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        with_moments(x, self.matrix, self.rank)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let adam = AdamW::coupled(self.eta, self.beta, self.lambda, self.epsilon);
        projected_step(self, self.matrix, adam, state, x, dx, |arguments, dx, moments| {
            self.step(arguments, dx, moments)
        })
    }
}
