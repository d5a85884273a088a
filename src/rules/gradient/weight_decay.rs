use crate::numbers::value::{Prologue, Value};
use crate::rule::{Elementwise, Gradient, Slot, Slots, range};

crate::hyper_parameters! {
    /// Adds the gradient of ½·λ·‖x‖² (L2 regularisation).
    ///
    /// ```text
    /// dx' = dx + λ·x
    /// ```
    ///
    /// Before [`Adam`](crate::Adam) in a chain this rule is torch's `Adam(weight_decay)`, whose moments
    /// include the decay. [`AdamW`](crate::AdamW) decays the parameter apart from its moments.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Descent, OptimiserChain, WeightDecay, setup, update};
    ///
    /// let x = Var::new(&[2f32, -2.0], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((WeightDecay::new(0.5), Descent::new(0.5))), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[1f32, 0.0], &Device::Cpu)?)])?;
    /// assert_eq!(x.to_vec1::<f32>()?, [1.0, -1.5]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub struct WeightDecay {
        /// λ: the weight decay.
        lambda: f64 = 5e-4 => range::non_negative,
    }
}

impl Elementwise for WeightDecay {
    type Scalars = f64;
    type Slots<T> = [T; 0];
    const AS_PROLOGUE: Option<fn(f64) -> Prologue> = Some(Prologue::decay);

    fn slots(&self) -> [Slot; 0] {
        []
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.lambda
    }

    fn step<V: Value>(lambda: f64, x: V, dx: V, _: &mut [V; 0]) -> V {
        dx + x * lambda
    }
}

/// dx + rate·x, as a part of another rule.
pub(crate) fn with_decay(dx: Gradient<'_>, rate: f64) -> Gradient<'_> {
    dx.step_of(&WeightDecay::new(rate), 1, Slots::none())
}
