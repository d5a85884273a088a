//! Precise numbers in two parts: a parameter, and its low bits or the compensation of a Kahan sum.

use half::bf16;

use super::Buffer;
use super::values::{on_host, rounded};
use crate::numbers::low_bits::{
    LowBits, byte_distance_from, distance_from, joined as join, joined_24, split as split_number, split_24,
};
use crate::numbers::{DType, rounded_once};
use crate::tensors::{Device, Tensor, WithDType, dtype_of, in_dtype};

/// Joins bf16s and their low bits to f32s.
pub(crate) fn joined(high: &Tensor, low_bits: &Buffer) -> crate::tensors::Result<Tensor> {
    let (highs, lows) = (on_host(high)?, low_bits.tensor()?);
    let numbers = match low_bits.low_bits_kind() {
        LowBits::All => join_pairs(highs, on_host::<f32>(&lows)?, |high, low| join(high, low as i32)),
        LowBits::Byte => join_pairs(highs, on_host::<u8>(&lows)?, joined_24),
    };
    Tensor::from_vec(numbers, high.shape(), &Device::Cpu)?.to_device(high.device())
}

fn join_pairs<L>(highs: Vec<bf16>, lows: Vec<L>, join: impl Fn(bf16, L) -> f32) -> Vec<f32> {
    highs
        .into_iter()
        .zip(lows)
        .map(|(high, low)| join(high, low))
        .collect()
}

/// Splits f32s into bf16s and low bits, in the format of `low_bits`.
pub(crate) fn split(low_bits: &Buffer, next: &Tensor) -> crate::tensors::Result<(Tensor, Tensor)> {
    let split_exactly = |number| {
        let (high, low) = split_number(number);
        (high, low as f32)
    };
    match low_bits.low_bits_kind() {
        LowBits::All => split_each(next, split_exactly),
        LowBits::Byte => split_each(next, split_24),
    }
}

fn split_each<L: WithDType>(
    next: &Tensor,
    split: impl Fn(f32) -> (bf16, L),
) -> crate::tensors::Result<(Tensor, Tensor)> {
    let (highs, lows): (Vec<bf16>, Vec<L>) = on_host(&in_dtype(next, DType::F32)?)?
        .into_iter()
        .map(split)
        .unzip();
    Ok((
        Tensor::from_vec(highs, next.shape(), &Device::Cpu)?,
        Tensor::from_vec(lows, next.shape(), &Device::Cpu)?,
    ))
}

/// Overwrites low bits, while the bf16s in `high` stay.
///
/// Among the numbers whose upper part is the bf16, each becomes the number nearest to `next`.
pub(crate) fn set_low_bits(
    low_bits: &mut Buffer,
    high: &Tensor,
    next: &Tensor,
) -> crate::tensors::Result<()> {
    let all_low_bits = |(high, next)| distance_from(high, next) as f32;
    let low_byte = |(high, next)| byte_distance_from(high, next);
    let nearest = rounded_to(high, next, DType::F32)?;
    let pairs = on_host::<bf16>(high)?
        .into_iter()
        .zip(on_host::<f32>(&in_dtype(&nearest, DType::F32)?)?);
    let lows = match low_bits.low_bits_kind() {
        LowBits::All => Tensor::from_vec(pairs.map(all_low_bits).collect(), nearest.shape(), &Device::Cpu),
        LowBits::Byte => Tensor::from_vec(pairs.map(low_byte).collect(), nearest.shape(), &Device::Cpu),
    };
    low_bits.set(&lows?)
}

/// Rounds `next` to `dtype`, if possible to a number that rounds to `x` in the dtype of `x`.
///
/// The nearest number of `dtype` may round to a neighbour of `x`. If the next number of `dtype` towards `x`
/// rounds to `x`, that number is the result, otherwise the nearest number.
pub(crate) fn rounded_to(x: &Tensor, next: &Tensor, dtype: DType) -> crate::tensors::Result<Tensor> {
    let round_as_x = |number: f64| rounded_once(number, dtype_of(x));
    let round_towards = |x: f64, next: f64| {
        let (is_above, next_f32) = (x > next, next as f32);
        let (near, neighbour) = match dtype {
            DType::F64 => (
                next,
                if is_above {
                    next.next_up()
                } else {
                    next.next_down()
                },
            ),
            _ => {
                let neighbour = if is_above {
                    next_f32.next_up()
                } else {
                    next_f32.next_down()
                };
                (f64::from(next_f32), f64::from(neighbour))
            }
        };
        if round_as_x(near) != x && round_as_x(neighbour) == x {
            neighbour
        } else {
            near
        }
    };
    let [xs, nexts] =
        [x, next].map(|tensor| in_dtype(tensor, DType::F64).and_then(|tensor| on_host::<f64>(&tensor)));
    let numbers = xs?
        .into_iter()
        .zip(nexts?)
        .map(|(x, next)| round_towards(x, next))
        .collect::<Vec<_>>();
    Tensor::from_vec(numbers, next.shape(), &Device::Cpu)
}

/// Splits `next` into numbers of the dtype of `x` and compensations: what the numbers lack.
///
/// Several pairs have the same sum. If no number is nearer to `next` than `x`, then `x` stays. If the sum is
/// `next` already, `compensation` stays, too. Without these rules, a parameter at a tie would move to
/// its neighbour when its precise value is read and set again.
pub(crate) fn compensated(
    x: &Tensor,
    compensation: &Buffer,
    next: &Tensor,
) -> crate::tensors::Result<(Tensor, Tensor)> {
    let as_f32 = |tensor: &Tensor| on_host::<f32>(&in_dtype(tensor, DType::F32)?);
    let (xs, compensations, nearest) = (
        as_f32(x)?,
        as_f32(&compensation.tensor()?)?,
        as_f32(&rounded(next, x.dtype())?)?,
    );
    let nexts = on_host::<f64>(&in_dtype(next, DType::F64)?)?;
    let pair = |(((x, compensation), nearest), next): (((f32, f32), f32), f64)| {
        let difference = |high: f32| next - f64::from(high);
        match difference(x).abs() <= difference(nearest).abs() {
            true if f64::from(x + compensation) == next => (x, compensation.into()),
            true => (x, difference(x)),
            false => (nearest, difference(nearest)),
        }
    };
    let (highs, lows): (Vec<f32>, Vec<f64>) = xs
        .into_iter()
        .zip(compensations)
        .zip(nearest)
        .zip(nexts)
        .map(pair)
        .unzip();
    Ok((
        Tensor::from_vec(highs, next.shape(), &Device::Cpu)?,
        Tensor::from_vec(lows, next.shape(), &Device::Cpu)?,
    ))
}
