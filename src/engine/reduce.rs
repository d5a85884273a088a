//! The reduce stage: evaluates what rules asked for, reading only, and puts the results into the plan.

use super::cpu::Fold;
use super::kernel::Scale;
use super::{Engine, Job, Reduction, Resolved, Step, Ticket, Verdict, cpu, tensor};
use crate::error::{Error, Result};

/// What the reduce stage found.
pub(crate) struct Reduced {
    /// Whether to commit.
    pub(crate) verdict: Verdict,
    /// The last norm of the whole model that was taken.
    pub(crate) global_norm: Option<f64>,
}

/// The first thing in a job that is still to be evaluated.
#[derive(Clone, Copy, PartialEq)]
enum Open {
    Nothing,
    Tensor,
    LeafNorm(f64),
    ModelNorm(f64),
}

/// Resolves every reduction and tensor function of all jobs, which are in path order.
///
/// # Errors
/// If a rule refuses a norm, or a tensor function fails; nothing was written then.
pub(crate) fn reduce(engine: Engine, jobs: &mut [Ticket<'_>]) -> Result<Reduced> {
    let mut reduced = Reduced { verdict: Verdict::Go, global_norm: None };
    if !jobs.iter().any(|ticket| ticket.open) {
        return Ok(reduced);
    }
    loop {
        let open: Vec<(usize, Open)> = jobs.iter().map(|ticket| first_open(&ticket.job)).collect();
        let Some(next) = next(&open) else {
            return Ok(reduced);
        };
        let turn: Vec<usize> = (0..jobs.len()).filter(|&job| open[job].1 == next).collect();
        match next {
            Open::Nothing => return Ok(reduced),
            Open::Tensor => {
                for &job in &turn {
                    tensor::evaluate(&mut jobs[job].job, open[job].0)?;
                }
            }
            Open::LeafNorm(p) => {
                let fold = Fold::for_norm(p);
                let totals = totals(engine, jobs, &turn, &open, fold)?;
                for (&job, total) in turn.iter().zip(totals) {
                    let norm = fold.finish(total);
                    let resolved = resolve(&mut jobs[job].job, open[job].0, norm);
                    if resolved == Resolved::Refuse {
                        return Err(Error::NonFiniteNorm { path: jobs[job].job.path.to_string(), norm, p });
                    }
                    reduced.note(resolved);
                }
            }
            Open::ModelNorm(p) => {
                let fold = Fold::for_norm(p);
                let totals = totals(engine, jobs, &turn, &open, fold)?;
                let norm = fold.finish(totals.iter().fold(0.0, |total, &leaf| fold.join(total, leaf)));
                reduced.global_norm = Some(norm);
                for &job in &turn {
                    let resolved = resolve(&mut jobs[job].job, open[job].0, norm);
                    if resolved == Resolved::Refuse {
                        let offender = turn.iter().zip(&totals).find(|(_, total)| !total.is_finite());
                        let path = offender.map_or("the whole model", |(&job, _)| jobs[job].job.path).to_string();
                        return Err(Error::NonFiniteNorm { path, norm, p });
                    }
                    reduced.note(resolved);
                }
            }
        }
        if reduced.verdict == Verdict::Skip {
            return Ok(reduced);
        }
    }
}

impl Reduced {
    fn note(&mut self, resolved: Resolved) {
        if resolved == Resolved::Skip {
            self.verdict = Verdict::Skip;
        }
    }
}

fn first_open(job: &Job<'_>) -> (usize, Open) {
    let open = |step: &Step<'_>| match step {
        Step::Map { .. } => None,
        Step::Tensor(_) => Some(Open::Tensor),
        Step::Reduce(Reduction { p, whole_model: false, .. }) => Some(Open::LeafNorm(*p)),
        Step::Reduce(Reduction { p, whole_model: true, .. }) => Some(Open::ModelNorm(*p)),
    };
    let found = job.steps.iter().enumerate().find_map(|(place, step)| open(step).map(|open| (place, open)));
    found.unwrap_or((job.steps.len(), Open::Nothing))
}

/// Work of single leaves comes first: a norm of the whole model waits until every leaf has come to its own.
fn next(open: &[(usize, Open)]) -> Option<Open> {
    let first = |wanted: fn(&Open) -> bool| open.iter().map(|(_, open)| *open).find(wanted);
    first(|open| matches!(open, Open::Tensor | Open::LeafNorm(_))).or_else(|| first(|open| matches!(open, Open::ModelNorm(_))))
}

/// The fold over each of the jobs at its open step, in the same order.
fn totals(engine: Engine, jobs: &[Ticket<'_>], turn: &[usize], open: &[(usize, Open)], fold: Fold) -> Result<Vec<f64>> {
    let mut totals = vec![0.0; jobs.len()];
    let mut fused = Vec::with_capacity(turn.len());
    let mut isa = cpu::Isa::Portable;
    for &job in turn {
        let (leaf, length) = (&*jobs[job].job, open[job].0);
        match engine.isa(jobs[job].on_cpu) {
            _ if leaf.length == 0 => {}
            Some(best) => {
                isa = best;
                fused.push((job, (leaf, length)));
            }
            None => totals[job] = tensor::fold(leaf, length, fold)?,
        }
    }
    let (places, leaves): (Vec<_>, Vec<_>) = fused.into_iter().unzip();
    for (job, total) in places.into_iter().zip(cpu::fold(isa, leaves, fold)?) {
        totals[job] = total;
    }
    Ok(turn.iter().map(|&job| totals[job]).collect())
}

/// Replaces the reduction at `place` by the scale it resolves to.
fn resolve(job: &mut Job<'_>, place: usize, norm: f64) -> Resolved {
    let Step::Reduce(reduction) = &job.steps[place] else {
        return Resolved::Scale(1.0);
    };
    let resolved = (reduction.resolve)(norm);
    match resolved {
        Resolved::Scale(1.0) => drop(job.steps.remove(place)),
        Resolved::Scale(factor) => job.steps[place] = Step::Map { kernel: Box::new(Scale(factor)), slots: &mut [] },
        Resolved::Refuse | Resolved::Skip => {}
    }
    resolved
}
