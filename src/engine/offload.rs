//! Leaves (parameters with their state) whose arithmetic is done on the CPU while the parameter is on another
//! device.
//!
//! A commit takes such leaves in batches. A batch is several leaves, or a part of a large leaf. Three threads
//! work on neighbouring batches at a time, so that transfers and arithmetic overlap:
//!
//! ```text
//! a second thread  downloads the gradients of batch n + 1
//! the caller       computes batch n, on all threads of the engine
//! a third thread   uploads the parameters of batch n - 1
//! ```
//!
//! Gradients that the reduce stage reads are downloaded before that stage. For their leaves only the uploads
//! overlap with the arithmetic.
//!
//! candle has one stream of a CUDA device for each thread of the host, and nothing orders these streams. So
//! the caller synchronises its stream before another thread reads results of that stream, and the uploading
//! thread synchronises its own stream before the caller continues.

use std::ops::Range;
use std::sync::mpsc::sync_channel;

use super::pieces::{Piece, commit_pieces, is_splittable};
use super::plan::{Job, OffloadTarget, Sources, copy_in_shape};
use super::route::Engine;
use super::{dispatch, functions};
use crate::error::{Error, Result};
use crate::model::lent::Lent;
use crate::tensors::{Device, Tensor};

/// The most elements of a batch, enough to be worth waking threads for. A larger leaf that cannot be divided
/// is one batch.
const BATCH_LENGTH: usize = 1 << 20;

/// Downloads the gradients of an offloaded job. Gradients that are downloaded already stay where they are.
pub(super) fn download_gradients(job: &mut Job<'_>) -> Result<()> {
    if job.offloaded.is_none() || job.length == 0 {
        return Ok(());
    }
    download_all(&mut job.sources, job.x.shape())
}

/// Downloads gradients. Those that are no tensors are copied, in this shape.
fn download_all(gradients: &mut Sources<'_>, shape: &[usize]) -> Result<()> {
    gradients.iter_mut().try_for_each(|gradient| {
        let on_cpu = match gradient.tensor() {
            Some(tensor) => dispatch::download(tensor)?,
            None => copy_in_shape(&**gradient, shape)?,
        };
        *gradient = Lent::Tensor(on_cpu);
        Ok(())
    })
}

/// Downloads all gradients of each job in which one gradient is not a contiguous tensor. Such a gradient is
/// first copied (a tensor on its device), which can fail for lack of memory. So this function runs before
/// anything is written.
pub(super) fn download_strided(jobs: &mut [&mut Job<'_>]) -> Result<()> {
    let mut jobs_to_download = jobs
        .iter_mut()
        .filter(|job| !job.sources.iter().all(is_contiguous_tensor));
    jobs_to_download.try_for_each(|job| download_gradients(job))
}

fn is_contiguous_tensor(gradient: &Lent<'_>) -> bool {
    gradient.tensor().is_some_and(Tensor::is_contiguous)
}

/// The elements of a parameter whose new values are to be uploaded.
type Upload<'a> = (OffloadTarget<'a>, Range<usize>);

/// Runs offloaded jobs and uploads the parameters that they write.
///
/// # Errors
/// As `engine::commit`. A parameter whose upload has failed does not fit its state. The next update
/// compares a sample of its elements, and refuses the parameter if one of them differs.
pub(super) fn commit<'a>(engine: Engine, mut jobs: Vec<&mut Job<'a>>) -> Result<()> {
    let mut devices: Vec<Device> = Vec::new();
    for parameter in jobs.iter().filter_map(|job| Some(job.offloaded?.parameter)) {
        if !devices
            .iter()
            .any(|device| device.same_device(parameter.device()))
        {
            devices.push(parameter.device().clone());
        }
    }
    let pieces = jobs
        .iter_mut()
        .enumerate()
        .map(|(index, job)| cut_into_pieces(engine, index, job))
        .collect::<Result<Vec<_>>>()?;
    let length_of = |piece: &Piece<'_>| piece.elements.len();
    let mut batches = functions::batches(pieces.into_iter().flatten(), length_of, BATCH_LENGTH);
    let mut job_slots: Vec<Option<&mut Job<'a>>> = jobs.into_iter().map(Some).collect();
    let mut compute = |batch: Vec<Piece<'a>>| {
        let upload = |piece: &Piece<'a>| {
            let job = job_slots[piece.job].as_ref()?;
            let is_written = job.epilogue.writes_x() && job.length > 0;
            Some((job.offloaded.filter(|_| is_written)?, piece.elements.clone()))
        };
        let uploads: Vec<Upload<'a>> = batch.iter().filter_map(upload).collect();
        commit_pieces(engine, &mut job_slots, batch).map(|()| uploads)
    };
    match &mut batches[..] {
        [] => Ok(()),
        // A single batch has no other batch to overlap with, so it needs no threads.
        [batch] => {
            download_batch(batch)?;
            upload_all(compute(batches.remove(0))?)
        }
        _ => commit_overlapped(batches, &devices, compute),
    }
}

/// Waits until the work of this thread on the devices is done.
fn synchronise(devices: &[Device]) -> Result<()> {
    Ok(devices.iter().try_for_each(Device::synchronize)?)
}

/// Runs the batches on three threads. Each channel holds one batch, so that downloaded gradients take the
/// memory of few batches.
fn commit_overlapped<'a>(
    batches: Vec<Vec<Piece<'a>>>,
    devices: &[Device],
    mut compute: impl FnMut(Vec<Piece<'a>>) -> Result<Vec<Upload<'a>>>,
) -> Result<()> {
    synchronise(devices)?;
    std::thread::scope(|scope| {
        let (download_sender, download_receiver) = sync_channel(1);
        let (upload_sender, upload_receiver) = sync_channel(1);
        scope.spawn(move || {
            for mut batch in batches {
                let download_result = download_batch(&mut batch).map(|()| batch);
                let has_failed = download_result.is_err();
                if download_sender.send(download_result).is_err() || has_failed {
                    return;
                }
            }
        });
        let uploader = scope.spawn(move || {
            upload_receiver
                .into_iter()
                .try_for_each(upload_all)
                .and(synchronise(devices))
        });
        // A thread that fails drops its ends of the channels, and the other threads then stop.
        let compute_result = download_receiver.into_iter().try_for_each(|download_result| {
            let uploads = download_result.and_then(&mut compute).map_err(Stop::Failed)?;
            upload_sender.send(uploads).map_err(|_| Stop::UploaderStopped)
        });
        // Without this drop the uploading thread would wait for more batches, and `join` would wait for
        // that thread.
        drop(upload_sender);
        let upload_result = uploader
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        match compute_result {
            Err(Stop::Failed(error)) => Err(error),
            Ok(()) | Err(Stop::UploaderStopped) => upload_result,
        }
    })
}

/// Why no further batch is computed.
enum Stop {
    Failed(Error),
    /// The uploading thread has stopped, and returns the error.
    UploaderStopped,
}

fn download_batch(batch: &mut [Piece<'_>]) -> Result<()> {
    let mut pieces = batch.iter_mut().filter(|piece| !piece.elements.is_empty());
    pieces.try_for_each(|piece| download_all(&mut piece.gradients, &[piece.elements.len()]))
}

fn upload_all(uploads: Vec<Upload<'_>>) -> Result<()> {
    uploads
        .into_iter()
        .try_for_each(|(OffloadTarget { staging, parameter }, range)| {
            dispatch::upload(staging, parameter, range)
        })
}

/// Cuts a job into pieces of at most `BATCH_LENGTH` elements. A job that cannot be divided becomes one piece.
/// The job's gradients move into the pieces. Unless the job is empty, these are tensors, because
/// `download_strided` has copied all others.
fn cut_into_pieces<'a>(engine: Engine, index: usize, job: &mut Job<'a>) -> Result<Vec<Piece<'a>>> {
    let (length, gradients) = (job.length, std::mem::take(&mut job.sources));
    // Only a contiguous gradient can be cut into ranges of elements.
    let is_divided =
        length > BATCH_LENGTH && is_splittable(engine, job) && gradients.iter().all(is_contiguous_tensor);
    if !is_divided {
        return Ok(vec![Piece {
            job: index,
            elements: 0..length,
            gradients,
        }]);
    }
    let flat_gradients = gradients
        .iter()
        .map(|gradient| Ok(gradient.tensor_or_copy()?.detach().flatten_all()?))
        .collect::<Result<Vec<_>>>()?;
    let make_piece = |elements: Range<usize>| {
        let slice_of = |gradient: &Tensor| {
            Ok(Lent::Tensor(gradient.narrow(
                0,
                elements.start,
                elements.len(),
            )?))
        };
        Ok(Piece {
            job: index,
            gradients: flat_gradients.iter().map(slice_of).collect::<Result<_>>()?,
            elements,
        })
    };
    piece_ranges(length).map(make_piece).collect()
}

/// Ranges of about equal length, each of at most `BATCH_LENGTH` elements.
fn piece_ranges(length: usize) -> impl Iterator<Item = Range<usize>> {
    // `range_length` is a multiple of 1024, and so of 128, because records of state (codes, low bits) have
    // 128 elements.
    let range_length = length
        .div_ceil(length.div_ceil(BATCH_LENGTH))
        .next_multiple_of(1 << 10);
    (0..length)
        .step_by(range_length)
        .map(move |start| start..length.min(start + range_length))
}
