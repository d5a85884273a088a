//! The reference engine: the same steps as candle tensor operations, one at a time, on any device.
//!
//! Results have the bits of the fused CPU engine: each node of the recorded arithmetic is one operation in
//! the same dtype, gradients are added in the same pairs, and sums are taken on the host by the CPU engine's
//! loop.

use candle_core::{DType, Device, Tensor};

use super::Isa;
use super::kernel::{ACCUMULATORS, ChunkTotals, Kernel, Reducer, chunk_length, pairwise, reduce_block};
use super::memory::values::{on_host, scalar};
use super::memory::{Buffer, joined, rounded, set_lent, set_lent_and, split};
use super::plan::{Epilogue, Job, LeafView, Link, Operand, ReductionRequest, Step, slots_mut, sources_after};
use crate::error::Result;
use crate::model::lent::Lent;
use crate::numbers::value::{Binary, Comparison, Graph, Node, Unary};
use crate::numbers::{key_at, largest_number, random_bits, stochastic_bf16, stochastic_f16};

struct StepResult {
    dx: Tensor,
    /// The next values of the slots, in order.
    slots: Vec<Tensor>,
}

/// Runs a chain on the sum of gradients. `x` is in the dtype of the arithmetic.
fn evaluate<'j>(
    x: &Tensor,
    sources: &[Lent<'_>],
    links: impl Iterator<Item = Link<'j>>,
) -> Result<StepResult> {
    let dtype = x.dtype();
    // A gradient in lent memory may be a vector, so each gradient is reshaped.
    let mut read = |source: &Lent<'_>| Ok(source.tensor_or_copy()?.to_dtype(dtype)?.reshape(x.shape())?);
    let sum = pairwise(sources, &mut read, &|a: Tensor, b: Tensor| -> Result<Tensor> {
        Ok((a + b)?)
    })?;
    let mut dx = sum.map_or_else(|| x.zeros_like(), Ok)?;
    let mut slots = Vec::new();
    for Link { kernel, slots: state } in links {
        let slots_before = state
            .iter()
            .map(|(_, slot)| slot.tensor()?.to_dtype(dtype))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let slots_after;
        (dx, slots_after) = run_kernel(kernel, x, &dx, &slots_before)?;
        slots.extend(slots_after);
    }
    Ok(StepResult { dx, slots })
}

/// Records one kernel as a graph and evaluates it on whole tensors.
fn run_kernel(
    kernel: &dyn Kernel,
    x: &Tensor,
    dx: &Tensor,
    slots: &[Tensor],
) -> candle_core::Result<(Tensor, Vec<Tensor>)> {
    let graph = Graph::new(Vec::new(), Vec::new());
    let (x_in, dx_in) = (graph.input(), graph.input());
    let mut slot_values: Vec<_> = slots.iter().map(|_| graph.input()).collect();
    let dx_out = kernel.trace(x_in, dx_in, &mut slot_values).node();
    let slots_out: Vec<usize> = slot_values.iter().map(|slot| slot.node()).collect();

    let inputs: Vec<&Tensor> = [x, dx].into_iter().chain(slots).collect();
    let values = evaluate_graph(graph, &inputs)?;
    // If a step ignores its inputs, its result is a scalar, and every element has that value.
    let expand = |node: usize| values[node].broadcast_as(x.shape())?.contiguous();
    Ok((
        expand(dx_out)?,
        slots_out
            .into_iter()
            .map(expand)
            .collect::<candle_core::Result<_>>()?,
    ))
}

fn evaluate_graph(graph: Graph, inputs: &[&Tensor]) -> candle_core::Result<Vec<Tensor>> {
    let (dtype, device) = (inputs[0].dtype(), inputs[0].device());
    let (nodes, scalars) = graph.into_parts();
    let mut values: Vec<Tensor> = Vec::new();
    for node in nodes {
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

struct NextValues {
    /// The slots of all segments, in order.
    slots: Vec<Tensor>,
    /// x as it is stored; `None` if the commit does not write x.
    x: Option<Tensor>,
    /// What the stored x lacks: the low bits, or the compensation of a Kahan sum.
    rest: Option<Tensor>,
}

/// Runs a job to its end: computes all values, then writes them.
///
/// The parameter is written first: if the owner does not lend the parameter, nothing has changed. State is
/// written while the parameter is lent, so that no later error of the owner separates parameter and state.
pub(super) fn commit(job: &mut Job<'_>) -> Result<()> {
    let NextValues { slots, x: next, rest } = next_values(job)?;
    let (lender, follower) = match (&job.x, &job.epilogue) {
        // A master in a variable is written as x, and the parameter after the master.
        (Operand::Lent(x), Epilogue::Master(parameter)) => (Some(*x), Some(*parameter)),
        (Operand::Lent(x), _) => (Some(*x), None),
        (Operand::Own(_), Epilogue::Master(parameter)) => (Some(*parameter), None),
        (Operand::Own(_), _) => (None, None),
    };
    let mut write_state = || {
        slots_mut(&mut job.steps)
            .zip(&slots)
            .try_for_each(|(slot, next)| slot.set(next))?;
        if let (Operand::Own(master), Some(next)) = (&mut job.x, &next) {
            master.set(next)?;
        }
        match (&mut job.epilogue, &mut job.low_bits, &rest) {
            (Epilogue::Kahan(buffer), _, Some(rest)) | (_, Some(buffer), Some(rest)) => buffer.set(rest)?,
            _ => {}
        }
        job.finish()
    };
    match (lender, &next) {
        (Some(lender), Some(next)) => set_lent_and(lender, next, &mut write_state)?,
        _ => write_state()?,
    }
    follower
        .zip(next)
        .map_or(Ok(()), |(parameter, x)| set_lent(parameter, &x))
}

fn next_values(job: &Job<'_>) -> Result<NextValues> {
    let (low_bits, compute, dtype) = (job.low_bits.as_deref(), DType::from(job.compute), job.x.dtype());
    let mut next = NextValues {
        slots: Vec::new(),
        x: None,
        rest: None,
    };
    for segment in job.segments() {
        let x = joined_x(&job.x, low_bits)?.to_dtype(compute)?;
        let sources = sources_after(&job.steps[..segment.start], &job.sources);
        let links = job.steps[segment.clone()].iter().filter_map(Step::link);
        let StepResult { dx, slots } = evaluate(&x, sources, links)?;
        next.slots.extend(slots);
        (next.x, next.rest) = match (job.epilogue_of(&segment), low_bits) {
            (Epilogue::StateOnly, _) => (None, None),
            (Epilogue::Subtract, Some(low_bits)) => {
                let (high, low) = split(low_bits, &(x - dx)?)?;
                (Some(high), Some(low))
            }
            (Epilogue::Subtract | Epilogue::Master(_), _) => (Some(rounded(&(x - dx)?, dtype)?), None),
            (Epilogue::Stochastic(key), _) => {
                (Some(rounded_at_random(dtype.into(), &(x - dx)?, *key)?), None)
            }
            (Epilogue::Kahan(compensation), _) => {
                let carry = (compensation.tensor()?.to_dtype(compute)? - dx)?;
                let stored = rounded(&(&x + &carry)?, dtype)?;
                let widened = stored.to_dtype(compute)?;
                let rounding_error = (carry - (&widened - x)?)?;
                // If the sum is infinite, nothing is carried over: the rounding error would be infinite, and
                // the next sum NaN.
                let is_finite = widened.abs()?.broadcast_le(&scalar(
                    largest_number(compute),
                    compute,
                    widened.device(),
                )?)?;
                let zeros = rounding_error.zeros_like()?;
                (Some(stored), Some(is_finite.where_cond(&rounding_error, &zeros)?))
            }
        };
    }
    Ok(next)
}

/// x (the parameter or its master), joined with the low bits of x if there are any.
fn joined_x(operand: &Operand<'_>, low_bits: Option<&Buffer>) -> Result<Tensor> {
    let x = match operand {
        Operand::Lent(lender) => lender.tensor_or_copy()?,
        Operand::Own(buffer) => buffer.tensor()?,
    };
    Ok(low_bits.map_or(Ok(x.clone()), |low_bits| joined(&x, low_bits))?)
}

/// Rounds up or down at random, on the host: the random bits are a hash of `key` and the element's index.
fn rounded_at_random(dtype: DType, exact: &Tensor, key: u64) -> candle_core::Result<Tensor> {
    let random = |element: usize| random_bits(key_at(key, element), element as u32);
    let values = on_host::<f32>(&exact.to_dtype(DType::F32)?)?
        .into_iter()
        .enumerate();
    let result = match dtype {
        DType::BF16 => Tensor::from_iter(
            values.map(|(i, value)| stochastic_bf16(value, random(i))),
            &Device::Cpu,
        )?,
        DType::F16 => Tensor::from_iter(
            values.map(|(i, value)| stochastic_f16(value, random(i))),
            &Device::Cpu,
        )?,
        _ => exact.clone(),
    };
    result.reshape(exact.shape())
}

pub(super) fn materialise(view: LeafView<'_, '_>) -> Result<Tensor> {
    let Job {
        x, low_bits, compute, ..
    } = view.job;
    let x = joined_x(x, low_bits.as_deref())?.to_dtype(DType::from(*compute))?;
    if view.is_parameter() {
        return Ok(x);
    }
    Ok(evaluate(&x, view.sources(), view.links())?.dx)
}

/// The totals of the chunks of the request's elements, with the bits of the fused CPU engine.
pub(super) fn reduce(ReductionRequest { view, reducer }: ReductionRequest<'_, '_>) -> Result<ChunkTotals> {
    let elements = materialise(view)?.to_device(&Device::Cpu)?;
    let values: Vec<f64> = on_host(&elements.to_dtype(DType::F64)?)?;
    Ok(values
        .chunks(chunk_length(view.job.leaf_length))
        .map(|chunk| reduce_chunk(reducer, chunk))
        .collect())
}

/// The total of one chunk of host numbers, in the order and with the roundings of the fused CPU engine.
pub(super) fn reduce_chunk(reducer: Reducer, values: &[f64]) -> f64 {
    let mut sums = [0.0; ACCUMULATORS];
    reduce_block(Isa::best(), reducer, values, &mut sums);
    reducer.op.total(&sums)
}
