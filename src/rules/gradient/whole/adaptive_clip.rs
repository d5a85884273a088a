use candle_core::Tensor;

use crate::error::Result;
use crate::rule::{Flow, Gradient, NonFinite, Norm, Parameter, Rule, State, range};
use crate::rules::matrix::{as_matrix, row_norms};

crate::hyper_parameters! {
    /// Adaptive gradient clipping: limits each output's gradient to a fraction of the norm of its weights.
    ///
    /// Source: Brock et al. 2021, [arXiv 2102.06171](https://arxiv.org/abs/2102.06171).
    ///
    /// ```text
    /// dxᵢ' = dxᵢ·min(1, ω·max(‖xᵢ‖, ε) / ‖dxᵢ‖)
    /// ```
    ///
    /// where xᵢ (a unit) has the elements with index i in the first dimension; a vector or a number is one
    /// unit. Norms are 2-norms. The rule comes before the rule that turns the gradient into a step, and uses
    /// candle's tensor operations. The paper does not clip the last linear layer. A check for infinite
    /// elements and NaN, before anything is written, costs one more read of the gradient.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{AdaptiveClip, Descent, OptimiserChain, setup, update};
    ///
    /// // Norms of rows are 5 and 0.5, those of their gradients 10 and 0.1. The first gradient is limited to 2.5.
    /// let x = Var::new(&[[3f32, 4.0], [0.3, 0.4]], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((AdaptiveClip::new(0.5), Descent::new(1.0))), &x)?;
    /// update(&mut state, &x, &[("", Tensor::new(&[[6f32, 8.0], [0.0, 0.1]], &Device::Cpu)?)])?;
    /// assert_eq!(format!("{:.3?}", x.to_vec2::<f32>()?), "[[1.500, 2.000], [0.300, 0.300]]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Bits
    /// candle computes the sums of rows. In F32 their bits depend on the kind of processor, whatever
    /// [`Isa`](crate::Isa) is chosen. The rule needs the feature `candle`.
    ///
    /// # Departures
    /// optax's `adaptive_grad_clip` has units along other dimensions, because its weights have another
    /// layout. torch and Optimisers.jl have no counterpart.
    pub struct AdaptiveClip: Clip {
        /// ω: the largest norm of a gradient, as a fraction of the weights' norm (λ in the paper).
        omega: f64 = 0.01 => range::positive,
        /// ε: the least norm of weights in the formula.
        epsilon: f64 = 1e-3 => range::non_negative,
        /// What happens if an element is infinite or NaN.
        non_finite: NonFinite = NonFinite::Error => range::any,
    }
}

impl Rule for AdaptiveClip {
    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        // This norm only checks the gradient. The check comes first, because the function below runs while
        // parameters are written, too late to refuse.
        let checked = dx.scale_by_norm(Norm::new(f64::INFINITY).on_non_finite(self.non_finite), |_| 1.0);
        Ok(Flow::Step(checked.with_tensors_late(state, |_, x, dx, _| {
            let units = |tensor: &Tensor| {
                as_matrix(tensor).and_then(|matrix| matrix.map_or_else(|| tensor.reshape((1, ())), Ok))
            };
            let (x, gradient) = (units(x)?, units(&dx)?);
            let (limit, norm) = (
                (row_norms(&x)?.maximum(self.epsilon)? * self.omega)?,
                row_norms(&gradient)?,
            );
            let factor = norm
                .gt(&limit)?
                .where_cond(&(limit / &norm)?, &norm.ones_like()?)?;
            Ok(gradient.broadcast_mul(&factor)?.reshape(dx.shape())?)
        })))
    }
}
