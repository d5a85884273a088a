//! The fused engine of devices: a chain is printed as CUDA C, compiled at run time, and launched over all
//! leaves (parameters with their state) at once. `README.md` of this folder describes the rows of a launch
//! and the order of launches.
//!
//! Each entry point does three things: it makes a handle for each leaf (and compiles the kernel of the leaf,
//! if the kernel is new), adds the leaf's data (and takes addresses), and runs all launches. A leaf has no
//! kernel if a dtype cannot be printed or the source does not compile. Such a leaf is left to tensor
//! operations.

mod backend;
mod table;
#[cfg(test)]
mod tests;

use std::ops::Range;

use candle_core::Tensor;
use smallvec::SmallVec;

use super::codegen::launched::trace_read;
use super::codegen::trace::trace_write;
use super::kernel::{ChunkTotals, Reducer};
use super::plan::{Epilogue, Job, LeafView, Operand, ReductionRequest, Step, slots_mut};
use crate::error::Result;
use crate::model::lent::{Lend, Lent, defect};
use crate::tensors::{allocate, zeros};
pub(super) use backend::{Backend, Launch};
use table::{BlockRange, LeafArray, LeafData, RowHandle, Tables};

/// Writes the parameters and state of all jobs, except the state that functions of whole tensors have
/// returned (see `Job::finish`). The result has `false` for each job that has no kernel; nothing of such a
/// job is written.
pub(super) fn commit_with<'a, 'j: 'a, B: Backend<'a>>(
    backend: B,
    jobs: &'a mut [&mut Job<'j>],
) -> Result<Vec<bool>> {
    let mut tables = Tables::new(backend);
    let segments_of_jobs: Vec<_> = jobs.iter().map(|job| job.segments()).collect();
    // Launches run in the order of handles. The last segment of a job writes the parameter, which earlier
    // segments of the job read. So the handles of all earlier segments come before those of last segments.
    let mut handles_of_jobs: Vec<Option<SmallVec<[RowHandle; 1]>>> =
        jobs.iter().map(|_| Some(SmallVec::new())).collect();
    for is_last in [false, true] {
        for ((job, segments), job_handles) in jobs.iter().zip(&segments_of_jobs).zip(&mut handles_of_jobs) {
            let (last, earlier) = segments
                .split_last()
                .map_or((&[][..], &[][..]), |(last, earlier)| {
                    (std::slice::from_ref(last), earlier)
                });
            for segment in if is_last { last } else { earlier } {
                let handle = tables.handle(|bound| trace_write(job, segment, bound))?;
                // A job is written as a whole or not at all. So if one segment has no kernel, the job loses
                // all its handles.
                *job_handles = job_handles
                    .take()
                    .zip(handle)
                    .map(|(mut known_handles, new_handle)| {
                        known_handles.push(new_handle);
                        known_handles
                    });
            }
        }
    }
    let kernel_flags = handles_of_jobs.iter().map(Option::is_some).collect();
    for ((job, segments), job_handles) in jobs.iter_mut().zip(&segments_of_jobs).zip(handles_of_jobs) {
        let path = job.path;
        job_handles
            .map_or(Ok(()), |handles| {
                add_segments(&mut tables, job, segments, &handles)
            })
            .map_err(|error| error.at(path))?;
    }
    tables.run()?;
    Ok(kernel_flags)
}

/// Adds the segments of a leaf.
fn add_segments<'a, 'j: 'a, B: Backend<'a>>(
    tables: &mut Tables<'a, B>,
    job: &'a mut Job<'j>,
    segments: &[Range<usize>],
    handles: &[RowHandle],
) -> Result<()> {
    let Job {
        x,
        low_bits,
        length,
        sources,
        steps,
        epilogue,
        ..
    } = job;
    let (length, end) = (*length, steps.len());
    let low_bits = low_bits
        .as_deref_mut()
        .map(|low_bits| tables.backend.write_state_address(low_bits))
        .transpose()?;
    let x = match x {
        Operand::Own(master) => LeafArray::Address(tables.backend.write_state_address(master)?),
        Operand::Lent(x) => LeafArray::Tensor(tensor_of(*x)?),
    };
    let (mut sources, mut steps, mut position) = (&sources[..], &mut steps[..], 0);
    let mut epilogue = Some(epilogue);
    for (segment, handle) in segments.iter().zip(handles) {
        let (skipped_steps, open_steps) = std::mem::take(&mut steps).split_at_mut(segment.start - position);
        let (segment_steps, later_steps) = open_steps.split_at_mut(segment.len());
        (steps, position) = (later_steps, segment.end);
        // `sources_after` cannot be used, because it needs all steps at once, and here the steps are split
        // into slices that can be written.
        if let Some(Step::Output(output)) = skipped_steps.last() {
            sources = std::slice::from_ref(&output.gradient);
        }
        let (mut target, mut compensation, mut random_key) = (None, None, 0);
        // Only the last segment stores the parameter.
        match epilogue.take_if(|_| position == end) {
            None | Some(Epilogue::StateOnly | Epilogue::Subtract) => {}
            Some(Epilogue::Master(lender)) => target = Some(tensor_of(*lender)?.clone()),
            Some(Epilogue::Stochastic(key)) => random_key = *key,
            Some(Epilogue::Kahan(buffer)) => compensation = Some(LeafArray::State(buffer)),
        }
        let data = LeafData {
            length,
            // Only a reduction needs the length of the whole leaf.
            leaf_length: length,
            arrays: arrays(
                x.duplicate(),
                sources,
                slots_mut(segment_steps).map(LeafArray::State),
                compensation,
            )?,
            low_bits,
            target,
            key: random_key,
            reducer: None,
        };
        tables.add(handle, data)?;
    }
    Ok(())
}

/// The totals of the chunks of each request; `None` for a request without a kernel.
pub(super) fn reduce_with<'j, B: Backend<'j>>(
    backend: B,
    requests: &[ReductionRequest<'j, '_>],
) -> Result<Vec<Option<ChunkTotals>>> {
    let mut tables = Tables::new(backend);
    let add = |&ReductionRequest { view, reducer }: &_| add_view(&mut tables, view, Some(reducer), None);
    let block_ranges = requests.iter().map(add).collect::<Result<Vec<_>>>()?;
    let results = tables.run()?;
    let totals_of = |range: &Option<BlockRange>| {
        range
            .as_ref()
            .map(|range| ChunkTotals::from_slice(results.of_leaf(range)))
    };
    Ok(block_ranges.iter().map(totals_of).collect())
}

/// The elements of each view as a tensor of the compute dtype; `None` for a view without a kernel. The
/// tensors have their values once the launches are done.
pub(super) fn copy_with<'j, B: Backend<'j>>(
    backend: B,
    views: &[LeafView<'j, '_>],
) -> Result<Vec<Option<Tensor>>> {
    let mut tables = Tables::new(backend);
    let mut copies = Vec::with_capacity(views.len());
    for &view in views {
        let (x, compute) = (&view.job.x, view.job.compute);
        let copy = allocate(view.job.length, compute, x.device(), || {
            zeros(x.shape(), compute, x.device())
        })
        .map_err(|error| error.at(view.job.path))?;
        copies.push(add_view(&mut tables, view, None, Some(copy.clone()))?.map(|_| copy));
    }
    tables.run()?;
    Ok(copies)
}

/// Adds a leaf whose elements are reduced or copied. Returns `None` if the view has no kernel.
fn add_view<'j, B: Backend<'j>>(
    tables: &mut Tables<'j, B>,
    view: LeafView<'j, '_>,
    reducer: Option<Reducer>,
    copy: Option<Tensor>,
) -> Result<Option<BlockRange>> {
    let Some(handle) = tables.handle(|bound| trace_read(view, reducer, bound))? else {
        return Ok(None);
    };
    let job = view.job;
    let low_bits = job
        .low_bits
        .as_deref()
        .map(|low_bits| tables.backend.read_state_address(low_bits))
        .transpose()?;
    let slots = view
        .links()
        .flat_map(|link| link.slots)
        .map(|(_, slot)| LeafArray::ReadState(slot));
    let x = match &job.x {
        Operand::Own(master) => LeafArray::ReadState(master),
        Operand::Lent(x) => LeafArray::Tensor(tensor_of(*x)?),
    };
    let data = LeafData {
        length: job.length,
        leaf_length: job.leaf_length,
        arrays: arrays(Some(x), view.sources(), slots, None)?,
        low_bits,
        target: copy,
        key: 0,
        reducer,
    };
    tables
        .add(&handle, data)
        .map(Some)
        .map_err(|error| error.at(job.path))
}

/// The arrays of a leaf in the order in which the tracer names them.
fn arrays<'a>(
    x: Option<LeafArray<'a>>,
    gradients: &'a [Lent<'_>],
    slots: impl Iterator<Item = LeafArray<'a>>,
    compensation: Option<LeafArray<'a>>,
) -> Result<SmallVec<[Option<LeafArray<'a>>; 4]>> {
    let gradients = gradients
        .iter()
        .map(|gradient| Ok(Some(LeafArray::Tensor(tensor_of(&**gradient)?))));
    let state = slots.chain(compensation).map(|state| Ok(Some(state)));
    std::iter::once(Ok(x)).chain(gradients).chain(state).collect()
}

/// The tensor of lent memory. Leaves with other memory are not given to devices.
fn tensor_of(lender: &dyn Lend) -> Result<&Tensor> {
    lender
        .tensor()
        .ok_or_else(|| defect("memory that is no tensor was given to a device"))
}
