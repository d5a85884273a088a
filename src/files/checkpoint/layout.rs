//! The tensors of a file, the parts that this rank writes, and the layout of the file.
//!
//! The layout follows from names, shapes and dtypes alone, so all ranks compute the same layout.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, Write};
use std::ops::Range;

use safetensors::tensor::{Metadata, TensorInfo};

use super::agreement::WholeShapes;
use super::file::checksum_place;
use super::record::{KEY, Record, bytes_name, damage_error, json_error};
use crate::engine::Buffer;
use crate::error::{Error, ErrorKind, Result};
use crate::files::tensor_file::{LARGEST_HEADER, format_error};
use crate::model::cuts::is_running_statistic;
use crate::model::lent::{Lent, serialise_lent};
use crate::numbers::{DType, Encoding};
use crate::tensors::{Tensor, dtype_of, file_dtype};
use crate::tree::{Leaf, StateTree};

/// The entry of a tensor in the header.
#[derive(Debug)]
pub(super) struct EntryInfo {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
}

/// The place of everything in a file.
#[derive(Debug)]
pub(super) struct FileLayout {
    /// All bytes before the tensors, with zeros in the place of the checksum.
    pub(super) head: Vec<u8>,
    /// The position of the checksum's first digit, in a file that has a checksum.
    pub(super) checksum: Option<u64>,
    /// The position of each tensor's first byte, and the width of its elements in bytes.
    entries: Vec<(u64, usize)>,
    /// The number of bytes of the whole file.
    pub(super) length: u64,
}

/// The metadata of a file.
#[derive(Clone, Copy)]
pub(crate) enum Remarks<'r> {
    /// Nothing, for plain weights.
    Nothing,
    /// The description of a checkpoint.
    Checkpoint(&'r Record),
    /// A text under its name.
    #[cfg_attr(
        not(feature = "torch"),
        expect(dead_code, reason = "only files for torch have one")
    )]
    Text(&'static str, &'r str),
}

impl EntryInfo {
    /// The order of the safetensors library: the widest dtype first, so that all tensors are aligned.
    pub(super) fn compare(&self, other: &Self) -> Ordering {
        other
            .dtype
            .size_in_bytes()
            .cmp(&self.dtype.size_in_bytes())
            .then_with(|| self.name.cmp(&other.name))
    }
}

impl FileLayout {
    /// The layout of a file of these tensors, given in file order.
    pub(super) fn new<'e>(
        entries: impl Iterator<Item = &'e EntryInfo>,
        remarks: Remarks<'_>,
    ) -> Result<Self> {
        // The format uses this name for the metadata.
        let mut names = HashSet::from(["__metadata__"]);
        let (mut tensors, mut entry_places) = (Vec::new(), Vec::new());
        let mut end = 0;
        for EntryInfo { name, dtype, shape } in entries {
            if !names.insert(name) {
                let problem = format!("two tensors would have the name {name:?} in the file");
                return Err(Error::new(ErrorKind::Model, problem).with_remedy("rename a parameter"));
            }
            let Some(file_dtype) = file_dtype(*dtype) else {
                let expected = "U8, U32, I16, I32, I64, F16, BF16, F32 or F64, which files can hold";
                return Err(Error::dtype(format_args!("{name:?}"), dtype, expected)
                    .with_remedy("convert it before it is saved"));
            };
            let (start, width) = (end, dtype.size_in_bytes());
            end += shape.iter().product::<usize>() * width;
            tensors.push((
                name.clone(),
                TensorInfo {
                    dtype: file_dtype,
                    shape: shape.clone(),
                    data_offsets: (start, end),
                },
            ));
            entry_places.push((start as u64, width));
        }
        let head = head(tensors, remarks)?;
        let missing = || damage_error("it has no place for the checksum");
        let checksum = match remarks {
            Remarks::Checkpoint(_) => Some(checksum_place(&head).ok_or_else(missing)?.start as u64),
            _ => None,
        };
        let head_length = head.len() as u64;
        entry_places
            .iter_mut()
            .for_each(|(start, _)| *start += head_length);
        Ok(FileLayout {
            head,
            checksum,
            entries: entry_places,
            length: head_length + end as u64,
        })
    }

    /// The range of bytes of some elements of a tensor, in row-major order.
    pub(super) fn place(&self, entry: usize, elements: &Range<usize>) -> Range<u64> {
        let (start, width) = self.entries[entry];
        let byte = |element: usize| start + (element * width) as u64;
        byte(elements.start)..byte(elements.end)
    }
}

/// The bytes before the tensors: the length of the header, and the header.
fn head(tensors: Vec<(String, TensorInfo)>, remarks: Remarks<'_>) -> Result<Vec<u8>> {
    let text = match remarks {
        Remarks::Nothing => None,
        Remarks::Checkpoint(record) => Some((KEY, serde_json::to_string(record).map_err(json_error)?)),
        Remarks::Text(name, text) => Some((name, text.to_string())),
    };
    let texts = text.map(|(name, text)| HashMap::from([(name.to_string(), text)]));
    let metadata = Metadata::new(texts, tensors).map_err(format_error)?;
    // The first 8 bytes are for the length. Spaces fill the header up to a multiple of 8 bytes, so that the
    // tensors are aligned.
    let mut head = vec![0; size_of::<u64>()];
    serde_json::to_writer(&mut head, &metadata).map_err(json_error)?;
    head.resize(head.len().next_multiple_of(size_of::<u64>()), b' ');
    let length = head.len() - size_of::<u64>();
    if length > LARGEST_HEADER {
        return Err(
            Error::new(ErrorKind::Unsupported, "names and hyper-parameters would take")
                .with_got(format_args!("{length} bytes"))
                .with_expected(format_args!(
                    "at most {LARGEST_HEADER}, because no safetensors file can have more"
                ))
                .with_remedy("give shorter names to parameters and bytes"),
        );
    }
    head[..size_of::<u64>()].copy_from_slice(&(length as u64).to_le_bytes());
    Ok(head)
}

/// A tensor in the file, and the part of it that this rank writes.
pub(crate) struct SavedTensor<'s> {
    pub(super) entry: EntryInfo,
    /// The elements that this rank writes, in row-major order.
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
    /// A variable of the model. If the variable has a leaf, each rank writes its part. Rank 0 writes other
    /// variables, and those that move in the forward passes of each rank, because their parts would not fit
    /// each other.
    fn variable(state: &StateTree, path: &str, variable: &'s Lent<'s>) -> Result<Self> {
        let may_differ = |leaf: &&Leaf| leaf.is_unreached() || is_running_statistic(path);
        let (part, values) = match state.leaf(path).filter(|leaf| !may_differ(leaf)) {
            Some(leaf) => (leaf.part(), leaf.own_part(&**variable)?),
            None if state.world.rank() == 0 => (0..variable.elem_count(), variable.clone()),
            None => (0..0, variable.clone()),
        };
        let entry = EntryInfo {
            name: path.to_string(),
            dtype: variable.dtype(),
            shape: variable.shape().to_vec(),
        };
        Ok(SavedTensor {
            entry,
            part,
            values: PartValues::Lent(values),
        })
    }

    /// This rank's part of a tensor of the parameter's shape.
    pub(crate) fn part_of(leaf: &Leaf, name: String, part: Tensor) -> Self {
        let entry = EntryInfo {
            name,
            dtype: dtype_of(&part),
            shape: leaf.shape().to_vec(),
        };
        SavedTensor {
            entry,
            part: leaf.part(),
            values: PartValues::Lent(Lent::Tensor(part)),
        }
    }

    /// One number, written by one rank.
    #[cfg(feature = "torch")]
    pub(crate) fn number(name: String, number: Tensor, is_written: bool) -> Self {
        let entry = EntryInfo {
            name,
            dtype: number.dtype().into(),
            shape: Vec::new(),
        };
        SavedTensor {
            entry,
            part: 0..usize::from(is_written),
            values: PartValues::Lent(Lent::Tensor(number)),
        }
    }

    /// Bytes of the user, written by one rank.
    fn bytes(name: &str, bytes: &'s [u8], is_written: bool) -> Self {
        let entry = EntryInfo {
            name: bytes_name(name),
            dtype: DType::U8,
            shape: vec![bytes.len()],
        };
        let part = 0..if is_written { bytes.len() } else { 0 };
        SavedTensor {
            entry,
            part,
            values: PartValues::Copied(bytes, Encoding::Numbers(DType::U8)),
        }
    }

    /// A state tensor, or this rank's part of one.
    pub(crate) fn state(leaf: &Leaf, name: &str, tensor: &'s Buffer, shape: Vec<usize>) -> Self {
        let entry = EntryInfo {
            name: entry_name(leaf.path(), name),
            dtype: tensor.stored_dtype(),
            shape,
        };
        let part = leaf.stored_extent(tensor).map_or(0..0, |(_, part)| part);
        SavedTensor {
            entry,
            part,
            values: PartValues::State(tensor),
        }
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
        Ok(CopiedTensor {
            entry: self.entry,
            part: self.part,
            encoding,
            bytes: start..room.len(),
        })
    }

    /// Writes the values of the part.
    pub(super) fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        match &self.values {
            PartValues::State(tensor) => tensor.write_to(out),
            PartValues::Lent(lent) => serialise_lent(&**lent, out),
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
    /// The tensor, with values that lie in `room`.
    pub(super) fn in_room(self, room: &[u8]) -> SavedTensor<'_> {
        let CopiedTensor {
            entry,
            part,
            encoding,
            bytes,
        } = self;
        SavedTensor {
            entry,
            part,
            values: PartValues::Copied(&room[bytes], encoding),
        }
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
    let variables = model
        .into_iter()
        .flatten()
        .map(|(path, variable)| SavedTensor::variable(state, path, variable));
    let bytes = bytes
        .iter()
        .map(|(name, bytes)| Ok(SavedTensor::bytes(name, bytes, state.world.rank() == 0)));
    tensors.chain(variables).chain(bytes).collect()
}
