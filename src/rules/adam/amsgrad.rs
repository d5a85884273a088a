use crate::numbers::value::{Value, above_zero};
use crate::rule::{Elementwise, Slot, range};
use crate::rules::moments::decayed;

crate::hyper_parameters! {
    /// AMSGrad: Adam with a second moment that never shrinks.
    ///
    /// Source: Reddi, Kale and Kumar 2018, [arXiv 1904.09237](https://arxiv.org/abs/1904.09237).
    ///
    /// ```text
    /// m   = β₁·m + (1 - β₁)·dx
    /// v   = β₂·v + (1 - β₂)·dx²
    /// w   = max(w, v)
    /// dx' = η·m / (√w + ε)                m₀ = v₀ = w₀ = ε
    /// ```
    ///
    /// Because m starts above 0, a parameter moves even if all its gradients are zero. With the default β₁
    /// all its steps then add up to 9·η·√ε.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AMSGrad, setup, update};
    ///
    /// // The rule remembers the gradient of 4: its second step is 2 / 4, where Adam's would be 1.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(AMSGrad { beta: (0.0, 0.0), ..AMSGrad::new(1.0) }, &x)?;
    /// for gradient in [[4f32], [2.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), "[-1.500]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// As in the paper and in Optimisers.jl, there is no bias correction. torch's `Adam(amsgrad=True)`
    /// corrects m and w, and starts m, v and w at 0.
    pub struct AMSGrad: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.999) => range::decays,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
    }
}

impl Elementwise for AMSGrad {
    type Scalars = (f64, (f64, f64), f64);
    type Slots<T> = [T; 3];

    fn slots(&self) -> [Slot; 3] {
        let [m, v, largest] = ["m", "v", "largest_v"].map(|name| Slot::full(name, self.epsilon));
        [m, v.second_moment(), largest.second_moment()]
    }

    fn scalars(&self, _t: u64) -> Self::Scalars {
        (self.eta, self.beta, above_zero(self.epsilon))
    }

    #[inline(always)]
    fn step<V: Value>((eta, beta, epsilon): Self::Scalars, _x: V, dx: V, [m, v, largest]: &mut [V; 3]) -> V {
        *m = decayed(*m, dx, beta.0);
        *v = decayed(*v, dx * dx, beta.1);
        *largest = largest.max(*v);
        *m * eta / (largest.sqrt() + epsilon)
    }
}
