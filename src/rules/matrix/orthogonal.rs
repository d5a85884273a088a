//! Makes matrices almost orthogonal by matrix products alone: the Newton-Schulz iteration.
//!
//! A polynomial `a·u + b·(u·uᵀ)·u + c·(u·uᵀ)²·u` maps each singular value σ of u to a·σ + b·σ³ + c·σ⁵, and
//! leaves the singular vectors as they are. Applied repeatedly, such polynomials bring all singular values
//! near 1 without a decomposition. [`Orthogonal::orthogonalise`] works in this order:
//!
//! 1. If `equilibrate` is set, scale all rows to one norm.
//! 2. Divide the matrix by its norm, because the polynomials need singular values of at most 1.
//! 3. Transpose a matrix with more rows than columns, so that u·uᵀ has the shorter side.
//! 4. Apply `steps` polynomials, with products in 16 bits if `products` is a 16-bit dtype.
//! 5. Undo step 3. If `renormalise` is set, scale to the norm of an orthogonal matrix.

use candle_core::{DType, Result as Candle, Tensor};

use super::{Matrices, norms, row_norms};

crate::choice! {
    /// The polynomials of the Newton-Schulz iteration: `u = a·u + b·(u·uᵀ)·u + c·(u·uᵀ)²·u`.
    #[derive(Default)]
    pub enum NewtonSchulz {
        /// One polynomial, (3.4445, -4.775, 2.0315): Jordan's, torch's, optax's.
        ///
        /// The polynomial is steep at 0, so small singular values grow fast. All singular values end between
        /// about 0.7 and 1.2.
        #[default]
        Jordan,
        /// Five polynomials in turn, those of modded-nanogpt.
        ///
        /// Singular values end nearer to 1 than with `Jordan`. Steps after the fifth repeat the fifth
        /// polynomial, as in timm and pytorch_optimizer. NVIDIA's `quintic` starts again with the first
        /// polynomial.
        Quintic,
        /// The best polynomial for each step, if singular values are between 0.001 and 1.
        ///
        /// The polynomials have the paper's margin of 1.01 for rounding to 16 bits. Eight steps reach 1 to
        /// six digits. Source: Amsel et al. 2025, [arXiv 2505.16932](https://arxiv.org/abs/2505.16932).
        PolarExpress,
        /// One polynomial, (1.5, -0.5, 0): slow and exact.
        ///
        /// If the smallest singular value is 0.01 of the norm, about fifteen steps are needed.
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

/// The factor by which singular values may exceed 1, because 16 bits round them.
const MARGIN: f64 = 1.01;

impl NewtonSchulz {
    /// The polynomial of a step. The first step is 0.
    fn polynomial(self, step: usize) -> Polynomial {
        match self {
            NewtonSchulz::Jordan => (3.4445, -4.7750, 2.0315),
            NewtonSchulz::Quintic => QUINTIC[step.min(QUINTIC.len() - 1)],
            NewtonSchulz::PolarExpress => {
                let last = POLAR_EXPRESS.len() - 1;
                let (a, b, c) = POLAR_EXPRESS[step.min(last)];
                // The last polynomial has no margin: it maps 1 to exactly 1, so that further steps converge.
                if step < last {
                    (a / MARGIN, b / MARGIN.powi(3), c / MARGIN.powi(5))
                } else {
                    (a, b, c)
                }
            }
            NewtonSchulz::Cubic => (1.5, -0.5, 0.0),
        }
    }

    /// The norm that a matrix is scaled to before the first step.
    fn norm(self) -> f64 {
        if self == NewtonSchulz::PolarExpress {
            1.0 / MARGIN
        } else {
            1.0
        }
    }
}

crate::choice! {
    /// The factor on the step of a matrix with m rows and n columns.
    #[derive(Default)]
    pub enum StepScale {
        /// √max(1, m / n), as in Jordan's code. torch calls this factor `original`.
        ///
        /// optax has √max(1, n / m), because its weights have their inputs as rows.
        #[default]
        Original,
        /// 0.2·√max(m, n), which gives a step the root mean square of AdamW's step.
        ///
        /// AdamW's η and λ then fit (Liu et al. 2025, [arXiv 2502.16982](https://arxiv.org/abs/2502.16982)).
        /// Moonlight has this factor. torch calls the factor `match_rms_adamw`.
        MatchAdamW,
        /// √(m / n), the spectral norm for which one η fits models of all widths.
        ///
        /// dion has this factor. torch calls the factor `spectral_unclamped`.
        Spectral,
        /// No factor: 1.
        None,
    }
}

impl StepScale {
    fn factor(self, rows: usize, columns: usize) -> f64 {
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
    /// The dtype of the matrix products in an iteration.
    #[derive(Default)]
    pub enum Products {
        /// The dtype of the arithmetic: F32, or F64.
        #[default]
        Compute,
        /// BF16, as in the authors' code and torch: faster on devices with units for BF16.
        ///
        /// On the CPU BF16 is slower, because candle's products widen BF16 to F32. The terms of a polynomial
        /// are added in F32, with coefficients that are not rounded. Each sum is rounded once.
        BF16,
        /// F16.
        F16,
    }
}

/// Refuses more than 100 steps: a number from a file must not keep an update busy for ever.
pub(crate) fn at_most_100(steps: u64) -> Option<&'static str> {
    (steps > 100).then_some("100 or less")
}

/// The settings of the iteration, and of the length of steps.
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
    /// Returns a stack of matrices with all singular values moved near 1.
    pub(crate) fn orthogonalise(&self, stack: &Tensor) -> Candle<Tensor> {
        let (_, rows, columns) = stack.dims3()?;
        // Rows are divided first and multiplied later, because a single factor (mean norm / row norm)
        // overflows for a row of zeros with a tiny ε, and 0·∞ is NaN.
        let equilibrated = &if self.equilibrate {
            let rows_of_norm_1 = stack.broadcast_div(&row_norms(stack)?.maximum(self.epsilon)?)?;
            rows_of_norm_1.broadcast_mul(&(norms(stack)? / (rows as f64).sqrt())?)?
        } else {
            stack.clone()
        };
        // No singular value of a matrix is larger than the matrix's norm. After the division all singular
        // values are at most 1.
        let divisors = ((norms(equilibrated)? + self.epsilon)? / self.coefficients.norm())?;
        let normed = equilibrated
            .broadcast_div(&divisors)?
            .to_dtype(match self.products {
                Products::Compute => stack.dtype(),
                Products::BF16 => DType::BF16,
                Products::F16 => DType::F16,
            })?;
        // Products are smallest if the matrix has no more rows than columns, because u·uᵀ has rows² elements.
        let iterated = if rows > columns {
            self.iterate(normed.transpose(1, 2)?)?.transpose(1, 2)?
        } else {
            self.iterate(normed)?
        };
        let u = iterated.to_dtype(stack.dtype())?;
        if !self.renormalise {
            return Ok(u);
        }
        // A matrix of zeros stays zero, because its norm is raised to ε.
        u.broadcast_div(&norms(&u)?.maximum(self.epsilon)?)? * (rows.min(columns) as f64).sqrt()
    }

    fn iterate(&self, mut u: Tensor) -> Candle<Tensor> {
        let dtype = u.dtype();
        // Coefficients rounded to 16 bits would make another polynomial.
        let widen = |x: &Tensor| {
            x.to_dtype(if dtype == DType::F64 {
                DType::F64
            } else {
                DType::F32
            })
        };
        for step in 0..self.steps as usize {
            let (a, b, c) = self.coefficients.polynomial(step);
            let s = u.matmul(&u.transpose(1, 2)?)?;
            let linear = (widen(&s)? * b)?;
            // `Cubic` has no fifth power, and saves the product s·s.
            let polynomial = if c == 0.0 {
                linear
            } else {
                (linear + (widen(&s.matmul(&s)?)? * c)?)?
            }
            .to_dtype(dtype)?;
            u = ((widen(&u)? * a)? + widen(&polynomial.matmul(&u)?)?)?.to_dtype(dtype)?;
        }
        Ok(u)
    }

    /// The factor of [`StepScale`] for the matrices of a stack.
    pub(crate) fn scale(&self, stack: &Tensor) -> Candle<f64> {
        let (_, rows, columns) = stack.dims3()?;
        Ok(self.scale.factor(rows, columns))
    }
}

/// Declares, by [`hyper_parameters!`](crate::hyper_parameters), a rule that makes matrices orthogonal.
///
/// The rule has the fields that are passed, which must include `epsilon`, and the fields that all such rules
/// share.
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
                /// The number of steps of the iteration, at most 100. After five, singular values are
                /// about 1. Each step takes three matrix products, with `Cubic` two.
                ns_steps: u64 = 5 => $crate::rules::matrix::at_most_100,
                /// The polynomials of the iteration.
                coefficients: $crate::rules::matrix::NewtonSchulz = $crate::rules::matrix::NewtonSchulz::Jordan => $crate::rule::range::any,
                /// The factor on a step, by the shape of the matrix.
                scale: $crate::rules::matrix::StepScale = $scale => $crate::rule::range::any,
                /// Which dimensions are rows and columns.
                matrix: $crate::rules::matrix::MatrixForm = $crate::rules::matrix::MatrixForm::Stack => $crate::rule::range::any,
                /// The number of equal parts into which rows are cut, such as the heads of attention. Each
                /// part is a matrix.
                heads: u64 = 1 => $crate::rule::range::at_least_one,
                /// The number of rows in each part of a fused matrix: query, key and value; gate and up.
                /// `heads` must then be 1.
                parts: $crate::rule::field::Sizes = $crate::rule::field::Sizes::default() => $crate::rule::range::any,
                /// The dtype of the matrix products in the iteration.
                products: $crate::rules::matrix::Products = $crate::rules::matrix::Products::Compute => $crate::rule::range::any,
                /// Whether all rows of a matrix are scaled to one norm before the iteration.
                ///
                /// The norm is the root mean square of the norms of all rows. The option is the row form of
                /// MuonEq ([arXiv 2603.28254](https://arxiv.org/abs/2603.28254)), which nanochat always uses.
                equilibrate: bool = false => $crate::rule::range::any,
                /// Whether a matrix is scaled to √min(rows, columns), the norm of an orthogonal matrix, after
                /// the iteration.
                ///
                /// The option is Muon+ ([arXiv 2602.21545](https://arxiv.org/abs/2602.21545)), which nanochat
                /// always uses.
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
