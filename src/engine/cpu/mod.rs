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
use super::{Job, Of, Question, Step, Store, Ticket};
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
        job.run_prefixes(|prefix| write(isa, prefix, 0..prefix.length, parallel))?;
        job.replace()?;
        let all = 0..job.length;
        write(isa, &mut job, all, parallel)?;
        job.count();
        Ok(())
    };
    for_each_leaf(jobs, |ticket| ticket.length, |ticket| &ticket.job, leaf).map(|_| ())
}

/// Writes a part of the parameter and state of a job, whose gradients are of that part.
pub(super) fn commit_part(isa: Isa, job: &mut Job<'_>, part: Range<usize>) -> Result<()> {
    threads::run(|| write(isa, job, part, true))?
}

/// The answers to questions about leaves.
pub(super) fn fold(isa: Isa, questions: Vec<Question<'_, '_>>) -> Result<Vec<f64>> {
    for_each_leaf(questions, |question| question.job.length, |question| question.job, |question, parallel| read(isa, question, parallel))
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

/// Runs a job to its end: slots and parameter are written, in this part of the leaf, of which the gradients are.
fn write(isa: Isa, job: &mut Job<'_>, part: Range<usize>, parallel: bool) -> Result<()> {
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
            let steps = with_slots(job.steps.iter(), &slots);
            let pass = Pass { isa, x: x.with_rest(rest)?, sources: strided(&job.source, sources, part.start), steps, end };
            // SAFETY: parameter and gradients are locked for as long as this closure runs, and the state is this job's own.
            unsafe { over(&pass, job, part.clone(), parallel, Fold::Sum) };
            Ok(())
        };
        outcome = with_read(&read, run).flatten();
    })?;
    Ok(outcome?)
}

/// Answers a question, reading only.
fn read(isa: Isa, question: Question<'_, '_>, parallel: bool) -> Result<f64> {
    let Question { job, of, fold } = question;
    let slots = question.steps().flat_map(Step::slots).map(|(_, buffer)| slot(buffer)).collect::<candle_core::Result<List<_>>>()?;
    let tensors: List<&Tensor> = question.sources().iter().chain([job.x]).collect();
    let total = with_read(&tensors, |data| {
        let (sources, x) = data.split_at(tensors.len() - 1);
        let x = x[0].with_rest(job.rest.as_deref().map(rest).transpose()?)?;
        let sources = match of {
            Of::Parameter => strided(std::slice::from_ref(job.x), &[x], 0),
            Of::Gradient(_) | Of::Addend(_) => strided(&job.source, sources, 0),
        };
        let pass = Pass { isa, x, sources, steps: with_slots(question.steps(), &slots), end: End::Fold(fold) };
        // SAFETY: the data is locked for as long as this closure runs, and a folding pass writes nothing.
        Ok(unsafe { over(&pass, job, 0..job.length, parallel, fold) })
    });
    Ok(total.flatten()?)
}

/// Tensors of which the first element is the leaf's element `first`.
fn strided<'p>(tensors: &'p [Tensor], data: &[Data], first: usize) -> List<Strided<'p>> {
    tensors.iter().zip(data).map(|(tensor, &data)| Strided::new(data, tensor.layout(), first)).collect()
}

/// The steps that do something, each with its own of the slots.
fn with_slots<'p, 'a: 'p>(steps: impl Iterator<Item = &'p Step<'a>>, mut slots: &'p [Data]) -> List<PassStep<'p>> {
    let own = |step: &'p Step<'a>| {
        let kernel = step.kernel()?;
        let (own, rest) = slots.split_at(step.slots().len());
        slots = rest;
        Some(PassStep { kernel, slots: own })
    };
    steps.filter_map(own).collect()
}

/// Runs a pass over a part of a leaf, in chunks; the result is the chunks' folds joined in order.
///
/// # Safety
/// All data of the pass must be locked.
unsafe fn over(pass: &Pass<'_>, job: &Job<'_>, part: Range<usize>, parallel: bool, fold: Fold) -> f64 {
    let chunk = chunk_length(job.length);
    // SAFETY: the data is locked, and the chunks lie within the leaf and do not overlap.
    match job.compute {
        DType::F64 => over_chunks(part, chunk, parallel, fold, |range| unsafe { pass.run::<f64>(range) }),
        _ => over_chunks(part, chunk, parallel, fold, |range| unsafe { pass.run::<f32>(range) }),
    }
}

fn over_chunks(part: Range<usize>, chunk: usize, parallel: bool, fold: Fold, run: impl Fn(Range<usize>) -> f64 + Sync) -> f64 {
    let range = |i: usize| part.start + i * chunk..part.end.min(part.start + (i + 1) * chunk);
    let count = part.len().div_ceil(chunk);
    if !parallel {
        return (0..count).fold(0.0, |total, i| fold.join(total, run(range(i))));
    }
    // At most 1024 of them, see `chunk_length`.
    let folds: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(0)).collect();
    threads::for_each_chunk(count, &|i| folds[i].store(run(range(i)).to_bits(), Ordering::Release));
    folds.into_iter().fold(0.0, |total, bits| fold.join(total, f64::from_bits(bits.into_inner())))
}
