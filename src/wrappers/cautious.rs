use crate::error::Result;
use crate::numbers::value::{Arithmetic, Value};
use crate::rule::{
    Describe, Describer, Elementwise, Flow, Gradient, Kind, Norm, Parameter, Parts, Rule, State,
    arithmetic_at,
};

/// Sets a step to 0 where its sign is not that of the gradient, and scales up the rest.
///
/// The rest is divided by the fraction of elements that agree in sign. Source: Liang et al. 2024, "Cautious
/// Optimizers", [arXiv 2411.16085](https://arxiv.org/abs/2411.16085).
///
/// ```text
/// u   = rule(x, dx)
/// φ   = 0 where u·dx ≤ 0, else 1
/// dx' = u·φ / (mean of φ)
/// ```
///
/// The wrapped rule is elementwise. Its step is compared with the gradient that reaches this wrapper: in a
/// chain, the gradient after accumulation and clipping. A weight decay of the wrapped rule is masked too. The
/// paper's authors keep the decay apart; for this, put [`DecoupledDecay`](crate::DecoupledDecay) around this
/// wrapper. The mean costs one more read of gradient and state. [`unscaled`](Cautious::unscaled) has no mean,
/// so its mask is part of the wrapped rule's one pass over memory. NaN stays NaN.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Cautious, Momentum, setup, update};
/// use std::collections::HashMap;
///
/// let x = Var::new(&[0f32, 0.0], &Device::Cpu)?;
/// let mut state = setup(Cautious::new(Momentum { rho: 0.5, ..Momentum::new(1.0) }), &x)?;
/// for gradient in [[1f32, 1.0], [1.0, -0.25]] {
///     let gradient = candle_core::Tensor::new(&gradient, &Device::Cpu)?;
///     update(&mut state, &x, &HashMap::from([("", gradient)]))?;
/// }
/// // The second element's velocity, 0.25, is against its gradient, so the first element's step of 1.5 is doubled.
/// assert_eq!(x.to_vec1::<f32>()?, [-1.0 - 2.0 * 1.5, -1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Departures
/// In the paper and in pytorch_optimizer 4.1.0 the number of elements that agree is larger by 1, so their
/// steps are n / (n + 1) as long if n elements agree. The authors' code and timm 1.0.31 raise a mean below
/// 1e-3 to 1e-3, which matters only if fewer than one element in a thousand agrees. Here the mean is exact.
/// If no element agrees, the step is 0.
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug, PartialEq)]
pub struct Cautious<R> {
    inner: R,
    is_scaled: bool,
}

impl<R: Elementwise> Cautious<R> {
    /// Masks the steps of `inner`, and scales up the elements that agree.
    pub fn new(inner: R) -> Self {
        Cautious {
            inner,
            is_scaled: true,
        }
    }

    /// Masks only: `dx' = u·φ`, without scaling up the elements that agree.
    ///
    /// ```
    /// use optimisers::{AdamW, Cautious, Kind, Rule};
    ///
    /// assert_eq!(Cautious::new(AdamW::new(1e-3)).kind(), Kind::WholeTensor);
    /// assert_eq!(Cautious::new(AdamW::new(1e-3)).unscaled().kind(), Kind::Elementwise);
    /// ```
    pub fn unscaled(self) -> Self {
        Cautious {
            is_scaled: false,
            ..self
        }
    }
}

impl<R: Elementwise> Describe for Cautious<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("Cautious");
        rule.setting("unscaled", !self.is_scaled);
        rule.holds(&mut self.inner);
    }
}

/// A rule's step if its sign is that of the gradient, otherwise 0.
#[derive(Clone, Copy)]
struct Masked<A>(A);

impl<A: Arithmetic> Arithmetic for Masked<A> {
    type Slots<T> = A::Slots<T>;

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, slots: &mut A::Slots<V>) -> V {
        let step = self.0.step(x, dx, slots);
        let zero = step.constant(0.0);
        // dx enters by its sign, because the product of two small numbers can be 0.
        V::select((step * dx.sign()).le(zero), zero, step)
    }
}

impl<R: Elementwise> Rule for Cautious<R> {
    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { slots, counters, .. } = state.parts().held.inner()?.parts();
        let (dx, t) = dx.next_step(counters)?;
        let masked = dx.map(Masked(arithmetic_at(&self.inner, t)), slots);
        if !self.is_scaled {
            return Ok(Flow::Step(masked));
        }
        Ok(Flow::Step(
            // The 0-norm counts the elements that are not 0. The count is raised to 1, so that a step of
            // zeros is not multiplied by infinity.
            masked.scale_by_norm(Norm::new(0.0), |norms| {
                norms.elements as f64 / norms.gradient.max(1.0)
            }),
        ))
    }

    fn kind(&self) -> Kind {
        // `WholeTensor`, because the mean is over all elements.
        if self.is_scaled {
            Kind::WholeTensor
        } else {
            Kind::Elementwise
        }
    }
}
