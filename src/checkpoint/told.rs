//! What ranks tell each other before they write one file: what has to be the same on all, and what only those know who have a part of a leaf.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::record::Record;
use crate::error::{Error, RanksError, Result};
use crate::field::Number;
use crate::tree::{Held, Leaf, StateTree};
use crate::world::Call;

/// The whole shapes of a leaf's state tensors, in their order.
pub(super) type WholeShapes = Vec<Vec<usize>>;

/// What a rank tells.
#[derive(Serialize, Deserialize)]
struct Statement {
    /// What has to be the same: what it is, and how it is told.
    aspects: BTreeMap<String, String>,
    /// A number for what each leaf is, which has to be the same.
    leaves: Vec<u64>,
    /// Where each leaf's optimiser is among those of the rank, which may share them in another way.
    optimisers: Vec<usize>,
    /// The leaves of which the rank has something, by their places.
    held: BTreeMap<usize, HeldLeaf>,
}

/// What those know of a leaf who have something of it.
#[derive(PartialEq, Serialize, Deserialize)]
struct HeldLeaf {
    counters: Vec<(String, u64)>,
    /// As bits: NaN is not the same as itself.
    numbers: Vec<(String, u64)>,
    shapes: WholeShapes,
}

/// Compares what all ranks are to save, and completes the record with what others know. The result has the whole shapes of the state tensors of each leaf.
///
/// # Errors
/// On all ranks, if one refuses, or they are not to save the same.
pub(super) fn agreed(state: &StateTree, path: &Path, own: Result<Record>) -> Result<(Record, Vec<WholeShapes>)> {
    if !state.is_divided() {
        return own.map(|record| (record, state.leaves().map(shapes).collect()));
    }
    let own = own.and_then(|mut record| {
        let told = Statement::new(state, path, &mut record)?;
        Ok((record, serde_json::to_vec(&told).map_err(Error::other)?))
    });
    let (mut record, said) = state.agree(Call::Save, own)?;
    let read = |said: &Vec<u8>| serde_json::from_slice(said).map_err(Error::other);
    let mut all = said.iter().map(read).collect::<Result<Vec<Statement>>>()?;
    for (rank, told) in all.iter().enumerate() {
        if let Some(what) = told.difference(&all[0], state) {
            return Err(RanksError::Differ { rank, what }.into());
        }
    }
    let mut whole = Vec::with_capacity(state.len());
    let own = std::mem::take(&mut record.optimisers);
    for (place, (path, leaf)) in record.leaves.iter_mut().enumerate() {
        let HeldLeaf { counters, numbers, shapes } = held_by_all(&mut all, place, path)?;
        leaf.counters = counters;
        leaf.numbers = numbers.into_iter().map(|(name, bits)| (name, Number(f64::from_bits(bits)))).collect();
        leaf.optimiser = all[0].optimisers[place];
        if leaf.optimiser == record.optimisers.len() {
            record.optimisers.push(own[all[state.rank()].optimisers[place]].clone());
        }
        whole.push(shapes);
    }
    Ok((record, whole))
}

impl Statement {
    /// What this rank tells of a record, from which is taken what those tell who have something of a leaf.
    fn new(state: &StateTree, path: &Path, record: &mut Record) -> Result<Self> {
        let (mut held, mut optimisers) = (BTreeMap::new(), Vec::with_capacity(state.len()));
        for (place, (leaf, record)) in state.leaves().zip(record.leaves.values_mut()).enumerate() {
            let counters = std::mem::take(&mut record.counters);
            let numbers = std::mem::take(&mut record.numbers).into_iter().map(|(name, Number(number))| (name, number.to_bits())).collect();
            if leaf.held() == Held::All || !leaf.part().is_empty() {
                held.insert(place, HeldLeaf { counters, numbers, shapes: shapes(leaf) });
            }
            optimisers.push(std::mem::take(&mut record.optimiser));
        }
        let fields = record.optimisers.iter().map(digest).collect::<Result<Vec<_>>>()?;
        let leaves = record.leaves.iter().zip(&optimisers).map(|(leaf, optimiser)| digest(&(leaf, fields.get(*optimiser))));
        let leaves = leaves.collect::<Result<_>>()?;
        let mut aspects = BTreeMap::from([("path".to_string(), format!("{path:?}"))]);
        let mut aspect = |name: String, value: String| aspects.insert(name, value);
        if let Some(model) = &record.model {
            aspect("model".to_string(), format!("{} variables ({:x})", model.len(), digest(model)?));
        }
        if let Some(scaler) = &record.scaler {
            aspect("loss scaler".to_string(), format!("{scaler:?}"));
        }
        if let Some(plateau) = &record.plateau {
            aspect("plateau".to_string(), format!("{plateau:?}"));
        }
        for (name, text) in &record.notes {
            aspect(format!("note {name:?}"), format!("{} bytes ({:x})", text.len(), digest(text)?));
        }
        aspect("place in a window of accumulation".to_string(), format!("{}", state.calls));
        if !record.norms.is_empty() {
            aspect("history of norms".to_string(), format!("{:x}", record.norms.digest()));
        }
        Ok(Statement { aspects, leaves, optimisers, held })
    }

    /// In what this differs from what rank 0 tells.
    fn difference(&self, first: &Statement, state: &StateTree) -> Option<String> {
        let names = self.aspects.keys().chain(first.aspects.keys());
        if let Some(name) = names.into_iter().find(|name| self.aspects.get(*name) != first.aspects.get(*name)) {
            let [own, others] = [self, first].map(|told| told.aspects.get(name).map_or("none", String::as_str));
            return Some(format!("another {name} than rank 0: {own} for {others}"));
        }
        if self.leaves.len() != first.leaves.len() {
            return Some(format!("{} parameters in its state where rank 0 has {}", self.leaves.len(), first.leaves.len()));
        }
        let place = self.leaves.iter().zip(&first.leaves).position(|(own, first)| own != first)?;
        let path = state.paths().get(place)?;
        Some(format!("another optimiser, other hyper-parameters or other steps of {path:?} than rank 0, or another name for it"))
    }
}

/// What all ranks tell who have something of a leaf.
fn held_by_all(all: &mut [Statement], place: usize, path: &str) -> Result<HeldLeaf> {
    let mut tellers = all.iter_mut().enumerate().filter_map(|(rank, told)| Some((rank, told.held.remove(&place)?)));
    let unknown = || Error::other(format!("no rank has the state of {path:?}"));
    let (first, held) = tellers.next().ok_or_else(unknown)?;
    match tellers.find(|(_, other)| *other != held) {
        Some((rank, _)) => {
            Err(RanksError::Differ { rank, what: format!("other counters or numbers of {path:?} than rank {first}") }.into())
        }
        None => Ok(held),
    }
}

/// The whole shapes of a leaf's state tensors, as far as they are known here.
fn shapes(leaf: &Leaf) -> WholeShapes {
    let tensors = leaf.state.tensors().into_iter();
    tensors.filter_map(|(_, tensor)| leaf.whole_of(tensor).map(|(whole, _)| whole.into_dims())).collect()
}

/// A number for a value, the same on all ranks that run the same program.
fn digest(value: &(impl Serialize + ?Sized)) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    serde_json::to_vec(value).map_err(Error::other)?.hash(&mut hasher);
    Ok(hasher.finish())
}
