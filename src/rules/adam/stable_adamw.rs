use super::adam::AdamScalars;
use super::adamw::AdamW;
use crate::error::Result;
use crate::numbers::value::Value;
use crate::rule::{
    Arithmetic, Elementwise, Flow, Gradient, Parameter, Parts, Resolved, Rule, State, Sums, arithmetic_at,
    range, state_of_another_rule,
};

crate::hyper_parameters! {
    /// StableAdamW: AdamW that steps less while the gradient is larger than the second moment expects.
    ///
    /// r compares the gradient with what the second moment expects. If the gradient is larger, r is above 1,
    /// and the rule divides the learning rate of this tensor by r. The gradient itself is not clipped.
    /// Source: Wortsman et al. 2023, [arXiv 2304.13013](https://arxiv.org/abs/2304.13013).
    ///
    /// ```text
    /// r   = √mean(dx² / max(v̂, ε²))                 of all elements of the tensor
    /// dx' = η / max(1, r)·(m̂ / (√v̂ + ε) + λ·x)
    /// ```
    ///
    /// with the moments of [`Adam`](crate::Adam). The mean over all elements of a parameter is computed in
    /// f64, for which gradient and second moment are read once more. Weight decay is on by default (λ is
    /// 0.01). `StableAdamW { lambda: 0.0, ..StableAdamW::new(eta) }` switches it off.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{StableAdamW, setup, update};
    ///
    /// // In the second step v̂ = (1 + 2·25) / 3 = 17, so r = √(25 / 17).
    /// // The step is 0.5·(11 / 3) / √17, divided by r.
    /// let x = Var::new(&[0f32], &Device::Cpu)?;
    /// let mut state = setup(StableAdamW { beta: (0.5, 0.5), lambda: 0.0, ..StableAdamW::new(0.5) }, &x)?;
    /// for (gradient, expected) in [(1f32, "[-0.500]"), (5.0, "[-0.867]")] {
    ///     update(&mut state, &x, &[("", Tensor::new(&[gradient], &Device::Cpu)?)])?;
    ///     assert_eq!(format!("{:.3?}", x.to_vec1::<f32>()?), expected);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Departures
    /// The paper puts the bias correction of v into its β, which gives the same v̂. The rule is checked
    /// against pytorch_optimizer's `StableAdamW`. torch, optax and Optimisers.jl have no counterpart.
    pub struct StableAdamW: AdaptiveStep {
        /// η: the learning rate.
        eta: f64 = 1e-3 => range::non_negative,
        /// β₁, β₂: the decays of the first and second moment.
        beta: (f64, f64) = (0.9, 0.99) => range::decays,
        /// λ: the weight decay, multiplied by the learning rate.
        lambda: f64 = 0.01 => range::non_negative,
        /// ε: keeps the denominator from zero.
        epsilon: f64 = 1e-8 => range::non_negative,
    }
}

/// `dx² / max(v̂, ε²)`, with v̂ after this step.
#[derive(Clone, Copy)]
struct Surprise {
    adam: AdamScalars,
    /// ε²
    floor: f64,
}

impl Arithmetic for Surprise {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [v]: &mut [V; 1]) -> V {
        let square = dx * dx;
        // A copy, because the sums only read the state. The step moves v later.
        let mut next_v = *v;
        self.adam.update_square(&mut next_v, dx);
        let surprise = square
            / self
                .adam
                .corrected_square(next_v)
                .max(square.constant(self.floor));
        // If ε² is 0 in the arithmetic's dtype, an element without gradients would be 0 / 0.
        V::select(square.equal(square.constant(0.0)), square, surprise)
    }
}

/// 1 for each element. Its sum counts the elements of the whole parameter. The shape of x would count only
/// the elements in this process, because several ranks (processes) may share a parameter.
#[derive(Clone, Copy)]
struct One;

impl Arithmetic for One {
    type Slots<T> = [T; 0];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, _: &mut [V; 0]) -> V {
        dx.constant(1.0)
    }
}

impl StableAdamW {
    fn adamw(&self, eta: f64) -> AdamW {
        AdamW::coupled(eta, self.beta, self.lambda, self.epsilon)
    }
}

impl Rule for StableAdamW {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::for_slots(x, &self.adamw(self.eta).slots())
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts {
            slots,
            counters,
            numbers,
            ..
        } = state.parts();
        if slots.len() != 2 {
            return state_of_another_rule(self);
        }
        let (dx, t) = dx.next_step(counters)?;
        let surprise = Surprise {
            // The learning rate is 1, because v̂ does not depend on it.
            adam: AdamScalars::new(1.0, self.beta, self.epsilon, t),
            floor: self.epsilon * self.epsilon,
        };
        let sums = Sums::new(slots, numbers).sum(surprise, 1..2).sum(One, 0..0);
        let rule = self.clone();
        Ok(Flow::Step(dx.map_with_sums(sums, move |sums| {
            let root = (sums[0] / sums[1]).sqrt();
            // `f64::max` would replace NaN by 1. NaN has to reach the parameter.
            let divisor = if root < 1.0 { 1.0 } else { root };
            Resolved::new(arithmetic_at(&rule.adamw(rule.eta / divisor), t), [])
        })))
    }

    fn is_divisible(&self) -> bool {
        // The sums are over all parts of the parameter, and all else is elementwise.
        true
    }
}
