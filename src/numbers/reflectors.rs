//! Householder reflections, and orthonormal bases made of them.
//!
//! Matrices are square, in row-major order and in f64. The bits are the same on all processors, because there
//! are no fused operations, and inner loops go along rows, so that the compiler can vectorise them without
//! changing the order of additions.

/// A reflection I - β·u·uᵀ of the last elements of a vector: as many as u has.
pub(super) struct Reflector {
    u: Vec<f64>,
    beta: f64,
}

impl Reflector {
    /// The reflection that turns this vector into (α, 0, 0, ...), and α.
    pub(super) fn onto_first_axis(mut x: Vec<f64>) -> (Self, f64) {
        let largest = x.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
        if largest == 0.0 {
            return (Reflector { u: x, beta: 0.0 }, 0.0);
        }
        // The vector is divided by its largest element, so that squares neither overflow nor vanish.
        x.iter_mut().for_each(|x| *x /= largest);
        // α has the opposite sign of `x[0]`, so that no digits are lost in `x[0] - alpha`.
        let alpha = -x.iter().map(|x| x * x).sum::<f64>().sqrt().copysign(x[0]);
        x[0] -= alpha;
        let beta = 2.0 / x.iter().map(|x| x * x).sum::<f64>();
        (Reflector { u: x, beta }, alpha * largest)
    }

    /// Reflects the columns of a matrix from `from` on.
    fn apply(&self, matrix: &mut [f64], n: usize, from: usize) {
        let first = n - self.u.len();
        let mut products = vec![0.0; n - from];
        for (row, u) in matrix.chunks_exact(n).skip(first).zip(&self.u) {
            add_multiple(&mut products, &row[from..], *u);
        }
        for (row, u) in matrix.chunks_exact_mut(n).skip(first).zip(&self.u) {
            add_multiple(&mut row[from..], &products, -self.beta * u);
        }
    }

    /// Reflects rows and columns of the last part B of a symmetric matrix: B - u·qᵀ - q·uᵀ, where p = β·B·u
    /// and q = p - (β / 2)·(pᵀ·u)·u.
    pub(super) fn apply_to_both_sides(&self, matrix: &mut [f64], n: usize) {
        let (u, from) = (&self.u, n - self.u.len());
        let mut q = vec![0.0; u.len()];
        // p is computed as a sum of rows, which are also the columns, because B is symmetric.
        for (row, u) in matrix.chunks_exact(n).skip(from).zip(u) {
            add_multiple(&mut q, &row[from..], self.beta * u);
        }
        let half = self.beta / 2.0 * q.iter().zip(u).map(|(q, u)| q * u).sum::<f64>();
        add_multiple(&mut q, u, -half);
        for (i, row) in matrix.chunks_exact_mut(n).skip(from).enumerate() {
            let (u_i, q_i) = (u[i], q[i]);
            row[from..]
                .iter_mut()
                .zip(q.iter().zip(u))
                .for_each(|(b, (q, u))| *b -= u_i * q + q_i * u);
        }
    }
}

/// x = x + factor·y
fn add_multiple(x: &mut [f64], y: &[f64], factor: f64) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += factor * y);
}

/// The product of reflections, with the first at the left. Each must be shorter than its predecessor.
pub(super) fn product(reflectors: &[Reflector], n: usize) -> Vec<f64> {
    let mut q = vec![0.0; n * n];
    q.iter_mut().step_by(n + 1).for_each(|element| *element = 1.0);
    // The shortest reflection comes first, so that each reflection leaves out the columns before its own,
    // which are still those of the unit matrix.
    reflectors
        .iter()
        .rev()
        .for_each(|reflector| reflector.apply(&mut q, n, n - reflector.u.len()));
    q
}

/// Q of a matrix's QR decomposition: the columns of the matrix, each made orthogonal to those before it and
/// of length 1.
pub(crate) fn orthonormal(mut matrix: Vec<f64>, n: usize) -> Vec<f64> {
    let mut reflectors = Vec::with_capacity(n);
    for k in 0..n {
        let (reflector, _) =
            Reflector::onto_first_axis(matrix.chunks_exact(n).skip(k).map(|row| row[k]).collect());
        reflector.apply(&mut matrix, n, k);
        reflectors.push(reflector);
    }
    product(&reflectors, n)
}
