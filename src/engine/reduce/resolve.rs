//! From answers to the arithmetic that follows, which takes the place of the steps.

use smallvec::SmallVec;

use super::ask::Answer;
use super::ready::PendingStep;
use super::{ReduceOutcome, Size, Verdict};
use crate::engine::kernel::erased;
use crate::engine::plan::{Group, Job, Norms, OnNonFinite, Reduction, Resolved, Step, Then};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::largest;
use crate::numbers::value::ScaleBy;

/// A number for each term of a step.
type TermNumbers = SmallVec<[f64; 2]>;

impl ReduceOutcome {
    /// Puts what follows in place of these steps: one step, or all that share numbers.
    ///
    /// Where a norm stands for a check, and a step may not be able to square the gradient, `unknown` gets the
    /// job and that step.
    pub(super) fn resolve(
        &mut self,
        jobs: &mut [&mut Job<'_>],
        answers: &[Answer],
        unknown: &mut Vec<(usize, usize)>,
    ) -> Result<()> {
        let is_offender = |answer: &&Answer| !answer.is_finite();
        for Answer { step: PendingStep { job, step, .. }, totals } in answers {
            let reduction = jobs[*job].reduction(*step).ok().filter(|reduction| reduction.stands_for_check);
            // No element is larger than the norm.
            let norm = reduction
                .and_then(|reduction| Some(reduction.terms.first()?.reducer.finish(*totals.first()?)));
            match norm.map_or(Size::Fine, |norm| Size::bound(jobs[*job], *step, norm)) {
                Size::Fine => {}
                Size::UnknownAt(squaring) => unknown.push((*job, squaring)),
                Size::TooLarge => {
                    self.verdict = Verdict::skip(jobs[*job]);
                    return Ok(());
                }
            }
        }
        let shared = join(jobs, answers)?;
        let offender = answers.iter().find(is_offender).map(|answer| answer.step.job);
        for Answer { step: PendingStep { job, step, .. }, totals: own } in answers {
            let (job_index, job) = (*job, &mut *jobs[*job]);
            let mut reduction = job.take_reduction(*step)?;
            if reduction.terms.len() != shared.len() {
                let what = "takes another number of sums than for other parameters that share them";
                return Err(misfit(job, what, shared.len(), reduction.terms.len()));
            }
            let totals = reduction.terms.iter().zip(own).zip(&shared);
            let totals: TermNumbers = totals
                .map(|((term, own), shared)| if reduction.shares(term) { *shared } else { *own })
                .collect();
            // The powers of a norm are taken in a unit that the largest element decides, which is known now.
            if let Some(second) = reduction.terms.first().and_then(|norm| norm.reducer.with_unit(totals[0])) {
                reduction.terms[0].reducer = second;
                job.steps[*step] = Step::Reduce(Box::new(reduction));
                continue;
            }
            let numbers: TermNumbers =
                reduction.terms.iter().zip(totals).map(|(term, total)| term.reducer.finish(total)).collect();
            if let (Some(Group::Norm(group) | Group::Limit(group)), found) = (reduction.group, numbers[0]) {
                let norm = self.group_norms.entry(group).or_insert(found);
                self.limited.extend(reduction.limit.map(|limit| (group, (found, limit))));
                *norm = if reduction.limit.is_some() { *norm } else { found };
            }
            let offender = offender.unwrap_or(job_index);
            let p = reduction.exponent();
            match apply(job, *step, reduction, &numbers)? {
                OnNonFinite::Compute => {}
                OnNonFinite::Refuse => {
                    return Err(Error::new(ErrorKind::NotFinite, format!("the {p}-norm of its gradient is"))
                        .with_got(numbers[0])
                        .with_expected("a finite number")
                        .with_remedy(
                            "this call has changed nothing; to go on regardless set the clipping rule's \
                             `non_finite` to Pass or Skip",
                        )
                        .at(jobs[offender].path));
                }
                OnNonFinite::Skip => {
                    self.verdict = Verdict::skip(jobs[offender]);
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// The totals of all these leaves together, in their order.
fn join(jobs: &[&mut Job<'_>], answers: &[Answer]) -> Result<TermNumbers> {
    let Some(Answer { step, totals, .. }) = answers.first() else { return Ok(TermNumbers::new()) };
    let terms = &jobs[step.job].reduction(step.step)?.terms;
    let total = |term: usize| {
        let op = terms[term].reducer.op;
        answers
            .iter()
            .filter_map(|answer| answer.totals.get(term))
            .fold(0.0, |total, own| op.join(total, *own))
    };
    Ok((0..totals.len()).map(total).collect())
}

/// Puts the arithmetic that follows from these numbers in place of a reduction. The result is `Compute`,
/// unless the norm refuses or skips the call.
fn apply<'a>(
    job: &mut Job<'a>,
    step: usize,
    reduction: Reduction<'a>,
    numbers: &[f64],
) -> Result<OnNonFinite> {
    let Reduction { slots, contributes, then, .. } = reduction;
    match then {
        Then::Scale { non_finite, factor } => {
            if non_finite != OnNonFinite::Compute && !numbers[0].is_finite() {
                return Ok(non_finite);
            }
            let parameter = numbers.get(1).copied().unwrap_or(0.0);
            scale(
                job,
                step,
                factor(Norms { gradient: numbers[0], parameter, elements: job.whole, compute: job.compute }),
            );
        }
        Then::Map { resolve, slots: range, numbers: remembered } => {
            let Resolved { kernel, numbers } = resolve(numbers);
            if numbers.len() != remembered.len() {
                let what = "returns another number of numbers than the state has";
                return Err(misfit(job, what, remembered.len(), numbers.len()));
            }
            job.numbers.extend(remembered.iter_mut().map(|(_, number)| number).zip(numbers));
            if contributes {
                let slots = slots.get_mut(range).unwrap_or_default();
                if slots.len() != kernel.slots() {
                    let what = "returns arithmetic for another number of state tensors";
                    return Err(misfit(job, what, slots.len(), kernel.slots()));
                }
                job.steps[step] = Step::Map { kernel, slots };
            }
        }
    }
    Ok(OnNonFinite::Compute)
}

/// The error for sums of a rule that do not fit the arithmetic behind them.
fn misfit(job: &Job<'_>, what: &'static str, expected: usize, got: usize) -> Error {
    Error::new(ErrorKind::Contract, format!("the rule's `Gradient::map_with_sums` {what}:"))
        .with_got(got)
        .with_expected(expected)
        .with_remedy("mend the rule: the numbers have to be equal")
        .at(job.path)
}

/// Puts a multiplication in place of a step. The factor is at most the largest number of the arithmetic,
/// because infinity would make infinities of denormal numbers, and NaN of 0.
fn scale(job: &mut Job<'_>, step: usize, factor: f64) {
    if factor == 1.0 {
        return;
    }
    let largest = largest(job.compute);
    let mut factor = factor.clamp(-largest, largest);
    // A power of two right before it is multiplied in, which saves a step.
    let before = job.steps[..step].iter_mut().rev().find(|step| !matches!(step, Step::Identity));
    if let Some(before) = before
        && let Some(power) = before.link().and_then(|link| link.kernel.as_prologue()?.exact_scale())
        && (factor * power).abs() <= largest
    {
        factor *= power;
        *before = Step::Identity;
    }
    job.steps[step] = Step::Map { kernel: erased(ScaleBy(factor)), slots: &mut [] };
}
