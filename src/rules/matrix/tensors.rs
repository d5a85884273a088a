//! Tensors as matrices, and what rules of the Adam family compute of whole tensors.

use candle_core::{D, Result, Tensor};

use crate::numbers::value::above_zero;

/// A tensor as a matrix, its first dimension by all others. `None` for fewer than two dimensions. In linear
/// and convolution layers a row has the weights of one output.
pub(crate) fn as_matrix(x: &Tensor) -> Result<Option<Tensor>> {
    if x.rank() < 2 {
        Ok(None)
    } else {
        x.flatten_from(1).map(Some)
    }
}

/// The 2-norm of each row of each matrix, as columns. Squares are taken of the row divided by its largest
/// number, so that they neither under- nor overflow.
pub(crate) fn row_norms(matrix: &Tensor) -> Result<Tensor> {
    let largest = matrix.abs()?.max_keepdim(D::Minus1)?;
    // A row of zeros is divided by 1.
    let divisor = largest.eq(0.0)?.where_cond(&largest.ones_like()?, &largest)?;
    matrix
        .broadcast_div(&divisor)?
        .sqr()?
        .sum_keepdim(D::Minus1)?
        .sqrt()?
        * largest
}

/// The 2-norm of each matrix of a stack, as a stack of matrices of one element.
pub(crate) fn norms(stack: &Tensor) -> Result<Tensor> {
    row_norms(&stack.reshape((stack.dim(0)?, 1, ()))?)
}

/// old + weight·(new - old)
pub(crate) fn lerp(old: &Tensor, new: &Tensor, weight: f64) -> Result<Tensor> {
    old + ((new - old)? * weight)?
}

/// Adam's direction m̂ / (√v̂ + ε) of whole tensors. Each moment comes with its bias correction, which
/// divides the moment.
pub(crate) fn whole_direction(m: (&Tensor, f64), v: (&Tensor, f64), epsilon: f64) -> Result<Tensor> {
    (m.0 / m.1)? / ((v.0 / v.1)?.sqrt()? + above_zero(epsilon))?
}
