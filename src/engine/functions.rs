//! The commit of leaves (parameters with their state) on the device of their state, and functions of whole
//! tensors, such as the orthogonalisation of a matrix. Functions run on a batch of leaves at a time, because
//! their inputs and results take memory.

use smallvec::smallvec;

use super::memory::{Buffer, UpdateTargets, WrittenStorages, unshared};
use super::plan::{
    FunctionOutput, Job, LeafView, Operand, Sources, Step, TensorStep, check_gradient, kind_of,
};
use super::{Engine, dispatch};
use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::{Lend, Lent};
use crate::numbers::is_supported;
use crate::tensors::{Tensor, dtype_of, in_dtype, zeros};

/// The number of elements up to which neighbouring leaves form a batch. The functions of a batch run
/// together. A leaf with more elements is a batch of its own.
const FUNCTION_BATCH: usize = 1 << 20;

/// Runs `functions`: pairs of the index of a job and the index of a step of that job.
///
/// # Errors
/// If a function fails, returns a gradient that does not fit the parameter, or changes the shape of a state
/// tensor.
pub(super) fn run(engine: Engine, jobs: &mut [&mut Job<'_>], functions: &[(usize, usize)]) -> Result<()> {
    // The storages that updates of any state write. A result in a written storage is copied.
    let targets = UpdateTargets::all_registered();
    for batch in batches(
        functions.iter().copied(),
        |&(job, _)| jobs[job].length,
        FUNCTION_BATCH,
    ) {
        let mut views = Vec::with_capacity(2 * batch.len());
        for &(job, step) in batch.iter().filter(|(job, _)| jobs[*job].length > 0) {
            views.extend([
                LeafView::parameter(jobs[job]),
                LeafView::gradient(jobs[job], step)?,
            ]);
        }
        let mut inputs = dispatch::materialise(engine, &views)?.into_iter();
        for (job, step) in batch {
            if jobs[job].length == 0 {
                skip_function(jobs[job], step)?;
                continue;
            }
            let (Some(x), Some(dx)) = (inputs.next(), inputs.next()) else {
                return Err(jobs[job].defect("no inputs for a function"));
            };
            run_one(jobs[job], step, [x, dx], &targets)?;
        }
    }
    Ok(())
}

/// Replaces the function at `index` by an empty result, because this rank has no elements. Other ranks have a
/// result at this index, and all ranks must have the same steps.
fn skip_function(job: &mut Job<'_>, index: usize) -> Result<()> {
    let gradient = Lent::Tensor(zeros(job.x.shape(), job.compute, job.x.device())?);
    if let Step::Tensor(step) = std::mem::replace(&mut job.steps[index], Step::Identity) {
        job.steps[index] = Step::Output(Box::new(FunctionOutput {
            gradient,
            slots: step.slots,
            next: Vec::new(),
        }));
    }
    Ok(())
}

/// Runs the function at `index` on `x` and `dx`, and replaces the function by its result.
fn run_one(job: &mut Job<'_>, index: usize, [x, dx]: [Tensor; 2], targets: &WrittenStorages) -> Result<()> {
    let Step::Tensor(step) = std::mem::replace(&mut job.steps[index], Step::Identity) else {
        return Err(job.defect("no function to run"));
    };
    let TensorStep { function, slots, .. } = *step;
    let slot_value = |slot: &Buffer| {
        if is_supported(slot.dtype()) {
            in_dtype(&slot.tensor()?, job.compute)
        } else {
            slot.tensor()
        }
    };
    let mut values = slots
        .iter()
        .map(|(_, slot)| Ok(slot_value(slot)?.detach()))
        .collect::<crate::tensors::Result<Vec<_>>>()?;
    // The inputs are detached, because a graph back to the parameter would keep all intermediate tensors
    // alive.
    let result = function(&x.detach(), dx.detach(), &mut values).map_err(|error| error.at(job.path))?;
    if check_gradient(job.path, &x, &result).is_err() {
        return Err(
            Error::new(ErrorKind::Contract, "the tensor function of the rule returned")
                .with_got(kind_of(result.dims(), dtype_of(&result), result.device()))
                .with_expected(format_args!(
                    "F16, BF16, F32 or F64 with the shape {:?} on {:?}, as the parameter has",
                    x.shape(),
                    x.device().location()
                ))
                .with_remedy("fix the function that the rule gives to `Gradient::with_tensors`")
                .at(job.path),
        );
    }
    for ((name, slot), next) in slots.iter().zip(&values) {
        if next.dims() != slot.shape() {
            return Err(Error::new(
                ErrorKind::Contract,
                format!("the function of its rule replaced the state tensor {name:?} by one of shape"),
            )
            .with_got(format_args!("{:?}", next.shape()))
            .with_expected(format_args!("{:?}", slot.shape()))
            .with_remedy("fix the function that the rule gives to `Gradient::with_tensors`")
            .at(job.path));
        }
    }
    // A function may return the parameter itself. The commit would then lock one storage twice, to read the
    // result and to write the parameter. So a result in memory that an update writes is copied.
    let own_storages = job.own_storages();
    let unshared_result = |tensor: Tensor| {
        unshared("result of a function", tensor, targets, &own_storages).map_err(|error| error.at(job.path))
    };
    let (gradient, next) = (
        Lent::Tensor(unshared_result(result)?),
        values.into_iter().map(unshared_result).collect::<Result<_>>()?,
    );
    job.steps[index] = Step::Output(Box::new(FunctionOutput {
        gradient,
        slots,
        next,
    }));
    Ok(())
}

/// Writes parameters and state of jobs, and sets their counters. For an offloaded job, writes its staging,
/// not the parameter.
///
/// If the reduce stage did not need the result of a function from `Gradient::with_tensors_late`, the function
/// has not run yet. Such functions run here, on a batch of leaves at a time, right before the batch is
/// written, so that only the results of one batch take memory.
///
/// # Errors
/// As `engine::commit`.
pub(super) fn commit(engine: Engine, jobs: Vec<&mut Job<'_>>) -> Result<()> {
    // Jobs whose functions have all run need no batches, so they are written at once.
    let (late, ready): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.has_functions());
    dispatch::commit(engine, ready)?;
    for mut jobs in batches(late, |job| job.length, FUNCTION_BATCH) {
        loop {
            let first_function =
                |job: &Job<'_>| job.steps.iter().position(|step| matches!(step, Step::Tensor(_)));
            let functions: Vec<_> = jobs
                .iter()
                .enumerate()
                .filter_map(|(index, job)| Some((index, first_function(job)?)))
                .collect();
            if functions.is_empty() {
                break;
            }
            run(engine, &mut jobs, &functions)?;
        }
        dispatch::commit(engine, jobs)?;
    }
    Ok(())
}

/// Writes the sum of gradients of x to a contiguous tensor, whose dtype is that of the arithmetic.
///
/// # Errors
/// If a device fails, or a gradient cannot be read.
pub(crate) fn sum_to<'a>(engine: Engine, x: &'a dyn Lend, sources: Sources<'a>, sum: &Tensor) -> Result<()> {
    let job = Job {
        compute: dtype_of(sum),
        ..Job::new("", Operand::Lent(x), sources)
    };
    dispatch::copy_to(engine, LeafView::gradient(&job, 0)?, sum)
}

/// The result of elementwise steps on x and `dx`, in the dtype of the arithmetic. `dx` enters the first step.
///
/// # Errors
/// If `dx` has another shape or device than x, or no float dtype; if x is not contiguous; if a device fails.
pub(crate) fn elements<'a>(x: &'a dyn Lend, dx: Tensor, steps: Vec<Step<'a>>) -> Result<Tensor> {
    check_gradient("", x, &dx)?;
    let job = Job {
        steps: steps.into(),
        ..Job::new("", Operand::Lent(x), smallvec![Lent::Tensor(dx)])
    };
    if job.length == 0 {
        return Ok(zeros(x.shape(), job.compute, x.device())?);
    }
    let view = LeafView::gradient(&job, job.steps.len())?;
    let results = dispatch::materialise(Engine::Fused, &[view])?;
    results
        .into_iter()
        .next()
        .ok_or_else(|| job.defect("no engine has computed these elements"))
}

/// Batches of neighbouring items. A batch has at most `limit` elements, or is one item that is larger.
pub(super) fn batches<I>(
    items: impl IntoIterator<Item = I>,
    length: impl Fn(&I) -> usize,
    limit: usize,
) -> Vec<Vec<I>> {
    let mut batches: Vec<Vec<I>> = Vec::new();
    let mut total = 0;
    for item in items {
        total += length(&item);
        match batches.last_mut() {
            Some(batch) if total <= limit => batch.push(item),
            _ => {
                total = length(&item);
                batches.push(vec![item]);
            }
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_together_while_they_are_small() {
        let batched = |lengths: &[usize]| batches(lengths.iter().copied(), |length| *length, 10);
        assert_eq!(
            batched(&[5, 5, 1, 12, 3, 7, 1]),
            [vec![5, 5], vec![1], vec![12], vec![3, 7], vec![1]]
        );
        assert_eq!(batched(&[]), Vec::<Vec<usize>>::new());
    }
}
