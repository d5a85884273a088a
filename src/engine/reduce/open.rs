//! What is open in the jobs of a call, and which of it can be evaluated now.

use crate::engine::{Following, Reduction, Scope, Step, Sum, Ticket};

/// What is to be evaluated before the commit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Open {
    Check,
    Tensor,
    Norm(Scope, f64),
    Sum(&'static str),
}

/// A step that is to be evaluated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct OpenStep {
    /// The number of its job.
    pub(super) job: usize,
    /// Which of the job's steps it is.
    pub(super) place: usize,
    pub(super) open: Open,
    /// Whether the gradient is the same before and behind it.
    pub(super) only_looks: bool,
}

impl OpenStep {
    fn new(job: usize, place: usize, step: &Step<'_>) -> Option<Self> {
        let (open, only_looks) = match step {
            Step::Map { .. } => return None,
            Step::Check => (Open::Check, true),
            Step::Tensor(_) => (Open::Tensor, false),
            Step::Reduce(Reduction { p, scope, .. }) => (Open::Norm(*scope, *p), false),
            Step::Sum(Sum { name, following, .. }) => (Open::Sum(name), matches!(following, Following::Nothing(_))),
        };
        Some(OpenStep { job, place, open, only_looks })
    }

    /// Whether the leaves that ask for it get one answer.
    fn is_shared(&self) -> bool {
        matches!(self.open, Open::Norm(Scope::Group(_), _) | Open::Sum(_))
    }
}

/// The open steps that can be evaluated at once, in the order of the jobs and of the steps within each.
///
/// In each job these are the steps up to the first that changes the gradient. What several leaves ask for together waits until all of them have
/// come to it.
pub(super) fn ready(jobs: &[Ticket<'_>]) -> Vec<OpenStep> {
    let open = open_steps(jobs);
    let mut waiting = Vec::new();
    loop {
        let known = waiting.len();
        for steps in by_job(&open) {
            let (reached, behind) = steps.split_at(reach(steps, &waiting));
            for step in behind.iter().filter(|step| step.is_shared() && reached.last().is_none_or(|last| last.open != step.open)) {
                if !waiting.contains(&step.open) {
                    waiting.push(step.open);
                }
            }
        }
        if waiting.len() == known {
            break;
        }
    }
    let reached = |waiting: &[Open]| by_job(&open).flat_map(|steps| &steps[..reach(steps, waiting)]).copied().collect::<Vec<_>>();
    let ready = reached(&waiting);
    match open.first() {
        // Leaves wait for each other: those go first that have come to the same step as the first leaf.
        Some(first) if ready.is_empty() => {
            waiting.retain(|waiting| *waiting != first.open);
            reached(&waiting)
        }
        _ => ready,
    }
}

fn open_steps(jobs: &[Ticket<'_>]) -> Vec<OpenStep> {
    let mut open = Vec::new();
    for (job, ticket) in jobs.iter().enumerate().filter(|(_, ticket)| ticket.open) {
        open.extend(ticket.job.steps.iter().enumerate().filter_map(|(place, step)| OpenStep::new(job, place, step)));
    }
    open
}

fn by_job(open: &[OpenStep]) -> impl Iterator<Item = &[OpenStep]> {
    open.chunk_by(|a, b| a.job == b.job)
}

/// How many of a job's open steps can be evaluated at once, where some have to wait.
fn reach(steps: &[OpenStep], waiting: &[Open]) -> usize {
    let mut reached = 0;
    for step in steps {
        // A function of the gradient is not run before what may skip the call has been looked at.
        if waiting.contains(&step.open) || step.open == Open::Tensor && reached > 0 {
            break;
        }
        reached += 1;
        if !step.only_looks {
            break;
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;
    use crate::engine::{Job, Resolved, Scale, Source, TensorStep};

    const CHECK: Open = Open::Check;
    const TENSOR: Open = Open::Tensor;
    const OWN: Open = Open::Norm(Scope::Leaf, 2.0);
    const SHARED: Open = Open::Norm(Scope::Group(1), 2.0);
    const OTHER: Open = Open::Norm(Scope::Group(2), 2.0);
    const OBSERVED: Open = Open::Sum("observed");
    const SUM: Open = Open::Sum("sum");

    fn step(open: Open) -> Step<'static> {
        let sum = |name, following| Step::Sum(Sum { name, magnitudes: false, probe: None, slots: &mut [], following });
        match open {
            Open::Check => Step::Check,
            Open::Tensor => Step::Tensor(TensorStep { run: Box::new(|_, dx, _| Ok(dx)), slots: &mut [] }),
            Open::Norm(scope, p) => {
                let resolve = Box::new(|_| Resolved::Skip);
                Step::Reduce(Reduction { p, scope, finite_only: false, of_parameter: false, resolve })
            }
            Open::Sum("observed") => sum("observed", Following::Nothing(Box::new(|_| ()))),
            Open::Sum(name) => sum(name, Following::Step(Box::new(|_| Box::new(Scale(1.0))))),
        }
    }

    /// The job and the open step of all that are ready, where each job has these steps.
    fn first<const N: usize>(jobs: [&[Open]; N]) -> Vec<(usize, Open)> {
        let x = Tensor::zeros(3, candle_core::DType::F32, &Device::Cpu).expect("a tensor");
        let ticket = |steps: &[Open]| {
            let steps = steps.iter().flat_map(|&open| [Step::Map { kernel: Box::new(Scale(2.0)), slots: &mut [] }, step(open)]).collect();
            Ticket::new(Box::new(Job { steps, ..Job::new("x", &x, Source::new()) }))
        };
        ready(&jobs.map(ticket)).into_iter().map(|ready| (ready.job, ready.open)).collect()
    }

    #[test]
    fn what_only_looks_holds_nothing_up() {
        assert_eq!(first([&[CHECK, OWN, OWN], &[], &[CHECK, OBSERVED, SUM]]), [(0, CHECK), (0, OWN), (2, CHECK), (2, OBSERVED), (2, SUM)]);
        assert_eq!(first([&[CHECK, TENSOR], &[TENSOR, OWN]]), [(0, CHECK), (1, TENSOR)]);
        assert_eq!(first([]), []);
    }

    #[test]
    fn leaves_wait_for_each_other() {
        assert_eq!(first([&[SHARED], &[OWN, SHARED]]), [(1, OWN)]);
        assert_eq!(first([&[SHARED], &[TENSOR, SHARED], &[OTHER]]), [(1, TENSOR), (2, OTHER)]);
        // The second leaf waits with its own norm, as it comes after one that waits.
        assert_eq!(first([&[OWN, SHARED], &[SHARED, OTHER], &[OTHER]]), [(0, OWN)]);
        assert_eq!(first([&[OBSERVED, SUM], &[OWN, OBSERVED, SUM]]), [(1, OWN)]);
    }

    #[test]
    fn a_norm_that_comes_again_is_taken_twice() {
        assert_eq!(first([&[SHARED, SHARED], &[SHARED]]), [(0, SHARED), (1, SHARED)]);
    }

    #[test]
    fn leaves_that_wait_for_each_other_are_taken_in_order() {
        assert_eq!(first([&[SHARED, OTHER], &[OTHER, SHARED], &[SHARED]]), [(0, SHARED), (2, SHARED)]);
    }
}
