//! The fused CPU engine: which leaf runs where. `unsafe`: it vouches for the locks and ranges of [`pass::Pass`].
#![allow(unsafe_code)]

mod ahead;
mod convert;
mod isa;
mod lanes;
mod pass;
mod storage;
mod threads;

pub(super) use convert::round_to_odd;
pub use isa::Isa;
pub(super) use lanes::{Block, Fold, fold_chunk, run_lanes};
pub(crate) use threads::map_all;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use self::lanes::BLOCK;
use self::pass::{End, Pass, PassStep, Strided};
use self::storage::{Data, List, rest, rest_mut, slot, slot_mut, with_read, with_written};
use super::tensor::buffers;
use super::{Job, Step, Store, Ticket};
use crate::error::Result;

/// Leaves below this many elements are one task each; a larger one is cut into chunks that all threads share.
const LARGE: usize = 1 << 16;

/// How many smaller leaves a thread takes at once, if there are many. Within such a row the next leaves are fetched ahead.
const ROW: usize = 32;

/// The length of the chunks a leaf of `length` elements is cut into: at least 16 Ki elements, at most 1024 chunks. It depends on
/// nothing else, so a norm has the same bits whatever the number of threads.
pub(super) fn chunk_length(length: usize) -> usize {
    length.div_ceil(1024).next_multiple_of(BLOCK).max(1 << 14)
}

/// Writes the parameters and state of all jobs.
pub(super) fn commit(isa: Isa, jobs: Vec<Ticket<'_>>) -> Result<()> {
    let leaf = |Ticket { mut job, .. }: Ticket<'_>, parallel| {
        job.run_prefixes(|prefix| write(isa, prefix, parallel))?;
        job.replace()?;
        write(isa, &mut job, parallel)?;
        job.count();
        Ok(())
    };
    for_each_leaf(jobs, |ticket| ticket.length, |ticket| &ticket.job, leaf).map(|_| ())
}

/// The fold over each gradient as it stands after the first `length` steps of its job, without the final root.
pub(super) fn fold(isa: Isa, jobs: Vec<(&Job<'_>, usize)>, fold: Fold) -> Result<Vec<f64>> {
    for_each_leaf(jobs, |(job, _)| job.length, |(job, _)| job, |(job, length), parallel| read(isa, job, length, fold, parallel))
}

/// Calls `run` for each item, small ones in rows, a task each, large ones one after another with leave to use all threads. Results are
/// in the order of the items.
fn for_each_leaf<'j, I: Send, R: Send + Default + Clone>(
    items: Vec<I>,
    length: impl Fn(&I) -> usize,
    job: impl for<'i> Fn(&'i I) -> &'i Job<'j> + Sync,
    run: impl Fn(I, bool) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let total: usize = items.iter().map(&length).sum();
    // A thread of a pool that candle computes in must not wait for a lock, see `threads`.
    if total < LARGE && rayon::current_thread_index().is_none() {
        return items.into_iter().map(|item| run(item, false)).collect();
    }
    let mut results = vec![R::default(); items.len()];
    let (large, small): (Vec<_>, Vec<_>) = items.into_iter().zip(&mut results).partition(|(item, _)| length(item) >= LARGE);
    let mut small: Vec<_> = small.into_iter().map(|(item, result)| (Some(item), result)).collect();
    threads::run(|| {
        let length = (small.len() / (8 * rayon::current_num_threads())).clamp(1, ROW);
        small.par_chunks_mut(length).try_for_each(|row| in_a_row(row, &job, &run))?;
        large.into_iter().try_for_each(|(item, result)| run(item, true).map(|value| *result = value))
    })??;
    Ok(results)
}

/// Calls `run` for one item after another, each time with what the next ones need on its way to the cache.
fn in_a_row<'j, I, R>(
    row: &mut [(Option<I>, &mut R)],
    job: impl for<'i> Fn(&'i I) -> &'i Job<'j>,
    run: impl Fn(I, bool) -> Result<R>,
) -> Result<()> {
    for place in 0..row.len() {
        for distance in 1..=ahead::REACH {
            if let Some((Some(next), _)) = row.get(place + distance) {
                ahead::fetch(job(next), distance);
            }
        }
        let (item, result) = &mut row[place];
        if let Some(item) = item.take() {
            **result = run(item, false)?;
        }
    }
    Ok(())
}

/// Runs a job to its end: slots and parameter are written.
fn write(isa: Isa, job: &mut Job<'_>, parallel: bool) -> Result<()> {
    let slots = buffers(&mut job.steps).map(slot_mut).collect::<candle_core::Result<List<_>>>()?;
    let rest = job.rest.as_deref_mut().map(rest_mut).transpose()?;
    let compensation = match &mut job.store {
        Store::Kahan { compensation } => Some(slot_mut(compensation)?),
        _ => None,
    };
    let job = &*job;
    let mut read: List<&Tensor> = job.source.iter().collect();
    let written: List<&Tensor> = match job.store {
        Store::Nothing if slots.is_empty() => return Ok(()),
        Store::Nothing => {
            read.push(job.x);
            List::new()
        }
        Store::Plain | Store::Random { .. } | Store::Kahan { .. } => List::from_slice(&[job.x]),
        Store::Master { parameter } => List::from_slice(&[job.x, parameter]),
    };
    let mut outcome = Ok(());
    with_written(&written, &mut |written| {
        let run = |read: &[Data]| {
            let (sources, x) = read.split_at(job.source.len());
            let (x, end) = match (written, &job.store, compensation) {
                ([], ..) => (x[0], End::Slots),
                ([x, parameter, ..], ..) => (*x, End::Master(*parameter)),
                ([x], Store::Random { key }, _) => (*x, End::Random(*key)),
                ([x], _, Some(compensation)) => (*x, End::Kahan(compensation)),
                ([x], ..) => (*x, End::Plain),
            };
            let pass = pass(isa, job, job.steps.len(), x.with_rest(rest)?, sources, &slots, end);
            // SAFETY: parameter and gradients are locked for as long as this closure runs, and the state is this job's own.
            unsafe { over(&pass, job, parallel, Fold::Sum) };
            Ok(())
        };
        outcome = with_read(&read, run).flatten();
    })?;
    Ok(outcome?)
}

/// Runs a job's first steps and folds the gradient, reading only.
fn read(isa: Isa, job: &Job<'_>, length: usize, fold: Fold, parallel: bool) -> Result<f64> {
    let slots = job.first_steps(length).flat_map(Step::slots).map(|(_, buffer)| slot(buffer)).collect::<candle_core::Result<List<_>>>()?;
    let tensors: List<&Tensor> = job.source.iter().chain([job.x]).collect();
    let total = with_read(&tensors, |data| {
        let (sources, x) = data.split_at(job.source.len());
        let rest = job.rest.as_deref().map(rest).transpose()?;
        let pass = pass(isa, job, length, x[0].with_rest(rest)?, sources, &slots, End::Fold(fold));
        // SAFETY: the data is locked for as long as this closure runs, and a folding pass writes nothing.
        Ok(unsafe { over(&pass, job, parallel, fold) })
    });
    Ok(total.flatten()?)
}

fn pass<'p>(isa: Isa, job: &'p Job<'_>, length: usize, x: Data, sources: &[Data], mut slots: &'p [Data], end: End) -> Pass<'p> {
    let steps = job.first_steps(length).filter_map(|step| {
        let kernel = step.kernel()?;
        let (own, rest) = slots.split_at(step.slots().len());
        slots = rest;
        Some(PassStep { kernel, slots: own })
    });
    let steps = steps.collect();
    let sources = job.source.iter().zip(sources).map(|(tensor, &data)| Strided::new(data, tensor.layout())).collect();
    Pass { isa, x, sources, steps, end }
}

/// Runs a pass over all elements, in chunks; the result is the chunks' folds joined in order.
///
/// # Safety
/// All data of the pass must be locked.
unsafe fn over(pass: &Pass<'_>, job: &Job<'_>, parallel: bool, fold: Fold) -> f64 {
    // SAFETY: the data is locked, and the chunks lie within the leaf and do not overlap.
    match job.compute {
        DType::F64 => over_chunks(job.length, parallel, fold, |range| unsafe { pass.run::<f64>(range) }),
        _ => over_chunks(job.length, parallel, fold, |range| unsafe { pass.run::<f32>(range) }),
    }
}

fn over_chunks(length: usize, parallel: bool, fold: Fold, run: impl Fn(Range<usize>) -> f64 + Sync) -> f64 {
    let chunk = chunk_length(length);
    let range = |i: usize| i * chunk..length.min((i + 1) * chunk);
    let count = length.div_ceil(chunk);
    if !parallel {
        return (0..count).fold(0.0, |total, i| fold.join(total, run(range(i))));
    }
    // At most 1024 of them, see `chunk_length`.
    let folds: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(0)).collect();
    threads::for_each_chunk(count, &|i| folds[i].store(run(range(i)).to_bits(), Ordering::Release));
    folds.into_iter().fold(0.0, |total, bits| fold.join(total, f64::from_bits(bits.into_inner())))
}
