//! The reference engine: the same steps as candle tensor operations, one at a time, on any device.

use candle_core::{DType, Device, Tensor};

use super::kernel::{ChunkTotals, Kernel, chunk_length, pairwise, reduce_chunk};
use super::memory::{Buffer, joined, on_host, scalar, set_lent, split};
use super::plan::{Epilogue, GradientView, Job, Link, Operand, ReductionRequest, Segment, Segments, slots_mut};
use crate::error::Result;
use crate::model::lent::Lent;
use crate::numbers::value::{Binary, Comparison, Graph, Node, Unary};
use crate::numbers::{key_at, random_bits, stochastic_bf16, stochastic_f16};

/// What arithmetic makes of a gradient.
struct StepResult {
    dx: Tensor,
    /// The next values of the slots, in order.
    slots: Vec<Tensor>,
}

/// Runs arithmetic on the sum of gradients; x is in the dtype of the arithmetic.
fn evaluate<'j>(x: &Tensor, sources: &[Lent<'_>], links: impl Iterator<Item = Link<'j>>) -> Result<StepResult> {
    let dtype = x.dtype();
    // A vector stands for a gradient of the parameter's shape.
    let mut read = |source: &Lent<'_>| Ok(source.to_tensor()?.to_dtype(dtype)?.reshape(x.shape())?);
    let sum = pairwise(sources, &mut read, &|sum: Tensor, more: Tensor| -> Result<Tensor> { Ok((sum + more)?) })?;
    let mut dx = sum.map_or_else(|| x.zeros_like(), Ok)?;
    let mut slots = Vec::new();
    for Link { kernel, slots: state } in links {
        let before = state.iter().map(|(_, slot)| slot.tensor()?.to_dtype(dtype)).collect::<candle_core::Result<Vec<_>>>()?;
        let after;
        (dx, after) = run_kernel(kernel, x, &dx, &before)?;
        slots.extend(after);
    }
    Ok(StepResult { dx, slots })
}

/// Runs one step over whole tensors.
fn run_kernel(kernel: &dyn Kernel, x: &Tensor, dx: &Tensor, slots: &[Tensor]) -> candle_core::Result<(Tensor, Vec<Tensor>)> {
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
            Node::Scalar(index) => scalar(scalars[index], dtype, device)?,
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

/// Runs the job to its end and writes the results.
pub(super) fn commit(job: &mut Job<'_>) -> Result<()> {
    let Segments { x, mut low_bits, all } = job.segments();
    for segment in all {
        write(segment, x, low_bits.as_deref_mut())?;
    }
    job.write_function_outputs()
}

fn write(segment: Segment<'_, '_>, place: &mut Operand<'_>, low_bits: Option<&mut Buffer>) -> Result<()> {
    let Segment { compute, sources, steps, epilogue, .. } = segment;
    let compute = DType::from(compute);
    let x = whole(place, low_bits.as_deref())?.to_dtype(compute)?;
    let StepResult { dx, slots } = evaluate(&x, sources, steps.iter().filter_map(|step| step.link()))?;
    for (slot, next) in slots_mut(steps).zip(&slots) {
        slot.set(next)?;
    }
    match epilogue {
        Epilogue::StateOnly => Ok(()),
        Epilogue::Subtract => match low_bits {
            None => place.set(&(x - dx)?),
            Some(low_bits) => place.set(&split(low_bits, &(x - dx)?)?),
        },
        Epilogue::Master(parameter) => {
            place.set(&(x - dx)?)?;
            set_lent(parameter, &place.to_tensor()?)
        }
        Epilogue::Stochastic(key) => {
            let next = rounded_at_random(place.dtype().into(), &(x - dx)?, key)?;
            place.set(&next)
        }
        Epilogue::Kahan(compensation) => {
            let carry = (compensation.tensor()?.to_dtype(compute)? - dx)?;
            place.set(&(&x + &carry)?)?;
            let stored = place.to_tensor()?.to_dtype(compute)?;
            let lost = (carry - (&stored - x)?)?;
            // An infinite sum has lost nothing that could be made up for.
            let largest = if compute == DType::F64 { f64::MAX } else { f64::from(f32::MAX) };
            let is_finite = stored.abs()?.broadcast_le(&scalar(largest, compute, stored.device())?)?;
            Ok(compensation.set(&is_finite.where_cond(&lost, &lost.zeros_like()?)?)?)
        }
    }
}

/// The parameter, or its master, as one number for each element.
fn whole(place: &Operand<'_>, low_bits: Option<&Buffer>) -> Result<Tensor> {
    let x = place.to_tensor()?;
    Ok(low_bits.map_or(Ok(x.clone()), |low_bits| joined(&x, low_bits))?)
}

fn rounded_at_random(dtype: DType, next: &Tensor, key: [u32; 2]) -> candle_core::Result<Tensor> {
    let random = |element: usize| random_bits(key_at(key, element), element as u32);
    let values = on_host::<f32>(&next.to_dtype(DType::F32)?)?.into_iter().enumerate();
    let rounded = match dtype {
        DType::BF16 => Tensor::from_iter(values.map(|(i, value)| stochastic_bf16(value, random(i))), &Device::Cpu)?,
        DType::F16 => Tensor::from_iter(values.map(|(i, value)| stochastic_f16(value, random(i))), &Device::Cpu)?,
        _ => next.clone(),
    };
    rounded.reshape(next.shape())
}

/// The elements as a tensor of the compute dtype.
pub(super) fn materialise(view: GradientView<'_, '_>) -> Result<Tensor> {
    let Job { x, low_bits, compute, .. } = view.job;
    let x = whole(x, low_bits.as_deref())?.to_dtype(DType::from(*compute))?;
    if view.is_parameter() {
        return Ok(x);
    }
    Ok(evaluate(&x, view.sources(), view.links())?.dx)
}

/// The totals of the elements' chunks, with the bits of the fused engine.
pub(super) fn reduce(ReductionRequest { view, reducer }: ReductionRequest<'_, '_>) -> Result<ChunkTotals> {
    let elements = materialise(view)?.to_device(&Device::Cpu)?;
    let values: Vec<f64> = on_host(&elements.to_dtype(DType::F64)?)?;
    Ok(values.chunks(chunk_length(view.job.whole)).map(|chunk| reduce_chunk(reducer, chunk)).collect())
}
