//! What averages of the parameter share. A step of the model in which a parameter does not take part leaves
//! it as it is, but its average has to come closer to it. Nobody writes the average then: the state counts
//! such steps, and the next one that needs the average makes up for all of them at once.

use crate::error::Result;
use crate::numbers::value::{Arithmetic, Value};
use crate::rule::{Adjust, Evaluation, Flow, Gradient, Parameter, Slot, Slots, State, state_of_another_rule};

/// A rule that averages the parameter. [`rule_by!`](crate::rules::rule_by) makes a `Rule` of it.
pub(super) trait Averages: Adjust {
    /// How far the average goes towards the parameter in step `t` of the model, from 1 on.
    fn factor(&self, t: u64) -> f64;

    /// The part of the average of step `t` that is left after steps in which the parameter did not move: the
    /// product of all 1 - factor.
    fn kept(&self, t: u64, missed: u64) -> f64;
}

/// `average = average + factor·(new - average)`
#[inline(always)]
fn approach<V: Value>(factor: f64, new: V, average: V) -> V {
    average + (new - average) * factor
}

#[derive(Clone, Copy)]
struct AverageStep {
    /// How far the average goes towards x first, because steps were missed.
    catching_up: Option<f64>,
    factor: f64,
}

impl Arithmetic for AverageStep {
    type Slots<T> = [T; 1];
    const TAKES_PROLOGUE: bool = true;

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, [average]: &mut [V; 1]) -> V {
        if let Some(factor) = self.catching_up {
            *average = approach(factor, x, *average);
        }
        *average = approach(self.factor, x - dx, *average);
        dx
    }
}

/// What is left of the weights dx, the average, after missed steps.
#[derive(Clone, Copy)]
struct CatchUp(f64);

impl Arithmetic for CatchUp {
    type Slots<T> = [T; 0];

    #[inline(always)]
    fn step<V: Value>(self, x: V, average: V, _: &mut [V; 0]) -> V {
        approach(self.0, x, average)
    }
}

pub(super) fn init(_: &impl Averages, x: Parameter<'_>) -> Result<State> {
    Ok(State::for_slots(x, &[Slot::average("average")])?.with_missed_steps("missed"))
}

pub(super) fn apply<'a>(rule: &impl Averages, state: &'a mut State, dx: Gradient<'a>) -> Result<Flow<'a>> {
    let State { tensors, counters, .. } = state;
    let ([_], [(_, t), (_, missed)]) = (&tensors[..], &mut counters[..]) else {
        return state_of_another_rule(rule);
    };
    if dx.is_missing() {
        return Ok(Flow::Step(dx));
    }
    let next = *t + *missed + 1;
    let catching_up = (*missed > 0).then(|| 1.0 - rule.kept(*t, *missed));
    let step = AverageStep { catching_up, factor: rule.factor(next) };
    Ok(Flow::Step(dx.set_counter(t, next).set_counter(missed, 0).map(step, Slots(tensors))))
}

pub(super) fn evaluation<'s>(rule: &impl Averages, state: &'s State) -> Result<Option<Evaluation<'s>>> {
    let (Some(average), [(_, t), (_, missed)]) = (Evaluation::slot(state, "average"), &state.counters[..])
    else {
        return state_of_another_rule(rule);
    };
    Ok(Some(match missed {
        0 => average,
        _ => average.map(CatchUp(1.0 - rule.kept(*t, *missed))),
    }))
}
