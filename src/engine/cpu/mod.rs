//! The fused CPU engine: which leaf (a parameter with its state) runs on which threads, and how jobs (plans
//! for one leaf each) and requests become passes. `unsafe` is for passes: this file ensures the locks and
//! ranges that [`pass::Pass`] assumes.
//!
//! ```text
//! all leaves together below 65536 elements   on the caller's thread, unless it is one of rayon's
//! a leaf below 65536 elements                in a row of neighbours, on a thread of the engine's pool
//! a larger leaf                              in chunks, which all threads of that pool share
//! ```
//!
//! The duties of `write_leaf`:
//!
//! 1. All memory of a leaf is lent once, around all its segments, so that an owner who refuses does so before
//!    the first write. At most one piece of this memory is lent for writing.
//! 2. `has_moved` is set before the first write, `is_written` after the last. Once `is_written` is set, the
//!    counters move even if the owner fails afterwards, because counters must fit the state.
//! 3. The chunks of a reduction follow from the length of the whole leaf alone ([`chunk_length`]), so that
//!    the number of threads or ranks does not change a total.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod avx2;
mod convert;
mod pass;
mod pointers;
mod prefetch;
mod sources;
mod threads;
#[cfg(test)]
mod traffic;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

use super::Isa;
use super::kernel::{ChunkTotals, chunk_length};
use super::memory::Buffer;
use super::plan::{Epilogue, Job, LeafView, Operand, ReductionRequest, Sink, slots_mut, sources_after};
use crate::error::Result;
use crate::model::lent::{Lend, View, unsupported_error};
use crate::numbers::DType;
use crate::tensors::{Device, Tensor, allocate, zeros};
pub(crate) use convert::{to_bf16, to_f16};
use pass::{HasScratch, Pass, PassSink, PassStep};
use pointers::{
    DataPtr, List, buffer_ptr, buffer_ptr_mut, lend_gradients, lend_to_read, lend_to_write, list,
    low_bits_ptr, low_bits_ptr_mut, try_list,
};
pub(crate) use prefetch::prefetch;
use sources::StridedSource;

/// A leaf of fewer elements is a single task. A larger leaf is cut into chunks that all threads share.
const LARGE_LEAF: usize = 1 << 16;

/// The largest number of small leaves that a thread takes at once. In such a row the next leaves are fetched
/// ahead.
const ROW: usize = 32;

/// Writes the parameters and state of all jobs, and sets their counters.
pub(super) fn commit(isa: Isa, mut jobs: Vec<&mut Job<'_>>) -> Result<()> {
    let run = |job: &mut &mut Job<'_>, parallel| {
        let part = 0..job.length;
        write_part(isa, job, part, parallel, true)
    };
    for_each_leaf(
        &mut jobs,
        |job| job.length,
        |job, stage| prefetch::prefetch_job(job, stage),
        run,
    )
}

/// Writes a part of a job's parameter and state. The gradients have the elements of that part alone.
///
/// The last part finishes the job.
pub(super) fn commit_part(isa: Isa, job: &mut Job<'_>, part: Range<usize>, is_last: bool) -> Result<()> {
    threads::run(|| write_part(isa, job, part, true, is_last))?
}

fn write_part(isa: Isa, job: &mut Job<'_>, part: Range<usize>, parallel: bool, is_last: bool) -> Result<()> {
    let mut is_written = false;
    // A panic is held back, because an owner of lent memory may panic after everything is written, and then
    // the counters have to move as well.
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        write_leaf(isa, job, part, parallel, &mut is_written)
    }));
    if is_written && is_last {
        job.finish()?;
    }
    outcome
        .unwrap_or_else(|panic| resume_unwind(panic))
        .map_err(|error| error.at(job.path))
}

/// The totals of the chunks of each request's elements.
pub(super) fn reduce(isa: Isa, requests: &[ReductionRequest<'_, '_>]) -> Result<Vec<ChunkTotals>> {
    let mut answers: Vec<_> = requests
        .iter()
        .map(|request| (*request, ChunkTotals::new()))
        .collect();
    let run = |(ReductionRequest { view, reducer }, totals): &mut (ReductionRequest<'_, '_>, ChunkTotals),
               parallel| {
        // SAFETY: a reduction has no target.
        *totals = unsafe { read_view(isa, *view, Sink::Reduce(*reducer), parallel) }?;
        Ok(())
    };
    let fetch = |(request, _): &(ReductionRequest<'_, '_>, ChunkTotals), stage| {
        prefetch::prefetch_job(request.view.job, stage)
    };
    for_each_leaf(&mut answers, |(request, _)| request.view.job.length, fetch, run)?;
    Ok(answers.into_iter().map(|(_, totals)| totals).collect())
}

/// The elements of a view as a tensor of the compute dtype.
pub(super) fn materialise(isa: Isa, view: LeafView<'_, '_>) -> Result<Tensor> {
    let (shape, compute) = (view.job.x.shape(), view.job.compute);
    let elements = allocate(view.job.length, compute, &Device::Cpu, || {
        zeros(shape, compute, &Device::Cpu)
    })
    .map_err(|error| error.at(view.job.path))?;
    copy_to(isa, view, &elements)?;
    Ok(elements)
}

/// Writes the elements of a view to `target`, which nothing else may use. `target` must be contiguous, of the
/// compute dtype, and have the view's number of elements.
pub(super) fn copy_to(isa: Isa, view: LeafView<'_, '_>, target: &Tensor) -> Result<()> {
    lend_to_write("copy", target, view.job.length, &mut |target| {
        let copy = |view: &mut LeafView<'_, '_>, parallel| {
            // SAFETY: `lend_to_write` has locked the target and checked its length. Nothing else uses the
            // target: `materialise`, or the caller of `sum_to`, has made it.
            unsafe { read_view(isa, *view, Sink::Copy(target), parallel) }.map(drop)
        };
        for_each_leaf(&mut [view], |view| view.job.length, |_, _| (), copy)
    })
}

/// Calls `run` on every item, on all threads if there are 256 items or more. `run` may wait for locks.
///
/// On several threads `fetch` prepares the next items in stages, see [`threads`].
///
/// # Errors
/// The first error in the order of the items.
pub(crate) fn for_all<I: Send>(
    items: &mut [I],
    fetch: impl Fn(&I, usize) + Sync,
    run: impl Fn(&mut I) -> Result<()> + Sync,
) -> Result<()> {
    const MANY: usize = 256;
    // Not on a thread of rayon, for the reason that `for_each_leaf` gives.
    if items.len() < MANY && rayon::current_thread_index().is_none() {
        return items.iter_mut().try_for_each(run);
    }
    threads::run(|| threads::run_in_rows(items, ROW, &fetch, &run))?
}

/// Calls `run` for each item: small ones first, in rows, then large ones one after another.
///
/// In a row `fetch` prepares the next items. If the second argument of `run` is `true`, `run` may use all
/// threads.
fn for_each_leaf<I: Send>(
    items: &mut [I],
    length: impl Fn(&I) -> usize + Sync,
    fetch: impl Fn(&I, usize) + Send + Sync,
    run: impl Fn(&mut I, bool) -> Result<()> + Sync,
) -> Result<()> {
    let total: usize = items.iter().map(&length).sum();
    // candle may compute in a thread of rayon, and such a thread must not wait for a lock (see `threads`).
    if total < LARGE_LEAF && rayon::current_thread_index().is_none() {
        return items.iter_mut().try_for_each(|item| run(item, false));
    }
    threads::run(|| {
        let is_large = |item: &I| length(item) >= LARGE_LEAF;
        // Each thread gets about eight rows, so that threads end at about the same time.
        let row_length = (items.len() / (8 * rayon::current_num_threads())).clamp(1, ROW);
        threads::run_in_rows(items, row_length, fetch, |item| {
            if is_large(item) { Ok(()) } else { run(item, false) }
        })?;
        items
            .iter_mut()
            .filter(|item| is_large(item))
            .try_for_each(|item| run(item, true))
    })?
}

/// Writes slots and parameter of a part of a leaf, segment by segment. The gradients are those of the part.
///
/// `is_written` is set at the end.
fn write_leaf(
    isa: Isa,
    job: &mut Job<'_>,
    part: Range<usize>,
    parallel: bool,
    is_written: &mut bool,
) -> Result<()> {
    let (length, compute, segments) = (job.length, job.compute, job.segments());
    if segments.is_empty() {
        *is_written = true;
        return Ok(());
    }
    let Job {
        x,
        low_bits,
        sources,
        steps,
        epilogue,
        has_moved,
        ..
    } = job;
    let slots = try_list(slots_mut(steps).map(buffer_ptr_mut))?;
    let low_bits = low_bits.as_deref_mut().map(low_bits_ptr_mut).transpose()?;
    let segment_sources = |segment: &Range<usize>| sources_after(&steps[..segment.start], sources);
    let lenders: List<&dyn Lend> = list(
        segments
            .iter()
            .flat_map(segment_sources)
            .map(|gradient| &**gradient),
    );

    lend_leaf(x, epilogue, length, &mut |x, epilogue| {
        let x = x.with_low_bits(low_bits)?;
        lend_gradients(&lenders, part.len(), &mut |mut views| {
            // Set before the first write, so that an owner that fails later cannot hide that the leaf has
            // moved.
            *has_moved = true;
            let mut slots = &slots[..];
            for segment in &segments {
                let (is_last, segment_steps) = (segment.end == steps.len(), &steps[segment.clone()]);
                let (segment_views, segment_slots);
                (segment_views, views) = views.split_at(segment_sources(segment).len());
                (segment_slots, slots) =
                    slots.split_at(segment_steps.iter().map(|step| step.slots().len()).sum());
                let links = segment_steps.iter().filter_map(|step| step.link());
                let pass = Pass {
                    isa,
                    x,
                    sources: strided_sources(segment_views, part.start),
                    steps: PassStep::chain(links, segment_slots),
                    sink: Sink::Write(if is_last { epilogue } else { Epilogue::StateOnly }),
                };
                // SAFETY: parameter and gradients are lent while this closure runs. `lend_to_write`,
                // `lend_to_read` and `lend_gradients` have checked that the gradients have the elements of
                // the part, and that x and parameter have the elements of the leaf. The state is this job's
                // own and has the elements of the leaf (`Job::check`).
                unsafe { run_chunks(&pass, length, compute, part.clone(), parallel) };
            }
            *is_written = true;
            Ok(())
        })
    })
}

/// Lends to `run` the memory that a leaf shares with others: x, or the parameter that has a master.
///
/// Nobody else can see a master or other state. So a thread never locks two pieces of memory for writing.
/// `run` gets pointers to x and to what the epilogue writes.
fn lend_leaf(
    x: &mut Operand<'_>,
    epilogue: &mut Epilogue<&dyn Lend, &mut Buffer>,
    length: usize,
    run: &mut dyn FnMut(DataPtr, Epilogue<DataPtr, DataPtr>) -> Result<()>,
) -> Result<()> {
    let epilogue = match epilogue {
        Epilogue::Master(parameter) => {
            let Operand::Own(master) = x else {
                return Err(unsupported_error());
            };
            let master = buffer_ptr_mut(master)?;
            return lend_to_write("parameter", *parameter, length, &mut |parameter| {
                run(master, Epilogue::Master(parameter))
            });
        }
        Epilogue::StateOnly => Epilogue::StateOnly,
        Epilogue::Subtract => Epilogue::Subtract,
        Epilogue::Stochastic(key) => Epilogue::Stochastic(*key),
        Epilogue::Kahan(compensation) => Epilogue::Kahan(buffer_ptr_mut(compensation)?),
    };
    match x {
        Operand::Own(master) => run(buffer_ptr_mut(master)?, epilogue),
        Operand::Lent(x) if epilogue.writes_x() => {
            lend_to_write("parameter", *x, length, &mut |x| run(x, epilogue))
        }
        Operand::Lent(x) => lend_to_read("parameter", *x, length, &mut |x| run(x, epilogue)),
    }
}

/// Runs over the elements of a view, and writes nothing of the leaf.
///
/// If the sink reduces, the result has the totals of the chunks.
///
/// # Safety
/// If the sink copies, its target must have room for all elements, and nothing else may access the target
/// meanwhile.
unsafe fn read_view(isa: Isa, view: LeafView<'_, '_>, sink: PassSink, parallel: bool) -> Result<ChunkTotals> {
    let job = view.job;
    let slots = try_list(
        view.links()
            .flat_map(|link| link.slots)
            .map(|(_, buffer)| buffer_ptr(buffer)),
    )?;
    let low_bits = job.low_bits.as_deref().map(low_bits_ptr).transpose()?;
    let lenders: List<&dyn Lend> = list(view.sources().iter().map(|gradient| &**gradient));
    let mut totals = ChunkTotals::new();
    let mut run = |x: DataPtr| {
        let x = x.with_low_bits(low_bits)?;
        lend_gradients(&lenders, job.length, &mut |views| {
            let sources = if view.is_parameter() {
                list([StridedSource::new_contiguous(x, 0)])
            } else {
                strided_sources(views, 0)
            };
            let pass = Pass {
                isa,
                x,
                sources,
                steps: PassStep::chain(view.links(), &slots),
                sink,
            };
            // SAFETY: the data is lent while this closure runs, with the elements of the leaf
            // (`lend_to_read`, `lend_gradients`; for state, `Job::check`). Only the target is written. The
            // caller promises that the target has room, and that nothing else accesses it.
            totals = unsafe { run_chunks(&pass, job.leaf_length, job.compute, 0..job.length, parallel) };
            Ok(())
        })
    };
    match &job.x {
        Operand::Own(master) => run(buffer_ptr(master)?),
        Operand::Lent(x) => lend_to_read(job.epilogue.x(), *x, job.length, &mut run),
    }
    .map_err(|error| error.at(job.path))?;
    Ok(totals)
}

/// The gradients as sources. Each begins with the leaf's element `first`.
fn strided_sources<'p>(views: &[View<'p>], first: usize) -> List<StridedSource<'p>> {
    list(views.iter().map(|view| StridedSource::new(*view, first)))
}

/// Runs a pass over a part of a leaf of `length` elements, chunk by chunk.
///
/// If the pass reduces, the result has the totals of the chunks in order.
///
/// # Safety
/// All data of the pass must be locked and hold the part.
unsafe fn run_chunks(
    pass: &Pass<'_>,
    length: usize,
    compute: DType,
    part: Range<usize>,
    parallel: bool,
) -> ChunkTotals {
    // SAFETY: the caller promises the same.
    unsafe {
        match compute {
            DType::F64 => run_chunks_as::<f64>(pass, length, part, parallel),
            _ => run_chunks_as::<f32>(pass, length, part, parallel),
        }
    }
}

/// [`run_chunks`] in the compute type `T`.
///
/// # Safety
/// As [`run_chunks`].
unsafe fn run_chunks_as<T: HasScratch>(
    pass: &Pass<'_>,
    length: usize,
    part: Range<usize>,
    parallel: bool,
) -> ChunkTotals {
    let chunk_size = chunk_length(length);
    let chunk_count = part.len().div_ceil(chunk_size);
    let range_of = |chunks: Range<usize>| {
        part.start + chunks.start * chunk_size..part.end.min(part.start + chunks.end * chunk_size)
    };
    let total_count = if matches!(pass.sink, Sink::Reduce(_)) {
        chunk_count
    } else {
        0
    };
    // One total for each chunk, so that threads may end in any order, and the totals are still joined in the
    // order of chunks. There are at most 1024 chunks, see `chunk_length`.
    let totals: SmallVec<[AtomicU64; 2]> = (0..total_count).map(|_| AtomicU64::new(0)).collect();
    let run = |pass: &Pass<'_>, i: usize| {
        // SAFETY: the caller promises that the data is locked and holds the part. The chunks lie in the part
        // and do not overlap, and each runs once.
        let total = unsafe { pass.run::<T>(range_of(i..i + 1)) };
        if let Some(bits) = totals.get(i) {
            bits.store(total.to_bits(), Ordering::Release);
        }
    };
    // A gradient that lies by columns is copied in row-major order for several chunks at once, because a copy
    // for a single chunk would use only a part of each cache line. But one copy has at most the chunks that
    // are one thread's share.
    let band_length = pass.sources.iter().filter_map(StridedSource::band_length).max();
    let thread_count = if parallel { rayon::current_num_threads() } else { 1 };
    let most_chunks = chunk_count.div_ceil(thread_count).max(1);
    let chunks_per_task = band_length.map_or(1, |length| (length / chunk_size).clamp(1, most_chunks));
    let task = |index: usize| {
        let chunks = index * chunks_per_task..chunk_count.min((index + 1) * chunks_per_task);
        if band_length.is_none() {
            return chunks.for_each(|i| run(pass, i));
        }
        let range = range_of(chunks.clone());
        // SAFETY: the caller promises that the data is locked and holds the part, in which the range lies.
        unsafe { pass.with_row_major::<T>(&range, |pass| chunks.for_each(|i| run(pass, i))) };
    };
    let task_count = chunk_count.div_ceil(chunks_per_task);
    if parallel {
        threads::for_each_chunk(task_count, &task)
    } else {
        (0..task_count).for_each(task)
    }
    totals
        .into_iter()
        .map(|bits| f64::from_bits(bits.into_inner()))
        .collect()
}
