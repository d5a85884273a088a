//! Memory that callers own, as tensors for the length of a call.

mod memory;

use std::collections::HashMap;

use candle_core::{Result as Candle, Tensor};

pub(crate) use memory::LentTensor;
pub use memory::{MemoryMut, MemoryRef};

/// What only this crate has, so that nobody else can call a method that takes it: a tensor over lent memory must not leave the crate, see [`LentTensor`].
///
/// It is only ever lent, for the length of one call, so that nobody who is handed one can keep it.
#[derive(Debug)]
pub struct Inside(());

pub(crate) const INSIDE: &Inside = &Inside(());

/// Parameters in memory that callers own, by path.
#[derive(Debug, Default)]
pub struct LentParameters<'a> {
    by_path: HashMap<&'a str, LentTensor<'a>>,
}

impl<'a> LentParameters<'a> {
    pub(crate) fn contains(&self, path: &str) -> bool {
        self.by_path.contains_key(path)
    }

    pub(crate) fn insert(&mut self, path: &'a str, tensor: LentTensor<'a>) {
        self.by_path.insert(path, tensor);
    }

    pub(crate) fn len(&self) -> usize {
        self.by_path.len()
    }

    /// The tensor over the memory of a parameter: for engines alone.
    pub(crate) fn tensor(&self, path: &str) -> Option<&Tensor> {
        self.by_path.get(path).map(LentTensor::tensor)
    }

    pub(crate) fn paths(&self) -> impl Iterator<Item = &'a str> {
        self.by_path.keys().copied()
    }

    /// Copies, which anybody may have.
    pub(crate) fn copies(&self) -> Candle<Vec<(&'a str, Tensor)>> {
        self.by_path.iter().map(|(path, lent)| Ok((*path, lent.tensor().copy()?))).collect()
    }
}
