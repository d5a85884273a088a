//! The reduce stage: evaluates what rules asked for, reading only, and puts the results into the plan.
//!
//! It goes in turns: one turn asks everything that does not depend on another answer. A device is asked ahead what the next turns will ask, as far as
//! that depends on norms only, so that there is one transfer to wait for. Each turn is resolved as if nothing had been asked ahead; an answer is then
//! taken from there, unless a factor before it has come out as another than the device went on with. Folds only read, so one in vain does no harm.

mod ask;
mod foreseen;
mod open;

use std::collections::BTreeMap;

use self::ask::folds;
use self::foreseen::{Foreseen, Totals};
use self::open::{Open, OpenStep, ready};
use super::cpu::Fold;
use super::{Engine, Following, Job, Norms, Of, Question, Reduction, Resolved, Scale, Scope, Step, Sum, Ticket, erased, tensor};
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
        while verdict == Verdict::Go
            && let Some(next) = stage.turn(jobs)?
        {
            verdict = next;
        }
    }
    Ok(Reduced { verdict, group_norms: stage.norms.into_iter().collect() })
}

/// Lets a norm stand for the check before it, where nothing between them can make a number finite: one read of the gradients for both.
fn merge_check(job: &mut Job<'_>) {
    let Some(check) = job.steps.iter().position(|step| matches!(step, Step::Check)) else { return };
    let between = |step: &Step<'_>| matches!(step, Step::Map { kernel, .. } if kernel.keeps_non_finite());
    if let Some(Step::Reduce(reduction @ Reduction { scope: Scope::Group(_), .. })) =
        job.steps[check + 1..].iter_mut().find(|step| !between(step))
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
        // What a check would have skipped is not to be computed.
        if !functions.is_empty() && !steps.iter().any(|step| step.open == Open::Check) {
            functions.into_iter().try_for_each(|step| tensor::evaluate(&mut jobs[step.job].job, step.place))?;
            return Ok(Some(Verdict::Go));
        }
        if steps.is_empty() {
            return Ok(None);
        }
        let mut answers = self.answers(jobs, steps)?;
        if let Some(Answer { step, .. }) = answers.iter().find(|answer| answer.step.open == Open::Check && !answer.totals.total.is_finite())
        {
            return Ok(Some(Verdict::skip(&jobs[step.job].job)));
        }
        let sums = sums(&answers);
        tell_observers(jobs, &mut answers, &sums);
        while let Some(Answer { step: OpenStep { open, .. }, .. }) = answers.first().copied() {
            let (asked, others) = answers.into_iter().partition(|answer| answer.step.open == open);
            answers = others;
            match open {
                Open::Norm(scope, p) => match self.norm(jobs, asked, scope, p)? {
                    Verdict::Go => {}
                    skip => return Ok(Some(skip)),
                },
                Open::Sum(_) => asked.iter().for_each(|Answer { step, .. }| follow(&mut jobs[step.job].job, step.place, &sums)),
                Open::Check | Open::Tensor => {}
            }
        }
        Ok(Some(Verdict::Go))
    }

    /// Puts the factors that follow from norms into the jobs that asked for them.
    fn norm(&mut self, jobs: &mut [&mut Ticket<'_>], asked: Vec<Answer>, scope: Scope, p: f64) -> Result<Verdict> {
        let fold = Fold::for_norm(p);
        let together = matches!(scope, Scope::Group(_)).then(|| asked.iter().fold(0.0, |total, leaf| fold.join(total, leaf.totals.total)));
        if let (Scope::Group(group), Some(total)) = (scope, together) {
            self.norms.insert(group, fold.finish(total));
        }
        if let Some(offender) = self.offender(jobs, &asked, fold)? {
            return Ok(Verdict::skip(&jobs[offender].job));
        }
        let infinite = asked.iter().find(|answer| !answer.totals.total.is_finite());
        for &Answer { step: OpenStep { job, place, .. }, totals: Totals { total, of_parameter } } in &asked {
            let norm = fold.finish(together.unwrap_or(total));
            let norms = Norms { parameter: fold.finish(of_parameter), gradient: norm };
            let offender = || infinite.filter(|_| together.is_some()).map_or(job, |answer| answer.step.job);
            let awaited = foreseen::key(jobs, job, place);
            match resolve(&mut jobs[job].job, place, norms) {
                Resolved::Scale(factor) => self.foreseen.follow(awaited, factor, jobs[job].job.compute),
                Resolved::Refuse => return Err(Error::NonFiniteNorm { path: jobs[offender()].job.path.to_string(), norm, p }),
                Resolved::Skip => return Ok(Verdict::skip(&jobs[offender()].job)),
            }
        }
        Ok(Verdict::Go)
    }

    /// The first job whose gradient is not finite, of those whose norm stands for a check.
    fn offender(&self, jobs: &[&mut Ticket<'_>], asked: &[Answer], fold: Fold) -> Result<Option<usize>> {
        let stands_for_check =
            |step: &OpenStep| matches!(&jobs[step.job].job.steps[step.place], Step::Reduce(Reduction { finite_only: true, .. }));
        let infinite = asked.iter().filter(|answer| !answer.totals.total.is_finite()).map(|answer| answer.step);
        let suspects: Vec<OpenStep> = infinite.filter(stands_for_check).collect();
        if suspects.iter().all(|step| !fold.can_overflow(jobs[step.job].job.compute)) {
            return Ok(suspects.first().map(|step| step.job));
        }
        // The square of a large finite number can be infinite. Only then a device is asked, and waited for, once more.
        let largest = |step: &OpenStep| Question { job: &jobs[step.job].job, of: Of::Gradient(step.place), fold: Fold::Largest };
        let largest = folds(self.engine, suspects.iter().map(largest))?;
        Ok(suspects.iter().zip(largest).find(|(_, largest)| !largest.is_finite()).map(|(step, _)| step.job))
    }
}

/// The sums of all leaves, by name.
fn sums(answers: &[Answer]) -> BTreeMap<&'static str, f64> {
    let mut sums = BTreeMap::new();
    for Answer { step, totals } in answers {
        if let Open::Sum(name) = step.open {
            *sums.entry(name).or_default() += totals.total;
        }
    }
    sums
}

/// Takes the steps out that only look at the gradient, and tells them what was found.
fn tell_observers(jobs: &mut [&mut Ticket<'_>], answers: &mut Vec<Answer>, sums: &BTreeMap<&'static str, f64>) {
    let (mut job, mut taken) = (usize::MAX, 0);
    for Answer { step, .. } in &mut *answers {
        if step.job != job {
            (job, taken) = (step.job, 0);
        }
        step.place -= taken;
        if step.only_looks {
            follow(&mut jobs[job].job, step.place, sums);
            taken += 1;
        }
    }
    answers.retain(|answer| !answer.step.only_looks);
}

/// Replaces the check or sum at `place` by what follows from it.
fn follow(job: &mut Job<'_>, place: usize, sums: &BTreeMap<&'static str, f64>) {
    if let Step::Sum(Sum { name, following, slots, probe, .. }) = job.steps.remove(place) {
        match following {
            Following::Nothing(tell) => tell(sums[name]),
            Following::Step(step) => {
                let kernel = step(sums[name]);
                if probe.is_some() {
                    job.steps.insert(place, Step::Map { kernel, slots });
                }
            }
        }
    }
}

impl Verdict {
    fn skip(job: &Job<'_>) -> Self {
        Verdict::Skip { offender: job.path.to_string() }
    }
}

/// Replaces the reduction at `place` by the scale it resolves to.
fn resolve(job: &mut Job<'_>, place: usize, norms: Norms) -> Resolved {
    let Step::Reduce(reduction) = &job.steps[place] else {
        return Resolved::Scale(1.0);
    };
    let resolved = reduction.resolve(norms);
    match resolved {
        Resolved::Scale(1.0) => drop(job.steps.remove(place)),
        Resolved::Scale(factor) => {
            // With a power of two before it, one multiplication does for both: what has been asked ahead makes two, with the same bits short of under- and overflow.
            let before = place.checked_sub(1).and_then(|before| match &job.steps[before] {
                Step::Map { kernel, .. } => kernel.exact_scale(),
                _ => None,
            });
            job.steps[place] = Step::Map { kernel: erased(Scale(before.unwrap_or(1.0) * factor)), slots: &mut [] };
            if before.is_some() {
                job.steps.remove(place - 1);
            }
        }
        Resolved::Refuse | Resolved::Skip => {}
    }
    resolved
}
