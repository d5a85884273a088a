//! The code that schedule-free rules share. The parameter y lies between a point z, which makes the steps,
//! and the mean x̄ of all points z.
//!
//! x̄ is not stored, because it follows from y = β·x̄ + (1 - β)·z. Written with increments, the recurrence
//! needs only y and the old z:
//!
//! ```text
//! x̄  = (1 - c)·x̄ + c·(z - u)
//! y  = y - a·(y - z) - (1 - β·(1 - c))·u        a = 1 - (1 - c)·β / b
//! z  = z - u                                    u is the step of z
//! ```
//!
//! b is the β of the step that made y. The state has this number, so that x̄ stays where it is if β changes.
//! If β has not changed, a is c. While y = z and u = 0, y keeps its bits in any precision.

use crate::error::Result;
use crate::numbers::value::{Arithmetic, Value};
use crate::rule::{
    Adjust, Evaluation, Flow, Gradient, Parameter, Parts, Slot, State, range, state_of_another_rule,
};

/// The factors in a step of y.
#[derive(Clone, Copy)]
pub(crate) struct Interpolation {
    /// The factor of y - z, with the old z.
    of_distance: f64,
    /// The factor of the step of z.
    of_step: f64,
}

impl Interpolation {
    /// Moves z by `step`, and returns the step to subtract from y.
    #[inline(always)]
    pub(crate) fn step_of_y<V: Value>(self, y: V, z: &mut V, step: V) -> V {
        // `step_to_z` is computed before z moves, because the increment of y needs the old z.
        let step_to_z = (y - *z) * self.of_distance;
        *z = *z - step;
        step_to_z + step * self.of_step
    }
}

/// A rule that becomes schedule-free. [`rule_by!`](crate::rules::rule_by) implements `Rule` for such a rule.
pub(crate) trait Interpolates: Adjust {
    /// The arithmetic of a step, on z and the rule's own slots (state tensors).
    type Step: Arithmetic;

    /// The slots besides z.
    fn extra_slots(&self) -> Vec<Slot>;

    /// The weight of x̄ in y.
    fn weight_of_mean(&self) -> f64;

    /// The learning rate of step `t`.
    fn eta_at(&self, t: u64) -> f64;

    /// Step `t` with this learning rate.
    fn step_at(&self, t: u64, eta: f64, interpolation: Interpolation) -> Self::Step;
}

/// The learning rate of step `t` (1 for the first), which rises to `eta` in `warmup_steps` steps.
pub(crate) fn warmed_rate(eta: f64, t: u64, warmup_steps: u64) -> f64 {
    if warmup_steps == 0 {
        eta
    } else {
        eta * (t as f64 / warmup_steps as f64).min(1.0)
    }
}

/// The check of a number above 0 and below 1. With β = 0, y would not depend on x̄, and x̄ could not be
/// computed from y.
pub(crate) fn positive_decay(beta: f64) -> Option<&'static str> {
    (!(beta > 0.0 && beta < 1.0)).then_some("a number in (0, 1)")
}

/// The check of two decays. The first passes [`positive_decay`].
pub(crate) fn positive_decays((first, second): (f64, f64)) -> Option<&'static str> {
    positive_decay(first)
        .or(range::decay(second))
        .and(Some("two numbers in [0, 1), the first above 0"))
}

/// The largest η that weighs a point z. Its square is the weight, and sums of squares have to be finite,
/// because c would be NaN otherwise. A larger η counts as this number.
const LARGEST_RATE: f64 = 1e100;

/// The check of the largest η of all steps.
fn up_to_largest(eta: f64) -> Option<&'static str> {
    (!(0.0..=LARGEST_RATE).contains(&eta)).then_some("a number in [0, 1e100]")
}

/// The smallest b. A smaller β counts as this number, because the rounding of y goes into x̄ divided by b,
/// and from there into the next y.
const SMALLEST_WEIGHT: f64 = 1e-3;

/// The check of the β of the last step.
fn from_smallest(beta: f64) -> Option<&'static str> {
    (!(SMALLEST_WEIGHT..1.0).contains(&beta)).then_some("a number in [1e-3, 1)")
}

/// Makes the state: z, the rule's own slots, and the numbers that the factors follow from. New weights of the
/// model keep t, so that there is only one warm-up.
pub(crate) fn init(rule: &impl Interpolates, x: Parameter<'_>) -> Result<State> {
    let slots = std::iter::once(Slot::parameter("z")).chain(rule.extra_slots());
    let state = slots
        .into_iter()
        .try_fold(State::empty().with_counter("t"), |state, slot| {
            state.with_slot(slot, x, x.shape())
        })?;
    Ok(state
        .with_number("largest_eta", 0.0, up_to_largest)
        .with_number("weights", 0.0, range::non_negative)
        .zeroed_by_new_weights("weights")
        .with_number("beta", rule.weight_of_mean().max(SMALLEST_WEIGHT), from_smallest))
}

pub(crate) fn apply<'a>(
    rule: &impl Interpolates,
    state: &'a mut State,
    dx: Gradient<'a>,
) -> Result<Flow<'a>> {
    let Parts {
        slots,
        counters,
        numbers,
        ..
    } = state.parts();
    let ((dx, t), [largest_eta, weights, last_beta]) = (dx.next_step(counters)?, numbers.array()?);
    // A missing gradient is no step: neither the counter nor the weights of the mean move.
    if dx.is_missing() {
        return Ok(Flow::Step(dx));
    }
    let eta = rule.eta_at(t);
    let next_largest = largest_eta.max(eta).min(LARGEST_RATE);
    let weight = next_largest * next_largest;
    let next_weights = *weights + weight;
    // If no learning rate was above 0 so far, there is nothing to average, and c would be 0 / 0.
    let c = if next_weights > 0.0 {
        weight / next_weights
    } else {
        0.0
    };
    let beta = rule.weight_of_mean().max(SMALLEST_WEIGHT);
    let interpolation = Interpolation {
        of_distance: if beta == *last_beta {
            c
        } else {
            1.0 - (1.0 - c) * (beta / *last_beta)
        },
        of_step: 1.0 - beta * (1.0 - c),
    };
    let kernel = rule.step_at(t, eta, interpolation);
    let dx = dx
        .set_number(largest_eta, next_largest)
        .set_number(weights, next_weights)
        .set_number(last_beta, beta);
    Ok(Flow::Step(dx.map(kernel, slots)))
}

/// x̄ = y + (y - z)·(1 - b) / b, a point beyond y as seen from z. The field is (1 - b) / b.
#[derive(Clone, Copy)]
struct Extrapolation(f64);

impl Arithmetic for Extrapolation {
    type Slots<T> = [T; 0];

    #[inline(always)]
    fn step<V: Value>(self, y: V, z: V, _: &mut [V; 0]) -> V {
        y + (y - z) * self.0
    }
}

pub(crate) fn evaluation<'s>(rule: &impl Interpolates, state: &'s State) -> Result<Option<Evaluation<'s>>> {
    let (Some(z), [_, _, (_, beta)]) = (Evaluation::slot(state, "z"), &state.numbers[..]) else {
        return state_of_another_rule(rule);
    };
    Ok(Some(z.map(Extrapolation((1.0 - beta) / beta))))
}
