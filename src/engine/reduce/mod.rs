//! The reduce stage: evaluates, reading only, what steps wait for, and replaces them by the arithmetic that
//! follows.
//!
//! It goes in turns. A turn evaluates everything that depends on nothing else that is pending, in one request
//! to each device. A chain takes two if its second norm is of what the first has scaled.
//!
//! A check looks for numbers that are not finite and, if the gradient is squared behind it, for those whose
//! square is not. If something stands between the two, such as clipping, and the gradient is too large before
//! it, another check takes place right before the square.

mod ask;
mod ready;
mod resolve;

use std::collections::BTreeMap;

use super::plan::{Group, Job, NormLimit, Step, TermOf};
use super::{Engine, functions, offload};
use crate::error::Result;
use crate::numbers::largest;
pub(crate) use ask::Gather;
use ask::{Answer, ask, by_group};
use ready::{Pending, PendingStep, ready};

/// What the reduce stage found.
#[derive(Debug, Default)]
pub(crate) struct ReduceOutcome {
    /// The first leaf whose gradient is not finite, or too large to be squared: the call is skipped.
    pub(crate) offender: Option<String>,
    /// The norms over several leaves that were taken, by group; the last, if a group has several.
    pub(crate) group_norms: BTreeMap<u64, f64>,
    /// The norms of groups that have a limit; the last, if a group has several.
    pub(crate) limited: BTreeMap<u64, (f64, NormLimit)>,
}

/// Resolves every check and reduction of all jobs, which are in path order.
///
/// It also runs the functions that these depend on, and those that may refuse the call.
///
/// # Errors
/// If a rule refuses a norm or sums, or a function fails; nothing was written then.
pub(crate) fn reduce(
    engine: Engine,
    gather: &dyn Gather,
    jobs: &mut [&mut Job<'_>],
) -> Result<ReduceOutcome> {
    let mut reduced = ReduceOutcome::default();
    jobs.iter_mut().for_each(|job| merge_check(job));
    while reduced.offender.is_none() {
        let ready = ready(jobs);
        if ready.is_empty() {
            break;
        }
        reduced.turn(engine, gather, jobs, ready)?;
    }
    Ok(reduced)
}

/// Lets a norm stand for the check before it: one read of the gradients for both. Nothing between them can
/// make a number finite, and the norm of finite numbers has to be finite.
fn merge_check(job: &mut Job<'_>) {
    let Some(check) = job.steps.iter().position(|step| matches!(step, Step::Check)) else { return };
    let (compute, passes) =
        (job.compute, |step: &Step<'_>| step.link().is_some_and(|link| link.kernel.keeps_non_finite()));
    let next = job.steps[check + 1..].iter_mut().find(|step| !passes(step));
    if let Some(Step::Reduce(reduction)) = next
        && let (Some(Group::Norm(_) | Group::Limit(_)), Some(term)) =
            (reduction.group, reduction.terms.first())
        && matches!(term.of, TermOf::Gradient)
        && !term.reducer.can_overflow(compute)
        && term.reducer.keeps_non_finite()
    {
        reduction.stands_for_check = true;
        job.steps[check] = Step::Identity;
    }
}

/// How many times larger than a gradient's square the squares of a rule may be. Adan squares the gradient
/// plus its difference from the last one, which is less than 4 times the size.
const MARGIN: f64 = 16.0;

/// The first step from this one on that squares the gradient, and the largest size whose square is finite
/// there. A function may add up squares of all elements.
fn squaring(job: &Job<'_>, from: usize) -> Option<(usize, f64)> {
    let squared = |(index, step): (usize, &Step<'_>)| {
        Some((index, step.dtype_of_squares()?, matches!(step, Step::Tensor(_))))
    };
    let (index, dtype, is_function) = job.steps.iter().enumerate().skip(from).find_map(squared)?;
    // Of 16 bits there is only BF16, which has the range of F32.
    let largest = largest(job.compute).min(largest(dtype));
    let summands = if is_function { job.whole as f64 } else { 1.0 };
    Some((index, (largest / MARGIN / summands).sqrt()))
}

/// What follows from the size of a gradient, or from a bound of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    /// The step can go on.
    Fine,
    /// It is not finite, or its square is not.
    TooLarge,
    /// Its square may be infinite at this step. What comes to the step is not known yet.
    UnknownAt(usize),
}

impl Size {
    /// Of a gradient at a check.
    fn at_check(job: &Job<'_>, check: usize, size: f64) -> Self {
        let is_as_it_is = |step: &Step<'_>| matches!(step, Step::Check | Step::Identity);
        match Size::bound(job, check, size) {
            Size::UnknownAt(step) if job.steps[check..step].iter().all(is_as_it_is) => Size::TooLarge,
            other => other,
        }
    }

    /// Of a gradient that is not larger than this at a step.
    fn bound(job: &Job<'_>, step: usize, size: f64) -> Self {
        if !size.is_finite() {
            return Size::TooLarge;
        }
        squaring(job, step)
            .filter(|(_, limit)| size > *limit)
            .map_or(Size::Fine, |(squaring, _)| Size::UnknownAt(squaring))
    }
}

impl ReduceOutcome {
    /// Skips the call for this leaf, unless it is skipped for an earlier one.
    fn skip(&mut self, job: &Job<'_>) {
        self.offender.get_or_insert_with(|| job.path.to_string());
    }

    /// Evaluates the steps that are ready.
    fn turn(
        &mut self,
        engine: Engine,
        gather: &dyn Gather,
        jobs: &mut [&mut Job<'_>],
        mut ready: Vec<PendingStep>,
    ) -> Result<()> {
        ready.iter().try_for_each(|step| offload::download(jobs[step.job]))?;
        let functions = ready.extract_if(.., |step| step.pending == Pending::Function);
        let functions: Vec<_> = functions.map(|step| (step.job, step.step)).collect();
        // Run functions only when no check is pending: the call may be skipped.
        if !functions.is_empty() && !ready.iter().any(|step| step.pending == Pending::Check) {
            let done = functions::run(engine, jobs, &functions);
            return gather.gather(done.map(|()| Vec::new())).map(drop);
        }
        let mut answers = ask(engine, gather, jobs, &ready)?;
        let numbers: Vec<_> =
            answers.extract_if(.., |answer| answer.step.pending != Pending::Check).collect();
        let mut unknown = Vec::new();
        for Answer { step: PendingStep { job, step, .. }, totals } in answers {
            let size = totals.first().map_or(Size::Fine, |size| Size::at_check(jobs[job], step, *size));
            match size {
                Size::TooLarge => self.skip(jobs[job]),
                Size::UnknownAt(step) => unknown.push((job, step)),
                _ => {}
            }
            jobs[job].steps[step] = Step::Identity;
        }
        for answers in by_group(numbers) {
            if self.offender.is_none() {
                self.resolve(jobs, &answers, &mut unknown)?;
            }
        }
        // The check costs one more read of a gradient that has exploded. If something in between makes it
        // smaller, it can be squared after all.
        unknown.into_iter().for_each(|(job, step)| jobs[job].steps.insert(step, Step::Check));
        Ok(())
    }
}
