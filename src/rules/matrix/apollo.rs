use candle_core::{Result as Candle, Tensor};

use super::low_rank::{ProjectedStep, direction, move_moments, projected_step, with_moments};
use super::stack::ratio;
use super::tensors::whole_direction;
use super::{MatrixForm, norms, row_norms};
use crate::error::Result;
use crate::rule::{Flow, Gradient, Parameter, Rule, Slot, State, range};
use crate::rules::adam::adamw::AdamW;
use crate::rules::moments::correction;

crate::hyper_parameters! {
    /// APOLLO: the gradient, with each channel scaled to the length that Adam would give it.
    ///
    /// These lengths are measured in a random projection to `rank` dimensions. [`APOLLO::mini`] has one
    /// dimension and one length for each matrix, and needs hardly more memory than plain descent. Source: Zhu
    /// et al. 2024, [arXiv 2412.05270](https://arxiv.org/abs/2412.05270).
    ///
    /// ```text
    /// g   = P·dx                                   dx·Pᵀ where a matrix has at least as many rows as columns
    /// m   = β₁·m + (1 - β₁)·g,  v = β₂·v + (1 - β₂)·g²
    /// s   = ‖m / (√v + ε)‖ / ‖g‖         for each column (row with dx·Pᵀ); for the matrix if tensor_wise
    /// u   = s·dx
    /// u   = u·min(1, (1 + growth)·size / ‖u‖)      not where size = 0
    /// size = ‖u‖
    /// u   = η·α·u·√(1 - β₂ᵗ) / (1 - β₁ᵗ)
    /// dx' = u + η·λ·(x - u)                        the decay comes after the step
    /// ```
    ///
    /// P has `rank` rows, which are as long as the shorter side. The elements of P are random numbers from
    /// N(0, 1 / rank), so that ‖g‖ is about ‖dx‖, whatever the rank. As in [`GaLore`](crate::GaLore), P
    /// changes after each `interval` steps and is not stored: each step makes P again from the seed. Rows and
    /// columns are the last two dimensions. A tensor with more dimensions is a stack of matrices, unless
    /// `matrix` makes it one matrix. Vectors, numbers, and matrices whose shorter side is not longer than
    /// `rank` have [`AdamW`](crate::AdamW)'s step.
    ///
    /// # What it costs
    /// The state has 2·rank numbers for each element of the longer side, and one number for each matrix. In
    /// F32 that is 8·rank / (length of the shorter side) bytes for each parameter, where Adam has 8. A step
    /// takes one product, 2·rank operations for each parameter. The host makes rank·(length of the shorter
    /// side) random numbers in each step, in about 60 ns each, divided among its cores.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{APOLLO, setup, update};
    ///
    /// let x = Var::zeros((64, 256), DType::F32, &Device::Cpu)?;
    /// let mut state = setup(APOLLO::mini(0.01), &x)?;
    /// assert_eq!(state.bytes(), 8 * 256 + 4);
    /// // All channels have one length, so the step has the direction of the gradient.
    /// update(&mut state, &x, &[("", Tensor::ones((64, 256), DType::F32, &Device::Cpu)?)])?;
    /// let [first, last] = [(0, 0), (63, 255)].map(|(row, column)| x.get(row).and_then(|row| row.get(column)?.to_scalar::<f32>()));
    /// assert!(first? < 0.0 && x.get(0)?.get(0)?.to_scalar::<f32>()? == last?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Bits
    /// Sums and matrix products are candle's. In F32 their bits depend on the kind of processor, whatever
    /// [`Isa`](crate::Isa) is chosen. The rule needs the feature `candle`.
    ///
    /// # Departures
    /// The rule follows the authors' code (apollo-torch 1.0.3). The tests compare both with the same P. The
    /// authors' code
    ///
    /// - adds 1e-8 to ‖g‖ and to size. Its steps grow by a hundredth at most, so that they stay near zero for
    ///   hundreds of calls after a gradient of zeros. Here a step of any length can follow a step of length
    ///   0;
    /// - has an option `scale`, whose square root is α (the γ of the paper is 1 + growth);
    /// - projects every matrix of its groups. Other parameters get an AdamW whose ε is added before v is
    ///   corrected for its start, and whose decay comes after the step. Here other parameters get
    ///   [`AdamW`](crate::AdamW).
    ///
    /// m and v are stored as in [`GaLore`](crate::GaLore), for a P with numbers from N(0, 1 / length of the
    /// shorter side), so that each of the two rules can continue with the moments of the other.
    /// pytorch_optimizer's `APOLLO` scales g instead of dx, and is another rule. torch, optax and
    /// Optimisers.jl have no such rule.
    pub struct APOLLO: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 0.01 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// The number of dimensions of the projection. Choose `rank` before `setup`: it decides the state's
        /// shape.
        rank: u64 = 256 => range::at_least_one,
        /// The number of steps after which the projection changes.
        interval: u64 = 200 => range::at_least_one,
        /// α: a factor on the steps of projected matrices. Steps of AdamW do not have this factor.
        alpha: f64 = 1.0 => range::non_negative,
        /// The fraction by which a step may be longer than the step before; infinity for no limit.
        growth: f64 = 0.01 => non_negative_or_infinity,
        /// Whether each matrix has one length, instead of one for each channel.
        tensor_wise: bool = false => range::any,
        /// The seed of the projections.
        seed: u64 = 0 => range::any,
        /// Which dimensions are rows and columns. Choose `matrix` before `setup`: it decides the state's
        /// shape.
        matrix: MatrixForm = MatrixForm::Stack => range::any,
    }
}

fn non_negative_or_infinity(value: f64) -> Option<&'static str> {
    (value.is_nan() || value < 0.0).then_some("a number of 0 or more, or infinity")
}

impl APOLLO {
    /// APOLLO-Mini: rank 1, one length for each matrix, α = √128.
    pub fn mini(eta: f64) -> Self {
        APOLLO {
            rank: 1,
            alpha: 128f64.sqrt(),
            tensor_wise: true,
            ..APOLLO::new(eta)
        }
    }

    fn step(
        &self,
        ProjectedStep { t, path, projection }: ProjectedStep<'_>,
        dx: &Tensor,
        [m, v, size]: &mut [Tensor; 3],
    ) -> Candle<Tensor> {
        let Some(projection) = projection else {
            return direction(dx, [m, v], self.beta, self.epsilon, t)? * self.eta;
        };
        let matrices = self.matrix.stacked(dx)?;
        let vectors = projection.random_vectors(self.seed, path, (t - 1) / self.interval, dx)?;
        let projected = projection.project(&matrices, &vectors)?;
        move_moments(&projected, [&mut *m, &mut *v], self.beta)?;
        // `random_vectors` returns the numbers of P divided by `spread`, so m and √v are smaller by this
        // factor. The direction stays the same if ε is divided by `spread`, too.
        let spread = projection.spread();
        let adam = whole_direction((m, 1.0), (v, 1.0), self.epsilon / spread)?;
        let lengths = |x: &Tensor| match (self.tensor_wise, projection.dimension()) {
            (true, _) => norms(x),
            (false, 1) => row_norms(&x.t()?)?.t(),
            (false, _) => row_norms(x),
        };
        let scaled = matrices.broadcast_mul(&ratio(&lengths(&adam)?, &(lengths(&projected)? * spread)?)?)?;
        let factor = self.growth_factor(&norms(&scaled)?, size)?;
        let rate = self.eta * self.alpha * correction(self.beta.1, t).sqrt() / correction(self.beta.0, t);
        // η·λ·(x - u) has two terms: this factor makes the term of u, and `projected_step` adds the term of
        // x.
        scaled.broadcast_mul(&factor)?.reshape(dx.shape())? * (rate * (1.0 - self.eta * self.lambda))
    }

    /// The factor that keeps a step of this length from being much longer than the step before.
    ///
    /// `size` has the length of the step before, and becomes the length of the limited step.
    fn growth_factor(&self, length: &Tensor, size: &mut Tensor) -> Candle<Tensor> {
        let longest = (&*size * (1.0 + self.growth))?;
        // After a step of length 0 any length is allowed, otherwise all further steps would be 0.
        let is_longer = (length.gt(&longest)? * size.gt(0.0)?)?;
        *size = is_longer.where_cond(&longest, length)?;
        is_longer.where_cond(&ratio(&longest, length)?, &length.ones_like()?)
    }
}

impl Rule for APOLLO {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        let state = with_moments(x, self.matrix, self.rank)?;
        match self.matrix.dims(x.shape()) {
            // A process without elements of this parameter has an empty tensor.
            Some([count, ..]) => state.with_slot(Slot::zeros("size"), x, (count.min(x.elem_count()), 1, 1)),
            None => Ok(state),
        }
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let adam = AdamW::coupled(self.eta, self.beta, self.lambda, self.epsilon);
        projected_step(self, self.matrix, adam, state, x, dx, |arguments, dx, tensors| {
            self.step(arguments, dx, tensors)
        })
    }
}
