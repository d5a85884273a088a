//! Makes requests from pending steps, and answers from the totals of these requests.

use smallvec::{SmallVec, smallvec};

use super::ready::{Pending, PendingStep};
use crate::engine::kernel::{ChunkTotals, Reducer};
use crate::engine::plan::{Job, LeafView, ReductionRequest, Step, TermOf};
use crate::engine::{Engine, dispatch};
use crate::error::Result;

/// A pending step and the totals of its terms. A check has one total: the largest size of an element.
pub(super) struct Answer {
    pub(super) step: PendingStep,
    pub(super) totals: SmallVec<[f64; 2]>,
}

/// One answer, or the answers of all leaves that share numbers.
type Answers = SmallVec<[Answer; 1]>;

impl Answer {
    pub(super) fn is_finite(&self) -> bool {
        self.totals.first().is_none_or(|total| total.is_finite())
    }
}

/// Groups the answers of leaves that share numbers. Any other answer is alone. The first answer of a group
/// decides the group's place in the list.
pub(super) fn group_answers(answers: Vec<Answer>) -> Vec<Answers> {
    let mut groups: Vec<Answers> = Vec::new();
    let mut shared_groups: Vec<(Pending, usize)> = Vec::new();
    for answer in answers {
        let pending = answer.step.pending;
        if let Some((_, group)) = shared_groups.iter().find(|(other, _)| *other == pending) {
            groups[*group].push(answer);
            continue;
        }
        if pending.is_shared() {
            shared_groups.push((pending, groups.len()));
        }
        groups.push(smallvec![answer]);
    }
    groups
}

/// Makes the totals of all ranks from those of this process, if each rank has a part of the elements.
///
/// Returns the totals of the chunks of all ranks, in the order of elements, or an error if this or another
/// rank has failed. Every rank passes the same number of lists, maybe none. A list may be empty.
pub(super) type Gather<'g> = dyn Fn(Result<Vec<ChunkTotals>>) -> Result<Vec<ChunkTotals>> + 'g;

struct TermRequest<'j, 'a> {
    /// `None` if the leaf contributes nothing, or has no elements in this process.
    view: Option<LeafView<'j, 'a>>,
    reducer: Reducer,
    /// A power of two. The term's total is that of the view's elements, each times this power.
    scale: f64,
}

/// Evaluates the numbers that `steps` wait for. All steps must be ready.
pub(super) fn ask(
    engine: Engine,
    gather: &Gather<'_>,
    jobs: &[&mut Job<'_>],
    steps: &[PendingStep],
) -> Result<Vec<Answer>> {
    let mut terms: Vec<TermRequest<'_, '_>> = Vec::with_capacity(steps.len());
    let local_chunks = steps
        .iter()
        .try_for_each(|step| push_terms(jobs[step.job], step.step, &mut terms))
        .and_then(|()| {
            let requests: Vec<_> = terms
                .iter()
                .filter_map(|&TermRequest { view, reducer, .. }| {
                    Some(ReductionRequest { view: view?, reducer })
                })
                .collect();
            let mut chunks = dispatch::reduce(engine, &requests)?.into_iter();
            let own_chunks =
                |term: &TermRequest<'_, '_>| term.view.and_then(|_| chunks.next()).unwrap_or_default();
            Ok(terms.iter().map(own_chunks).collect())
        });
    // An error is gathered as well, because the other ranks wait for this rank.
    let chunks = gather(local_chunks)?;
    let mut totals = terms
        .iter()
        .zip(chunks)
        .map(|(TermRequest { reducer, scale, .. }, chunks)| {
            reducer.scaled(reducer.op.total(&chunks), *scale)
        });
    let answer = |&step: &PendingStep| {
        let term_count = jobs[step.job]
            .reduction(step.step)
            .map_or(1, |reduction| reduction.terms.len());
        Answer {
            step,
            totals: totals.by_ref().take(term_count).collect(),
        }
    };
    Ok(steps.iter().map(answer).collect())
}

/// Appends the terms of a step, even if the leaf has no elements in this process: all ranks need lists of one
/// length.
fn push_terms<'j, 'a>(job: &'j Job<'a>, step: usize, terms: &mut Vec<TermRequest<'j, 'a>>) -> Result<()> {
    let has_elements = job.length > 0;
    if matches!(job.steps[step], Step::Check) {
        let reducer = Reducer::norm(f64::INFINITY);
        let view = has_elements.then(|| LeafView::gradient(job, step)).transpose()?;
        terms.push(TermRequest {
            view,
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
                LeafView::gradient(job, 0)
            } else {
                LeafView::term(job, step, index)
            }
        };
        let view = (has_elements && reduction.contributes).then(view).transpose()?;
        terms.push(TermRequest {
            view,
            reducer,
            scale: scale.unwrap_or(1.0),
        });
    }
    Ok(())
}

/// The factor before a step, if the factor is a power of two and nothing else comes before the step. Then the
/// gradient is reduced without arithmetic, and the total is scaled.
fn power_of_two_before(job: &Job<'_>, step: usize) -> Option<f64> {
    let mut before = job.steps[..step]
        .iter()
        .filter(|step| !matches!(step, Step::Check | Step::Identity));
    match (before.next(), before.next(), &job.sources[..]) {
        (Some(Step::Map { kernel, .. }), None, [_]) => kernel.as_prologue()?.exact_scale(),
        _ => None,
    }
}
