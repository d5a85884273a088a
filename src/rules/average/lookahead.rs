use crate::numbers::value::Value;
use crate::rule::{Elementwise, Slot, range};

crate::hyper_parameters! {
    /// Lookahead: every k steps, moves slow weights towards the parameter, and sets the parameter to them.
    ///
    /// Source: Zhang et al. 2019, [arXiv 1907.08610](https://arxiv.org/abs/1907.08610).
    ///
    /// ```text
    /// every k-th step:  slow = slow + α·((x - dx) - slow),   dx' = x - slow
    /// otherwise:        dx' = dx
    /// ```
    ///
    /// `Lookahead` is the last rule of a chain, `OptimiserChain::new((Adam::new(1e-3), Lookahead::new(6)))`:
    /// dx is the step of the rules before it. Inside [`MixedPrecision`](crate::MixedPrecision) the slow
    /// weights have the master's precision.
    ///
    /// If [`set_masters`](crate::StateTree::set_masters) or
    /// [`refresh_masters`](crate::StateTree::refresh_masters) gives the model new weights, these become the
    /// slow weights, and the count of k steps begins again. New weights without such a call are refused by
    /// the next update, because Lookahead would lead them part of the way back.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Descent, Lookahead, OptimiserChain, setup, update};
    ///
    /// // Two steps lead from 4 to 2; the slow weights go half of the way, and the parameter goes back to them.
    /// let x = Var::new(&[4f32], &Device::Cpu)?;
    /// let mut state = setup(OptimiserChain::new((Descent::new(1.0), Lookahead::new(2))), &x)?;
    /// for gradient in [[1f32], [1.0]] {
    ///     update(&mut state, &x, &[("", Tensor::new(&gradient, &Device::Cpu)?)])?;
    /// }
    /// assert_eq!(x.to_vec1::<f32>()?, [3.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// optax keeps fast and slow weights as a pair of parameters; here the parameters are the fast ones.
    /// torch and Optimisers.jl have no such rule.
    pub struct Lookahead: Average {
        /// k: the slow weights move in every k-th step.
        k: u64 = 6 => range::at_least_one,
        /// α: the fraction of the way that the slow weights go.
        alpha: f64 = 0.5 => range::non_negative,
    }
}

impl Elementwise for Lookahead {
    /// α in every k-th step, otherwise `None`.
    type Scalars = Option<f64>;
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::parameter("slow")]
    }

    fn scalars(&self, t: u64) -> Option<f64> {
        t.is_multiple_of(self.k).then_some(self.alpha)
    }

    #[inline(always)]
    fn step<V: Value>(alpha: Option<f64>, x: V, dx: V, [slow]: &mut [V; 1]) -> V {
        let Some(alpha) = alpha else { return dx };
        *slow = *slow + (x - dx - *slow) * alpha;
        x - *slow
    }
}
