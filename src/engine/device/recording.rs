//! What a job does, apart from its data and its scalars: jobs with equal recordings run in one launch.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use crate::engine::cpu::Fold;
use crate::engine::{Addend, Buffer, Elements, Following, Job, Kernel, Norms, Of, Step, Store, is_supported};
use crate::value::{Expr, Graph, Node, Value};

/// The straight-line code of a chain, the arrays it works on and what becomes of its results.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Recording {
    /// The dtype of the arithmetic, F32 or F64.
    pub(super) compute: DType,
    /// The arrays that the inputs of the code stand for, in their order.
    pub(super) arrays: Vec<Array>,
    /// The code.
    pub(super) nodes: Vec<Node>,
    /// The array and the node of each state tensor's next value.
    pub(super) slots: Vec<(usize, usize)>,
    /// The node of the new parameter; of the gradient, where the end asks for that.
    pub(super) out: usize,
    pub(super) end: End,
}

/// An array that the code reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Array {
    pub(super) role: Role,
    pub(super) dtype: DType,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Role {
    /// The parameter, or its master copy.
    X,
    /// The higher part of the parameter; the lower one is an I16.
    SplitX,
    Gradient,
    Slot(&'static str),
    Compensation,
    /// No array but one number for the leaf, which the device has found before.
    Found,
    /// Numbers that the device has found before, joined to one.
    Total(&'static str),
}

/// What becomes of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum End {
    /// Only state is written.
    Slots,
    /// x is written.
    Plain,
    /// x is written, and x rounded to this dtype.
    Master(DType),
    /// x is written, rounded at random.
    Random,
    /// The gradient is taken from x with what the rounding loses kept.
    Kahan,
    /// The gradient is written to a new tensor of the compute dtype.
    Copy,
    /// The gradient is folded.
    Fold(Folding),
    /// Numbers that have been folded from parts are joined.
    Total(Folding),
    /// The same, and a number follows from them, or from the norms that they make.
    Follow(Folding),
}

/// A [`Fold`] without its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Folding {
    Total,
    Sum,
    Squares,
    Largest,
    NonZeros,
    Powers,
}

impl From<Fold> for Folding {
    fn from(fold: Fold) -> Self {
        match fold {
            Fold::Total => Folding::Total,
            Fold::Sum => Folding::Sum,
            Fold::Squares => Folding::Squares,
            Fold::Largest => Folding::Largest,
            Fold::NonZeros => Folding::NonZeros,
            Fold::Powers(_) => Folding::Powers,
        }
    }
}

/// What is to be recorded of a job.
#[derive(Clone, Copy)]
pub(super) enum Work<'j, 'a> {
    /// All steps, and where the result goes.
    Commit(&'j Job<'a>),
    /// What makes the elements, and how they are folded; if they are not, they go into a new tensor of the compute dtype.
    Read(Elements<'j, 'a>, Option<Fold>),
}

/// What the gradient goes through.
enum Code<'j> {
    Kernel(&'j dyn Kernel),
    /// A multiplication by a number that the device has found.
    Factor,
    /// A step that depends on such a number.
    Following(&'j dyn Following),
}

/// What a step does, and the state it has.
fn code<'j>(step: &'j Step<'_>) -> Option<(Code<'j>, &'j [(&'static str, Buffer)])> {
    let code = match step {
        Step::Map { kernel, .. } => Code::Kernel(&**kernel),
        Step::Reduce(_) => Code::Factor,
        Step::Sums(sums) => Code::Following(&*sums.following),
        Step::Check | Step::Tensor(_) => return None,
    };
    Some((code, step.slots()))
}

/// Records the code of the work and its end, with the scalars of the code; nothing, if a dtype is none of the printed ones.
pub(super) fn record(work: Work<'_, '_>) -> Option<(Recording, Vec<f64>)> {
    let (job, sources, codes): (_, &[Tensor], SmallVec<[_; 4]>) = match work {
        Work::Commit(job) => (job, &job.source, job.steps.iter().filter_map(code).collect()),
        Work::Read(elements, _) => {
            let addend = elements.addend().map(|Addend { probe, slots, .. }| (Code::Kernel(&**probe), &**slots));
            (elements.job, elements.sources(), elements.steps().filter_map(code).chain(addend).collect())
        }
    };
    let graph = Graph::new();
    let mut arrays = Vec::new();
    let mut array = |role, dtype| {
        arrays.push(Array { role, dtype });
        graph.input()
    };
    let x = array(if job.is_split { Role::SplitX } else { Role::X }, job.x.dtype());
    let summed = sources.iter().map(|source| array(Role::Gradient, source.dtype())).reduce(|sum, more| sum + more);
    let mut dx = match work {
        Work::Read(Elements { of: Of::Parameter, .. }, _) => x,
        _ => summed.unwrap_or_else(|| x.constant(0.0)),
    };

    let mut slots = Vec::new();
    for (code, state) in codes {
        let before: Vec<Expr<'_>> = state.iter().map(|(name, slot)| array(Role::Slot(name), slot.dtype())).collect();
        let mut after = before.clone();
        dx = match code {
            Code::Kernel(kernel) => kernel.trace(x, dx, &mut after),
            Code::Factor => dx * array(Role::Found, DType::F64),
            Code::Following(following) => following.trace(array(Role::Found, DType::F64), x, dx, &mut after),
        };
        slots.extend(before.iter().zip(&after).map(|(before, after)| (before.node(), after.node())));
    }
    let (end, out) = match (work, &job.store) {
        (Work::Read(_, Some(fold)), _) => (End::Fold(fold.into()), dx),
        (Work::Read(_, None), _) => (End::Copy, dx),
        (_, Store::Nothing) => (End::Slots, dx),
        (_, Store::Plain) => (End::Plain, x - dx),
        (_, Store::Master { parameter }) => (End::Master(parameter.dtype()), x - dx),
        (_, Store::Random { .. }) => (End::Random, x - dx),
        (_, Store::Kahan { compensation }) => {
            array(Role::Compensation, compensation.dtype());
            (End::Kahan, dx)
        }
    };
    let nodes = graph.nodes();
    let input = |node: usize| if let Node::Input(input) = nodes[node] { input } else { 0 };
    let slots = match end {
        End::Fold(_) | End::Copy => Vec::new(),
        _ => slots.into_iter().filter(|(before, after)| before != after).map(|(before, after)| (input(before), after)).collect(),
    };
    let (compute, out) = (job.compute, out.node());
    let known = arrays.iter().all(|array| is_supported(array.dtype)) && !matches!(end, End::Master(dtype) if !is_supported(dtype));
    known.then(|| (Recording { compute, arrays, nodes, slots, out, end }, graph.scalars()))
}

/// How parts of folds become numbers.
pub(super) struct Join {
    /// Which fold they are of.
    pub(super) fold: Fold,
    pub(super) recording: Recording,
    pub(super) scalars: Vec<f64>,
}

impl Join {
    /// The total of the parts.
    pub(super) fn total(fold: Fold) -> Self {
        Join::new(fold, End::Total(fold.into()), ["parts"], |[parts]| parts)
    }

    /// The number that follows from the totals that a step has asked for, if one does.
    pub(super) fn follow(step: &Step<'_>) -> Option<Self> {
        let of = |fold: Fold| (fold, End::Follow(fold.into()));
        match step {
            Step::Reduce(reduction) => {
                let (fold, end) = of(Fold::for_norm(reduction.p));
                Some(Join::new(fold, end, ["gradient", "parameter"], |[gradient, parameter]| {
                    reduction.trace(Norms { gradient, parameter })
                }))
            }
            Step::Sums(sums) => {
                let (fold, end) = of(Fold::Sum);
                Some(Join::new(fold, end, ["first", "second"], |totals| sums.following.trace_scalar(totals)))
            }
            Step::Map { .. } | Step::Check | Step::Tensor(_) => None,
        }
    }

    fn new<const N: usize>(fold: Fold, end: End, names: [&'static str; N], trace: impl for<'g> FnOnce([Expr<'g>; N]) -> Expr<'g>) -> Self {
        let graph = Graph::new();
        let out = trace(names.map(|_| graph.input())).node();
        let arrays = names.map(|name| Array { role: Role::Total(name), dtype: DType::F64 }).into();
        let recording = Recording { compute: DType::F64, arrays, nodes: graph.nodes(), slots: Vec::new(), out, end };
        Join { fold, recording, scalars: graph.scalars() }
    }
}

impl Recording {
    /// Whether blocks find numbers.
    pub(super) fn finds(&self) -> bool {
        matches!(self.end, End::Fold(_) | End::Total(_) | End::Follow(_))
    }

    /// The same with equal expressions as one.
    pub(super) fn shared(&self) -> Self {
        let mut first = HashMap::new();
        let mut same: Vec<usize> = Vec::with_capacity(self.nodes.len());
        let mut nodes = Vec::with_capacity(self.nodes.len());
        for (number, node) in self.nodes.iter().enumerate() {
            let node = node.map(|operand| same[operand]);
            same.push(*first.entry(node).or_insert(number));
            nodes.push(node);
        }
        let slots = self.slots.iter().map(|&(array, node)| (array, same[node])).collect();
        Recording { arrays: self.arrays.clone(), nodes, slots, out: same[self.out], ..*self }
    }

    /// Which nodes the results depend on.
    pub(super) fn live(&self) -> Vec<bool> {
        let mut live = vec![false; self.nodes.len()];
        self.slots.iter().for_each(|&(_, node)| live[node] = true);
        if self.end != End::Slots {
            live[self.out] = true;
        }
        for (node, code) in self.nodes.iter().enumerate().rev() {
            if live[node] {
                code.for_each_operand(|operand| live[operand] = true);
            }
        }
        live
    }

    /// Whether the array of this number is read.
    pub(super) fn reads(&self, live: &[bool], array: usize) -> bool {
        let is_used = || self.nodes.iter().zip(live).any(|(node, live)| *live && *node == Node::Input(array));
        // A Kahan sum needs x and the compensation whatever the code makes of them.
        is_used() || self.end == End::Kahan && !matches!(self.arrays[array].role, Role::Gradient | Role::Slot(_))
    }

    /// Whether the array of this number is written.
    pub(super) fn writes(&self, array: usize) -> bool {
        match self.arrays[array].role {
            Role::X | Role::SplitX => matches!(self.end, End::Plain | End::Master(_) | End::Random | End::Kahan),
            Role::Compensation => true,
            Role::Gradient | Role::Found | Role::Total(_) => false,
            Role::Slot(_) => self.slots.iter().any(|&(slot, _)| slot == array),
        }
    }
}
