//! The tensors of a file, and the parts that this rank writes.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;

use super::agreement::WholeShapes;
use super::finite::Encoding;
use super::layout::EntryInfo;
use super::record::bytes_name;
use crate::engine::Buffer;
use crate::error::Result;
use crate::model::lent::{Lent, write_lent};
use crate::numbers::DType;
use crate::tensors::{Tensor, dtype_of};
use crate::tree::{Leaf, StateTree};

/// A tensor in the file, and the part of it that this rank writes.
pub(crate) struct SavedTensor<'s> {
    pub(super) entry: EntryInfo,
    /// The elements that are written here, in row-major order.
    pub(super) part: Range<usize>,
    values: PartValues<'s>,
}

/// The values of the part.
enum PartValues<'s> {
    State(&'s Buffer),
    Lent(Lent<'s>),
    /// The bytes themselves.
    Copied(&'s [u8], Encoding),
}

impl<'s> SavedTensor<'s> {
    /// A variable of the model. If it has a leaf, each rank writes its part; otherwise rank 0 writes all.
    fn variable(state: &StateTree, path: &str, variable: &'s Lent<'s>) -> Result<Self> {
        let (part, values) = match state.leaf(path) {
            Some(leaf) => (leaf.part(), leaf.own_part(&**variable)?),
            None if state.rank() == 0 => (0..variable.elem_count(), variable.clone()),
            None => (0..0, variable.clone()),
        };
        let entry =
            EntryInfo { name: path.to_string(), dtype: variable.dtype(), shape: variable.shape().to_vec() };
        Ok(SavedTensor { entry, part, values: PartValues::Lent(values) })
    }

    /// This rank's part of a tensor of the parameter's shape.
    pub(crate) fn part_of(leaf: &Leaf, name: String, part: Tensor) -> Self {
        let entry = EntryInfo { name, dtype: dtype_of(&part), shape: leaf.shape().to_vec() };
        SavedTensor { entry, part: leaf.part(), values: PartValues::Lent(Lent::Tensor(part)) }
    }

    /// One number, written by one rank.
    #[cfg(feature = "torch")]
    pub(crate) fn number(name: String, number: Tensor, is_written: bool) -> Self {
        let entry = EntryInfo { name, dtype: number.dtype().into(), shape: Vec::new() };
        SavedTensor {
            entry,
            part: 0..usize::from(is_written),
            values: PartValues::Lent(Lent::Tensor(number)),
        }
    }

    /// Bytes of the user, written by one rank.
    fn bytes(name: &str, bytes: &'s [u8], is_written: bool) -> Self {
        let entry = EntryInfo { name: bytes_name(name), dtype: DType::U8, shape: vec![bytes.len()] };
        let part = 0..if is_written { bytes.len() } else { 0 };
        SavedTensor { entry, part, values: PartValues::Copied(bytes, Encoding::Numbers(DType::U8)) }
    }

    pub(crate) fn state(leaf: &Leaf, name: &str, tensor: &'s Buffer, shape: Vec<usize>) -> Self {
        let entry = EntryInfo { name: entry_name(leaf.path(), name), dtype: tensor.stored_dtype(), shape };
        let part = leaf.whole_of(tensor).map_or(0..0, |(_, part)| part);
        SavedTensor { entry, part, values: PartValues::State(tensor) }
    }

    /// The encoding of the bytes that are written.
    pub(super) fn encoding(&self) -> Encoding {
        let code = match &self.values {
            PartValues::State(tensor) => tensor.code(),
            PartValues::Lent(_) => None,
            PartValues::Copied(_, encoding) => return *encoding,
        };
        code.map_or(Encoding::Numbers(self.entry.dtype), Encoding::Records)
    }

    /// Appends the values to `room`.
    pub(super) fn copy_to(self, room: &mut Vec<u8>) -> io::Result<CopiedTensor> {
        let (start, encoding) = (room.len(), self.encoding());
        self.write_to(room)?;
        Ok(CopiedTensor { entry: self.entry, part: self.part, encoding, bytes: start..room.len() })
    }

    pub(super) fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        match &self.values {
            PartValues::State(tensor) => tensor.write_to(out),
            PartValues::Lent(of) => write_lent(&**of, out),
            PartValues::Copied(bytes, _) => out.write_all(bytes),
        }
    }
}

/// A tensor whose values were copied.
#[derive(Debug)]
pub(super) struct CopiedTensor {
    entry: EntryInfo,
    part: Range<usize>,
    encoding: Encoding,
    /// The range of its bytes in the memory of all copies.
    bytes: Range<usize>,
}

impl CopiedTensor {
    /// The tensor with its values in `room`.
    pub(super) fn in_room(self, room: &[u8]) -> SavedTensor<'_> {
        let CopiedTensor { entry, part, encoding, bytes } = self;
        SavedTensor { entry, part, values: PartValues::Copied(&room[bytes], encoding) }
    }
}

/// The name of a state tensor in the file.
pub(crate) fn entry_name(path: &str, tensor: &str) -> String {
    format!("{path}/{tensor}")
}

/// The tensors of a state and its model, and the user's bytes.
pub(super) fn entries<'s>(
    state: &'s StateTree,
    shapes: Vec<WholeShapes>,
    model: Option<&'s BTreeMap<String, Lent<'s>>>,
    bytes: &'s BTreeMap<String, Vec<u8>>,
) -> Result<Vec<SavedTensor<'s>>> {
    let tensors = state.leaves().zip(shapes).flat_map(|(leaf, shapes)| {
        let tensors = leaf.state.tensors().into_iter().zip(shapes);
        tensors.map(move |((name, tensor), shape)| Ok(SavedTensor::state(leaf, &name, tensor, shape)))
    });
    let variables =
        model.into_iter().flatten().map(|(path, variable)| SavedTensor::variable(state, path, variable));
    let bytes = bytes.iter().map(|(name, bytes)| Ok(SavedTensor::bytes(name, bytes, state.rank() == 0)));
    tensors.chain(variables).chain(bytes).collect()
}
