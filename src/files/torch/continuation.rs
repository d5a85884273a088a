//! The plan of a restore from torch: everything that a state takes over is checked, and nothing is written.

use std::collections::{BTreeMap, HashMap};

use super::content::{Content, TorchParameter};
use super::counterpart::{Counterpart, TorchSlot};
use super::file_tensor::{FileTensor, numbers};
use super::settings::{GroupComparison, NewFields};
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, FLOATS, Result, comma_separated, first_names};
use crate::files::tensor_file::{Entry, read_error};
use crate::numbers::{DType, is_supported};
use crate::rule::RATE;
use crate::tree::{Leaf, StateTree};

const RENAME: &str = "if only the names differ, translate the names with `TorchState::renamed`";

/// The entry of torch's state with the count of steps.
pub(super) const STEP: &str = "step";

/// The least count of steps that is refused: 2⁵³, up to which f64 is exact.
pub(super) const COUNT_LIMIT: f64 = 9_007_199_254_740_992.0;

/// The count at which torch's `step` stops in a 16-bit dtype, because a sum with 1 is rounded back.
fn last_count(dtype: DType) -> Option<f64> {
    match dtype {
        DType::BF16 => Some(256.0),
        DType::F16 => Some(2048.0),
        _ => None,
    }
}

/// The values that a state takes over.
pub(super) struct Continuation<'c> {
    /// In the order of the leaves.
    pub(super) leaves: Vec<LeafContinuation<'c>>,
    /// The paths of the parameters for which torch has no state yet.
    pub(super) unmoved_paths: Vec<String>,
    /// The warning about the first parameter whose rate follows a scheduler in torch and no schedule here.
    pub(super) rate_warning: Option<Warning>,
}

/// The values that a leaf takes over.
pub(super) struct LeafContinuation<'c> {
    /// Each tensor with its names in torch and here.
    pub(super) tensors: Vec<(TorchSlot, FileTensor<'c>)>,
    /// The counters here that are torch's `step`.
    pub(super) counters: Vec<String>,
    /// `None` if torch does not count the steps.
    pub(super) step: Option<u64>,
    /// Whether torch has no state for the parameter yet.
    is_unmoved: bool,
    pub(super) new_fields: NewFields,
    rate_warning: Option<Warning>,
}

/// A comparison of a file with a state.
pub(super) struct StateComparison<'c> {
    pub(super) content: &'c Content,
    pub(super) takes_over: bool,
    /// The step at which schedules are evaluated.
    pub(super) steps: u64,
}

impl<'c> StateComparison<'c> {
    /// Checks everything that the leaves would take over.
    pub(super) fn continuation(&self, state: &StateTree) -> Result<Continuation<'c>> {
        let names = &self.content.names;
        let mut parameters: HashMap<&str, &'c TorchParameter> = HashMap::new();
        for (name, parameter) in names.iter().zip(&self.content.parameters) {
            let unknown = || {
                Error::new(
                    ErrorKind::Model,
                    "the file has this parameter, but the state does not; the state has:",
                )
                .with_got(comma_separated(&first_names(state.leaves().map(Leaf::path))))
                .with_remedy(RENAME)
                .at(name)
            };
            let leaf = state.leaf(name).ok_or_else(unknown)?;
            if parameters.insert(leaf.path(), parameter).is_some() {
                let problem = "two parameters of the file are this parameter of the state";
                return Err(Error::new(ErrorKind::Model, problem)
                    .with_remedy("name each parameter once")
                    .at(leaf.path()));
            }
        }
        let mut continuation = Continuation {
            leaves: Vec::with_capacity(state.len()),
            unmoved_paths: Vec::new(),
            rate_warning: None,
        };
        for leaf in state.leaves() {
            let missing = || {
                Error::new(ErrorKind::Model, "the file lacks this parameter; the file has:")
                    .with_got(comma_separated(&first_names(names.iter())))
                    .with_remedy(RENAME)
                    .at(leaf.path())
            };
            let parameter = *parameters.get(leaf.path()).ok_or_else(missing)?;
            let mut leaf_continuation = self
                .leaf_continuation(leaf, parameter)
                .map_err(|error| error.at(leaf.path()))?;
            let rate_warning = leaf_continuation.rate_warning.take();
            continuation.rate_warning = continuation.rate_warning.or(rate_warning);
            let unmoved_path = leaf_continuation.is_unmoved.then(|| leaf.path().to_string());
            continuation.unmoved_paths.extend(unmoved_path);
            continuation.leaves.push(leaf_continuation);
        }
        Ok(continuation)
    }

    /// Checks everything that a leaf would take over.
    fn leaf_continuation(&self, leaf: &Leaf, parameter: &'c TorchParameter) -> Result<LeafContinuation<'c>> {
        let counterpart = Counterpart::new(leaf)?;
        let entries = &parameter.entries;
        let comparison = GroupComparison {
            rule: leaf.optimiser().name(),
            group: &self.content.groups[parameter.group],
            counterpart: &counterpart,
            takes_over: self.takes_over,
            steps: self.steps,
        };
        let (new_fields, rate) = comparison.check()?;
        let initial = comparison
            .initial_rate()?
            .filter(|_| counterpart.driven_rate.is_none());
        let rate_warning =
            initial.map(|initial| undriven_warning(leaf, initial, counterpart.learning_rate_with(rate)));
        // torch has no state before the first step, and starts from zeros then. Only Adagrad always has
        // state.
        let is_unmoved = entries.is_empty()
            && counterpart.slots.iter().any(|slot| !slot.is_unused)
            && counterpart.kind != "Adagrad";
        let tensor = |slot: &TorchSlot| {
            let scale = slot
                .velocity_sign
                .map_or(1.0, |sign| sign * counterpart.velocity_scale(rate));
            let source = match is_unmoved {
                true => None,
                false => Some(self.slot_entry(leaf, slot, scale, entries)?),
            };
            let shape = leaf.shape().to_vec();
            Ok((slot.clone(), FileTensor { source, scale, shape }))
        };
        let is_in_file = |slot: &&TorchSlot| !slot.is_unused || entries.contains_key(slot.key);
        let tensors = counterpart
            .slots
            .iter()
            .filter(is_in_file)
            .map(tensor)
            .collect::<Result<_>>()?;
        check_keys(&counterpart, entries)?;
        let step = match self.entry(entries, STEP) {
            Some(entry) => Some(step_count(&entry)?),
            None if counterpart.has_step && !is_unmoved => return Err(missing_entry_error(STEP, entries)),
            None => is_unmoved.then_some(0),
        };
        Ok(LeafContinuation {
            tensors,
            counters: counterpart.counters,
            step,
            is_unmoved,
            new_fields,
            rate_warning,
        })
    }

    /// The tensor of the file with this key of torch's.
    fn entry(&self, entries: &BTreeMap<String, String>, key: &str) -> Option<Entry<'c>> {
        self.content.file.entry(entries.get(key)?)
    }

    /// The file's entry for a slot, to be multiplied by `scale`, and the entry's dtype.
    fn slot_entry(
        &self,
        leaf: &Leaf,
        slot: &TorchSlot,
        scale: f64,
        entries: &BTreeMap<String, String>,
    ) -> Result<(Entry<'c>, DType)> {
        let entry = self
            .entry(entries, slot.key)
            .ok_or_else(|| missing_entry_error(slot.key, entries))?;
        let dtype = entry.known_dtype().filter(|dtype| is_supported(*dtype));
        let dtype = dtype.ok_or_else(|| Error::dtype(slot.in_file(), entry.dtype, FLOATS))?;
        if entry.shape != leaf.shape() {
            let remedy = "the tensor belongs to another parameter: name the parameters in the order of the \
                          optimiser that was saved";
            return Err(Error::shape(slot.in_file(), entry.shape, leaf.shape()).with_remedy(remedy));
        }
        // Only a velocity can have the factor 0. Numbers other than 0 are refused, because the factor would
        // delete them.
        if scale == 0.0 {
            let numbers = numbers(&entry).map_err(read_error)?;
            if let Some(element) = numbers
                .iter()
                .position(|number| number.is_finite() && *number != 0.0)
            {
                return Err(Error::new(ErrorKind::Unsupported, format!("{} is", slot.in_file()))
                    .with_got(numbers[element])
                    .at_element(element)
                    .with_expected("0, because the velocity here contains the learning rate, which is 0")
                    .with_remedy(
                        "set up the rule with η = 1, and a `Descent` after the rule with the learning rate: \
                         then the velocity is equal to torch's",
                    ));
            }
        }
        Ok((entry, dtype))
    }
}

/// The warning that a rate follows a scheduler in torch and no schedule here.
fn undriven_warning(leaf: &Leaf, initial: f64, rate: f64) -> Warning {
    Warning::ScheduleDiffers {
        path: leaf.path().to_string(),
        field: RATE.to_string(),
        program: None,
        file: format!("a scheduler of torch's (from {initial} to {rate})"),
    }
}

/// Refuses an entry that the counterpart does not have.
fn check_keys(counterpart: &Counterpart, entries: &BTreeMap<String, String>) -> Result<()> {
    let keys = || counterpart.slots.iter().map(|slot| slot.key).chain([STEP]);
    match entries
        .keys()
        .find(|key| !keys().any(|slot_key| slot_key == **key))
    {
        None => Ok(()),
        Some(key) => {
            let problem = format!("the rule here has no state for the file's entry {key:?}");
            Err(Error::new(ErrorKind::File, problem)
                .with_expected(format_args!("one of: {}", keys().collect::<Vec<_>>().join(", "))))
        }
    }
}

/// The count in torch's `step`.
fn step_count(entry: &Entry<'_>) -> Result<u64> {
    let is_number = entry.elements() == 1 && entry.known_dtype().is_some();
    let values = is_number
        .then(|| numbers(entry))
        .transpose()
        .map_err(read_error)?;
    let number = values.and_then(|numbers| numbers.first().copied());
    let got = || match number {
        Some(number) => number.to_string(),
        None => format!("a tensor of {:?} and shape {:?}", entry.dtype, entry.shape),
    };
    let error = || Error::new(ErrorKind::File, format!("{STEP} in the file is")).with_got(got());
    let count = number
        .filter(|number| *number >= 0.0 && *number < COUNT_LIMIT && number.fract() == 0.0)
        .ok_or_else(|| error().with_expected("a count of steps"))?;
    if entry
        .known_dtype()
        .and_then(last_count)
        .is_some_and(|last| count >= last)
    {
        return Err(error()
            .with_expected(format_args!(
                "a count in F32, because adding 1 to this count in {:?} changes nothing",
                entry.dtype
            ))
            .with_remedy(
                "set the true count in torch, `state[\"step\"] = torch.tensor(float(steps))` for each \
                 `state` in `optimizer.state.values()`, and save again",
            ));
    }
    Ok(count as u64)
}

/// The largest `step` of the file. A `step` that is no count is an error of the comparison.
pub(super) fn largest_step(content: &Content) -> Option<u64> {
    let steps = content.parameters.iter().filter_map(|parameter| {
        let entry = content.file.entry(parameter.entries.get(STEP)?)?;
        step_count(&entry).ok()
    });
    steps.max()
}

/// The error that the file has no entry `key` for a parameter.
fn missing_entry_error(key: &str, entries: &BTreeMap<String, String>) -> Error {
    Error::missing(format!("the file lacks {key:?} of this parameter; the file has:"))
        .with_got(comma_separated(&first_names(entries.keys())))
}
