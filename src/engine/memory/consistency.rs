//! Whether a low-precision parameter still is its master rounded.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::rounding::round_to_odd;

/// How many elements of a tensor are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// 16 runs of 64 elements, evenly spread: always the same ones. Nothing, if the master is not on the CPU.
    Sample,
    /// All.
    Whole,
}

const RUNS: usize = 16;
const RUN: usize = 64;

/// An element in which the parameter is not its master rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Difference {
    pub(crate) index: usize,
    pub(crate) parameter: f64,
    pub(crate) master: f64,
}

/// The first element of `parameter` that is not that of `master` rounded to nearest even, or the same if they have the same dtype.
pub(crate) fn difference(master: &Tensor, parameter: &Tensor, extent: Extent) -> candle_core::Result<Option<Difference>> {
    if extent == Extent::Whole {
        let (master, parameter) = (master.to_device(&Device::Cpu)?, parameter.to_device(&Device::Cpu)?);
        return Ok(on_cpu(&master, &parameter, std::iter::once(0..master.elem_count())));
    }
    let length = master.elem_count();
    if master.device().is_cpu() && !parameter.device().is_cpu() {
        return apart(master, parameter);
    }
    if !master.device().is_cpu() || length <= RUNS * RUN {
        return Ok(on_cpu(master, parameter, std::iter::once(0..length)));
    }
    let runs = (0..RUNS).map(|run| {
        let start = run * (length - RUN) / (RUNS - 1);
        start..start + RUN
    });
    Ok(on_cpu(master, parameter, runs))
}

/// As [`difference`] in a sample, for a parameter on another device than its master. Only the sample is brought here.
fn apart(master: &Tensor, parameter: &Tensor) -> candle_core::Result<Option<Difference>> {
    let length = master.elem_count();
    let stride = length / RUNS;
    if length <= RUNS * RUN {
        return difference(master, &parameter.detach().to_device(&Device::Cpu)?, Extent::Sample);
    }
    let sample = |tensor: &Tensor| {
        let runs = tensor.detach().flatten_all()?.narrow(0, 0, RUNS * stride)?.reshape((RUNS, stride))?.narrow(1, 0, RUN)?;
        runs.contiguous()?.flatten_all()?.to_device(&Device::Cpu)
    };
    let found = on_cpu(&sample(master)?, &sample(parameter)?, std::iter::once(0..RUNS * RUN));
    Ok(found.map(|found| Difference { index: found.index / RUN * stride + found.index % RUN, ..found }))
}

fn on_cpu(master: &Tensor, parameter: &Tensor, runs: impl Iterator<Item = Range<usize>>) -> Option<Difference> {
    // Only the parameter is shared with other threads, so no other thread waits for one of these locks while it holds the other.
    let (parameter_storage, parameter_layout) = parameter.storage_and_layout();
    let (master_storage, master_layout) = master.storage_and_layout();
    let (Storage::Cpu(low), Storage::Cpu(high)) = (&*parameter_storage, &*master_storage) else { return None };
    let (low_start, _) = parameter_layout.contiguous_offsets()?;
    let (high_start, _) = master_layout.contiguous_offsets()?;
    macro_rules! compare {
        ($low:ident, $high:ident, $round:expr) => {
            compare!($low, $high, $round, |_: &[_], _: &[_]| false)
        };
        // `same` may say quickly that a part is the same; otherwise its elements are compared one by one.
        ($low:ident, $high:ident, $round:expr, $same:expr) => {
            runs.flat_map(|run| parts(run)).find_map(|run| {
                if $same(&$low[low_start..][run.clone()], &$high[high_start..][run.clone()]) {
                    return None;
                }
                let pairs = $low[low_start..][run.clone()].iter().zip(&$high[high_start..][run.clone()]);
                run.zip(pairs)
                    .find(|(_, (low, high))| differ($round(**high).into(), (**low).into()))
                    .map(|(index, (low, high))| Difference { index, parameter: (*low).into(), master: (*high).into() })
            })
        };
    }
    match (low, high) {
        (CpuStorage::BF16(low), CpuStorage::F32(high)) => compare!(low, high, bf16::from_f32, is_rounded::<bf16>),
        (CpuStorage::F16(low), CpuStorage::F32(high)) => compare!(low, high, f16::from_f32, is_rounded::<f16>),
        (CpuStorage::BF16(low), CpuStorage::F64(high)) => compare!(low, high, |high| bf16::from_f32(round_to_odd(high))),
        (CpuStorage::F16(low), CpuStorage::F64(high)) => compare!(low, high, |high| f16::from_f32(round_to_odd(high))),
        (CpuStorage::F32(low), CpuStorage::F64(high)) => compare!(low, high, |high| high as f32),
        (CpuStorage::BF16(low), CpuStorage::BF16(high)) => compare!(low, high, bf16::from),
        (CpuStorage::F16(low), CpuStorage::F16(high)) => compare!(low, high, f16::from),
        (CpuStorage::F32(low), CpuStorage::F32(high)) => compare!(low, high, f32::from),
        (CpuStorage::F64(low), CpuStorage::F64(high)) => compare!(low, high, f64::from),
        _ => None,
    }
}

/// Cuts a run into parts of at most [`RUN`] elements.
fn parts(run: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = run.end;
    run.step_by(RUN).map(move |start| start..end.min(start + RUN))
}

/// Whether all of `low` is `high` rounded, to the bit; NaN may differ in bits.
fn is_rounded<T: Copy + Default + PartialEq>(low: &[T], high: &[f32]) -> bool
where
    [T]: HalfFloatSliceExt,
{
    let mut rounded = [T::default(); RUN];
    let rounded = &mut rounded[..low.len()];
    rounded.convert_from_f32_slice(high);
    rounded == low
}

fn differ(a: f64, b: f64) -> bool {
    a != b && !(a.is_nan() && b.is_nan())
}

/// Whether a master of this dtype says more than a parameter of that one.
pub(crate) fn is_wider(master: DType, parameter: DType) -> bool {
    parameter.size_in_bytes() < master.size_in_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What brings a sample from another device, for tensors that are both here.
    #[test]
    fn a_sample_of_another_device_has_the_places_of_the_whole() {
        for length in [1, 1024, 1025, 5000, 10_007] {
            let values: Vec<f32> = (0..length).map(|i| i as f32).collect();
            let master = Tensor::from_vec(values.clone(), length, &Device::Cpu).expect("a tensor");
            for dtype in [DType::F32, DType::BF16] {
                let parameter =
                    |values: Vec<f32>| Tensor::from_vec(values, length, &Device::Cpu).and_then(|x| x.to_dtype(dtype)).expect("a tensor");
                assert_eq!(apart(&master, &parameter(values.clone())).expect("a comparison"), None);
                let stride = if length > RUNS * RUN { length / RUNS } else { RUN };
                let last = if length > RUNS * RUN { 15 * stride + RUN - 1 } else { length - 1 };
                for index in [0, last / stride * stride, last] {
                    let mut changed = values.clone();
                    changed[index] = -3.0;
                    let found = apart(&master, &parameter(changed)).expect("a comparison").expect("a difference");
                    assert_eq!(found, Difference { index, parameter: -3.0, master: index as f64 });
                }
            }
        }
    }
}
