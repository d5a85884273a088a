//! The reduce stage: evaluates the numbers and functions that steps wait for, and replaces these steps by the
//! arithmetic that follows. The stage writes no parameter and no state.
//!
//! ```text
//! a norm replaces the check before it, if the norm shows all that the check finds      (merge_check)
//! until no step is pending or the call is skipped, a turn:
//!     take the pending steps that depend on no other pending step                   (ready)
//!     if there are functions among these steps, and no check: run the functions, end of turn
//!     get the totals of all others but functions, with one request to each device   (ask)
//!     skip the call for a check of a gradient that is not finite or too large;
//!     replace other checks by Identity, and reductions by Map or Identity           (resolve)
//! ```
//!
//! A chain takes two turns if its second norm is of a gradient that the first norm has scaled. Functions wait
//! for checks, because a call that is skipped needs no function.
//!
//! A check also finds elements that are finite but too large for the square that a later step makes. If a
//! step in between, such as clipping, may still make the elements smaller, another check is inserted right
//! before the square.

mod ask;
mod ready;
mod resolve;

use std::collections::BTreeMap;

use super::plan::{Group, Job, NormLimit, Step, TermOf};
use super::{Engine, functions, offload};
use crate::error::Result;
use crate::numbers::largest_number;
use ask::{Answer, Gather, ask, group_answers};
use ready::{Pending, PendingStep, find_ready};

/// The results of the reduce stage for the whole call.
#[derive(Debug, Default)]
pub(crate) struct ReduceOutcome {
    /// The first leaf whose gradient is not finite or too large to be squared. The call is skipped.
    pub(crate) offender: Option<String>,
    /// The norms over several leaves, by group. If a group has several norms, this map has the last norm
    /// without a limit. If all have limits, it has the first.
    pub(crate) group_norms: BTreeMap<u64, f64>,
    /// The norms of groups that have a limit. If a group has several such norms, this map has the last.
    pub(crate) limited: BTreeMap<u64, (f64, NormLimit)>,
}

/// Resolves all checks and reductions. Runs the functions that checks and reductions need, and functions that
/// may refuse the call.
///
/// The jobs must be in path order, because sums are added up in that order.
///
/// # Errors
/// If a rule refuses a norm or sums, or a function fails. Nothing is written then.
pub(crate) fn reduce(
    engine: Engine,
    gather: &Gather<'_>,
    jobs: &mut [&mut Job<'_>],
) -> Result<ReduceOutcome> {
    let mut outcome = ReduceOutcome::default();
    jobs.iter_mut().for_each(|job| merge_check(job));
    while outcome.offender.is_none() {
        let ready = find_ready(jobs);
        if ready.is_empty() {
            break;
        }
        outcome.run_turn(engine, gather, jobs, ready)?;
    }
    Ok(outcome)
}

/// Lets a norm replace the check before it, which saves a read of the gradients.
///
/// A norm can replace a check if no step between the two turns a number that is not finite into a finite one,
/// and if the norm of finite numbers is finite.
fn merge_check(job: &mut Job<'_>) {
    let Some(check) = job.steps.iter().position(|step| matches!(step, Step::Check)) else {
        return;
    };
    let compute = job.compute;
    let keeps_non_finite = |step: &Step<'_>| step.link().is_some_and(|link| link.kernel.keeps_non_finite());
    let next = job.steps[check + 1..]
        .iter_mut()
        .find(|step| !keeps_non_finite(step));
    if let Some(Step::Reduce(reduction)) = next
        && let (Some(Group::Norm(_) | Group::Limit(_)), Some(term)) =
            (reduction.group, reduction.terms.first())
        && matches!(term.of, TermOf::Gradient)
        && !term.reducer.can_overflow(compute)
        && term.reducer.keeps_non_finite()
    {
        reduction.replaces_check = true;
        job.steps[check] = Step::Identity;
    }
}

/// How many times larger than a gradient's square the squares of a rule may be. Adan squares the sum of the
/// gradient and its difference from the last gradient. That sum is less than 4 times as large as a gradient.
const MARGIN: f64 = 16.0;

/// The first step from `from` on that squares the gradient, and the largest size that it can square.
fn first_square(job: &Job<'_>, from: usize) -> Option<(usize, f64)> {
    let square = |(index, step): (usize, &Step<'_>)| {
        Some((index, step.dtype_of_squares()?, matches!(step, Step::Tensor(_))))
    };
    let (index, dtype, is_function) = job.steps.iter().enumerate().skip(from).find_map(square)?;
    // The only dtype of squares with 16 bits is BF16, which has the range of F32.
    let largest = largest_number(job.compute).min(largest_number(dtype));
    // A function may add up the squares of all elements.
    let summands = if is_function { job.leaf_length as f64 } else { 1.0 };
    Some((index, (largest / MARGIN / summands).sqrt()))
}

/// What follows from the largest size of an element of a gradient, or from a bound of that size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    /// The step can go on.
    Fine,
    /// The gradient is not finite, or its square is not.
    TooLarge,
    /// The gradient's square may be infinite at this step. Whether the square is infinite shows only once the
    /// steps in between have run.
    UnknownAt(usize),
}

impl Size {
    /// For a gradient whose largest size at a check is `size`.
    fn from_check(job: &Job<'_>, check: usize, size: f64) -> Self {
        let changes_nothing = |step: &Step<'_>| matches!(step, Step::Check | Step::Identity);
        match Size::from_bound(job, check, size) {
            Size::UnknownAt(step) if job.steps[check..step].iter().all(changes_nothing) => Size::TooLarge,
            other => other,
        }
    }

    /// For a gradient that is at most `size` at a step.
    fn from_bound(job: &Job<'_>, step: usize, size: f64) -> Self {
        if !size.is_finite() {
            return Size::TooLarge;
        }
        first_square(job, step)
            .filter(|(_, limit)| size > *limit)
            .map_or(Size::Fine, |(square, _)| Size::UnknownAt(square))
    }
}

impl ReduceOutcome {
    /// Skips the call because of this leaf. The first such leaf is kept.
    fn skip(&mut self, job: &Job<'_>) {
        self.offender.get_or_insert_with(|| job.path.to_string());
    }

    /// Evaluates the steps that are ready.
    fn run_turn(
        &mut self,
        engine: Engine,
        gather: &Gather<'_>,
        jobs: &mut [&mut Job<'_>],
        mut ready: Vec<PendingStep>,
    ) -> Result<()> {
        ready
            .iter()
            .try_for_each(|step| offload::download_gradients(jobs[step.job]))?;
        let functions = ready.extract_if(.., |step| step.pending == Pending::Function);
        let functions: Vec<_> = functions.map(|step| (step.job, step.step)).collect();
        if !functions.is_empty() && !ready.iter().any(|step| step.pending == Pending::Check) {
            let result = functions::run(engine, jobs, &functions);
            // Nothing is gathered, but if a function fails on one rank, the call fails on all ranks.
            return gather(result.map(|()| Vec::new())).map(drop);
        }
        let mut answers = ask(engine, gather, jobs, &ready)?;
        let number_answers: Vec<_> = answers
            .extract_if(.., |answer| answer.step.pending != Pending::Check)
            .collect();
        let mut new_checks = Vec::new();
        for Answer {
            step: PendingStep { job, step, .. },
            totals,
        } in answers
        {
            let size = totals
                .first()
                .map_or(Size::Fine, |size| Size::from_check(jobs[job], step, *size));
            match size {
                Size::TooLarge => self.skip(jobs[job]),
                Size::UnknownAt(square) => new_checks.push((job, square)),
                _ => {}
            }
            jobs[job].steps[step] = Step::Identity;
        }
        for mut answers in group_answers(number_answers) {
            if self.offender.is_none() {
                self.resolve(jobs, &mut answers, &mut new_checks)?;
            }
        }
        // A new check costs one more read, but only of a gradient that has exploded.
        new_checks
            .into_iter()
            .for_each(|(job, step)| jobs[job].steps.insert(step, Step::Check));
        Ok(())
    }
}
