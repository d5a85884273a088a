//! Writing a state as torch's: groups and counterparts first, then tensors with the writer of checkpoints.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::{Map, Value, json};

use super::content::{GROUPS, PARAMETERS};
use super::continuation::{STEP, TOO_MANY};
use super::counterpart::{Counterpart, TorchSlot, unrepresentable};
use super::in_file;
use crate::engine::Buffer;
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::files::checkpoint::layout::{Remarks, SavedTensor, entry_name};
use crate::files::checkpoint::save::warned;
use crate::files::checkpoint::write::{FileContent, write};
use crate::numbers::elem_count;
use crate::ranks::{Agreement, Aspect, Call};
use crate::tree::{Leaf, StateTree};

impl StateTree {
    /// Writes the state to a safetensors file as the state of torch's optimiser.
    ///
    /// The module [`torch`](crate::torch) describes the file. The file does not contain the model:
    /// [`StateTree::save_masters`] writes the parameters in their full precision.
    ///
    /// An old file is replaced as a whole, as by [`Checkpoint::save`](crate::Checkpoint::save). For numbers
    /// that are infinite or NaN the same [warning](Warning::NotFinite) is returned. Over
    /// [ranks](crate::Setup::over) all ranks call this, and each writes its parts.
    ///
    /// # Errors
    /// - If a parameter's rule has no counterpart in torch, or hyper-parameters that torch cannot express.
    /// - If parameters would need different optimisers in torch, or have [no names](crate::CandleOptimizer).
    /// - If the file system fails. The old file is still at `path` then.
    pub fn save_torch(&self, path: impl AsRef<Path>) -> Result<Vec<Warning>> {
        let path = path.as_ref();
        let own = self.check_names().and_then(|()| described(self)).map_err(|error| in_file(path, error));
        let own = own.map(|described| (described, Agreement::on(optimisers(self)), Vec::new()));
        let ((counterparts, groups), _) = self.agree_on(Call::TorchSave, own)?;
        let mut tensors = Vec::new();
        for (leaf, own) in self.leaves().zip(&counterparts) {
            extend(&mut tensors, self.rank(), leaf, own)?;
        }
        Ok(warned(
            path,
            self.calls,
            write(
                self.world.as_ref(),
                path,
                FileContent::new(path, tensors, Remarks::Text(GROUPS, &groups)),
            )?,
        ))
    }
}

/// The optimiser of each leaf, which has to be the same on all ranks.
fn optimisers(state: &StateTree) -> Vec<Aspect> {
    if state.is_divided() { state.leaves().map(Leaf::optimiser_aspect).collect() } else { Vec::new() }
}

/// The counterpart of each leaf, and the groups of parameters with the same hyper-parameters.
fn described(state: &StateTree) -> Result<(Vec<Counterpart>, String)> {
    state.check_leaves()?;
    let counterparts = state.leaves().map(Counterpart::of).collect::<Result<Vec<_>>>()?;
    let mut groups: Vec<(Map<String, Value>, Vec<&str>)> = Vec::new();
    // Their indices by their text.
    let mut known: HashMap<String, usize> = HashMap::new();
    let mut first: Option<(&str, &'static str)> = None;
    for (leaf, own) in state.leaves().zip(&counterparts) {
        let (first, kind) = *first.get_or_insert((leaf.path(), own.kind));
        if kind != own.kind {
            return Err(Error::new(ErrorKind::Unsupported, "its optimiser in torch would be")
                .with_got(own.kind)
                .with_expected(format_args!("{kind}, as for {first:?}"))
                .with_remedy(
                    "give all parameters rules of one kind, because the file is for a single optimiser of torch's",
                )
                .at(leaf.path()));
        }
        if own.has_velocity() && own.velocity_scale(own.own_rate()) == 0.0 {
            return Err(unrepresentable(
                leaf.path(),
                "a velocity that contains a learning rate of 0: save while the rate is not 0, or put the \
                 rate into a `Descent` after the rule",
            ));
        }
        if own.has_step && f64::from(step(leaf, own) as f32) >= TOO_MANY {
            return Err(unrepresentable(leaf.path(), "a count of 2⁵³ steps or more"));
        }
        let group = own.group(leaf.path())?;
        let place =
            *known.entry(serde_json::to_string(&group).map_err(Error::other)?).or_insert(groups.len());
        if place == groups.len() {
            groups.push((group, Vec::new()));
        }
        groups[place].1.push(leaf.path());
    }
    let with_paths = |(mut group, paths): (Map<String, Value>, Vec<&str>)| {
        group.insert(PARAMETERS.to_string(), json!(paths));
        Value::Object(group)
    };
    Ok((counterparts, groups.into_iter().map(with_paths).collect::<Value>().to_string()))
}

/// Adds the entries of a leaf.
fn extend<'s>(
    tensors: &mut Vec<SavedTensor<'s>>,
    rank: usize,
    leaf: &'s Leaf,
    own: &Counterpart,
) -> Result<()> {
    let known = leaf.state.tensors();
    // By a rate of 0 torch's velocity is unknown, and without a momentum the next step does not depend on it.
    let is_known = |slot: &&TorchSlot| !slot.is_unused || own.velocity_scale(own.own_rate()) != 0.0;
    for slot in own.slots.iter().filter(is_known) {
        let Some((_, tensor)) = known.iter().find(|(name, _)| *name == slot.slot) else { continue };
        tensors.push(saved(leaf, own, slot, tensor)?);
    }
    if own.has_step {
        // Written by the rank that has the first element, because a rank without a part has no count of the
        // steps.
        let part = leaf.part();
        let is_written =
            if elem_count(leaf.shape()) == 0 { rank == 0 } else { part.start == 0 && !part.is_empty() };
        let number = number(step(leaf, own))?;
        tensors.push(SavedTensor::number(entry_name(leaf.path(), STEP), number, is_written));
    }
    Ok(())
}

fn saved<'s>(
    leaf: &'s Leaf,
    own: &Counterpart,
    slot: &TorchSlot,
    tensor: &'s Buffer,
) -> Result<SavedTensor<'s>> {
    match slot.velocity {
        None if tensor.records().is_none() => {
            Ok(SavedTensor::state(leaf, slot.key, tensor, leaf.shape().to_vec()))
        }
        // A velocity is divided by its factor, and codes of 8 bits are decoded, because torch has neither.
        sign => {
            let (values, scale) =
                (tensor.tensor()?, sign.map_or(1.0, |sign| sign * own.velocity_scale(own.own_rate())));
            let dtype = values.dtype();
            let values = (values.to_device(&Device::Cpu)?.to_dtype(DType::F64)? / scale)?.to_dtype(dtype)?;
            Ok(SavedTensor::part_of(leaf, entry_name(leaf.path(), slot.key), values))
        }
    }
}

/// torch's `step` of a leaf.
fn step(leaf: &Leaf, own: &Counterpart) -> u64 {
    let counter = own.counters.first();
    leaf.counters().into_iter().find(|(name, _)| Some(name) == counter).map_or(0, |(_, count)| count)
}

/// A count of steps in f32, as torch has it. torch itself counts no further than 2²⁴.
fn number(step: u64) -> Result<Tensor> {
    Ok(Tensor::from_vec(vec![step as f32], (), &Device::Cpu)?)
}
