//! A safetensors file in memory: what it has, with nothing taken on trust.

mod header;

use std::borrow::Cow;
use std::cmp::Ordering;

use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensorError;
use safetensors::tensor::Metadata;

use header::Header;
pub(crate) use header::LARGEST_HEADER;

/// The bytes of a whole file, and where its tensors are.
#[derive(Debug)]
pub(crate) struct TensorFile {
    bytes: Vec<u8>,
    /// Where the tensors begin in `bytes`.
    start: usize,
    tensors: Metadata,
}

impl TensorFile {
    /// The file of these bytes, and the description of the state that a checkpoint has.
    pub(crate) fn parse(bytes: Vec<u8>) -> Result<(Self, Option<String>), SafeTensorError> {
        let Header { tensors, end: start, description } = Header::read(&bytes)?;
        Ok((TensorFile { bytes, start, tensors }, description))
    }

    /// All bytes, and how many of them come before the tensors.
    pub(crate) fn bytes(&self) -> (&[u8], usize) {
        (&self.bytes, self.start)
    }

    /// The names of the tensors, in the order in which they lie in the file.
    pub(crate) fn names(&self) -> Vec<String> {
        self.tensors.offset_keys()
    }

    pub(crate) fn entry(&self, name: &str) -> Option<Entry<'_>> {
        let info = self.tensors.info(name)?;
        let (start, end) = info.data_offsets;
        // Both are within the file: the library has checked them.
        let bytes = self.bytes.get(self.start + start..self.start + end)?;
        Some(Entry { dtype: info.dtype, shape: &info.shape, bytes })
    }
}

/// A tensor in the file.
pub(crate) struct Entry<'f> {
    pub(crate) dtype: safetensors::Dtype,
    pub(crate) shape: &'f [usize],
    bytes: &'f [u8],
}

impl Entry<'_> {
    pub(crate) fn tensor(&self, device: &Device) -> candle_core::Result<Tensor> {
        let dtype = DType::try_from(self.dtype)?;
        let bytes = if cfg!(target_endian = "little") { Cow::Borrowed(self.bytes) } else { Cow::Owned(self.swapped(dtype)) };
        Tensor::from_raw_buffer(&bytes, dtype, self.shape, device)
    }

    fn swapped(&self, dtype: DType) -> Vec<u8> {
        self.bytes.chunks(dtype.size_in_bytes().max(1)).flat_map(|bytes| bytes.iter().rev().copied()).collect()
    }

    /// The first number that is infinite or NaN, or is rounded to infinity in `dtype`, with its place.
    pub(crate) fn non_finite(&self, dtype: DType) -> Option<(usize, f64)> {
        fn first<const N: usize>(bytes: &[u8], dtype: DType, number: impl Fn([u8; N]) -> f64) -> Option<(usize, f64)> {
            let (numbers, _) = bytes.as_chunks::<N>();
            first_non_finite(numbers.iter().map(|bytes| number(*bytes)), dtype)
        }
        match self.dtype {
            safetensors::Dtype::F16 => first(self.bytes, dtype, |bytes| half::f16::from_le_bytes(bytes).to_f64()),
            safetensors::Dtype::BF16 => first(self.bytes, dtype, |bytes| half::bf16::from_le_bytes(bytes).to_f64()),
            safetensors::Dtype::F32 => first(self.bytes, dtype, |bytes| f32::from_le_bytes(bytes).into()),
            safetensors::Dtype::F64 => first(self.bytes, dtype, f64::from_le_bytes),
            _ => None,
        }
    }
}

/// The first number that is infinite or NaN, or is rounded to infinity in `dtype`, with its index.
pub(crate) fn first_non_finite(numbers: impl IntoIterator<Item = f64>, dtype: DType) -> Option<(usize, f64)> {
    let limit = infinity(dtype);
    // NaN is not below the limit either.
    let is_bad = |number: f64| number.abs().partial_cmp(&limit) != Some(Ordering::Less);
    numbers.into_iter().enumerate().find(|(_, number)| is_bad(*number))
}

/// The smallest number that is rounded to infinity: half a step above the largest.
fn infinity(dtype: DType) -> f64 {
    let above = |exponent: i32, digits: i32| (2.0 - 2f64.powi(-digits)) * 2f64.powi(exponent);
    match dtype {
        DType::F16 => above(15, 11),
        DType::BF16 => above(127, 8),
        DType::F32 => above(127, 24),
        _ => f64::INFINITY,
    }
}
