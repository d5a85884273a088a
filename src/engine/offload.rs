//! Leaves (parameters with their state) whose arithmetic is done on the CPU while the parameter is on another
//! device.
//!
//! A commit takes such leaves in batches: several leaves, or a part of a large one. Three threads work on
//! neighbouring batches at a time, so that transfers and arithmetic overlap:
//!
//! ```text
//! a second thread  downloads the gradients of batch n + 1
//! the caller       computes batch n, on all threads of the engine
//! a third thread   uploads the parameters of batch n - 1
//! ```
//!
//! Gradients that the reduce stage reads are downloaded before it. Then only uploads overlap.
//!
//! candle has one stream of a CUDA device for each thread of the host, and nothing orders these streams. So
//! the caller's stream is waited for before another thread reads its results, and the stream of the uploads
//! is waited for before the caller goes on.

use std::ops::Range;
use std::sync::mpsc::sync_channel;

use super::pieces::{Piece, comes_in_pieces, commit_pieces};
use super::plan::{Job, OffloadTarget, Sources};
use super::route::Engine;
use super::{dispatch, functions};
use crate::error::{Error, Result};
use crate::model::lent::{Lend, Lent};
use crate::tensors::{Device, Tensor};

/// The most elements of a batch, unless a leaf cannot be divided: enough to be worth waking threads for.
const BATCH: usize = 1 << 20;

/// Downloads the gradients of an offloaded job, unless that has been done.
pub(super) fn download(job: &mut Job<'_>) -> Result<()> {
    if job.offloaded.is_none_or(|offloaded| offloaded.is_downloaded) {
        return Ok(());
    }
    if job.length > 0 {
        job.copy_lent()?;
        download_all(&mut job.sources)?;
    }
    if let Some(offloaded) = &mut job.offloaded {
        offloaded.is_downloaded = true;
    }
    Ok(())
}

fn download_all(gradients: &mut Sources<'_>) -> Result<()> {
    gradients.iter_mut().try_for_each(|gradient| {
        *gradient = Lent::Tensor(dispatch::download(&gradient.tensor_or_copy()?)?);
        Ok(())
    })
}

/// Downloads the gradients that are not contiguous. Such a gradient is first copied on the device, which can
/// fail for lack of memory. So this function runs before anything is written.
pub(super) fn prepare(jobs: &mut [&mut Job<'_>]) -> Result<()> {
    let strided = jobs.iter_mut().filter(|job| !job.sources.iter().all(is_contiguous));
    strided.into_iter().try_for_each(|job| download(job))
}

fn is_contiguous(gradient: &Lent<'_>) -> bool {
    gradient.tensor().is_some_and(Tensor::is_contiguous)
}

/// A piece with gradients to download and a parameter to upload.
struct Travelling<'a> {
    piece: Piece<'a>,
    is_downloaded: bool,
    upload: Option<Upload<'a>>,
}

/// The transfer of new values (`staging`, on the CPU) to the elements `window` of a parameter.
struct Upload<'a> {
    staging: &'a Tensor,
    parameter: &'a dyn Lend,
    window: Range<usize>,
}

/// Runs offloaded jobs and uploads the parameters that they write.
///
/// # Errors
/// Only if a device fails. A parameter whose upload has failed does not fit its state. The next update
/// refuses it, if the update's sample of elements shows that.
pub(super) fn commit<'a>(engine: Engine, mut jobs: Vec<&mut Job<'a>>) -> Result<()> {
    let mut devices: Vec<Device> = Vec::new();
    for parameter in jobs.iter().filter_map(|job| Some(job.offloaded?.parameter)) {
        if !devices.iter().any(|known| known.same_device(parameter.device())) {
            devices.push(parameter.device().clone());
        }
    }
    let pieces = jobs
        .iter_mut()
        .enumerate()
        .map(|(index, job)| pieces(engine, index, job))
        .collect::<Result<Vec<_>>>()?;
    let length = |Travelling { piece, .. }: &Travelling<'_>| {
        piece.window.as_ref().map_or(jobs[piece.job].length, Range::len)
    };
    let mut batches = functions::batches(pieces.into_iter().flatten(), length, BATCH);
    let mut jobs: Vec<Option<&mut Job<'a>>> = jobs.into_iter().map(Some).collect();
    let mut compute = |batch: Vec<Travelling<'a>>| {
        commit_pieces(engine, &mut jobs, batch.into_iter().map(|travelling| travelling.piece))
    };
    match &mut batches[..] {
        [] => Ok(()),
        // A single batch has no other to overlap with, so it needs no threads.
        [only] => {
            let uploads = download_batch(only)?;
            compute(batches.remove(0))?;
            upload_all(uploads)
        }
        _ => overlapping(batches, &devices, compute),
    }
}

/// Waits until the work of this thread on the devices is done.
fn synchronise(devices: &[Device]) -> Result<()> {
    Ok(devices.iter().try_for_each(Device::synchronize)?)
}

/// Runs the batches on three threads. Each channel holds one batch, so that downloaded gradients take the
/// memory of few batches.
fn overlapping<'a>(
    batches: Vec<Vec<Travelling<'a>>>,
    devices: &[Device],
    mut compute: impl FnMut(Vec<Travelling<'a>>) -> Result<()>,
) -> Result<()> {
    synchronise(devices)?;
    std::thread::scope(|scope| {
        let (down, arrived) = sync_channel(1);
        let (computed, up) = sync_channel(1);
        scope.spawn(move || {
            for mut batch in batches {
                let downloaded = download_batch(&mut batch).map(|uploads| (batch, uploads));
                let failed = downloaded.is_err();
                if down.send(downloaded).is_err() || failed {
                    return;
                }
            }
        });
        let uploading =
            scope.spawn(move || up.into_iter().try_for_each(upload_all).and(synchronise(devices)));
        // If one of the threads fails, it drops its ends of the channels, and the others stop there.
        let outcome = arrived.into_iter().try_for_each(|downloaded| {
            let (batch, uploads) = downloaded.map_err(Stop::Failed)?;
            compute(batch).map_err(Stop::Failed)?;
            computed.send(uploads).map_err(|_| Stop::NoUploads)
        });
        // Otherwise the uploading thread would wait for more batches, and `join` for that thread.
        drop(computed);
        let uploaded = uploading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        match outcome {
            Err(Stop::Failed(error)) => Err(error),
            Ok(()) | Err(Stop::NoUploads) => uploaded,
        }
    })
}

/// Why no further batch is computed.
enum Stop {
    Failed(Error),
    /// The uploading thread has stopped, and has the error.
    NoUploads,
}

/// Downloads the gradients of a batch. Returns the uploads that follow its computation.
fn download_batch<'a>(batch: &mut [Travelling<'a>]) -> Result<Vec<Upload<'a>>> {
    for travelling in batch.iter_mut().filter(|travelling| !travelling.is_downloaded) {
        download_all(&mut travelling.piece.gradients)?;
    }
    Ok(batch.iter_mut().filter_map(|travelling| travelling.upload.take()).collect())
}

fn upload_all(uploads: Vec<Upload<'_>>) -> Result<()> {
    uploads
        .into_iter()
        .try_for_each(|Upload { staging, parameter, window }| dispatch::upload(staging, parameter, window))
}

/// Cuts a job into pieces of at most a batch, or returns it as one piece if it cannot be divided. The job's
/// gradients move into the pieces.
fn pieces<'a>(engine: Engine, index: usize, job: &mut Job<'a>) -> Result<Vec<Travelling<'a>>> {
    job.copy_lent()?;
    let (offloaded, length) = (job.offloaded, job.length);
    let is_downloaded = offloaded.is_none_or(|offloaded| offloaded.is_downloaded) || length == 0;
    let writes_x = job.epilogue.writes_x() && length > 0;
    let upload = |window: Range<usize>| {
        let offloaded = offloaded.filter(|_| writes_x);
        offloaded.map(|OffloadTarget { staging, parameter, .. }| Upload { staging, parameter, window })
    };
    // Only a contiguous gradient can be cut into ranges of elements.
    let is_divided = length > BATCH && comes_in_pieces(engine, job) && job.sources.iter().all(is_contiguous);
    if !is_divided {
        let piece =
            Piece { job: index, window: None, is_last: true, gradients: std::mem::take(&mut job.sources) };
        return Ok(vec![Travelling { piece, is_downloaded, upload: upload(0..length) }]);
    }
    let gradients = std::mem::take(&mut job.sources);
    let gradients = gradients
        .iter()
        .map(|gradient| Ok(gradient.tensor_or_copy()?.detach().flatten_all()?))
        .collect::<Result<Vec<_>>>()?;
    let piece = |window: Range<usize>| {
        let part = gradients
            .iter()
            .map(|gradient| Ok(Lent::Tensor(gradient.narrow(0, window.start, window.len())?)));
        let (gradients, upload) = (part.collect::<Result<_>>()?, upload(window.clone()));
        let piece = Piece { job: index, is_last: window.end == length, window: Some(window), gradients };
        Ok(Travelling { piece, is_downloaded, upload })
    };
    windows(length).map(piece).collect()
}

/// Ranges of about equal length, each at most a batch.
fn windows(length: usize) -> impl Iterator<Item = Range<usize>> {
    // A multiple of 1024, and so of 128, because records of state (codes, low bits) have 128 elements.
    let part = length.div_ceil(length.div_ceil(BATCH)).next_multiple_of(1 << 10);
    (0..length).step_by(part).map(move |start| start..length.min(start + part))
}
