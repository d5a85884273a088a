//! The code that averages of the parameter share: `Rule` for rules that implement [`Averages`].
//!
//! If a parameter does not move in a step of the model, its average still has to come closer to the
//! parameter. Such a step does not write the average, but only raises the counter `missed`. Because the
//! parameter was the same in all missed steps, one formula makes up for them:
//!
//! ```text
//! one step        average = average + factor·(x - average)            multiplies x - average by 1 - factor
//! missed steps    average = average + (1 - old_weight)·(x - average)  old_weight: product of all 1 - factor
//! ```
//!
//! The next step that moves the parameter applies this formula first (`AverageStep`). An evaluation applies
//! the formula without writing the average (`CatchUp`).

use crate::error::Result;
use crate::numbers::counts;
use crate::numbers::value::{Arithmetic, Value};
use crate::rule::{Adjust, Evaluation, Flow, Gradient, Parameter, Parts, Slot, State, state_of_another_rule};

/// A rule that averages the parameter. [`rule_by!`](crate::rules::rule_by) implements `Rule` for such a rule.
pub(super) trait Averages: Adjust {
    /// How far the average goes towards the parameter in step `t` of the model, from 1 on.
    fn factor(&self, t: u64) -> f64;

    /// The product of 1 - factor of the steps after `t` in which the parameter did not move. `missed` is
    /// above 0.
    fn old_weight(&self, t: u64, missed: u64) -> f64;
}

/// `average = average + factor·(new - average)`
#[inline(always)]
fn approach<V: Value>(factor: f64, new: V, average: V) -> V {
    average + (new - average) * factor
}

#[derive(Clone, Copy)]
struct AverageStep {
    /// How far the average first goes towards x, if steps were missed.
    catch_up: Option<f64>,
    factor: f64,
}

impl Arithmetic for AverageStep {
    type Slots<T> = [T; 1];
    const TAKES_PROLOGUE: bool = true;

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, [average]: &mut [V; 1]) -> V {
        if let Some(factor) = self.catch_up {
            *average = approach(factor, x, *average);
        }
        *average = approach(self.factor, x - dx, *average);
        dx
    }
}

/// Makes up for missed steps in an evaluation, where dx is the average.
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
    Ok(State::for_slots(x, &[Slot::average("average")])?.with_missed_step_counter("missed"))
}

pub(super) fn apply<'a>(rule: &impl Averages, state: &'a mut State, dx: Gradient<'a>) -> Result<Flow<'a>> {
    let Parts { slots, counters, .. } = state.parts();
    let [t, missed] = counters.array()?;
    if dx.is_missing() {
        return Ok(Flow::Step(dx));
    }
    let next_t = counts::add(*t + *missed, 1);
    let catch_up = (*missed > 0).then(|| 1.0 - rule.old_weight(*t, *missed));
    let step = AverageStep {
        catch_up,
        factor: rule.factor(next_t),
    };
    Ok(Flow::Step(
        dx.set_counter(t, next_t).set_counter(missed, 0).map(step, slots),
    ))
}

pub(super) fn evaluation<'s>(rule: &impl Averages, state: &'s State) -> Result<Option<Evaluation<'s>>> {
    let (Some(average), [(_, t), (_, missed)]) = (Evaluation::slot(state, "average"), &state.counters[..])
    else {
        return state_of_another_rule(rule);
    };
    Ok(Some(match missed {
        0 => average,
        _ => average.map(CatchUp(1.0 - rule.old_weight(*t, *missed))),
    }))
}
