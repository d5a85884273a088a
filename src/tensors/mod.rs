//! What a tensor is to this crate: one of candle's, or without candle numbers in a shape.
//!
//! The rooms behind this one move tensors and read and write their memory. They name candle nowhere else, and
//! need no arithmetic on tensors. What does need it (rules of whole tensors, the reference engine, devices)
//! is there with candle alone.

mod bytes;
#[cfg(feature = "candle")]
mod candle;
#[cfg(not(feature = "candle"))]
mod plain;

pub(crate) use bytes::{bytes, bytes_mut, bytes_of, held_on_cpu, write_values};
#[cfg(feature = "candle")]
pub(crate) use candle::*;
#[cfg(not(feature = "candle"))]
pub(crate) use plain::*;

use crate::numbers::DType;

/// A tensor of zeros that has memory for one of them.
pub(crate) fn repeated_zero(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    zeros((), dtype, device)?.broadcast_as(shape)
}
