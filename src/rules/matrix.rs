//! A tensor as a matrix: its first dimension by all others. For the weights of linear and convolution layers a row is what makes one output.

use candle_core::{Result, Tensor};

/// The matrix of a tensor of two or more dimensions, or `None`.
pub(super) fn as_matrix(x: &Tensor) -> Result<Option<Tensor>> {
    if x.rank() < 2 { Ok(None) } else { x.flatten_from(1).map(Some) }
}

/// The 2-norm of each row, as a column. Squares are taken of the row divided by its largest number, so that they neither under- nor overflow.
pub(super) fn row_norms(matrix: &Tensor) -> Result<Tensor> {
    let largest = matrix.abs()?.max_keepdim(1)?;
    // A row of zeros is divided by 1.
    let divisor = largest.eq(0.0)?.where_cond(&largest.ones_like()?, &largest)?;
    matrix.broadcast_div(&divisor)?.sqr()?.sum_keepdim(1)?.sqrt()? * largest
}

/// The 2-norm of all elements, as a matrix of one.
pub(super) fn norm(x: &Tensor) -> Result<Tensor> {
    row_norms(&x.reshape((1, ()))?)
}
