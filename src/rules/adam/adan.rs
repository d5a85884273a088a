use super::adam::AdamScalars;
use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};
use crate::rules::moments::{correction, decayed};

crate::hyper_parameters! {
    /// Adan: Nesterov's momentum from differences of gradients.
    ///
    /// Source: Xie et al. 2022, [arXiv 2208.06677](https://arxiv.org/abs/2208.06677).
    ///
    /// ```text
    /// δ   = dx - the gradient of the step before     0 in the first step
    /// m   = β₁·m + (1 - β₁)·dx
    /// d   = β₂·d + (1 - β₂)·δ
    /// n   = β₃·n + (1 - β₃)·(dx + β₂·δ)²
    /// u   = η·(m̂ + β₂·d̂) / (√n̂ + ε)                 m̂ = m / (1 - β₁ᵗ), d̂ by β₂, n̂ by β₃
    /// dx' = (u + η·λ·x) / (1 + η·λ)                  so that x - dx' = (x - u) / (1 + η·λ)
    /// ```
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Adan, setup, update};
    ///
    /// // The step of η leads to 0.5, which is divided by 1 + η·λ = 2.
    /// let x = Var::new(&[1f32], &Device::Cpu)?;
    /// let mut state = setup(Adan { lambda: 2.0, ..Adan::new(0.5) }, &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[1f32], &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[0.250]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The β are decays, as in the authors' code; the paper's β are 1 minus these. The weights are the
    /// paper's, the bias corrections those of the authors' code. optax 0.2.9 weights d with 1 - β₂ instead of
    /// β₂. torch and Optimisers.jl have no counterpart.
    pub struct Adan: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂, β₃: the decays of the mean, of the mean difference and of the mean square.
        beta: (f64, f64, f64) = (0.98, 0.92, 0.99) => range::three_decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
    }
}

/// The scalars of one step.
#[derive(Clone, Copy, Debug)]
pub struct AdanScalars {
    /// The scalars of m and n.
    adam: AdamScalars,
    /// β₂
    beta: f64,
    /// η·β₂ / (1 - β₂ᵗ)
    difference_rate: f64,
    /// η·λ
    decay: f64,
    /// Whether this is the first step, which has no gradient before it.
    is_first: bool,
}

impl Elementwise for Adan {
    type Scalars = AdanScalars;
    type Slots<T> = [T; 4];

    fn slots(&self) -> [Slot; 4] {
        let [m, difference, square, last] =
            ["m", "difference", "square_ahead", "last_gradient"].map(Slot::zeros);
        [m, difference, square.second_moment(), last]
    }

    fn scalars(&self, t: u64) -> AdanScalars {
        let (first, second, third) = self.beta;
        AdanScalars {
            adam: AdamScalars::new(self.eta, (first, third), self.epsilon, t),
            beta: second,
            difference_rate: self.eta * second / correction(second, t),
            decay: self.eta * self.lambda,
            is_first: t == 1,
        }
    }

    #[inline(always)]
    fn step<V: Value>(k: AdanScalars, x: V, dx: V, [m, difference, square, last]: &mut [V; 4]) -> V {
        let change = if k.is_first { dx.constant(0.0) } else { dx - *last };
        *last = dx;
        k.adam.update_mean(m, dx);
        *difference = decayed(*difference, change, k.beta);
        k.adam.update_square(square, dx + change * k.beta);
        let direction =
            (k.adam.numerator(*m) + *difference * k.difference_rate) / k.adam.denominator(*square);
        (direction + x * k.decay) / (1.0 + k.decay)
    }
}
