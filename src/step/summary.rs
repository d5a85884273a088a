//! The plans of all leaves together: whether the call is refused, which leaves (parameters with their state)
//! have no gradient, and the outcome.
//!
//! The order in [`StepSummary::committed_outcome`] matters. Windows (the calls that an `AccumGrad` collects)
//! and steps are counted first, because code of the program runs afterwards and may panic: rules, owners of
//! memory, a logger. Leaves get the rates of the next step last, because the outcome and its warnings are
//! about this step.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::call::UpdateCall;
use super::leaf::LeafPlan;
use super::outcome::{LeafFigures, Outcome, Paths, SkipReason, Status};
use crate::engine::{Progress, Windows};
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result, comma_separated, first_names};
use crate::model::cuts::{advice, is_running_statistic};
use crate::model::lent::Lent;
use crate::numbers::counts;
use crate::rule::LeafNorms;
use crate::tree::{Leaf, LimitedNorms, StateTree};

/// The plans of all leaves together, and the norms of groups once they are computed.
pub(super) struct StepSummary {
    /// The leaves that move, in order.
    pub(super) moved_leaves: Vec<usize>,
    accumulated: usize,
    frozen: usize,
    missing: Missing,
    /// Whether a call without any gradient is accepted.
    allows_no_gradients: bool,
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
    pub(super) fn new<'p>(call: &UpdateCall, plans: impl IntoIterator<Item = &'p LeafPlan>) -> Self {
        let plans = plans.into_iter();
        let mut summary = StepSummary {
            moved_leaves: Vec::with_capacity(plans.size_hint().0),
            accumulated: 0,
            frozen: 0,
            missing: Missing::new(call.requires_all),
            allows_no_gradients: call.options.allow_no_gradients,
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
            summary.has_gradient |= plan.has_gradient;
            summary.moves |= plan.moves;
            summary.windows.open |= plan.windows.open;
            summary.windows.released |= plan.windows.released;
            summary.given_up.extend(plan.gives_up_window.then_some(leaf));
            summary
                .norms
                .extend(plan.norms.clone().map(|norms| (leaf, norms)));
            match plan.progress {
                None => summary.frozen += 1,
                Some(Progress::Applied) => summary.moved_leaves.push(leaf),
                Some(Progress::Accumulated) => summary.accumulated += 1,
                Some(progress) => summary.missing.add(leaf, progress, plan.allows_missing),
            }
        }
        summary
    }

    /// Whether any leaf moves or collects.
    pub(super) fn moves_or_collects(&self) -> bool {
        self.moved_leaves.len() + self.accumulated > 0
    }

    /// Whether no leaf has a gradient, and the call does not allow such a case.
    fn lacks_gradients(&self) -> bool {
        !self.allows_no_gradients && !self.has_gradient
    }

    /// Whether required gradients are missing.
    pub(super) fn is_refused(&self) -> bool {
        self.lacks_gradients()
            || self.missing.is_refused() && (self.moves_or_collects() || !self.allows_no_gradients)
    }

    /// The error of a refused call, which says whether anything has moved.
    pub(super) fn refusal(&self, state: &StateTree) -> Error {
        if !self.lacks_gradients() {
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
    pub(super) fn committed_outcome(self, state: &mut StateTree, parameters: &[Lent<'_>]) -> Result<Outcome> {
        let has_stepped = !self.moved_leaves.is_empty();
        state.calls = if self.windows.open {
            counts::add(state.calls, 1)
        } else {
            0
        };
        if has_stepped {
            // A call that only collects is not counted, because averages count steps.
            state.count_missed_steps(&self.moved_leaves);
            state.steps = counts::add(state.steps, 1);
            state.skipped = 0;
        }
        // A panic is held back until leaves have the rates of the next step.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.counted_outcome(state, parameters)));
        // This step is counted, so an error of the rates is left to the next update, which makes the rates
        // again.
        let _ = state.go_to_step(state.steps);
        outcome.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// The outcome of a call that was counted, with its warnings.
    fn counted_outcome(self, state: &mut StateTree, parameters: &[Lent<'_>]) -> Result<Outcome> {
        let has_stepped = !self.moved_leaves.is_empty();
        let mut given_up_warnings = Vec::new();
        for &leaf in &self.given_up {
            let leaf = &mut state.leaves[leaf];
            leaf.end_window().map_err(|error| error.at(&leaf.path))?;
            given_up_warnings.push(Warning::WindowsGivenUp {
                path: leaf.path.clone(),
            });
        }
        let status = if has_stepped {
            Status::Stepped
        } else {
            Status::Accumulated
        };
        // A call without any gradient comes here only if such calls are allowed, so there is nothing to warn
        // of.
        let missing_warning = if self.has_gradient {
            self.missing.warn(state)
        } else {
            None
        };
        let warnings = missing_warning.into_iter().chain(state.warn_of_leaves());
        let mut warnings: Vec<Warning> = warnings.collect();
        if has_stepped {
            self.moved_leaves
                .iter()
                .for_each(|&leaf| state.leaves[leaf].keep_checksum(&*parameters[leaf]));
            warnings.extend(state.warn_of_numbers(parameters));
            warnings.extend(state.warn_of_rate_of_zero());
        }
        warnings.extend(
            given_up_warnings
                .into_iter()
                .filter_map(|warning| state.warnings.record(warning)),
        );
        let figures = |(leaf, norms): &(usize, LeafNorms)| LeafFigures::new(&state.leaves[*leaf], norms);
        let figures = self.norms.iter().filter_map(figures).collect();
        Ok(Outcome {
            warnings,
            figures,
            ..self.outcome(state, status)
        })
    }

    /// The outcome of a call with this status.
    pub(super) fn outcome(self, state: &StateTree, status: Status) -> Outcome {
        let (applied, accumulated) = match status {
            Status::Skipped(SkipReason::NothingToMove) | Status::Stepped | Status::Accumulated => {
                (self.moved_leaves.len(), self.accumulated)
            }
            Status::Skipped(_) => (0, 0),
        };
        let first_moved = self.moved_leaves.first().map(|&leaf| &state.leaves[leaf]);
        Outcome {
            applied,
            accumulated,
            open_calls: state.calls,
            frozen: self.frozen,
            without_gradient: self.missing.into_paths(state),
            learning_rate: first_moved
                .filter(|_| status == Status::Stepped)
                .and_then(|leaf| leaf.learning_rate()),
            global_norm: self.group_norms.first().map(|(_, norm)| *norm),
            group_norms: self.group_norms,
            status,
            ..Outcome::default()
        }
    }
}

/// The leaves without a gradient in a call, by index. Allocates nothing if all leaves have a gradient.
struct Missing {
    leaves: Vec<usize>,
    /// Whether the state requires all gradients.
    requires_all: bool,
    /// The leaves that need a gradient and would miss a step.
    refused: Vec<usize>,
    /// Whether any of `leaves` needs a gradient.
    has_required: bool,
}

impl Missing {
    /// An empty list.
    fn new(requires_all: bool) -> Self {
        Missing {
            leaves: Vec::new(),
            requires_all,
            refused: Vec::new(),
            has_required: false,
        }
    }

    /// Adds a leaf.
    fn add(&mut self, leaf: usize, progress: Progress, is_allowed: bool) {
        self.leaves.push(leaf);
        self.has_required |= !is_allowed;
        // `Progress::Waiting` is not refused, because a later call of the window may bring the gradient.
        if self.requires_all && progress == Progress::WithoutGradient && !is_allowed {
            self.refused.push(leaf);
        }
    }

    /// Whether the state refuses the call.
    fn is_refused(&self) -> bool {
        !self.refused.is_empty()
    }

    /// The error of a refused call. `moved` is the clause of the remedy about what has moved.
    fn refusal(&self, state: &StateTree, moved: &str) -> Error {
        let paths = labels(self.refused.iter().map(|&leaf| &*state.leaves[leaf]));
        let (missing, leaves) = (self.refused.len(), state.len());
        Error::new(
            ErrorKind::NoGradient,
            format!("{missing} of {leaves} parameters have no gradient, and the state requires all:"),
        )
        .with_got(comma_separated(&paths))
        .with_remedy(format!(
            "freeze parameters that need no gradient, leave them out with `setup_with`, or declare them with \
             `Selection::allow_missing`; {moved}. {}",
            advice(&paths)
        ))
    }

    /// Warns, once in the life of a state, of parameters that are not trained.
    fn warn(&self, state: &mut StateTree) -> Option<Warning> {
        if !self.has_required
            || !state
                .warnings
                .would_record(|warning| matches!(warning, Warning::WithoutGradient { .. }))
        {
            return None;
        }
        let required = || {
            self.leaves
                .iter()
                .map(|&leaf| &*state.leaves[leaf])
                .filter(|leaf| !leaf.missing_gradients.is_allowed)
        };
        let paths = labels(required());
        let (missing, parameters, remedy) = (required().count(), state.len(), advice(&paths));
        state.warnings.record(Warning::WithoutGradient {
            missing,
            parameters,
            paths,
            remedy,
        })
    }

    /// The paths of the leaves.
    fn into_paths(self, state: &StateTree) -> Paths {
        if self.leaves.is_empty() {
            Paths::default()
        } else {
            Paths::new(state.paths(), self.leaves)
        }
    }
}

/// Names of some leaves, for messages. BatchNorm's running statistics come last, because they never get a
/// gradient.
fn labels<'l>(leaves: impl Iterator<Item = &'l Leaf>) -> Vec<String> {
    let (statistics, others): (Vec<&Leaf>, Vec<&Leaf>) =
        leaves.partition(|leaf| is_running_statistic(leaf.path()));
    first_names(others.into_iter().chain(statistics).map(Leaf::label))
}
