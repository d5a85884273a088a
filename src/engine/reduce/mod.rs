//! The reduce stage: evaluates what rules asked for, reading only, and puts the results into the plan.
//!
//! It goes in turns: one turn asks everything that does not depend on another answer, so that a device has one transfer to wait for.

mod open;

use std::collections::BTreeMap;

use self::open::{Open, OpenStep, ready};
use super::cpu::Fold;
use super::{
    Engine, Following, Job, Norms, Of, Question, Reduction, Resolved, Route, Scale, Scope, Step, Sum, Ticket, cpu, device, tensor,
};
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
pub(crate) fn reduce(engine: Engine, jobs: &mut [Ticket<'_>]) -> Result<Reduced> {
    let mut stage = Stage { engine, norms: BTreeMap::new() };
    let mut verdict = Verdict::Go;
    if jobs.iter().any(|ticket| ticket.open) {
        jobs.iter_mut().for_each(|ticket| merge_check(&mut ticket.job));
        jobs.iter_mut().filter(|ticket| ticket.open && ticket.is_remote).try_for_each(|ticket| ticket.job.fetch())?;
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
}

/// An open step, and what was found for it.
#[derive(Clone, Copy)]
struct Answer {
    step: OpenStep,
    /// The fold over the gradient as it stands there, or over what the step adds up.
    total: f64,
    /// The fold over the parameter, if the step asks for that.
    of_parameter: f64,
}

impl Stage {
    /// Evaluates all that can be evaluated at once; nothing, if no job has anything open.
    fn turn(&mut self, jobs: &mut [Ticket<'_>]) -> Result<Option<Verdict>> {
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
        if let Some(Answer { step, .. }) = answers.iter().find(|answer| answer.step.open == Open::Check && !answer.total.is_finite()) {
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
    fn norm(&mut self, jobs: &mut [Ticket<'_>], asked: Vec<Answer>, scope: Scope, p: f64) -> Result<Verdict> {
        let fold = Fold::for_norm(p);
        let together = matches!(scope, Scope::Group(_)).then(|| asked.iter().fold(0.0, |total, leaf| fold.join(total, leaf.total)));
        if let (Scope::Group(group), Some(total)) = (scope, together) {
            self.norms.insert(group, fold.finish(total));
        }
        if let Some(offender) = self.offender(jobs, &asked, fold)? {
            return Ok(Verdict::skip(&jobs[offender].job));
        }
        let infinite = asked.iter().find(|answer| !answer.total.is_finite());
        for &Answer { step: OpenStep { job, place, .. }, total, of_parameter } in &asked {
            let norm = fold.finish(together.unwrap_or(total));
            let norms = Norms { parameter: fold.finish(of_parameter), gradient: norm };
            let offender = || infinite.filter(|_| together.is_some()).map_or(job, |answer| answer.step.job);
            match resolve(&mut jobs[job].job, place, norms) {
                Resolved::Scale(_) => {}
                Resolved::Refuse => return Err(Error::NonFiniteNorm { path: jobs[offender()].job.path.to_string(), norm, p }),
                Resolved::Skip => return Ok(Verdict::skip(&jobs[offender()].job)),
            }
        }
        Ok(Verdict::Go)
    }

    /// The first job whose gradient is not finite, of those whose norm stands for a check.
    fn offender(&self, jobs: &[Ticket<'_>], asked: &[Answer], fold: Fold) -> Result<Option<usize>> {
        let stands_for_check =
            |step: &OpenStep| matches!(&jobs[step.job].job.steps[step.place], Step::Reduce(Reduction { finite_only: true, .. }));
        let infinite = asked.iter().filter(|answer| !answer.total.is_finite()).map(|answer| answer.step);
        let suspects: Vec<OpenStep> = infinite.filter(stands_for_check).collect();
        if suspects.iter().all(|step| !fold.can_overflow(jobs[step.job].job.compute)) {
            return Ok(suspects.first().map(|step| step.job));
        }
        // The square of a large finite number can be infinite.
        let largest = |step: &OpenStep| Question { job: &jobs[step.job].job, of: Of::Gradient(step.place), fold: Fold::Largest };
        let largest = self.folds(&suspects.iter().map(largest).collect::<Vec<_>>())?;
        Ok(suspects.iter().zip(largest).find(|(_, largest)| !largest.is_finite()).map(|(step, _)| step.job))
    }

    /// Evaluates all these steps at once.
    fn answers(&self, jobs: &[Ticket<'_>], steps: Vec<OpenStep>) -> Result<Vec<Answer>> {
        let mut answers: Vec<Answer> = steps.into_iter().map(|step| Answer { step, total: 0.0, of_parameter: 0.0 }).collect();
        let mut questions = Vec::with_capacity(answers.len());
        let mut asking = Vec::with_capacity(answers.len());
        for (number, &Answer { step: OpenStep { job, place, .. }, .. }) in answers.iter().enumerate() {
            let job = &*jobs[job].job;
            let mut ask = |of, fold, factor| {
                questions.push(Question { job, of, fold });
                asking.push((number, factor));
            };
            match &job.steps[place] {
                Step::Check => ask(Of::Gradient(place), Fold::Largest, 1.0),
                Step::Sum(Sum { magnitudes, probe: Some(_), .. }) => {
                    ask(Of::Addend(place), if *magnitudes { Fold::Sum } else { Fold::Total }, 1.0);
                }
                Step::Reduce(Reduction { p, of_parameter, .. }) => {
                    let fold = Fold::for_norm(*p);
                    match power_of_two_before(job, place) {
                        Some(factor) => ask(Of::Gradient(0), fold, factor),
                        None => ask(Of::Gradient(place), fold, 1.0),
                    }
                    if *of_parameter {
                        ask(Of::Parameter, fold, 1.0);
                    }
                }
                Step::Sum(_) | Step::Map { .. } | Step::Tensor(_) => {}
            }
        }
        let folds = self.folds(&questions)?;
        for (((number, factor), question), total) in asking.into_iter().zip(&questions).zip(folds) {
            let Answer { total: of_gradient, of_parameter, .. } = &mut answers[number];
            let answered = if matches!(question.of, Of::Parameter) { of_parameter } else { of_gradient };
            *answered = question.fold.scaled(total, factor);
        }
        Ok(answers)
    }

    /// The answers of whatever engine has the leaf.
    fn folds(&self, questions: &[Question<'_, '_>]) -> Result<Vec<f64>> {
        let mut totals = vec![0.0; questions.len()];
        let mut fused = Places::default();
        let mut on_device = Places::default();
        let mut isa = cpu::Isa::Portable;
        for (place, &question) in questions.iter().enumerate() {
            match self.engine.route(question.job.x.device().is_cpu()) {
                _ if question.job.length == 0 => {}
                Route::Cpu(best) => {
                    isa = best;
                    fused.push(place, question);
                }
                Route::Device => on_device.push(place, question),
                Route::Tensors => totals[place] = tensor::fold(question)?,
            }
        }
        fused.fill(&mut totals, |questions| cpu::fold(isa, questions))?;
        on_device.fill(&mut totals, |questions| device::fold(&questions))?;
        Ok(totals)
    }
}

/// Questions, and the places of their answers.
#[derive(Default)]
struct Places<'j, 'a> {
    places: Vec<usize>,
    questions: Vec<Question<'j, 'a>>,
}

impl<'j, 'a> Places<'j, 'a> {
    fn push(&mut self, place: usize, question: Question<'j, 'a>) {
        self.places.push(place);
        self.questions.push(question);
    }

    fn fill(self, totals: &mut [f64], folds: impl FnOnce(Vec<Question<'j, 'a>>) -> Result<Vec<f64>>) -> Result<()> {
        for (place, total) in self.places.into_iter().zip(folds(self.questions)?) {
            totals[place] = total;
        }
        Ok(())
    }
}

/// The factor before an open step, where that is all there is before it, and a power of two: it is made up for after the gradients have been
/// folded as they are, and so need no arithmetic.
fn power_of_two_before(job: &Job<'_>, place: usize) -> Option<f64> {
    let mut before = job.steps[..place].iter().filter_map(|step| if let Step::Map { kernel, .. } = step { Some(kernel) } else { None });
    match (before.next(), before.next(), &job.source[..]) {
        (Some(only), None, [_]) => only.exact_scale(),
        _ => None,
    }
}

/// The sums of all leaves, by name.
fn sums(answers: &[Answer]) -> BTreeMap<&'static str, f64> {
    let mut sums = BTreeMap::new();
    for Answer { step, total, .. } in answers {
        if let Open::Sum(name) = step.open {
            *sums.entry(name).or_default() += total;
        }
    }
    sums
}

/// Takes the steps out that only look at the gradient, and tells them what was found.
fn tell_observers(jobs: &mut [Ticket<'_>], answers: &mut Vec<Answer>, sums: &BTreeMap<&'static str, f64>) {
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
    let resolved = (reduction.resolve)(norms);
    match resolved {
        Resolved::Scale(1.0) => drop(job.steps.remove(place)),
        Resolved::Scale(factor) => {
            // With a power of two before it, one multiplication does for both.
            let before = place.checked_sub(1).and_then(|before| match &job.steps[before] {
                Step::Map { kernel, .. } => kernel.exact_scale(),
                _ => None,
            });
            job.steps[place] = Step::Map { kernel: Box::new(Scale(before.unwrap_or(1.0) * factor)), slots: &mut [] };
            if before.is_some() {
                job.steps.remove(place - 1);
            }
        }
        Resolved::Refuse | Resolved::Skip => {}
    }
    resolved
}
