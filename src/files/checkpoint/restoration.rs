//! The plan of a restore: everything that state and model take over is checked, and nothing is written.
//!
//! 1. Every path of the file is in the state, or excepted.
//! 2. Each leaf has a record of its shape, dtype, rule and names. Its tensors are read for numbers that are
//!    not finite. The schedules of file and program are joined.
//! 3. With a model: each variable has an entry, and each saved parameter is its saved master rounded, unless
//!    the file is converted.
//! 4. The description names every tensor of the file, and the counts and norms in it are in range.
//!
//! A check of a value belongs here: a refusal in `assign` (`restore.rs`) would come after other values were
//! written.

use std::collections::{BTreeMap, HashSet};
use std::fmt::{Debug, Display};
use std::ops::Range;
use std::sync::Arc;

use super::defaults::{Replaced, Restored, other_names, saved_values};
use super::file::CheckpointFile;
use super::layout::entry_name;
use super::record::{LeafRecord, ScheduleRecord, bytes_name, damaged};
use crate::engine::Buffer;
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result, joined, listed};
use crate::files::tensor_file::read_error;
use crate::model::lent::{Lent, check_parameter};
use crate::numbers::codes::RECORD;
use crate::numbers::{Code, DType, counts, first_negative_in, first_non_finite_in, ranges};
use crate::rule::field::Number;
use crate::rule::{Adjust, Difference, Extent, FieldValue, Optimiser, OptimiserRecord, difference};
use crate::tensors::Tensor;
use crate::tree::{
    Drives, GivenSchedule, Leaf, Once, ScheduleResolver, StateTree, acting, check_one_rate, check_records,
    give_to_all,
};

/// The remedy if a number is not finite.
const ACCEPT: &str = "to restore infinities and NaN, call `CheckpointFile::accepting_non_finite` first";

/// How many parameters of a file are compared with the model in the next update, and how many elements of
/// each.
const STARTS: usize = 16;
const START: usize = 64;

/// The remedy if a file does not fit the model.
const PASS_THE_MODEL: &str =
    "pass the model that was saved, or leave parameters out with `CheckpointFile::except`";

/// The values that state and model take over.
pub(super) struct Restoration {
    pub(super) leaves: Vec<LeafRestoration>,
    /// The schedules of all leaves.
    pub(super) schedules: Vec<GivenSchedule>,
    /// The source of each variable of the model, in their order.
    pub(super) variables: Vec<EntryPart>,
    pub(super) restored: Restored,
    /// The warning of settings of the program that the file replaces.
    pub(super) replaced: Option<Warning>,
    /// See [`StateTree::saved_starts`].
    pub(super) saved_starts: Vec<(String, Tensor)>,
}

/// Elements of an entry.
pub(super) struct EntryPart {
    pub(super) entry: String,
    pub(super) elements: Range<usize>,
}

/// The schedules that a leaf goes on with, and the values that it takes over, unless it is left out.
pub(super) struct LeafRestoration {
    pub(super) drives: Option<Arc<Drives>>,
    pub(super) acting: Option<Arc<Optimiser>>,
    pub(super) values: Option<LeafValues>,
}

/// What a leaf takes over besides the values of its record.
pub(super) struct LeafValues {
    pub(super) optimiser: Arc<Optimiser>,
    /// The source of each state tensor, in their order.
    pub(super) tensors: Vec<EntryPart>,
}

/// The optimisers with the hyper-parameters of the file.
#[derive(Default)]
struct Optimisers {
    /// By the optimiser of the state and the index in the file, so that leaves with both in common share one.
    known: Once<(*const (), usize), Arc<Optimiser>>,
    resolver: ScheduleResolver,
    restored: Restored,
}

/// The schedules of the file.
struct SavedSchedules {
    all: Vec<GivenSchedule>,
    /// The count of steps from which they go on; `None` if the program keeps its own schedules and count.
    at: Option<u64>,
}

impl SavedSchedules {
    fn of(CheckpointFile { record, keep_settings, .. }: &CheckpointFile) -> Result<Self> {
        let schedule = |saved: &ScheduleRecord| {
            let schedule = saved.schedule();
            match schedule.curve.is_ordered() {
                true => Ok(GivenSchedule::new(schedule, record.steps, true)),
                false => Err(damaged("the parts of a schedule are not in order")),
            }
        };
        let all = record.schedules.iter().map(schedule).collect::<Result<_>>()?;
        Ok(SavedSchedules { all, at: (!keep_settings).then_some(record.steps) })
    }

    /// The schedules of a leaf, or of all: first those of the file with the indices `saved`, then the
    /// program's, which count if both have one for a field. A leaf that is left out (`saved` is `None`) keeps
    /// all that it has.
    fn with(
        &self,
        saved: Option<&Vec<usize>>,
        given: impl Iterator<Item = GivenSchedule>,
    ) -> Result<Vec<GivenSchedule>> {
        let going_on = |given: GivenSchedule| match self.at {
            Some(at) => given.restored_at(at),
            None => given,
        };
        let (Some(saved), Some(_)) = (saved, self.at) else { return Ok(given.map(going_on).collect()) };
        let unknown = || damaged("it refers to a schedule that is not there");
        let saved = saved.iter().map(|index| self.all.get(*index).cloned().ok_or_else(unknown));
        // Without those of an earlier file, because this file replaces them.
        let of_program = given.filter(|given| !given.is_of_file);
        saved.chain(of_program.map(|given| Ok(going_on(given)))).collect()
    }
}

impl CheckpointFile {
    pub(super) fn restoration(
        &self,
        state: &StateTree,
        variables: Option<&BTreeMap<String, Lent<'_>>>,
    ) -> Result<Restoration> {
        self.check(state, variables).map_err(|error| error.in_file("checkpoint", &self.path))
    }

    fn check(
        &self,
        state: &StateTree,
        variables: Option<&BTreeMap<String, Lent<'_>>>,
    ) -> Result<Restoration> {
        self.tensors.check_unchanged().map_err(read_error)?;
        let leaves = &self.record.leaves;
        let mut optimisers = Optimisers::default();
        for path in leaves.keys() {
            if self.leaves_out(state, path) {
                optimisers.restored.passed_over.push(path.clone());
            } else if state.leaf(path).is_none_or(|leaf| leaf.path() != path) {
                return Err(extra(path, "state"));
            }
        }
        let mut replaced = Replaced::default();
        if !self.keep_settings {
            replaced.compare_steps(state.began_at, &self.record);
        }
        let saved = SavedSchedules::of(self)?;
        let mut schedules = Vec::new();
        for given in saved.with(Some(&self.record.for_all), state.schedules.iter().cloned())? {
            give_to_all(&mut schedules, given);
        }
        let mut plans = Vec::with_capacity(state.len());
        for leaf in state.leaves() {
            let path = leaf.path();
            let record = if self.leaves_out(state, path) {
                optimisers.restored.left.push(path.to_string());
                None
            } else {
                optimisers.restored.taken.push(path.to_string());
                Some(leaves.get(path).ok_or_else(|| missing(path, leaves.keys()))?)
            };
            let check = |record| self.check_leaf(leaf, record, variables.is_some(), &mut optimisers);
            let values = record.map(check).transpose()?;
            let optimiser = values.as_ref().map_or(&leaf.optimiser, |values| &values.optimiser);
            let given = saved.with(record.map(|record| &record.schedules), leaf.schedules().cloned());
            let resolved = given.and_then(|given| optimisers.resolver.of(optimiser, given.into_iter()));
            let resolved = resolved.map_err(|error| error.at(path))?;
            if let Some(field) = resolved.missing.first() {
                return Err(
                    damaged(format_args!("a schedule drives {field:?}, which the rule lacks")).at(path)
                );
            }
            if let Some(record) = record.filter(|_| !self.keep_settings) {
                replaced.compare(leaf, record, optimiser, resolved.drives.as_deref());
            }
            plans.push(LeafRestoration { drives: resolved.drives, acting: None, values });
        }
        let own = state.leaves().zip(&plans).map(|(leaf, LeafRestoration { drives, values, .. })| {
            let optimiser = values.as_ref().map_or(&leaf.optimiser, |values| &values.optimiser);
            (leaf.path(), optimiser, drives.as_ref())
        });
        let acting = acting(own, saved.at.unwrap_or(state.steps))?;
        plans.iter_mut().zip(acting).for_each(|(plan, acting)| plan.acting = acting);
        let drives = plans.iter().map(|plan| plan.drives.as_deref());
        check_one_rate(state.leaves().map(Leaf::path).zip(drives))?;
        let sources = variables.map_or(Ok(Vec::new()), |variables| self.check_model(state, variables))?;
        if variables.is_some() {
            self.check_masters(state)?;
        }
        self.check_complete()?;
        let counts =
            [("applied steps", self.record.steps), ("calls for windows of accumulation", self.record.calls)];
        for (name, count) in counts {
            check_count(format_args!("the count of {name} is"), count)?;
        }
        if let Some(norm) = self.record.norms.first_invalid() {
            return Err(damaged(format_args!("{norm} is among the norms of earlier calls")));
        }
        let saved_starts = self.starts(state)?;
        let restored = optimisers.restored;
        let replaced = replaced.warning();
        Ok(Restoration { leaves: plans, schedules, variables: sources, restored, replaced, saved_starts })
    }

    /// The first elements of some parameters in the file, so that the next update can compare them. Without
    /// those that have made no step, because a forward pass moves running statistics.
    fn starts(&self, state: &StateTree) -> Result<Vec<(String, Tensor)>> {
        let has_moved = |path: &String| self.record.leaves.get(path).is_some_and(|leaf| leaf.steps > 0);
        let is_taken = |path: &&String| !self.convert && has_moved(path) && !self.leaves_out(state, path);
        let of_model: Vec<&String> = self.record.model.iter().flatten().filter(is_taken).collect();
        let some = of_model.iter().step_by(of_model.len().div_ceil(STARTS).max(1));
        let start = |path: &&String| {
            let entry = self.entry(path).filter(|_| state.leaf(path).is_some())?;
            let start = entry.part(0..entry.elements().min(START));
            Some(start.map(|start| (path.to_string(), start)).map_err(read_error))
        };
        some.filter_map(start).collect()
    }

    /// Refuses a pattern that leaves out nothing, because it may be mistyped.
    pub(super) fn check_excepted(
        &self,
        state: &StateTree,
        variables: Option<&BTreeMap<String, Lent<'_>>>,
    ) -> Result<()> {
        let of_model =
            self.record.model.iter().flatten().chain(variables.into_iter().flat_map(BTreeMap::keys));
        let of_file = self.record.leaves.keys().chain(of_model).map(String::as_str);
        let all = of_file.chain(state.leaves().flat_map(Leaf::paths));
        self.except.check_matched(all).map_err(|error| error.in_file("checkpoint", &self.path))
    }

    fn check_leaf(
        &self,
        leaf: &Leaf,
        record: &LeafRecord,
        with_model: bool,
        optimisers: &mut Optimisers,
    ) -> Result<LeafValues> {
        let path = leaf.path();
        if record.shape != leaf.shape() {
            return Err(other_shape(path, &record.shape, leaf.shape()).at(path));
        }
        let saved = self.record.optimisers.get(record.optimiser);
        let saved = saved
            .ok_or_else(|| damaged("the parameter refers to an optimiser that is not there").at(path))?;
        if record.dtype != leaf.dtype().as_str() {
            let other =
                || other_dtype(path, format_args!("{}", record.dtype.to_uppercase()), leaf.dtype()).at(path);
            if !self.convert {
                return Err(other());
            }
            if !saved.storage().is_convertible() {
                let remedy =
                    "cannot be converted: restore with the dtype of the file, and then replace the rule";
                return Err(other().with_remedy(format!("the state of {saved} {remedy}")));
            }
        }
        let key = (Arc::as_ptr(&leaf.optimiser).cast::<()>(), record.optimiser);
        let Optimisers { known, restored, .. } = optimisers;
        let optimiser = known.get(key, || self.check_optimiser(leaf, saved, restored))?;
        let counts = record
            .counters
            .iter()
            .map(|(name, count)| (name.as_str(), *count))
            .chain([("steps", record.steps), ("waited", record.waited)]);
        for (name, count) in counts {
            check_count(format_args!("the count {name:?} is"), count).map_err(|error| error.at(path))?;
        }
        let counters = leaf.counters().into_iter().map(|(name, _)| name).collect();
        same_names(path, saved, "counters", record.counters.iter().map(|(name, _)| name), counters)?;
        let numbers = leaf.numbers().into_iter().map(|(name, _)| name).collect();
        same_names(path, saved, "numbers", record.numbers.iter().map(|(name, _)| name), numbers)?;
        if let Some((name, Number(value))) =
            record.numbers.iter().find(|(_, Number(value))| !value.is_finite() && !self.accept_non_finite)
        {
            return Err(not_finite(&entry_name(path, name), *value, 0).at(path));
        }
        for (name, Number(value)) in &record.numbers {
            if let Some(expected) = leaf.state.number_fault(name, *value) {
                let unfit = damaged(format_args!("the number {name:?} is"));
                return Err(unfit.with_got(FieldValue::Real(*value)).with_expected(expected).at(path));
            }
        }
        Ok(LeafValues { optimiser, tensors: self.check_tensors(leaf, record, saved, with_model)? })
    }

    /// The leaf's optimiser with the hyper-parameters of the file, or defaults where the file lacks them.
    /// Differences from the program's values are added to `restored`.
    fn check_optimiser(
        &self,
        leaf: &Leaf,
        saved: &OptimiserRecord,
        restored: &mut Restored,
    ) -> Result<Arc<Optimiser>> {
        let (path, mut optimiser) = (leaf.path(), leaf.optimiser().clone());
        let own = optimiser.description().record();
        let is_convertible = own.storage().is_convertible() && saved.storage().is_convertible();
        let is_convertible = is_convertible && own.rule().difference(saved.rule()).is_none();
        let difference = own.difference(saved);
        if let Some(difference) = difference.as_ref().filter(|_| !(self.convert && is_convertible)) {
            let remedy = match is_convertible {
                true => {
                    "set up the state with the rule of the file, or call `CheckpointFile::converting` first"
                }
                false => "set up the state with the rule of the file, restore, and then replace the rule",
            };
            let problem = format!("the file is of another rule{}:", difference.in_file());
            let other = Error::new(ErrorKind::OtherRule, problem).with_got(saved).with_expected(own);
            return Err(other.with_remedy(remedy).at(path));
        }
        let values = match difference {
            None => saved_values(path, optimiser.description(), saved, restored),
            Some(_) => saved_values(path, optimiser.description().rule(), saved.rule(), restored),
        }?;
        // Not before `saved_values`, which lists the differences.
        if self.keep_settings {
            return Ok(leaf.optimiser.clone());
        }
        let checked = optimiser.set_fields(&values).and_then(|()| optimiser.check());
        checked.map_err(|error| error.at(path))?;
        Ok(Arc::new(optimiser))
    }

    /// The source of each of the leaf's tensors, checked.
    fn check_tensors(
        &self,
        leaf: &Leaf,
        record: &LeafRecord,
        saved: &OptimiserRecord,
        with_model: bool,
    ) -> Result<Vec<EntryPart>> {
        let path = leaf.path();
        let tensors = leaf.state.tensors();
        let is_master = |tensor: &Buffer| leaf.state.is_followed(tensor);
        let has_master = leaf.state.followed().is_some();
        let (master, others) = self.record.tensors(record);
        // A conversion may add or drop masters. An offloaded parameter has a copy only if it is not on the
        // CPU, and the file may come from another device.
        let any_master = self.convert || saved.storage().offloaded;
        let compares = |tensor: &Buffer| !any_master || !is_master(tensor);
        let names =
            tensors.iter().filter(|(_, tensor)| compares(tensor)).map(|(name, _)| name.clone()).collect();
        let found = if any_master { others } else { &record.tensors };
        same_names(path, saved, "tensors", found.iter(), names)?;
        match master {
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
            let entry = if is_master(tensor) { self.precise(path)? } else { entry_name(path, &name) };
            // Empty if another rank has the tensor: that rank checks it.
            let (shape, elements) = leaf.whole_of(tensor).unzip();
            let source = EntryPart { entry, elements: elements.unwrap_or(0..0) };
            let shape = shape.as_ref().map(crate::tensors::Shape::dims);
            let checked = self.check_entry(&source, shape, tensor.stored_dtype(), tensor.is_of_squares());
            let checked =
                checked.and_then(|()| tensor.code().map_or(Ok(()), |code| self.check_codes(&source, code)));
            checked.map_err(|error| error.at(path))?;
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
        let saved = self.record.model.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::File, "the file has no model, only optimiser state").with_remedy(
                "save the checkpoint with `Checkpoint::model`, or load the parameters from elsewhere and use \
                 `restore`",
            )
        })?;
        let is_extra = |path: &&String| !self.leaves_out(state, path) && !variables.contains_key(*path);
        if let Some(path) = saved.iter().find(is_extra) {
            return Err(extra(path, "model"));
        }
        let known: HashSet<&String> = saved.iter().collect();
        let checked = variables.iter().map(|(path, variable)| {
            if !known.contains(path) {
                return Err(missing(path, saved.iter()));
            }
            check_parameter("variable", &**variable, true).map_err(|error| error.at(path))?;
            let entry = if self.convert { self.precise(path)? } else { path.to_string() };
            let source = EntryPart { entry, elements: 0..variable.elem_count() };
            self.check_entry(&source, Some(variable.shape()), variable.dtype(), false)
                .map_err(|error| error.at(path))?;
            Ok(source)
        });
        checked.collect()
    }

    /// Refuses saved parameters that are not their saved masters rounded, unless the file is converted. Each
    /// rank compares its part.
    fn check_masters(&self, state: &StateTree) -> Result<()> {
        // Leaves that have had no gradient are not compared, because until the first gradient a program may
        // move the parameter.
        let leaves = self.record.leaves.iter().filter(|(_, leaf)| !self.convert && !leaf.is_unreached());
        for (path, leaf) in leaves.filter(|(path, _)| !self.leaves_out(state, path)) {
            let part = state.leaf(path).map_or(0..0, Leaf::part);
            if let Some(Difference { index, parameter, master }) = self.stale(path, leaf, part)? {
                let problem =
                    "it was changed outside of `update` before it was saved: its value in the file is";
                let remedy = "use `restore`, load the parameters separately, and call `refresh_masters` or \
                              `Update::keep_masters`";
                let stale = Error::new(ErrorKind::Changed, problem).with_got(parameter).at_element(index);
                return Err(stale
                    .with_expected(format_args!("that of its master, {master}"))
                    .with_remedy(remedy)
                    .at(path));
            }
        }
        Ok(())
    }

    /// The first element of `part` in which a parameter in the file is not its master rounded.
    fn stale(&self, path: &str, leaf: &LeafRecord, part: Range<usize>) -> Result<Option<Difference>> {
        let Some(master) = self.record.tensors(leaf).0 else { return Ok(None) };
        let (Some(master), Some(parameter)) = (self.entry(&entry_name(path, master)), self.entry(path))
        else {
            return Ok(None);
        };
        [&master, &parameter]
            .into_iter()
            .try_for_each(|entry| crate::tensors::from_file(entry.dtype).map(drop))?;
        // Different lengths are reported by the shape check; compare only the common prefix here.
        let elements = master.elements().min(parameter.elements());
        for window in ranges(part.start..part.end.min(elements)) {
            let start = window.start;
            let tensors = master
                .part(window.clone())
                .and_then(|master| Ok((master, parameter.part(window)?)))
                .map_err(read_error)?;
            if let Some(found) = difference(&tensors.0, &tensors.1, Extent::Whole)? {
                return Ok(Some(Difference { index: start + found.index, ..found }));
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
        let mut named: HashSet<String> = tensors.collect();
        named.extend(self.record.model.iter().flatten().cloned());
        named.extend(self.record.bytes.iter().map(|name| bytes_name(name)));
        match self.tensor_names().into_iter().find(|entry| !named.contains(entry)) {
            Some(entry) => Err(Error::new(
                ErrorKind::File,
                format!("the file has the tensor {entry:?}, which its description does not name"),
            )),
            None => Ok(()),
        }
    }

    /// Refuses an entry of another shape or dtype, or with a number in `elements` that is not finite, or
    /// negative among squares. `shape` is `None` if only another rank has it. A conversion allows another
    /// float dtype.
    fn check_entry(
        &self,
        EntryPart { entry: name, elements }: &EntryPart,
        shape: Option<&[usize]>,
        dtype: DType,
        is_of_squares: bool,
    ) -> Result<()> {
        let entry = self
            .entry(name)
            .ok_or_else(|| Error::new(ErrorKind::File, format!("the file lacks the tensor {name:?}")))?;
        if let Some(shape) = shape.filter(|shape| entry.shape != *shape) {
            return Err(other_shape(name, entry.shape, shape));
        }
        let found = entry.known_dtype();
        let convertible = self.convert && found.is_some_and(|found| found.is_float() && dtype.is_float());
        if found != Some(dtype) && !convertible {
            return Err(other_dtype(name, entry.dtype, dtype));
        }
        let unfit = |bytes: &[u8], stored| {
            let infinite =
                if self.accept_non_finite { None } else { first_non_finite_in(bytes, stored, dtype) };
            infinite.or_else(|| is_of_squares.then(|| first_negative_in(bytes, stored))?)
        };
        match entry.first(elements.clone(), unfit).map_err(read_error)? {
            None => Ok(()),
            Some((index, value)) if is_of_squares && value < 0.0 => {
                Err(Error::new(ErrorKind::Tensor, format!("{} is", in_file(name)))
                    .with_got(value)
                    .at_element(index)
                    .with_expected("a number that is not negative, because squares are not"))
            }
            // Finite in the file, but rounded to infinity in `dtype`.
            Some((index, value)) if value.is_finite() => {
                Err(Error::too_large(in_file(name), value, index, dtype).with_remedy(
                    "to round the number to infinity, call `CheckpointFile::accepting_non_finite` first",
                ))
            }
            Some((index, value)) => Err(not_finite(name, value, index)),
        }
    }

    /// Refuses records of codes with a negative scale or a number that is not finite.
    fn check_codes(&self, EntryPart { entry: name, elements }: &EntryPart, code: Code) -> Result<()> {
        const RECORDS_READ: usize = 1 << 10;
        let Some(entry) = self.entry(name) else { return Ok(()) };
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

    /// The entry with the most precise copy of a parameter: its master, if it has one. A conversion takes the
    /// parameter itself if the program moved it before the first gradient, because its master is out of date.
    fn precise(&self, path: &str) -> Result<String> {
        let mut leaf = self.record.leaves.get(path);
        if let Some(free) = leaf.filter(|leaf| self.convert && leaf.is_unreached()) {
            // Each rank compares the whole parameter and not its part, because all have to choose the same.
            match self.stale(path, free, 0..usize::MAX) {
                Err(error) if error.kind() == ErrorKind::Io => return Err(error),
                Ok(Some(_)) => leaf = None,
                _ => {}
            }
        }
        let master = leaf.and_then(|leaf| self.record.tensors(leaf).0);
        Ok(master.map_or_else(|| path.to_string(), |master| entry_name(path, master)))
    }
}

/// Refuses a count of the description that no program reaches.
fn check_count(problem: impl Display, count: u64) -> Result<()> {
    let unfit = counts::too_large(count);
    unfit.map_or(Ok(()), |expected| Err(damaged(problem).with_got(count).with_expected(expected)))
}

/// The error that the file lacks a parameter.
fn missing<'p>(path: &str, available: impl Iterator<Item = &'p String>) -> Error {
    Error::new(ErrorKind::Model, "the file lacks this parameter; the file has:")
        .with_got(joined(&listed(available)))
        .with_remedy(PASS_THE_MODEL)
        .at(path)
}

/// The error that the file has a parameter that the state or model lacks.
fn extra(path: &str, place: &str) -> Error {
    let problem = format!("the file has this parameter, but the {place} does not");
    Error::new(ErrorKind::Model, problem).with_remedy(PASS_THE_MODEL).at(path)
}

/// The name of a tensor of the file in errors.
fn in_file(entry: &str) -> String {
    format!("the file's {entry:?}")
}

fn other_shape(entry: &str, got: &[usize], expected: &[usize]) -> Error {
    Error::shape(in_file(entry), got, expected).with_remedy(PASS_THE_MODEL)
}

fn other_dtype(entry: &str, got: impl Debug, expected: DType) -> Error {
    let remedy = "to convert the tensors, call `CheckpointFile::converting` first";
    Error::dtype(in_file(entry), got, format_args!("{expected:?}")).with_remedy(remedy)
}

fn not_finite(entry: &str, value: f64, element: usize) -> Error {
    Error::not_finite(in_file(entry), value, element).with_remedy(ACCEPT)
}

/// Refuses a file without the expected names, in their order.
fn same_names<'n>(
    path: &str,
    saved: &OptimiserRecord,
    what: &'static str,
    found: impl Iterator<Item = &'n String> + Clone,
    expected: Vec<String>,
) -> Result<()> {
    if found.clone().eq(&expected) { Ok(()) } else { Err(other_names(path, saved, what, found, expected)) }
}
