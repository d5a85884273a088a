//! Writing a state as torch's: first groups and counterparts, then tensors with the writer of checkpoints.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::{Map, Value, json};

use super::content::{GROUPS, PARAMETERS};
use super::continuation::{COUNT_LIMIT, STEP};
use super::counterpart::{Counterpart, TorchSlot, unrepresentable};
use super::in_file;
use crate::engine::Buffer;
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::files::checkpoint::layout::{Remarks, SavedTensor, entry_name};
use crate::files::checkpoint::save::file_warnings;
use crate::files::checkpoint::write::{FileContent, write};
use crate::numbers::elem_count;
use crate::ranks::Call;
use crate::tree::{Leaf, StateTree};

impl StateTree {
    /// Writes the state to a safetensors file as the state of torch's optimiser.
    ///
    /// The module [`torch`](crate::torch) describes the file. The file does not contain the model:
    /// [`StateTree::save_masters`] writes the parameters in their full precision.
    ///
    /// An old file is replaced as a whole, as by [`Checkpoint::save`](crate::Checkpoint::save). For numbers
    /// that are infinite or NaN a [warning](Warning::NotFinite) is returned. Over
    /// [ranks](crate::Setup::over) all ranks call this, and each writes its parts.
    ///
    /// # Errors
    /// - If a parameter's rule has no counterpart in torch, or hyper-parameters that torch cannot express.
    /// - If parameters would need different optimisers in torch, or have [no names](crate::CandleOptimizer).
    /// - If the file system fails. The old file is then still at `path`, unless only the flush of the folder
    ///   failed.
    pub fn save_torch(&self, path: impl AsRef<Path>) -> Result<Vec<Warning>> {
        let path = path.as_ref();
        let plan = self
            .check_names()
            .and_then(|()| counterparts_and_groups(self))
            .map_err(|error| in_file(path, error));
        let (counterparts, groups) = self.world.compare(Call::TorchSave, plan, |_| {
            Ok(self.leaves().map(Leaf::optimiser_aspect).collect())
        })?;
        let mut tensors = Vec::new();
        let mut leaves = self.leaves().zip(&counterparts);
        let rank = self.world.rank();
        let content = leaves
            .try_for_each(|(leaf, counterpart)| add_entries(&mut tensors, rank, leaf, counterpart))
            .and_then(|()| FileContent::new(path, tensors, Remarks::Text(GROUPS, &groups)));
        let non_finite = write(&self.world, Call::File, path, content)?;
        Ok(file_warnings(path, self.calls, non_finite))
    }
}

/// The counterpart of each leaf, and the groups of parameters with the same hyper-parameters.
fn counterparts_and_groups(state: &StateTree) -> Result<(Vec<Counterpart>, String)> {
    state.check_leaves()?;
    let counterparts = state.leaves().map(Counterpart::new).collect::<Result<Vec<_>>>()?;
    let mut groups: Vec<(Map<String, Value>, Vec<&str>)> = Vec::new();
    // The indices of groups by their text.
    let mut indices: HashMap<String, usize> = HashMap::new();
    let mut first_optimiser: Option<(&str, &'static str)> = None;
    for (leaf, counterpart) in state.leaves().zip(&counterparts) {
        let (first, kind) = *first_optimiser.get_or_insert((leaf.path(), counterpart.kind));
        if kind != counterpart.kind {
            return Err(Error::new(ErrorKind::Unsupported, "its optimiser in torch would be")
                .with_got(counterpart.kind)
                .with_expected(format_args!("{kind}, as for {first:?}"))
                .with_remedy(
                    "give all parameters rules of one kind, because the file is for a single optimiser of torch's",
                )
                .at(leaf.path()));
        }
        if counterpart.has_velocity() && counterpart.velocity_scale(counterpart.adjusted_value()) == 0.0 {
            return Err(unrepresentable(
                leaf.path(),
                "a velocity that contains a learning rate of 0: save while the rate is not 0, or put the \
                 rate into a `Descent` after the rule",
            ));
        }
        if counterpart.has_step && f64::from(step_count(leaf, counterpart) as f32) >= COUNT_LIMIT {
            return Err(unrepresentable(leaf.path(), "a count of 2⁵³ steps or more"));
        }
        let group = counterpart.group(leaf.path())?;
        let index = *indices
            .entry(serde_json::to_string(&group).map_err(Error::other)?)
            .or_insert(groups.len());
        if index == groups.len() {
            groups.push((group, Vec::new()));
        }
        groups[index].1.push(leaf.path());
    }
    let with_paths = |(mut group, paths): (Map<String, Value>, Vec<&str>)| {
        group.insert(PARAMETERS.to_string(), json!(paths));
        Value::Object(group)
    };
    Ok((
        counterparts,
        groups.into_iter().map(with_paths).collect::<Value>().to_string(),
    ))
}

/// Adds the entries of a leaf.
fn add_entries<'s>(
    tensors: &mut Vec<SavedTensor<'s>>,
    rank: usize,
    leaf: &'s Leaf,
    counterpart: &Counterpart,
) -> Result<()> {
    let state_tensors = leaf.state.tensors();
    // With a rate of 0 torch's velocity is unknown. Without a momentum the velocity may be missing, because
    // the next step does not depend on the velocity.
    let velocity_scale = counterpart.velocity_scale(counterpart.adjusted_value());
    let is_known = |slot: &&TorchSlot| !slot.is_unused || velocity_scale != 0.0;
    for slot in counterpart.slots.iter().filter(is_known) {
        let Some((_, tensor)) = state_tensors.iter().find(|(name, _)| *name == slot.slot) else {
            continue;
        };
        tensors.push(slot_tensor(leaf, counterpart, slot, tensor)?);
    }
    if counterpart.has_step {
        // The count is written by the rank that has the first element, because a rank without a part does not
        // count steps.
        let part = leaf.part();
        let is_written = if elem_count(leaf.shape()) == 0 {
            rank == 0
        } else {
            part.start == 0 && !part.is_empty()
        };
        let number = count_tensor(step_count(leaf, counterpart))?;
        tensors.push(SavedTensor::number(
            entry_name(leaf.path(), STEP),
            number,
            is_written,
        ));
    }
    Ok(())
}

/// A state tensor as torch has it.
fn slot_tensor<'s>(
    leaf: &'s Leaf,
    counterpart: &Counterpart,
    slot: &TorchSlot,
    tensor: &'s Buffer,
) -> Result<SavedTensor<'s>> {
    match slot.velocity_sign {
        None if tensor.records().is_none() => {
            Ok(SavedTensor::state(leaf, slot.key, tensor, leaf.shape().to_vec()))
        }
        // A velocity is divided by its factor of rates, and codes of 8 bits are decoded, because torch's
        // tensors have neither factor nor codes.
        sign => {
            let velocity_scale = counterpart.velocity_scale(counterpart.adjusted_value());
            let scale = sign.map_or(1.0, |sign| sign * velocity_scale);
            let state_values = tensor.tensor()?;
            let on_cpu = state_values.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
            let values = (on_cpu / scale)?.to_dtype(state_values.dtype())?;
            Ok(SavedTensor::part_of(
                leaf,
                entry_name(leaf.path(), slot.key),
                values,
            ))
        }
    }
}

/// torch's `step` of a leaf.
fn step_count(leaf: &Leaf, counterpart: &Counterpart) -> u64 {
    let counter = counterpart.counters.first();
    leaf.counters()
        .into_iter()
        .find(|(name, _)| Some(name) == counter)
        .map_or(0, |(_, count)| count)
}

/// A count of steps in f32, as torch has it. torch itself counts no further than 2²⁴.
fn count_tensor(count: u64) -> Result<Tensor> {
    Ok(Tensor::from_vec(vec![count as f32], (), &Device::Cpu)?)
}
