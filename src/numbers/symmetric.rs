//! Eigenvectors of symmetric matrices (Wilkinson and Reinsch 1971, contributions II/2 and II/4):
//!
//! 1. Divide the matrix by its largest element.
//! 2. Bring the matrix to tridiagonal form by reflections.
//! 3. For each row l: implicit QL steps with Wilkinson's shift, until the off-diagonal at l is zero.
//! 4. Sort the eigenvalues, which are then on the diagonal.
//!
//! An off-diagonal counts as zero up to 2⁻⁵² of the matrix's largest element. Other implementations compare
//! an off-diagonal with its neighbours on the diagonal. But in a matrix of lower rank these neighbours can be
//! rounding errors themselves, and the steps might never end. The eigenvectors are orthogonal to the last
//! digits, however far apart the eigenvalues are.

use super::reflectors::{Reflector, product};

/// The most steps for one eigenvalue; two are usual. After the last of these steps, the eigenvalue is taken
/// as it is. The vectors are orthogonal in any case, because steps only rotate them.
const MOST_STEPS: usize = 100;

/// The eigenvalues of a symmetric matrix and its eigenvectors.
pub(crate) struct Eigen {
    /// In descending order.
    pub(crate) values: Vec<f64>,
    /// A row for each value.
    pub(crate) vectors: Vec<f64>,
}

/// The eigenvalues and eigenvectors of a symmetric matrix in row-major order; `None` if it is not finite.
pub(crate) fn eigen(mut matrix: Vec<f64>, n: usize) -> Option<Eigen> {
    if !matrix.iter().all(|x| x.is_finite()) {
        return None;
    }
    let largest = matrix.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    // The matrix is divided by `unit`, so that squares of elements neither overflow nor vanish, and one bound
    // for zero fits all matrices.
    let unit = if largest == 0.0 { 1.0 } else { largest };
    matrix.iter_mut().for_each(|x| *x /= unit);
    let (mut diagonal, mut off, mut rows) = tridiagonal(matrix, n);
    (0..n).for_each(|l| isolate(l, &mut diagonal, &mut off, &mut rows));
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|i, j| diagonal[*j].total_cmp(&diagonal[*i]));
    let vectors = order
        .iter()
        .flat_map(|i| &rows[i * n..(i + 1) * n])
        .copied()
        .collect();
    Some(Eigen {
        values: order.iter().map(|i| diagonal[*i] * unit).collect(),
        vectors,
    })
}

/// The tridiagonal form of a symmetric matrix: diagonal, off-diagonal (with a 0 at its end) and basis. The
/// vectors of the basis are rows, so that [`rotate`] runs along memory.
fn tridiagonal(mut matrix: Vec<f64>, n: usize) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let mut off = vec![0.0; n];
    let mut reflectors = Vec::with_capacity(n);
    for k in 0..n.saturating_sub(1) {
        let (reflector, alpha) =
            Reflector::onto_first_axis(matrix.chunks_exact(n).skip(k + 1).map(|row| row[k]).collect());
        reflector.apply_to_both_sides(&mut matrix, n);
        off[k] = alpha;
        reflectors.push(reflector);
    }
    let columns = product(&reflectors, n);
    let rows = (0..n * n)
        .map(|index| columns[index % n * n + index / n])
        .collect();
    (matrix.into_iter().step_by(n + 1).collect(), off, rows)
}

/// Brings the off-diagonal at `l` to zero, so that `diagonal[l]` is an eigenvalue.
fn isolate(l: usize, diagonal: &mut [f64], off: &mut [f64], rows: &mut [f64]) {
    for _ in 0..MOST_STEPS {
        let end = (l..diagonal.len() - 1)
            .find(|&m| off[m].abs() <= f64::EPSILON)
            .unwrap_or(diagonal.len() - 1);
        if end == l {
            return;
        }
        step(l, end, diagonal, off, rows);
    }
}

/// One implicit QL step on the diagonals from `l` to `end`.
fn step(l: usize, end: usize, diagonal: &mut [f64], off: &mut [f64], rows: &mut [f64]) {
    let n = diagonal.len();
    // `g` is `diagonal[end]` minus Wilkinson's shift. The shift is an eigenvalue of the 2×2 block of rows l
    // and l + 1: the one that is nearer to `diagonal[l]`.
    let half = (diagonal[l + 1] - diagonal[l]) / (2.0 * off[l]);
    let mut g = diagonal[end] - diagonal[l] + off[l] / (half + length(half, 1.0).copysign(half));
    let (mut sine, mut cosine, mut shift) = (1.0, 1.0, 0.0);
    for i in (l..end).rev() {
        let (f, b) = (sine * off[i], cosine * off[i]);
        let r = length(f, g);
        off[i + 1] = r;
        if r == 0.0 {
            // The matrix splits in two here, and the next step begins anew. To go on would divide 0 by 0.
            diagonal[i + 1] -= shift;
            off[end] = 0.0;
            return;
        }
        (sine, cosine) = (f / r, g / r);
        let shifted = diagonal[i + 1] - shift;
        let r = (diagonal[i] - shifted) * sine + 2.0 * cosine * b;
        shift = sine * r;
        diagonal[i + 1] = shifted + shift;
        g = cosine * r - b;
        let (first, second) = rows[i * n..(i + 2) * n].split_at_mut(n);
        rotate(first, second, sine, cosine);
    }
    diagonal[l] -= shift;
    off[l] = g;
    off[end] = 0.0;
}

/// The length of the vector (x, y).
fn length(x: f64, y: f64) -> f64 {
    (x * x + y * y).sqrt()
}

fn rotate(first: &mut [f64], second: &mut [f64], sine: f64, cosine: f64) {
    for (x, y) in first.iter_mut().zip(second) {
        (*x, *y) = (cosine * *x - sine * *y, sine * *x + cosine * *y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::normal::gaussian;
    use crate::numbers::random_key;
    use crate::numbers::reflectors::orthonormal;

    /// The product of a matrix and its transpose, of this rank, whose rows get smaller by `ratio`, rounded to
    /// f32 or not.
    fn product_of(n: usize, rank: usize, (scale, ratio): (f64, f64), is_rounded: bool) -> Vec<f64> {
        let key = random_key(1, n as u64, "");
        let g = |row: usize, k: usize| gaussian(key, row * rank + k) * ratio.powi(row as i32);
        let element = |at: usize| scale * (0..rank).map(|k| g(at / n, k) * g(at % n, k)).sum::<f64>();
        (0..n * n)
            .map(element)
            .map(|x| if is_rounded { f64::from(x as f32) } else { x })
            .collect()
    }

    /// The largest number in A·Aᵀ - I, where rows of `rows` are those of A.
    fn not_orthogonal(rows: &[f64], n: usize) -> f64 {
        let dot = |i: usize, j: usize| {
            rows[i * n..(i + 1) * n]
                .iter()
                .zip(&rows[j * n..(j + 1) * n])
                .map(|(x, y)| x * y)
                .sum::<f64>()
        };
        (0..n * n)
            .map(|at| (dot(at / n, at % n) - f64::from(at % (n + 1) == 0)).abs())
            .fold(0.0, f64::max)
    }

    fn transposed(matrix: &[f64], n: usize) -> Vec<f64> {
        (0..n * n).map(|at| matrix[at % n * n + at / n]).collect()
    }

    /// Matrices of any rank and scale, also with eigenvalues far apart, where a tolerance relative to small
    /// elements is never reached.
    #[test]
    fn bases_are_orthonormal_and_make_the_matrix_diagonal() {
        for n in [1, 2, 3, 5, 24] {
            for rank in [0, 1, n / 2, n, 2 * n] {
                for scale in [1e-300, 1e-30, 1.0, 1e30, 1e290] {
                    for ratio in [1.0, 0.2, 1.7] {
                        for is_rounded in [false, true] {
                            let matrix = product_of(n, rank, (scale, ratio), is_rounded);
                            let what = format!("{n} of rank {rank}, {scale:e}, {ratio}, {is_rounded}");
                            if matrix.iter().any(|x| x.is_infinite()) {
                                assert!(eigen(matrix, n).is_none(), "{what}");
                                continue;
                            }
                            assert!(
                                not_orthogonal(&transposed(&orthonormal(matrix.clone(), n), n), n) < 1e-13,
                                "{what}"
                            );
                            let Eigen { values, vectors } =
                                eigen(matrix.clone(), n).expect("a finite matrix");
                            assert!(not_orthogonal(&vectors, n) < 1e-13, "{what}");
                            assert!(values.is_sorted_by(|a, b| a >= b), "{what}");
                            let largest = matrix
                                .iter()
                                .fold(f64::MIN_POSITIVE, |largest, x| largest.max(x.abs()));
                            for (at, expected) in matrix.iter().enumerate() {
                                let part = |k: usize| {
                                    values[k] / largest * vectors[k * n + at / n] * vectors[k * n + at % n]
                                };
                                let error = (0..n).map(part).sum::<f64>() - expected / largest;
                                assert!(error.abs() < 1e-12, "{what}: {error:e}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn first_columns_of_a_basis_span_those_of_the_matrix() {
        let n = 4;
        let matrix = product_of(n, n, (1.0, 1.0), false);
        let (q, columns) = (
            transposed(&orthonormal(matrix.clone(), n), n),
            transposed(&matrix, n),
        );
        let dot = |k: usize, j: usize| (0..n).map(|i| q[k * n + i] * columns[j * n + i]).sum::<f64>();
        assert!((0..n).all(|k| (0..k).all(|j| dot(k, j).abs() < 1e-12)));
    }

    #[test]
    fn a_matrix_that_is_not_finite_has_no_eigenvectors() {
        assert!(eigen(vec![1.0, f64::NAN, f64::NAN, 1.0], 2).is_none());
        assert!(eigen(vec![f64::INFINITY], 1).is_none());
        // The decomposition ends, too.
        assert!(orthonormal(vec![f64::NAN; 9], 3).iter().any(|x| x.is_nan()));
    }
}
