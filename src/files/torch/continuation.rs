//! The plan of a restore from torch: everything that a state takes over is checked, nothing written.

use std::collections::{BTreeMap, HashMap};

use super::content::{Content, TorchParameter};
use super::counterpart::{Counterpart, TorchSlot};
use super::file_tensor::{FileTensor, numbers};
use super::settings::{GroupComparison, WantedFields};
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, FLOATS, Result, joined, listed};
use crate::files::tensor_file::{Entry, read_error};
use crate::numbers::{DType, is_supported};
use crate::rule::RATE;
use crate::tree::{Leaf, StateTree};

const RENAME: &str = "if only the names differ, translate the names with `TorchState::renamed`";

/// The entry of torch's state with the count of steps.
pub(super) const STEP: &str = "step";

/// The least count of steps that is refused: 2⁵³, up to which f64 is exact.
pub(super) const TOO_MANY: f64 = 9_007_199_254_740_992.0;

/// The count at which torch's `step` stops in a 16-bit dtype, because adding 1 is rounded back.
fn counts_to(dtype: DType) -> Option<f64> {
    match dtype {
        DType::BF16 => Some(256.0),
        DType::F16 => Some(2048.0),
        _ => None,
    }
}

/// What a state takes over.
pub(super) struct Continuation<'c> {
    /// In the order of the leaves.
    pub(super) leaves: Vec<LeafContinuation<'c>>,
    /// The paths of the parameters for which torch has no state yet.
    pub(super) unmoved: Vec<String>,
    /// The warning about the first parameter whose rate follows a scheduler in torch and no schedule here.
    pub(super) undriven: Option<Warning>,
}

/// What a leaf takes over.
pub(super) struct LeafContinuation<'c> {
    /// Each tensor with its names in torch and here.
    pub(super) tensors: Vec<(TorchSlot, FileTensor<'c>)>,
    /// The counters here that are torch's `step`.
    pub(super) counters: Vec<String>,
    /// `None` if torch does not count the steps.
    pub(super) step: Option<u64>,
    /// Whether torch has no state for the parameter yet.
    is_unmoved: bool,
    pub(super) wanted: WantedFields,
    undriven: Option<Warning>,
}

/// The comparison of a file with a state.
pub(super) struct Check<'c> {
    pub(super) content: &'c Content,
    pub(super) takes_over: bool,
    /// The step at which schedules are evaluated.
    pub(super) steps: u64,
}

impl<'c> Check<'c> {
    pub(super) fn continuation(&self, state: &StateTree) -> Result<Continuation<'c>> {
        let names = &self.content.names;
        let mut of_leaf: HashMap<&str, &'c TorchParameter> = HashMap::new();
        for (name, parameter) in names.iter().zip(&self.content.parameters) {
            let leaf = state.leaf(name);
            let unknown = || {
                Error::new(
                    ErrorKind::Model,
                    "the file has this parameter, but the state does not; the state has:",
                )
                .with_got(joined(&listed(state.leaves().map(Leaf::path))))
                .with_remedy(RENAME)
                .at(name)
            };
            let leaf = leaf.ok_or_else(unknown)?;
            if of_leaf.insert(leaf.path(), parameter).is_some() {
                let twice = Error::new(
                    ErrorKind::Model,
                    "two parameters of the file are this parameter of the state",
                );
                return Err(twice.with_remedy("name each parameter once").at(leaf.path()));
            }
        }
        let mut continuation =
            Continuation { leaves: Vec::with_capacity(state.len()), unmoved: Vec::new(), undriven: None };
        for leaf in state.leaves() {
            let missing = || {
                Error::new(ErrorKind::Model, "the file lacks this parameter; the file has:")
                    .with_got(joined(&listed(names.iter())))
                    .with_remedy(RENAME)
                    .at(leaf.path())
            };
            let parameter = *of_leaf.get(leaf.path()).ok_or_else(missing)?;
            let mut takes = self.leaf(leaf, parameter).map_err(|error| error.at(leaf.path()))?;
            continuation.undriven = continuation.undriven.or(takes.undriven.take());
            continuation.unmoved.extend(takes.is_unmoved.then(|| leaf.path().to_string()));
            continuation.leaves.push(takes);
        }
        Ok(continuation)
    }

    fn leaf(&self, leaf: &Leaf, parameter: &'c TorchParameter) -> Result<LeafContinuation<'c>> {
        let own = Counterpart::of(leaf)?;
        let entries = &parameter.entries;
        let group = &self.content.groups[parameter.group];
        let (takes_over, steps) = (self.takes_over, self.steps);
        let comparison =
            GroupComparison { rule: leaf.optimiser().name(), group, own: &own, takes_over, steps };
        let (wanted, rate) = comparison.check()?;
        let initial = comparison.initial_rate()?.filter(|_| own.driven.is_none());
        let undriven = initial.map(|initial| Warning::ScheduleDiffers {
            path: leaf.path().to_string(),
            field: RATE.to_string(),
            program: None,
            file: format!("a scheduler of torch's (from {initial} to {})", own.learning_rate_with(rate)),
        });
        // torch has no state before the first step, and starts from zeros then. Only Adagrad always has one.
        let is_unmoved =
            entries.is_empty() && own.slots.iter().any(|slot| !slot.is_unused) && own.kind != "Adagrad";
        let tensor = |slot: &TorchSlot| {
            let scale = slot.velocity.map_or(1.0, |sign| sign * own.velocity_scale(rate));
            let stored = match is_unmoved {
                true => None,
                false => Some(self.stored(leaf, slot, scale, entries)?),
            };
            let shape = leaf.shape().to_vec();
            Ok((slot.clone(), FileTensor { stored, scale, shape }))
        };
        let in_file = own.slots.iter().filter(|slot| !slot.is_unused || entries.contains_key(slot.key));
        let tensors = in_file.map(tensor).collect::<Result<_>>()?;
        let known = |key: &&String| *key == STEP || own.slots.iter().any(|slot| slot.key == **key);
        if let Some(key) = entries.keys().find(|key| !known(key)) {
            let known = own.slots.iter().map(|slot| slot.key).chain([STEP]).collect::<Vec<_>>().join(", ");
            let unknown = Error::new(
                ErrorKind::File,
                format!("the rule here has no state for the file's entry {key:?}"),
            );
            return Err(unknown.with_expected(format_args!("one of: {known}")));
        }
        let step = match self.entry(entries, STEP) {
            Some(entry) => Some(self.step(&entry)?),
            None if own.has_step && !is_unmoved => return Err(lacks(STEP, entries)),
            None => is_unmoved.then_some(0),
        };
        Ok(LeafContinuation { tensors, counters: own.counters.clone(), step, is_unmoved, wanted, undriven })
    }

    /// The tensor of the file with this key of torch's.
    fn entry(&self, entries: &BTreeMap<String, String>, key: &str) -> Option<Entry<'c>> {
        self.content.file.entry(entries.get(key)?)
    }

    /// The file's tensor for a slot, which will be multiplied by `scale`, and its dtype.
    fn stored(
        &self,
        leaf: &Leaf,
        slot: &TorchSlot,
        scale: f64,
        entries: &BTreeMap<String, String>,
    ) -> Result<(Entry<'c>, DType)> {
        let entry = self.entry(entries, slot.key).ok_or_else(|| lacks(slot.key, entries))?;
        let dtype = entry.known_dtype().filter(|dtype| is_supported(*dtype));
        let dtype = dtype.ok_or_else(|| Error::dtype(slot.in_file(), entry.dtype, FLOATS))?;
        if entry.shape != leaf.shape() {
            let remedy = "the tensor belongs to another parameter: name the parameters in the order of the \
                          optimiser that was saved";
            return Err(Error::shape(slot.in_file(), entry.shape, leaf.shape()).with_remedy(remedy));
        }
        // Only a velocity can have the factor 0. The file's numbers would be lost, so they must be 0 as well.
        if scale == 0.0 {
            let numbers = numbers(&entry).map_err(read_error)?;
            if let Some(element) = numbers.iter().position(|number| number.is_finite() && *number != 0.0) {
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

    fn step(&self, entry: &Entry<'_>) -> Result<u64> {
        let is_number = entry.elements() == 1 && entry.known_dtype().is_some();
        let number = is_number.then(|| numbers(entry)).transpose().map_err(read_error)?;
        let number = number.and_then(|numbers| numbers.first().copied());
        let got = || match number {
            Some(number) => number.to_string(),
            None => format!("a tensor of {:?} and shape {:?}", entry.dtype, entry.shape),
        };
        let refused = || Error::new(ErrorKind::File, format!("{STEP} in the file is")).with_got(got());
        let step = number.filter(|number| *number >= 0.0 && *number < TOO_MANY && number.fract() == 0.0);
        let step = step.ok_or_else(|| refused().with_expected("a count of steps"))?;
        if entry.known_dtype().and_then(counts_to).is_some_and(|last| step >= last) {
            return Err(refused()
                .with_expected(format_args!(
                    "a count in F32, because adding 1 to this count in {:?} changes nothing",
                    entry.dtype
                ))
                .with_remedy(
                    "set the true count in torch, `state[\"step\"] = torch.tensor(float(steps))` for each \
                     `state` in `optimizer.state.values()`, and save again",
                ));
        }
        Ok(step as u64)
    }
}

/// The error that the file has no entry `key` for a parameter.
fn lacks(key: &str, entries: &BTreeMap<String, String>) -> Error {
    Error::missing(format!("the file lacks {key:?} of this parameter; the file has:"))
        .with_got(joined(&listed(entries.keys())))
}
