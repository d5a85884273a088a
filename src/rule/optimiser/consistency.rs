//! Checks whether a low-precision parameter is still its master rounded.
//!
//! A step computes on the master and overwrites the parameter, so a value that the program has set meanwhile
//! would be lost. An update therefore compares parameter and master before anything is written. A comparison
//! of all elements would cost a pass over memory in each step, and on a device a wait. So only some elements
//! are compared, by [`Extent`]:
//!
//! ```text
//!                both on the CPU    only the parameter on a device    master on a device
//! Sample         sample             sample                            nothing
//! First          all                sample                            sample
//! Whole          all                all                               all
//! ```
//!
//! A sample consists of the same runs of 64 elements in every step. A tensor of up to 1024 elements is
//! compared whole. A longer tensor has one run for each 1024 elements, but at least 4 runs and at most 16.
//! From about 2^23 elements on, a tensor has one run for each 2^19 elements.
//!
//! For each run the engine converts the master, and bits are compared. Only if bits differ, numbers are
//! compared one by one: NaN is then equal to NaN, and 0 to -0.

use std::fmt::Display;
use std::ops::Range;

use half::slice::HalfFloatSliceExt;

use crate::engine::{Buffer, prefetch, to_bf16, to_f16};
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::{Lend, MemoryRef, flat_copy, read};
use crate::numbers::{is_wider, rounded_once};
use crate::tensors::{Device, Tensor};

/// Which elements are compared; see the table at the top of this file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// For all steps after the first.
    Sample,
    /// For the first step after the state was made, restored or moved.
    First,
    /// For calls that have to be sure.
    Whole,
}

/// The number of runs in a tensor of 2^14 to 2^23 elements, and the fewest runs in a smaller tensor. Smaller
/// tensors have fewer runs, because each run waits for memory: 16 runs took a fifth of a step of 2000 leaves
/// of 4096 elements.
const USUAL_RUNS: usize = 16;
const FEWEST_RUNS: usize = 4;
/// The number of elements in a run.
const RUN_LENGTH: usize = 64;

/// How many elements [`first_non_finite`] reads in a tensor that is longer than a run.
const PROBES: usize = 8;

/// The most elements from the start of one run to the start of the next.
///
/// Half of `BATCH_LENGTH` in `engine/offload.rs`, so that each batch that `Offload` uploads has elements of a
/// run: a batch that has not arrived must be noticed.
const LONGEST_STRIDE: usize = 1 << 19;

/// Evenly spread runs of elements, and one run at the end.
#[derive(Clone, Copy, Debug)]
struct Sample {
    length: usize,
    /// The number of runs before the run at the end.
    spread_runs: usize,
    /// The distance between the starts of two neighbouring runs before the end, at least [`RUN_LENGTH`].
    stride: usize,
}

impl Sample {
    /// The sample of a tensor of `length` elements. `None` for up to 1024 elements, which are compared whole.
    fn for_length(length: usize) -> Option<Self> {
        let fewest = (length / (USUAL_RUNS * RUN_LENGTH)).clamp(FEWEST_RUNS, USUAL_RUNS) - 1;
        let spread_runs = length.div_ceil(LONGEST_STRIDE).max(fewest);
        let stride = length / spread_runs;
        (length > USUAL_RUNS * RUN_LENGTH).then_some(Sample {
            length,
            spread_runs,
            stride,
        })
    }

    fn runs(self) -> impl Iterator<Item = Range<usize>> + Clone {
        let starts = (0..self.spread_runs)
            .map(move |run| run * self.stride)
            .chain([self.length - RUN_LENGTH]);
        starts.map(|start| start..start + RUN_LENGTH)
    }

    /// Copies the elements of the sample in `x`, one after another, to the CPU. `name` is for errors.
    fn copy_to_cpu(self, name: &'static str, x: &dyn Lend) -> Result<Tensor> {
        let Some(tensor) = x.tensor() else {
            let mut runs = Vec::new();
            read(name, x, &mut |view| {
                runs = self
                    .runs()
                    .filter_map(|run| view.in_order()?.part(run))
                    .map(|run| flat_copy(run))
                    .collect();
                Ok(())
            })?;
            return Ok(Tensor::cat(&runs, 0)?);
        };
        // The runs are joined before the transfer, because a transfer takes the whole storage of a view.
        let flat = tensor.detach().flatten_all()?;
        let runs = flat
            .narrow(0, 0, self.spread_runs * self.stride)?
            .reshape((self.spread_runs, self.stride))?
            .narrow(1, 0, RUN_LENGTH)?;
        let end = flat.narrow(0, self.length - RUN_LENGTH, RUN_LENGTH)?;
        Ok(Tensor::cat(&[runs.contiguous()?.flatten_all()?, end], 0)?.to_device(&Device::Cpu)?)
    }

    /// The index in the tensor of the element at `index` in the sample.
    fn index_in_tensor(self, index: usize) -> usize {
        if index / RUN_LENGTH < self.spread_runs {
            index / RUN_LENGTH * self.stride + index % RUN_LENGTH
        } else {
            self.length - RUN_LENGTH + index % RUN_LENGTH
        }
    }
}

/// An element of a parameter that is not its master rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Difference {
    pub(crate) index: usize,
    pub(crate) parameter: f64,
    pub(crate) master: f64,
}

impl Difference {
    /// The error that the program has changed the parameter.
    pub(crate) fn error(self, problem: &'static str, expected: impl Display) -> Error {
        Error::new(ErrorKind::Changed, problem)
            .with_got(self.parameter)
            .at_element(self.index)
            .with_expected(expected)
    }
}

/// The first element of `parameter` that is not the element of `master`, rounded to nearest even.
///
/// If `parameter` and `master` have one dtype, their elements have to be equal.
pub(crate) fn difference(
    master: &dyn Lend,
    parameter: &dyn Lend,
    extent: Extent,
) -> Result<Option<Difference>> {
    let whole = std::iter::once(0..master.elem_count());
    let sample = Sample::for_length(master.elem_count()).filter(|_| extent != Extent::Whole);
    match (master.device().is_cpu(), parameter.device().is_cpu(), sample) {
        (true, true, Some(sample)) if extent == Extent::Sample => {
            compare_on_cpu(master, parameter, sample.runs())
        }
        (true, true, _) => compare_on_cpu(master, parameter, whole),
        (false, _, _) if extent == Extent::Sample => Ok(None),
        (_, _, Some(sample)) => compare_across_devices(master, parameter, sample),
        (_, _, None) => {
            let to_cpu = |x: &dyn Lend| -> Result<Tensor> {
                Ok(x.tensor_or_copy()?.detach().to_device(&Device::Cpu)?)
            };
            compare_on_cpu(&to_cpu(master)?, &to_cpu(parameter)?, whole)
        }
    }
}

/// Refuses a parameter that is not its master rounded, because the program has changed it.
pub(crate) fn check_rounded(master: &dyn Lend, parameter: &dyn Lend, extent: Extent) -> Result<()> {
    let Some(element) = difference(master, parameter, extent)? else {
        return Ok(());
    };
    let remedy = "it was changed outside of `update`, which would overwrite it: call `refresh_masters` to go \
                  on from the parameters, or `Update::keep_masters` to go on from the masters. If it has a state \
                  in another tree that moves it, too, make one tree for both, by `setup_with`";
    let expected = format_args!("that of its master, {}", element.master);
    Err(element.error("its value is", expected).with_remedy(remedy))
}

/// The first element of a copy in the state that is not `parameter`, rounded to the dtype of the copy.
///
/// In the result, `master` is the element of the copy, even if the copy is narrower than the parameter.
pub(crate) fn copy_difference(
    copy: &Buffer,
    parameter: &Tensor,
    extent: Extent,
) -> Result<Option<Difference>> {
    // A copy in 8 bits is not the parameter rounded to a dtype.
    if copy.code().is_some() {
        return Ok(None);
    }
    // The parameter is broadcast, because `State::with_slot` has broadcast it to make the copy. If the shapes
    // do not fit, the state is that of another parameter, which the plan refuses.
    let Ok(parameter) = parameter.detach().broadcast_as(copy.shape()) else {
        return Ok(None);
    };
    let parameter = parameter.contiguous()?;
    let swap_sides = |Difference {
                          index,
                          parameter,
                          master,
                      }| Difference {
        index,
        parameter: master,
        master: parameter,
    };
    let (is_on_cpu, is_wider) = (
        copy.variable().is_none(),
        is_wider(copy.dtype(), parameter.dtype()),
    );
    let (parameter, extent) = if is_on_cpu {
        (parameter.to_device(&Device::Cpu)?, Extent::Whole)
    } else {
        (parameter, extent)
    };
    // The wider tensor comes first, because `difference` rounds its first tensor.
    if is_wider {
        difference(copy, &parameter, extent)
    } else {
        Ok(difference(&parameter, copy, extent)?.map(swap_sides))
    }
}

/// The index of the first infinite or NaN element among a few evenly spread elements.
///
/// A tensor of up to 64 elements is read completely. `None` on a device, because the caller would have to
/// wait, and for a tensor with gaps.
pub(crate) fn first_non_finite(x: &dyn Lend) -> Option<usize> {
    let mut first = None;
    if !x.device().is_cpu() {
        return None;
    }
    let result = read("parameter", x, &mut |view| {
        let Some(values) = view.in_order() else {
            return Ok(());
        };
        let length = view.elements();
        let probes = if length <= RUN_LENGTH { length } else { PROBES };
        first = (0..probes)
            .map(|probe| probe * (length - 1) / (probes - 1).max(1))
            .find(|index| !values.get(*index).is_finite());
        Ok(())
    });
    result.ok().and(first)
}

/// A checksum of the elements of a sample. `None` on a device, and for a tensor with gaps.
pub(crate) fn sample_checksum(x: &dyn Lend) -> Option<u32> {
    let (mut checksum, length) = (None, x.elem_count());
    if !x.device().is_cpu() {
        return None;
    }
    let result = read("parameter", x, &mut |view| {
        let Some(memory) = view.in_order() else {
            return Ok(());
        };
        let (mut hasher, sample) = (crc32fast::Hasher::new(), Sample::for_length(length));
        let all_elements = sample.is_none().then_some(0..length);
        let runs = sample.into_iter().flat_map(Sample::runs).chain(all_elements);
        runs.filter_map(|run| memory.part(run))
            .for_each(|run| hasher.update(run.bytes()));
        checksum = Some(hasher.finalize());
        Ok(())
    });
    result.ok().and(checksum)
}

/// [`difference`] in a sample, for tensors that are not both on the CPU.
fn compare_across_devices(
    master: &dyn Lend,
    parameter: &dyn Lend,
    sample: Sample,
) -> Result<Option<Difference>> {
    let master = sample.copy_to_cpu("master", master)?;
    let parameter = sample.copy_to_cpu("parameter", parameter)?;
    let first = compare_on_cpu(&master, &parameter, std::iter::once(0..master.elem_count()))?;
    Ok(first.map(|difference| Difference {
        index: sample.index_in_tensor(difference.index),
        ..difference
    }))
}

/// [`difference`] in these runs, for tensors that are both on the CPU.
fn compare_on_cpu(
    master: &dyn Lend,
    parameter: &dyn Lend,
    runs: impl Iterator<Item = Range<usize>> + Clone,
) -> Result<Option<Difference>> {
    // `runs` is an option, because `read` takes a function that could run twice, and one call uses the
    // iterator up.
    let (mut first, mut runs) = (None, Some(runs));
    read("master", master, &mut |high| {
        read("parameter", parameter, &mut |low| {
            // All runs are prefetched at once, because each run has its own cache lines and often its own
            // page.
            for run in runs.clone().into_iter().flatten() {
                let beginning = run.start..run.end.min(run.start + RUN_LENGTH);
                let views = [low, high].into_iter();
                for memory in views.filter_map(|view| view.in_order()?.part(beginning.clone())) {
                    prefetch(memory.bytes());
                }
            }
            let (Some(low), Some(high), Some(runs)) = (low.in_order(), high.in_order(), runs.take()) else {
                return Ok(());
            };
            first = first_difference(low, high, runs);
            Ok(())
        })
    })?;
    Ok(first)
}

impl MemoryRef<'_> {
    fn get(self, index: usize) -> f64 {
        match self {
            MemoryRef::F16(values) => values[index].into(),
            MemoryRef::BF16(values) => values[index].into(),
            MemoryRef::F32(values) => values[index].into(),
            MemoryRef::F64(values) => values[index],
        }
    }
}

/// The first element in these runs where `low` is not `high` rounded.
fn first_difference(
    low: MemoryRef<'_>,
    high: MemoryRef<'_>,
    runs: impl Iterator<Item = Range<usize>>,
) -> Option<Difference> {
    let suspects = runs
        .flat_map(pieces)
        .filter(|piece| !is_certainly_rounded(low, high, piece.clone()));
    let mut pairs = suspects
        .flatten()
        .map(|index| (index, low.get(index), high.get(index)));
    pairs
        .find(|(_, parameter, master)| differ(rounded_once(*master, low.dtype()), *parameter))
        .map(|(index, parameter, master)| Difference {
            index,
            parameter,
            master,
        })
}

/// Whether `low` is certainly `high` rounded in this piece. If `false`, the numbers have to be compared.
fn is_certainly_rounded(low: MemoryRef<'_>, high: MemoryRef<'_>, piece: Range<usize>) -> bool {
    use MemoryRef::{BF16, F16, F32, F64};
    // The engine converts slices. A loop over single numbers would wait for nearly every cache miss alone: it
    // took a third of a step of 2000 leaves of 4096 elements.
    match (low, high) {
        (BF16(low), F32(high)) => is_rounded(&low[piece.clone()], &high[piece], to_bf16),
        (F16(low), F32(high)) => is_rounded(&low[piece.clone()], &high[piece], to_f16),
        (BF16(low), BF16(high)) => low[piece.clone()].reinterpret_cast() == high[piece].reinterpret_cast(),
        (F16(low), F16(high)) => low[piece.clone()].reinterpret_cast() == high[piece].reinterpret_cast(),
        (F32(low), F32(high)) => low[piece.clone()] == high[piece],
        (F64(low), F64(high)) => low[piece.clone()] == high[piece],
        _ => false,
    }
}

/// Cuts a run, which may be a whole tensor, into pieces of at most [`RUN_LENGTH`] elements, for which
/// [`is_rounded`] has room.
fn pieces(run: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = run.end;
    run.step_by(RUN_LENGTH)
        .map(move |start| start..end.min(start + RUN_LENGTH))
}

/// Whether `low` is `high` rounded, bit for bit.
fn is_rounded<T: Copy + Default>(low: &[T], high: &[f32], to_low: fn(&[f32], &mut [T])) -> bool
where
    [T]: HalfFloatSliceExt,
{
    let mut rounded = [T::default(); RUN_LENGTH];
    let rounded = &mut rounded[..low.len()];
    to_low(high, rounded);
    rounded.reinterpret_cast() == low.reinterpret_cast()
}

fn differ(a: f64, b: f64) -> bool {
    a != b && !(a.is_nan() && b.is_nan())
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    fn tensor(values: Vec<f32>, dtype: DType) -> Tensor {
        let length = values.len();
        Tensor::from_vec(values, length, &Device::Cpu)
            .and_then(|x| x.to_dtype(dtype))
            .expect("a tensor")
    }

    /// The comparison for devices finds the same elements if it runs on two tensors of the CPU.
    #[test]
    fn a_sample_of_another_device_has_the_places_of_the_whole() {
        assert!(
            [0, 1, 1024]
                .into_iter()
                .all(|length| Sample::for_length(length).is_none())
        );
        for length in [1025, 5000, 70_007] {
            let sample = Sample::for_length(length).expect("a sample");
            let places: Vec<usize> = sample.runs().flatten().collect();
            assert_eq!(
                (0..places.len())
                    .map(|index| sample.index_in_tensor(index))
                    .collect::<Vec<_>>(),
                places
            );
            let values: Vec<f32> = (0..length).map(|i| (i % 4096) as f32).collect();
            let master = tensor(values.clone(), DType::F32);
            for dtype in [DType::F32, DType::F16] {
                assert_eq!(
                    compare_across_devices(&master, &tensor(values.clone(), dtype), sample)
                        .expect("a comparison"),
                    None
                );
                for index in [0, places[places.len() / 2], length - 1] {
                    let mut changed = values.clone();
                    changed[index] = -3.0;
                    let parameter = tensor(changed, dtype);
                    let expected = Difference {
                        index,
                        parameter: -3.0,
                        master: (index % 4096) as f64,
                    };
                    assert_eq!(
                        compare_across_devices(&master, &parameter, sample).expect("a comparison"),
                        Some(expected),
                        "{length}"
                    );
                    for extent in [Extent::Sample, Extent::First, Extent::Whole] {
                        assert_eq!(
                            difference(&master, &parameter, extent).expect("a comparison"),
                            Some(expected),
                            "{extent:?}"
                        );
                    }
                }
            }
        }
    }

    /// A batch that did not arrive on the device is noticed, even if its neighbours are right.
    #[test]
    fn a_batch_that_was_not_uploaded_is_in_every_sample() {
        let batch = 1 << 20;
        for length in [batch, batch + 1, 20 * batch + 17, 33 * batch - 5] {
            let runs: Vec<Range<usize>> = Sample::for_length(length).expect("a sample").runs().collect();
            assert!(
                runs.iter()
                    .all(|run| run.len() == RUN_LENGTH && run.end <= length)
            );
            for start in (0..length).step_by(batch / 4) {
                let end = length.min(start + batch);
                assert!(
                    runs.iter().any(|run| run.start < end && run.end > start),
                    "{length}: {start}..{end}"
                );
                let is_whole = end - start == batch;
                assert!(
                    !is_whole || runs.iter().any(|run| run.start >= start && run.end <= end),
                    "{length}: {start}..{end}"
                );
            }
        }
        let length = 20 * batch + 17;
        let master = tensor(vec![1.0; length], DType::F32);
        let mut values = vec![1.0; length];
        values[17 * batch..18 * batch].fill(2.0);
        let first = difference(&master, &tensor(values, DType::BF16), Extent::Sample).expect("a comparison");
        let is_in_batch = |difference: Difference| (17 * batch..18 * batch).contains(&difference.index);
        assert!(first.is_some_and(is_in_batch), "{first:?}");
    }

    /// A copy is compared in the dtype in which it is stored, whether copy or parameter is wider.
    #[test]
    fn copies_of_any_dtype_are_compared() {
        let dtypes = [DType::F16, DType::BF16, DType::F32, DType::F64];
        for (of_copy, of_parameter) in dtypes.into_iter().flat_map(|a| dtypes.map(|b| (a, b))) {
            let numbers = [1.0, 0.1, 1e5, 3e-8, f32::NAN];
            let parameter = tensor(numbers.to_vec(), of_parameter);
            let copy =
                Buffer::new(&crate::engine::rounded(&parameter, of_copy).expect("rounded")).expect("a copy");
            for extent in [Extent::First, Extent::Whole] {
                assert_eq!(
                    copy_difference(&copy, &parameter, extent).expect("a comparison"),
                    None,
                    "{of_copy:?} of {of_parameter:?}"
                );
                let changed = tensor([1.0, 0.1, 2.0, 3e-8, f32::NAN].to_vec(), of_parameter);
                let first = copy_difference(&copy, &changed, extent)
                    .expect("a comparison")
                    .expect("a difference");
                assert_eq!(
                    (first.index, first.parameter),
                    (2, 2.0),
                    "{of_copy:?} of {of_parameter:?}"
                );
            }
        }
    }
}
