use super::moments::decayed;
use crate::rule::{Elementwise, Slot, range};
use crate::value::Value;

crate::hyper_parameters! {
    /// Signum (Bernstein et al. 2018, [arXiv 1802.04434](https://arxiv.org/abs/1802.04434)): the sign of the momentum. With β = 0 it is signSGD, the
    /// sign of the gradient.
    ///
    /// ```text
    /// m   = β·m + (1 - β)·dx
    /// dx' = η·(sign(m) + λ·x)
    /// ```
    ///
    /// Every element moves by η whatever the size of its gradient, so η is about that of Adam and the loss needs no scale.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Signum, setup, update};
    ///
    /// // The second gradient has another sign, but the momentum outweighs it.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(Signum::new(0.5), &x)?;
    /// for gradient in [[3f32], [-2.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(x.to_vec1::<f32>()?, [-1.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// λ is decoupled, as MXNet's `wd_lh`; its `wd`, which goes into the momentum, is [`WeightDecay`](crate::WeightDecay) in front. torch has no counterpart.
    pub struct Signum {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β: the decay of the momentum.
        beta: f64 = 0.9 => range::decay,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
    }
}

impl Elementwise for Signum {
    /// η, β, η·λ
    type Scalars = (f64, f64, f64);
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::zeros("m")]
    }

    fn scalars(&self, _t: u64) -> Self::Scalars {
        (self.eta, self.beta, self.eta * self.lambda)
    }

    #[inline(always)]
    fn step<V: Value>((eta, beta, decay): Self::Scalars, x: V, dx: V, [m]: &mut [V; 1]) -> V {
        *m = decayed(*m, dx, beta);
        m.sign() * eta + x * decay
    }
}
