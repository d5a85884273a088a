//! Eigenvectors, bases and roots of the symmetric matrices in a stack, computed on the host in f64, one
//! matrix per thread.

use candle_core::{DType, Device, Result as Candle, Tensor};
use rayon::prelude::*;

use crate::numbers::reflectors::orthonormal;
use crate::numbers::symmetric::{Eigen, eigen};

/// Applies `decompose` to each matrix of a stack, in f64 on the host. If `decompose` returns `None`, the
/// result is NaN.
fn map_matrices(
    stack: &Tensor,
    decompose: impl Fn(Vec<f64>, usize) -> Option<Vec<f64>> + Sync,
) -> Candle<Tensor> {
    let (_, n, _) = stack.dims3()?;
    let numbers = stack
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F64)?
        .flatten_all()?
        .to_vec1::<f64>()?;
    let decomposed_or_nan =
        |matrix: &[f64]| decompose(matrix.to_vec(), n).unwrap_or_else(|| vec![f64::NAN; n * n]);
    let decomposed: Vec<Vec<f64>> = numbers.par_chunks(n * n).map(decomposed_or_nan).collect();
    Tensor::from_vec(decomposed.concat(), stack.shape(), &Device::Cpu)
}

/// Moves a tensor of the host to the dtype and the device of `like`.
fn cast_like(tensor: &Tensor, like: &Tensor) -> Candle<Tensor> {
    tensor.to_dtype(like.dtype())?.to_device(like.device())
}

/// The eigenvectors of each matrix as columns, in descending order of their eigenvalues.
pub(crate) fn eigenvectors(stack: &Tensor) -> Candle<Tensor> {
    let rows = map_matrices(stack, |matrix, n| eigen(matrix, n).map(|eigen| eigen.vectors))?;
    cast_like(&rows.t()?.contiguous()?, stack)
}

/// One step of power iteration: brings `basis` nearer to the eigenvectors of its matrix.
///
/// 1. Multiply the basis by the matrix.
/// 2. Sort the vectors of the product in descending order of the estimates of eigenvalues, bᵀ·A·b.
/// 3. Make the vectors orthonormal.
///
/// Returns the new basis, and for each of its vectors the index before sorting.
pub(crate) fn iterate_basis(stack: &Tensor, basis: &Tensor) -> Candle<(Tensor, Tensor)> {
    let product = stack.matmul(basis)?;
    let order = descending_order(&(basis * &product)?.sum(1)?)?;
    let sorted = reordered(&product, &order, 2)?;
    let next = map_matrices(&sorted, |matrix, n| Some(orthonormal(matrix, n)))?;
    Ok((cast_like(&next, stack)?, order))
}

/// The indices that sort each row's numbers in descending order.
fn descending_order(rows: &Tensor) -> Candle<Tensor> {
    let numbers = rows
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F64)?
        .to_vec2::<f64>()?;
    let order_of_row = |row: &Vec<f64>| {
        let mut order: Vec<u32> = (0..row.len() as u32).collect();
        order.sort_by(|i, j| row[*j as usize].total_cmp(&row[*i as usize]));
        order
    };
    let order: Vec<u32> = numbers.iter().flat_map(order_of_row).collect();
    Tensor::from_vec(order, rows.shape(), rows.device())
}

/// The rows (`dimension` 1) or columns (2) of each matrix in the given order.
pub(crate) fn reordered(stack: &Tensor, order: &Tensor, dimension: usize) -> Candle<Tensor> {
    let indices = order
        .unsqueeze(3 - dimension)?
        .broadcast_as(stack.shape())?
        .contiguous()?;
    stack.contiguous()?.gather(&indices, dimension)
}

/// (A + ε·I)^-p of each matrix A. No eigenvalue of A may be negative.
pub(crate) fn inverse_power(stack: &Tensor, epsilon: f64, power: f64) -> Candle<Tensor> {
    let scaled_vectors = map_matrices(stack, |matrix, n| {
        let Eigen { values, mut vectors } = eigen(matrix, n)?;
        for (vector, value) in vectors.chunks_exact_mut(n).zip(values) {
            // Rounding can make an eigenvalue of zero a small negative number.
            let shifted = value.max(0.0) + epsilon;
            // If ε is 0, a direction that no gradient had has the eigenvalue 0, and gets no step.
            let factor = if shifted > 0.0 {
                shifted.powf(-power / 2.0)
            } else {
                0.0
            };
            vector.iter_mut().for_each(|x| *x *= factor);
        }
        Some(vectors)
    })?;
    // Each vector v has the factor λ^(-p/2), so that one product is the sum of v·vᵀ·λ^-p.
    cast_like(&scaled_vectors.t()?.matmul(&scaled_vectors)?, stack)
}
