//! Restoring torch's state: all ranks check everything, then everything is written.

use super::TorchState;
use super::continuation::{Continuation, LeafContinuation, STEP, StateComparison, largest_step};
use super::in_file;
use crate::error::{Error, Result};
use crate::files::tensor_file::read_error;
use crate::ranks::Call;
use crate::tree::entries::{LEAF_STEPS, NewEntry};
use crate::tree::{Adjustment, Leaf, SetField, StateTree, StateValue};

impl TorchState {
    /// Takes over the state of torch's optimiser: its tensors and counts of steps.
    ///
    /// Hyper-parameters are compared, or [taken over](TorchState::taking_over_fields). The model stays as it
    /// is, and so does the state of other rules of a chain, except the counts of rules without tensors that
    /// step together with the restored rule. Tensors are converted to the dtypes of the state, and rounded
    /// once if needed.
    ///
    /// The state has to be [set up](crate::setup) with counterparts of torch's optimisers, and to have
    /// exactly the parameters of the file. Returns the paths of parameters that no step of torch's has moved.
    /// torch has no state for these parameters: they start from zeros here, as in torch.
    ///
    /// The state's count of steps becomes the largest `step` of the file, unless the program has
    /// [set](StateTree::set_steps) the count. A rate that follows a [schedule](StateTree::schedule) is
    /// compared with `lr` in this step: see [the module](crate::torch#with-a-scheduler).
    ///
    /// Over [ranks](crate::Setup::over) all ranks call this with the same file, and each takes over its
    /// parts.
    ///
    /// # Errors
    /// If the file lacks a parameter or an entry, or has one that the state lacks. If a shape, an optimiser
    /// or a hyper-parameter differs. If a number is not finite, a second moment negative or a step not a
    /// count. If the model has averages instead of its parameters, or the parameters have
    /// [no names](crate::CandleOptimizer).
    ///
    /// After an error nothing has changed, unless the file failed after all checks, when tensors were already
    /// written. Then a part of the state may have changed, and the error asks to restore the state again.
    pub fn restore(&self, state: &mut StateTree) -> Result<Vec<String>> {
        let largest = |state: &StateTree| state.leaves().map(Leaf::steps).max();
        let (before, leaf_steps) = (state.steps(), largest(state));
        // A count that is not that of the leaves was set by the program.
        let is_own_count = state.began_at.is_none() && leaf_steps.is_none_or(|steps| steps == before);
        let step_set = match largest_step(&self.content).filter(|_| is_own_count) {
            Some(steps) => state.go_to_step(steps),
            None => Ok(()),
        };
        let result = self.restore_in_step(step_set, state);
        // If a leaf has the file's count already, the state keeps that count, too. Otherwise the next restore
        // would take `before` for a count that the program has set.
        if result.is_err() && largest(state) == leaf_steps {
            // This count was valid before, so the schedules have values for it.
            let _ = state.go_to_step(before);
        }
        result
    }

    /// Restores everything but the state's count of steps. All ranks return the error if `step_set` is an
    /// error on one of them.
    fn restore_in_step(&self, step_set: Result<()>, state: &mut StateTree) -> Result<Vec<String>> {
        let plan = step_set
            .map_err(|error| self.with_file(error))
            .and_then(|()| state.check_names())
            .and_then(|()| state.check_parameters())
            .and_then(|()| {
                let content = &self.content;
                let comparison = StateComparison {
                    content,
                    takes_over: self.takes_over,
                    steps: state.steps(),
                };
                let unchanged = content.file.check_unchanged().map_err(read_error);
                unchanged
                    .and_then(|()| comparison.continuation(state))
                    .map_err(|error| self.with_file(error))
            });
        let continuation = state.world.settle(Call::Torch, plan)?;
        let adjustment = state
            .world
            .settle(Call::Torch, field_adjustment(state, &continuation))?;
        let entries = entries(state, &continuation);
        let on_non_finite = "call `TorchState::accepting_non_finite` first";
        // An error without a parameter is about ranks or their links, and not about this file.
        let with_file = |error: Error| {
            if error.path().is_some() {
                self.with_file(error)
            } else {
                error
            }
        };
        let on_non_finite = (!self.accepts_non_finite).then_some(on_non_finite);
        state.assign_entries(&entries, on_non_finite).map_err(with_file)?;
        // Fields are set after entries, because setting entries can fail, and setting fields cannot.
        adjustment.commit(state.leaves.iter_mut().map(|leaf| &mut **leaf));
        continuation
            .rate_warning
            .map(|warning| state.warnings.record(warning));
        Ok(continuation.unmoved_paths)
    }

    /// Adds the path of the file to an error.
    fn with_file(&self, error: Error) -> Error {
        in_file(&self.path, error)
    }
}

/// The fields to set, tried on copies of the optimisers. Leaves that share an optimiser and get the same
/// fields share a copy.
fn field_adjustment<'p>(state: &StateTree, continuation: &'p Continuation<'_>) -> Result<Adjustment<'p>> {
    let settings = |leaf: &'p LeafContinuation<'_>| {
        leaf.new_fields
            .iter()
            .map(|(field, value)| (SetField::Named(field), *value))
            .collect()
    };
    Adjustment::per_leaf(
        state.leaves(),
        state.steps,
        continuation.leaves.iter().map(settings),
    )
}

/// The tensors and counts of all leaves, as entries of the state.
fn entries<'c>(state: &StateTree, continuation: &'c Continuation<'_>) -> Vec<NewEntry<'c>> {
    let mut entries = Vec::new();
    for (leaf, leaf_continuation) in state.leaves().zip(&continuation.leaves) {
        let mut add = |name: &str, label: String, value| {
            entries.push(NewEntry {
                path: leaf.path().to_string(),
                name: name.to_string(),
                label,
                value,
            });
        };
        for (slot, tensor) in &leaf_continuation.tensors {
            add(&slot.slot, slot.in_file(), StateValue::Tensor(tensor));
        }
        let Some(step) = leaf_continuation.step else {
            continue;
        };
        for name in leaf_continuation
            .counters
            .iter()
            .map(String::as_str)
            .chain([LEAF_STEPS])
        {
            add(name, format!("{STEP} in the file"), StateValue::Counter(step));
        }
    }
    entries
}
