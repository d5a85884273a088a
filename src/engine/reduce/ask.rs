//! Makes requests of pending steps, and answers of their totals.

use smallvec::{SmallVec, smallvec};

use super::ready::{Pending, PendingStep};
use crate::engine::kernel::{ChunkTotals, Reducer};
use crate::engine::plan::{GradientView, Job, ReductionRequest, Step, TermOf};
use crate::engine::{Engine, dispatch};
use crate::error::Result;

/// A pending step and the totals of its terms. A check has one: the largest element.
pub(super) struct Answer {
    pub(super) step: PendingStep,
    pub(super) totals: SmallVec<[f64; 2]>,
}

/// One answer, or those of all leaves that share numbers.
type Answers = SmallVec<[Answer; 1]>;

impl Answer {
    pub(super) fn is_finite(&self) -> bool {
        self.totals.first().is_none_or(|total| total.is_finite())
    }
}

/// Groups answers: those of leaves that share numbers are together, each other one is alone. The first answer
/// of a group decides the place of the group.
pub(super) fn by_group(answers: Vec<Answer>) -> Vec<Answers> {
    let mut all: Vec<Answers> = Vec::new();
    let mut groups: Vec<(Pending, usize)> = Vec::new();
    for answer in answers {
        let pending = answer.step.pending;
        if let Some((_, place)) = groups.iter().find(|(known, _)| *known == pending) {
            all[*place].push(answer);
            continue;
        }
        if pending.is_shared() {
            groups.push((pending, all.len()));
        }
        all.push(smallvec![answer]);
    }
    all
}

/// Makes the totals of all ranks from those of this process, if each rank has a part of the elements.
pub(crate) trait Gather {
    /// The totals of the chunks of all ranks, in the order of elements. Every rank passes the same number of
    /// lists, maybe none. A list may be empty.
    ///
    /// # Errors
    /// If this or another rank has failed.
    fn gather(&self, own: Result<Vec<ChunkTotals>>) -> Result<Vec<ChunkTotals>>;
}

struct TermRequest<'j, 'a> {
    /// `None`, if the leaf contributes nothing, or has no elements here.
    request: Option<ReductionRequest<'j, 'a>>,
    reducer: Reducer,
    /// The total is that of the request's elements times this power of two.
    scale: f64,
}

/// Evaluates the numbers that `steps` wait for. All steps must be ready.
pub(super) fn ask(
    engine: Engine,
    gather: &dyn Gather,
    jobs: &[&mut Job<'_>],
    steps: &[PendingStep],
) -> Result<Vec<Answer>> {
    let mut asked: Vec<TermRequest<'_, '_>> = Vec::with_capacity(steps.len());
    let own =
        steps.iter().try_for_each(|step| asked_for(jobs[step.job], step.step, &mut asked)).and_then(|()| {
            let requests: Vec<_> = asked.iter().filter_map(|asked| asked.request).collect();
            let mut found = dispatch::reduce(engine, &requests)?.into_iter();
            Ok(asked
                .iter()
                .map(|asked| asked.request.and_then(|_| found.next()).unwrap_or_default())
                .collect())
        });
    // An error is gathered as well, because the other ranks wait for this one.
    let chunks = gather.gather(own)?;
    let mut totals = asked.iter().zip(chunks).map(|(TermRequest { reducer, scale, .. }, chunks)| {
        reducer.scaled(reducer.op.total(&chunks), *scale)
    });
    let answer = |&step: &PendingStep| {
        let terms = jobs[step.job].reduction(step.step).map_or(1, |reduction| reduction.terms.len());
        Answer { step, totals: totals.by_ref().take(terms).collect() }
    };
    Ok(steps.iter().map(answer).collect())
}

/// Appends a request for each term of a step, even if the leaf has no elements here: all ranks need lists of
/// one length.
fn asked_for<'j, 'a>(job: &'j Job<'a>, step: usize, asked: &mut Vec<TermRequest<'j, 'a>>) -> Result<()> {
    let is_here = job.length > 0;
    if matches!(job.steps[step], Step::Check) {
        let reducer = Reducer::norm(f64::INFINITY);
        let view = is_here.then(|| GradientView::gradient(job, step)).transpose()?;
        asked.push(TermRequest {
            request: view.map(|view| ReductionRequest { view, reducer }),
            reducer,
            scale: 1.0,
        });
        return Ok(());
    }
    let reduction = job.reduction(step)?;
    let power_of_two = power_of_two_before(job, step);
    for (index, term) in reduction.terms.iter().enumerate() {
        let reducer = term.reducer;
        let scale = power_of_two.filter(|_| matches!(term.of, TermOf::Gradient) && reducer.can_be_scaled());
        let view = || {
            if scale.is_some() {
                GradientView::gradient(job, 0)
            } else {
                GradientView::term(job, step, index)
            }
        };
        let view = (is_here && reduction.contributes).then(view).transpose()?;
        asked.push(TermRequest {
            request: view.map(|view| ReductionRequest { view, reducer }),
            reducer,
            scale: scale.unwrap_or(1.0),
        });
    }
    Ok(())
}

/// The factor before a step, if it is a power of two and nothing else comes before the step. The gradient is
/// then reduced as it is, without arithmetic, and the total is scaled.
fn power_of_two_before(job: &Job<'_>, step: usize) -> Option<f64> {
    let mut before = job.steps[..step].iter().filter(|step| !matches!(step, Step::Check | Step::Identity));
    match (before.next(), before.next(), &job.sources[..]) {
        (Some(Step::Map { kernel, .. }), None, [_]) => kernel.as_prologue()?.exact_scale(),
        _ => None,
    }
}
