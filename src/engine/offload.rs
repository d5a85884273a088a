//! Leaves whose arithmetic is done on the CPU while their parameter is on another device: gradients are
//! downloaded, parameters are uploaded.
//!
//! A commit takes such leaves in batches: several leaves, or a part of a large one. While the caller's
//! threads compute one batch, a second thread downloads the gradients of the next and a third uploads the
//! parameters of the last, so that transfers and arithmetic overlap. What the reduce stage reads is
//! downloaded before it; then only uploads overlap.
//!
//! candle has one stream of a CUDA device for each thread, and nothing orders them. So the caller's is done
//! before another thread looks at its results, and that of the uploads is done before the caller goes on.

use std::ops::Range;
use std::sync::mpsc::sync_channel;

use super::pieces::{Piece, comes_in_pieces, commit_pieces};
use super::plan::{Job, OffloadTarget, Sources};
use super::route::Engine;
use super::{dispatch, functions};
use crate::error::{Error, Result};
use crate::model::lent::{Lend, Lent};
use crate::tensors::{Device, Tensor};

/// The elements of a batch: enough to be worth waking threads for.
const BATCH: usize = 1 << 20;

/// Downloads the gradients of a job, if that is to be done and has not been.
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

/// Downloads the gradients that are not contiguous. They are first copied on the device, which can fail for
/// want of memory: here, before anything is written.
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

/// What a parameter, or a part of it, becomes.
struct Upload<'a> {
    staging: &'a Tensor,
    parameter: &'a dyn Lend,
    window: Range<usize>,
}

/// Runs these jobs, whose parameters are elsewhere, and uploads the parameters that were written.
///
/// # Errors
/// Only if a device fails. A parameter that could not be uploaded is not what its state says. The next update
/// refuses it, if its sample shows that.
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
        [only] => {
            let uploads = download_batch(only)?;
            compute(batches.remove(0))?;
            upload_all(uploads)
        }
        _ => overlapping(batches, &devices, compute),
    }
}

/// Waits until this thread's work on the devices is done.
fn synchronise(devices: &[Device]) -> Result<()> {
    Ok(devices.iter().try_for_each(Device::synchronize)?)
}

/// Three threads, each with one batch in hand and one before it.
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
        // Each of the three stops when a channel's other end is gone.
        let outcome = arrived.into_iter().try_for_each(|downloaded| {
            let (batch, uploads) = downloaded.map_err(Stop::Failed)?;
            compute(batch).map_err(Stop::Failed)?;
            computed.send(uploads).map_err(|_| Stop::NoUploads)
        });
        drop(computed);
        let uploaded = uploading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        match outcome {
            Err(Stop::Failed(error)) => Err(error),
            Ok(()) | Err(Stop::NoUploads) => uploaded,
        }
    })
}

/// Why the batches after one are not computed.
enum Stop {
    Failed(Error),
    NoUploads,
}

/// Downloads the gradients of a batch. The result is what is to be uploaded after it.
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

/// The job in pieces of at most a batch where it can be divided, else whole. Its gradients go over to the
/// pieces.
fn pieces<'a>(engine: Engine, index: usize, job: &mut Job<'a>) -> Result<Vec<Travelling<'a>>> {
    job.copy_lent()?;
    let (offloaded, length) = (job.offloaded, job.length);
    let is_downloaded = offloaded.is_none_or(|offloaded| offloaded.is_downloaded) || length == 0;
    let writes_x = job.epilogue.writes_x() && length > 0;
    let upload = |window: Range<usize>| {
        let offloaded = offloaded.filter(|_| writes_x);
        offloaded.map(|OffloadTarget { staging, parameter, .. }| Upload { staging, parameter, window })
    };
    // Parts of gradients have to be neighbouring elements.
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

/// Parts of about equal length, each at most a batch.
fn windows(length: usize) -> impl Iterator<Item = Range<usize>> {
    let part = length.div_ceil(length.div_ceil(BATCH)).next_multiple_of(1 << 10);
    (0..length).step_by(part).map(move |start| start..length.min(start + part))
}
