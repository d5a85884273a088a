//! Which steps of the jobs (plans for one leaf each) of a call are pending, and which of these can be
//! evaluated at once.
//!
//! A step is ready if no pending step before it changes the gradient. A function must also wait for the
//! checks before it. A number that leaves share is ready only if all these leaves have come to the number.
//! Whether a leaf has come to a number depends on the other steps that have to wait. So `find_ready` repeats
//! this loop until `waiting` does not grow:
//!
//! ```text
//! waiting: the shared numbers to which some leaf has not come, none at first
//! for each job: its ready prefix ends before a step in `waiting`, or after a step that changes the gradient
//!               shared numbers after the prefix are added to `waiting`
//! ```

use crate::engine::plan::{Group, Job, Step};

/// The kind of evaluation that a step waits for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Pending {
    Check,
    Function,
    /// The numbers of a leaf, or of a group of leaves, and the exponent of their norm.
    Numbers(Option<Group>, f64),
}

/// A step that is to be evaluated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PendingStep {
    /// The index of the step's job.
    pub(super) job: usize,
    /// The index of the step in its job.
    pub(super) step: usize,
    pub(super) pending: Pending,
}

impl Pending {
    fn from_step(step: &Step<'_>) -> Option<Self> {
        match step {
            Step::Map { .. } | Step::Output(_) | Step::Identity => None,
            Step::Check => Some(Pending::Check),
            Step::Tensor(_) => Some(Pending::Function),
            Step::Reduce(reduction) => Some(Pending::Numbers(reduction.group, reduction.exponent())),
        }
    }

    /// Whether several leaves share the answer.
    pub(super) fn is_shared(self) -> bool {
        matches!(self, Pending::Numbers(Some(_), _))
    }
}

/// The pending steps that can be evaluated at once, in the order of the jobs and of the steps in each job.
pub(super) fn find_ready(jobs: &[&mut Job<'_>]) -> Vec<PendingStep> {
    let pending: Vec<PendingStep> = jobs
        .iter()
        .enumerate()
        .flat_map(|(index, job)| pending_steps(index, job))
        .collect();
    let mut waiting = Vec::new();
    loop {
        let count_before = waiting.len();
        for steps in by_job(&pending) {
            let (prefix, later) = steps.split_at(ready_prefix_len(steps, &waiting));
            // A shared number may come twice in a leaf. The second number is for a later turn, and must not
            // make the first number wait.
            let is_second =
                |step: &PendingStep| prefix.last().is_some_and(|last| last.pending == step.pending);
            for step in later
                .iter()
                .filter(|step| step.pending.is_shared() && !is_second(step))
            {
                if !waiting.contains(&step.pending) {
                    waiting.push(step.pending);
                }
            }
        }
        if waiting.len() == count_before {
            break;
        }
    }
    let ready_steps = |waiting: &[Pending]| {
        by_job(&pending)
            .flat_map(|steps| &steps[..ready_prefix_len(steps, waiting)])
            .copied()
            .collect()
    };
    let ready: Vec<PendingStep> = ready_steps(&waiting);
    match pending.first() {
        // Nothing is ready: leaves wait for each other in a circle. The circle is broken at the first leaf:
        // leaves whose next pending step is the same number go on without the other leaves.
        Some(first) if ready.is_empty() => {
            waiting.retain(|pending| *pending != first.pending);
            ready_steps(&waiting)
        }
        _ => ready,
    }
}

/// The pending steps of a job in order. Functions at the end that cannot refuse the call are left to the
/// commit, so that no results of functions have to be kept until the commit.
fn pending_steps<'j>(job_index: usize, job: &'j Job<'_>) -> impl Iterator<Item = PendingStep> + use<'j> {
    let must_run = |step: &Step<'_>| match step {
        Step::Tensor(function) => function.may_refuse,
        step => Pending::from_step(step).is_some(),
    };
    let end = job.steps.iter().rposition(must_run).map_or(0, |last| last + 1);
    job.steps[..end]
        .iter()
        .enumerate()
        .filter_map(move |(index, step)| {
            Some(PendingStep {
                job: job_index,
                step: index,
                pending: Pending::from_step(step)?,
            })
        })
}

/// The pending steps of each job.
fn by_job(pending: &[PendingStep]) -> impl Iterator<Item = &[PendingStep]> {
    pending.chunk_by(|a, b| a.job == b.job)
}

/// The length of the prefix of a job's pending steps that can be evaluated at once.
fn ready_prefix_len(steps: &[PendingStep], waiting: &[Pending]) -> usize {
    let mut length = 0;
    for step in steps {
        // A function runs after the checks before it have been evaluated, because a check may skip the call.
        if waiting.contains(&step.pending) || step.pending == Pending::Function && length > 0 {
            break;
        }
        length += 1;
        // A check does not change the gradient, so the next step is ready as well.
        if step.pending != Pending::Check {
            break;
        }
    }
    length
}

#[cfg(test)]
mod tests {
    use std::any::TypeId;

    use candle_core::{DType, Device, Tensor};
    use smallvec::smallvec;

    use super::*;
    use crate::engine::kernel::{Reducer, erased};
    use crate::engine::plan::{OnNonFinite, Operand, Reduction, Sources, TensorStep, Term, TermOf, Then};
    use crate::numbers::value::ScaleBy;

    const CHECK: Pending = Pending::Check;
    const FUNCTION: Pending = Pending::Function;
    const OWN: Pending = Pending::Numbers(None, 2.0);
    const SHARED: Pending = Pending::Numbers(Some(Group::Norm(1)), 2.0);
    const OTHER: Pending = Pending::Numbers(Some(Group::Norm(2)), 2.0);
    const SUMS: Pending = Pending::Numbers(
        Some(Group::Sums {
            rule: TypeId::of::<()>(),
            group: 0,
        }),
        2.0,
    );

    fn step<'a>(pending: Pending, may_refuse: bool) -> Step<'a> {
        match pending {
            Pending::Check => Step::Check,
            Pending::Function => Step::Tensor(Box::new(TensorStep {
                function: Box::new(|_, dx, _| Ok(dx)),
                slots: &mut [],
                may_refuse,
            })),
            Pending::Numbers(group, p) => Step::Reduce(Box::new(Reduction {
                group,
                terms: smallvec![Term {
                    of: TermOf::Gradient,
                    reducer: Reducer::norm(p)
                }],
                contributes: true,
                slots: &mut [],
                replaces_check: false,
                limit: None,
                then: Then::Scale {
                    non_finite: OnNonFinite::Skip,
                    factor: Box::new(|norms| norms.gradient),
                },
            })),
        }
    }

    /// The job and the kind of each step that is ready, for jobs with these steps.
    fn ready_of<const N: usize>(jobs: [&[Pending]; N], may_refuse: bool) -> Vec<(usize, Pending)> {
        let x = Tensor::zeros(3, DType::F32, &Device::Cpu).expect("a tensor");
        let job = |steps: &&[Pending]| {
            let scale = || Step::Map {
                kernel: erased(ScaleBy(2.0)),
                slots: &mut [],
            };
            Job {
                steps: steps
                    .iter()
                    .flat_map(|&pending| [scale(), step(pending, may_refuse)])
                    .collect(),
                ..Job::new("x", Operand::Lent(&x), Sources::new())
            }
        };
        let mut jobs = jobs.iter().map(job).collect::<Vec<_>>();
        find_ready(&jobs.iter_mut().collect::<Vec<_>>())
            .into_iter()
            .map(|step| (step.job, step.pending))
            .collect()
    }

    fn ready<const N: usize>(jobs: [&[Pending]; N]) -> Vec<(usize, Pending)> {
        ready_of(jobs, true)
    }

    #[test]
    fn a_check_holds_nothing_up() {
        assert_eq!(
            ready([&[CHECK, OWN, OWN], &[], &[CHECK, SUMS]]),
            [(0, CHECK), (0, OWN), (2, CHECK), (2, SUMS)]
        );
        assert_eq!(
            ready([&[CHECK, FUNCTION], &[FUNCTION, OWN]]),
            [(0, CHECK), (1, FUNCTION)]
        );
        assert_eq!(ready([]), []);
    }

    #[test]
    fn leaves_wait_for_each_other() {
        assert_eq!(ready([&[SHARED], &[OWN, SHARED]]), [(1, OWN)]);
        assert_eq!(
            ready([&[SHARED], &[FUNCTION, SHARED], &[OTHER]]),
            [(1, FUNCTION), (2, OTHER)]
        );
        // The third leaf waits for the second, which waits for the first.
        assert_eq!(ready([&[OWN, SHARED], &[SHARED, OTHER], &[OTHER]]), [(0, OWN)]);
        assert_eq!(ready([&[SUMS], &[OWN, SUMS]]), [(1, OWN)]);
    }

    #[test]
    fn a_norm_that_comes_again_is_taken_twice() {
        assert_eq!(ready([&[SHARED, SHARED], &[SHARED]]), [(0, SHARED), (1, SHARED)]);
    }

    #[test]
    fn leaves_that_wait_for_each_other_are_taken_in_order() {
        assert_eq!(
            ready([&[SHARED, OTHER], &[OTHER, SHARED], &[SHARED]]),
            [(0, SHARED), (2, SHARED)]
        );
    }

    #[test]
    fn functions_that_refuse_nothing_are_left_to_the_commit() {
        assert_eq!(
            ready_of([&[FUNCTION], &[CHECK, FUNCTION], &[FUNCTION, FUNCTION]], false),
            [(1, CHECK)]
        );
        assert_eq!(ready_of([&[FUNCTION, OWN, FUNCTION]], false), [(0, FUNCTION)]);
        assert_eq!(ready([&[FUNCTION], &[OWN, FUNCTION]]), [(0, FUNCTION), (1, OWN)]);
    }
}
