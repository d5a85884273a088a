use crate::numbers::value::{Prologue, Value};
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// Limits every element of the gradient.
    ///
    /// ```text
    /// dx' = clamp(dx, -δ, δ)
    /// ```
    ///
    /// An infinite element becomes δ or -δ, like any large one; NaN stays NaN. Rules that clip by a norm,
    /// such as [`ClipNorm`](crate::ClipNorm), refuse a gradient that is not finite; this rule does not.
    /// [`Update::finite_only`](crate::Update::finite_only) skips calls with such a gradient. torch's
    /// counterpart is `clip_grad_value_`.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{ClipGrad, Descent, OptimiserChain, setup, update};
    ///
    /// let x = Var::new(&[0f32, 0.0, 0.0], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((ClipGrad::new(1.0), Descent::new(1.0))), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[3f32, 0.5, -20.0], &Device::Cpu)?)])?;
    /// assert_eq!(x.to_vec1::<f32>()?, [-1.0, -0.5, 1.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub struct ClipGrad: Clip {
        /// δ: the largest absolute value.
        delta: f64 = 10.0 => range::positive,
    }
}

impl Elementwise for ClipGrad {
    type Scalars = f64;
    type Slots<T> = [T; 0];
    const AS_PROLOGUE: Option<fn(f64) -> Prologue> = Some(Prologue::limit);

    fn slots(&self) -> [Slot; 0] {
        []
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.delta
    }

    fn step<V: Value>(delta: f64, _x: V, dx: V, _: &mut [V; 0]) -> V {
        dx.clamp(-delta, delta)
    }
}
