use super::adam::AdamScalars;
use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};
use crate::rules::moments::decayed;

crate::hyper_parameters! {
    /// AdEMAMix: AdamW with a second, slow mean of the gradient.
    ///
    /// The slow mean remembers tens of thousands of steps. Source: Pagliardini, Ablin and Grangier 2024,
    /// [arXiv 2409.03137](https://arxiv.org/abs/2409.03137).
    ///
    /// ```text
    /// slow = β₃·slow + (1 - β₃)·dx
    /// dx'  = η·((m̂ + α·slow) / (√v̂ + ε) + λ·x)
    /// ```
    ///
    /// with the moments of [`Adam`](crate::Adam) and no bias correction of the slow mean.
    ///
    /// Without a warm-up early steps can diverge. The paper therefore starts with a small α and a small β₃,
    /// which reach the values of the fields after `warmup` = T steps. In the paper T is the length of the
    /// training.
    ///
    /// ```text
    /// α(t)  = α·min(t / T, 1)
    /// β₃(t) = min(exp(ln β₁·ln β₃ / ((1 - t / T)·ln β₃ + (t / T)·ln β₁)), β₃)
    /// ```
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AdEMAMix, setup, update};
    ///
    /// // Adam's step of η, and α·(1 - β₃)·η = 0.5·η from the slow mean.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(AdEMAMix { alpha: 2.0, beta: (0.9, 0.999, 0.75), ..AdEMAMix::new(0.1) }, &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[1f32], &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[-0.150]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The warm-up is off by default, as in optax, which takes schedules from outside. torch and
    /// Optimisers.jl have no counterpart.
    pub struct AdEMAMix: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂, β₃: the decays of the mean, of the mean of the square and of the slow mean.
        beta: (f64, f64, f64) = (0.9, 0.999, 0.9999) => range::three_decays,
        /// α: the weight of the slow mean.
        alpha: f64 = 5.0 => range::non_negative,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.0 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// T: the number of steps in which α and β₃ grow to their values; 0 for no warm-up.
        warmup: u64 = 0 => range::any,
    }
}

impl AdEMAMix {
    /// α and β₃ at step `t`.
    fn slow_weights_at(&self, t: u64) -> (f64, f64) {
        let (fast, _, slow) = self.beta;
        if t >= self.warmup {
            return (self.alpha, slow);
        }
        let progress = t as f64 / self.warmup as f64;
        // If β₁ or β₃ is 0, the formula has an infinite ln 0. The interpolated decay is then 0.
        let decay = if fast * slow == 0.0 {
            0.0
        } else {
            (fast.ln() * slow.ln() / ((1.0 - progress) * slow.ln() + progress * fast.ln())).exp()
        };
        (self.alpha * progress, decay.min(slow))
    }
}

/// The scalars of one step.
#[derive(Clone, Copy, Debug)]
pub struct AdEMAMixScalars {
    adam: AdamScalars,
    /// β₃ of this step
    beta: f64,
    /// η·α
    slow_rate: f64,
    /// η·λ
    decay: f64,
}

impl Elementwise for AdEMAMix {
    type Scalars = AdEMAMixScalars;
    type Slots<T> = [T; 3];

    fn slots(&self) -> [Slot; 3] {
        [
            Slot::zeros("m"),
            Slot::zeros("v").second_moment(),
            // With β₃ = 0.9999 the mean moves by a ten-thousandth in a step.
            Slot::zeros("slow").at_least_f32(),
        ]
    }

    fn scalars(&self, t: u64) -> AdEMAMixScalars {
        let (alpha, beta) = self.slow_weights_at(t);
        let adam = AdamScalars::new(self.eta, (self.beta.0, self.beta.1), self.epsilon, t);
        AdEMAMixScalars {
            adam,
            beta,
            slow_rate: self.eta * alpha,
            decay: self.eta * self.lambda,
        }
    }

    #[inline(always)]
    fn step<V: Value>(k: AdEMAMixScalars, x: V, dx: V, [m, v, slow]: &mut [V; 3]) -> V {
        k.adam.update_mean(m, dx);
        k.adam.update_square(v, dx);
        *slow = decayed(*slow, dx, k.beta);
        (k.adam.numerator(*m) + *slow * k.slow_rate) / k.adam.denominator(*v) + x * k.decay
    }
}
