use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// Adds the gradient of λ·‖x‖₁ (L1 regularisation).
    ///
    /// ```text
    /// dx' = dx + λ·sign(x),   sign(0) = 0
    /// ```
    ///
    /// torch has no counterpart.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Descent, OptimiserChain, SignDecay, setup, update};
    ///
    /// let x = Var::new(&[2f32, -2.0, 0.0], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((SignDecay::new(0.25), Descent::new(1.0))), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[0f32, 0.0, 0.0], &Device::Cpu)?)])?;
    /// assert_eq!(x.to_vec1::<f32>()?, [1.75, -1.75, 0.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub struct SignDecay {
        /// λ: the weight decay.
        lambda: f64 = 1e-3 => range::non_negative,
    }
}

impl Elementwise for SignDecay {
    type Scalars = f64;
    type Slots<T> = [T; 0];

    fn slots(&self) -> [Slot; 0] {
        []
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.lambda
    }

    fn step<V: Value>(lambda: f64, x: V, dx: V, _: &mut [V; 0]) -> V {
        dx + x.sign() * lambda
    }
}
