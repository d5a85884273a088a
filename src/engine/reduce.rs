//! The reduce stage: evaluates what rules asked for, reading only, and puts the results into the plan.

use std::collections::BTreeMap;

use super::cpu::Fold;
use super::kernel::{Arithmetic, Scale};
use super::{Engine, Job, Norms, Reduction, Resolved, Route, Scope, Source, Step, Sum, Ticket, cpu, device, tensor};
use crate::error::{Error, Result};
use crate::value::Value;

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

/// The first thing in a job that is still to be evaluated.
#[derive(Clone, Copy, PartialEq)]
enum Open {
    Nothing,
    Check,
    Tensor,
    Norm(Scope, f64),
    Sum(&'static str),
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

impl Stage {
    /// Evaluates what is open in the jobs whose turn it is; nothing, if no job has anything open.
    fn turn(&mut self, jobs: &mut [Ticket<'_>]) -> Result<Option<Verdict>> {
        let open: Vec<(usize, Open)> = jobs.iter().map(|ticket| first_open(&ticket.job)).collect();
        let Some(next) = next(&open) else { return Ok(None) };
        let turn: Vec<usize> = (0..jobs.len()).filter(|&job| open[job].1 == next).collect();
        let verdict = match next {
            Open::Nothing => return Ok(None),
            Open::Tensor => {
                for &job in &turn {
                    tensor::evaluate(&mut jobs[job].job, open[job].0)?;
                }
                Verdict::Go
            }
            Open::Check => {
                let verdict = self.check(jobs, &turn, &open)?;
                for &job in &turn {
                    jobs[job].job.steps.remove(open[job].0);
                }
                verdict
            }
            Open::Norm(scope, p) => self.norm(jobs, &turn, &open, scope, p)?,
            Open::Sum(_) => {
                self.sum(jobs, &turn, &open)?;
                Verdict::Go
            }
        };
        Ok(Some(verdict))
    }

    /// Whether the gradients of these jobs are finite at their open steps.
    fn check(&self, jobs: &[Ticket<'_>], turn: &[usize], open: &[(usize, Open)]) -> Result<Verdict> {
        let largest = self.totals(jobs, turn, open, Fold::Largest)?;
        let offender = turn.iter().zip(largest).find(|(_, largest)| !largest.is_finite());
        Ok(offender.map_or(Verdict::Go, |(&job, _)| Verdict::skip(&jobs[job].job)))
    }

    fn norm(&mut self, jobs: &mut [Ticket<'_>], turn: &[usize], open: &[(usize, Open)], scope: Scope, p: f64) -> Result<Verdict> {
        let fold = Fold::for_norm(p);
        let totals = self.norm_totals(jobs, turn, open, fold)?;
        let together = matches!(scope, Scope::Group(_)).then(|| totals.iter().fold(0.0, |total, &leaf| fold.join(total, leaf)));
        if let (Scope::Group(group), Some(total)) = (scope, together) {
            self.norms.insert(group, fold.finish(total));
        }
        // The square of a large finite number can be infinite, so a norm that is not finite says nothing yet.
        let checked: Vec<usize> = turn.iter().copied().filter(|&job| stands_for_check(&jobs[job].job, open[job].0)).collect();
        if together.is_some_and(|total| !total.is_finite()) && !checked.is_empty() {
            let verdict = self.check(jobs, &checked, open)?;
            if verdict != Verdict::Go {
                return Ok(verdict);
            }
        }
        let parameters = self.parameter_totals(jobs, turn, open, fold)?;
        for ((&job, &own), parameter) in turn.iter().zip(&totals).zip(parameters) {
            let norm = fold.finish(together.unwrap_or(own));
            let norms = Norms { parameter: fold.finish(parameter), gradient: norm };
            let offender = || turn.iter().zip(&totals).find(|(_, total)| !total.is_finite()).map_or(job, |(&job, _)| job);
            match resolve(&mut jobs[job].job, open[job].0, norms) {
                Resolved::Scale(_) => {}
                Resolved::Refuse => {
                    let job = if together.is_some() { offender() } else { job };
                    return Err(Error::NonFiniteNorm { path: jobs[job].job.path.to_string(), norm, p });
                }
                Resolved::Skip => {
                    let job = if together.is_some() { offender() } else { job };
                    return Ok(Verdict::skip(&jobs[job].job));
                }
            }
        }
        Ok(Verdict::Go)
    }

    /// The fold of a norm over each of the jobs at its open step. Where all that comes before is a multiplication by a power of two, that is made up
    /// for afterwards: the gradients are folded as they are.
    fn norm_totals(&self, jobs: &[Ticket<'_>], turn: &[usize], open: &[(usize, Open)], fold: Fold) -> Result<Vec<f64>> {
        let scale = |job: usize| match (&jobs[job].job.steps[..open[job].0], &jobs[job].job.source[..]) {
            ([Step::Map { kernel, .. }], [_]) => kernel.exact_scale(),
            _ => None,
        };
        let scales: Vec<Option<f64>> = turn.iter().map(|&job| scale(job)).collect();
        let Some(scales) = scales.into_iter().collect::<Option<Vec<f64>>>() else {
            return self.totals(jobs, turn, open, fold);
        };
        let unscaled: Vec<(usize, Open)> = open.iter().map(|&(_, open)| (0, open)).collect();
        let totals = self.totals(jobs, turn, &unscaled, fold)?;
        Ok(totals.into_iter().zip(scales).map(|(total, scale)| fold.scaled(total, scale)).collect())
    }

    /// Adds up what these jobs ask for at their open steps, and puts in what follows.
    fn sum(&self, jobs: &mut [Ticket<'_>], turn: &[usize], open: &[(usize, Open)]) -> Result<()> {
        let asked = |job: usize| match &jobs[job].job.steps[open[job].0] {
            Step::Sum(sum) => sum.probe.is_some().then_some(sum.magnitudes),
            _ => None,
        };
        let adding: Vec<usize> = turn.iter().copied().filter(|&job| asked(job).is_some()).collect();
        let fold = if adding.iter().any(|&job| asked(job) == Some(true)) { Fold::Sum } else { Fold::Total };
        let total = self.totals(jobs, &adding, open, fold)?.into_iter().sum();
        for &job in turn {
            let (job, place) = (&mut jobs[job].job, open[job].0);
            let Step::Sum(Sum { slots, resolve, probe, .. }) = job.steps.remove(place) else { continue };
            if let (Some(kernel), Some(_)) = (resolve(total), probe) {
                job.steps.insert(place, Step::Map { kernel, slots });
            }
        }
        Ok(())
    }

    /// The fold over each of the jobs at its open step, in the same order.
    fn totals(&self, jobs: &[Ticket<'_>], turn: &[usize], open: &[(usize, Open)], fold: Fold) -> Result<Vec<f64>> {
        self.folds(turn.iter().map(|&job| (&*jobs[job].job, jobs[job].on_cpu, open[job].0)), fold)
    }

    /// The fold over the parameters of those jobs that ask for it, 0 for the others.
    fn parameter_totals(&self, jobs: &mut [Ticket<'_>], turn: &[usize], open: &[(usize, Open)], fold: Fold) -> Result<Vec<f64>> {
        let asks = |job: usize| matches!(&jobs[job].job.steps[open[job].0], Step::Reduce(Reduction { of_parameter: true, .. }));
        let asking: Vec<usize> = turn.iter().copied().filter(|&job| asks(job)).collect();
        if asking.is_empty() {
            return Ok(vec![0.0; turn.len()]);
        }
        let mut totals = vec![0.0; jobs.len()];
        let mut parameters = Vec::with_capacity(asking.len());
        for (job, ticket) in jobs.iter_mut().enumerate() {
            if asking.binary_search(&job).is_ok() {
                parameters.push((job, ticket.on_cpu, parameter(&mut ticket.job)));
            }
        }
        let folds = self.folds(parameters.iter().map(|(_, on_cpu, parameter)| (parameter, *on_cpu, 1)), fold)?;
        for ((job, _, parameter), total) in parameters.into_iter().zip(folds) {
            totals[job] = total;
            jobs[job].job.rest = parameter.rest;
        }
        Ok(turn.iter().map(|&job| totals[job]).collect())
    }

    /// The fold over each gradient after its first steps. The jobs come with whether they are on the CPU, and how many steps.
    fn folds<'j, 'a: 'j>(&self, leaves: impl Iterator<Item = (&'j Job<'a>, bool, usize)>, fold: Fold) -> Result<Vec<f64>> {
        let mut totals = Vec::new();
        let mut fused = Places::default();
        let mut on_device = Places::default();
        let mut isa = cpu::Isa::Portable;
        for (place, (leaf, on_cpu, length)) in leaves.enumerate() {
            totals.push(0.0);
            match self.engine.route(on_cpu) {
                _ if leaf.length == 0 => {}
                Route::Cpu(best) => {
                    isa = best;
                    fused.push(place, (leaf, length));
                }
                Route::Device => on_device.push(place, (leaf, length)),
                Route::Tensors => totals[place] = tensor::fold(leaf, length, fold)?,
            }
        }
        fused.fill(&mut totals, |leaves| cpu::fold(isa, leaves, fold))?;
        on_device.fill(&mut totals, |leaves| device::fold(&leaves, fold))?;
        Ok(totals)
    }
}

/// Leaves, each with how many of its steps come first, and the places of their totals.
#[derive(Default)]
struct Places<'j, 'a> {
    places: Vec<usize>,
    leaves: Vec<(&'j Job<'a>, usize)>,
}

impl<'j, 'a> Places<'j, 'a> {
    fn push(&mut self, place: usize, leaf: (&'j Job<'a>, usize)) {
        self.places.push(place);
        self.leaves.push(leaf);
    }

    fn fill(self, totals: &mut [f64], folds: impl FnOnce(Vec<(&'j Job<'a>, usize)>) -> Result<Vec<f64>>) -> Result<()> {
        for (place, total) in self.places.into_iter().zip(folds(self.leaves)?) {
            totals[place] = total;
        }
        Ok(())
    }
}

/// A job whose gradient, after one step, is what another calls x. It borrows that job's `rest`.
fn parameter<'a>(job: &mut Job<'a>) -> Job<'a> {
    /// `dx' = x`.
    #[derive(Clone, Copy)]
    struct Parameter;

    impl Arithmetic for Parameter {
        type Slots<T> = [T; 0];

        #[inline(always)]
        fn step<V: Value>(self, x: V, _dx: V, _: &mut [V; 0]) -> V {
            x
        }
    }

    let steps = smallvec::smallvec![Step::Map { kernel: Box::new(Parameter), slots: &mut [] }];
    Job { steps, rest: job.rest.take(), compute: job.compute, ..Job::new(job.path, job.x, Source::new()) }
}

impl Verdict {
    fn skip(job: &Job<'_>) -> Self {
        Verdict::Skip { offender: job.path.to_string() }
    }
}

fn first_open(job: &Job<'_>) -> (usize, Open) {
    let open = |step: &Step<'_>| match step {
        Step::Map { .. } => None,
        Step::Check => Some(Open::Check),
        Step::Tensor(_) => Some(Open::Tensor),
        Step::Reduce(Reduction { p, scope, .. }) => Some(Open::Norm(*scope, *p)),
        Step::Sum(Sum { name, .. }) => Some(Open::Sum(name)),
    };
    let found = job.steps.iter().enumerate().find_map(|(place, step)| open(step).map(|open| (place, open)));
    found.unwrap_or((job.steps.len(), Open::Nothing))
}

/// Checks come first, then the work of single leaves: a norm of several waits until every leaf has come to its own.
fn next(open: &[(usize, Open)]) -> Option<Open> {
    let first = |wanted: fn(&Open) -> bool| open.iter().map(|(_, open)| *open).find(wanted);
    first(|open| matches!(open, Open::Check))
        .or_else(|| first(|open| matches!(open, Open::Tensor | Open::Norm(Scope::Leaf, _))))
        .or_else(|| first(|open| matches!(open, Open::Norm(Scope::Group(_), _) | Open::Sum(_))))
}

fn stands_for_check(job: &Job<'_>, place: usize) -> bool {
    matches!(&job.steps[place], Step::Reduce(Reduction { finite_only: true, .. }))
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
