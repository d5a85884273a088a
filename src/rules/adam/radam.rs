use super::adam::AdamScalars;
use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};
use crate::rules::moments::correction;

crate::hyper_parameters! {
    /// Rectified Adam: Adam with a warm-up that follows from the variance of the second moment.
    ///
    /// Source: Liu et al. 2019, [arXiv 1908.03265](https://arxiv.org/abs/1908.03265).
    ///
    /// ```text
    /// ρ∞ = 2 / (1 - β₂) - 1,   ρ = ρ∞ - 2·t·β₂ᵗ / (1 - β₂ᵗ)
    /// r  = √((ρ - 4)·(ρ - 2)·ρ∞ / ((ρ∞ - 4)·(ρ∞ - 2)·ρ))
    ///
    /// dx' = r·η·m̂ / (√v̂ + ε)     ρ > threshold
    /// dx' = η·m̂                  else
    /// ```
    ///
    /// with the moments of [`Adam`](crate::Adam).
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{RAdam, setup, update};
    ///
    /// // The first steps are those of momentum, so the very first is η times the gradient.
    /// let x = Var::new(&[0f32, 0.0], &Device::Cpu)?;
    /// let mut state = setup(RAdam::new(0.1), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[2f32, -300.0], &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[-0.200, 30.000]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The default threshold is that of the paper and of Optimisers.jl. torch, bullet and candle-optimisers
    /// have 5. With 5 and ε = 0 the steps are torch's; torch adds ε to √v before the bias correction.
    pub struct RAdam: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
        /// The ρ above which steps are rectified: 4 or more, because r is defined only for ρ above 4.
        threshold: f64 = 4.0 => at_least_4,
    }
}

fn at_least_4(threshold: f64) -> Option<&'static str> {
    (!(4.0..f64::INFINITY).contains(&threshold)).then_some("a finite number of 4 or more")
}

/// The factor r at step `t`. `None` if ρ is at most `threshold`, which is 4 or more.
pub(crate) fn rectification(beta: f64, t: u64, threshold: f64) -> Option<f64> {
    let max_rho = 2.0 / (1.0 - beta) - 1.0;
    let rho = max_rho - 2.0 * t as f64 * beta.powf(t as f64) / correction(beta, t);
    let r = || ((rho - 4.0) * (rho - 2.0) * max_rho / ((max_rho - 4.0) * (max_rho - 2.0) * rho)).sqrt();
    (rho > threshold).then(r)
}

impl Elementwise for RAdam {
    /// The scalars of Adam, and whether the step is rectified.
    type Scalars = (AdamScalars, bool);
    type Slots<T> = [T; 2];

    fn slots(&self) -> [Slot; 2] {
        [Slot::zeros("m"), Slot::zeros("v").second_moment()]
    }

    fn scalars(&self, t: u64) -> Self::Scalars {
        let r = rectification(self.beta.1, t, self.threshold);
        (
            AdamScalars::new(self.eta * r.unwrap_or(1.0), self.beta, self.epsilon, t),
            r.is_some(),
        )
    }

    #[inline(always)]
    fn step<V: Value>((k, is_rectified): Self::Scalars, _x: V, dx: V, [m, v]: &mut [V; 2]) -> V {
        let adam = k.step(dx, m, v);
        if is_rectified { adam } else { k.numerator(*m) }
    }
}
