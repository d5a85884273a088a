use crate::error::Result;
use crate::rule::{Flow, Gradient, Parameter, Rule, State, range};
use crate::rules::matrix::as_matrix;

crate::hyper_parameters! {
    /// Gradient centralisation: subtracts the mean from the gradient of each output's weights.
    ///
    /// Source: Yong et al. 2020, [arXiv 2004.01461](https://arxiv.org/abs/2004.01461).
    ///
    /// ```text
    /// dx' = dx - strength·(mean of dx over all dimensions but the first)
    /// ```
    ///
    /// Vectors and numbers pass unchanged. The rule comes before the rule that turns the gradient into a
    /// step, and uses candle's tensor operations.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Centralise, Descent, OptimiserChain, setup, update};
    ///
    /// let x = Var::new(&[[0f32, 0.0], [0.0, 0.0]], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((Centralise::default(), Descent::new(1.0))), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[[1f32, 3.0], [5.0, 5.0]], &Device::Cpu)?)])?;
    /// assert_eq!(x.to_vec2::<f32>()?, [[1.0, -1.0], [0.0, 0.0]]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Bits
    /// candle computes the sums of rows. In F32 their bits depend on the kind of processor, whatever
    /// [`Isa`](crate::Isa) is chosen. The rule needs the feature `candle`.
    ///
    /// # Departures
    /// With strength 1 the rule is optax's `centralize`. torch and Optimisers.jl have no counterpart.
    pub struct Centralise {
        /// The fraction of the mean that is subtracted.
        strength: f64 = 1.0 => range::non_negative,
    }
}

impl Rule for Centralise {
    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx.with_tensors_late(state, |_, _, dx, _| {
            let Some(matrix) = as_matrix(&dx)? else {
                return Ok(dx);
            };
            let mean = (matrix.mean_keepdim(1)? * self.strength)?;
            Ok(matrix.broadcast_sub(&mean)?.reshape(dx.shape())?)
        })))
    }
}
