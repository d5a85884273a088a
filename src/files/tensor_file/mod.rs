//! A safetensors file. The header is checked as a whole; tensors are read by position when they are needed.

mod header;
mod source;

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::path::Path;

use safetensors::SafeTensorError;
use safetensors::tensor::Metadata;

use header::Header;
pub(crate) use header::{LARGEST_HEADER, Texts};
pub(crate) use source::Source;

use crate::error::{Error, ErrorKind};
use crate::numbers::{DType, Requirements, ranges_to_read};
use crate::tensors::{Tensor, dtype_from_file, from_bytes};

/// An open file and its header.
#[derive(Debug)]
pub(crate) struct TensorFile {
    source: Source,
    /// The first byte of the tensors in the file.
    start: usize,
    tensors: Metadata,
}

impl TensorFile {
    /// Opens the file at a path. Also returns the texts of its metadata.
    pub(crate) fn open(path: &Path) -> Result<(Self, Texts), SafeTensorError> {
        Self::from_source(Source::open(path)?)
    }

    /// [`TensorFile::open`] for the bytes of a file.
    pub(crate) fn from_bytes(bytes: Vec<u8>) -> Result<(Self, Texts), SafeTensorError> {
        Self::from_source(Source::Memory(bytes))
    }

    /// [`TensorFile::open`] for an open source.
    pub(crate) fn from_source(source: Source) -> Result<(Self, Texts), SafeTensorError> {
        let Header {
            tensors,
            end: start,
            texts,
        } = Header::read(&source)?;
        Ok((
            TensorFile {
                source,
                start,
                tensors,
            },
            texts,
        ))
    }

    /// All bytes before the tensors. If the file is not in memory, the bytes are read into `buffer`.
    pub(crate) fn head<'b>(&'b self, buffer: &'b mut Vec<u8>) -> io::Result<&'b [u8]> {
        self.source.read(0, self.start, buffer)
    }

    /// Calls `visit` with the bytes of all tensors, piece by piece.
    pub(crate) fn stream(&self, visit: impl FnMut(&[u8])) -> io::Result<()> {
        self.source.stream(self.start as u64, visit)
    }

    /// Refuses a file that was modified after it was opened, as each read does. A caller that may read no
    /// tensor needs this check.
    pub(crate) fn check_unchanged(&self) -> io::Result<()> {
        self.source.read(0, 0, &mut Vec::new()).map(drop)
    }

    /// The names of the tensors, in the order in which they lie in the file.
    pub(crate) fn names(&self) -> Vec<String> {
        self.tensors.offset_keys()
    }

    /// The tensor with this name.
    pub(crate) fn entry(&self, name: &str) -> Option<Entry<'_>> {
        let info = self.tensors.info(name)?;
        let (start, end) = info.data_offsets;
        // The sum and the difference do not overflow, because `Header::read` has compared the offsets with
        // the length of the file.
        let (start, length) = ((self.start + start) as u64, end - start);
        Some(Entry {
            dtype: info.dtype,
            shape: &info.shape,
            source: &self.source,
            start,
            length,
        })
    }
}

/// A tensor of an open file, whose bytes are still in the file.
pub(crate) struct Entry<'f> {
    pub(crate) dtype: safetensors::Dtype,
    pub(crate) shape: &'f [usize],
    source: &'f Source,
    /// The first byte in the file.
    start: u64,
    length: usize,
}

impl<'f> Entry<'f> {
    /// The number of elements. The product of the shape is not used, because it overflows for some empty
    /// tensors.
    pub(crate) fn elements(&self) -> usize {
        self.length / self.dtype.bitsize().div_ceil(8)
    }

    /// The whole tensor, on the CPU.
    pub(crate) fn tensor(&self) -> io::Result<Tensor> {
        self.tensor_from(
            self.source.read(self.start, self.length, &mut Vec::new())?,
            self.shape,
        )
    }

    /// The elements with these row-major indices, as a vector on the CPU.
    pub(crate) fn part(&self, elements: Range<usize>) -> io::Result<Tensor> {
        let length = elements.len();
        self.tensor_from(self.read(elements, &mut Vec::new())?, &[length])
    }

    /// All bytes.
    pub(crate) fn bytes(&self) -> io::Result<Vec<u8>> {
        Ok(self
            .source
            .read(self.start, self.length, &mut Vec::new())?
            .to_vec())
    }

    /// The bytes of these elements. If the file is not in memory, the bytes are read into `buffer`.
    fn read<'b>(&'b self, elements: Range<usize>, buffer: &'b mut Vec<u8>) -> io::Result<&'b [u8]> {
        if elements.start > elements.end || elements.end > self.elements() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("elements {elements:?} of {}", self.elements()),
            ));
        }
        let width = self.dtype.bitsize().div_ceil(8);
        self.source.read(
            self.start + (elements.start * width) as u64,
            elements.len() * width,
            buffer,
        )
    }

    /// A tensor of this dtype with the bytes of a file.
    fn tensor_from(&self, bytes: &[u8], shape: &[usize]) -> io::Result<Tensor> {
        let dtype = dtype_from_file(self.dtype).map_err(io::Error::other)?;
        // Files are little-endian.
        let bytes = if cfg!(target_endian = "little") {
            Cow::Borrowed(bytes)
        } else {
            Cow::Owned(swap_bytes(bytes, dtype.size_in_bytes()))
        };
        from_bytes(&bytes, dtype, shape).map_err(io::Error::other)
    }

    /// The dtype, if tensors can have this dtype.
    pub(crate) fn known_dtype(&self) -> Option<DType> {
        dtype_from_file(self.dtype).ok()
    }

    /// Refuses a tensor that does not meet the requirements. Reads the numbers of `elements`, range by range.
    pub(crate) fn check_values(
        &self,
        required: &Requirements<'_>,
        elements: Range<usize>,
    ) -> crate::Result<()> {
        let dtype = required.check_form(self.shape, self.known_dtype(), self.dtype)?;
        required.check_numbers(dtype, elements.start, |watch| {
            let mut buffer = Vec::new();
            for range in ranges_to_read(elements) {
                watch.add(self.read(range, &mut buffer).map_err(read_error)?);
                if watch.first_unfit.is_some() {
                    break;
                }
            }
            Ok(())
        })
    }
}

/// The bytes with each number of `width` bytes reversed.
fn swap_bytes(bytes: &[u8], width: usize) -> Vec<u8> {
    bytes
        .chunks(width.max(1))
        .flat_map(|bytes| bytes.iter().rev().copied())
        .collect()
}

/// The error that a file is not a whole safetensors file, or cannot be written as one.
pub(crate) fn format_error(source: SafeTensorError) -> Error {
    Error::new(
        ErrorKind::File,
        "not a whole safetensors file, so truncated, damaged or of another format",
    )
    .caused_by(source)
    .with_remedy("take an older file, or make it anew")
}

/// The error that a file cannot be read.
pub(crate) fn read_error(source: io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot read the file").caused_by(source)
}

/// The error that a file cannot be opened as a safetensors file.
pub(crate) fn open_error(source: SafeTensorError) -> Error {
    match source {
        SafeTensorError::IoError(source) => read_error(source),
        source => format_error(source),
    }
}
