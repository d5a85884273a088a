//! The mean of what several ranks have sent, added up pairwise.

use bytemuck::{Pod, try_cast_slice};
use candle_core::{DType, Device, Shape, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::convert::{Storable, cast, divide, scale, widen_bf16};
use super::threads;
use crate::engine::Isa;
use crate::engine::kernel::{BLOCK, add};
use crate::error::{Error, Result};

/// How many elements a thread takes at once.
const AT_ONCE: usize = 1 << 14;

/// What a rank has sent: the values of some elements as they lie in memory.
#[derive(Clone, Copy)]
pub(crate) struct Sent<'b> {
    pub(crate) dtype: DType,
    pub(crate) bytes: &'b [u8],
    /// How much it counts.
    pub(crate) weight: u64,
}

/// A mean that is computed window by window.
pub(crate) enum RankMean {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl RankMean {
    /// Of so many elements, in a compute dtype. They are zero.
    pub(crate) fn zeros(compute: DType, length: usize) -> Self {
        if compute == DType::F64 { RankMean::F64(vec![0.0; length]) } else { RankMean::F32(vec![0.0; length]) }
    }

    /// Puts the mean of what was sent at these elements: Σ w·g / Σ w, with pairs of neighbours added first, then pairs of pairs. So equal numbers from a
    /// power of two of ranks give that number, to the bit.
    ///
    /// # Errors
    /// If a rank has sent another number of elements than another.
    pub(crate) fn set(&mut self, start: usize, length: usize, sent: &[Sent<'_>], total: u64) -> Result<()> {
        match self {
            RankMean::F32(values) => mean(&mut values[start..start + length], sent, total),
            RankMean::F64(values) => mean(&mut values[start..start + length], sent, total),
        }
    }

    /// The values as a tensor on the CPU.
    pub(crate) fn into_tensor(self, shape: &Shape) -> candle_core::Result<Tensor> {
        match self {
            RankMean::F32(values) => Tensor::from_vec(values, shape, &Device::Cpu),
            RankMean::F64(values) => Tensor::from_vec(values, shape, &Device::Cpu),
        }
    }
}

/// SentValues of any storage dtype.
#[derive(Clone, Copy)]
enum SentValues<'b> {
    F16(&'b [f16]),
    Bf16(&'b [bf16]),
    F32(&'b [f32]),
    F64(&'b [f64]),
}

impl<'b> SentValues<'b> {
    fn of(Sent { dtype, bytes, .. }: Sent<'b>, length: usize) -> Result<Self> {
        fn cast<T: Pod>(bytes: &[u8], length: usize) -> Result<&[T]> {
            let numbers = try_cast_slice::<u8, T>(bytes).ok().filter(|numbers| numbers.len() == length);
            numbers.ok_or_else(|| Error::other(format!("{} bytes for {length} elements from another rank", bytes.len())))
        }
        Ok(match dtype {
            DType::F16 => SentValues::F16(cast(bytes, length)?),
            DType::BF16 => SentValues::Bf16(cast(bytes, length)?),
            DType::F64 => SentValues::F64(cast(bytes, length)?),
            _ => SentValues::F32(cast(bytes, length)?),
        })
    }

    fn widen<T: Storable>(self, isa: Isa, start: usize, dst: &mut [T]) {
        let range = start..start + dst.len();
        match self {
            SentValues::F16(numbers) => T::from_f16(isa, &numbers[range], dst),
            SentValues::Bf16(numbers) => widen_bf16(isa, &numbers[range], dst),
            SentValues::F32(numbers) => cast(isa, &numbers[range], dst),
            SentValues::F64(numbers) => cast(isa, &numbers[range], dst),
        }
    }
}

fn mean<T: Storable>(dst: &mut [T], sent: &[Sent<'_>], total: u64) -> Result<()> {
    let length = dst.len();
    let numbers = sent.iter().map(|&sent| Ok((SentValues::of(sent, length)?, sent.weight))).collect::<Result<Vec<_>>>()?;
    let isa = Isa::best();
    threads::run(|| {
        dst.par_chunks_mut(AT_ONCE).enumerate().for_each(|(index, dst)| {
            let mut open: Vec<([T; BLOCK], u32)> = Vec::with_capacity(8);
            for (block, dst) in dst.chunks_mut(BLOCK).enumerate() {
                mean_of_block(isa, &numbers, index * AT_ONCE + block * BLOCK, total, dst, &mut open);
            }
        });
    })
}

/// `open` are sums of 2ⁿ ranks each, that wait for as many others.
fn mean_of_block<T: Storable>(
    isa: Isa,
    numbers: &[(SentValues<'_>, u64)],
    start: usize,
    total: u64,
    dst: &mut [T],
    open: &mut Vec<([T; BLOCK], u32)>,
) {
    let length = dst.len();
    let fold = |open: &mut Vec<([T; BLOCK], u32)>| {
        let (Some((last, _)), Some((sum, level))) = (open.pop(), open.last_mut()) else { return };
        add(isa, &mut sum[..length], &last[..length]);
        *level += 1;
    };
    open.clear();
    for &(numbers, weight) in numbers {
        let mut block = [T::zero(); BLOCK];
        numbers.widen(isa, start, &mut block[..length]);
        if weight != 1 {
            scale(isa, &mut block[..length], T::rounded(weight as f64));
        }
        open.push((block, 0));
        while let [.., (_, before), (_, last)] = &open[..]
            && before == last
        {
            fold(open);
        }
    }
    while open.len() > 1 {
        fold(open);
    }
    if let Some((sum, _)) = open.first() {
        dst.copy_from_slice(&sum[..length]);
        if total != 1 {
            divide(isa, dst, T::rounded(total as f64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes<T: bytemuck::NoUninit>(values: &[T]) -> &[u8] {
        bytemuck::cast_slice(values)
    }

    #[test]
    fn pairs_are_added_first() -> Result<()> {
        // In order of ranks the small ones would be lost one after another.
        let (one, small) = ([1f32; 300], [f32::EPSILON / 2.0; 300]);
        let sent = |values, weight| Sent { dtype: DType::F32, bytes: bytes(values), weight };
        let four = [sent(&one, 1), sent(&one, 1), sent(&small, 1), sent(&small, 1)];
        let mut mean = RankMean::zeros(DType::F32, 310);
        mean.set(5, 300, &four, 1)?;
        let RankMean::F32(values) = &mean else { panic!("f32") };
        assert_eq!((values[4], values[5], values[304], values[305]), (0.0, 2.0 + f32::EPSILON, 2.0 + f32::EPSILON, 0.0));
        // Three: the first two, and then the third.
        mean.set(0, 300, &[sent(&small, 1), sent(&small, 1), sent(&one, 1)], 3)?;
        let RankMean::F32(values) = &mean else { panic!("f32") };
        assert_eq!(values[0], (1.0 + f32::EPSILON) / 3.0);
        Ok(())
    }

    #[test]
    fn dtypes_and_weights_may_differ() -> Result<()> {
        let (halves, doubles) = ([bf16::from_f32(3.0); 2], [0.5f64; 2]);
        let sent =
            [Sent { dtype: DType::BF16, bytes: bytes(&halves), weight: 2 }, Sent { dtype: DType::F64, bytes: bytes(&doubles), weight: 6 }];
        let mut mean = RankMean::zeros(DType::F64, 2);
        mean.set(0, 2, &sent, 8)?;
        assert_eq!(mean.into_tensor(&Shape::from(2))?.to_vec1::<f64>()?, [1.125, 1.125]);
        assert!(
            RankMean::zeros(DType::F32, 3).set(0, 3, &sent, 8).is_err_and(|error| error.to_string().contains("4 bytes for 3 elements"))
        );
        Ok(())
    }
}
