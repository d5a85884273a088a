//! Dtypes of candle's that [`DType`](super::DType) has no name for.

pub(super) use candle_core::DType as Other;
