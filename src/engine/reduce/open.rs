//! What is open in the jobs of a call, and which of it can be evaluated now.

use crate::engine::{Reduction, Scope, Step, Ticket};

/// What is to be evaluated before the commit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Open {
    Check,
    Tensor,
    Norm(Scope, f64),
    Sums(&'static str),
}

/// A step that is to be evaluated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct OpenStep {
    /// The number of its job.
    pub(super) job: usize,
    /// Which of the job's steps it is.
    pub(super) place: usize,
    pub(super) open: Open,
}

impl OpenStep {
    fn new(job: usize, place: usize, step: &Step<'_>) -> Option<Self> {
        let open = match step {
            Step::Map { .. } => return None,
            Step::Check => Open::Check,
            Step::Tensor(_) => Open::Tensor,
            Step::Reduce(Reduction { p, scope, .. }) => Open::Norm(*scope, *p),
            Step::Sums(sums) => Open::Sums(sums.name),
        };
        Some(OpenStep { job, place, open })
    }

    /// Whether the gradient is the same before and behind it.
    fn only_looks(&self) -> bool {
        self.open == Open::Check
    }

    /// Whether the leaves that ask for it get one answer.
    fn is_shared(&self) -> bool {
        self.shares(0)
    }

    /// Whether the first or second of its totals is over all leaves that ask for it: a norm of a parameter never is.
    pub(super) fn shares(&self, total: usize) -> bool {
        match self.open {
            Open::Norm(Scope::Group(_), _) => total == 0,
            Open::Sums(_) => true,
            Open::Check | Open::Tensor | Open::Norm(Scope::Leaf, _) => false,
        }
    }
}

/// The open steps that can be evaluated at once, in the order of the jobs and of the steps within each.
///
/// In each job these are the steps up to the first that changes the gradient. What several leaves ask for together waits until all of them have
/// come to it.
pub(super) fn ready(jobs: &[&mut Ticket<'_>]) -> Vec<OpenStep> {
    ready_of(&open_steps(jobs))
}

/// What will be ready in turn after turn.
pub(super) fn rounds(jobs: &[&mut Ticket<'_>]) -> Vec<Vec<OpenStep>> {
    let mut open = open_steps(jobs);
    let mut rounds = Vec::new();
    while !open.is_empty() {
        let round = ready_of(&open);
        // Both are in the same order.
        let mut ready = round.iter().peekable();
        open.retain(|step| ready.next_if_eq(&step).is_none());
        rounds.push(round);
    }
    rounds
}

fn ready_of(open: &[OpenStep]) -> Vec<OpenStep> {
    let mut waiting = Vec::new();
    loop {
        let known = waiting.len();
        for steps in by_job(open) {
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
    let reached = |waiting: &[Open]| by_job(open).flat_map(|steps| &steps[..reach(steps, waiting)]).copied().collect::<Vec<_>>();
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

/// Whether the jobs that are here ask for nothing together with others that are elsewhere.
pub(super) fn are_apart(rounds: &[Vec<OpenStep>], is_here: impl Fn(usize) -> bool, is_elsewhere: impl Fn(usize) -> bool) -> bool {
    let mut shared: Vec<Open> = Vec::new();
    for step in rounds.iter().flatten().filter(|step| step.is_shared() && is_elsewhere(step.job)) {
        if !shared.contains(&step.open) {
            shared.push(step.open);
        }
    }
    rounds.iter().flatten().all(|step| !is_here(step.job) || !shared.contains(&step.open))
}

/// All open steps, in the order of the jobs and of the steps within each.
fn open_steps(jobs: &[&mut Ticket<'_>]) -> Vec<OpenStep> {
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
        if !step.only_looks() {
            break;
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;
    use crate::engine::{FromNorms, FromSums, Job, Norms, OnNonFinite, Scale, Source, Summed, Sums, TensorStep, erased};
    use crate::value::Value;

    const CHECK: Open = Open::Check;
    const TENSOR: Open = Open::Tensor;
    const OWN: Open = Open::Norm(Scope::Leaf, 2.0);
    const SHARED: Open = Open::Norm(Scope::Group(1), 2.0);
    const OTHER: Open = Open::Norm(Scope::Group(2), 2.0);
    const SUMS: Open = Open::Sums("sums");

    #[derive(Clone, Copy)]
    struct Norm;

    impl FromNorms for Norm {
        fn factor<V: Value>(self, norms: Norms<V>) -> V {
            norms.gradient
        }
    }

    impl FromSums for Norm {
        type Slots<T> = [T; 0];

        fn summed<V: Value>(self, sums: [V; 2]) -> Summed<V> {
            Summed { numbers: sums, scalar: sums[0] }
        }

        fn step<V: Value>(self, scalar: V, _x: V, dx: V, _: &mut [V; 0]) -> V {
            dx * scalar
        }
    }

    fn step<'a>(open: Open) -> Step<'a> {
        match open {
            Open::Check => Step::Check,
            Open::Tensor => Step::Tensor(Box::new(TensorStep::new(Box::new(|_, dx, _| Ok(dx)), &mut []))),
            Open::Norm(scope, p) => {
                let (non_finite, factor) = (OnNonFinite::Skip, Box::new(Norm));
                Step::Reduce(Reduction { p, scope, finite_only: false, of_parameter: false, non_finite, factor })
            }
            Open::Sums(name) => {
                let numbers = [(); 2].map(|()| Box::leak(Box::new(0.0)));
                Step::Sums(Box::new(Sums { name, addends: None, numbers, following: Box::new(Norm) }))
            }
        }
    }

    /// Jobs with these steps.
    fn tickets<T>(jobs: &[&[Open]], run: impl FnOnce(&[&mut Ticket<'_>]) -> T) -> T {
        let x = Tensor::zeros(3, candle_core::DType::F32, &Device::Cpu).expect("a tensor");
        let ticket = |steps: &&[Open]| {
            let steps = steps.iter().flat_map(|&open| [Step::Map { kernel: erased(Scale(2.0)), slots: &mut [] }, step(open)]).collect();
            Ticket::new(Job { steps, ..Job::new("x", &x, Source::new()) })
        };
        run(&jobs.iter().map(ticket).collect::<Vec<_>>().iter_mut().collect::<Vec<_>>())
    }

    fn named(steps: Vec<OpenStep>) -> Vec<(usize, Open)> {
        steps.into_iter().map(|step| (step.job, step.open)).collect()
    }

    /// The job and the open step of all that are ready, where each job has these steps.
    fn first<const N: usize>(jobs: [&[Open]; N]) -> Vec<(usize, Open)> {
        tickets(&jobs, |jobs| named(ready(jobs)))
    }

    /// The same for all rounds.
    fn all_rounds<const N: usize>(jobs: [&[Open]; N]) -> Vec<Vec<(usize, Open)>> {
        tickets(&jobs, |jobs| rounds(jobs).into_iter().map(named).collect())
    }

    #[test]
    fn what_only_looks_holds_nothing_up() {
        assert_eq!(first([&[CHECK, OWN, OWN], &[], &[CHECK, SUMS]]), [(0, CHECK), (0, OWN), (2, CHECK), (2, SUMS)]);
        assert_eq!(first([&[CHECK, TENSOR], &[TENSOR, OWN]]), [(0, CHECK), (1, TENSOR)]);
        assert_eq!(first([]), []);
    }

    #[test]
    fn leaves_wait_for_each_other() {
        assert_eq!(first([&[SHARED], &[OWN, SHARED]]), [(1, OWN)]);
        assert_eq!(first([&[SHARED], &[TENSOR, SHARED], &[OTHER]]), [(1, TENSOR), (2, OTHER)]);
        // The second leaf waits with its own norm, as it comes after one that waits.
        assert_eq!(first([&[OWN, SHARED], &[SHARED, OTHER], &[OTHER]]), [(0, OWN)]);
        assert_eq!(first([&[SUMS], &[OWN, SUMS]]), [(1, OWN)]);
    }

    #[test]
    fn a_norm_that_comes_again_is_taken_twice() {
        assert_eq!(first([&[SHARED, SHARED], &[SHARED]]), [(0, SHARED), (1, SHARED)]);
    }

    #[test]
    fn leaves_that_wait_for_each_other_are_taken_in_order() {
        assert_eq!(first([&[SHARED, OTHER], &[OTHER, SHARED], &[SHARED]]), [(0, SHARED), (2, SHARED)]);
    }

    #[test]
    fn rounds_are_turns() {
        let clipped: &[Open] = &[CHECK, SHARED, OWN];
        assert_eq!(all_rounds([clipped, &[SHARED, OWN]]), [vec![(0, CHECK), (0, SHARED), (1, SHARED)], vec![(0, OWN), (1, OWN)]]);
        assert_eq!(all_rounds([&[SHARED, SUMS, OWN]]), [vec![(0, SHARED)], vec![(0, SUMS)], vec![(0, OWN)]]);
        // The first leaf's function holds up a norm that the second shares with it, but not the second's own.
        let (function, norm): (&[Open], &[Open]) = (&[SHARED, TENSOR, OTHER], &[SHARED, OWN, OTHER]);
        let rounds = [vec![(0, SHARED), (1, SHARED)], vec![(0, TENSOR), (1, OWN)], vec![(0, OTHER), (1, OTHER)]];
        assert_eq!(all_rounds([function, norm]), rounds);
        assert_eq!(all_rounds([&[CHECK, TENSOR]]), [[(0, CHECK)], [(0, TENSOR)]]);
        assert_eq!(all_rounds([&[]]), Vec::<Vec<_>>::new());
    }

    #[test]
    fn jobs_are_apart_that_share_nothing_with_others() {
        let apart = |jobs: &[&[Open]]| tickets(jobs, |jobs| are_apart(&rounds(jobs), |job| job == 0, |job| job == 2));
        assert!(apart(&[&[OWN, SHARED], &[OWN, SHARED], &[OWN, OTHER]]) && apart(&[&[SUMS]]));
        assert!(!apart(&[&[OWN, SHARED], &[], &[OWN, SHARED]]) && !apart(&[&[SUMS], &[], &[SUMS]]));
    }
}
