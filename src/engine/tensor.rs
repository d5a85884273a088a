//! The reference engine: the same steps as candle tensor operations, one at a time, on any device.

use candle_core::{DType, Device, Tensor, Var, WithDType};
use half::bf16;

use super::cpu::{chunk_length, fold_chunk, round_to_odd};
use super::rounding::{join, key_at, random_bits, split, stochastic_bf16, stochastic_f16};
use super::{
    Buffer, Elements, Job, Kernel, Link, Of, Output, Question, Step, Store, TensorCall, expect_gradient, is_supported, storage_address,
};
use crate::error::{Error, Result};
use crate::value::{Binary, Comparison, Graph, Node, Unary};

/// What makes these elements of a gradient, in tensors.
struct Evaluated {
    x: Tensor,
    dx: Tensor,
    /// The slots of all these steps, in order.
    slots: Vec<Tensor>,
}

fn run(elements: Elements<'_, '_>) -> candle_core::Result<Evaluated> {
    let dtype = elements.job.compute;
    let x = parameter(elements.job)?.to_dtype(dtype)?;
    let mut dx = match elements.sources().split_first() {
        None => x.zeros_like()?,
        Some((first, others)) => others.iter().try_fold(first.to_dtype(dtype)?, |sum, other| sum + other.to_dtype(dtype)?)?,
    };
    let mut slots = Vec::new();
    for Link { kernel, slots: state } in elements.links() {
        let before = state.iter().map(|(_, slot)| slot.tensor()?.to_dtype(dtype)).collect::<candle_core::Result<Vec<_>>>()?;
        let after;
        (dx, after) = apply(kernel, &x, &dx, &before)?;
        slots.extend(after);
    }
    Ok(Evaluated { x, dx, slots })
}

/// Runs one step over whole tensors.
fn apply(kernel: &dyn Kernel, x: &Tensor, dx: &Tensor, slots: &[Tensor]) -> candle_core::Result<(Tensor, Vec<Tensor>)> {
    let graph = Graph::new();
    let (x_in, dx_in) = (graph.input(), graph.input());
    let mut slot_values: Vec<_> = slots.iter().map(|_| graph.input()).collect();
    let out = kernel.trace(x_in, dx_in, &mut slot_values).node();
    let outputs: Vec<usize> = slot_values.iter().map(|slot| slot.node()).collect();

    let inputs: Vec<&Tensor> = [x, dx].into_iter().chain(slots).collect();
    let values = evaluate_graph(&graph, &inputs)?;
    // A step may ignore its inputs; its result is then a scalar that stands for every element.
    let whole = |node: usize| values[node].broadcast_as(x.shape())?.contiguous();
    Ok((whole(out)?, outputs.into_iter().map(whole).collect::<candle_core::Result<_>>()?))
}

fn evaluate_graph(graph: &Graph, inputs: &[&Tensor]) -> candle_core::Result<Vec<Tensor>> {
    let (dtype, device) = (inputs[0].dtype(), inputs[0].device());
    let scalars = graph.scalars();
    let mut values: Vec<Tensor> = Vec::new();
    for node in graph.nodes() {
        let value = match node {
            Node::Input(input) => inputs[input].clone(),
            Node::Scalar(scalar) => Tensor::new(scalars[scalar], device)?.to_dtype(dtype)?,
            Node::Unary(op, a) => match op {
                Unary::Neg => values[a].neg()?,
                Unary::Sqrt => values[a].sqrt()?,
                Unary::Abs => values[a].abs()?,
            },
            Node::Binary(op, a, b) => match op {
                Binary::Add => values[a].broadcast_add(&values[b])?,
                Binary::Sub => values[a].broadcast_sub(&values[b])?,
                Binary::Mul => values[a].broadcast_mul(&values[b])?,
                Binary::Div => values[a].broadcast_div(&values[b])?,
            },
            Node::Compare(op, a, b) => match op {
                Comparison::Lt => values[a].broadcast_lt(&values[b])?,
                Comparison::Le => values[a].broadcast_le(&values[b])?,
                Comparison::Eq => values[a].broadcast_eq(&values[b])?,
            },
            Node::Select(mask, yes, no) => {
                let shape = values[mask]
                    .shape()
                    .broadcast_shape_binary_op(values[yes].shape(), "select")?
                    .broadcast_shape_binary_op(values[no].shape(), "select")?;
                let [mask, yes, no] = [mask, yes, no].map(|value| values[value].broadcast_as(&shape));
                mask?.where_cond(&yes?, &no?)?
            }
        };
        values.push(value);
    }
    Ok(values)
}

/// What the arithmetic calls x, in its own dtype.
fn parameter(job: &Job<'_>) -> candle_core::Result<Tensor> {
    job.rest.as_deref().map_or(Ok(job.x.clone()), |rest| joined(job.x, rest))
}

/// The f32 of which a bf16 and the rest are the parts.
pub(crate) fn joined(high: &Tensor, rest: &Buffer) -> candle_core::Result<Tensor> {
    let (highs, rests): (Vec<bf16>, Vec<i16>) = (on_host(high)?, on_host(&rest.tensor()?)?);
    let joined = highs.into_iter().zip(rests).map(|(high, rest)| join(high, rest)).collect();
    Tensor::from_vec(joined, high.shape(), &Device::Cpu)?.to_device(high.device())
}

fn on_host<T: WithDType>(tensor: &Tensor) -> candle_core::Result<Vec<T>> {
    tensor.to_device(&Device::Cpu)?.flatten_all()?.to_vec1()
}

/// Runs the job to its end and writes the results.
pub(super) fn commit(job: &mut Job<'_>) -> Result<()> {
    job.run_prefixes(commit)?;
    job.replace()?;
    if job.steps.is_empty() && matches!(job.store, Store::Nothing) {
        return Ok(());
    }
    let Evaluated { x, dx, slots } = run(Elements { job, of: Of::Gradient(job.steps.len()) })?;
    for (slot, next) in buffers(&mut job.steps).zip(&slots) {
        slot.set(next)?;
    }
    match &mut job.store {
        Store::Nothing => {}
        Store::Plain => match job.rest.as_deref_mut() {
            None => set_tensor(job.x, &(x - dx)?)?,
            Some(rest) => set_split(job.x, rest, &(x - dx)?)?,
        },
        Store::Master { parameter } => {
            set_tensor(job.x, &(x - dx)?)?;
            set_tensor(parameter, job.x)?;
        }
        Store::Random { key } => set_at_random(job.x, &(x - dx)?, *key)?,
        Store::Kahan { compensation } => {
            let carry = (compensation.tensor()?.to_dtype(dx.dtype())? - dx)?;
            set_tensor(job.x, &(&x + &carry)?)?;
            let stored = (job.x.to_dtype(x.dtype())? - x)?;
            compensation.set(&(carry - stored)?)?;
        }
    }
    Ok(())
}

/// Overwrites both parts of an f32.
pub(crate) fn set_split(high: &Tensor, rest: &mut Buffer, next: &Tensor) -> candle_core::Result<()> {
    let (highs, rests): (Vec<bf16>, Vec<i16>) = on_host::<f32>(&next.to_dtype(DType::F32)?)?.into_iter().map(split).unzip();
    set_tensor(high, &Tensor::from_vec(highs, high.shape(), &Device::Cpu)?)?;
    rest.set(&Tensor::from_vec(rests, high.shape(), &Device::Cpu)?)
}

fn set_at_random(variable: &Tensor, next: &Tensor, key: [u32; 2]) -> candle_core::Result<()> {
    let random = |element: usize| random_bits(key_at(key, element), element as u32);
    let values = on_host::<f32>(&next.to_dtype(DType::F32)?)?.into_iter().enumerate();
    let rounded = match variable.dtype() {
        DType::BF16 => Tensor::from_iter(values.map(|(i, value)| stochastic_bf16(value, random(i))), &Device::Cpu)?,
        DType::F16 => Tensor::from_iter(values.map(|(i, value)| stochastic_f16(value, random(i))), &Device::Cpu)?,
        _ => next.clone(),
    };
    set_tensor(variable, &rounded.reshape(variable.shape())?)
}

/// The slots of a chain, in order.
pub(super) fn buffers<'s>(steps: &'s mut [Step<'_>]) -> impl Iterator<Item = &'s mut Buffer> {
    steps
        .iter_mut()
        .flat_map(|step| match step {
            Step::Map { slots, .. } => slots.iter_mut(),
            _ => Default::default(),
        })
        .map(|(_, slot)| slot)
}

/// Overwrites a variable's values, rounded to its dtype.
pub(crate) fn set_tensor(variable: &Tensor, next: &Tensor) -> candle_core::Result<()> {
    if variable.elem_count() == 0 {
        return Ok(());
    }
    Var::from_tensor(variable)?.set(&rounded(next, variable.dtype())?.to_device(variable.device())?)
}

/// The values rounded once, to nearest even. candle's own conversion from F64 to 16 bits rounds twice, or drops low bits.
pub(crate) fn rounded(values: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
    if values.dtype() != DType::F64 || !matches!(dtype, DType::F16 | DType::BF16) {
        return values.to_dtype(dtype);
    }
    let odd: Vec<f32> = values.flatten_all()?.to_vec1()?.into_iter().map(round_to_odd).collect();
    Tensor::from_vec(odd, values.shape(), &Device::Cpu)?.to_dtype(dtype)?.to_device(values.device())
}

/// The answer to a question about a leaf, with the bits of the fused engine.
pub(super) fn fold(Question { elements, fold }: Question<'_, '_>) -> Result<f64> {
    let job = elements.job;
    let elements = match elements.of {
        Of::Parameter => parameter(job)?.to_dtype(job.compute)?,
        Of::Gradient(_) | Of::Addend(..) => run(elements)?.dx,
    };
    let elements = elements.flatten_all()?.to_device(&Device::Cpu)?;
    let values: Vec<f64> = elements.to_dtype(DType::F64)?.to_vec1()?;
    let chunks = values.chunks(chunk_length(values.len()));
    Ok(chunks.map(|chunk| fold_chunk(fold, chunk)).fold(0.0, |total, chunk| fold.join(total, chunk)))
}

/// Runs a function of a job on these inputs, if it has not run yet.
pub(super) fn run_function(TensorCall { job, place }: TensorCall<'_, '_>, inputs: impl FnOnce() -> Result<[Tensor; 2]>) {
    let Step::Tensor(step) = &job.steps[place] else { return };
    step.run(|function, slots| {
        // A graph that leads back to the parameter would keep everything that is computed.
        let [x, dx] = inputs()?.map(|input| input.detach());
        let value = |(_, slot): &(_, Buffer)| if is_supported(slot.dtype()) { slot.tensor()?.to_dtype(job.compute) } else { slot.tensor() };
        let mut values = slots.iter().map(|slot| Ok(value(slot)?.detach())).collect::<candle_core::Result<Vec<_>>>()?;
        let result = function(&x, dx, &mut values).map_err(|error| error.at(job.path))?;
        expect_gradient(job.path, &x, &result)?;
        // The function may hand back the parameter itself, which the commit writes.
        let parameter = storage_address(job.x);
        let own = |tensor: Tensor| if storage_address(&tensor) == parameter { tensor.copy() } else { Ok(tensor) };
        let gradient = own(result)?;
        let values = values.into_iter().map(own).collect::<candle_core::Result<Vec<_>>>()?;
        for ((name, slot), next) in slots.iter().zip(&values) {
            if next.shape() != slot.shape() {
                let (expected, got) = (slot.shape().clone(), next.shape().clone());
                return Err(Error::SlotShape { path: job.path.to_string(), slot: name.to_string(), expected, got });
            }
        }
        Ok(Output { gradient, slots: values })
    });
}

/// Evaluates the tensor function at `place`: what comes after it goes on from its result.
pub(super) fn evaluate(job: &mut Job<'_>, place: usize) -> Result<()> {
    if job.length == 0 {
        job.steps.remove(place);
        return Ok(());
    }
    run_function(TensorCall { job, place }, || {
        let Evaluated { x, dx, .. } = run(Elements { job, of: Of::Gradient(place) })?;
        Ok([x, dx])
    });
    let prefix = job.prefix(place);
    let Step::Tensor(step) = job.steps.remove(0) else { return Ok(()) };
    let (slots, output) = step.into_output();
    let output = output.ok_or_else(|| Error::other(format!("{:?}: a function has nothing returned", job.path))).flatten()?;
    job.replaced.extend(slots.iter_mut().map(|(_, slot)| slot).zip(output.slots));
    if prefix.steps.iter().any(|step| !step.slots().is_empty()) {
        job.prefixes.push(prefix);
    }
    job.source = smallvec::smallvec![output.gradient];
    Ok(())
}
