//! Numbers that are kept in two parts.

use half::bf16;

use super::Buffer;
use super::values::on_host;
use crate::numbers::LowBits;
use crate::tensors::{DType, Device, Tensor, WithDType};

/// The f32 whose parts are a bf16 and its low bits.
pub(crate) fn joined(high: &Tensor, low_bits: &Buffer) -> crate::tensors::Result<Tensor> {
    let join = if low_bits.dtype() == DType::I16 { joined_as::<i16> } else { joined_as::<u8> };
    Tensor::from_vec(join(on_host(high)?, &low_bits.tensor()?)?, high.shape(), &Device::Cpu)?.to_device(high.device())
}

fn joined_as<L: LowBits + WithDType>(highs: Vec<bf16>, lows: &Tensor) -> crate::tensors::Result<Vec<f32>> {
    Ok(highs.into_iter().zip(on_host(lows)?).map(|(high, low)| L::join(high, low)).collect())
}

/// Overwrites the low bits of f32s, and returns their upper parts.
pub(crate) fn split(low_bits: &mut Buffer, next: &Tensor) -> crate::tensors::Result<Tensor> {
    let split = if low_bits.dtype() == DType::I16 { split_as::<i16> } else { split_as::<u8> };
    split(low_bits, next, on_host(&next.to_dtype(DType::F32)?)?)
}

fn split_as<L: LowBits + WithDType>(low_bits: &mut Buffer, next: &Tensor, values: Vec<f32>) -> crate::tensors::Result<Tensor> {
    let (highs, lows): (Vec<bf16>, Vec<L>) = values.into_iter().map(L::split).unzip();
    low_bits.set(&Tensor::from_vec(lows, next.shape(), &Device::Cpu)?)?;
    Tensor::from_vec(highs, next.shape(), &Device::Cpu)
}
