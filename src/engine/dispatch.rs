//! Chooses the engine that runs a leaf (a parameter with its state). No other file names all engines.

use std::ops::Range;

#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::device;
use super::kernel::ChunkTotals;
#[cfg(feature = "cuda")]
use super::memory::rounded;
use super::memory::{moved, set_lent_part, set_part};
use super::plan::{GradientView, Job, ReductionRequest};
#[cfg(feature = "candle")]
use super::reference;
use super::route::{Engine, Route, warn_once};
use super::{Isa, cpu};
use crate::error::{Error, Result};
use crate::model::lent::Lend;
use crate::tensors::{Device, Tensor, in_dtype};

/// Runs a function of the device engine on a device's back-end. If the device has no back-end, the result is
/// `$without`.
macro_rules! on_backend {
    ($device:expr, $run:path, $data:expr, $without:expr) => {
        match $device {
            #[cfg(feature = "emulate")]
            Device::Cpu => $run(super::emulation::EmulatedDevice::new(), $data),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => $run(super::cuda::Cuda::new(device), $data),
            device => {
                warn_once(&format!("no fused engine for {:?}", device.location()));
                Ok::<_, Error>($without)
            }
        }
    };
}

/// Runs a function of the reference engine. Without candle that engine is missing, and no job needs it,
/// because all memory is on the CPU.
macro_rules! by_tensors {
    ($run:ident, $data:expr, $job:expr) => {{
        #[cfg(feature = "candle")]
        let done = reference::$run($data);
        #[cfg(not(feature = "candle"))]
        let done = Err($job.broken("it needs tensor operations, which only the feature `candle` brings"));
        done
    }};
}

/// The indices of jobs (each is the plan for one leaf), sorted by the engine that does their work.
#[derive(Default)]
struct WorkByEngine {
    cpu: Vec<usize>,
    isa: Option<Isa>,
    devices: Vec<(Device, Vec<usize>)>,
    tensors: Vec<usize>,
}

impl WorkByEngine {
    /// Sorts jobs by the device of their x, which is the parameter or its master.
    fn new<'j, 'a: 'j>(engine: Engine, jobs: impl Iterator<Item = &'j Job<'a>>) -> Self {
        let mut routed = WorkByEngine::default();
        for (index, job) in jobs.enumerate() {
            let device = job.x.device();
            match engine.route(device) {
                // The device engine takes only tensors. Other memory goes to tensor operations, which first
                // copy it to a tensor.
                Route::Device if !job.is_of_tensors() => routed.tensors.push(index),
                Route::Cpu(isa) => {
                    routed.isa = Some(isa);
                    routed.cpu.push(index);
                }
                #[cfg(feature = "candle")]
                Route::Tensors => routed.tensors.push(index),
                Route::Device => match routed.devices.iter_mut().find(|(known, _)| known.same_device(device))
                {
                    Some((_, indices)) => indices.push(index),
                    None => routed.devices.push((device.clone(), vec![index])),
                },
            }
        }
        routed
    }

    fn isa(&self) -> Isa {
        self.isa.unwrap_or(Isa::PORTABLE)
    }
}

/// Computes an answer to each question about a leaf: totals for a norm, or elements. The fused engine of the
/// leaf's device computes it. If that engine is missing or has no kernel for the question, tensor operations
/// do. All questions to a device are one call.
fn answers<'j, 'a: 'j, Q: Copy, A>(
    engine: Engine,
    questions: &[Q],
    job: impl Fn(&Q) -> &'j Job<'a>,
    on_device: impl Fn(&Device, &[Q]) -> Result<Vec<Option<A>>>,
    by_tensors: impl Fn(Q) -> Result<A>,
    on_cpu: impl FnOnce(Isa, Vec<Q>) -> Result<Vec<A>>,
) -> Result<Vec<A>> {
    let mut answers: Vec<Option<A>> = questions.iter().map(|_| None).collect();
    let mut routed = WorkByEngine::new(engine, questions.iter().map(job));
    for (device, indices) in std::mem::take(&mut routed.devices) {
        let here: Vec<Q> = indices.iter().map(|&index| questions[index]).collect();
        for (index, answer) in indices.into_iter().zip(on_device(&device, &here)?) {
            // The device has no kernel for this question, or no back-end.
            if answer.is_none() {
                routed.tensors.push(index);
            }
            answers[index] = answer;
        }
    }
    for &index in &routed.tensors {
        answers[index] = Some(by_tensors(questions[index])?);
    }
    let here = routed.cpu.iter().map(|&index| questions[index]).collect();
    for (&index, answer) in routed.cpu.iter().zip(on_cpu(routed.isa(), here)?) {
        answers[index] = Some(answer);
    }
    Ok(answers.into_iter().flatten().collect())
}

/// For each request, the totals of its chunks. One transfer for all requests to a device.
pub(super) fn reduce(engine: Engine, requests: &[ReductionRequest<'_, '_>]) -> Result<Vec<ChunkTotals>> {
    let on_device =
        |device: &Device, here: &[_]| on_backend!(device, device::reduce_with, here, vec![None; here.len()]);
    let by_tensors = |request: ReductionRequest<'_, '_>| by_tensors!(reduce, request, request.view.job);
    answers(engine, requests, |request| request.view.job, on_device, by_tensors, cpu::reduce)
}

/// The elements of views as tensors of the compute dtype.
pub(super) fn materialise(engine: Engine, views: &[GradientView<'_, '_>]) -> Result<Vec<Tensor>> {
    let open: Vec<_> = views.iter().filter(|view| view.tensor().is_none()).copied().collect();
    let on_device =
        |device: &Device, here: &[_]| on_backend!(device, device::copy_with, here, vec![None; here.len()]);
    let on_cpu = |isa, here: Vec<_>| here.into_iter().map(|view| cpu::materialise(isa, view)).collect();
    let by_tensors = |view: GradientView<'_, '_>| by_tensors!(materialise, view, view.job);
    let mut made = answers(engine, &open, |view| view.job, on_device, by_tensors, on_cpu)?.into_iter();
    let tensor = |view: &GradientView<'_, '_>| match view.tensor() {
        Some(tensor) => Ok(in_dtype(tensor, view.job.compute)?),
        None => made.next().ok_or_else(|| view.job.broken("no engine has computed these elements")),
    };
    views.iter().map(tensor).collect()
}

/// Writes the elements of a view to `target`: a contiguous tensor of the compute dtype that has the number of
/// elements of the view.
pub(super) fn copy_to(engine: Engine, view: GradientView<'_, '_>, target: &Tensor) -> Result<()> {
    match engine.route(view.job.x.device()) {
        Route::Cpu(isa) => cpu::copy_to(isa, view, target),
        _ => materialise(engine, &[view])?.iter().try_for_each(|elements| Ok(set_part(target, 0, elements)?)),
    }
}

/// Writes parameters and state of jobs whose functions of whole tensors have all run, and sets their
/// counters.
///
/// # Errors
/// Only if a device fails.
pub(super) fn commit(engine: Engine, jobs: Vec<&mut Job<'_>>) -> Result<()> {
    let (empty, jobs): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.length == 0);
    empty.into_iter().try_for_each(Job::finish)?;
    let routed = WorkByEngine::new(engine, jobs.iter().map(|job| &**job));
    let mut jobs: Vec<Option<&mut Job<'_>>> = jobs.into_iter().map(Some).collect();
    let mut take = |indices: &[usize]| -> Vec<&mut Job<'_>> {
        indices.iter().filter_map(|&index| jobs[index].take()).collect()
    };
    for (device, indices) in &routed.devices {
        let mut here = take(indices);
        let here = &mut here[..];
        let done = on_backend!(device, device::commit_with, &mut *here, vec![false; here.len()])?;
        for (job, done) in here.iter_mut().zip(done) {
            match done {
                true => job.finish()?,
                false => by_tensors!(commit, job, job).map_err(|error| error.at(job.path))?,
            }
        }
    }
    // Not a `for` loop: without candle `by_tensors` always fails, so the loop would return in its first turn,
    // which lints refuse.
    let by_tensors = |job: &mut Job<'_>| by_tensors!(commit, job, job).map_err(|error| error.at(job.path));
    take(&routed.tensors).into_iter().try_for_each(by_tensors)?;
    cpu::commit(routed.isa(), take(&routed.cpu))
}

/// Copies a gradient to the CPU. If the gradient is contiguous, its device needs no memory for the copy.
pub(crate) fn download(gradient: &Tensor) -> Result<Tensor> {
    match gradient.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) if gradient.is_contiguous() => super::cuda::download(gradient),
        _ => Ok(moved(&gradient.detach(), &Device::Cpu)?),
    }
}

/// Rounds elements of a tensor on the CPU, and writes them to a parameter on another device.
pub(super) fn upload(values: &Tensor, parameter: &dyn Lend, window: Range<usize>) -> Result<()> {
    let part = values.detach().flatten_all()?.narrow(0, window.start, window.len())?;
    let Some(parameter) = parameter.tensor() else { return set_lent_part(parameter, window.start, &part) };
    match parameter.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Ok(super::cuda::upload(
            &rounded(&part, parameter.dtype())?.contiguous()?,
            parameter,
            window.start,
        )?),
        device if device.is_cpu() => Ok(set_part(parameter, window.start, &part)?),
        // The part is copied, because candle transfers the whole storage of a view. The other arms transfer
        // nothing, or only the part.
        _ => Ok(set_part(parameter, window.start, &part.force_contiguous()?)?),
    }
}
