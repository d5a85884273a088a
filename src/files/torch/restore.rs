//! Restoring torch's state: all ranks check everything, then everything is written.

use candle_core::{DType, Device, Tensor};

use super::TorchState;
use super::container::Container;
use super::content::StoredTensor;
use super::continuation::{Check, Continuation, LeafContinuation, failed, read_error};
use super::in_file;
use super::settings::WantedFields;
use crate::error::{Error, Result};
use crate::numbers::elem_count;
use crate::ranks::Call;
use crate::rule::StateParts;
use crate::tree::{Adjustment, Leaf, SetField, StateTree};

impl TorchState {
    /// Takes over the state of torch's optimiser: its tensors and counts of steps.
    ///
    /// Hyper-parameters are compared, or [taken over](TorchState::taking_over_fields) too. The model stays as
    /// it is, and so does the state of other rules of a chain.
    ///
    /// The state has to be [set up](crate::setup) with counterparts of torch's optimisers, and to have
    /// exactly the parameters of the file. Returns the paths of parameters of which torch has no state,
    /// because no step has moved them: they start from zeros here, as they would there.
    ///
    /// A rate that follows a [schedule](StateTree::schedule) is compared with `lr` in the step that the state
    /// counts. Under a relative one the own rate is compared with the `initial_lr` of torch's scheduler: see
    /// [the module](crate::torch#with-a-scheduler).
    ///
    /// Tensors are converted to the dtypes of the state, and rounded once if needed.
    ///
    /// Over [ranks](crate::Setup::over) all call this with the same file, and each takes over its parts.
    ///
    /// # Errors
    /// If the file lacks a parameter or an entry, or has one too many; if a shape, an optimiser or a
    /// hyper-parameter differs; if a number is not finite, a second moment negative or a step not a count; if
    /// the model has averages in place of its parameters, or these have [no names](crate::CandleOptimizer).
    /// Nothing changes then, unless the file fails in the very moment in which it is taken over: the error
    /// then says that the state has to be restored again.
    pub fn restore(&self, state: &mut StateTree) -> Result<Vec<String>> {
        let planned = state.check_names().and_then(|()| state.check_parameters()).and_then(|()| {
            let check = Check {
                content: &self.content,
                container: &self.container,
                takes_over: self.takes_over,
                accepts_non_finite: self.accepts_non_finite,
                steps: state.steps(),
            };
            let continuation = check.continuation(state).map_err(|error| self.refused(error))?;
            self.container.check_unchanged().map_err(|source| self.refused(read_error(source)))?;
            Ok(continuation)
        });
        let continuation = state.settle(Call::Torch, planned)?;
        let adjusted = state.settle(Call::Torch, adjustment(state, &continuation))?;
        let mut leaves = state.leaves.iter_mut().zip(&continuation.leaves);
        let written = leaves.try_for_each(|(leaf, takes)| self.write(leaf, takes));
        if written.is_ok() {
            adjusted.commit(&mut state.leaves, state.steps);
        }
        state.settle(Call::Restored, written)?;
        state.warnings.look_again();
        continuation.undriven.map(|warning| state.warnings.meet(warning));
        Ok(continuation.unmoved)
    }

    fn write(&self, leaf: &mut Leaf, takes: &LeafContinuation<'_>) -> Result<()> {
        let tensor_names = leaf.tensor_names();
        let counter_names: Vec<String> = leaf.counters().into_iter().map(|(name, _)| name).collect();
        let (part, whole) = (leaf.part(), elem_count(leaf.shape()));
        let StateParts { mut tensors, counters, .. } = leaf.state.parts_mut();
        for (slot, source) in &takes.tensors {
            let Some(tensor) =
                tensor_names.iter().position(|name| name == slot).and_then(|i| tensors.get_mut(i))
            else {
                continue;
            };
            let values = match source {
                Some((stored, scale)) => values(&self.container, stored, *scale).map_err(|source| {
                    let remedy =
                        "a part of it has been taken over: restore from a whole file before going on";
                    self.refused(failed("cannot take over the whole file", source).with_remedy(remedy))
                })?,
                None => Tensor::zeros(whole, DType::F32, &Device::Cpu)?,
            };
            tensor.set(&values.flatten_all()?.narrow(0, part.start, part.len())?)?;
        }
        if let Some(step) = takes.step {
            let counters = counter_names.iter().zip(counters).filter(|(name, _)| **name == takes.counter);
            counters.for_each(|(_, counter)| *counter = step);
            leaf.steps = step;
        }
        leaf.unsettle();
        Ok(())
    }

    pub(super) fn refused(&self, error: Error) -> Error {
        in_file(&self.path, error)
    }
}

/// The fields to set, tried on copies. Leaves that shared an optimiser and get the same fields still share
/// one.
fn adjustment<'p>(state: &StateTree, continuation: &'p Continuation<'_>) -> Result<Adjustment<'p>> {
    let wanted =
        continuation.leaves.iter().map(|takes| Some(&takes.wanted).filter(|wanted| !wanted.is_empty()));
    Adjustment::by_key(state.leaves.iter(), wanted, |wanted: &&'p WantedFields| {
        wanted.iter().map(|(field, value)| (SetField::Named(field), *value)).collect()
    })
}

/// The numbers of a tensor, times `scale`; without a factor in their own dtype.
fn values(container: &Container, stored: &StoredTensor, scale: f64) -> std::io::Result<Tensor> {
    let tensor = container.tensor(stored)?;
    if scale == 1.0 {
        return Ok(tensor);
    }
    tensor.to_dtype(DType::F64).and_then(|tensor| tensor * scale).map_err(std::io::Error::other)
}
