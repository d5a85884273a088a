//! Taking a checkpoint over: everything is checked, then everything is written.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::str::FromStr;
use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor};

use super::file::CheckpointFile;
use super::record::{LeafRecord, OptimiserRecord};
use super::save::entry_name;
use crate::engine::set_tensor;
use crate::error::{CheckpointError, Error, Result, listed};
use crate::model::{Model, by_first_path};
use crate::rule::{Optimiser, Parts};
use crate::tree::{Leaf, StateTree};

type Checked<T> = std::result::Result<T, CheckpointError>;

/// The name of the state tensor that a precise copy of the parameter has.
const MASTER: &str = "master";

/// What a leaf takes over.
struct LeafPlan {
    optimiser: Arc<dyn Optimiser>,
    /// The entries of the state's tensors, in their order.
    tensors: Vec<String>,
    counters: Vec<u64>,
    steps: u64,
    frozen: bool,
}

impl CheckpointFile {
    /// Takes over the state: tensors, counters, hyper-parameters and which parameters are frozen. The model stays as it is.
    ///
    /// The state has to be set up with the same rules for the same parameters as the saved one, with any hyper-parameters. Everything is
    /// checked before anything is changed, and after that the state continues bit for bit as the saved one would have.
    ///
    /// # Errors
    /// If the file lacks a parameter or a tensor, or has one too many; if a rule, shape or dtype is another; if a hyper-parameter is out of
    /// range or a number is not finite. Nothing changes then.
    pub fn restore(&self, state: &mut StateTree) -> Result<()> {
        let plans = self.plan(state, None)?;
        self.commit(state, plans)
    }

    /// [`CheckpointFile::restore`], and the model's variables as well.
    ///
    /// # Errors
    /// As [`CheckpointFile::restore`]; also if the file has no model, or the model is not the state's or the file's.
    pub fn restore_with_model<M: Model + ?Sized>(&self, state: &mut StateTree, model: &M) -> Result<()> {
        state.parameters(model)?;
        let variables = by_first_path(model, Tensor::is_variable)?;
        let plans = self.plan(state, Some(&variables))?;
        self.commit(state, plans)?;
        for (path, variable) in &variables {
            self.write(&self.source(path), |values| set_tensor(variable, values))?;
        }
        Ok(())
    }

    fn plan(&self, state: &StateTree, variables: Option<&BTreeMap<String, Tensor>>) -> Result<Vec<LeafPlan>> {
        self.check(state, variables).map_err(|error| Error::checkpoint(&self.path, error))
    }

    fn check(&self, state: &StateTree, variables: Option<&BTreeMap<String, Tensor>>) -> Checked<Vec<LeafPlan>> {
        let leaves = &self.record.leaves;
        if let Some(path) = leaves.keys().find(|path| state.leaf(path).is_none_or(|leaf| leaf.path() != *path)) {
            return Err(CheckpointError::ExtraParameter { path: path.clone(), place: "state" });
        }
        let mut restored: HashMap<(*const (), usize), Arc<dyn Optimiser>> = HashMap::new();
        let mut plans = Vec::with_capacity(state.len());
        for leaf in state.leaves() {
            let record = leaves.get(leaf.path()).ok_or_else(|| self.missing(leaf.path(), leaves.keys()))?;
            plans.push(self.check_leaf(leaf, record, variables.is_some(), &mut restored)?);
        }
        if let Some(variables) = variables {
            self.check_model(variables)?;
        }
        self.check_complete()?;
        Ok(plans)
    }

    fn check_leaf(
        &self,
        leaf: &Leaf,
        record: &LeafRecord,
        with_model: bool,
        restored: &mut HashMap<(*const (), usize), Arc<dyn Optimiser>>,
    ) -> Checked<LeafPlan> {
        let path = leaf.path();
        let shape = Shape::from(record.shape.clone());
        if &shape != leaf.shape() {
            return Err(CheckpointError::Shape { entry: path.to_string(), found: shape, expected: leaf.shape().clone() });
        }
        if !self.convert && DType::from_str(&record.dtype).ok() != Some(leaf.dtype()) {
            return Err(CheckpointError::Dtype { entry: path.to_string(), found: record.dtype.clone(), expected: leaf.dtype() });
        }
        let damaged = || CheckpointError::Record { reason: format!("parameter {path:?} refers to an optimiser that it lacks") };
        let saved = self.record.optimisers.get(record.optimiser).ok_or_else(damaged)?;
        let key = (Arc::as_ptr(&leaf.optimiser).cast::<()>(), record.optimiser);
        let optimiser = match restored.get(&key) {
            Some(optimiser) => optimiser.clone(),
            None => restored.entry(key).or_insert(self.check_optimiser(leaf, saved)?).clone(),
        };
        let names = |counters: &[(String, u64)]| counters.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        same_names(path, saved, "counters", names(&record.counters), names(&leaf.counters()))?;
        Ok(LeafPlan {
            optimiser,
            tensors: self.check_tensors(leaf, record, saved, with_model)?,
            counters: record.counters.iter().map(|(_, count)| *count).collect(),
            steps: record.steps,
            frozen: record.frozen,
        })
    }

    /// The leaf's optimiser with the hyper-parameters of the file.
    fn check_optimiser(&self, leaf: &Leaf, saved: &OptimiserRecord) -> Checked<Arc<dyn Optimiser>> {
        let (path, mut optimiser) = (leaf.path().to_string(), dyn_clone::clone_box(leaf.optimiser()));
        let (expected, found) = if self.convert { (optimiser.rule_name(), &saved.rule) } else { (optimiser.name(), &saved.name) };
        if &expected != found {
            let only_precision = optimiser.rule_name() == saved.rule;
            let remedy =
                if only_precision { ", or call `CheckpointFile::converting` first" } else { ", restore, and then replace the rule" };
            return Err(CheckpointError::OtherRule { path, expected, found: found.clone(), remedy });
        }
        let fields = optimiser.fields();
        let names =
            (saved.fields.iter().map(|(name, _)| name.clone()).collect(), fields.iter().map(|(name, _)| name.to_string()).collect());
        same_names(&path, saved, "fields", names.0, names.1)?;
        let mut values = Vec::with_capacity(fields.len());
        for ((name, literal), (_, like)) in saved.fields.iter().zip(fields) {
            let (rule, field, expected) = (saved.name.clone(), name.clone(), like.expected());
            values.push(literal.read(like).ok_or(CheckpointError::FieldType { path: path.clone(), rule, field, expected })?);
        }
        let checked = optimiser.set_fields(&values).and_then(|()| optimiser.check());
        checked.map_err(|source| CheckpointError::Field { path, source: Box::new(source) })?;
        Ok(Arc::from(optimiser))
    }

    /// The entries that the leaf's tensors take their values from.
    fn check_tensors(&self, leaf: &Leaf, record: &LeafRecord, saved: &OptimiserRecord, with_model: bool) -> Checked<Vec<String>> {
        let path = leaf.path();
        let tensors = leaf.state.tensors();
        let mut names: Vec<String> = tensors.iter().map(|(name, _)| name.clone()).collect();
        let mut found = record.tensors.clone();
        if self.convert {
            names.retain(|name| name != MASTER);
            found.retain(|name| name != MASTER);
            let had_master = record.tensors.len() > found.len();
            if had_master && tensors.len() == names.len() && !with_model {
                return Err(CheckpointError::MasterNeedsModel { path: path.to_string() });
            }
        }
        same_names(path, saved, "tensors", found, names)?;
        let mut sources = Vec::with_capacity(tensors.len());
        for (name, tensor) in tensors {
            let source = if name == MASTER { self.precise(path) } else { entry_name(path, &name) };
            self.check_entry(&source, tensor.shape(), tensor.dtype())?;
            sources.push(source);
        }
        Ok(sources)
    }

    fn check_model(&self, variables: &BTreeMap<String, Tensor>) -> Checked<()> {
        let saved = self.record.model.as_ref().ok_or(CheckpointError::NoModel)?;
        if let Some(path) = saved.iter().find(|path| !variables.contains_key(*path)) {
            return Err(CheckpointError::ExtraParameter { path: path.clone(), place: "model" });
        }
        let known: HashSet<&String> = saved.iter().collect();
        variables.iter().try_for_each(|(path, variable)| {
            if !known.contains(path) {
                return Err(self.missing(path, saved.iter()));
            }
            self.check_entry(&self.source(path), variable.shape(), variable.dtype())
        })
    }

    /// Whether every tensor in the file is one that its description names.
    fn check_complete(&self) -> Checked<()> {
        let tensors = self.record.leaves.iter().flat_map(|(path, leaf)| leaf.tensors.iter().map(|name| entry_name(path, name)));
        let mut named: HashSet<String> = tensors.collect();
        named.extend(self.record.model.iter().flatten().cloned());
        match self.tensor_names().into_iter().find(|entry| !named.contains(entry)) {
            Some(entry) => Err(CheckpointError::Entry { entry, problem: "has, but its description does not name," }),
            None => Ok(()),
        }
    }

    fn check_entry(&self, name: &str, shape: &Shape, dtype: DType) -> Checked<()> {
        let entry = self.entry(name).ok_or_else(|| CheckpointError::Entry { entry: name.to_string(), problem: "lacks" })?;
        if entry.shape != shape.dims() {
            let found = Shape::from(entry.shape.to_vec());
            return Err(CheckpointError::Shape { entry: name.to_string(), found, expected: shape.clone() });
        }
        let found = DType::try_from(entry.dtype).ok();
        let convertible = self.convert && found.is_some_and(|found| found.is_float() && dtype.is_float());
        if found != Some(dtype) && !convertible {
            let found = format!("{:?}", entry.dtype);
            return Err(CheckpointError::Dtype { entry: name.to_string(), found, expected: dtype });
        }
        match entry.non_finite() {
            Some((index, value)) if !self.accept_non_finite => Err(CheckpointError::NonFinite { entry: name.to_string(), index, value }),
            _ => Ok(()),
        }
    }

    fn missing<'p>(&self, path: &str, available: impl Iterator<Item = &'p String>) -> CheckpointError {
        CheckpointError::MissingParameter { path: path.to_string(), available: listed(available.map(String::as_str)) }
    }

    /// The entry with the most precise copy of a parameter: its master, if it has one.
    fn precise(&self, path: &str) -> String {
        let has_master = self.record.leaves.get(path).is_some_and(|leaf| leaf.tensors.iter().any(|name| name == MASTER));
        if has_master { entry_name(path, MASTER) } else { path.to_string() }
    }

    /// The entry that a parameter takes its value from.
    fn source(&self, path: &str) -> String {
        if self.convert { self.precise(path) } else { path.to_string() }
    }

    /// Only a device can fail here.
    fn commit(&self, state: &mut StateTree, plans: Vec<LeafPlan>) -> Result<()> {
        for (leaf, plan) in state.leaves.iter_mut().zip(plans) {
            let Parts { tensors, counters, .. } = leaf.state.parts_mut();
            for (tensor, source) in tensors.into_iter().zip(&plan.tensors) {
                self.write(source, |values| tensor.set(values))?;
            }
            for (counter, count) in counters.into_iter().zip(plan.counters) {
                *counter = count;
            }
            leaf.optimiser = plan.optimiser;
            leaf.steps = plan.steps;
            leaf.frozen = plan.frozen;
        }
        Ok(())
    }

    /// Hands the values of an entry to `set`; there is nothing to do for an empty one.
    fn write(&self, entry: &str, set: impl FnOnce(&Tensor) -> candle_core::Result<()>) -> Result<()> {
        match self.entry(entry) {
            Some(entry) if entry.shape.iter().all(|&length| length > 0) => Ok(set(&entry.tensor(&Device::Cpu)?)?),
            _ => Ok(()),
        }
    }
}

fn same_names(path: &str, saved: &OptimiserRecord, what: &'static str, found: Vec<String>, expected: Vec<String>) -> Checked<()> {
    if found == expected {
        return Ok(());
    }
    Err(CheckpointError::OtherNames { path: path.to_string(), rule: saved.name.clone(), what, found, expected })
}
