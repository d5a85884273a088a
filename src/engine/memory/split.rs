//! Numbers that are kept in two parts.

use candle_core::{DType, Device, Tensor};
use half::bf16;

use super::Buffer;
use super::values::{on_host, set_tensor};
use crate::numbers::{join, split};

/// The f32 of which a bf16 and its low bits are the parts.
pub(crate) fn joined(high: &Tensor, low_bits: &Buffer) -> candle_core::Result<Tensor> {
    let (highs, lows): (Vec<bf16>, Vec<i16>) = (on_host(high)?, on_host(&low_bits.tensor()?)?);
    let joined = highs.into_iter().zip(lows).map(|(high, low)| join(high, low)).collect();
    Tensor::from_vec(joined, high.shape(), &Device::Cpu)?.to_device(high.device())
}

/// Overwrites both parts of an f32.
pub(crate) fn set_split(high: &Tensor, low_bits: &mut Buffer, next: &Tensor) -> candle_core::Result<()> {
    let (highs, lows): (Vec<bf16>, Vec<i16>) = on_host::<f32>(&next.to_dtype(DType::F32)?)?.into_iter().map(split).unzip();
    set_tensor(high, &Tensor::from_vec(highs, high.shape(), &Device::Cpu)?)?;
    low_bits.set(&Tensor::from_vec(lows, high.shape(), &Device::Cpu)?)
}
