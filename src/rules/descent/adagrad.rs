use crate::numbers::value::{Value, above_zero};
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// AdaGrad (Duchi, Hazan and Singer 2011, [JMLR 12](https://jmlr.org/papers/v12/duchi11a.html)).
    ///
    /// ```text
    /// s   = s + dx²,   s₀ = ε
    /// dx' = η·dx / (√s + ε)
    /// ```
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AdaGrad, setup, update};
    ///
    /// // The sums of squares are 9 and 25.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(AdaGrad::new(5.0), &x)?;
    /// for gradient in [[3f32], [4.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(x.to_vec1::<f32>()?, [-9.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// As in Optimisers.jl, the sum starts at ε. torch's sum starts at 0; its defaults are η = 0.01 and
    /// ε = 1e-10.
    pub struct AdaGrad: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 0.1 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
    }
}

impl Elementwise for AdaGrad {
    type Scalars = (f64, f64);
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::full("sum_of_squares", self.epsilon).second_moment()]
    }

    fn scalars(&self, _t: u64) -> (f64, f64) {
        (self.eta, above_zero(self.epsilon))
    }

    #[inline(always)]
    fn step<V: Value>((eta, epsilon): (f64, f64), _x: V, dx: V, [sum]: &mut [V; 1]) -> V {
        *sum = *sum + dx * dx;
        dx * eta / (sum.sqrt() + epsilon)
    }
}
