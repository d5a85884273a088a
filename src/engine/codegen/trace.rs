//! Traces: the operations of a job (the plan for one leaf), without its data and scalars. Jobs with equal
//! traces run in one launch.

use std::collections::HashMap;
use std::convert::Infallible;
use std::mem::take;
use std::ops::Range;

use smallvec::SmallVec;

use crate::engine::kernel::{ReduceOp, pairwise};
use crate::engine::memory::Buffer;
use crate::engine::plan::{Epilogue, Job, Link, Sink, Step, sources_after};
use crate::model::lent::Lent;
use crate::numbers::low_bits::LowBits;
use crate::numbers::value::{Expr, Graph, Node, Value};
use crate::numbers::{Code, DType, is_supported};

/// Where the result of printed code goes, with dtypes instead of data.
pub(in crate::engine) type KernelSink = Sink<Epilogue<DType, (), ()>, ReduceOp, ()>;

/// The straight-line code of a chain, the arrays it works on and where its result goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TracedKernel {
    /// The dtype of the arithmetic, F32 or F64.
    pub(crate) compute: DType,
    /// The arrays that the inputs of the code read, in the order of the inputs.
    pub(crate) arrays: Vec<TracedArray>,
    /// The code. A node comes after its operands.
    pub(in crate::engine) nodes: Vec<Node>,
    /// The array and the node of each state tensor's next value.
    pub(in crate::engine) slots: Vec<(usize, usize)>,
    /// The node of the new x. For a reduction, a copy, a Kahan sum and `StateOnly`: the node of the gradient.
    pub(in crate::engine) out: usize,
    pub(in crate::engine) sink: KernelSink,
}

/// An array that the code works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TracedArray {
    pub(crate) role: ArrayRole,
    pub(in crate::engine) dtype: DType,
    /// The code of the numbers, if the array has numbers in 8 bits.
    pub(in crate::engine) code: Option<Code>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ArrayRole {
    /// The parameter, or its master copy.
    X,
    /// The upper part of the parameter, with these low bits.
    SplitX(LowBits),
    Gradient,
    Slot(&'static str),
    Compensation,
}

/// A kernel, and the scalars of this call.
pub(crate) struct BoundKernel {
    pub(crate) kernel: TracedKernel,
    pub(crate) scalars: Vec<f64>,
}

impl BoundKernel {
    pub(in crate::engine) fn new() -> Self {
        let (arrays, nodes, slots) = (Vec::new(), Vec::new(), Vec::new());
        let kernel = TracedKernel {
            compute: DType::F32,
            arrays,
            nodes,
            slots,
            out: 0,
            sink: Sink::Copy(()),
        };
        BoundKernel {
            kernel,
            scalars: Vec::new(),
        }
    }
}

/// Traces a job whose steps are all arithmetic. Returns `None` if a dtype cannot be printed, or the job
/// writes nothing.
pub(crate) fn trace_job(job: &Job<'_>) -> Option<BoundKernel> {
    let mut bound = BoundKernel::new();
    trace_write(job, job.segments().last()?, &mut bound).then_some(bound)
}

/// Traces a segment of a commit. Returns `false` if a dtype cannot be printed.
pub(in crate::engine) fn trace_write(job: &Job<'_>, segment: &Range<usize>, bound: &mut BoundKernel) -> bool {
    let sources = sources_after(&job.steps[..segment.start], &job.sources);
    let links = job.steps[segment.clone()].iter().filter_map(Step::link);
    trace(bound, job, sources, links, |tracer| {
        let new_x = || (tracer.x - tracer.dx).node();
        match job.epilogue_of(segment) {
            Epilogue::StateOnly => (tracer.dx.node(), Sink::Write(Epilogue::StateOnly)),
            Epilogue::Subtract => (new_x(), Sink::Write(Epilogue::Subtract)),
            Epilogue::Master(parameter) => (new_x(), Sink::Write(Epilogue::Master(parameter.dtype()))),
            Epilogue::Stochastic(_) => (new_x(), Sink::Write(Epilogue::Stochastic(()))),
            Epilogue::Kahan(compensation) => {
                tracer.add_array(ArrayRole::Compensation, compensation);
                (tracer.dx.node(), Sink::Write(Epilogue::Kahan(())))
            }
        }
    })
}

/// Fills `bound` with the trace of these links. `end` returns the node of the result and the result's
/// destination. Returns `false` if a dtype cannot be printed.
///
/// The memory of `bound` is used again, because a step traces each of its leaves: new memory would take half
/// of the host's time for a leaf.
pub(super) fn trace<'j>(
    bound: &mut BoundKernel,
    job: &Job<'_>,
    sources: &[Lent<'_>],
    links: impl Iterator<Item = Link<'j>>,
    end: impl FnOnce(&mut Tracer<'_, '_>) -> (usize, KernelSink),
) -> bool {
    let BoundKernel { kernel, scalars } = bound;
    let graph = Graph::new(take(&mut kernel.nodes), take(scalars));
    kernel.arrays.clear();
    kernel.slots.clear();
    let mut tracer = Tracer::new(&graph, &mut kernel.arrays, job, sources);
    links.for_each(|link| tracer.run(link, &mut kernel.slots));
    let (out, sink) = end(&mut tracer);
    (kernel.compute, kernel.out, kernel.sink) = (job.compute, out, sink);
    (kernel.nodes, *scalars) = graph.into_parts();
    // `Tracer` has recorded the nodes of each slot before and after the steps. If the sink writes state, the
    // kernel keeps the slots that change, each as its array and the node after the steps.
    let nodes = &kernel.nodes;
    kernel.slots.retain_mut(|(before, after)| match nodes[*before] {
        Node::Input(array) if before != after && sink.writes_state() => {
            *before = array;
            true
        }
        _ => false,
    });
    let master = if let Sink::Write(Epilogue::Master(dtype)) = sink {
        Some(dtype)
    } else {
        None
    };
    kernel
        .arrays
        .iter()
        .map(|array| array.dtype)
        .chain(master)
        .all(is_supported)
}

pub(super) struct Tracer<'g, 'k> {
    graph: &'g Graph,
    arrays: &'k mut Vec<TracedArray>,
    pub(super) x: Expr<'g>,
    pub(super) dx: Expr<'g>,
}

impl<'g, 'k> Tracer<'g, 'k> {
    fn new(graph: &'g Graph, arrays: &'k mut Vec<TracedArray>, job: &Job<'_>, sources: &[Lent<'_>]) -> Self {
        let low_bits = job.low_bits.as_deref().map(Buffer::low_bits_kind);
        let role = low_bits.map_or(ArrayRole::X, ArrayRole::SplitX);
        let x_in = graph.input();
        arrays.push(TracedArray {
            role,
            dtype: job.x.dtype(),
            code: None,
        });
        let mut gradient = |source: &Lent<'_>| {
            arrays.push(TracedArray {
                role: ArrayRole::Gradient,
                dtype: source.dtype(),
                code: None,
            });
            Ok(graph.input())
        };
        let Ok(sum) = pairwise::<_, _, Infallible>(sources, &mut gradient, &|a, b| Ok(a + b));
        let dx = sum.unwrap_or_else(|| x_in.constant(0.0));
        Tracer {
            graph,
            arrays,
            x: x_in,
            dx,
        }
    }

    fn add_array(&mut self, role: ArrayRole, state: &Buffer) -> Expr<'g> {
        self.arrays.push(TracedArray {
            role,
            dtype: state.dtype(),
            code: state.code(),
        });
        self.graph.input()
    }

    /// Traces one link. `node_pairs` gets the nodes of each slot, before and after the link.
    fn run(&mut self, Link { kernel, slots }: Link<'_>, node_pairs: &mut Vec<(usize, usize)>) {
        let before: SmallVec<[Expr<'_>; 4]> = slots
            .iter()
            .map(|(name, slot)| self.add_array(ArrayRole::Slot(name), slot))
            .collect();
        let mut after = before.clone();
        self.dx = kernel.trace(self.x, self.dx, &mut after);
        let nodes = before.iter().zip(&after);
        node_pairs.extend(nodes.map(|(before, after)| (before.node(), after.node())));
    }
}

impl TracedKernel {
    /// The same kernel with equal expressions merged. Indices of nodes stay.
    pub(super) fn merged(&self) -> Self {
        let mut first_index = HashMap::new();
        let mut merged: Vec<usize> = Vec::with_capacity(self.nodes.len());
        let mut nodes = Vec::with_capacity(self.nodes.len());
        for (index, node) in self.nodes.iter().enumerate() {
            let node = with_operands(*node, |operand| merged[operand]);
            merged.push(*first_index.entry(node).or_insert(index));
            nodes.push(node);
        }
        let slots = self
            .slots
            .iter()
            .map(|&(array, node)| (array, merged[node]))
            .collect();
        TracedKernel {
            arrays: self.arrays.clone(),
            nodes,
            slots,
            out: merged[self.out],
            ..*self
        }
    }

    /// Which nodes the results depend on.
    pub(super) fn live_nodes(&self) -> Vec<bool> {
        let mut live = vec![false; self.nodes.len()];
        self.slots.iter().for_each(|&(_, node)| live[node] = true);
        if self.sink != Sink::Write(Epilogue::StateOnly) {
            live[self.out] = true;
        }
        for (index, node) in self.nodes.iter().enumerate().rev() {
            if live[index] {
                with_operands(*node, |operand| {
                    live[operand] = true;
                    operand
                });
            }
        }
        live
    }

    /// Whether the array of this index is read.
    pub(super) fn reads(&self, live: &[bool], array: usize) -> bool {
        let is_used = || {
            self.nodes
                .iter()
                .zip(live)
                .any(|(node, live)| *live && *node == Node::Input(array))
        };
        // A Kahan sum reads x and the compensation outside of `nodes`.
        let is_kahan = self.sink == Sink::Write(Epilogue::Kahan(()));
        is_used() || is_kahan && !matches!(self.arrays[array].role, ArrayRole::Gradient | ArrayRole::Slot(_))
    }

    /// Whether the array of this index is written.
    pub(super) fn writes(&self, array: usize) -> bool {
        match self.arrays[array].role {
            ArrayRole::X | ArrayRole::SplitX(_) => self.sink.writes_x(),
            ArrayRole::Compensation => true,
            ArrayRole::Gradient => false,
            ArrayRole::Slot(_) => self.slots.iter().any(|&(slot, _)| slot == array),
        }
    }
}

/// The node with each operand replaced.
fn with_operands(node: Node, mut replace: impl FnMut(usize) -> usize) -> Node {
    match node {
        Node::Input(_) | Node::Scalar(_) => node,
        Node::Unary(op, a) => Node::Unary(op, replace(a)),
        Node::Binary(op, a, b) => Node::Binary(op, replace(a), replace(b)),
        Node::Compare(op, a, b) => Node::Compare(op, replace(a), replace(b)),
        Node::Select(mask, yes, no) => Node::Select(replace(mask), replace(yes), replace(no)),
    }
}
