use super::moments::decayed;
use crate::rule::{Elementwise, Slot, range};
use crate::value::Value;

crate::hyper_parameters! {
    /// Lion (Chen et al. 2023, [arXiv 2302.06675](https://arxiv.org/abs/2302.06675)): the sign of an interpolation between the momentum and
    /// the gradient. One tensor of state where Adam has two.
    ///
    /// ```text
    /// dx' = η·(sign(β₁·m + (1 - β₁)·dx) + λ·x)
    /// m   = β₂·m + (1 - β₂)·dx
    /// ```
    ///
    /// The paper takes a learning rate 3 to 10 times smaller than for AdamW, and a λ that is larger by as much.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Lion, setup, update};
    ///
    /// let x = Var::new(&[0f32, 0.0], &Device::Cpu)?;
    /// let mut state = setup(Lion::new(0.5), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[3f32, -0.001], &Device::Cpu)?)])?;
    /// assert_eq!(x.to_vec1::<f32>()?, [-0.5, 0.5]);
    /// assert_eq!(state.bytes(), 4 * 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The weights are the paper's. Optimisers.jl 0.4.8 has those of β₂ the other way round, which makes dx' the sign of the gradient alone, and
    /// a β₂ of 0.999 and no λ. torch has no counterpart.
    pub struct Lion {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the weight of the momentum in the step, and its decay.
        beta: (f64, f64) = (0.9, 0.99) => range::decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
    }
}

impl Elementwise for Lion {
    /// η, β, η·λ
    type Scalars = (f64, (f64, f64), f64);
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::zeros("m")]
    }

    fn scalars(&self, _t: u64) -> Self::Scalars {
        (self.eta, self.beta, self.eta * self.lambda)
    }

    #[inline(always)]
    fn step<V: Value>((eta, beta, decay): Self::Scalars, x: V, dx: V, [m]: &mut [V; 1]) -> V {
        let direction = decayed(*m, dx, beta.0).sign();
        *m = decayed(*m, dx, beta.1);
        direction * eta + x * decay
    }
}
