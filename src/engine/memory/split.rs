//! Numbers that are kept in two parts.

use half::bf16;

use super::Buffer;
use super::values::on_host;
use crate::numbers::low_bits::{LowBits, joined as join, joined_24, split as split_number, split_24};
use crate::tensors::{DType, Device, Tensor, WithDType};

/// The f32 whose parts are a bf16 and its low bits: all of them in records, or the 8 of a number of 24 bits.
pub(crate) fn joined(high: &Tensor, low_bits: &Buffer) -> crate::tensors::Result<Tensor> {
    let (highs, lows) = (on_host(high)?, low_bits.tensor()?);
    let numbers = match low_bits.as_low_bits() {
        LowBits::All => joined_as(highs, on_host::<f32>(&lows)?, |high, low| join(high, low as i32)),
        LowBits::Byte => joined_as(highs, on_host::<u8>(&lows)?, joined_24),
    };
    Tensor::from_vec(numbers, high.shape(), &Device::Cpu)?.to_device(high.device())
}

fn joined_as<L>(highs: Vec<bf16>, lows: Vec<L>, join: impl Fn(bf16, L) -> f32) -> Vec<f32> {
    highs.into_iter().zip(lows).map(|(high, low)| join(high, low)).collect()
}

/// The upper parts of f32s, and their low bits as this buffer stores them.
pub(crate) fn split(low_bits: &Buffer, next: &Tensor) -> crate::tensors::Result<(Tensor, Tensor)> {
    let exact = |number| {
        let (high, low) = split_number(number);
        (high, low as f32)
    };
    match low_bits.as_low_bits() {
        LowBits::All => split_as(next, exact),
        LowBits::Byte => split_as(next, split_24),
    }
}

fn split_as<L: WithDType>(next: &Tensor, split: impl Fn(f32) -> (bf16, L)) -> crate::tensors::Result<(Tensor, Tensor)> {
    let (highs, lows): (Vec<bf16>, Vec<L>) = on_host(&next.to_dtype(DType::F32)?)?.into_iter().map(split).unzip();
    Ok((Tensor::from_vec(highs, next.shape(), &Device::Cpu)?, Tensor::from_vec(lows, next.shape(), &Device::Cpu)?))
}
