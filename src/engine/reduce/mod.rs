//! The reduce stage: evaluates what rules asked for, reading only, and puts the results into the plan.
//!
//! It goes in turns: one turn asks everything that does not depend on another answer. A device is asked ahead what all turns will ask, with the
//! tensor functions in between, so that there is one transfer to wait for. Each turn is resolved as if nothing had been asked ahead; an answer is then
//! taken from there, unless a number before it has come out as another than the device went on with. Folds and functions only read, so it does no
//! harm where the call is skipped.

mod ask;
mod foreseen;
mod open;

use std::collections::BTreeMap;

use self::foreseen::Foreseen;
use self::open::{Open, OpenStep, ready};
use super::cpu::Fold;
use super::{Addend, Engine, Job, Norms, Reduction, Resolved, Scale, Scope, Step, Sums, Ticket, erased, tensor};
use crate::error::{Error, Result};

/// What the reduce stage found.
pub(crate) struct Reduced {
    pub(crate) verdict: Verdict,
    /// The norms over several leaves that were taken, by group; the last, if a group has several.
    pub(crate) group_norms: Vec<(u64, f64)>,
}

/// Whether the step goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Commit.
    Go,
    /// Skip the whole call.
    Skip {
        /// The path of the first leaf whose gradient is not finite.
        offender: String,
    },
}

/// Resolves every reduction and tensor function of all jobs, which are in path order.
///
/// # Errors
/// If a rule refuses a norm, or a tensor function fails; nothing was written then.
pub(crate) fn reduce(engine: Engine, tickets: &mut [Option<Ticket<'_>>]) -> Result<Reduced> {
    let mut stage = Stage { engine, norms: BTreeMap::new(), foreseen: Foreseen::default() };
    let mut verdict = Verdict::Go;
    if tickets.iter().flatten().any(|ticket| ticket.open) {
        let jobs = &mut tickets.iter_mut().flatten().collect::<Vec<_>>()[..];
        jobs.iter_mut().for_each(|ticket| merge_check(&mut ticket.job));
        jobs.iter_mut().filter(|ticket| ticket.open).try_for_each(|ticket| ticket.job.fetch())?;
        stage.foresee(jobs)?;
        while verdict == Verdict::Go
            && let Some(next) = stage.turn(jobs)?
        {
            verdict = next;
        }
    }
    Ok(Reduced { verdict, group_norms: stage.norms.into_iter().collect() })
}

/// Lets a norm stand for the check before it, where nothing between them can make a number finite, and the norm of finite numbers is finite: one
/// read of the gradients for both.
fn merge_check(job: &mut Job<'_>) {
    let Some(check) = job.steps.iter().position(|step| matches!(step, Step::Check)) else { return };
    let between = |step: &Step<'_>| matches!(step, Step::Map { kernel, .. } if kernel.keeps_non_finite());
    if let Some(Step::Reduce(reduction @ Reduction { scope: Scope::Group(_), .. })) =
        job.steps[check + 1..].iter_mut().find(|step| !between(step))
        && !Fold::for_norm(reduction.p).can_overflow(job.compute)
    {
        reduction.finite_only = true;
        job.steps.remove(check);
    }
}

struct Stage {
    engine: Engine,
    norms: BTreeMap<u64, f64>,
    /// What has been asked ahead.
    foreseen: Foreseen,
}

/// The folds that a step asks for: of the gradient and the parameter for a norm, of the addends for sums.
type Totals = [f64; 2];

/// An open step, and what was found for it.
#[derive(Clone, Copy)]
struct Answer {
    step: OpenStep,
    totals: Totals,
}

impl Stage {
    /// Evaluates all that can be evaluated at once; nothing, if no job has anything open.
    fn turn(&mut self, jobs: &mut [&mut Ticket<'_>]) -> Result<Option<Verdict>> {
        let (functions, steps): (Vec<_>, Vec<_>) = ready(jobs).into_iter().partition(|step| step.open == Open::Tensor);
        // What a check will skip is not to be computed, if it has not run ahead.
        if !functions.is_empty() && !steps.iter().any(|step| step.open == Open::Check) {
            self.run_on_devices(jobs, &functions)?;
            functions.into_iter().try_for_each(|step| tensor::evaluate(&mut jobs[step.job].job, step.place))?;
            return Ok(Some(Verdict::Go));
        }
        if steps.is_empty() {
            return Ok(None);
        }
        let mut answers = self.answers(jobs, steps)?;
        let is_finite = |answer: &&Answer| answer.totals[0].is_finite();
        if let Some(Answer { step, .. }) = answers.iter().find(|answer| answer.step.open == Open::Check && !is_finite(answer)) {
            return Ok(Some(Verdict::skip(&jobs[step.job].job)));
        }
        take_checks_out(jobs, &mut answers);
        while let Some(Answer { step: OpenStep { open, .. }, .. }) = answers.first().copied() {
            let (asked, others) = answers.into_iter().partition(|answer| answer.step.open == open);
            answers = others;
            match open {
                Open::Norm(scope, p) => match self.norm(jobs, asked, scope, p)? {
                    Verdict::Go => {}
                    skip => return Ok(Some(skip)),
                },
                Open::Sums(_) => self.sums(jobs, &asked)?,
                Open::Check | Open::Tensor => {}
            }
        }
        Ok(Some(Verdict::Go))
    }

    /// Puts the factors that follow from norms into the jobs that asked for them.
    fn norm(&mut self, jobs: &mut [&mut Ticket<'_>], asked: Vec<Answer>, scope: Scope, p: f64) -> Result<Verdict> {
        let fold = Fold::for_norm(p);
        let together = matches!(scope, Scope::Group(_)).then(|| asked.iter().fold(0.0, |total, leaf| fold.join(total, leaf.totals[0])));
        if let (Scope::Group(group), Some(total)) = (scope, together) {
            self.norms.insert(group, fold.finish(total));
        }
        let mut infinite = asked.iter().filter(|answer| !answer.totals[0].is_finite()).map(|answer| answer.step);
        let stands_for_check =
            |step: &OpenStep| matches!(&jobs[step.job].job.steps[step.place], Step::Reduce(Reduction { finite_only: true, .. }));
        if let Some(offender) = infinite.clone().find(stands_for_check) {
            return Ok(Verdict::skip(&jobs[offender.job].job));
        }
        let infinite = infinite.next();
        for &Answer { step: OpenStep { job, place, .. }, totals: [gradient, parameter] } in &asked {
            let norms = Norms { parameter: fold.finish(parameter), gradient: fold.finish(together.unwrap_or(gradient)) };
            let offender = || infinite.filter(|_| together.is_some()).map_or(job, |step| step.job);
            let key = foreseen::key(jobs, job, place);
            let Step::Reduce(reduction) = &jobs[job].job.steps[place] else { continue };
            match reduction.resolve(norms) {
                Resolved::Scale(factor) => {
                    let factor = self.foreseen.agreed(&jobs[job].job, key, factor)?;
                    scale(&mut jobs[job].job, place, factor);
                }
                Resolved::Refuse => {
                    return Err(Error::NonFiniteNorm { path: jobs[offender()].job.path.to_string(), norm: norms.gradient, p });
                }
                Resolved::Skip => return Ok(Verdict::skip(&jobs[offender()].job)),
            }
        }
        Ok(Verdict::Go)
    }

    /// Puts the steps that follow from sums into the jobs that asked for them.
    fn sums(&mut self, jobs: &mut [&mut Ticket<'_>], asked: &[Answer]) -> Result<()> {
        let totals = [0, 1].map(|number| asked.iter().fold(0.0, |sum, leaf| sum + leaf.totals[number]));
        for OpenStep { job, place, .. } in asked.iter().map(|answer| answer.step) {
            let key = foreseen::key(jobs, job, place);
            let job = &mut jobs[job].job;
            let Step::Sums(sums) = job.steps.remove(place) else { continue };
            let Sums { addends, numbers, following, .. } = *sums;
            let found = following.summed(totals);
            job.numbers.extend(numbers.into_iter().zip(found.numbers));
            let scalar = self.foreseen.agreed(job, key, found.scalar)?;
            if let Some([_, Addend { slots, .. }]) = addends {
                job.steps.insert(place, Step::Map { kernel: following.kernel(scalar), slots });
            }
        }
        Ok(())
    }
}

/// Takes the checks out of the jobs, and the answers to them.
fn take_checks_out(jobs: &mut [&mut Ticket<'_>], answers: &mut Vec<Answer>) {
    let (mut job, mut taken) = (usize::MAX, 0);
    for Answer { step, .. } in &mut *answers {
        if step.job != job {
            (job, taken) = (step.job, 0);
        }
        step.place -= taken;
        if step.open == Open::Check {
            jobs[job].job.steps.remove(step.place);
            taken += 1;
        }
    }
    answers.retain(|answer| answer.step.open != Open::Check);
}

impl Verdict {
    fn skip(job: &Job<'_>) -> Self {
        Verdict::Skip { offender: job.path.to_string() }
    }
}

/// Replaces the reduction at `place` by a scale.
fn scale(job: &mut Job<'_>, place: usize, factor: f64) {
    if factor == 1.0 {
        job.steps.remove(place);
        return;
    }
    // A power of two right before it is multiplied in, which saves a step. What has been asked ahead is of two multiplications; the bits are the
    // same, unless one of them under- or overflows.
    let before = place.checked_sub(1).and_then(|before| match &job.steps[before] {
        Step::Map { kernel, .. } => kernel.exact_scale(),
        _ => None,
    });
    job.steps[place] = Step::Map { kernel: erased(Scale(before.unwrap_or(1.0) * factor)), slots: &mut [] };
    if before.is_some() {
        job.steps.remove(place - 1);
    }
}
