//! The plan of a restore: everything that state and model take over is checked, and nothing is written.
//!
//! 1. Every path of the file is in the state, or excepted.
//! 2. Each leaf has a record of its shape, dtype, rule and names. The leaf's tensors are read for numbers
//!    that are not finite. The schedules of file and program are merged.
//! 3. With a model: each variable has an entry, and each saved parameter is its saved master rounded, unless
//!    the file is converted.
//! 4. The description names every tensor of the file. Counts and norms of the description are in range.
//!
//! Every check of a value is in this module, because a refusal in `assign` (`restore.rs`) would come after
//! other values were written.

use std::collections::{BTreeMap, HashSet};
use std::fmt::{Debug, Display};
use std::ops::Range;
use std::sync::Arc;

use super::defaults::{Replaced, Restored, names_error, saved_values};
use super::file::CheckpointFile;
use super::layout::entry_name;
use super::record::{LeafRecord, Record, ScheduleRecord, bytes_name, damage_error};
use crate::engine::Buffer;
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result, comma_separated, first_names};
use crate::files::tensor_file::read_error;
use crate::model::lent::{Lent, check_parameter};
use crate::numbers::codes::RECORD;
use crate::numbers::{Code, DType, counts, first_negative_in, first_non_finite_in, ranges_to_read};
use crate::rule::field::Number;
use crate::rule::{Adjust, Difference, Extent, FieldValue, Optimiser, OptimiserRecord, difference};
use crate::tensors::Tensor;
use crate::tree::{
    Drives, KeyedCache, Leaf, ScheduleAssignment, ScheduleResolver, StateTree, acting_optimisers,
    check_equal_own_values, check_records, give_to_all,
};

/// The remedy if a number is not finite.
const ACCEPT: &str = "to restore infinities and NaN, call `CheckpointFile::accepting_non_finite` first";

/// The number of saved parameters that the next update compares with the model.
const COMPARED_PARAMETERS: usize = 16;
/// The number of elements of each of these parameters that are compared.
const COMPARED_ELEMENTS: usize = 64;

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

/// The schedules that a leaf goes on with, and the values that it takes over.
pub(super) struct LeafRestoration {
    pub(super) drives: Option<Arc<Drives>>,
    pub(super) acting: Option<Arc<Optimiser>>,
    /// `None` if the leaf is left out.
    pub(super) values: Option<LeafValues>,
}

impl LeafRestoration {
    /// The optimiser that the leaf has after the restore.
    fn optimiser<'r>(&'r self, leaf: &'r Leaf) -> &'r Arc<Optimiser> {
        self.values
            .as_ref()
            .map_or(&leaf.optimiser, |values| &values.optimiser)
    }
}

/// The values that a leaf takes over besides the values of its record.
pub(super) struct LeafValues {
    pub(super) optimiser: Arc<Optimiser>,
    /// The source of each state tensor, in the order of the tensors.
    pub(super) tensors: Vec<EntryPart>,
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
    resolver: ScheduleResolver,
    restored: Restored,
    replaced: Replaced,
}

/// The schedules of the file.
struct SavedSchedules {
    schedules: Vec<ScheduleAssignment>,
    /// The count of steps from which the schedules go on; `None` if the program keeps its own schedules and
    /// count.
    steps: Option<u64>,
}

impl SavedSchedules {
    fn from_file(
        CheckpointFile {
            record,
            keep_settings,
            ..
        }: &CheckpointFile,
    ) -> Result<Self> {
        let assignment = |saved: &ScheduleRecord| {
            let schedule = saved.schedule();
            match schedule.curve.is_ordered() {
                true => Ok(ScheduleAssignment::new(schedule, record.steps, true)),
                false => Err(damage_error("the parts of a schedule are not in order")),
            }
        };
        let schedules = record.schedules.iter().map(assignment).collect::<Result<_>>()?;
        Ok(SavedSchedules {
            schedules,
            steps: (!keep_settings).then_some(record.steps),
        })
    }

    /// The schedules that were given to all leaves, in the file and in the state.
    fn state_schedules(&self, record: &Record, state: &StateTree) -> Result<Vec<ScheduleAssignment>> {
        let mut schedules = Vec::new();
        for schedule in self.merge(Some(&record.for_all), state.schedules.iter().cloned())? {
            give_to_all(&mut schedules, schedule);
        }
        Ok(schedules)
    }

    /// The file's schedules with these indices, and then the program's schedules.
    ///
    /// If both have a schedule for a field, the program's counts. A leaf that is left out (`indices` is `None`)
    /// keeps all schedules of the program.
    fn merge(
        &self,
        indices: Option<&Vec<usize>>,
        program: impl Iterator<Item = ScheduleAssignment>,
    ) -> Result<Vec<ScheduleAssignment>> {
        let continue_here = |schedule: ScheduleAssignment| match self.steps {
            Some(steps) => schedule.restored_at(steps),
            None => schedule,
        };
        let (Some(indices), Some(_)) = (indices, self.steps) else {
            return Ok(program.map(continue_here).collect());
        };
        let unknown = || damage_error("it refers to a schedule that is not there");
        let saved = indices
            .iter()
            .map(|index| self.schedules.get(*index).cloned().ok_or_else(unknown));
        // Schedules of an earlier file are dropped, because this file replaces them.
        let of_program = program.filter(|schedule| !schedule.is_from_file);
        saved
            .chain(of_program.map(|schedule| Ok(continue_here(schedule))))
            .collect()
    }
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
            resolver: ScheduleResolver::default(),
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
            .map(|(leaf, plan)| (leaf.path(), plan.optimiser(leaf), plan.drives.as_ref()));
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
        let values = record
            .map(|record| self.check_values(leaf, record, shared))
            .transpose()?;
        let mut plan = LeafRestoration {
            drives: None,
            acting: None,
            values,
        };
        plan.drives = check_schedules(leaf, record, plan.optimiser(leaf), shared)?;
        if let Some(record) = record.filter(|_| !self.keep_settings) {
            shared
                .replaced
                .compare(leaf, record, plan.optimiser(leaf), plan.drives.as_deref());
        }
        Ok(plan)
    }

    /// The first elements of some parameters in the file, which the next update compares with the model.
    ///
    /// Parameters that have made no step are left out, because such a parameter may be a running statistic,
    /// which a forward pass moves.
    fn saved_starts(&self, state: &StateTree) -> Result<Vec<(String, Tensor)>> {
        let has_moved = |path: &String| self.record.leaves.get(path).is_some_and(|leaf| leaf.steps > 0);
        let is_restored = |path: &&String| !self.convert && has_moved(path) && !self.is_excepted(state, path);
        let paths: Vec<&String> = self.record.model.iter().flatten().filter(is_restored).collect();
        let compared_paths = paths
            .iter()
            .step_by(paths.len().div_ceil(COMPARED_PARAMETERS).max(1));
        let first_elements = |path: &&String| {
            let entry = self.entry(path).filter(|_| state.leaf(path).is_some())?;
            let elements = entry.part(0..entry.elements().min(COMPARED_ELEMENTS));
            Some(
                elements
                    .map(|elements| (path.to_string(), elements))
                    .map_err(read_error),
            )
        };
        compared_paths.filter_map(first_elements).collect()
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

    /// The values that a leaf takes over from its record, checked.
    fn check_values(
        &self,
        leaf: &Leaf,
        record: &LeafRecord,
        shared: &mut SharedChecks,
    ) -> Result<LeafValues> {
        let path = leaf.path();
        if record.shape != leaf.shape() {
            return Err(shape_error(path, &record.shape, leaf.shape()).at(path));
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
        Ok(LeafValues { optimiser, tensors })
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
        let error = dtype_error(
            path,
            format_args!("{}", record.dtype.to_uppercase()),
            leaf.dtype(),
        )
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
        let is_refused =
            |(_, Number(value)): &&(String, Number)| !value.is_finite() && !self.accept_non_finite;
        if let Some((name, Number(value))) = record.numbers.iter().find(is_refused) {
            return Err(not_finite_error(&entry_name(leaf.path(), name), *value, 0));
        }
        for (name, Number(value)) in &record.numbers {
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
            self.check_entry(&source, shape, tensor.stored_dtype(), tensor.is_of_squares())
                .and_then(|()| {
                    tensor
                        .code()
                        .map_or(Ok(()), |code| self.check_codes(&source, code))
                })
                .map_err(|error| error.at(path))?;
            sources.push(source);
        }
        Ok(sources)
    }

    /// The source of each variable, checked.
    fn check_model(
        &self,
        state: &StateTree,
        variables: &BTreeMap<String, Lent<'_>>,
    ) -> Result<Vec<EntryPart>> {
        let saved_paths = self.record.model.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::File, "the file has no model, only optimiser state").with_remedy(
                "save the checkpoint with `Checkpoint::model`, or load the parameters from elsewhere and use \
                 `restore`",
            )
        })?;
        let is_extra = |path: &&String| !self.is_excepted(state, path) && !variables.contains_key(*path);
        if let Some(path) = saved_paths.iter().find(is_extra) {
            return Err(extra_error(path, "model"));
        }
        let known_paths: HashSet<&String> = saved_paths.iter().collect();
        let source = |(path, variable): (&String, &Lent<'_>)| {
            if !known_paths.contains(path) {
                return Err(missing_error(path, saved_paths.iter()));
            }
            check_parameter("variable", &**variable, true).map_err(|error| error.at(path))?;
            let entry = if self.convert {
                self.precise_entry(path)?
            } else {
                path.to_string()
            };
            let source = EntryPart {
                entry,
                elements: 0..variable.elem_count(),
            };
            self.check_entry(&source, Some(variable.shape()), variable.dtype(), false)
                .map_err(|error| error.at(path))?;
            Ok(source)
        };
        variables.iter().map(source).collect()
    }

    /// Refuses a saved parameter that is not its saved master rounded, unless the file is converted. Each
    /// rank compares its part.
    fn check_masters(&self, state: &StateTree) -> Result<()> {
        // Leaves that have had no gradient are not compared, because until the first gradient a program may
        // move the parameter.
        let leaves = self
            .record
            .leaves
            .iter()
            .filter(|(_, leaf)| !self.convert && !leaf.is_unreached());
        for (path, leaf) in leaves.filter(|(path, _)| !self.is_excepted(state, path)) {
            let part = state.leaf(path).map_or(0..0, Leaf::part);
            if let Some(Difference {
                index,
                parameter,
                master,
            }) = self.stale_element(path, leaf, part)?
            {
                let problem =
                    "it was changed outside of `update` before it was saved: its value in the file is";
                let remedy = "use `restore`, load the parameters separately, and call `refresh_masters` or \
                              `Update::keep_masters`";
                let error = Error::new(ErrorKind::Changed, problem)
                    .with_got(parameter)
                    .at_element(index);
                return Err(error
                    .with_expected(format_args!("that of its master, {master}"))
                    .with_remedy(remedy)
                    .at(path));
            }
        }
        Ok(())
    }

    /// The first element of `part` in which a parameter in the file is not its master rounded.
    fn stale_element(&self, path: &str, leaf: &LeafRecord, part: Range<usize>) -> Result<Option<Difference>> {
        let Some(name) = self.record.tensors(leaf).0 else {
            return Ok(None);
        };
        let (Some(master), Some(parameter)) = (self.entry(&entry_name(path, name)), self.entry(path)) else {
            return Ok(None);
        };
        [&master, &parameter]
            .into_iter()
            .try_for_each(|entry| crate::tensors::dtype_from_file(entry.dtype).map(drop))?;
        // Only the common elements are compared, because other checks report a difference of lengths.
        let elements = master.elements().min(parameter.elements());
        for range in ranges_to_read(part.start..part.end.min(elements)) {
            let start = range.start;
            let master_part = master.part(range.clone()).map_err(read_error)?;
            let parameter_part = parameter.part(range).map_err(read_error)?;
            if let Some(first) = difference(&master_part, &parameter_part, Extent::Whole)? {
                return Ok(Some(Difference {
                    index: start + first.index,
                    ..first
                }));
            }
        }
        Ok(None)
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
    /// Numbers have to be finite and, if they are squares, not negative. `shape` is `None` if only another rank
    /// has the shape. A conversion allows another float dtype.
    fn check_entry(
        &self,
        EntryPart {
            entry: name,
            elements,
        }: &EntryPart,
        shape: Option<&[usize]>,
        dtype: DType,
        is_of_squares: bool,
    ) -> Result<()> {
        let entry = self
            .entry(name)
            .ok_or_else(|| Error::new(ErrorKind::File, format!("the file lacks the tensor {name:?}")))?;
        if let Some(shape) = shape.filter(|shape| entry.shape != *shape) {
            return Err(shape_error(name, entry.shape, shape));
        }
        let file_dtype = entry.known_dtype();
        let is_convertible =
            self.convert && file_dtype.is_some_and(|file_dtype| file_dtype.is_float() && dtype.is_float());
        if file_dtype != Some(dtype) && !is_convertible {
            return Err(dtype_error(name, entry.dtype, dtype));
        }
        let first_unfit = |bytes: &[u8], file_dtype| {
            let non_finite = if self.accept_non_finite {
                None
            } else {
                first_non_finite_in(bytes, file_dtype, dtype)
            };
            non_finite.or_else(|| is_of_squares.then(|| first_negative_in(bytes, file_dtype))?)
        };
        match entry
            .find_first(elements.clone(), first_unfit)
            .map_err(read_error)?
        {
            None => Ok(()),
            Some((index, value)) if is_of_squares && value < 0.0 => {
                Err(Error::new(ErrorKind::Tensor, format!("{} is", in_file(name)))
                    .with_got(value)
                    .at_element(index)
                    .with_expected("a number that is not negative, because squares are not"))
            }
            // The number is finite in the file, but rounds to infinity in `dtype`.
            Some((index, value)) if value.is_finite() => {
                Err(Error::too_large(in_file(name), value, index, dtype).with_remedy(
                    "to round the number to infinity, call `CheckpointFile::accepting_non_finite` first",
                ))
            }
            Some((index, value)) => Err(not_finite_error(name, value, index)),
        }
    }

    /// Refuses records of codes with a negative scale or a number that is not finite.
    fn check_codes(
        &self,
        EntryPart {
            entry: name,
            elements,
        }: &EntryPart,
        code: Code,
    ) -> Result<()> {
        const RECORDS_READ: usize = 1 << 10;
        let Some(entry) = self.entry(name) else {
            return Ok(());
        };
        let rows = elements.start / RECORD..elements.end / RECORD;
        for first in rows.clone().step_by(RECORDS_READ) {
            let records = entry
                .part(first * RECORD..rows.end.min(first + RECORDS_READ) * RECORD)
                .map_err(read_error)?;
            let remedy = (!self.accept_non_finite).then_some(ACCEPT);
            check_records(&in_file(name), &records.to_vec1()?, first, code, remedy)?;
        }
        Ok(())
    }

    /// The entry with the most precise copy of a parameter: its master, if there is one.
    ///
    /// If the program moved the parameter before the first gradient, the master is out of date, and a
    /// conversion takes the parameter itself.
    fn precise_entry(&self, path: &str) -> Result<String> {
        let mut leaf = self.record.leaves.get(path);
        if let Some(unreached) = leaf.filter(|leaf| self.convert && leaf.is_unreached()) {
            // Each rank compares the whole parameter and not its part, because all have to choose the same
            // entry.
            match self.stale_element(path, unreached, 0..usize::MAX) {
                Err(error) if error.kind() == ErrorKind::Io => return Err(error),
                Ok(Some(_)) => leaf = None,
                _ => {}
            }
        }
        let master = leaf.and_then(|leaf| self.record.tensors(leaf).0);
        Ok(master.map_or_else(|| path.to_string(), |master| entry_name(path, master)))
    }
}

/// The schedules that the leaf goes on with, resolved in the optimiser that it will have.
fn check_schedules(
    leaf: &Leaf,
    record: Option<&LeafRecord>,
    optimiser: &Arc<Optimiser>,
    shared: &mut SharedChecks,
) -> Result<Option<Arc<Drives>>> {
    let path = leaf.path();
    let indices = record.map(|record| &record.schedules);
    let resolved = shared
        .saved_schedules
        .merge(indices, leaf.schedules().cloned())
        .and_then(|schedules| shared.resolver.resolve(optimiser, schedules.into_iter()))
        .map_err(|error| error.at(path))?;
    match resolved.missing.first() {
        Some(field) => {
            Err(damage_error(format_args!("a schedule drives {field:?}, which the rule lacks")).at(path))
        }
        None => Ok(resolved.drives),
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
fn missing_error<'p>(path: &str, available: impl Iterator<Item = &'p String>) -> Error {
    Error::new(ErrorKind::Model, "the file lacks this parameter; the file has:")
        .with_got(comma_separated(&first_names(available)))
        .with_remedy(PASS_THE_MODEL)
        .at(path)
}

/// The error that the file has a parameter that the state or model lacks.
fn extra_error(path: &str, place: &str) -> Error {
    let problem = format!("the file has this parameter, but the {place} does not");
    Error::new(ErrorKind::Model, problem)
        .with_remedy(PASS_THE_MODEL)
        .at(path)
}

/// The name of a tensor of the file in errors.
fn in_file(entry: &str) -> String {
    format!("the file's {entry:?}")
}

fn shape_error(entry: &str, got: &[usize], expected: &[usize]) -> Error {
    Error::shape(in_file(entry), got, expected).with_remedy(PASS_THE_MODEL)
}

fn dtype_error(entry: &str, got: impl Debug, expected: DType) -> Error {
    let remedy = "to convert the tensors, call `CheckpointFile::converting` first";
    Error::dtype(in_file(entry), got, format_args!("{expected:?}")).with_remedy(remedy)
}

fn not_finite_error(entry: &str, value: f64, element: usize) -> Error {
    Error::not_finite(in_file(entry), value, element).with_remedy(ACCEPT)
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
