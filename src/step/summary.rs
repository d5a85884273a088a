//! The plans of all leaves together: whether the call is refused, which leaves (parameters with their state)
//! have no gradient, and the outcome.
//!
//! The order in [`StepSummary::committed`] matters. Windows (the calls that an `AccumGrad` collects) and
//! steps are counted first, because code of the program runs afterwards and may panic: rules, owners of
//! memory, a logger. Leaves get the rates of the next step last, because the outcome and its warnings are
//! about this one.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::call::UpdateCall;
use super::leaf::LeafPlan;
use super::outcome::{LeafFigures, Outcome, Paths, SkipReason, Status};
use crate::engine::{Progress, Windows};
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result, joined, listed};
use crate::model::cuts::{advice, is_running_statistic};
use crate::model::lent::Lent;
use crate::numbers::counts;
use crate::rule::LeafNorms;
use crate::tree::{Leaf, LimitedNorms, StateTree};

/// The plans of all leaves together, and the norms of groups once they are computed.
pub(super) struct StepSummary {
    /// The leaves that move, in order.
    pub(super) moved: Vec<usize>,
    accumulated: usize,
    frozen: usize,
    missing: Missing,
    /// Whether a call without any gradient is accepted.
    allows_none: bool,
    is_streamed: bool,
    pub(super) has_gradient: bool,
    /// Whether anything changes, state and counters included.
    pub(super) moves: bool,
    pub(super) windows: Windows,
    /// Leaves whose windows are given up.
    given_up: Vec<usize>,
    /// The norms for `Update::with_figures`, each with its leaf.
    norms: Vec<(usize, LeafNorms)>,
    /// The norms of all groups, in their order.
    pub(super) group_norms: Vec<(u64, f64)>,
    /// The norms that histories of norms limit.
    pub(super) limited: LimitedNorms,
}

impl StepSummary {
    /// A summary of these plans.
    pub(super) fn of<'p>(call: &UpdateCall, plans: impl IntoIterator<Item = &'p LeafPlan>) -> Self {
        let plans = plans.into_iter();
        let mut all = StepSummary {
            moved: Vec::with_capacity(plans.size_hint().0),
            accumulated: 0,
            frozen: 0,
            missing: Missing::new(call.requires_all),
            allows_none: call.options.allow_no_gradients,
            is_streamed: call.is_streamed,
            has_gradient: false,
            moves: false,
            windows: Windows::default(),
            given_up: Vec::new(),
            norms: Vec::new(),
            group_norms: Vec::new(),
            limited: LimitedNorms::new(),
        };
        for (leaf, plan) in plans.enumerate() {
            all.has_gradient |= plan.has_gradient;
            all.moves |= plan.moves;
            all.windows.open |= plan.windows.open;
            all.windows.released |= plan.windows.released;
            all.given_up.extend(plan.gives_up_window.then_some(leaf));
            all.norms.extend(plan.norms.clone().map(|norms| (leaf, norms)));
            match plan.progress {
                None => all.frozen += 1,
                Some(Progress::Applied) => all.moved.push(leaf),
                Some(Progress::Accumulated) => all.accumulated += 1,
                Some(progress) => all.missing.add(leaf, progress, plan.allows_missing),
            }
        }
        all
    }

    /// Whether any leaf moves or collects.
    pub(super) fn collects(&self) -> bool {
        self.moved.len() + self.accumulated > 0
    }

    /// Whether no leaf has a gradient, and the call does not allow that.
    fn lacks_any(&self) -> bool {
        !self.allows_none && !self.has_gradient
    }

    /// Whether required gradients are missing.
    pub(super) fn is_refused(&self) -> bool {
        self.lacks_any() || self.missing.is_refused() && (self.collects() || !self.allows_none)
    }

    /// The error of a refused call, with whether anything has moved.
    pub(super) fn refusal(&self, state: &StateTree) -> Error {
        if !self.lacks_any() {
            let moved = if self.is_streamed {
                "the parameters whose gradients were pushed have moved"
            } else {
                "nothing was changed"
            };
            return self.missing.refusal(state, moved);
        }
        let problem = format!("there is no gradient for any of the {} parameters", state.len());
        Error::new(ErrorKind::NoGradient, problem)
            .with_remedy("find out by `audit` whether the loss depends on this model's variables")
    }

    /// Counts a committed call in windows and steps, and makes its outcome.
    pub(super) fn committed(self, state: &mut StateTree, parameters: &[Lent<'_>]) -> Result<Outcome> {
        let has_stepped = !self.moved.is_empty();
        state.calls = if self.windows.open { counts::after(state.calls, 1) } else { 0 };
        if has_stepped {
            // Not in a call that only collects, because averages count steps.
            state.count_missed(&self.moved);
            state.steps = counts::after(state.steps, 1);
            state.skipped = 0;
        }
        // A panic is held back until leaves have the rates of the next step.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.observed(state, parameters)));
        // The step is counted, so an error here is that of the next update, which makes the rates once more.
        let _ = state.act(state.steps);
        outcome.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// The outcome of a call that was counted, with its warnings.
    fn observed(self, state: &mut StateTree, parameters: &[Lent<'_>]) -> Result<Outcome> {
        let has_stepped = !self.moved.is_empty();
        let mut given_up = Vec::new();
        for &leaf in &self.given_up {
            let leaf = &mut state.leaves[leaf];
            leaf.end_window().map_err(|error| error.at(&leaf.path))?;
            given_up.push(Warning::WindowsGivenUp { path: leaf.path.clone() });
        }
        let status = if has_stepped { Status::Stepped } else { Status::Accumulated };
        // A call without any gradient comes here only if that is allowed, so there is nothing to warn of.
        let missing = if self.has_gradient { self.missing.warn(state) } else { None };
        let warnings = missing.into_iter().chain(state.warn_of_shown());
        let mut warnings: Vec<Warning> = warnings.collect();
        if has_stepped {
            self.moved.iter().for_each(|&leaf| state.leaves[leaf].remember(&*parameters[leaf]));
            warnings.extend(state.warn_of_numbers(parameters));
            warnings.extend(state.warn_of_rate_of_zero());
        }
        warnings.extend(given_up.into_iter().filter_map(|warning| state.warnings.meet(warning)));
        let figures = |(leaf, norms): &(usize, LeafNorms)| LeafFigures::found(&state.leaves[*leaf], norms);
        let figures = self.norms.iter().filter_map(figures).collect();
        Ok(Outcome { warnings, figures, ..self.outcome(state, status) })
    }

    /// The outcome of a call with this status.
    pub(super) fn outcome(self, state: &StateTree, status: Status) -> Outcome {
        let counts = match status {
            Status::Skipped(SkipReason::NothingToMove) | Status::Stepped | Status::Accumulated => {
                (self.moved.len(), self.accumulated)
            }
            Status::Skipped(_) => (0, 0),
        };
        let first = self.moved.first().map(|&leaf| &state.leaves[leaf]);
        Outcome {
            applied: counts.0,
            accumulated: counts.1,
            open_calls: state.calls,
            frozen: self.frozen,
            without_gradient: self.missing.into_paths(state),
            learning_rate: first.filter(|_| status == Status::Stepped).and_then(|leaf| leaf.learning_rate()),
            global_norm: self.group_norms.first().map(|(_, norm)| *norm),
            group_norms: self.group_norms,
            status,
            ..Outcome::default()
        }
    }
}

/// The leaves without a gradient in a call, by index. Allocates nothing if all have one.
struct Missing {
    leaves: Vec<usize>,
    /// Whether the state requires all gradients.
    requires_all: bool,
    /// The leaves that need a gradient and would miss a step.
    refused: Vec<usize>,
    /// Whether any of `leaves` needs a gradient.
    is_odd: bool,
}

impl Missing {
    /// An empty list.
    fn new(requires_all: bool) -> Self {
        Missing { leaves: Vec::new(), requires_all, refused: Vec::new(), is_odd: false }
    }

    /// Adds a leaf.
    fn add(&mut self, leaf: usize, progress: Progress, is_allowed: bool) {
        self.leaves.push(leaf);
        self.is_odd |= !is_allowed;
        // `Progress::Waiting` is not refused, because a later call of the window may bring the gradient.
        if self.requires_all && progress == Progress::WithoutGradient && !is_allowed {
            self.refused.push(leaf);
        }
    }

    /// Whether the state refuses the call.
    fn is_refused(&self) -> bool {
        !self.refused.is_empty()
    }

    /// The error of a refused call. `moved` is its clause about what has moved.
    fn refusal(&self, state: &StateTree, moved: &str) -> Error {
        let paths = labels(self.refused.iter().map(|&leaf| &*state.leaves[leaf]));
        let (missing, leaves) = (self.refused.len(), state.len());
        Error::new(
            ErrorKind::NoGradient,
            format!("{missing} of {leaves} parameters have no gradient, and the state requires all:"),
        )
        .with_got(joined(&paths))
        .with_remedy(format!(
            "freeze parameters that need no gradient, leave them out with `setup_with`, or declare them with \
             `Selection::allow_missing`; {moved}. {}",
            advice(&paths)
        ))
    }

    /// Warns, once in the life of a state, of parameters that are not trained.
    fn warn(&self, state: &mut StateTree) -> Option<Warning> {
        if !self.is_odd || !state.warnings.would_meet(|met| matches!(met, Warning::WithoutGradient { .. })) {
            return None;
        }
        let odd =
            || self.leaves.iter().map(|&leaf| &*state.leaves[leaf]).filter(|leaf| !leaf.waiting.is_allowed);
        let paths = labels(odd());
        let (missing, parameters, remedy) = (odd().count(), state.len(), advice(&paths));
        state.warnings.meet(Warning::WithoutGradient { missing, parameters, paths, remedy })
    }

    /// The paths of the leaves.
    fn into_paths(self, state: &StateTree) -> Paths {
        if self.leaves.is_empty() { Paths::default() } else { Paths::new(state.paths(), self.leaves) }
    }
}

/// Names of some leaves, for messages. BatchNorm's running statistics come last: nothing is wrong with them.
fn labels<'l>(leaves: impl Iterator<Item = &'l Leaf>) -> Vec<String> {
    let (statistics, others): (Vec<&Leaf>, Vec<&Leaf>) =
        leaves.partition(|leaf| is_running_statistic(leaf.path()));
    listed(others.into_iter().chain(statistics).map(Leaf::label))
}
