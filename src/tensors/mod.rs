//! What a tensor is to this crate: one of candle's.

mod bytes;
mod candle;

pub(crate) use bytes::{bytes, bytes_mut, bytes_of, write_values};
pub(crate) use candle::*;
