//! Chooses the engine that runs a leaf (a parameter with its state). No other file names all engines.

use std::ops::Range;

#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::device;
use super::kernel::ChunkTotals;
#[cfg(feature = "cuda")]
use super::memory::rounded;
use super::memory::{on_device, set_lent_part, set_part};
use super::plan::{Job, LeafView, ReductionRequest};
#[cfg(feature = "candle")]
use super::reference;
use super::route::{Engine, Route, warn_once};
use super::{Isa, cpu};
use crate::error::{Error, Result};
use crate::model::lent::Lend;
use crate::tensors::{Device, Tensor, in_dtype};

/// Runs a function of the device engine on a device's back-end. If the device has no back-end, the result is
/// `$fallback`.
macro_rules! on_backend {
    ($device:expr, $run:path, $data:expr, $fallback:expr) => {
        match $device {
            #[cfg(feature = "emulate")]
            Device::Cpu => $run(super::emulation::EmulatedDevice::new(), $data),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => $run(super::cuda::Cuda::new(device), $data),
            device => {
                warn_once(&format!("no fused engine for {:?}", device.location()));
                Ok::<_, Error>($fallback)
            }
        }
    };
}

/// Runs a function of the reference engine. Without candle the reference engine does not exist, and no job
/// needs that engine, because all memory is on the CPU.
macro_rules! on_reference {
    ($run:ident, $data:expr, $job:expr) => {{
        #[cfg(feature = "candle")]
        let result = reference::$run($data);
        #[cfg(not(feature = "candle"))]
        let result = Err($job.defect("it needs tensor operations, which only the feature `candle` brings"));
        result
    }};
}

/// The route of a job (the plan for one leaf).
fn route_of<'j>(engine: Engine, job: &'j Job<'_>) -> Route<&'j Device> {
    match engine.route(job.x.device()) {
        // The device engine takes only tensors. Tensor operations first copy other memory to a tensor.
        Route::Device(_) if !job.uses_only_tensors() => Route::Tensors,
        route => route,
    }
}

/// Groups items by their route.
fn by_route<I>(
    items: impl IntoIterator<Item = I>,
    find_route: impl Fn(&I) -> Route<&Device>,
) -> Vec<(Route<Device>, Vec<I>)> {
    let items = items.into_iter();
    let (count, mut routed) = (items.size_hint().0, Vec::<(Route<Device>, Vec<I>)>::new());
    for item in items {
        let item_route = find_route(&item);
        match routed
            .iter_mut()
            .find(|(group_route, _)| item_route.is_same(group_route))
        {
            Some((_, group)) => group.push(item),
            None => {
                let new_route = item_route.owned();
                // Most often all items have one route, so the first group gets room for all.
                let mut group = Vec::with_capacity(if routed.is_empty() { count } else { 1 });
                group.push(item);
                routed.push((new_route, group));
            }
        }
    }
    // Devices come first, because a launch returns while the device works. Tensor operations come second: a
    // device may run them, but they may block until the device has finished.
    routed.sort_by_key(|(route, _)| match route {
        Route::Device(_) => 0,
        Route::Tensors => 1,
        Route::Cpu(_) => 2,
    });
    routed
}

/// Computes an answer to each question. A question asks a leaf for the totals of a norm, or for elements.
///
/// The fused engine of the leaf's device computes the answer. If that engine is missing or has no kernel for
/// the question, tensor operations compute the answer. `by_device` gets all questions to a device at once.
fn answer_all<Q: Copy, A>(
    questions: &[Q],
    find_route: impl Fn(&Q) -> Route<&Device>,
    by_device: impl Fn(&Device, &[Q]) -> Result<Vec<Option<A>>>,
    by_tensors: impl Fn(Q) -> Result<A>,
    by_cpu: impl Fn(Isa, &[Q]) -> Result<Vec<A>>,
) -> Result<Vec<A>> {
    let mut answers: Vec<Option<A>> = questions.iter().map(|_| None).collect();
    let indexed_questions = questions.iter().copied().enumerate();
    for (route, group) in by_route(indexed_questions, |(_, question)| find_route(question)) {
        let (indices, group_questions): (Vec<usize>, Vec<Q>) = group.into_iter().unzip();
        let engine_answers = match route {
            Route::Cpu(isa) => by_cpu(isa, &group_questions)?.into_iter().map(Some).collect(),
            // Without a kernel for a question, or a back-end for the device, the answer is `None`.
            Route::Device(device) => by_device(&device, &group_questions)?,
            Route::Tensors => group_questions.iter().map(|_| None).collect(),
        };
        for ((index, question), answer) in indices.into_iter().zip(group_questions).zip(engine_answers) {
            answers[index] = Some(answer.map_or_else(|| by_tensors(question), Ok)?);
        }
    }
    Ok(answers.into_iter().flatten().collect())
}

/// For each request, the totals of its chunks. All requests to a device share one transfer.
pub(super) fn reduce(engine: Engine, requests: &[ReductionRequest<'_, '_>]) -> Result<Vec<ChunkTotals>> {
    let by_device = |device: &Device, group: &[_]| {
        on_backend!(device, device::reduce_with, group, vec![None; group.len()])
    };
    let by_tensors = |request: ReductionRequest<'_, '_>| on_reference!(reduce, request, request.view.job);
    answer_all(
        requests,
        |request| route_of(engine, request.view.job),
        by_device,
        by_tensors,
        cpu::reduce,
    )
}

/// The elements of views as tensors of the compute dtype.
pub(super) fn materialise(engine: Engine, views: &[LeafView<'_, '_>]) -> Result<Vec<Tensor>> {
    let lazy_views: Vec<_> = views
        .iter()
        .filter(|view| view.tensor().is_none())
        .copied()
        .collect();
    let by_device =
        |device: &Device, group: &[_]| on_backend!(device, device::copy_with, group, vec![None; group.len()]);
    let by_cpu = |isa, group: &[_]| group.iter().map(|view| cpu::materialise(isa, *view)).collect();
    let by_tensors = |view: LeafView<'_, '_>| on_reference!(materialise, view, view.job);
    let computed = answer_all(
        &lazy_views,
        |view| route_of(engine, view.job),
        by_device,
        by_tensors,
        by_cpu,
    )?;
    let mut computed_tensors = computed.into_iter();
    let take_tensor = |view: &LeafView<'_, '_>| match view.tensor() {
        Some(tensor) => Ok(in_dtype(tensor, view.job.compute)?),
        None => computed_tensors
            .next()
            .ok_or_else(|| view.job.defect("no engine has computed these elements")),
    };
    views.iter().map(take_tensor).collect()
}

/// Writes the elements of a view to `target`: a contiguous tensor of the compute dtype, with as many elements
/// as the view.
pub(super) fn copy_to(engine: Engine, view: LeafView<'_, '_>, target: &Tensor) -> Result<()> {
    match engine.route(view.job.x.device()) {
        Route::Cpu(isa) => cpu::copy_to(isa, view, target),
        _ => materialise(engine, &[view])?
            .iter()
            .try_for_each(|elements| Ok(set_part(target, 0, elements)?)),
    }
}

/// Writes the parameters, state and counters of jobs whose functions of whole tensors have all run.
///
/// # Errors
/// As `engine::commit`, except for functions.
pub(super) fn commit(engine: Engine, jobs: Vec<&mut Job<'_>>) -> Result<()> {
    let (empty, jobs): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.length == 0);
    empty.into_iter().try_for_each(Job::finish)?;
    let by_tensors = |job: &mut Job<'_>| on_reference!(commit, job, job).map_err(|error| error.at(job.path));
    for (route, mut jobs) in by_route(jobs, |job| route_of(engine, job)) {
        match route {
            Route::Cpu(isa) => cpu::commit(isa, jobs)?,
            Route::Device(device) => {
                let group = &mut jobs[..];
                let kernel_flags = on_backend!(
                    &device,
                    device::commit_with,
                    &mut *group,
                    vec![false; group.len()]
                )?;
                for (job, has_kernel) in jobs.into_iter().zip(kernel_flags) {
                    if has_kernel {
                        job.finish()?
                    } else {
                        by_tensors(job)?
                    }
                }
            }
            // A `for` loop is refused by lints: without candle `by_tensors` always fails, so the loop would
            // always end in its first turn.
            Route::Tensors => jobs.into_iter().try_for_each(by_tensors)?,
        }
    }
    Ok(())
}

/// Copies a gradient to the CPU. If the gradient is contiguous, the copy allocates nothing on the
/// gradient's device.
pub(crate) fn download(gradient: &Tensor) -> Result<Tensor> {
    match gradient.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) if gradient.is_contiguous() => super::cuda::download(gradient),
        _ => Ok(on_device(&gradient.detach(), &Device::Cpu)?),
    }
}

/// Writes the elements `range` of `values`, a tensor on the CPU, to the same elements of a parameter on any
/// device, rounded to the dtype of the parameter.
pub(super) fn upload(values: &Tensor, parameter: &dyn Lend, range: Range<usize>) -> Result<()> {
    let slice = values
        .detach()
        .flatten_all()?
        .narrow(0, range.start, range.len())?;
    #[cfg(feature = "cuda")]
    if let Some(target) = parameter.tensor().filter(|target| target.device().is_cuda()) {
        let slice = rounded(&slice, target.dtype())?.contiguous()?;
        return Ok(super::cuda::upload(&slice, target, range.start)?);
    }
    set_lent_part(parameter, range.start, &slice)
}
