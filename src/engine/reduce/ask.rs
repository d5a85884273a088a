//! From pending steps to requests, and from totals to answers.

use smallvec::SmallVec;

use super::ready::PendingStep;
use crate::engine::kernel::Reducer;
use crate::engine::plan::{GradientView, Job, ReductionRequest, Step, Term, TermOf};
use crate::engine::{Engine, dispatch};
use crate::error::Result;

/// A pending step, and the totals of its terms: of a check, the largest element.
pub(super) struct Answer {
    pub(super) step: PendingStep,
    pub(super) totals: SmallVec<[f64; 2]>,
}

impl Answer {
    /// Whether the first total is finite.
    pub(super) fn is_finite(&self) -> bool {
        self.totals.first().is_none_or(|total| total.is_finite())
    }
}

/// A request, and by which power of two its elements differ from those that the number is about.
type Scaled<'j, 'a> = (ReductionRequest<'j, 'a>, f64);

/// Evaluates what these steps wait for, which are ready.
pub(super) fn ask(engine: Engine, jobs: &[&mut Job<'_>], steps: &[PendingStep]) -> Result<Vec<Answer>> {
    let mut requests: Vec<Scaled<'_, '_>> = Vec::with_capacity(steps.len());
    let mut indices: Vec<SmallVec<[Option<usize>; 2]>> = Vec::with_capacity(steps.len());
    for &PendingStep { job, step, .. } in steps {
        let mut index = |request: Option<_>| {
            requests.extend(request);
            request.map(|_| requests.len() - 1)
        };
        indices.push(requests_for(jobs[job], step)?.into_iter().map(&mut index).collect());
    }
    let totals = dispatch::reduce(engine, &requests.iter().map(|(request, _)| *request).collect::<Vec<_>>())?;
    let total = |index: Option<usize>| {
        index.map_or(0.0, |index| {
            let (ReductionRequest { reducer, .. }, scale) = requests[index];
            reducer.scaled(totals[index], scale)
        })
    };
    let answer = |(&step, indices): (&_, SmallVec<_>)| Answer { step, totals: indices.into_iter().map(total).collect() };
    Ok(steps.iter().zip(indices).map(answer).collect())
}

/// The request for each term of a step; `None` for a term to which the leaf contributes nothing.
fn requests_for<'j, 'a>(job: &'j Job<'a>, step: usize) -> Result<SmallVec<[Option<Scaled<'j, 'a>>; 2]>> {
    if matches!(job.steps[step], Step::Check) {
        let request = ReductionRequest { view: GradientView::gradient(job, step)?, reducer: Reducer::norm(f64::INFINITY) };
        return Ok(smallvec::smallvec![(job.length > 0).then_some((request, 1.0))]);
    }
    let reduction = job.reduction(step)?;
    let power_of_two = power_of_two_before(job, step);
    let request = |(index, term): (usize, &Term)| {
        if job.length == 0 || !reduction.contributes {
            return Ok(None);
        }
        let scale = power_of_two.filter(|_| matches!(term.of, TermOf::Gradient) && term.reducer.can_be_scaled());
        let view = if scale.is_some() { GradientView::gradient(job, 0)? } else { GradientView::term(job, step, index)? };
        Ok(Some((ReductionRequest { view, reducer: term.reducer }, scale.unwrap_or(1.0))))
    };
    reduction.terms.iter().enumerate().map(request).collect()
}

/// The factor before a step, where that is all there is before it, and a power of two: it is made up for after the gradients have been
/// reduced as they are, and so need no arithmetic.
fn power_of_two_before(job: &Job<'_>, step: usize) -> Option<f64> {
    let mut before = job.steps[..step].iter().filter(|step| !matches!(step, Step::Check | Step::Identity));
    match (before.next(), before.next(), &job.sources[..]) {
        (Some(Step::Map { kernel, .. }), None, [_]) => kernel.exact_scale(),
        _ => None,
    }
}
