//! The step of rules whose state is a momentum and a second moment.

use candle_core::{Result as Candle, Tensor};

use crate::error::Result;
use crate::numbers::value::Arithmetic;
use crate::rule::{Counters, Elementwise, Flow, Gradient, Rule, Slots, State, state_of_another_rule};

/// Plans a step in three stages:
///
/// 1. `momentum(t)` is the arithmetic of step t, which moves the first tensor of the state.
/// 2. `direction` moves the second tensor, the second moment, and returns the direction.
/// 3. `decay` is applied to the direction.
pub(crate) fn momentum_step<'a, A: Arithmetic>(
    rule: &impl Rule,
    state: &'a mut State,
    dx: Gradient<'a>,
    momentum: impl FnOnce(u64) -> A,
    direction: impl FnOnce(&Tensor, &mut Tensor) -> Candle<Tensor> + Send + Sync + 'a,
    decay: &impl Elementwise,
) -> Result<Flow<'a>> {
    let State {
        tensors, counters, ..
    } = state;
    let [m, v] = &mut tensors[..] else {
        return state_of_another_rule(rule);
    };
    let (dx, t) = dx.next_step(Counters(counters))?;
    let with_momentum = dx.map(momentum(t), Slots(std::slice::from_mut(m)));
    let function = |_: &Tensor, u: Tensor, slots: &mut [Tensor]| Ok(direction(&u, &mut slots[0])?);
    let with_direction = with_momentum.append_function(std::slice::from_mut(v), false, function);
    Ok(Flow::Step(with_direction.step_of(decay, t, Slots::none())))
}
