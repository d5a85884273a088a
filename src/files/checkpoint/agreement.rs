//! The agreement of ranks before they write one file, after which all have the same description of it.
//!
//! 1. Each rank moves out of its record what may differ among ranks (`RankRecord`): the counters, numbers and
//!    shapes of leaves, which only ranks with a part have, and the indices of optimisers.
//! 2. All ranks compare the rest, and send each other what was moved out.
//! 3. Each rank puts the same values back: those of the ranks with a part, and rank 0's indices.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::record::Record;
use crate::error::{Error, ErrorKind, Result};
use crate::ranks::{Agreement, Aspect, Call, Held};
use crate::rule::OptimiserRecord;
use crate::rule::field::Number;
use crate::tree::{Leaf, StateTree};

/// The whole shapes of a leaf's state tensors, in their order.
pub(super) type WholeShapes = Vec<Vec<usize>>;

/// What a rank sends to the others, because it may differ from theirs.
#[derive(Serialize, Deserialize)]
struct RankRecord {
    /// The index of each leaf's optimiser in the rank's list; ranks may share optimisers in different ways.
    optimisers: Vec<usize>,
    /// The leaves with a part on this rank, by index.
    held: BTreeMap<usize, HeldLeaf>,
}

/// What only a rank with a part of a leaf has.
#[derive(PartialEq, Serialize, Deserialize)]
struct HeldLeaf {
    counters: Vec<(String, u64)>,
    /// Numbers as bits, because NaN does not equal itself.
    numbers: Vec<(String, u64)>,
    shapes: WholeShapes,
}

/// Compares what all ranks save. Returns the complete record, and the whole shapes of each leaf's tensors.
///
/// # Errors
/// On all ranks, if one refuses, or what they save differs.
pub(super) fn agreed(
    state: &StateTree,
    path: &Path,
    own: Result<Record>,
    bytes: &BTreeMap<String, Vec<u8>>,
) -> Result<(Record, Vec<WholeShapes>)> {
    if !state.is_divided() {
        return own.map(|record| (record, state.leaves().map(shapes).collect()));
    }
    let own = own.and_then(|mut record| {
        let own_record = RankRecord::new(state, &mut record);
        let agreement = Agreement::on(aspects(state, path, &record, bytes, &own_record.optimisers)?);
        Ok((record, agreement, serde_json::to_vec(&own_record).map_err(Error::other)?))
    });
    let (mut record, said) = state.agree_on(Call::Save, own)?;
    let read = |said: &Vec<u8>| serde_json::from_slice(said).map_err(Error::other);
    let mut all = said.iter().map(read).collect::<Result<Vec<RankRecord>>>()?;
    let mut whole = Vec::with_capacity(state.len());
    let own = std::mem::take(&mut record.optimisers);
    for (place, (path, leaf)) in record.leaves.iter_mut().enumerate() {
        let HeldLeaf { counters, numbers, shapes } = held_by_all(&mut all, place, path)?;
        leaf.counters = counters;
        leaf.numbers = numbers.into_iter().map(|(name, bits)| (name, Number(f64::from_bits(bits)))).collect();
        // Rank 0's indices begin at 0 and rise by 1 with each new optimiser, so a new one is the list's next.
        leaf.optimiser = all[0].optimisers[place];
        if leaf.optimiser == record.optimisers.len() {
            record.optimisers.push(own[all[state.rank()].optimisers[place]].clone());
        }
        whole.push(shapes);
    }
    Ok((record, whole))
}

impl RankRecord {
    /// Moves out of `record` what may differ among ranks.
    fn new(state: &StateTree, record: &mut Record) -> Self {
        let (mut held, mut optimisers) = (BTreeMap::new(), Vec::with_capacity(state.len()));
        for (place, (leaf, record)) in state.leaves().zip(record.leaves.values_mut()).enumerate() {
            let counters = std::mem::take(&mut record.counters);
            let numbers = std::mem::take(&mut record.numbers)
                .into_iter()
                .map(|(name, Number(number))| (name, number.to_bits()))
                .collect();
            if leaf.held() == Held::All || !leaf.part().is_empty() {
                held.insert(place, HeldLeaf { counters, numbers, shapes: shapes(leaf) });
            }
            optimisers.push(std::mem::take(&mut record.optimiser));
        }
        RankRecord { optimisers, held }
    }
}

/// The path, which has to be the same on all ranks.
pub(super) fn same_path(path: &Path) -> Aspect {
    Aspect::new("the path to save at", format!("{path:?}"))
}

/// The aspects of a save that have to be the same on all ranks.
fn aspects(
    state: &StateTree,
    path: &Path,
    record: &Record,
    bytes: &BTreeMap<String, Vec<u8>>,
    optimisers: &[usize],
) -> Result<Vec<Aspect>> {
    let mut aspects = vec![same_path(path)];
    aspects.push(Aspect::of_words(
        "the variables of the model",
        record.model.clone().unwrap_or_else(|| vec!["none".to_string()]),
    ));
    aspects.push(Aspect::new("the loss scaler", text_of(record.scaler.as_ref())?));
    aspects.push(Aspect::new("the plateau", text_of(record.plateau.as_ref())?));
    aspects.push(Aspect::new("the count of applied steps", record.steps));
    aspects.push(Aspect::new("the schedules", text(&(&record.schedules, &record.for_all))?));
    let sum = |(name, bytes): (&String, &Vec<u8>)| {
        format!("{name:?}: {} bytes, checksum {:08x}", bytes.len(), crc32fast::hash(bytes))
    };
    aspects.push(Aspect::of_words("the bytes", bytes.iter().map(sum).collect()));
    aspects.push(Aspect::new("the place in a window of accumulation", state.calls));
    aspects
        .push(Aspect::new("the history of norms", format!("checksum {:016x}", record.norms.fingerprint())));
    for ((path, leaf), optimiser) in record.leaves.iter().zip(optimisers) {
        aspects.push(Aspect::new("a parameter", format!("{path:?}")));
        let words = record.optimisers.get(*optimiser).map(OptimiserRecord::words);
        aspects.push(Aspect::of_words(format!("the optimiser of {path:?}"), words.unwrap_or_default()));
        aspects.push(Aspect::new(format!("the state of {path:?}"), text(leaf)?));
    }
    Ok(aspects)
}

fn text_of(value: Option<&impl Serialize>) -> Result<String> {
    value.map_or_else(|| Ok("none".to_string()), text)
}

fn text(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(Error::other)
}

/// Takes a leaf's values out of the records of all ranks that have a part of it. Refuses values that differ.
fn held_by_all(all: &mut [RankRecord], place: usize, path: &str) -> Result<HeldLeaf> {
    let mut tellers =
        all.iter_mut().enumerate().filter_map(|(rank, told)| Some((rank, told.held.remove(&place)?)));
    let unknown = || Error::new(ErrorKind::Ranks, "no rank has the state of this parameter").at(path);
    let (first, held) = tellers.next().ok_or_else(unknown)?;
    match tellers.find(|(_, other)| *other != held) {
        Some((rank, _)) => {
            let problem =
                format!("rank {rank} differs from rank {first} in the counters or numbers of its state");
            Err(Error::new(ErrorKind::Ranks, problem)
                .at(path)
                .of_rank(rank)
                .with_remedy("all ranks need the same"))
        }
        None => Ok(held),
    }
}

/// The whole shapes of a leaf's state tensors; none if another rank has the state.
fn shapes(leaf: &Leaf) -> WholeShapes {
    let tensors = leaf.state.tensors().into_iter();
    tensors.filter_map(|(_, tensor)| leaf.whole_of(tensor).map(|(whole, _)| whole.into_dims())).collect()
}
