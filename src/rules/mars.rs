//! The gradient corrected by its change, which the rules of MARS share.

use super::gradient::clip_norm::clip_factor;
use crate::error::Result;
use crate::numbers::value::{Arithmetic, Value};
use crate::rule::{
    Elementwise, Flow, Gradient, Norm, Parameter, Parts, Rule, Slot, State, state_of_another_rule,
};

/// `dx + weight·(dx - last)`
#[derive(Clone, Copy)]
struct Corrected {
    weight: f64,
}

impl Arithmetic for Corrected {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [last]: &mut [V; 1]) -> V {
        let change = dx - *last;
        *last = dx;
        dx + change * self.weight
    }
}

/// Makes the state: the gradient of the step before, which starts at 0 as in the authors' code, and the slots
/// of `inner`.
pub(super) fn init<const N: usize>(inner: [Slot; N], x: Parameter<'_>) -> Result<State> {
    State::for_slots(x, &[&[Slot::zeros("last_gradient")], &inner[..]].concat())
}

/// Plans the step of `inner` on the corrected gradient: the gradient plus γ·β / (1 - β) of its change, scaled
/// down to a 2-norm of at most 1.
pub(super) fn apply<'a>(
    rule: &impl Rule,
    inner: &impl Elementwise,
    gamma: f64,
    beta: f64,
    state: &'a mut State,
    dx: Gradient<'a>,
) -> Result<Flow<'a>> {
    let Parts { slots, counters, .. } = state.parts();
    let (dx, t) = dx.next_step(counters)?;
    let Some((last, others)) = slots.split_at(1) else {
        return state_of_another_rule(rule);
    };
    let weight = gamma * beta / (1.0 - beta);
    let clipped = dx
        .map(Corrected { weight }, last)
        .scale_by_norm(Norm::new(2.0), clip_factor(1.0));
    Ok(Flow::Step(clipped.step_of(inner, t, others)))
}
