//! The description of a state in a checkpoint: everything but its tensors.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Display;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::rule::Description;
use crate::rule::field::Number;
use crate::step::loss_scaler::LossScaler;
use crate::training::scheduler::ReduceOnPlateau;
use crate::tree::{Leaf, NormHistories, StateTree};

/// The version of the format.
pub(super) const FORMAT: u64 = 1;

/// The key of the description in the file's metadata.
pub(super) const KEY: &str = "optimisers";

/// The placeholder for a checksum that is not known yet: eight digits.
pub(super) const NO_CHECKSUM: &str = "00000000";

/// The bytes right before the checksum. The description is JSON inside a JSON text, and the checksum comes
/// before any name of the user's.
pub(super) const BEFORE_CHECKSUM: &[u8] = br#"\"checksum\":\""#;

/// The name of a user's bytes in the file.
pub(super) fn bytes_name(name: &str) -> String {
    format!("optimisers.bytes/{name}")
}

/// The error that the description is damaged, for a reason that is a clause.
pub(super) fn damaged(reason: impl Display) -> Error {
    Error::new(ErrorKind::File, format!("the description of the state is damaged: {reason}"))
}

/// The error that the description cannot be read or written.
pub(super) fn damaged_by(cause: serde_json::Error) -> Error {
    Error::new(ErrorKind::File, "the description of the state is damaged").caused_by(cause)
}

/// The part of the description that every version has.
#[derive(Deserialize)]
pub(super) struct Origin {
    pub(super) format: u64,
    #[serde(rename = "crate")]
    pub(super) version: String,
}

/// The description. The order of the fields is that of the file.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    format: u64,
    #[serde(rename = "crate")]
    version: String,
    /// CRC-32 of the whole file with zeros in this place, in hexadecimal digits.
    pub(super) checksum: String,
    pub(super) scaler: Option<LossScaler>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) plateau: Option<ReduceOnPlateau>,
    /// The steps of the scheduler.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) scheduler: Option<u64>,
    /// The names of the user's bytes.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) bytes: BTreeSet<String>,
    /// The different optimisers of the leaves.
    pub(super) optimisers: Vec<Description>,
    pub(super) leaves: BTreeMap<String, LeafRecord>,
    /// The paths of the variables of the model, if it was saved along.
    pub(super) model: Option<Vec<String>>,
    /// The calls that windows of accumulation have counted.
    pub(super) calls: u64,
    /// The norms that decide on outliers.
    #[serde(default, skip_serializing_if = "NormHistories::is_empty")]
    pub(super) norms: NormHistories,
}

/// What the user adds to state and model.
#[derive(Debug, Default)]
pub(super) struct CheckpointExtras {
    pub(super) scaler: Option<LossScaler>,
    pub(super) plateau: Option<ReduceOnPlateau>,
    /// The steps of the scheduler.
    pub(super) scheduler: Option<u64>,
    /// The names of the bytes.
    pub(super) bytes: BTreeSet<String>,
}

impl Record {
    /// The numbers of leaves that are not finite, each with the path of its leaf and its name.
    pub(super) fn non_finite(&self) -> impl Iterator<Item = (&str, &str, f64)> {
        self.leaves.iter().flat_map(|(path, leaf)| {
            let numbers =
                leaf.numbers.iter().map(move |(name, Number(value))| (path.as_str(), name.as_str(), *value));
            numbers.filter(|(_, _, value)| !value.is_finite())
        })
    }
}

impl CheckpointExtras {
    /// Refuses numbers that JSON could not hold.
    pub(super) fn check(&self) -> Result<()> {
        self.scaler.as_ref().map_or(Ok(()), LossScaler::check)?;
        self.plateau.as_ref().map_or(Ok(()), ReduceOnPlateau::check)
    }
}

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
    /// Calls since the last gradient.
    pub(super) waited: u64,
    /// Whether a gradient went into an accumulator.
    pub(super) received: bool,
    /// The bases of relative schedules, by the places of the fields.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) bases: Vec<(String, Number)>,
    /// The places of the fields that schedules drive, each with the factor of a relative one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) driven: Vec<(String, Option<Number>)>,
}

/// The name of the state tensor that is a precise copy of the parameter.
const MASTER: &str = "master";

impl Record {
    pub(super) fn new(state: &StateTree, extras: CheckpointExtras, model: Option<Vec<String>>) -> Self {
        let CheckpointExtras { scaler, plateau, scheduler, bytes } = extras;
        let mut optimisers = Vec::new();
        let mut places: HashMap<*const (), usize> = HashMap::new();
        let mut leaves = BTreeMap::new();
        for leaf in state.leaves() {
            // Leaves that share an optimiser share its description.
            let place = *places.entry(Arc::as_ptr(&leaf.optimiser).cast()).or_insert_with(|| {
                optimisers.push(Description::of(&mut *dyn_clone::clone_box(&*leaf.optimiser)));
                optimisers.len() - 1
            });
            leaves.insert(leaf.path().to_string(), LeafRecord::new(leaf, place));
        }
        Record {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").to_string(),
            checksum: NO_CHECKSUM.to_string(),
            scaler,
            plateau,
            scheduler,
            bytes,
            optimisers,
            leaves,
            model,
            calls: state.calls,
            norms: state.norms.clone(),
        }
    }

    /// The state tensors of a leaf: the name of its master, if it has one, and the others.
    pub(super) fn tensors<'r>(&self, leaf: &'r LeafRecord) -> (Option<&'r String>, &'r [String]) {
        // A rule's own tensor may have that name too.
        let may_have_master =
            self.optimisers.get(leaf.optimiser).is_some_and(|saved| saved.storage().may_have_master());
        match leaf.tensors.split_first() {
            Some((first, others)) if may_have_master && first == MASTER => (Some(first), others),
            _ => (None, &leaf.tensors),
        }
    }
}

fn bases(leaf: &Leaf) -> Vec<(String, Number)> {
    if leaf.bases.is_empty() {
        return Vec::new();
    }
    let places = leaf.optimiser().places();
    leaf.bases.iter().filter_map(|(field, base)| Some((places.get(*field)?.clone(), Number(*base)))).collect()
}

fn driven(leaf: &Leaf) -> Vec<(String, Option<Number>)> {
    if leaf.driven.is_empty() {
        return Vec::new();
    }
    let places = leaf.optimiser().places();
    leaf.driven
        .iter()
        .filter_map(|mark| Some((places.get(mark.field)?.clone(), mark.factor.map(Number))))
        .collect()
}

impl LeafRecord {
    /// Whether there were calls, and none had a gradient.
    pub(super) fn is_unreached(&self) -> bool {
        self.steps == 0 && !self.received && self.waited > 0
    }

    fn new(leaf: &Leaf, optimiser: usize) -> Self {
        LeafRecord {
            optimiser,
            dtype: leaf.dtype().as_str().to_string(),
            shape: leaf.shape().to_vec(),
            tensors: leaf.tensor_names(),
            counters: leaf.counters(),
            numbers: leaf.numbers().into_iter().map(|(name, number)| (name, Number(number))).collect(),
            steps: leaf.steps(),
            frozen: leaf.is_frozen(),
            waited: leaf.waiting.calls,
            received: leaf.waiting.received > 0,
            bases: bases(leaf),
            driven: driven(leaf),
        }
    }
}
