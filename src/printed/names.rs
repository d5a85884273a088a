//! The names of a kernel's scalars, such as `k5_eta_beta1_t`: what each scalar depends on.
//!
//! Recorded arithmetic has numbers without their origin, so trials find the dependences:
//!
//! 1. Choose a usual step. A rate of 0, or a bias correction that has settled at 1, would hide a dependence.
//!    The present counters are not used, because they would give other names after a restart.
//! 2. Change one cause (a real hyper-parameter, a counter or a number of the state), and trace the step
//!    again.
//! 3. Scalars that differ depend on this cause.
//!
//! The trials are made for a late, an early and a very late step of a training, as far as the values of these
//! steps are in range and give the same kernel.

use std::iter::once;

use super::step::PrintedProgress;
use crate::engine::BoundKernel;
use crate::rule::description::adjust::Described;
use crate::rule::field::FieldValue;
use crate::rule::{Adjust, Optimiser};
use crate::tree::{NumberPlace, fields_with};

/// Everything that the scalars of a step depend on.
type Causes = (Optimiser, PrintedProgress);

/// Candidates for the counters and numbers of a usual step, the best first. In an early step bias
/// corrections have not settled yet.
const LATE: [f64; 7] = [10.0, 11.0, 0.5, 3.0, 2.0, 1.0, 0.0];
const EARLY: [f64; 7] = [1.0, 0.5, 2.0, 3.0, 10.0, 11.0, 0.0];
/// Candidates for a step after the `start` of an average, or whatever else a rule waits for.
const VERY_LATE: [f64; 7] = [1e6, 10.0, 0.5, 3.0, 2.0, 1.0, 0.0];

/// One of the [`Causes`]: a number of the hyper-parameters, or the index of a counter or a number of the
/// state.
#[derive(Clone, Copy)]
enum Cause {
    Field(NumberPlace),
    Counter(usize),
    Number(usize),
}

/// For each scalar of a kernel the names of its causes, each after a `_`, such as `_eta_beta1_t`.
///
/// `trace` traces the step of an optimiser that follows this progress. The result is `None` if a number is
/// out of range, or the step cannot be printed.
pub(super) fn dependencies(
    kernel: &BoundKernel,
    optimiser: &Optimiser,
    progress: &PrintedProgress,
    trace: impl Fn(&Optimiser, &PrintedProgress) -> Option<BoundKernel>,
) -> Vec<String> {
    // Scalars of another kernel cannot be compared, nor can NaN, which would look unchanged.
    let scalars = |(optimiser, progress): &Causes| {
        let traced = trace(optimiser, progress).filter(|traced| traced.kernel == kernel.kernel)?;
        (!traced.scalars.iter().any(|scalar| scalar.is_nan())).then_some(traced.scalars)
    };
    let causes = all_causes(optimiser, progress);
    let mut changes = vec![vec![false; kernel.scalars.len()]; causes.len()];
    for candidates in [LATE, EARLY, VERY_LATE] {
        let mut usual = (optimiser.clone(), progress.clone());
        // The usual step: each cause gets the first candidate with which the kernel stays the same. Zeros of
        // hyper-parameters are replaced, because they would hide a dependence.
        for (_, cause) in &causes {
            let field = |x: f64| {
                if x.is_normal() {
                    [x; 4]
                } else {
                    [0.5, 2.0, -0.5, x]
                }
            };
            let trials = variants(&usual, *cause, candidates, field);
            usual = trials
                .into_iter()
                .find(|trial| scalars(trial).is_some())
                .unwrap_or(usual);
        }
        let before = scalars(&usual).unwrap_or_else(|| kernel.scalars.clone());
        for ((_, cause), changes) in causes.iter().zip(&mut changes) {
            // Several values, because some are out of range or change the kernel.
            let trials = variants(&usual, *cause, candidates, |x| {
                [0.75 * x, 1.25 * x, 0.99 * x, 1.01 * x]
            });
            for after in trials.iter().filter_map(scalars) {
                for ((change, before), after) in changes.iter_mut().zip(&before).zip(&after) {
                    *change |= before.to_bits() != after.to_bits();
                }
            }
        }
    }
    let changing_causes = || {
        causes
            .iter()
            .zip(&changes)
            .filter(|(_, changes)| changes.contains(&true))
    };
    let suffixes = |index: usize| {
        let names = || changing_causes().map(|((name, _), _)| &**name);
        let scalar_causes = changing_causes().filter(|(_, changes)| changes[index]);
        scalar_causes
            .map(|((name, _), _)| format!("_{}", identifier(name, names())))
            .collect()
    };
    (0..kernel.scalars.len()).map(suffixes).collect()
}

/// All causes by name. The numbers of hyper-parameters are named as in schedules: β₁ is `beta1`.
fn all_causes(optimiser: &Optimiser, progress: &PrintedProgress) -> Vec<(String, Cause)> {
    let mut causes = Vec::new();
    for (index, ((_, value), name)) in optimiser.fields().into_iter().zip(optimiser.places()).enumerate() {
        let list_cause = |number| {
            (
                format!("{name}{}", number + 1),
                Cause::Field((index, Some(number))),
            )
        };
        match value {
            FieldValue::Real(_) => causes.push((name, Cause::Field((index, None)))),
            value => causes.extend((0..value.numbers().len()).map(list_cause)),
        }
    }
    let counters = progress.counters.iter().enumerate();
    causes.extend(counters.map(|(index, (name, _))| (name.clone(), Cause::Counter(index))));
    let numbers = progress.numbers.iter().enumerate();
    causes.extend(numbers.map(|(index, (name, _))| (name.clone(), Cause::Number(index))));
    causes
}

/// Copies of the causes with other values of one cause. A hyper-parameter gets those values that `field`
/// makes of its value, if they are in range. A counter or number gets the `candidates`.
fn variants(
    (optimiser, progress): &Causes,
    cause: Cause,
    candidates: [f64; 7],
    field: impl Fn(f64) -> [f64; 4],
) -> Vec<Causes> {
    let with_number = |number| {
        let mut progress = progress.clone();
        match cause {
            Cause::Counter(index) => progress.counters[index].1 = number as u64,
            Cause::Number(index) => progress.numbers[index].1 = number,
            Cause::Field(_) => {}
        }
        (optimiser.clone(), progress)
    };
    let Cause::Field(place @ (index, part)) = cause else {
        return candidates.map(with_number).into();
    };
    let value = match (optimiser.fields()[index].1, part) {
        (FieldValue::Real(number), _) => number,
        (list, part) => list.numbers()[part.unwrap_or_default()],
    };
    let with_field = |number| {
        let mut changed = optimiser.clone();
        let write = changed.write(&fields_with(optimiser, once((place, number))));
        write
            .and_then(|()| changed.check())
            .is_ok()
            .then(|| (changed, progress.clone()))
    };
    field(value).into_iter().filter_map(with_field).collect()
}

/// A name such as `1.eta` as an identifier: `eta` if no other name of `names` ends in `eta`, else `1_eta`.
fn identifier<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> String {
    fn last(name: &str) -> &str {
        name.rsplit('.').next().unwrap_or(name)
    }
    let is_unique = names.filter(|other| last(other) == last(name)).count() == 1;
    let name = if is_unique {
        last(name).to_string()
    } else {
        name.replace('.', "_")
    };
    name.chars()
        .filter(|letter| letter.is_ascii_alphanumeric() || *letter == '_')
        .collect()
}
