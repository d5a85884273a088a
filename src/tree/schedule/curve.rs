//! Curves: numbers as functions of the step.
//!
//! Any count up to `u64::MAX` is valid, and values saturate at the largest number, because a step must not
//! fail. A curve is checked once, at its least and its greatest value, without going through all steps:
//! `turns` lists the few steps between which the curve only rises or only falls. For a new kind of curve
//! `turns` must list all such steps, otherwise the curve can leave the range of its field in a step that is
//! never checked.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::rule::{out_of_range, range};

/// A number for each step, from 0 on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Curve {
    Constant(f64),
    /// From `start` to `end` in `steps`, along an easing, then `end`.
    Between {
        start: f64,
        end: f64,
        steps: u64,
        easing: Easing,
    },
    /// Two or more curves one after another, each with the step at which it begins and from which it counts.
    /// The first begins at 0, and none of them is `Joined`.
    Joined(Vec<(u64, Curve)>),
    /// One rise and fall, as torch's `OneCycleLR`.
    OneCycle {
        peak: f64,
        steps: u64,
    },
    /// A cosine that starts anew after each period. A period is `factor` times as long as the one before.
    Restarts {
        high: f64,
        low: f64,
        steps: u64,
        factor: f64,
    },
    /// `start·rate^(step / steps)`
    Exponential {
        start: f64,
        rate: f64,
        steps: u64,
        staircase: bool,
    },
    /// Up to `peak`, then `peak·√(warmup / t)`, with t = step + 1.
    InverseSquareRoot {
        peak: f64,
        warmup: u64,
    },
}

/// How a curve goes from its start to its end.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Easing {
    Cosine,
    Power(f64),
    OneMinusSquareRoot,
}

impl Curve {
    /// From `peak / steps` linearly to `peak`, which the last of `steps` steps has.
    pub(crate) fn warm_up(peak: f64, steps: u64) -> Self {
        let (start, steps) = (peak / steps.max(1) as f64, steps.saturating_sub(1));
        Curve::Between {
            start,
            end: peak,
            steps,
            easing: Easing::Power(1.0),
        }
    }

    /// This curve for the first `steps`, then another.
    pub(super) fn then(self, steps: u64, next: Curve) -> Self {
        let phases = |curve| {
            if let Curve::Joined(phases) = curve {
                phases
            } else {
                vec![(0, curve)]
            }
        };
        let mut joined = phases(self);
        joined.truncate(joined.partition_point(|(begin, _)| *begin < steps));
        // A phase that would begin after step `u64::MAX` is dropped.
        let next_phases = phases(next).into_iter();
        joined.extend(next_phases.filter_map(|(begin, curve)| Some((steps.checked_add(begin)?, curve))));
        if joined.len() == 1 {
            joined.swap_remove(0).1
        } else {
            Curve::Joined(joined)
        }
    }

    /// Whether joined phases begin one after another, as the phases from `then` do.
    pub(crate) fn is_ordered(&self) -> bool {
        let Curve::Joined(phases) = self else { return true };
        phases.first().is_some_and(|(begin, _)| *begin == 0)
            && phases.is_sorted_by(|(begin, _), (next, _)| begin < next)
            && phases.iter().all(|(_, phase)| phase.is_ordered())
    }

    /// Refuses a number that is not finite, and periods that get shorter: the curve would use the factor 1.
    /// `field` is what the curve drives.
    pub(super) fn check(&self, field: &str) -> Result<()> {
        let numbers = match *self {
            Curve::Constant(eta) => [eta, 0.0, 0.0],
            Curve::Between {
                start,
                end,
                easing: Easing::Power(power),
                ..
            } => [start, end, power],
            Curve::Between { start, end, .. } => [start, end, 0.0],
            Curve::Joined(ref phases) => {
                return phases.iter().try_for_each(|(_, phase)| phase.check(field));
            }
            Curve::OneCycle { peak, .. } | Curve::InverseSquareRoot { peak, .. } => [peak, 0.0, 0.0],
            Curve::Restarts {
                high, low, factor, ..
            } => {
                if !(1.0..f64::INFINITY).contains(&factor) {
                    let expected = "a finite number of 1 or more";
                    return Err(out_of_range("Schedule", "factor", factor, expected));
                }
                [high, low, 0.0]
            }
            Curve::Exponential { start, rate, .. } => [start, rate, 0.0],
        };
        match numbers
            .into_iter()
            .find_map(|number| Some((number, range::finite(number)?)))
        {
            Some((number, expected)) => Err(out_of_range("Schedule", field, number, expected)),
            None => Ok(()),
        }
    }

    /// The steps with the least and with the greatest value. NaN counts as the least or the greatest value.
    pub(crate) fn extremes(&self) -> [u64; 2] {
        let turns = self.turns();
        let by_value = |(_, a): &&(u64, f64), (_, b): &&(u64, f64)| a.total_cmp(b);
        let ends = [turns.iter().min_by(by_value), turns.iter().max_by(by_value)];
        ends.map(|turn| turn.map_or(0, |(step, _)| *step))
    }

    /// Steps that include those with the least and the greatest value, each with its value.
    fn turns(&self) -> Vec<(u64, f64)> {
        /// How many periods of warm restarts to look at. The last step of a period has its lowest value,
        /// which is lower the longer the period is. After so many periods the lowest value no longer changes.
        const PERIODS: u32 = 64;
        let steps = match *self {
            Curve::Constant(_) => vec![0],
            Curve::InverseSquareRoot { warmup, .. } => {
                vec![0, warmup.saturating_sub(1), warmup, u64::MAX]
            }
            // The value is monotone, except that the first step may have NaN and the last a large number.
            Curve::Between { steps, .. } => vec![0, 1, steps.saturating_sub(1), steps],
            Curve::Joined(ref phases) => {
                let ends = phases.iter().skip(1).map(|(begin, _)| *begin).chain([u64::MAX]);
                let turns_of_phase = |((begin, phase), end): (&(u64, Curve), u64)| {
                    let (begin, last) = (*begin, end - 1);
                    let turns = phase
                        .turns()
                        .into_iter()
                        .map(move |(step, value)| (begin.saturating_add(step), value));
                    turns
                        .filter(move |(step, _)| *step < end)
                        .chain([(last, phase.at(last - begin))])
                };
                return phases.iter().zip(ends).flat_map(turns_of_phase).collect();
            }
            Curve::OneCycle { steps, .. } => {
                let top = (0.3 * steps as f64 - 1.0).max(0.0) as u64;
                vec![0, top, top.saturating_add(1), steps.saturating_sub(1)]
            }
            Curve::Restarts { steps, factor, .. } => {
                let starts = (1..=PERIODS)
                    .map(|terms| steps.max(1) as f64 * geometric(f64::from(terms), factor.max(1.0)));
                starts
                    .flat_map(|start| [(start as u64).saturating_sub(1), start as u64])
                    .chain([0])
                    .collect()
            }
            // A negative rate changes the sign, or gives NaN.
            Curve::Exponential { steps, .. } => vec![0, 1, steps, steps.saturating_add(1), u64::MAX],
        };
        steps.into_iter().map(|step| (step, self.at(step))).collect()
    }

    /// The value for a step.
    pub(super) fn at(&self, step: u64) -> f64 {
        match *self {
            Curve::Constant(eta) => eta,
            Curve::Between {
                start,
                end,
                steps,
                easing,
            } => {
                if step >= steps {
                    return end;
                }
                let fraction = step as f64 / steps as f64;
                match easing {
                    Easing::Cosine => along_cosine(start, end, fraction),
                    Easing::Power(power) => end + saturating(start - end, (1.0 - fraction).powf(power)),
                    Easing::OneMinusSquareRoot => end + saturating(start - end, 1.0 - fraction.sqrt()),
                }
            }
            Curve::Joined(ref phases) => {
                let current = phases[..phases.partition_point(|(begin, _)| *begin <= step)].last();
                current.map_or(f64::NAN, |(begin, phase)| phase.at(step - begin))
            }
            Curve::Restarts {
                high,
                low,
                steps,
                factor,
            } => along_cosine(high, low, fraction_of_period(step, steps.max(1), factor)),
            Curve::OneCycle { peak, steps } => {
                let (first, lowest) = (peak / 25.0, peak / 250_000.0);
                // As in torch, the peak is at step 0.3·steps - 1, which need not be a whole number, and the
                // last step has the lowest value.
                let (step, top, last) = (step as f64, 0.3 * steps as f64 - 1.0, steps as f64 - 1.0);
                if step <= top {
                    along_cosine(first, peak, step / top)
                } else if step < last {
                    along_cosine(peak, lowest, (step - top) / (last - top))
                } else {
                    lowest
                }
            }
            Curve::Exponential {
                start,
                rate,
                steps,
                staircase,
            } => {
                let exponent = step as f64 / steps.max(1) as f64;
                saturating(
                    start,
                    rate.powf(if staircase { exponent.floor() } else { exponent }),
                )
            }
            Curve::InverseSquareRoot { peak, warmup } => {
                let (t, warmup) = (step as f64 + 1.0, warmup.max(1) as f64);
                if t < warmup {
                    peak * (t / warmup)
                } else {
                    peak * (warmup / t).sqrt()
                }
            }
        }
    }
}

/// From `start` to `end` as `fraction` goes from 0 to 1, along half a period of a cosine.
fn along_cosine(start: f64, end: f64, fraction: f64) -> f64 {
    end + (start - end) * 0.5 * (1.0 + (PI * fraction).cos())
}

/// The product, or the largest number if it would be infinite.
pub(crate) fn saturating(value: f64, factor: f64) -> f64 {
    let product = value * factor.clamp(f64::MIN, f64::MAX);
    if value.is_finite() {
        product.clamp(f64::MIN, f64::MAX)
    } else {
        product
    }
}

/// The position of a step in its period, from 0 to 1. The first period has `steps` steps, and each later
/// period is `factor` times as long as the one before.
fn fraction_of_period(step: u64, steps: u64, factor: f64) -> f64 {
    /// The tolerance for the start of a period. Rounding of a factor such as 1.1 delays this start: after
    /// 100, 110 and 121 steps the next period must start at step 331.
    const DELAY: f64 = 1e-6;
    if factor <= 1.0 {
        return (step % steps) as f64 / steps as f64;
    }
    let factor = factor.clamp(1.0, f64::MAX);
    let (step, steps, growth) = (step as f64, steps as f64, factor - 1.0);
    let start = |period| steps * geometric(period, factor);
    let has_begun = |period| start(period) <= step + DELAY;
    let mut period = ((step / steps * growth).min(f64::MAX).ln_1p() / growth.ln_1p()).floor();
    // With rounded logarithms `period` can be off by one.
    if !has_begun(period) {
        period -= 1.0;
    } else if has_begun(period + 1.0) {
        period += 1.0;
    }
    let length = steps * (1.0 + growth * geometric(period, factor));
    ((step - start(period)) / length).clamp(0.0, 1.0)
}

/// `1 + factor + factor² + ...`, with `terms` terms.
fn geometric(terms: f64, factor: f64) -> f64 {
    /// Up to this many terms are added up, which is more precise than the formula. With more terms the sum
    /// exceeds a u64 if the factor is whole, and its digits exceed those of an f64 if the factor is not.
    const FEW: f64 = 64.0;
    if terms <= FEW {
        return (0..terms as u32).fold(0.0, |sum, _| sum * factor + 1.0);
    }
    let growth = factor - 1.0;
    (terms * growth.ln_1p()).exp_m1() / growth
}
