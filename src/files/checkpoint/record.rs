//! The description of a state in a checkpoint: everything but its tensors.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Display;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind};
use crate::rule::OptimiserRecord;
use crate::rule::field::{Data, Number};
use crate::step::loss_scaler::LossScaler;
use crate::training::plateau::ReduceOnPlateau;
use crate::tree::schedule::{Curve, Schedule};
use crate::tree::{Leaf, NormHistories, ScheduleAssignment, StateTree};

/// The version of the format.
pub(super) const FORMAT: u64 = 1;

/// The key of the description in the file's metadata.
pub(super) const KEY: &str = "optimisers";

/// The placeholder for a checksum that is not known yet: eight digits.
pub(super) const NO_CHECKSUM: &str = "00000000";

/// The bytes right before the checksum. The quotes are escaped, because the description is JSON inside a JSON
/// text. Only the first occurrence of these bytes counts, because all names of the user come later.
pub(super) const BEFORE_CHECKSUM: &[u8] = br#"\"checksum\":\""#;

/// The name of a user's bytes in the file.
pub(super) fn bytes_name(name: &str) -> String {
    format!("optimisers.bytes/{name}")
}

/// The error that the description is damaged. The reason is a clause.
pub(super) fn damage_error(reason: impl Display) -> Error {
    Error::new(
        ErrorKind::File,
        format!("the description of the state is damaged: {reason}"),
    )
}

/// The error that JSON of the description cannot be read or written.
pub(super) fn json_error(cause: serde_json::Error) -> Error {
    Error::new(ErrorKind::File, "the description of the state is damaged").caused_by(cause)
}

/// The part of the description that every version has.
#[derive(Deserialize)]
pub(super) struct Origin {
    pub(super) format: u64,
    #[serde(rename = "crate")]
    pub(super) version: String,
}

/// The description, with its fields in the order of the file (see [`BEFORE_CHECKSUM`]).
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(super) format: u64,
    #[serde(rename = "crate")]
    pub(super) version: String,
    /// CRC-32 of the whole file with zeros in this place, in hexadecimal digits.
    pub(super) checksum: String,
    pub(super) scaler: Option<LossScaler>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) plateau: Option<ReduceOnPlateau>,
    /// The names of the user's bytes.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) bytes: BTreeSet<String>,
    /// The different optimisers of the leaves.
    pub(super) optimisers: Vec<OptimiserRecord>,
    pub(super) leaves: BTreeMap<String, LeafRecord>,
    /// The paths of the variables, if the model was saved along.
    pub(super) model: Option<Vec<String>>,
    /// The steps that were applied.
    pub(super) steps: u64,
    /// The count of steps that the program set before the first step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) began_at: Option<u64>,
    /// The different schedules.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) schedules: Vec<ScheduleRecord>,
    /// The indices of the schedules that were given to all leaves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) for_all: Vec<usize>,
    /// The calls that windows of accumulation have counted.
    pub(super) calls: u64,
    /// The norms that decide on outliers.
    #[serde(default, skip_serializing_if = "NormHistories::is_empty")]
    pub(super) norms: NormHistories,
}

impl Record {
    /// The numbers of leaves that are not finite, each with the path of its leaf and its name.
    pub(super) fn non_finite(&self) -> impl Iterator<Item = (&str, &str, f64)> {
        self.leaves.iter().flat_map(|(path, leaf)| {
            let numbers = leaf
                .numbers
                .iter()
                .map(move |(name, Number(value))| (path.as_str(), name.as_str(), *value));
            numbers.filter(|(_, _, value)| !value.is_finite())
        })
    }
}

/// The description of a leaf.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LeafRecord {
    /// The index in [`Record::optimisers`].
    pub(super) optimiser: usize,
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    pub(super) tensors: Vec<String>,
    pub(super) counters: Vec<(String, u64)>,
    pub(super) numbers: Vec<(String, Number)>,
    pub(super) steps: u64,
    pub(super) frozen: bool,
    /// Whether the leaf was frozen at the first step, if `frozen` differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) began_frozen: Option<bool>,
    /// The fields that had another value at the set-up or before the first step: full name and that value.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) set_up: Vec<(String, Data)>,
    /// The number of calls since the last gradient.
    pub(super) waited: u64,
    /// Whether a gradient went into an accumulator.
    pub(super) received: bool,
    /// The indices of the leaf's schedules in [`Record::schedules`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) schedules: Vec<usize>,
}

/// A schedule in the format of a file. The serde format of [`Schedule`] itself is that of configurations.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ScheduleRecord(#[serde(with = "ScheduleFormat")] pub(super) Schedule);

/// The fields of a [`Schedule`] in a file.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Schedule", expecting = "struct ScheduleRecord")]
struct ScheduleFormat {
    curve: Curve,
    field: Option<String>,
    #[serde(rename = "relative")]
    is_relative: bool,
}

/// Returns [`LeafRecord::set_up`].
fn earlier_values(leaf: &Leaf) -> Vec<(String, Data)> {
    let current_fields = leaf.optimiser().fields();
    let at_first_step = leaf.run_start.as_ref().map(|(optimiser, _)| optimiser);
    let earlier_optimisers = leaf.initial_optimiser.iter().chain(at_first_step);
    let mut values: Vec<(String, Data)> = Vec::new();
    for earlier in earlier_optimisers.filter(|earlier| !Arc::ptr_eq(earlier, &leaf.optimiser)) {
        let fields = earlier.fields();
        for (place, ((_, value), (_, current))) in earlier
            .places()
            .into_iter()
            .zip(fields.iter().zip(&current_fields))
        {
            let entry = (place, value.data());
            if value != current && !values.contains(&entry) {
                values.push(entry);
            }
        }
    }
    values
}

/// The name of the state tensor that is a precise copy of the parameter.
const MASTER: &str = "master";

impl Record {
    /// The description of a state alone.
    pub(super) fn new(state: &StateTree) -> Self {
        let (mut optimisers, mut schedules) = (Vec::new(), Vec::new());
        // The key is the address, so that equal schedules of leaves with different rates stay apart.
        let mut schedule_indices: HashMap<*const Schedule, usize> = HashMap::new();
        let mut index_of = |assignment: &ScheduleAssignment| {
            *schedule_indices
                .entry(Arc::as_ptr(&assignment.schedule))
                .or_insert_with(|| {
                    schedules.push(ScheduleRecord(Schedule::clone(&assignment.schedule)));
                    schedules.len() - 1
                })
        };
        let for_all = state.schedules.iter().map(&mut index_of).collect();
        let mut optimiser_indices: HashMap<*const (), usize> = HashMap::new();
        let mut value_lists = HashMap::new();
        let mut leaves = BTreeMap::new();
        for leaf in state.leaves() {
            // Leaves that share an optimiser share its description.
            let optimiser = *optimiser_indices
                .entry(Arc::as_ptr(&leaf.optimiser).cast())
                .or_insert_with(|| {
                    optimisers.push(leaf.optimiser.description().record());
                    optimisers.len() - 1
                });
            let at_first_step = leaf.run_start.as_ref().map(|(optimiser, _)| optimiser);
            let earlier = [leaf.initial_optimiser.as_ref(), at_first_step];
            let key = (optimiser, earlier.map(|optimiser| optimiser.map(Arc::as_ptr)));
            let set_up = value_lists
                .entry(key)
                .or_insert_with(|| earlier_values(leaf))
                .clone();
            leaves.insert(
                leaf.path().to_string(),
                LeafRecord::new(leaf, optimiser, set_up, &mut index_of),
            );
        }
        Record {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").to_string(),
            checksum: NO_CHECKSUM.to_string(),
            scaler: None,
            plateau: None,
            bytes: BTreeSet::new(),
            optimisers,
            leaves,
            model: None,
            steps: state.steps(),
            began_at: state.began_at,
            schedules,
            for_all,
            calls: state.calls,
            norms: state.norms.clone(),
        }
    }

    /// The state tensors of a leaf: the name of its master, if it has one, and the others.
    pub(super) fn tensors<'r>(&self, leaf: &'r LeafRecord) -> (Option<&'r String>, &'r [String]) {
        // The name alone does not decide, because a tensor of a rule may have this name, too.
        let may_have_master = self
            .optimisers
            .get(leaf.optimiser)
            .is_some_and(|optimiser| optimiser.storage().may_have_master());
        match leaf.tensors.split_first() {
            Some((first, others)) if may_have_master && first == MASTER => (Some(first), others),
            _ => (None, &leaf.tensors),
        }
    }
}

impl LeafRecord {
    /// Whether the leaf was in calls, but never had a gradient.
    pub(super) fn is_unreached(&self) -> bool {
        self.steps == 0 && !self.received && self.waited > 0
    }

    fn new(
        leaf: &Leaf,
        optimiser: usize,
        set_up: Vec<(String, Data)>,
        index_of: impl FnMut(&ScheduleAssignment) -> usize,
    ) -> Self {
        LeafRecord {
            optimiser,
            dtype: leaf.dtype().as_str().to_string(),
            shape: leaf.shape().to_vec(),
            tensors: leaf.tensor_names(),
            counters: leaf.counters(),
            numbers: leaf
                .numbers()
                .into_iter()
                .map(|(name, number)| (name, Number(number)))
                .collect(),
            steps: leaf.steps(),
            frozen: leaf.is_frozen(),
            began_frozen: leaf
                .run_start
                .as_ref()
                .map(|(_, was_frozen)| *was_frozen)
                .filter(|was_frozen| *was_frozen != leaf.is_frozen()),
            set_up,
            waited: leaf.missing_gradients.calls,
            received: leaf.missing_gradients.received > 0,
            schedules: leaf.schedules().map(index_of).collect(),
        }
    }
}
