//! Replaces steps by the arithmetic that follows from their answers.

use smallvec::{SmallVec, smallvec};

use super::ask::Answer;
use super::ready::PendingStep;
use super::{ReduceOutcome, Size};
use crate::engine::kernel::erased;
use crate::engine::plan::{Group, Job, Norms, OnNonFinite, Reduction, Resolved, Step, Term, Then};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::value::ScaleBy;
use crate::numbers::{largest_number, smallest_normal};

/// A number for each term of a step.
type TermNumbers = SmallVec<[f64; 2]>;

impl ReduceOutcome {
    /// Replaces the steps of `answers` (one step, or all that share numbers) by the arithmetic that follows
    /// from their numbers. If none of these leaves has a gradient, the steps become [`Step::Identity`]. If
    /// powers have to be summed up, the steps stay, and are evaluated once more.
    ///
    /// If a norm has replaced a check, and shows that a later step may not be able to square the gradient,
    /// `new_checks` gets the job and the later step.
    pub(super) fn resolve(
        &mut self,
        jobs: &mut [&mut Job<'_>],
        answers: &mut [Answer],
        new_checks: &mut Vec<(usize, usize)>,
    ) -> Result<()> {
        for answer in &*answers {
            let job = answer.step.job;
            match size_from_norm(jobs[job], answer) {
                Size::Fine => {}
                Size::UnknownAt(square) => new_checks.push((job, square)),
                Size::TooLarge => {
                    self.skip(jobs[job]);
                    return Ok(());
                }
            }
        }
        // Errors name the first leaf whose own norm is not finite. The shared norm does not show which leaf
        // that is.
        let offender = answers
            .iter()
            .find(|answer| !answer.is_finite())
            .map(|answer| answer.step.job);
        share_totals(jobs, answers)?;
        if begin_power_sums(jobs, answers) {
            return Ok(());
        }
        let has_gradient = |answer: &Answer| {
            let reduction = jobs[answer.step.job].reduction(answer.step.step);
            reduction.is_ok_and(|reduction| reduction.contributes)
        };
        // Without a gradient there is nothing to sum up, and the state stays as it is.
        if !answers.iter().any(has_gradient) {
            for Answer { step, .. } in &*answers {
                jobs[step.job].steps[step.step] = Step::Identity;
            }
            return Ok(());
        }
        for Answer {
            step: PendingStep { job: index, step, .. },
            totals,
        } in &*answers
        {
            let reduction = jobs[*index].take_reduction(*step)?;
            let finish = |(term, total): (&Term, &f64)| term.reducer.finish(*total);
            let numbers: TermNumbers = reduction.terms.iter().zip(totals).map(finish).collect();
            self.keep_norm(&reduction, &numbers);
            if let (Then::Scale { non_finite, .. }, [norm, ..]) = (&reduction.then, &numbers[..])
                && !norm.is_finite()
            {
                let offender = &*jobs[offender.unwrap_or(*index)];
                match non_finite {
                    OnNonFinite::Compute => {}
                    OnNonFinite::Refuse => {
                        return Err(not_finite_error(offender, reduction.exponent(), *norm));
                    }
                    OnNonFinite::Skip => {
                        self.skip(offender);
                        return Ok(());
                    }
                }
            }
            replace_step(jobs[*index], *step, reduction, &numbers)?;
        }
        Ok(())
    }

    /// Keeps the norm of a group for the outcome. A limited norm does not replace another norm of its group.
    fn keep_norm(&mut self, reduction: &Reduction<'_>, numbers: &[f64]) {
        let (Some(Group::Norm(group) | Group::Limit(group)), [norm, ..]) = (reduction.group, numbers) else {
            return;
        };
        let group_norm = self.group_norms.entry(group).or_insert(*norm);
        if let Some(mut limit) = reduction.limit {
            // One leaf whose window has collected gradients of this norm is enough to end all windows.
            if let Some((_, earlier)) = self.limited.get(&group) {
                limit.is_collected |= earlier.is_collected;
            }
            self.limited.insert(group, (*norm, limit));
        } else {
            *group_norm = *norm;
        }
    }
}

/// If the step is a norm that has replaced a check: what the norm shows about the size of the gradient, as no
/// element is larger than the norm. For any other step: `Fine`.
fn size_from_norm(
    job: &Job<'_>,
    Answer {
        step: PendingStep { step, .. },
        totals,
    }: &Answer,
) -> Size {
    let norm = || {
        let reduction = job
            .reduction(*step)
            .ok()
            .filter(|reduction| reduction.replaces_check)?;
        Some(reduction.terms.first()?.reducer.finish(*totals.first()?))
    };
    norm().map_or(Size::Fine, |norm| Size::from_bound(job, *step, norm))
}

/// Joins the totals that leaves share, in the order of the leaves, and passes them to each of these leaves.
fn share_totals(jobs: &[&mut Job<'_>], answers: &mut [Answer]) -> Result<()> {
    let mut joined_totals: Option<TermNumbers> = None;
    for Answer { step, totals } in &*answers {
        let reduction = jobs[step.job].reduction(step.step)?;
        let count = shared(reduction, totals).count();
        let joined_totals = joined_totals.get_or_insert_with(|| smallvec![0.0; count]);
        if joined_totals.len() != count {
            let problem = "takes a different count of sums than for other parameters that share the sums";
            return Err(misfit(jobs[step.job].path, problem, joined_totals.len(), count));
        }
        for (joined, (term, total)) in joined_totals.iter_mut().zip(shared(reduction, totals)) {
            *joined = term.reducer.op.join(*joined, *total);
        }
    }
    let joined_totals = joined_totals.unwrap_or_default();
    for Answer { step, totals } in answers {
        let reduction = jobs[step.job].reduction(step.step)?;
        for ((_, total), joined) in shared(reduction, totals).zip(&joined_totals) {
            *total = *joined;
        }
    }
    Ok(())
}

/// The terms whose numbers leaves share, each with its total.
fn shared<'r, T>(
    reduction: &'r Reduction<'_>,
    totals: impl IntoIterator<Item = T>,
) -> impl Iterator<Item = (&'r Term, T)> {
    let terms = reduction.terms.iter().zip(totals);
    terms.filter(|(term, _)| reduction.shares(term))
}

/// Replaces each reduction to the largest element, which decides the unit for the powers of a norm, by the
/// sum of these powers. Returns whether there is any. All steps of `answers` then have to be evaluated once
/// more.
fn begin_power_sums(jobs: &mut [&mut Job<'_>], answers: &[Answer]) -> bool {
    let mut is_any = false;
    for Answer { step, totals } in answers {
        let Step::Reduce(reduction) = &mut jobs[step.job].steps[step.step] else {
            continue;
        };
        for (term, total) in reduction.terms.iter_mut().zip(totals) {
            if let Some(power_sum) = term.reducer.second_reduction(*total) {
                (term.reducer, is_any) = (power_sum, true);
            }
        }
    }
    is_any
}

/// The error for a norm that is not finite, if a rule refuses such a call.
fn not_finite_error(offender: &Job<'_>, p: f64, norm: f64) -> Error {
    let remedy = "this call has changed nothing; to go on regardless, set `non_finite` of the clipping rule \
                  to Pass or Skip";
    Error::new(ErrorKind::NotFinite, format!("the {p}-norm of its gradient is"))
        .with_got(norm)
        .with_expected("a finite number")
        .with_remedy(remedy)
        .at(offender.path)
}

/// Replaces a reduction by the arithmetic that follows from `numbers`.
fn replace_step<'a>(job: &mut Job<'a>, step: usize, reduction: Reduction<'a>, numbers: &[f64]) -> Result<()> {
    let Reduction {
        slots,
        contributes,
        then,
        ..
    } = reduction;
    match then {
        // A gradient that is not read is 0, which no factor changes.
        Then::Scale { .. } if !contributes => {}
        Then::Scale { factor, .. } => {
            let norms = Norms {
                gradient: numbers[0],
                parameter: numbers.get(1).copied().unwrap_or(0.0),
                elements: job.leaf_length,
                compute: job.compute,
            };
            replace_by_factor(job, step, factor(norms));
        }
        Then::Map {
            resolve,
            slots: range,
            numbers: state_numbers,
        } => {
            let Resolved {
                kernel,
                numbers: next_numbers,
            } = resolve(numbers).map_err(|error| error.at(job.path))?;
            if next_numbers.len() != state_numbers.len() {
                let problem = "returns a different count of numbers than the state has";
                return Err(misfit(job.path, problem, state_numbers.len(), next_numbers.len()));
            }
            job.numbers.extend(
                state_numbers
                    .iter_mut()
                    .map(|(_, number)| number)
                    .zip(next_numbers),
            );
            // A leaf without a gradient makes no step, but remembers the numbers.
            if contributes {
                let slots = slots.get_mut(range).unwrap_or_default();
                if slots.len() != kernel.slots() {
                    let problem =
                        "returns arithmetic for a different count of state tensors than the state has";
                    return Err(misfit(job.path, problem, slots.len(), kernel.slots()));
                }
                job.steps[step] = Step::Map { kernel, slots };
            }
        }
    }
    Ok(())
}

/// The error for sums of a rule that do not fit the arithmetic after them.
fn misfit(path: &str, problem: &'static str, expected: usize, got: usize) -> Error {
    Error::new(
        ErrorKind::Contract,
        format!("the rule's `Gradient::map_with_sums` {problem}:"),
    )
    .with_got(got)
    .with_expected(expected)
    .with_remedy("fix the rule: both counts must be equal")
    .at(path)
}

/// Replaces a step by a multiplication with a factor.
///
/// An infinite factor becomes 0. Such a factor is a quotient by the norm of a gradient that has vanished, and
/// infinity would turn a gradient of zeros into NaN. Any other factor is limited to the largest number of the
/// arithmetic, because infinity would turn subnormal numbers into infinities.
fn replace_by_factor(job: &mut Job<'_>, step: usize, factor: f64) {
    if factor == 1.0 {
        // `take_reduction` has left `Step::Identity` in place of the step.
        return;
    }
    let (least, largest) = (smallest_normal(job.compute), largest_number(job.compute));
    let mut factor = if factor.is_infinite() {
        0f64.copysign(factor)
    } else {
        factor.clamp(-largest, largest)
    };
    // A power of two right before the step (a loss scale) is multiplied in, which saves a step.
    let previous = job.steps[..step]
        .iter_mut()
        .rev()
        .find(|step| !matches!(step, Step::Identity));
    if let Some(previous) = previous
        && let Some(power) = previous.link().and_then(|link| link.kernel.as_prologue()?.exact_scale())
        // A subnormal product would have fewer digits than the two factors.
        && (factor == 0.0 || (least..=largest).contains(&(factor * power).abs()))
    {
        factor *= power;
        *previous = Step::Identity;
    }
    job.steps[step] = Step::Map {
        kernel: erased(ScaleBy(factor)),
        slots: &mut [],
    };
}
