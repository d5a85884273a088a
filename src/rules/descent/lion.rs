use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};
use crate::rules::moments::decayed;

crate::hyper_parameters! {
    /// Lion: the sign of an interpolation between the momentum and the gradient.
    ///
    /// Lion has one state tensor, Adam two. Source: Chen et al. 2023,
    /// [arXiv 2302.06675](https://arxiv.org/abs/2302.06675).
    ///
    /// ```text
    /// dx' = η·(sign(β₁·m + (1 - β₁)·dx) + λ·x)
    /// m   = β₂·m + (1 - β₂)·dx
    /// ```
    ///
    /// The paper uses a learning rate 3 to 10 times smaller than for AdamW, and a λ that is larger by the
    /// same factor.
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
    /// The weights are the paper's. In the momentum of Optimisers.jl 0.4.8 the gradient has the weight β₂ =
    /// 0.999, and the old momentum 1 - β₂. In Optimisers.jl dx' is therefore the sign of the gradient alone,
    /// and has no λ. torch has no counterpart.
    pub struct Lion: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the weight of the momentum in the step, and the decay of the momentum.
        beta: (f64, f64) = (0.9, 0.99) => range::decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
    }
}

impl Lion {
    /// SIGNUM: the sign of the momentum, which is Lion with β₁ = β₂ = β.
    ///
    /// With β = 0 the rule is signSGD, the sign of the gradient. Source: Bernstein et al. 2018,
    /// [arXiv 1802.04434](https://arxiv.org/abs/1802.04434).
    ///
    /// ```text
    /// m   = β·m + (1 - β)·dx
    /// dx' = η·(sign(m) + λ·x)
    /// ```
    ///
    /// Every element moves by η, whatever the size of its gradient. A good η is therefore about Adam's, and
    /// the scale of the loss does not matter. A usual β is 0.9.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Lion, setup, update};
    ///
    /// // The second gradient has another sign, but the momentum outweighs it.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(Lion::signum(0.5, 0.9), &x)?;
    /// for gradient in [[3f32], [-2.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(x.to_vec1::<f32>()?, [-1.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// λ is decoupled, like MXNet's `wd_lh`. For MXNet's `wd`, which goes into the momentum, put
    /// [`WeightDecay`](crate::WeightDecay) before this rule. torch has no counterpart.
    pub fn signum(eta: f64, beta: f64) -> Self {
        Lion {
            beta: (beta, beta),
            ..Lion::new(eta)
        }
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
