//! What a state takes over from torch: everything is checked, and nothing written.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Shape};

use super::container::Container;
use super::content::{Content, StateEntry, StoredTensor, TorchParameter, TorchResult};
use super::counterpart::{Counterpart, TorchSlot};
use super::settings::{GroupComparison, WantedFields};
use crate::error::{TorchError, listed};
use crate::numbers::is_supported;
use crate::rule::StateTensor;
use crate::tree::{Leaf, StateTree};

/// The entry that counts steps.
pub(super) const STEP: &str = "step";

/// Counts of steps that nobody makes, and that f64 holds exactly.
const TOO_MANY: f64 = 9_007_199_254_740_992.0;

/// What the leaves take over, in their order.
pub(super) struct TorchPlan<'c> {
    pub(super) leaves: Vec<LeafTakes<'c>>,
    /// The parameters that have no state yet in torch.
    pub(super) unmoved: Vec<String>,
}

/// What a leaf takes over.
pub(super) struct LeafTakes<'c> {
    /// Where its state tensors get their values from, each with what these are multiplied by. None are zeros.
    pub(super) tensors: Vec<(String, Option<(&'c StoredTensor, f64)>)>,
    pub(super) counter: String,
    pub(super) step: Option<u64>,
    /// Whether torch has no state of it yet.
    is_unmoved: bool,
    pub(super) wanted: WantedFields,
    /// The place of the learning rate's field.
    pub(super) rate: Option<String>,
    /// The base and the factor of a schedule that has driven it.
    pub(super) drive: Option<(f64, f64)>,
}

/// A file against a state.
pub(super) struct Check<'c> {
    pub(super) content: &'c Content,
    pub(super) container: &'c Container,
    pub(super) takes_over: bool,
    pub(super) accepts_non_finite: bool,
}

impl<'c> Check<'c> {
    pub(super) fn plan(&self, state: &StateTree) -> TorchResult<TorchPlan<'c>> {
        let names = self.content.expect_names()?;
        let mut of_leaf: HashMap<&str, &'c TorchParameter> = HashMap::new();
        for (name, parameter) in names.iter().zip(&self.content.parameters) {
            let leaf = state.leaf(name);
            let leaf = leaf.ok_or_else(|| TorchError::UnknownParameter { name: name.clone(), available: state.listed() })?;
            if of_leaf.insert(leaf.path(), parameter).is_some() {
                return Err(TorchError::Twice { path: leaf.path().to_string() });
            }
        }
        let mut plan = TorchPlan { leaves: Vec::with_capacity(state.len()), unmoved: Vec::new() };
        for leaf in state.leaves() {
            let missing = || {
                let available = listed(names.iter().map(String::as_str));
                TorchError::MissingParameter { path: leaf.path().to_string(), available }
            };
            let parameter = *of_leaf.get(leaf.path()).ok_or_else(missing)?;
            let takes = self.leaf(leaf, parameter)?;
            plan.unmoved.extend(takes.is_unmoved.then(|| leaf.path().to_string()));
            plan.leaves.push(takes);
        }
        Ok(plan)
    }

    fn leaf(&self, leaf: &Leaf, parameter: &'c TorchParameter) -> TorchResult<LeafTakes<'c>> {
        let own = Counterpart::of(leaf)?;
        let (path, entries) = (leaf.path(), &parameter.entries);
        let group = self.content.groups.get(parameter.group);
        let group = group.ok_or_else(|| TorchError::Format { reason: format!("parameter {path:?} is in no group") })?;
        let comparison = GroupComparison { path, rule: leaf.optimiser().name(), group, own: &own, takes_over: self.takes_over };
        let (wanted, rate) = comparison.check()?;
        let drive = comparison.drive()?;
        let scale = |slot: &TorchSlot| slot.velocity.map_or(1.0, |sign| sign * own.velocity_scale(rate));
        // Where torch has no state, it would start from zeros. Adagrad's is there from the start.
        let is_unmoved = entries.is_empty() && !own.slots.is_empty() && own.kind != "Adagrad";
        let tensor = |slot: &TorchSlot| {
            let stored = if is_unmoved { None } else { Some((self.tensor(leaf, slot, entries)?, scale(slot))) };
            Ok((slot.slot.clone(), stored))
        };
        let tensors = own.slots.iter().map(tensor).collect::<TorchResult<_>>()?;
        let known = |key: &&String| *key == STEP || own.slots.iter().any(|slot| slot.key == **key);
        if let Some(key) = entries.keys().find(|key| !known(key)) {
            return Err(entry_error(path, key, "has an entry that no rule here takes,", entries));
        }
        let step = match entries.get(STEP) {
            Some(entry) => Some(self.step(path, entry)?),
            None if own.has_step && !is_unmoved => return Err(entry_error(path, STEP, "lacks", entries)),
            None => is_unmoved.then_some(0),
        };
        let rate = own.rate_place().map(str::to_string);
        Ok(LeafTakes { tensors, counter: own.counter.clone(), step, is_unmoved, wanted, rate, drive })
    }

    /// The tensor of a slot, when all of its numbers are fit to be taken over.
    fn tensor(&self, leaf: &Leaf, slot: &TorchSlot, entries: &'c BTreeMap<String, StateEntry>) -> TorchResult<&'c StoredTensor> {
        let (path, key) = (leaf.path(), slot.key);
        let entry = entries.get(key).ok_or_else(|| entry_error(path, key, "lacks", entries))?;
        let value_error = |found: String| {
            let expected = "a tensor of F16, BF16, F32 or F64";
            TorchError::Value { path: path.to_string(), key: key.to_string(), found, expected }
        };
        let stored = match entry {
            StateEntry::Tensor(stored) if is_supported(stored.dtype) => stored,
            StateEntry::Tensor(stored) => return Err(value_error(format!("a tensor of {:?}", stored.dtype))),
            StateEntry::Number(number) => return Err(value_error(number.to_string())),
            StateEntry::Other(what) => return Err(value_error(what.clone())),
        };
        if stored.shape != leaf.shape().dims() {
            let (found, expected) = (Shape::from(stored.shape.clone()), leaf.shape().clone());
            return Err(TorchError::Shape { path: path.to_string(), key: key.to_string(), found, expected });
        }
        let dtype =
            leaf.state.tensors().into_iter().find(|(name, _)| *name == slot.slot).map_or(DType::F32, |(_, tensor)| stored_in(tensor));
        let (is_finite, is_square) = (!self.accepts_non_finite, slot.is_square);
        let found = self.container.unfit(stored, dtype, is_finite, is_square).map_err(unread)?;
        let expected = if is_square { "a finite number that is not negative" } else { "a finite number" };
        match found {
            Some((index, value)) => Err(TorchError::Number { path: path.to_string(), key: key.to_string(), index, value, expected, dtype }),
            None => Ok(stored),
        }
    }

    fn step(&self, path: &str, entry: &StateEntry) -> TorchResult<u64> {
        let number = match entry {
            StateEntry::Number(number) => Some(*number),
            StateEntry::Tensor(stored) => self.container.number(stored).map_err(unread)?,
            StateEntry::Other(_) => None,
        };
        let found = || match entry {
            StateEntry::Tensor(stored) if number.is_none() => format!("a tensor of shape {:?}", stored.shape),
            StateEntry::Other(what) => what.clone(),
            _ => number.map_or_else(String::new, |number| number.to_string()),
        };
        let step = number.filter(|number| *number >= 0.0 && *number < TOO_MANY && number.fract() == 0.0).map(|number| number as u64);
        step.ok_or_else(|| TorchError::Value {
            path: path.to_string(),
            key: STEP.to_string(),
            found: found(),
            expected: "a count of steps",
        })
    }
}

/// The dtype of a state tensor's numbers, which have the range of F32 where they are in 8 bits.
fn stored_in(tensor: StateTensor<'_>) -> DType {
    if tensor.code().is_some() { DType::F32 } else { tensor.stored_dtype() }
}

pub(super) fn unread(source: std::io::Error) -> TorchError {
    TorchError::Io { action: "read the file", source }
}

fn entry_error(path: &str, key: &str, problem: &'static str, entries: &BTreeMap<String, StateEntry>) -> TorchError {
    let available = listed(entries.keys().map(String::as_str));
    TorchError::Entry { path: path.to_string(), key: key.to_string(), problem, available }
}
