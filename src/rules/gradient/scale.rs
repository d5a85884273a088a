use crate::numbers::value::{Prologue, Value};
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// Multiplies the gradient by a number.
    ///
    /// ```text
    /// dx' = α·dx
    /// ```
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Descent, OptimiserChain, Scale, setup, update};
    ///
    /// // The loss is a sum over 8 samples; the factor makes it a mean.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((Scale::new(0.125), Descent::new(0.5))), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[8f32], &Device::Cpu)?)])?;
    /// assert_eq!(x.to_vec1::<f32>()?, [-0.5]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// With α = -1 before another rule, the objective is maximised, as with torch's `maximize=True`. Only the
    /// gradient has the opposite sign: weight decay of the other rule still makes the parameters smaller.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Descent, OptimiserChain, Scale, setup, update};
    ///
    /// let x = Var::new(&[1f32], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((Scale::new(-1.0), Descent::new(0.5))), &x)?;
    /// update(&mut state, &x, &x.sum_all()?.backward()?)?;
    /// assert_eq!(x.to_vec1::<f32>()?, [1.5]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The rule is optax's `scale`. Optimisers.jl has no such rule; torch has `maximize=True` for α = -1.
    pub struct Scale {
        /// α: the factor.
        alpha: f64 = 1.0 => range::finite,
    }
}

impl Elementwise for Scale {
    type Scalars = f64;
    type Slots<T> = [T; 0];
    const AS_PROLOGUE: Option<fn(f64) -> Prologue> = Some(Prologue::scale);

    fn slots(&self) -> [Slot; 0] {
        []
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.alpha
    }

    #[inline(always)]
    fn step<V: Value>(alpha: f64, _x: V, dx: V, _: &mut [V; 0]) -> V {
        dx * alpha
    }
}
