//! Leaves whose arithmetic is done on the CPU while their parameter is on another device: gradients come down, parameters go up.
//!
//! A commit takes such leaves in batches. While the caller's threads compute one batch, a second thread brings down the gradients of the next
//! and a third brings up the parameters of the last, so that transfers and arithmetic overlap. What the reduce stage is to read comes down
//! before it, and then only the way up overlaps.

use std::sync::mpsc::sync_channel;

use candle_core::{Device, Tensor};

use super::{Job, Store, Ticket, owned_on, set_tensor};
use crate::error::Result;

/// The elements of a batch, at least: enough to be worth waking threads for.
const BATCH: usize = 1 << 20;

/// The parameter of a job on another device than its x.
pub(crate) struct Remote<'a> {
    /// What the parameter becomes once the job has run, on the CPU.
    outgoing: &'a Tensor,
    parameter: &'a Tensor,
    /// Whether the gradients have been brought down.
    is_fetched: bool,
}

impl<'a> Remote<'a> {
    pub(crate) fn new(outgoing: &'a Tensor, parameter: &'a Tensor) -> Self {
        Remote { outgoing, parameter, is_fetched: false }
    }
}

impl Job<'_> {
    /// Brings the gradients down, if that is to be done and has not been.
    pub(super) fn fetch(&mut self) -> Result<()> {
        let Some(remote) = self.remote.as_mut().filter(|remote| !remote.is_fetched) else { return Ok(()) };
        if self.length > 0 {
            for gradient in &mut self.source {
                *gradient = fetched(gradient)?;
            }
        }
        remote.is_fetched = true;
        Ok(())
    }
}

/// A copy on the CPU.
fn fetched(gradient: &Tensor) -> candle_core::Result<Tensor> {
    // A transfer takes the whole storage, however little of it a view shows.
    if gradient.layout().is_contiguous() && gradient.layout().start_offset() == 0 {
        owned_on(&Device::Cpu, gradient)
    } else {
        owned_on(&Device::Cpu, &gradient.detach().force_contiguous()?)
    }
}

/// Runs these jobs, whose parameters are elsewhere, and brings the parameters up that were written.
///
/// # Errors
/// Only if a device fails. A parameter that could not be brought up is not what its state says; the next update refuses it.
pub(super) fn commit<'a>(tickets: Vec<Ticket<'a>>, compute: impl Fn(Vec<Ticket<'a>>) -> Result<()>) -> Result<()> {
    let mut batches = batches(tickets, BATCH);
    match batches.pop() {
        None => Ok(()),
        Some(only) if batches.is_empty() => {
            let (ready, uploads) = prepare(only)?;
            compute(ready)?;
            bring_up(uploads)
        }
        Some(last) => {
            batches.push(last);
            overlapping(batches, compute)
        }
    }
}

/// Three threads, each with one batch in hand and one before it.
fn overlapping<'a>(batches: Vec<Vec<Ticket<'a>>>, compute: impl Fn(Vec<Ticket<'a>>) -> Result<()>) -> Result<()> {
    std::thread::scope(|scope| {
        let (down, arrived) = sync_channel(1);
        let (computed, up) = sync_channel(1);
        scope.spawn(move || {
            for batch in batches {
                let batch = prepare(batch);
                let failed = batch.is_err();
                if down.send(batch).is_err() || failed {
                    return;
                }
            }
        });
        let uploading = scope.spawn(move || up.into_iter().try_for_each(bring_up));
        // Each of the three stops when a channel's other end is gone.
        let outcome = arrived.into_iter().try_for_each(|batch| {
            let (batch, uploads) = batch.map_err(Stop::Failed)?;
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
    Failed(crate::error::Error),
    NoUploads,
}

/// What becomes of which parameter after a batch.
type Uploads<'a> = Vec<(&'a Tensor, &'a Tensor)>;

/// Brings the gradients of a batch down.
fn prepare(mut batch: Vec<Ticket<'_>>) -> Result<(Vec<Ticket<'_>>, Uploads<'_>)> {
    let mut uploads = Uploads::new();
    for ticket in &mut batch {
        ticket.job.fetch()?;
        match (&ticket.job.store, &ticket.job.remote) {
            (Store::Nothing, _) | (_, None) => {}
            (_, Some(remote)) => uploads.push((remote.outgoing, remote.parameter)),
        }
    }
    Ok((batch, uploads))
}

fn bring_up(uploads: Uploads<'_>) -> Result<()> {
    uploads.into_iter().try_for_each(|(outgoing, parameter)| Ok(set_tensor(parameter, outgoing)?))
}

/// Neighbouring leaves together, until they have `least` elements.
fn batches(tickets: Vec<Ticket<'_>>, least: usize) -> Vec<Vec<Ticket<'_>>> {
    let mut batches: Vec<Vec<Ticket<'_>>> = Vec::new();
    let mut length = least;
    for ticket in tickets {
        if length >= least {
            batches.push(Vec::new());
            length = 0;
        }
        length += ticket.length;
        if let Some(batch) = batches.last_mut() {
            batch.push(ticket);
        }
    }
    batches
}
