//! The header of a safetensors file. Reading it takes little more memory than its length, even if the numbers
//! in the header are false.
//!
//! The library's parser is not used, because it buffers every value twice, and a short text can have many
//! values. The library's check of the tensors is used: `Metadata::new`.

use std::collections::HashSet;
use std::fmt;

use safetensors::SafeTensorError;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use super::source::Source;

/// The largest header in bytes that the safetensors libraries read.
pub(crate) const LARGEST_HEADER: usize = 100_000_000;

/// A header that has been compared with the length of its file.
pub(super) struct Header {
    pub(super) tensors: Metadata,
    /// The first byte after the header, where the tensors begin.
    pub(super) end: usize,
    pub(super) texts: Texts,
}

/// A header as the file has it. The tensors may have any order and any places.
struct HeaderParts {
    tensors: Vec<(String, TensorInfo)>,
    texts: Texts,
}

/// The texts of a file's metadata that this crate reads.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Texts {
    /// The description of a state, in a checkpoint.
    pub(crate) optimisers: Option<String>,
    /// The groups of torch's optimiser.
    #[cfg(feature = "torch")]
    pub(crate) param_groups: Option<String>,
}

impl Header {
    /// Reads the header of a file, and refuses a file that is not whole.
    pub(super) fn read(file: &Source) -> Result<Self, SafeTensorError> {
        const LENGTH: usize = size_of::<u64>();
        let rest = file
            .length()
            .checked_sub(LENGTH as u64)
            .ok_or(SafeTensorError::HeaderTooSmall)?;
        let mut buffer = Vec::new();
        let length = file
            .read(0, LENGTH, &mut buffer)?
            .first_chunk()
            .copied()
            .map_or(0, u64::from_le_bytes);
        if length > LARGEST_HEADER as u64 {
            return Err(SafeTensorError::HeaderTooLarge);
        }
        // The length is checked before memory is allocated for the header.
        let data_length = rest
            .checked_sub(length)
            .ok_or(SafeTensorError::InvalidHeaderLength)?;
        let header = file.read(LENGTH as u64, length as usize, &mut buffer)?;
        let HeaderParts { mut tensors, texts } =
            serde_json::from_slice(header).map_err(SafeTensorError::InvalidHeaderDeserialization)?;
        if tensors.iter().any(|(_, info)| !has_strides(&info.shape)) {
            return Err(SafeTensorError::ValidationOverflow);
        }
        // `Metadata::new` accepts only tensors that lie one after another, without gaps.
        tensors.sort_by_key(|(_, info)| info.data_offsets);
        let metadata = Metadata::new(None, tensors)?;
        if metadata.data_len() as u64 != data_length {
            return Err(SafeTensorError::MetadataIncompleteBuffer);
        }
        Ok(Header {
            tensors: metadata,
            end: LENGTH + length as usize,
            texts,
        })
    }
}

/// Whether the strides of this shape fit `usize`. A shape with a length of 0 has no elements, and may have
/// any other lengths, which candle multiplies nevertheless.
fn has_strides(shape: &[usize]) -> bool {
    shape
        .iter()
        .rev()
        .try_fold(1usize, |stride, length| stride.checked_mul(*length))
        .is_some()
}

impl<'de> Deserialize<'de> for HeaderParts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PartsVisitor)
    }
}

struct PartsVisitor;

impl<'de> Visitor<'de> for PartsVisitor {
    type Value = HeaderParts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderParts, A::Error> {
        let mut parts = HeaderParts {
            tensors: Vec::new(),
            texts: Texts::default(),
        };
        let mut names = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format_args!(
                    "two entries with the name {name:?}"
                )));
            }
            match name.as_str() {
                "__metadata__" => parts.texts = map.next_value()?,
                _ => parts.tensors.push((name, map.next_value()?)),
            }
        }
        Ok(parts)
    }
}
