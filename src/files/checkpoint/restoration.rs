//! The plan of a restore: everything that state and model take over is checked, and nothing is written.
//!
//! 1. Every path of the file is in the state, or excepted.
//! 2. Each leaf has a record of its shape, dtype, rule and names. The leaf's tensors are read for numbers
//!    that may not be written. The schedules of file and program are merged.
//! 3. With a model: each variable has an entry, and each saved parameter is its saved master rounded, unless
//!    the file is converted.
//! 4. The description names every tensor of the file. Counts and norms of the description are in range.
//!
//! Values are checked here, in `saved_model.rs` and in `saved_schedules.rs`, and not in `assign`
//! (`restore.rs`), where a refusal would come after other values were written.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use super::defaults::{Replaced, Restored, names_error, saved_values};
use super::file::CheckpointFile;
use super::layout::entry_name;
use super::record::{LeafRecord, bytes_name, damage_error};
use super::saved_schedules::SavedSchedules;
use crate::engine::Buffer;
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result, comma_separated, first_names};
use crate::files::tensor_file::read_error;
use crate::model::lent::Lent;
use crate::numbers::{DType, Requirements, check_finite, counts};
use crate::rule::field::Number;
use crate::rule::{Adjust, FieldValue, Optimiser, OptimiserRecord};
use crate::tensors::Tensor;
use crate::tree::{
    Drives, KeyedCache, Leaf, ScheduleAssignment, StateTree, acting_optimisers, check_equal_own_values,
};

/// The remedy for another dtype.
const CALL_CONVERTING: &str = "to convert the tensors, call `CheckpointFile::converting` first";

/// The remedy if a file does not fit the model.
const PASS_THE_MODEL: &str =
    "pass the model that was saved, or leave parameters out with `CheckpointFile::except`";

/// The values that state and model take over.
pub(super) struct Restoration {
    pub(super) leaves: Vec<LeafRestoration>,
    /// The schedules of all leaves.
    pub(super) schedules: Vec<ScheduleAssignment>,
    /// The source of each variable of the model, in the order of the variables.
    pub(super) variables: Vec<EntryPart>,
    pub(super) restored: Restored,
    /// The warning about settings of the program that the file replaces.
    pub(super) replaced: Option<Warning>,
    /// See [`StateTree::saved_starts`].
    pub(super) saved_starts: Vec<(String, Tensor)>,
}

/// Elements of an entry.
pub(super) struct EntryPart {
    pub(super) entry: String,
    pub(super) elements: Range<usize>,
}

/// The optimiser and the schedules that a leaf goes on with, and the tensors that it takes over.
pub(super) struct LeafRestoration {
    pub(super) optimiser: Arc<Optimiser>,
    pub(super) drives: Option<Arc<Drives>>,
    pub(super) acting: Option<Arc<Optimiser>>,
    /// The source of each state tensor, in the order of the tensors. `None` if the leaf is left out.
    pub(super) tensors: Option<Vec<EntryPart>>,
}

/// The options and results that the checks of all leaves share.
struct SharedChecks {
    /// Whether the model is restored, too.
    with_model: bool,
    saved_schedules: SavedSchedules,
    /// The optimisers with the hyper-parameters of the file.
    ///
    /// The key is the optimiser of the state and the index in the file. Leaves with the same key share an
    /// optimiser.
    optimisers: KeyedCache<(*const (), usize), Arc<Optimiser>>,
    restored: Restored,
    replaced: Replaced,
}

impl CheckpointFile {
    /// Checks everything that state and model would take over.
    pub(super) fn restoration(
        &self,
        state: &StateTree,
        variables: Option<&BTreeMap<String, Lent<'_>>>,
    ) -> Result<Restoration> {
        self.plan(state, variables)
            .map_err(|error| error.in_file("checkpoint", &self.path))
    }

    /// [`CheckpointFile::restoration`], with errors that do not name the file.
    fn plan(&self, state: &StateTree, variables: Option<&BTreeMap<String, Lent<'_>>>) -> Result<Restoration> {
        self.tensors.check_unchanged().map_err(read_error)?;
        let restored = Restored {
            passed_over: self.check_paths(state)?,
            ..Restored::default()
        };
        let mut replaced = Replaced::default();
        if !self.keep_settings {
            replaced.compare_steps(state.began_at, &self.record);
        }
        let mut shared = SharedChecks {
            with_model: variables.is_some(),
            saved_schedules: SavedSchedules::from_file(self)?,
            optimisers: KeyedCache::default(),
            restored,
            replaced,
        };
        let schedules = shared.saved_schedules.state_schedules(&self.record, state)?;
        let leaves = self.check_leaves(state, &mut shared)?;
        let mut sources = Vec::new();
        if let Some(variables) = variables {
            sources = self.check_model(state, variables)?;
            self.check_masters(state)?;
        }
        self.check_complete()?;
        self.check_counts()?;
        Ok(Restoration {
            leaves,
            schedules,
            variables: sources,
            restored: shared.restored,
            replaced: shared.replaced.warning(),
            saved_starts: self.saved_starts(state)?,
        })
    }

    /// Refuses a path of the file that is neither in the state nor excepted. Returns the excepted paths.
    fn check_paths(&self, state: &StateTree) -> Result<Vec<String>> {
        let mut passed_over = Vec::new();
        for path in self.record.leaves.keys() {
            if self.is_excepted(state, path) {
                passed_over.push(path.clone());
            } else if state.leaf(path).is_none_or(|leaf| leaf.path() != path) {
                return Err(extra_error(path, "state"));
            }
        }
        Ok(passed_over)
    }

    /// Checks each leaf, and then the acting optimisers and the shared rates of all leaves.
    fn check_leaves(&self, state: &StateTree, shared: &mut SharedChecks) -> Result<Vec<LeafRestoration>> {
        let mut plans = Vec::with_capacity(state.len());
        for leaf in state.leaves() {
            plans.push(self.check_leaf(state, leaf, shared)?);
        }
        let optimisers = state
            .leaves()
            .zip(&plans)
            .map(|(leaf, plan)| (leaf.path(), &plan.optimiser, plan.drives.as_ref()));
        let acting = acting_optimisers(optimisers, shared.saved_schedules.steps.unwrap_or(state.steps))?;
        plans
            .iter_mut()
            .zip(acting)
            .for_each(|(plan, acting)| plan.acting = acting);
        let drives = plans.iter().map(|plan| plan.drives.as_deref());
        check_equal_own_values(state.leaves().map(Leaf::path).zip(drives))?;
        Ok(plans)
    }

    /// The plan of a leaf, still without the acting optimiser.
    fn check_leaf(
        &self,
        state: &StateTree,
        leaf: &Leaf,
        shared: &mut SharedChecks,
    ) -> Result<LeafRestoration> {
        let (path, leaves) = (leaf.path(), &self.record.leaves);
        let record = if self.is_excepted(state, path) {
            shared.restored.left.push(path.to_string());
            None
        } else {
            shared.restored.taken.push(path.to_string());
            Some(
                leaves
                    .get(path)
                    .ok_or_else(|| missing_error(path, leaves.keys()))?,
            )
        };
        let (optimiser, tensors) = match record {
            Some(record) => {
                let (optimiser, tensors) = self.check_values(leaf, record, shared)?;
                (optimiser, Some(tensors))
            }
            None => (leaf.optimiser.clone(), None),
        };
        let drives = shared
            .saved_schedules
            .resolve(leaf, record, &optimiser)
            .map_err(|error| error.at(path))?;
        if let Some(record) = record.filter(|_| !self.keep_settings) {
            shared
                .replaced
                .compare(leaf, record, &optimiser, drives.as_deref());
        }
        Ok(LeafRestoration {
            optimiser,
            drives,
            acting: None,
            tensors,
        })
    }

    /// Refuses a pattern that leaves out nothing, because it may be mistyped.
    pub(super) fn check_patterns_match(
        &self,
        state: &StateTree,
        variables: Option<&BTreeMap<String, Lent<'_>>>,
    ) -> Result<()> {
        let model_paths = self
            .record
            .model
            .iter()
            .flatten()
            .chain(variables.into_iter().flat_map(BTreeMap::keys));
        let file_paths = self.record.leaves.keys().chain(model_paths).map(String::as_str);
        let all_paths = file_paths.chain(state.leaves().flat_map(Leaf::paths));
        self.except
            .check_matched(all_paths)
            .map_err(|error| error.in_file("checkpoint", &self.path))
    }

    /// The optimiser and the sources of the state tensors that a leaf takes over from its record, checked.
    fn check_values(
        &self,
        leaf: &Leaf,
        record: &LeafRecord,
        shared: &mut SharedChecks,
    ) -> Result<(Arc<Optimiser>, Vec<EntryPart>)> {
        let path = leaf.path();
        if record.shape != leaf.shape() {
            let error = Error::shape(in_file(path), &record.shape, leaf.shape());
            return Err(error.with_remedy(PASS_THE_MODEL).at(path));
        }
        let unknown = || damage_error("the parameter refers to an optimiser that is not there").at(path);
        let saved_optimiser = self.record.optimisers.get(record.optimiser).ok_or_else(unknown)?;
        self.check_leaf_dtype(leaf, record, saved_optimiser)?;
        let SharedChecks {
            with_model,
            optimisers,
            restored,
            ..
        } = shared;
        let key = (Arc::as_ptr(&leaf.optimiser).cast::<()>(), record.optimiser);
        let optimiser =
            optimisers.get_or_make(key, || self.check_optimiser(leaf, saved_optimiser, restored))?;
        check_leaf_counts(record).map_err(|error| error.at(path))?;
        let counters = leaf.counters().into_iter().map(|(name, _)| name).collect();
        let saved_counters = record.counters.iter().map(|(name, _)| name);
        check_same_names(path, saved_optimiser, "counters", saved_counters, counters)?;
        let numbers = leaf.numbers().into_iter().map(|(name, _)| name).collect();
        let saved_numbers = record.numbers.iter().map(|(name, _)| name);
        check_same_names(path, saved_optimiser, "numbers", saved_numbers, numbers)?;
        self.check_numbers(leaf, record).map_err(|error| error.at(path))?;
        let tensors = self.check_tensors(leaf, record, saved_optimiser, *with_model)?;
        Ok((optimiser, tensors))
    }

    /// Refuses a parameter of another dtype, unless the file is converted.
    fn check_leaf_dtype(
        &self,
        leaf: &Leaf,
        record: &LeafRecord,
        saved_optimiser: &OptimiserRecord,
    ) -> Result<()> {
        let path = leaf.path();
        if record.dtype == leaf.dtype().as_str() {
            return Ok(());
        }
        let dtype = format_args!("{}", record.dtype.to_uppercase());
        let error = Error::dtype(in_file(path), dtype, leaf.dtype())
            .with_remedy(CALL_CONVERTING)
            .at(path);
        if !self.convert {
            return Err(error);
        }
        if !saved_optimiser.storage().is_convertible() {
            let remedy = "cannot be converted: restore with the dtype of the file, and then replace the rule";
            return Err(error.with_remedy(format!("the state of {saved_optimiser} {remedy}")));
        }
        Ok(())
    }

    /// Refuses numbers of a leaf that are not finite or out of range.
    fn check_numbers(&self, leaf: &Leaf, record: &LeafRecord) -> Result<()> {
        for (name, Number(value)) in &record.numbers {
            let label = in_file(&entry_name(leaf.path(), name));
            check_finite(&label, *value, self.on_non_finite())?;
            if let Some(expected) = leaf.state.number_fault(name, *value) {
                let error = damage_error(format_args!("the number {name:?} is"));
                return Err(error.with_got(FieldValue::Real(*value)).with_expected(expected));
            }
        }
        Ok(())
    }

    /// The leaf's optimiser with the hyper-parameters of the file, or defaults where the file lacks them.
    /// Differences from the program's values are added to `restored`.
    fn check_optimiser(
        &self,
        leaf: &Leaf,
        saved_optimiser: &OptimiserRecord,
        restored: &mut Restored,
    ) -> Result<Arc<Optimiser>> {
        let (path, mut optimiser) = (leaf.path(), leaf.optimiser().clone());
        let record = optimiser.description().record();
        let has_same_rule = || record.rule().difference(saved_optimiser.rule()).is_none();
        let is_convertible = record.storage().is_convertible()
            && saved_optimiser.storage().is_convertible()
            && has_same_rule();
        let difference = record.difference(saved_optimiser);
        if let Some(difference) = difference.as_ref().filter(|_| !(self.convert && is_convertible)) {
            let remedy = match is_convertible {
                true => {
                    "set up the state with the rule of the file, or call `CheckpointFile::converting` first"
                }
                false => "set up the state with the rule of the file, restore, and then replace the rule",
            };
            let problem = format!("the file is of another rule{}:", difference.details());
            let error = Error::new(ErrorKind::OtherRule, problem).with_got(saved_optimiser);
            return Err(error.with_expected(record).with_remedy(remedy).at(path));
        }
        let description = optimiser.description();
        let values = match difference {
            None => saved_values(path, description, saved_optimiser, restored),
            Some(_) => saved_values(path, description.rule(), saved_optimiser.rule(), restored),
        }?;
        // Not before `saved_values`, which lists the differences.
        if self.keep_settings {
            return Ok(leaf.optimiser.clone());
        }
        optimiser
            .set_fields(&values)
            .and_then(|()| optimiser.check())
            .map_err(|error| error.at(path))?;
        Ok(Arc::new(optimiser))
    }

    /// The source of each of the leaf's tensors, checked.
    fn check_tensors(
        &self,
        leaf: &Leaf,
        record: &LeafRecord,
        saved_optimiser: &OptimiserRecord,
        with_model: bool,
    ) -> Result<Vec<EntryPart>> {
        let path = leaf.path();
        let tensors = leaf.state.tensors();
        let is_master = |tensor: &Buffer| leaf.state.is_outer_master(tensor);
        let (saved_master, saved_others) = self.record.tensors(record);
        // A conversion may add or drop masters. An offloaded parameter has a copy only if it is not on the
        // CPU, and the file may come from another device.
        let ignores_masters = self.convert || saved_optimiser.storage().offloaded;
        let compared_tensors = tensors
            .iter()
            .filter(|(_, tensor)| !ignores_masters || !is_master(tensor));
        let names = compared_tensors.map(|(name, _)| name.clone()).collect();
        let saved_names = if ignores_masters {
            saved_others
        } else {
            &record.tensors
        };
        check_same_names(path, saved_optimiser, "tensors", saved_names.iter(), names)?;
        let has_master = leaf.state.outer_master().is_some();
        match saved_master {
            Some(_) if !has_master && !with_model => {
                let problem = "the file has a master, but the state does not, so the parameter itself must \
                               be restored from the master";
                return Err(Error::new(ErrorKind::Unsupported, problem)
                    .with_remedy("pass the model with `restore_with_model`")
                    .at(path));
            }
            None if has_master && self.record.model.is_none() => {
                let problem = "the file has neither a master nor the parameter itself";
                return Err(Error::new(ErrorKind::File, problem)
                    .with_remedy("save the checkpoint with `Checkpoint::model`")
                    .at(path));
            }
            _ => {}
        }
        let mut sources = Vec::with_capacity(tensors.len());
        for (name, tensor) in tensors {
            let entry = if is_master(tensor) {
                self.precise_entry(path)?
            } else {
                entry_name(path, &name)
            };
            // `elements` is `None` if another rank has the tensor. That rank checks the tensor.
            let (shape, elements) = leaf.stored_extent(tensor).unzip();
            let source = EntryPart {
                entry,
                elements: elements.unwrap_or(0..0),
            };
            let shape = shape.as_ref().map(crate::tensors::Shape::dims);
            self.check_entry(&source, shape, tensor.stored_dtype(), Some(tensor))
                .map_err(|error| error.at(path))?;
            sources.push(source);
        }
        Ok(sources)
    }

    /// Refuses a file with a tensor that its description does not name.
    fn check_complete(&self) -> Result<()> {
        let tensors = self
            .record
            .leaves
            .iter()
            .flat_map(|(path, leaf)| leaf.tensors.iter().map(|name| entry_name(path, name)));
        let mut names: HashSet<String> = tensors.collect();
        names.extend(self.record.model.iter().flatten().cloned());
        names.extend(self.record.bytes.iter().map(|name| bytes_name(name)));
        match self
            .tensor_names()
            .into_iter()
            .find(|entry| !names.contains(entry))
        {
            Some(entry) => Err(Error::new(
                ErrorKind::File,
                format!("the file has the tensor {entry:?}, which its description does not name"),
            )),
            None => Ok(()),
        }
    }

    /// Refuses counts that no program reaches, and a norm that cannot be one.
    fn check_counts(&self) -> Result<()> {
        check_count("the count of applied steps is", self.record.steps)?;
        check_count(
            "the count of calls for windows of accumulation is",
            self.record.calls,
        )?;
        match self.record.norms.first_invalid() {
            Some(norm) => Err(damage_error(format_args!(
                "{norm} is among the norms of earlier calls"
            ))),
            None => Ok(()),
        }
    }

    /// Refuses an entry of another shape or dtype, or with numbers in `elements` that do not fit.
    ///
    /// `shape` is `None` if only another rank has the shape. `tensor` is `None` for a variable of the model.
    pub(super) fn check_entry(
        &self,
        EntryPart {
            entry: name,
            elements,
        }: &EntryPart,
        shape: Option<&[usize]>,
        dtype: DType,
        tensor: Option<&Buffer>,
    ) -> Result<()> {
        let entry = self
            .entry(name)
            .ok_or_else(|| Error::new(ErrorKind::File, format!("the file lacks the tensor {name:?}")))?;
        let required = Requirements {
            label: &in_file(name),
            shape,
            dtype,
            code: tensor.and_then(Buffer::code),
            is_non_negative: tensor.is_some_and(Buffer::is_of_squares),
            on_other_shape: PASS_THE_MODEL,
            on_other_dtype: (!self.convert).then_some(CALL_CONVERTING),
            on_non_finite: self.on_non_finite(),
        };
        entry.check_values(&required, elements.clone())
    }

    /// [`Requirements::on_non_finite`] for this file.
    fn on_non_finite(&self) -> Option<&'static str> {
        (!self.accept_non_finite).then_some("call `CheckpointFile::accepting_non_finite` first")
    }
}

/// Refuses a leaf with a count that no program reaches.
fn check_leaf_counts(record: &LeafRecord) -> Result<()> {
    let counters = record
        .counters
        .iter()
        .map(|(name, count)| (name.as_str(), *count));
    for (name, count) in counters.chain([("steps", record.steps), ("waited", record.waited)]) {
        check_count(format_args!("the count {name:?} is"), count)?;
    }
    Ok(())
}

/// Refuses a count of the description that no program reaches.
fn check_count(problem: impl Display, count: u64) -> Result<()> {
    match counts::too_large(count) {
        Some(expected) => Err(damage_error(problem).with_got(count).with_expected(expected)),
        None => Ok(()),
    }
}

/// The error that the file lacks a parameter.
pub(super) fn missing_error<'p>(path: &str, available: impl Iterator<Item = &'p String>) -> Error {
    Error::new(ErrorKind::Model, "the file lacks this parameter; the file has:")
        .with_got(comma_separated(&first_names(available)))
        .with_remedy(PASS_THE_MODEL)
        .at(path)
}

/// The error that the file has a parameter that the state or model lacks.
pub(super) fn extra_error(path: &str, place: &str) -> Error {
    let problem = format!("the file has this parameter, but the {place} does not");
    Error::new(ErrorKind::Model, problem)
        .with_remedy(PASS_THE_MODEL)
        .at(path)
}

/// The name of a tensor of the file in errors.
fn in_file(entry: &str) -> String {
    format!("the file's {entry:?}")
}

/// Refuses a file whose names are not the expected names in the expected order.
fn check_same_names<'n>(
    path: &str,
    saved_optimiser: &OptimiserRecord,
    kind: &'static str,
    names: impl Iterator<Item = &'n String> + Clone,
    expected: Vec<String>,
) -> Result<()> {
    match names.clone().eq(&expected) {
        true => Ok(()),
        false => Err(names_error(path, saved_optimiser, kind, names, expected)),
    }
}
