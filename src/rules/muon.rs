use candle_core::{Result as Candle, Tensor};

use super::matrix::{as_matrix, norm};
use super::moments::{Lookahead, correction, decayed};
use super::weight_decay::WeightDecay;
use crate::error::Result;
use crate::rule::{Arithmetic, Flow, Gradient, Parts, Rule, Slot, Slots, State, counting, range};
use crate::value::Value;

/// The coefficients of the iteration.
const QUINTIC: [f64; 3] = [3.4445, -4.7750, 2.0315];

crate::hyper_parameters! {
    /// Muon (Jordan et al. 2024, ["Muon: An optimizer for hidden layers in neural networks"](https://kellerjordan.github.io/posts/muon/)):
    /// momentum whose singular values are all made about 1, by the iteration of Newton and Schulz.
    ///
    /// ```text
    /// m   = ρ·m + (1 - ρ)·dx
    /// u   = ρ·m / (1 - ρᵗ⁺¹) + (1 - ρ)·dx / (1 - ρᵗ)       m / (1 - ρᵗ) without nesterov
    /// u   = u / (‖u‖ + ε), then ns_steps times:
    /// u   = a·u + (b·s + c·s²)·u,   s = u·uᵀ                a = 3.4445, b = -4.775, c = 2.0315
    /// dx' = η·(√max(1, rows / columns)·u + λ·x)
    /// ```
    ///
    /// A tensor of more than two dimensions, such as the weights of a convolution, is the matrix of its first dimension by the others. A
    /// vector is a matrix of one column, so its step is the momentum with a root mean square of about η.
    ///
    /// Muon is made for the matrices inside a network. The embedding, the last layer, biases and norms usually get another rule, with
    /// [`setup_with`](crate::setup_with):
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{AdamW, Either, Muon, setup_with};
    /// use std::collections::BTreeMap;
    ///
    /// let variable = |shape: &[usize]| Var::zeros(shape, DType::F32, &Device::Cpu);
    /// let model = BTreeMap::from([
    ///     ("embedding", variable(&[100, 16])?),
    ///     ("hidden.weight", variable(&[16, 16])?),
    ///     ("hidden.bias", variable(&[16])?),
    /// ]);
    /// let state = setup_with(&model, |path, x| {
    ///     let inside = x.rank() >= 2 && path != "embedding";
    ///     Some(if inside { Either::Left(Muon::new(0.02)) } else { Either::Right(AdamW::new(3e-4)) })
    /// })?;
    /// assert_eq!(state.bytes(), 4 * (16 * 16 + 2 * (100 * 16 + 16)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// It works with candle's matrix products, in the compute dtype, for about a million elements or one larger parameter at a time: a step needs 28 bytes for
    /// each of these beside the state, for square matrices in F32.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{Muon, setup, update};
    ///
    /// // Every direction of a matrix of full rank has a step of about η, however large its part in the gradient is.
    /// let x = Var::zeros((2, 2), DType::F64, &Device::Cpu)?;
    /// let mut state = setup(Muon::new(0.1), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[[100f64, 0.0], [0.0, 50.0]], &Device::Cpu)?)])?;
    /// assert!(x.abs()?.to_vec2::<f64>()?.iter().enumerate().all(|(i, row)| row[i] > 0.065 && row[i] < 0.125 && row[1 - i] < 1e-9));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The momentum is corrected for its start, as in optax's `scale_by_muon`. The author's code and torch's `Muon` do not correct it, which gives m and
    /// dx other weights in the first steps; both iterate in bf16, and refuse vectors. torch's λ is 0.1 by default. Optimisers.jl has no such rule.
    pub struct Muon {
        /// η: the learning rate.
        eta: f64 = 0.02 => range::non_negative,
        /// ρ: the decay of the momentum.
        rho: f64 = 0.95 => range::decay,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// How often the singular values are brought nearer to 1, at most 100: they stay about 1 after five, and each is three matrix products.
        ns_steps: u64 = 5 => at_most_100,
        /// Whether the momentum is Nesterov's.
        nesterov: bool = true => range::any,
        /// ε: keeps the norm from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
    }
}

/// A number from a file must not keep an update busy for ever.
fn at_most_100(steps: u64) -> Option<&'static str> {
    (steps > 100).then_some("100 or less")
}

/// The momentum, from a gradient.
#[derive(Clone, Copy)]
struct Mean {
    rho: f64,
    /// 1 - ρᵗ
    correction: f64,
    /// In place of the correction, for Nesterov's momentum.
    lookahead: Option<Lookahead>,
}

impl Arithmetic for Mean {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [m]: &mut [V; 1]) -> V {
        *m = decayed(*m, dx, self.rho);
        match self.lookahead {
            Some(lookahead) => lookahead.of(*m, dx),
            None => *m / self.correction,
        }
    }
}

/// The nearest orthogonal matrix, about, of one with at most as many rows as columns, and singular values up to 1.
fn orthogonalised(mut u: Tensor, steps: u64) -> Candle<Tensor> {
    let [a, b, c] = QUINTIC;
    for _ in 0..steps {
        let s = u.matmul(&u.t()?)?;
        let polynomial = ((&s * b)? + (s.matmul(&s)? * c)?)?;
        u = ((&u * a)? + polynomial.matmul(&u)?)?;
    }
    Ok(u)
}

impl Muon {
    fn direction(&self, u: &Tensor) -> Candle<Tensor> {
        let matrix = match as_matrix(u)? {
            Some(matrix) => matrix,
            None => u.reshape(((), 1))?,
        };
        let matrix = matrix.broadcast_div(&(norm(&matrix)? + self.epsilon)?)?;
        let (rows, columns) = matrix.dims2()?;
        let orthogonal = match rows > columns {
            true => orthogonalised(matrix.t()?, self.ns_steps)?.t()?,
            false => orthogonalised(matrix, self.ns_steps)?,
        };
        (orthogonal * (self.eta * (rows as f64 / columns as f64).max(1.0).sqrt()))?.reshape(u.shape())
    }
}

impl Rule for Muon {
    fn init(&self, x: &Tensor) -> Result<State> {
        State::for_slots(x, &[Slot::zeros("m")])
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { slots, counters, .. } = state.parts();
        let (dx, t) = dx.next_step(counting(self, counters)?);
        let lookahead = self.nesterov.then(|| Lookahead::new(self.rho, t));
        let momentum = dx.map(Mean { rho: self.rho, correction: correction(self.rho, t), lookahead }, slots);
        let direction = momentum.through(&mut [], false, |_, u, _| Ok(self.direction(&u)?));
        Ok(Flow::Step(direction.step_of(&WeightDecay::new(self.eta * self.lambda), t, Slots::none())))
    }
}
