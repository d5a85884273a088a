//! Functions of whole tensors: run some leaves at a time, because their inputs and results take memory.

use super::memory::Written;
use super::plan::{GradientView, Job, Step};
use super::{Engine, dispatch};
use crate::error::Result;

/// How many elements the leaves have, about, whose functions run at the same time.
const AT_ONCE: usize = 1 << 20;

/// Runs these functions, each given by the index of its job and its index among the steps there.
///
/// # Errors
/// If one of them fails.
pub(super) fn run(engine: Engine, jobs: &mut [&mut Job<'_>], functions: &[(usize, usize)]) -> Result<()> {
    let written = Written::all();
    for functions in batches(functions.iter().copied(), |&(job, _)| jobs[job].length, AT_ONCE) {
        let mut views = Vec::with_capacity(2 * functions.len());
        for &(job, step) in functions.iter().filter(|(job, _)| jobs[*job].length > 0) {
            views.extend([GradientView::parameter(jobs[job]), GradientView::gradient(jobs[job], step)?]);
        }
        let mut inputs = dispatch::materialise(engine, &views)?.into_iter();
        for (job, step) in functions {
            if jobs[job].length == 0 {
                jobs[job].steps[step] = Step::Identity;
                continue;
            }
            let (Some(x), Some(dx)) = (inputs.next(), inputs.next()) else { return Err(jobs[job].broken("no inputs for a function")) };
            jobs[job].run_function(step, [x, dx], &written)?;
        }
    }
    Ok(())
}

/// Writes parameters and state of jobs whose data is where their arithmetic is done, and moves their counters. Functions that are left run before, a
/// few leaves at a time, so that no more of their results is kept than is written next.
///
/// # Errors
/// Only if a device or a function that was left fails.
pub(super) fn commit(engine: Engine, jobs: Vec<&mut Job<'_>>) -> Result<()> {
    let (left, ready): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.has_functions());
    dispatch::commit(engine, ready)?;
    for mut jobs in batches(left, |job| job.length, AT_ONCE) {
        loop {
            let first = |job: &Job<'_>| job.steps.iter().position(|step| matches!(step, Step::Tensor(_)));
            let next: Vec<_> = jobs.iter().enumerate().filter_map(|(index, job)| Some((index, first(job)?))).collect();
            if next.is_empty() {
                break;
            }
            run(engine, &mut jobs, &next)?;
        }
        dispatch::commit(engine, jobs)?;
    }
    Ok(())
}

/// Neighbours together, as long as they have no more elements than that; one that has more is alone.
pub(super) fn batches<I>(items: impl IntoIterator<Item = I>, length: impl Fn(&I) -> usize, elements: usize) -> Vec<Vec<I>> {
    let mut batches: Vec<Vec<I>> = Vec::new();
    let mut total = 0;
    for item in items {
        total += length(&item);
        match batches.last_mut() {
            Some(batch) if total <= elements => batch.push(item),
            _ => {
                total = length(&item);
                batches.push(vec![item]);
            }
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_together_while_they_are_small() {
        let of = |lengths: &[usize]| batches(lengths.iter().copied(), |length| *length, 10);
        assert_eq!(of(&[5, 5, 1, 12, 3, 7, 1]), [vec![5, 5], vec![1], vec![12], vec![3, 7], vec![1]]);
        assert_eq!(of(&[]), Vec::<Vec<usize>>::new());
    }
}
