//! Leaves (parameters with their state) without a gradient in a call: an error under `require_all`, else a
//! warning.

use super::paths::Paths;
use crate::engine::Progress;
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, joined, listed};
use crate::model::cuts::{advice, is_running_statistic};
use crate::tree::{Leaf, StateTree};

/// The leaves without a gradient in a call, by index. Allocates nothing if all have one.
pub(crate) struct Missing {
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
    pub(crate) fn new(requires_all: bool) -> Self {
        Missing { leaves: Vec::new(), requires_all, refused: Vec::new(), is_odd: false }
    }

    /// Adds a leaf.
    pub(crate) fn add(&mut self, leaf: usize, progress: Progress, is_allowed: bool) {
        self.leaves.push(leaf);
        self.is_odd |= !is_allowed;
        // `Progress::Waiting` is not refused, because a later call of the window may bring the gradient.
        if self.requires_all && progress == Progress::WithoutGradient && !is_allowed {
            self.refused.push(leaf);
        }
    }

    /// Whether the state refuses the call.
    pub(crate) fn is_refused(&self) -> bool {
        !self.refused.is_empty()
    }

    /// The error of a refused call. `moved` is its clause about what has moved.
    pub(crate) fn refusal(&self, state: &StateTree, moved: &str) -> Error {
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
    pub(crate) fn warn(&self, state: &mut StateTree) -> Option<Warning> {
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
    pub(crate) fn into_paths(self, state: &StateTree) -> Paths {
        if self.leaves.is_empty() { Paths::default() } else { Paths::new(state.paths(), self.leaves) }
    }
}

/// Names of some leaves, for messages. BatchNorm's running statistics come last: nothing is wrong with them.
fn labels<'l>(leaves: impl Iterator<Item = &'l Leaf>) -> Vec<String> {
    let (statistics, others): (Vec<&Leaf>, Vec<&Leaf>) =
        leaves.partition(|leaf| is_running_statistic(leaf.path()));
    listed(others.into_iter().chain(statistics).map(Leaf::label))
}
