//! Rules that take a parameter as a matrix, and what they share: its form, products, bases.

mod bases;
mod form;
mod low_rank;
mod momentum;
mod orthogonal;
mod stack;

use candle_core::{D, Result, Tensor};

pub(crate) use form::Matrices;
pub use form::MatrixForm;
pub(crate) use momentum::momentum_step;
pub use orthogonal::{NewtonSchulz, Products, StepScale};
pub(crate) use orthogonal::{Orthogonal, at_most_100, orthogonal_parameters};

/// The matrix of a tensor of two or more dimensions: the first by all others, or `None`. For the weights of
/// linear and convolution layers a row is what makes one output.
pub(crate) fn as_matrix(x: &Tensor) -> Result<Option<Tensor>> {
    if x.rank() < 2 { Ok(None) } else { x.flatten_from(1).map(Some) }
}

/// The 2-norm of each row of each matrix, as columns. Squares are taken of the row divided by its largest
/// number, so that they neither under- nor overflow.
pub(crate) fn row_norms(matrix: &Tensor) -> Result<Tensor> {
    let largest = matrix.abs()?.max_keepdim(D::Minus1)?;
    // A row of zeros is divided by 1.
    let divisor = largest.eq(0.0)?.where_cond(&largest.ones_like()?, &largest)?;
    matrix.broadcast_div(&divisor)?.sqr()?.sum_keepdim(D::Minus1)?.sqrt()? * largest
}

/// The 2-norm of each matrix of a stack, as a stack of matrices of one element.
pub(crate) fn norms(stack: &Tensor) -> Result<Tensor> {
    row_norms(&stack.reshape((stack.dim(0)?, 1, ()))?)
}

list! {
    adafactor::Adafactor, "dx' = η·rms(x)·u, u = dx / √v with v from means of rows and columns", "Shazeer & Stern 2018, arXiv 1804.04235";
    muon::Muon, "dx' = η·u, u the momentum with singular values of about 1", "Jordan et al. 2024";
    normuon::NorMuon, "dx' = η·w·‖u‖ / ‖w‖, w Muon's u divided by the root mean square of its rows", "Li et al. 2025, arXiv 2510.05491";
    adamuon::AdaMuon, "dx' = η·scale·w / rms(w), w = u / √v, u Muon's of the momentum's sign", "Si et al. 2025, arXiv 2507.11005";
    soap::SOAP, "dx' = η·L·(m̂' / (√v̂' + ε))·Rᵀ, Adam in the eigenvectors L, R of mean dx·dxᵀ, dxᵀ·dx", "Vyas et al. 2024, arXiv 2409.11321";
    shampoo::Shampoo, "dx' = η·(mean dx·dxᵀ)^-¼·m̂·(mean dxᵀ·dx)^-¼, as long as Adam's", "Gupta, Koren & Singer 2018, arXiv 1802.09568";
    galore::GaLore, "dx' = η·α·Pᵀ·u, u Adam's step for P·dx, P random", "Zhao et al. 2024, arXiv 2403.03507";
    apollo::APOLLO, "dx' = η·α·dx·s, s by how much Adam scales P·dx, P random", "Zhu et al. 2024, arXiv 2412.05270";
}
