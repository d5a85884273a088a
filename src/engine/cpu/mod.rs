//! The fused CPU engine: which leaf runs where. `unsafe`: it vouches for the locks and ranges of [`pass::Pass`].
#![allow(unsafe_code)]

mod ahead;
mod convert;
mod isa;
mod lanes;
mod pass;
mod rows;
mod storage;
mod threads;

pub(crate) use ahead::{Addresses, prefetch, prefetch_line};
pub(super) use convert::round_to_odd;
pub use isa::Isa;
pub(super) use lanes::{Block, Fold, fold_chunk, run_lanes};

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Tensor};

use self::lanes::BLOCK;
use self::pass::{End, Pass, PassStep, Strided};
use self::rows::Pace;
use self::storage::{Data, List, list, rest, rest_mut, slot, slot_mut, try_list, with_read, with_written};
use super::tensor::buffers;
use super::{Job, Link, Of, Question, Step, Store, Ticket};
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

/// Writes the parameters and state of all jobs. Their places are empty then.
pub(super) fn commit(isa: Isa, tickets: &mut [Option<Ticket<'_>>]) -> Result<()> {
    let leaf = |place: &mut Option<Ticket<'_>>, parallel| {
        let Some(Ticket { job, .. }) = place else { return Ok(()) };
        job.run_prefixes(|prefix| write(isa, prefix, 0..prefix.length, parallel))?;
        job.replace()?;
        let all = 0..job.length;
        write(isa, job, all, parallel)?;
        job.count();
        *place = None;
        Ok(())
    };
    let fetch =
        |place: &Option<Ticket<'_>>, stage| place.iter().for_each(|ticket| ahead::prefetch_job(&ticket.job, &ticket.addresses, stage));
    for_each_leaf(tickets, |place| place.as_ref().map_or(0, |ticket| ticket.job.length), fetch, leaf)
}

/// Writes a part of the parameter and state of a job, whose gradients are of that part.
pub(super) fn commit_part(isa: Isa, job: &mut Job<'_>, part: Range<usize>) -> Result<()> {
    threads::run(|| write(isa, job, part, true))?
}

/// The answers to questions about leaves.
pub(super) fn fold(isa: Isa, questions: Vec<Question<'_, '_>>) -> Result<Vec<f64>> {
    let mut answers: Vec<_> = questions.into_iter().map(|question| (question, 0.0)).collect();
    let leaf = |(question, answer): &mut (Question<'_, '_>, f64), parallel| {
        *answer = read(isa, *question, parallel)?;
        Ok(())
    };
    for_each_leaf(
        &mut answers,
        |(question, _)| question.elements.job.length,
        |(question, _), stage| ahead::prefetch_job(question.elements.job, &[], stage),
        leaf,
    )?;
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}

/// Calls `run` for each item, small ones in rows, each of which was fetched in stages, large ones one after another with leave to use all threads.
fn for_each_leaf<I: Send>(
    items: &mut [I],
    length: impl Fn(&I) -> usize + Sync,
    fetch: impl Fn(&I, usize) + Sync,
    run: impl Fn(&mut I, bool) -> Result<()> + Sync,
) -> Result<()> {
    let total: usize = items.iter().map(&length).sum();
    // A thread of a pool that candle computes in must not wait for a lock, see `threads`.
    if total < LARGE && rayon::current_thread_index().is_none() {
        return items.iter_mut().try_for_each(|item| run(item, false));
    }
    threads::run(|| {
        let is_large = |item: &I| length(item) >= LARGE;
        let row = (items.len() / (8 * rayon::current_num_threads())).clamp(1, ROW);
        let pace = Pace { row, distances: [3, 2, 1] };
        rows::in_rows(items, pace, |item, stage| fetch(item, stage), |item| if is_large(item) { Ok(()) } else { run(item, false) })?;
        items.iter_mut().filter(|item| is_large(item)).try_for_each(|item| run(item, true))
    })?
}

/// Calls `run` on every item, on all threads if there are many, see [`rows::in_rows`].
pub(crate) fn for_all<I: Send>(
    items: &mut [I],
    prepare: impl Fn(&mut I, usize) + Sync,
    run: impl Fn(&mut I) -> Result<()> + Sync,
) -> Result<()> {
    const MANY: usize = 256;
    // All of a row is prepared first.
    let pace = Pace { row: ROW, distances: [ROW; 3] };
    if items.len() < MANY {
        return items.chunks_mut(ROW).try_for_each(|row| rows::in_a_row(row, pace, &prepare, &run));
    }
    threads::run(|| rows::in_rows(items, pace, &prepare, &run))?
}

/// Runs a job to its end: slots and parameter are written, in this part of the leaf, of which the gradients are.
fn write(isa: Isa, job: &mut Job<'_>, part: Range<usize>, parallel: bool) -> Result<()> {
    let slots = try_list(buffers(&mut job.steps).map(slot_mut))?;
    let rest = job.rest.as_deref_mut().map(rest_mut).transpose()?;
    let compensation = match &mut job.store {
        Store::Kahan { compensation } => Some(slot_mut(compensation)?),
        _ => None,
    };
    let job = &*job;
    let mut read: List<&Tensor> = list(&job.source);
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
            let steps = with_slots(job.steps.iter().filter_map(Step::link), &slots);
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
    let Question { elements, fold } = question;
    let job = elements.job;
    let slots = try_list(elements.links().flat_map(|link| link.slots).map(|(_, buffer)| slot(buffer)))?;
    let tensors = list(elements.sources().iter().chain([job.x]));
    let total = with_read(&tensors, |data| {
        let (sources, x) = data.split_at(tensors.len() - 1);
        let x = x[0].with_rest(job.rest.as_deref().map(rest).transpose()?)?;
        let sources = match elements.of {
            Of::Parameter => strided(std::slice::from_ref(job.x), &[x], 0),
            Of::Gradient(_) | Of::Addend(..) => strided(elements.sources(), sources, 0),
        };
        let pass = Pass { isa, x, sources, steps: with_slots(elements.links(), &slots), end: End::Fold(fold) };
        // SAFETY: the data is locked for as long as this closure runs, and a folding pass writes nothing.
        Ok(unsafe { over(&pass, job, 0..job.length, parallel, fold) })
    });
    Ok(total.flatten()?)
}

/// Tensors of which the first element is the leaf's element `first`.
fn strided<'p>(tensors: &'p [Tensor], data: &[Data], first: usize) -> List<Strided<'p>> {
    list(tensors.iter().zip(data).map(|(tensor, &data)| Strided::new(data, tensor.layout(), first)))
}

/// The arithmetic, each part with its own of the slots.
fn with_slots<'p>(links: impl Iterator<Item = Link<'p>>, mut slots: &'p [Data]) -> List<PassStep<'p>> {
    list(links.map(|link| {
        let (own, rest) = slots.split_at(link.slots.len());
        slots = rest;
        PassStep { kernel: link.kernel, slots: own }
    }))
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
