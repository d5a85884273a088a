use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// Gradient descent.
    ///
    /// ```text
    /// dx' = η·dx
    /// ```
    ///
    /// The rule is torch's `SGD` without momentum.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Descent, setup, update};
    ///
    /// let x = Var::new(&[1f32, 2.0], &Device::Cpu)?;
    /// let mut state = setup(Descent::new(0.25), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[2f32, 4.0], &Device::Cpu)?)])?;
    /// assert_eq!(x.to_vec1::<f32>()?, [0.5, 1.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub struct Descent: Step {
        /// η: the learning rate.
        eta: f64 = 0.1 => range::non_negative,
    }
}

impl Elementwise for Descent {
    type Scalars = f64;
    type Slots<T> = [T; 0];

    fn slots(&self) -> [Slot; 0] {
        []
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.eta
    }

    fn step<V: Value>(eta: f64, _x: V, dx: V, _: &mut [V; 0]) -> V {
        dx * eta
    }
}
