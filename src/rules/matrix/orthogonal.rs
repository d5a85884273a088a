//! About the nearest orthogonal matrix, by products alone: the iteration of Newton and Schulz.

use candle_core::{DType, Result as Candle, Tensor};

use super::{Matrices, norms, row_norms};

crate::choice! {
    /// The polynomials of the iteration of Newton and Schulz: `u = a·u + b·(u·uᵀ)·u + c·(u·uᵀ)²·u`.
    #[derive(Default)]
    pub enum NewtonSchulz {
        /// One polynomial, (3.4445, -4.775, 2.0315): Jordan's, torch's, optax's.
        ///
        /// It is steep at 0 and leaves singular values between about 0.7 and 1.2.
        #[default]
        Jordan,
        /// Five polynomials in turn, which leave singular values nearer to 1: those of modded-nanogpt.
        ///
        /// From the sixth step on it is the last, as in timm and pytorch_optimizer; NVIDIA's `quintic` begins
        /// with the first again.
        Quintic,
        /// The best polynomial for each step, for singular values from 0.001 on.
        ///
        /// It has the paper's margin of 1.01 for 16 bits. Eight steps reach 1 to six digits. Source: Amsel et
        /// al. 2025, [arXiv 2505.16932](https://arxiv.org/abs/2505.16932).
        PolarExpress,
        /// (1.5, -0.5, 0): slow and exact. Some fifteen steps where the smallest singular value is 0.01 of
        /// the norm.
        Cubic,
    }
}

type Polynomial = (f64, f64, f64);

const QUINTIC: [Polynomial; 5] = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
];

const POLAR_EXPRESS: [Polynomial; 8] = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
];

/// By how much singular values may be larger than they should, in 16 bits.
const MARGIN: f64 = 1.01;

impl NewtonSchulz {
    /// The polynomial of a step, counted from 0.
    fn polynomial(self, step: usize) -> Polynomial {
        match self {
            NewtonSchulz::Jordan => (3.4445, -4.7750, 2.0315),
            NewtonSchulz::Quintic => QUINTIC[step.min(QUINTIC.len() - 1)],
            NewtonSchulz::PolarExpress => {
                let last = POLAR_EXPRESS.len() - 1;
                let (a, b, c) = POLAR_EXPRESS[step.min(last)];
                if step < last { (a / MARGIN, b / MARGIN.powi(3), c / MARGIN.powi(5)) } else { (a, b, c) }
            }
            NewtonSchulz::Cubic => (1.5, -0.5, 0.0),
        }
    }

    /// The norm that a matrix gets before the first step.
    fn norm(self) -> f64 {
        if self == NewtonSchulz::PolarExpress { 1.0 / MARGIN } else { 1.0 }
    }
}

crate::choice! {
    /// The factor of a matrix's step, by its number of rows m and of columns n.
    #[derive(Default)]
    pub enum StepScale {
        /// √max(1, m / n): Jordan's code, torch's `original`.
        ///
        /// In optax it is √max(1, n / m), as its weights are stored with their inputs as rows.
        #[default]
        Original,
        /// 0.2·√max(m, n), for a step whose root mean square is that of AdamW.
        ///
        /// So AdamW's η and λ can be taken over (Liu et al. 2025,
        /// [arXiv 2502.16982](https://arxiv.org/abs/2502.16982)): Moonlight, torch's `match_rms_adamw`.
        MatchAdamW,
        /// √(m / n), the spectral norm that lets η be kept when a model is made wider.
        ///
        /// It is torch's `spectral_unclamped`, and dion's.
        Spectral,
        /// 1.
        None,
    }
}

impl StepScale {
    fn of(self, rows: usize, columns: usize) -> f64 {
        let (m, n) = (rows as f64, columns as f64);
        match self {
            StepScale::Original => (m / n).max(1.0).sqrt(),
            StepScale::MatchAdamW => 0.2 * m.max(n).sqrt(),
            StepScale::Spectral => (m / n).sqrt(),
            StepScale::None => 1.0,
        }
    }
}

crate::choice! {
    /// In which dtype matrices are multiplied.
    #[derive(Default)]
    pub enum Products {
        /// That of the arithmetic: F32, or F64.
        #[default]
        Compute,
        /// BF16, as the authors' code and torch do: faster on devices with units for it.
        ///
        /// On the CPU it is slower, as candle widens to F32 there. The polynomials are added up in F32, of
        /// coefficients that are not rounded, and rounded once.
        BF16,
        /// F16.
        F16,
    }
}

/// At most 100 steps of the iteration: a number from a file must not keep an update busy for ever.
pub(crate) fn at_most_100(steps: u64) -> Option<&'static str> {
    (steps > 100).then_some("100 or less")
}

/// How matrices are made orthogonal, and how long their steps are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Orthogonal {
    pub(crate) matrices: Matrices,
    pub(crate) steps: u64,
    pub(crate) coefficients: NewtonSchulz,
    pub(crate) scale: StepScale,
    pub(crate) products: Products,
    pub(crate) epsilon: f64,
    pub(crate) equilibrate: bool,
    pub(crate) renormalise: bool,
}

impl Orthogonal {
    /// Each matrix of a stack with all singular values about 1.
    pub(crate) fn of(&self, stack: &Tensor) -> Candle<Tensor> {
        let (_, rows, columns) = stack.dims3()?;
        // Divided first: a row of zeros has no factor that is finite for each ε.
        let stack = &if self.equilibrate {
            let rows_of_norm_1 = stack.broadcast_div(&row_norms(stack)?.maximum(self.epsilon)?)?;
            rows_of_norm_1.broadcast_mul(&(norms(stack)? / (rows as f64).sqrt())?)?
        } else {
            stack.clone()
        };
        let sizes = ((norms(stack)? + self.epsilon)? / self.coefficients.norm())?;
        let u = stack.broadcast_div(&sizes)?.to_dtype(match self.products {
            Products::Compute => stack.dtype(),
            Products::BF16 => DType::BF16,
            Products::F16 => DType::F16,
        })?;
        // Smaller products: the iteration is on the smaller side.
        let u = if rows > columns {
            self.iterated(u.transpose(1, 2)?)?.transpose(1, 2)?
        } else {
            self.iterated(u)?
        };
        let u = u.to_dtype(stack.dtype())?;
        if !self.renormalise {
            return Ok(u);
        }
        u.broadcast_div(&norms(&u)?.maximum(self.epsilon)?)? * (rows.min(columns) as f64).sqrt()
    }

    fn iterated(&self, mut u: Tensor) -> Candle<Tensor> {
        let products = u.dtype();
        // The coefficients have more digits than 16 bits.
        let wide = |x: &Tensor| x.to_dtype(if products == DType::F64 { DType::F64 } else { DType::F32 });
        for step in 0..self.steps as usize {
            let (a, b, c) = self.coefficients.polynomial(step);
            let s = u.matmul(&u.transpose(1, 2)?)?;
            let linear = (wide(&s)? * b)?;
            let polynomial = if c == 0.0 { linear } else { (linear + (wide(&s.matmul(&s)?)? * c)?)? }
                .to_dtype(products)?;
            u = ((wide(&u)? * a)? + wide(&polynomial.matmul(&u)?)?)?.to_dtype(products)?;
        }
        Ok(u)
    }

    /// The factor of the steps of a stack's matrices.
    pub(crate) fn scale(&self, stack: &Tensor) -> Candle<f64> {
        let (_, rows, columns) = stack.dims3()?;
        Ok(self.scale.of(rows, columns))
    }
}

/// [`hyper_parameters!`](crate::hyper_parameters) of a rule that makes matrices orthogonal: its own fields,
/// with an `epsilon` among them, and those that all such rules have.
macro_rules! orthogonal_parameters {
    (
        $(#[$meta:meta])*
        pub struct $Rule:ident, $scale:expr, {
            $($fields:tt)*
        }
    ) => {
        $crate::hyper_parameters! {
            $(#[$meta])*
            pub struct $Rule: AdaptiveStep {
                $($fields)*
                /// The steps of the iteration, at most 100. Singular values are about 1 after five. Each step
                /// is three matrix products.
                ns_steps: u64 = 5 => $crate::rules::matrix::at_most_100,
                /// The polynomials of the iteration.
                coefficients: $crate::rules::matrix::NewtonSchulz = $crate::rules::matrix::NewtonSchulz::Jordan => $crate::rule::range::any,
                /// The factor of a step, by the shape of its matrix.
                scale: $crate::rules::matrix::StepScale = $scale => $crate::rule::range::any,
                /// Which dimensions are rows and columns.
                matrix: $crate::rules::matrix::MatrixForm = $crate::rules::matrix::MatrixForm::Stack => $crate::rule::range::any,
                /// The number of equal parts into which rows are cut, each a matrix: the heads of attention.
                heads: u64 = 1 => $crate::rule::range::at_least_one,
                /// The rows of each part of a fused matrix, in place of `heads`: query, key and value; gate
                /// and up.
                parts: $crate::rule::field::Sizes = $crate::rule::field::Sizes::default() => $crate::rule::range::any,
                /// In which dtype the products of the iteration are.
                products: $crate::rules::matrix::Products = $crate::rules::matrix::Products::Compute => $crate::rule::range::any,
                /// Whether all rows of a matrix get one norm before the iteration, the root mean square of
                /// theirs.
                ///
                /// It is the row form of MuonEq ([arXiv 2603.28254](https://arxiv.org/abs/2603.28254)), which
                /// nanochat has on.
                equilibrate: bool = false => $crate::rule::range::any,
                /// Whether a matrix gets the norm of an orthogonal one after the iteration, √min(rows,
                /// columns).
                ///
                /// It is Muon+ ([arXiv 2602.21545](https://arxiv.org/abs/2602.21545)), which nanochat has on.
                renormalise: bool = false => $crate::rule::range::any,
            }
        }

        impl $Rule {
            fn matrices(&self) -> $crate::rules::matrix::Matrices {
                $crate::rules::matrix::Matrices { form: self.matrix, heads: self.heads, parts: self.parts }
            }

            fn orthogonal(&self) -> $crate::rules::matrix::Orthogonal {
                $crate::rules::matrix::Orthogonal {
                    matrices: self.matrices(),
                    steps: self.ns_steps,
                    coefficients: self.coefficients,
                    scale: self.scale,
                    products: self.products,
                    epsilon: $crate::numbers::value::above_zero(self.epsilon),
                    equilibrate: self.equilibrate,
                    renormalise: self.renormalise,
                }
            }
        }
    };
}
pub(crate) use orthogonal_parameters;
