//! The layout of a file. It follows from names, shapes and dtypes alone, so all ranks compute the same one.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

use safetensors::tensor::{Metadata, TensorInfo};

use super::file::checksum_place;

use super::record::{KEY, Record, damaged, damaged_by};
use crate::error::{Error, ErrorKind, Result};
use crate::files::tensor_file::{LARGEST_HEADER, not_whole};
use crate::numbers::DType;
use crate::tensors::in_file;

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
    /// Where the digits of the checksum begin, in a file that has one.
    pub(super) checksum: Option<u64>,
    /// Where each tensor begins, and the bytes of an element.
    entries: Vec<(u64, usize)>,
    /// The bytes of the whole file.
    pub(super) length: u64,
}

/// The metadata of a file.
#[derive(Clone, Copy)]
pub(crate) enum Remarks<'r> {
    /// Nothing, for plain weights.
    Nothing,
    /// The description of a checkpoint.
    Checkpoint(&'r Record),
    /// A text under a name.
    #[cfg_attr(not(feature = "torch"), expect(dead_code, reason = "only files for torch have one"))]
    Text(&'static str, &'r str),
}

impl EntryInfo {
    /// The order of the safetensors library: the widest first, so that all are aligned.
    pub(super) fn in_file_order(&self, other: &Self) -> Ordering {
        other.dtype.size_in_bytes().cmp(&self.dtype.size_in_bytes()).then_with(|| self.name.cmp(&other.name))
    }
}

impl FileLayout {
    /// The layout of a file of these tensors, given in file order.
    pub(super) fn new<'e>(
        entries: impl Iterator<Item = &'e EntryInfo>,
        remarks: Remarks<'_>,
    ) -> Result<Self> {
        // The format uses this name itself.
        let mut names = HashSet::from(["__metadata__"]);
        let (mut tensors, mut places) = (Vec::new(), Vec::new());
        let mut end = 0;
        for EntryInfo { name, dtype, shape } in entries {
            if !names.insert(name) {
                let problem = format!("two tensors would have the name {name:?} in the file");
                return Err(Error::new(ErrorKind::Model, problem).with_remedy("rename a parameter"));
            }
            let Some(in_file) = in_file(*dtype) else {
                let expected = "U8, U32, I16, I32, I64, F16, BF16, F32 or F64, which files can hold";
                return Err(Error::dtype(format_args!("{name:?}"), dtype, expected)
                    .with_remedy("convert it before it is saved"));
            };
            let (start, width) = (end, dtype.size_in_bytes());
            end += shape.iter().product::<usize>() * width;
            tensors.push((
                name.clone(),
                TensorInfo { dtype: in_file, shape: shape.clone(), data_offsets: (start, end) },
            ));
            places.push((start as u64, width));
        }
        let head = head(tensors, remarks)?;
        let missing = || damaged("it has no place for the checksum");
        let checksum = match remarks {
            Remarks::Checkpoint(_) => Some(checksum_place(&head).ok_or_else(missing)?),
            _ => None,
        };
        let start = head.len() as u64;
        places.iter_mut().for_each(|(place, _)| *place += start);
        Ok(FileLayout {
            head,
            checksum: checksum.map(|place| place.start as u64),
            entries: places,
            length: start + end as u64,
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
    let description = match remarks {
        Remarks::Nothing => None,
        Remarks::Checkpoint(record) => Some((KEY, serde_json::to_string(record).map_err(damaged_by)?)),
        Remarks::Text(name, text) => Some((name, text.to_string())),
    };
    let description = description.map(|(name, text)| HashMap::from([(name.to_string(), text)]));
    let metadata = Metadata::new(description, tensors).map_err(not_whole)?;
    // The first 8 bytes are for the length. Spaces fill the header up to a multiple of 8 bytes, so that the
    // tensors are aligned.
    let mut head = vec![0; size_of::<u64>()];
    serde_json::to_writer(&mut head, &metadata).map_err(damaged_by)?;
    head.resize(head.len().next_multiple_of(size_of::<u64>()), b' ');
    let length = head.len() - size_of::<u64>();
    if length > LARGEST_HEADER {
        return Err(Error::new(ErrorKind::Unsupported, "names and hyper-parameters would take")
            .with_got(format_args!("{length} bytes"))
            .with_expected(format_args!(
                "at most {LARGEST_HEADER}, because no safetensors file can have more"
            ))
            .with_remedy("give shorter names to parameters and bytes"));
    }
    head[..size_of::<u64>()].copy_from_slice(&(length as u64).to_le_bytes());
    Ok(head)
}
