//! Householder reflections, and the orthonormal bases that they make. All in f64, without fused operations:
//! the same bits everywhere.
//!
//! Matrices are square, in row-major order. The inner loops go along rows: the compiler can use vectors
//! without changing the order of additions.

/// A reflection I - β·u·uᵀ of the last elements; u has their number.
pub(super) struct Reflector {
    u: Vec<f64>,
    beta: f64,
}

impl Reflector {
    /// The reflection that makes (α, 0, 0, ...) of this vector, and α.
    pub(super) fn of(mut x: Vec<f64>) -> (Self, f64) {
        let largest = x.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
        if largest == 0.0 {
            return (Reflector { u: x, beta: 0.0 }, 0.0);
        }
        x.iter_mut().for_each(|x| *x /= largest);
        let alpha = -x.iter().map(|x| x * x).sum::<f64>().sqrt().copysign(x[0]);
        x[0] -= alpha;
        let beta = 2.0 / x.iter().map(|x| x * x).sum::<f64>();
        (Reflector { u: x, beta }, alpha * largest)
    }

    /// Reflects the columns of a matrix from this one on.
    fn apply(&self, matrix: &mut [f64], n: usize, from: usize) {
        let first = n - self.u.len();
        let mut along = vec![0.0; n - from];
        for (row, u) in matrix.chunks_exact(n).skip(first).zip(&self.u) {
            add_multiple(&mut along, &row[from..], *u);
        }
        for (row, u) in matrix.chunks_exact_mut(n).skip(first).zip(&self.u) {
            add_multiple(&mut row[from..], &along, -self.beta * u);
        }
    }

    /// B - β·(u·uᵀ·B + B·u·uᵀ) + β²·u·(uᵀ·B·u)·uᵀ: reflects rows and columns of the last part of a symmetric
    /// matrix.
    pub(super) fn apply_to_both_sides(&self, matrix: &mut [f64], n: usize) {
        let (u, from) = (&self.u, n - self.u.len());
        let mut q = vec![0.0; u.len()];
        for (row, u) in matrix.chunks_exact(n).skip(from).zip(u) {
            add_multiple(&mut q, &row[from..], self.beta * u);
        }
        let half = self.beta / 2.0 * q.iter().zip(u).map(|(q, u)| q * u).sum::<f64>();
        add_multiple(&mut q, u, -half);
        for (i, row) in matrix.chunks_exact_mut(n).skip(from).enumerate() {
            let (u_i, q_i) = (u[i], q[i]);
            row[from..].iter_mut().zip(q.iter().zip(u)).for_each(|(b, (q, u))| *b -= u_i * q + q_i * u);
        }
    }
}

/// x + factor·y
fn add_multiple(x: &mut [f64], y: &[f64], factor: f64) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += factor * y);
}

/// The product of reflections, the first leftmost. Each is shorter than the one before.
pub(super) fn product(reflectors: &[Reflector], n: usize) -> Vec<f64> {
    let mut q = vec![0.0; n * n];
    q.iter_mut().step_by(n + 1).for_each(|one| *one = 1.0);
    // Columns that the shorter reflections have not touched are still those of the unit matrix.
    reflectors.iter().rev().for_each(|reflector| reflector.apply(&mut q, n, n - reflector.u.len()));
    q
}

/// Q of a matrix's QR decomposition: its columns, each without its part along those before it, and of length
/// 1.
pub(crate) fn orthonormal(mut matrix: Vec<f64>, n: usize) -> Vec<f64> {
    let mut reflectors = Vec::with_capacity(n);
    for k in 0..n {
        let (reflector, _) = Reflector::of(matrix.chunks_exact(n).skip(k).map(|row| row[k]).collect());
        reflector.apply(&mut matrix, n, k);
        reflectors.push(reflector);
    }
    product(&reflectors, n)
}
