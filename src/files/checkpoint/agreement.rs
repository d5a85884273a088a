//! The agreement of ranks before they write a file: all ranks get the same description of the file.
//!
//! 1. Each rank moves values that may differ among ranks out of its record (`RankRecord`): the counters,
//!    numbers and shapes of leaves, which only ranks with a part have, and the indices of optimisers.
//! 2. All ranks compare the rest, and send each other the values that were moved out.
//! 3. Each rank puts the same values back: those of the ranks with a part, and rank 0's indices.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::record::Record;
use crate::error::{Error, ErrorKind, Result};
use crate::ranks::{Agreement, Aspect, Call, Held, difference_error};
use crate::rule::OptimiserRecord;
use crate::rule::field::Number;
use crate::tree::{Leaf, StateTree};

/// The whole shapes of a leaf's state tensors, in their order.
pub(super) type WholeShapes = Vec<Vec<usize>>;

/// The values that may differ among ranks, and that each rank sends to the other ranks.
#[derive(Serialize, Deserialize)]
struct RankRecord {
    /// The index of each leaf's optimiser in the rank's list; ranks may share optimisers in different ways.
    optimisers: Vec<usize>,
    /// The leaves with a part on this rank, by index.
    held_leaves: BTreeMap<usize, HeldLeaf>,
}

/// The values that only a rank with a part of a leaf has.
#[derive(PartialEq, Serialize, Deserialize)]
struct HeldLeaf {
    counters: Vec<(String, u64)>,
    /// Numbers as bits, because NaN does not equal itself.
    numbers: Vec<(String, u64)>,
    shapes: WholeShapes,
}

/// Compares the saves of all ranks. Returns the complete record, and the whole shapes of each leaf's tensors.
///
/// # Errors
/// If one rank refuses, or the saves differ, all ranks get an error.
pub(super) fn agree_on_record(
    state: &StateTree,
    record: Result<Record>,
    bytes: &BTreeMap<String, Vec<u8>>,
) -> Result<(Record, Vec<WholeShapes>)> {
    if !state.world.is_divided() {
        return record.map(|record| (record, state.leaves().map(whole_shapes).collect()));
    }
    let proposal = record.and_then(|mut record| {
        let rank_record = RankRecord::new(state, &mut record);
        let agreement = Agreement::new(aspects(state, &record, bytes, &rank_record.optimisers)?);
        Ok((
            record,
            agreement,
            serde_json::to_vec(&rank_record).map_err(Error::other)?,
        ))
    });
    let (mut record, messages) = state.world.agree_on(Call::Save, proposal)?;
    let parse = |message: &Vec<u8>| serde_json::from_slice(message).map_err(Error::other);
    let mut ranks = messages.iter().map(parse).collect::<Result<Vec<RankRecord>>>()?;
    let mut all_shapes = Vec::with_capacity(state.len());
    let optimisers = std::mem::take(&mut record.optimisers);
    for (index, (path, leaf)) in record.leaves.iter_mut().enumerate() {
        let HeldLeaf {
            counters,
            numbers,
            shapes,
        } = take_held_leaf(&mut ranks, index, path)?;
        leaf.counters = counters;
        leaf.numbers = numbers
            .into_iter()
            .map(|(name, bits)| (name, Number(f64::from_bits(bits))))
            .collect();
        // Rank 0's indices begin at 0 and rise by 1 with each new optimiser, so the index of a new optimiser
        // is the length of the list.
        leaf.optimiser = ranks[0].optimisers[index];
        if leaf.optimiser == record.optimisers.len() {
            record
                .optimisers
                .push(optimisers[ranks[state.world.rank()].optimisers[index]].clone());
        }
        all_shapes.push(shapes);
    }
    Ok((record, all_shapes))
}

impl RankRecord {
    /// Moves values that may differ among ranks out of `record`.
    fn new(state: &StateTree, record: &mut Record) -> Self {
        let (mut held_leaves, mut optimisers) = (BTreeMap::new(), Vec::with_capacity(state.len()));
        for (index, (leaf, leaf_record)) in state.leaves().zip(record.leaves.values_mut()).enumerate() {
            let counters = std::mem::take(&mut leaf_record.counters);
            let numbers = std::mem::take(&mut leaf_record.numbers)
                .into_iter()
                .map(|(name, Number(number))| (name, number.to_bits()))
                .collect();
            if leaf.held() == Held::All || !leaf.part().is_empty() {
                held_leaves.insert(
                    index,
                    HeldLeaf {
                        counters,
                        numbers,
                        shapes: whole_shapes(leaf),
                    },
                );
            }
            optimisers.push(std::mem::take(&mut leaf_record.optimiser));
        }
        RankRecord {
            optimisers,
            held_leaves,
        }
    }
}

/// The aspects of a save that have to be the same on all ranks.
fn aspects(
    state: &StateTree,
    record: &Record,
    bytes: &BTreeMap<String, Vec<u8>>,
    optimisers: &[usize],
) -> Result<Vec<Aspect>> {
    let mut aspects = vec![Aspect::of_words(
        "the variables of the model",
        record.model.clone().unwrap_or_else(|| vec!["none".to_string()]),
    )];
    aspects.push(Aspect::new(
        "the loss scaler",
        json_or_none(record.scaler.as_ref())?,
    ));
    aspects.push(Aspect::new("the plateau", json_or_none(record.plateau.as_ref())?));
    aspects.push(Aspect::new("the count of applied steps", record.steps));
    aspects.push(Aspect::new(
        "the schedules",
        json(&(&record.schedules, &record.for_all))?,
    ));
    let sum = |(name, bytes): (&String, &Vec<u8>)| {
        format!(
            "{name:?}: {} bytes, checksum {:08x}",
            bytes.len(),
            crc32fast::hash(bytes)
        )
    };
    aspects.push(Aspect::of_words("the bytes", bytes.iter().map(sum).collect()));
    aspects.push(Aspect::new("the place in a window of accumulation", state.calls));
    aspects.push(Aspect::new(
        "the history of norms",
        format!("checksum {:016x}", record.norms.fingerprint()),
    ));
    for ((path, leaf), optimiser) in record.leaves.iter().zip(optimisers) {
        aspects.push(Aspect::new("a parameter", format!("{path:?}")));
        let words = record.optimisers.get(*optimiser).map(OptimiserRecord::words);
        aspects.push(Aspect::of_words(
            format!("the optimiser of {path:?}"),
            words.unwrap_or_default(),
        ));
        aspects.push(Aspect::new(format!("the state of {path:?}"), json(leaf)?));
    }
    Ok(aspects)
}

/// The JSON of a value, or `none`.
fn json_or_none(value: Option<&impl Serialize>) -> Result<String> {
    value.map_or_else(|| Ok("none".to_string()), json)
}

fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(Error::other)
}

/// Takes a leaf's values out of the records of the ranks that have a part of the leaf. Refuses values that
/// differ.
fn take_held_leaf(ranks: &mut [RankRecord], index: usize, path: &str) -> Result<HeldLeaf> {
    let mut holders = ranks
        .iter_mut()
        .enumerate()
        .filter_map(|(rank, record)| Some((rank, record.held_leaves.remove(&index)?)));
    let unknown = || Error::new(ErrorKind::Ranks, "no rank has the state of this parameter").at(path);
    let (first, leaf) = holders.next().ok_or_else(unknown)?;
    match holders.find(|(_, other)| *other != leaf) {
        Some((rank, _)) => {
            let what = format_args!("the counters or numbers of its state, compared with rank {first}");
            Err(difference_error(rank, what).at(path))
        }
        None => Ok(leaf),
    }
}

/// The whole shapes of a leaf's state tensors; none if another rank has the state.
fn whole_shapes(leaf: &Leaf) -> WholeShapes {
    let tensors = leaf.state.tensors().into_iter();
    tensors
        .filter_map(|(_, tensor)| leaf.stored_extent(tensor).map(|(whole, _)| whole.into_dims()))
        .collect()
}
