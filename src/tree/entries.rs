//! Reading and setting the entries of a state by name, in memory.
//!
//! Values are lent, because memory may have no room for a copy of a whole state. So values are read twice:
//! 1. `entry_places` finds each entry and checks its value, so that a wrong value changes nothing.
//! 2. Ranks agree on the checksums of the values, because each rank writes only its part.
//! 3. The values are read again and written. Only a device can fail here, or an owner that does not lend its
//!    memory again. The error then says how many values were written before.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;

use super::masters::checksum;
use super::{Leaf, NormHistories, StateTree};
use crate::engine::Buffer;
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::{Lend, send_bytes};
use crate::numbers::{Code, DType, Requirements, check_finite, counts};
use crate::ranks::{Aspect, Call, Held};
use crate::rule::{FieldValue, StateValues};
use crate::tensors::{Device, Tensor};

/// The value of an entry of a state, in memory that is lent: see [`StateTree::entries`].
#[derive(Clone)]
pub enum StateValue<'v> {
    /// A tensor of F16, BF16, F32 or F64.
    ///
    /// [`TensorSlice`](crate::TensorSlice) lends a slice in a shape. With the feature `candle`, tensors of
    /// candle can be lent as they are, and `to_tensor()` copies lent memory into a tensor of candle.
    Tensor(&'v dyn Lend),
    /// Bytes that are no numbers by themselves, as checkpoints have them.
    ///
    /// Examples are a tensor in [8 bits](crate::Q8), whose numbers [`Leaf::tensor`] returns, and the low bits
    /// of a [`SplitMaster`](crate::SplitMaster).
    Bytes(Cow<'v, [u8]>),
    /// A counter, such as the number of steps taken.
    Counter(u64),
    /// A number that is not per element.
    Number(f64),
}

/// Shows tensors without their numbers.
impl fmt::Debug for StateValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StateValue::Tensor(tensor) => write!(f, "Tensor({:?} of {:?})", tensor.dtype(), tensor.shape()),
            StateValue::Bytes(bytes) => write!(f, "Bytes({})", bytes.len()),
            StateValue::Counter(count) => write!(f, "Counter({count})"),
            StateValue::Number(number) => write!(f, "Number({number})"),
        }
    }
}

/// The counters of a leaf that belong to no rule: [`Leaf::steps`] and those of `MissingGradients`.
const LEAF_COUNTERS: [&str; 3] = [LEAF_STEPS, "leaf.waited", "leaf.received"];

/// The counter of the steps that were applied to a parameter.
pub(crate) const LEAF_STEPS: &str = "leaf.steps";

/// The counters of the whole state: [`StateTree::steps`], and the calls that open windows have counted.
const STATE_COUNTERS: [&str; 2] = ["state.steps", "state.calls"];

/// The norms that decide on outliers, as JSON.
const STATE_NORMS: &str = "state.norms";

/// The path of the entries of the whole state.
const STATE_PATH: &str = "";

/// The remedy for a wrong shape or length.
const OTHER_STATE: &str = "pass what a state of the same rules and parameters has under that name";

impl StateTree {
    /// All tensors, counters and numbers of the state: the path of a parameter, a name, and the value.
    ///
    /// With [`set_entries`](StateTree::set_entries) a program can keep a state in a database or a file of its
    /// own. [`Checkpoint::to_bytes`](crate::Checkpoint::to_bytes) has everything that a run needs to go on.
    ///
    /// The names are those of checkpoints: `m` and `t`, or `1.m` in the second rule of a chain, and `master`.
    /// Nothing is copied, except from devices. Three counters of each parameter begin with `leaf.`: the steps
    /// that were applied, the calls since the last gradient, and 1 if an accumulator got a gradient. Entries
    /// of the whole state have the path `""` and names that begin with `state.`: the steps that schedules
    /// count, the calls of open windows of [`AccumGrad`](crate::AccumGrad), and, if there are any, the norms
    /// that decide on [outliers](crate::Outlier), as JSON.
    ///
    /// There are no entries for hyper-parameters, [schedules](StateTree::schedule) or the freezing of leaves.
    ///
    /// # Errors
    /// If the state is divided among ranks, because each rank has only a part (save a checkpoint then); if
    /// the model has averages instead of its parameters; if parameters have [no
    /// names](crate::CandleOptimizer); if a device fails.
    ///
    /// ```
    /// use optimisers::{Adam, GradientSlices, MemoryRef, ParameterSlices, StateValue, TensorSlice, setup, update};
    ///
    /// let mut weights = [1f32, 2.0];
    /// let parameters = ParameterSlices::new().with("weights", 2, &mut weights)?;
    /// let gradients = GradientSlices::new().with("weights", &[0.5f32, -0.5])?;
    /// let mut state = setup(Adam::new(0.1), &parameters)?;
    /// update(&mut state, &parameters, &gradients)?;
    ///
    /// // Out: arrays of numbers. A program that writes them elsewhere needs no copy.
    /// let mut arrays = Vec::new();
    /// let mut counters = Vec::new();
    /// for (path, name, value) in state.entries()? {
    ///     match value {
    ///         StateValue::Tensor(tensor) => tensor.read(&mut |view| {
    ///             let Some(MemoryRef::F32(numbers)) = view.in_order() else { unreachable!("Adam on f32") };
    ///             arrays.push((path.to_string(), name.clone(), tensor.lent_shape().to_vec(), numbers.to_vec()));
    ///             Ok(())
    ///         })?,
    ///         StateValue::Counter(count) => counters.push((path.to_string(), name, count)),
    ///         _ => {} // Adam has no others
    ///     }
    /// }
    /// assert_eq!(arrays[1].1, "v");
    ///
    /// // In, as in another process.
    /// let mut resumed = setup(Adam::new(0.1), &parameters)?;
    /// for (path, name, shape, numbers) in &arrays {
    ///     let tensor = TensorSlice::new(shape, numbers)?;
    ///     resumed.set_entries([(path, name, StateValue::Tensor(&tensor))])?;
    /// }
    /// resumed.set_entries(counters.iter().map(|(path, name, count)| (path, name, StateValue::Counter(*count))))?;
    /// assert_eq!((resumed.steps(), resumed.leaf("weights").map(|leaf| leaf.steps())), (1, Some(1)));
    /// # Ok::<(), optimisers::Error>(())
    /// ```
    pub fn entries(&self) -> Result<Vec<(&str, String, StateValue<'_>)>> {
        self.check_whole("`entries`")?;
        self.check_names()?;
        self.check_parameters()?;
        let counts = STATE_COUNTERS.into_iter().zip([self.steps, self.calls]);
        let mut entries: Vec<_> = counts
            .map(|(name, count)| (STATE_PATH, name.to_string(), StateValue::Counter(count)))
            .collect();
        if !self.norms.is_empty() {
            let norms = serde_json::to_vec(&self.norms).map_err(Error::other)?;
            entries.push((
                STATE_PATH,
                STATE_NORMS.to_string(),
                StateValue::Bytes(norms.into()),
            ));
        }
        for leaf in &self.leaves {
            for (name, buffer) in leaf.state.tensors() {
                let value = match buffer.has_numbers() {
                    true => StateValue::Tensor(buffer),
                    false => {
                        let bytes = buffer.to_bytes();
                        StateValue::Bytes(bytes.map_err(|error| Error::other(error).at(leaf.path()))?)
                    }
                };
                entries.push((leaf.path(), name, value));
            }
            let counts = [
                leaf.steps,
                leaf.missing_gradients.calls,
                leaf.missing_gradients.received,
            ];
            let leaf_counters = LEAF_COUNTERS.into_iter().map(str::to_string).zip(counts);
            let counters = leaf.counters().into_iter().chain(leaf_counters);
            entries.extend(counters.map(|(name, count)| (leaf.path(), name, StateValue::Counter(count))));
            let numbers = leaf.numbers().into_iter();
            entries.extend(numbers.map(|(name, number)| (leaf.path(), name, StateValue::Number(number))));
        }
        Ok(entries)
    }

    /// Sets entries of the state, each given by path, name and value as in [`entries`](StateTree::entries).
    ///
    /// All entries are set or none. Entries of the state that are not listed here stay as they are. A tensor
    /// may have F16, BF16, F32 or F64: its numbers are rounded to what the state stores, also to [8
    /// bits](crate::Q8). The parameters stay as they are, so each parameter has to be its new `master`,
    /// rounded.
    ///
    /// Over [ranks](crate::Setup::over) all ranks call this method with the same whole tensors, and each rank
    /// takes its part.
    ///
    /// # Errors
    /// If a path or a name is unknown or given twice; if a value is of another kind, shape, dtype or length;
    /// if a number is not finite, too large for its dtype, out of [its range](crate::State::with_number), or
    /// negative among squares of gradients; if a counter is above `u64::MAX / 2`; if the model has averages
    /// instead of its parameters; if parameters have [no names](crate::CandleOptimizer); if ranks give
    /// different entries. Nothing changes then. If a device fails, or memory that was lent once is not lent
    /// again, the error says how many values were written before.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use optimisers::{Adam, StateValue, setup};
    ///
    /// let x = Var::new(&[1f32, 2.0], &Device::Cpu)?;
    /// let mut state = setup(Adam::new(0.1), &x)?;
    /// let m = Tensor::new(&[0.5f32, -0.5], &Device::Cpu)?;
    /// state.set_entries([("", "m", StateValue::Tensor(&m)), ("", "t", StateValue::Counter(7))])?;
    /// assert_eq!(state.leaf("").unwrap().tensor("m")?.to_vec1::<f32>()?, [0.5, -0.5]);
    ///
    /// let refused = state.set_entries([("", "v", StateValue::Number(0.5))]).unwrap_err();
    /// assert!(refused.to_string().ends_with(r#"the value for "v" is a number, expected a tensor"#));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_entries<'v, P, N>(
        &mut self,
        entries: impl IntoIterator<Item = (P, N, StateValue<'v>)>,
    ) -> Result<()>
    where
        P: AsRef<str>,
        N: AsRef<str>,
    {
        let new = |(path, name, value): (P, N, StateValue<'v>)| NewEntry {
            path: path.as_ref().to_string(),
            name: name.as_ref().to_string(),
            label: format!("the value for {:?}", name.as_ref()),
            value,
        };
        let entries: Vec<_> = entries.into_iter().map(new).collect();
        let on_non_finite = "restore the state from a checkpoint with `CheckpointFile::accepting_non_finite`";
        self.assign_entries(&entries, Some(on_non_finite))
    }

    /// [`StateTree::set_entries`]. `on_non_finite` is that of [`Requirements`].
    pub(crate) fn assign_entries(
        &mut self,
        entries: &[NewEntry<'_>],
        on_non_finite: Option<&'static str>,
    ) -> Result<()> {
        let new_steps = |((leaf, place), entry): (&(Option<usize>, EntryPlace), &NewEntry<'_>)| match (
            leaf,
            place,
            &entry.value,
        ) {
            (None, EntryPlace::Counter(0), StateValue::Counter(steps)) => Some(*steps),
            _ => None,
        };
        let plan = self.entry_places(entries, on_non_finite).and_then(|places| {
            let steps = places
                .iter()
                .zip(entries)
                .find_map(new_steps)
                .unwrap_or(self.steps);
            // Rules make the acting optimisers, and may panic, so this happens before anything is written.
            Ok((places, steps, self.acting_for(steps)?))
        });
        let (places, steps, acting) = self.world.compare(Call::SetEntries, plan, |(places, ..)| {
            // The entries are sorted, because ranks may list them in different orders, as hash maps do.
            let mut sorted: Vec<_> = places.iter().zip(entries).collect();
            sorted.sort_by_key(|(place, _)| **place);
            sorted.into_iter().map(|(_, entry)| entry.aspect()).collect()
        })?;
        self.warnings.clear_cache();
        let (tree_entries, leaf_entries): (Vec<_>, Vec<_>) = places
            .into_iter()
            .zip(entries)
            .partition(|((leaf, _), _)| leaf.is_none());
        let mut writes = 0;
        let mut outcomes = leaf_entries.into_iter().filter_map(|((leaf, place), entry)| {
            let outcome = self.leaves[leaf?].set_entry(place, entry, &mut writes);
            Some(outcome.map_err(|error| error.at(&entry.path).after_values(writes, entries.len())))
        });
        let mut outcome = outcomes.try_for_each(|outcome| outcome);
        if outcome.is_ok() {
            outcome = tree_entries
                .into_iter()
                .try_for_each(|((_, place), entry)| self.set_tree_entry(place, &entry.value));
        }
        if outcome.is_ok() {
            self.set_step_count(steps, acting);
        }
        self.world.settle(Call::EntriesSet, outcome)
    }

    /// Checks each entry, and finds its place: the index of the leaf (`None` for the whole state), and the
    /// place among the entries of this leaf or of the whole state.
    fn entry_places(
        &self,
        entries: &[NewEntry<'_>],
        on_non_finite: Option<&'static str>,
    ) -> Result<Vec<(Option<usize>, EntryPlace)>> {
        let tree_names = EntryNames {
            counters: texts(&STATE_COUNTERS),
            tensors: texts(&[STATE_NORMS]),
            numbers: Vec::new(),
        };
        let mut leaf_names: HashMap<usize, EntryNames> = HashMap::new();
        let mut earlier_places = HashSet::new();
        let mut entry_place = |entry: &NewEntry<'_>| {
            // The name decides first, because a model that is a single parameter has the path `""`, too.
            let place = match (
                tree_names.place(&entry.name),
                self.leaf_index(&entry.path).flatten(),
            ) {
                (Some(place), _) if entry.path == STATE_PATH => (None, place),
                (_, Some(leaf)) => {
                    let names = leaf_names
                        .entry(leaf)
                        .or_insert_with(|| EntryNames::of_leaf(&self.leaves[leaf]));
                    let unknown = || Error::unknown("entry", &entry.name, &names.all());
                    (Some(leaf), names.place(&entry.name).ok_or_else(unknown)?)
                }
                _ if entry.path == STATE_PATH && entry.name.starts_with("state.") => {
                    return Err(Error::unknown(
                        "entry of the whole state",
                        &entry.name,
                        &tree_names.all(),
                    ));
                }
                _ => {
                    let paths = self.leaves().map(Leaf::path);
                    return Err(Error::unknown_path("parameter of the state", &entry.path, paths));
                }
            };
            if !earlier_places.insert(place) {
                let twice = Error::new(ErrorKind::Argument, format!("{} is given twice", entry.label));
                return Err(twice.with_remedy("give each entry once"));
            }
            let leaf = place.0.map(|leaf| &*self.leaves[leaf]);
            // For an entry of a leaf only this leaf is checked, because a program may set entries one at a
            // time.
            match leaf {
                Some(leaf) => leaf.check_name().and_then(|()| leaf.check_parameter())?,
                None => self.check_names().and_then(|()| self.check_parameters())?,
            }
            entry.check(place.1, leaf, on_non_finite)?;
            Ok(place)
        };
        entries
            .iter()
            .map(|entry| entry_place(entry).map_err(|error| error.at(&entry.path)))
            .collect()
    }

    /// Sets an entry of the whole state to a value that was checked.
    fn set_tree_entry(&mut self, place: EntryPlace, value: &StateValue<'_>) -> Result<()> {
        // Counter 1 of `STATE_COUNTERS` is `calls`. The caller sets counter 0, `steps`.
        match (place, value) {
            (EntryPlace::Counter(1), StateValue::Counter(calls)) => self.calls = *calls,
            (_, StateValue::Bytes(norms)) => self.norms = read_norms(norms)?,
            _ => {}
        }
        Ok(())
    }
}

/// A new value of an entry.
pub(crate) struct NewEntry<'v> {
    pub(crate) path: String,
    pub(crate) name: String,
    pub(crate) value: StateValue<'v>,
    /// What errors call the value.
    pub(crate) label: String,
}

/// The place of an entry among those of its kind, in the order of [`StateValues`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum EntryPlace {
    Tensor(usize),
    Counter(usize),
    Number(usize),
}

/// The names of entries, in the order of their places.
struct EntryNames {
    tensors: Vec<String>,
    counters: Vec<String>,
    numbers: Vec<String>,
}

fn texts(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| name.to_string()).collect()
}

impl EntryNames {
    fn of_leaf(leaf: &Leaf) -> Self {
        let counters = leaf.counters().into_iter().map(|(name, _)| name);
        EntryNames {
            tensors: leaf.tensor_names(),
            counters: counters.chain(texts(&LEAF_COUNTERS)).collect(),
            numbers: leaf.numbers().into_iter().map(|(name, _)| name).collect(),
        }
    }

    fn place(&self, name: &str) -> Option<EntryPlace> {
        let index = |names: &[String]| names.iter().position(|candidate| candidate == name);
        index(&self.tensors)
            .map(EntryPlace::Tensor)
            .or_else(|| index(&self.counters).map(EntryPlace::Counter))
            .or_else(|| index(&self.numbers).map(EntryPlace::Number))
    }

    fn all(&self) -> Vec<String> {
        [&self.tensors[..], &self.counters, &self.numbers].concat()
    }
}

impl NewEntry<'_> {
    /// Refuses a value that the entry cannot take.
    fn check(
        &self,
        place: EntryPlace,
        leaf: Option<&Leaf>,
        on_non_finite: Option<&'static str>,
    ) -> Result<()> {
        match (place, &self.value) {
            (EntryPlace::Counter(_), StateValue::Counter(count)) => {
                counts::check(format!("{} is", self.label), *count)
            }
            (EntryPlace::Counter(_), _) => Err(self.kind_error("a counter")),
            (EntryPlace::Number(_), StateValue::Number(number)) => {
                self.check_number(*number, leaf, on_non_finite)
            }
            (EntryPlace::Number(_), _) => Err(self.kind_error("a number")),
            (EntryPlace::Tensor(index), _) => self.check_stored(index, leaf, on_non_finite),
        }
    }

    fn check_number(
        &self,
        number: f64,
        leaf: Option<&Leaf>,
        on_non_finite: Option<&'static str>,
    ) -> Result<()> {
        check_finite(&self.label, number, on_non_finite)?;
        let expected = leaf.and_then(|leaf| leaf.state.number_fault(&self.name, number));
        let got = FieldValue::Real(number);
        expected.map_or(Ok(()), |expected| {
            Err(self.error(ErrorKind::Argument, &got, expected))
        })
    }

    /// Refuses a value that the state tensor with this index, or the norms of the whole state, cannot take.
    fn check_stored(
        &self,
        index: usize,
        leaf: Option<&Leaf>,
        on_non_finite: Option<&'static str>,
    ) -> Result<()> {
        let tensors = leaf.map(|leaf| (leaf, leaf.state.tensors()));
        let tensor = tensors
            .as_ref()
            .and_then(|(leaf, all)| Some((*leaf, all.get(index)?.1)));
        let is_coded = tensor.is_some_and(|(_, tensor)| tensor.code().is_some());
        let has_numbers = tensor.is_some_and(|(_, tensor)| tensor.has_numbers());
        match (&self.value, tensor) {
            (StateValue::Tensor(values), Some((leaf, tensor))) if is_coded || has_numbers => {
                self.check_tensor(*values, leaf, tensor, on_non_finite)
            }
            (StateValue::Bytes(bytes), Some((leaf, tensor))) if !has_numbers => {
                self.check_bytes(bytes, leaf, tensor, on_non_finite)
            }
            (StateValue::Bytes(norms), None) => read_norms(norms).map(drop),
            _ if is_coded => Err(self.kind_error("a tensor or its bytes")),
            _ if has_numbers => Err(self.kind_error("a tensor")),
            _ => Err(self.kind_error("bytes")),
        }
    }

    /// The error that the value is not of the expected kind.
    fn kind_error(&self, expected: &str) -> Error {
        let kind = match &self.value {
            StateValue::Tensor(_) => "a tensor",
            StateValue::Bytes(_) => "bytes",
            StateValue::Counter(_) => "a counter",
            StateValue::Number(_) => "a number",
        };
        self.error(ErrorKind::Argument, &kind, expected)
    }

    fn error(&self, kind: ErrorKind, got: &dyn fmt::Display, expected: &str) -> Error {
        Error::new(kind, format!("{} is", self.label))
            .with_got(got)
            .with_expected(expected)
    }

    fn check_tensor(
        &self,
        values: &dyn Lend,
        leaf: &Leaf,
        buffer: &Buffer,
        on_non_finite: Option<&'static str>,
    ) -> Result<()> {
        let required = Requirements {
            shape: checked_shape(leaf, buffer),
            is_non_negative: buffer.is_of_squares() || buffer.code() == Some(Code::NonNegative),
            ..self.requirements(buffer.dtype(), on_non_finite)
        };
        let dtype = required.check_form(values.shape(), Some(values.dtype()), values.dtype())?;
        if required.shape.is_none() {
            return Ok(());
        }
        required.check_numbers(dtype, 0, |watch| send_bytes("value", values, watch))
    }

    /// The requirements on new values that are rounded to `dtype`, without a shape.
    fn requirements(&self, dtype: DType, on_non_finite: Option<&'static str>) -> Requirements<'_> {
        Requirements {
            label: &self.label,
            shape: None,
            dtype,
            code: None,
            is_non_negative: false,
            on_other_shape: OTHER_STATE,
            on_other_dtype: None,
            on_non_finite,
        }
    }

    fn check_bytes(
        &self,
        bytes: &[u8],
        leaf: &Leaf,
        buffer: &Buffer,
        on_non_finite: Option<&'static str>,
    ) -> Result<()> {
        let Some(shape) = checked_shape(leaf, buffer) else {
            return Ok(());
        };
        let expected = buffer.shape_of(shape).elem_count();
        if bytes.len() != expected {
            let error = Error::new(ErrorKind::Argument, format!("the length of {} is", self.label));
            return Err(error
                .with_got(bytes.len())
                .with_expected(expected)
                .with_remedy(OTHER_STATE));
        }
        let required = Requirements {
            code: buffer.code(),
            ..self.requirements(DType::U8, on_non_finite)
        };
        required.check_numbers(DType::U8, 0, |watch| {
            watch.add(bytes);
            Ok(())
        })
    }

    /// The entry as ranks compare it, with a checksum instead of a tensor or bytes.
    fn aspect(&self) -> Result<Aspect> {
        let value = match &self.value {
            StateValue::Tensor(values) => format!("checksum {:08x}", checksum("value", *values)?),
            StateValue::Bytes(bytes) => format!("checksum {:08x}", crc32fast::hash(bytes)),
            StateValue::Counter(count) => count.to_string(),
            StateValue::Number(number) => format!("{:016x}", number.to_bits()),
        };
        Ok(Aspect::new(
            "an entry of the state",
            format!("{:?} of {:?}: {value}", self.name, self.path),
        ))
    }
}

impl Leaf {
    /// Sets an entry to a value that was checked. `writes` counts a write even if it fails.
    fn set_entry(&mut self, place: EntryPlace, entry: &NewEntry<'_>, writes: &mut usize) -> Result<()> {
        let held = self.held();
        let Leaf {
            state,
            steps,
            missing_gradients,
            ..
        } = self;
        let StateValues {
            mut tensors,
            mut counters,
            mut numbers,
        } = state.values_mut();
        counters.extend([
            steps,
            &mut missing_gradients.calls,
            &mut missing_gradients.received,
        ]);
        match (place, &entry.value) {
            (EntryPlace::Tensor(index), value) => set_tensor(&mut *tensors[index], value, held, writes)?,
            (EntryPlace::Counter(index), StateValue::Counter(count)) => {
                *counters[index] = *count;
                *writes += 1;
            }
            (EntryPlace::Number(index), StateValue::Number(number)) => {
                *numbers[index] = *number;
                *writes += 1;
            }
            _ => {}
        }
        self.unsettle();
        Ok(())
    }
}

/// Sets a state tensor, of which this rank has `held`, from `value`, which is the whole tensor.
fn set_tensor(buffer: &mut Buffer, value: &StateValue<'_>, held: Held, writes: &mut usize) -> Result<()> {
    let part = match held {
        Held::Nothing => return Ok(()),
        Held::All => None,
        Held::Part(part) => Some(part),
    };
    match value {
        StateValue::Tensor(values) => {
            let whole = values.tensor_or_copy()?.flatten_all()?;
            let elements = part.map_or(Ok(whole.clone()), |part| whole.narrow(0, part.start, part.len()))?;
            let shaped = elements.reshape(buffer.shape())?;
            *writes += 1;
            Ok(buffer.set(&shaped)?)
        }
        StateValue::Bytes(bytes) => {
            // The count is exact for codes, too, because each part begins with a record.
            let byte_count = |elements: usize| buffer.shape_of(&[elements]).elem_count();
            let own_bytes = part.map_or(&bytes[..], |part| {
                &bytes[byte_count(part.start)..byte_count(part.end)]
            });
            let tensor = Tensor::from_vec(own_bytes.to_vec(), own_bytes.len(), &Device::Cpu)?;
            *writes += 1;
            Ok(buffer.set_stored(0, &tensor)?)
        }
        StateValue::Counter(_) | StateValue::Number(_) => Ok(()),
    }
}

/// Reads the norms of earlier calls from JSON.
fn read_norms(bytes: &[u8]) -> Result<NormHistories> {
    let damaged = || Error::new(ErrorKind::Argument, "the norms of earlier calls are damaged");
    let norms: NormHistories = serde_json::from_slice(bytes).map_err(|error| damaged().caused_by(error))?;
    norms.first_invalid().map_or(Ok(norms), |norm| {
        Err(damaged().with_got(norm).with_expected("0 or more"))
    })
}

/// The shape of a whole state tensor; `None` if another rank has all of the tensor and checks the value.
fn checked_shape<'s>(leaf: &'s Leaf, buffer: &'s Buffer) -> Option<&'s [usize]> {
    match leaf.held() {
        Held::All => Some(buffer.shape()),
        Held::Part(_) => Some(leaf.shape()),
        Held::Nothing => None,
    }
}
