//! Leaves whose arithmetic is done on the CPU while their parameter is on another device: gradients come down, parameters go up.
//!
//! A commit takes such leaves in batches: several leaves, or a part of a large one. While the caller's threads compute one batch, a second thread
//! brings down the gradients of the next and a third brings up the parameters of the last, so that transfers and arithmetic overlap. What the
//! reduce stage is to read comes down before it, and then only the way up overlaps.
//!
//! candle's stream of a CUDA device is another one on each thread, and nothing orders them: the caller's is done before another thread looks at
//! its results, and that which brings up is done before the caller goes on.

use std::ops::Range;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Tensor};

use super::{Engine, Isa, Job, Route, Source, Store, Ticket, by_device, cpu, owned_on, rounded, set_tensor};
use crate::error::Result;

/// The elements of a batch: enough to be worth waking threads for.
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
    if gradient.layout().is_contiguous() && gradient.layout().start_offset() == 0 {
        owned_on(&Device::Cpu, gradient)
    } else {
        part_on(&Device::Cpu, gradient)
    }
}

/// A copy of a view on a device. A transfer takes the whole storage, however little of it a view shows, so the view is copied first.
fn part_on(device: &Device, view: &Tensor) -> candle_core::Result<Tensor> {
    owned_on(device, &view.detach().force_contiguous()?)
}

/// What comes down, is computed and goes up at once.
enum Batch<'a> {
    Leaves(Vec<Ticket<'a>>),
    Part(Part<'a>),
}

/// A part of a leaf.
struct Part<'a> {
    isa: Isa,
    ticket: Arc<Mutex<Ticket<'a>>>,
    /// Which elements.
    window: Range<usize>,
    /// Of these elements.
    gradients: Source,
    is_fetched: bool,
    is_last: bool,
    upload: Option<Upload<'a>>,
}

/// What a parameter becomes.
#[derive(Clone)]
struct Upload<'a> {
    outgoing: &'a Tensor,
    parameter: &'a Tensor,
    /// Which elements, if not all.
    window: Option<Range<usize>>,
}

/// Runs these jobs, whose parameters are elsewhere, and brings the parameters up that were written.
///
/// # Errors
/// Only if a device fails. A parameter that could not be brought up is not what its state says; the next update refuses it.
pub(super) fn commit(engine: Engine, tickets: Vec<Ticket<'_>>) -> Result<()> {
    let devices = devices(&tickets);
    let mut batches = batches(engine, tickets)?;
    match batches.pop() {
        None => Ok(()),
        Some(mut only) if batches.is_empty() => {
            let uploads = only.fetch()?;
            only.compute(engine)?;
            bring_up(uploads)
        }
        Some(last) => {
            batches.push(last);
            overlapping(engine, batches, &devices)
        }
    }
}

/// The devices of the parameters.
fn devices(tickets: &[Ticket<'_>]) -> Vec<Device> {
    let parameters = tickets.iter().filter_map(|ticket| Some(ticket.job.remote.as_ref()?.parameter));
    by_device(parameters, |parameter| parameter.device()).into_iter().map(|(device, _)| device).collect()
}

/// Waits until this thread's work on the devices is done.
fn synchronise(devices: &[Device]) -> Result<()> {
    Ok(devices.iter().try_for_each(Device::synchronize)?)
}

/// Three threads, each with one batch in hand and one before it.
fn overlapping(engine: Engine, batches: Vec<Batch<'_>>, devices: &[Device]) -> Result<()> {
    synchronise(devices)?;
    std::thread::scope(|scope| {
        let (down, arrived) = sync_channel(1);
        let (computed, up) = sync_channel(1);
        scope.spawn(move || {
            for mut batch in batches {
                let fetched = batch.fetch().map(|uploads| (batch, uploads));
                let failed = fetched.is_err();
                if down.send(fetched).is_err() || failed {
                    return;
                }
            }
        });
        let uploading = scope.spawn(move || up.into_iter().try_for_each(bring_up).and(synchronise(devices)));
        // Each of the three stops when a channel's other end is gone.
        let outcome = arrived.into_iter().try_for_each(|fetched| {
            let (batch, uploads) = fetched.map_err(Stop::Failed)?;
            batch.compute(engine).map_err(Stop::Failed)?;
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

impl<'a> Batch<'a> {
    /// Brings the gradients down. The result is what is to be brought up after the batch.
    fn fetch(&mut self) -> Result<Vec<Upload<'a>>> {
        match self {
            Batch::Leaves(tickets) => {
                tickets.iter_mut().try_for_each(|ticket| ticket.job.fetch())?;
                Ok(tickets.iter().filter_map(|ticket| upload(&ticket.job)).collect())
            }
            Batch::Part(part) => {
                if !part.is_fetched {
                    part.gradients =
                        part.gradients.iter().map(|gradient| part_on(&Device::Cpu, gradient)).collect::<candle_core::Result<_>>()?;
                }
                Ok(part.upload.take().into_iter().collect())
            }
        }
    }

    fn compute(self, engine: Engine) -> Result<()> {
        match self {
            Batch::Leaves(tickets) => super::compute(engine, &mut tickets.into_iter().map(Some).collect::<Vec<_>>()),
            Batch::Part(Part { isa, ticket, window, gradients, is_last, .. }) => {
                let job = &mut ticket.lock().unwrap_or_else(PoisonError::into_inner).job;
                job.source = gradients;
                cpu::commit_part(isa, job, window)?;
                if is_last {
                    job.count();
                }
                Ok(())
            }
        }
    }
}

/// What is to be brought up for a whole leaf.
fn upload<'a>(job: &Job<'a>) -> Option<Upload<'a>> {
    match (&job.store, &job.remote) {
        (Store::Nothing, _) | (_, None) => None,
        (_, Some(Remote { outgoing, parameter, .. })) => Some(Upload { outgoing, parameter, window: None }),
    }
}

fn bring_up(uploads: Vec<Upload<'_>>) -> Result<()> {
    for Upload { outgoing, parameter, window } in uploads {
        match window {
            None => set_tensor(parameter, outgoing)?,
            Some(window) => {
                let flat = |tensor: &Tensor| tensor.detach().flatten_all();
                let part = rounded(&flat(outgoing)?.narrow(0, window.start, window.len())?, parameter.dtype())?;
                flat(parameter)?.slice_set(&part_on(parameter.device(), &part)?, 0, window.start)?;
            }
        }
    }
    Ok(())
}

/// Neighbouring leaves together, until they have as many elements as a batch; larger leaves in parts.
fn batches(engine: Engine, tickets: Vec<Ticket<'_>>) -> Result<Vec<Batch<'_>>> {
    let mut batches = Vec::new();
    let mut small = Vec::new();
    let mut length = 0;
    for ticket in tickets {
        if let Route::Cpu(isa) = engine.route(ticket.on_cpu)
            && can_be_divided(&ticket)
        {
            batches.extend(parts(isa, ticket)?.into_iter().map(Batch::Part));
            continue;
        }
        length += ticket.job.length;
        small.push(ticket);
        if length >= BATCH {
            batches.push(Batch::Leaves(std::mem::take(&mut small)));
            length = 0;
        }
    }
    if !small.is_empty() {
        batches.push(Batch::Leaves(small));
    }
    Ok(batches)
}

/// Whether a leaf can come in parts, and is worth it. That needs elementwise steps only, and gradients whose parts are neighbouring elements.
fn can_be_divided(Ticket { job, .. }: &Ticket<'_>) -> bool {
    job.length > BATCH && job.prefixes.is_empty() && job.replaced.is_empty() && job.source.iter().all(Tensor::is_contiguous)
}

fn parts(isa: Isa, mut ticket: Ticket<'_>) -> Result<Vec<Part<'_>>> {
    let gradients = std::mem::take(&mut ticket.job.source);
    let gradients = gradients.iter().map(|gradient| gradient.detach().flatten_all()).collect::<candle_core::Result<Source>>()?;
    let is_fetched = ticket.job.remote.as_ref().is_some_and(|remote| remote.is_fetched);
    let (upload, length) = (upload(&ticket.job), ticket.job.length);
    let ticket = Arc::new(Mutex::new(ticket));
    let part = |window: Range<usize>| {
        let gradients =
            gradients.iter().map(|gradient| gradient.narrow(0, window.start, window.len())).collect::<candle_core::Result<_>>()?;
        let upload = upload.clone().map(|whole| Upload { window: Some(window.clone()), ..whole });
        Ok(Part { isa, ticket: ticket.clone(), gradients, is_fetched, is_last: window.end == length, upload, window })
    };
    windows(length).map(part).collect()
}

/// Parts of about equal length, each at most a batch.
fn windows(length: usize) -> impl Iterator<Item = Range<usize>> {
    let part = length.div_ceil(length.div_ceil(BATCH)).next_multiple_of(1 << 10);
    (0..length).step_by(part).map(move |start| start..length.min(start + part))
}
