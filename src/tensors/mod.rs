//! The tensors of this crate: candle's, or without the feature `candle` those of `plain.rs`.
//!
//! Both kinds of tensors have the same names and functions, so that most other modules are written once,
//! without naming candle. Most modules move tensors, read and write their memory, and need hardly any
//! arithmetic. Code that needs more arithmetic (rules of whole tensors, the reference engine, devices) exists
//! only with candle.

mod bytes;
#[cfg(feature = "candle")]
mod candle;
#[cfg(not(feature = "candle"))]
mod plain;
mod room;

pub(crate) use bytes::{bytes, bytes_mut, bytes_of, cpu_extent, write_values};
#[cfg(feature = "candle")]
pub(crate) use candle::*;
#[cfg(not(feature = "candle"))]
pub(crate) use plain::*;
#[cfg(feature = "emulate")]
pub(crate) use room::LARGEST_ALLOCATION;
pub(crate) use room::allocate;

use safetensors::Dtype;

use crate::numbers::DType::{self, BF16, F16, F32, F64, I16, I32, I64, U8, U32};

/// The dtypes that files have, as those of this crate and of `safetensors`. No function of candle's is used,
/// because candle may be built with another version of `safetensors` than this crate.
const FILE_DTYPES: [(DType, Dtype); 9] = [
    (U8, Dtype::U8),
    (U32, Dtype::U32),
    (I16, Dtype::I16),
    (I32, Dtype::I32),
    (I64, Dtype::I64),
    (BF16, Dtype::BF16),
    (F16, Dtype::F16),
    (F32, Dtype::F32),
    (F64, Dtype::F64),
];

/// The dtype of this crate for the dtype of a tensor in a file.
pub(crate) fn dtype_from_file(dtype: Dtype) -> Result<DType> {
    let row = FILE_DTYPES.iter().find(|row| row.1 == dtype);
    row.map(|row| row.0)
        .ok_or_else(|| failure(format!("tensors of dtype {dtype:?} are not read")))
}

/// The dtype of a file's tensor for a dtype of this crate; `None` if no file can have the dtype.
pub(crate) fn file_dtype(dtype: DType) -> Option<Dtype> {
    FILE_DTYPES.iter().find(|row| row.0 == dtype).map(|row| row.1)
}

/// A tensor of zeros with memory for a single number, which is repeated by strides of 0.
pub(crate) fn repeated_zero(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    zeros((), dtype, device)?.broadcast_as(shape)
}
