//! What a job does, apart from its data and its scalars: jobs with equal recordings run in one launch.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use crate::engine::cpu::Fold;
use crate::engine::{Factor, Job, Norms, Of, Question, Step, Store, is_supported};
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
    /// No array but one number for the leaf, which the device has found before: what a norm scales the gradient by.
    Factor,
    /// Numbers that the device has found before, joined to one: a norm.
    Norm(&'static str),
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
    /// The gradient is folded.
    Fold(Folding),
    /// Numbers that have been folded from parts are joined.
    Total(Folding),
    /// The same, and a factor follows from the norms that they make.
    Factor(Folding),
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
    /// What is read for the answer.
    Answer(Question<'j, 'a>),
}

/// Records the code of the work and its end, with the scalars of the code; nothing, if a dtype is none of the printed ones.
pub(super) fn record(work: Work<'_, '_>) -> Option<(Recording, Vec<f64>)> {
    let (job, sources, steps): (_, &[Tensor], SmallVec<[&Step<'_>; 4]>) = match work {
        Work::Commit(job) => (job, &job.source, job.steps.iter().collect()),
        Work::Answer(question) => (question.job, question.sources(), question.steps().collect()),
    };
    let graph = Graph::new();
    let mut arrays = Vec::new();
    let mut array = |role, dtype| {
        arrays.push(Array { role, dtype });
        graph.input()
    };
    let x = array(if job.rest.is_some() { Role::SplitX } else { Role::X }, job.x.dtype());
    let summed = sources.iter().map(|source| array(Role::Gradient, source.dtype())).reduce(|sum, more| sum + more);
    let mut dx = match work {
        Work::Answer(Question { of: Of::Parameter, .. }) => x,
        _ => summed.unwrap_or_else(|| x.constant(0.0)),
    };

    let mut slots = Vec::new();
    for step in steps {
        if let Step::Reduce(_) = step {
            dx = dx * array(Role::Factor, DType::F64);
        }
        let Some(kernel) = step.kernel() else { continue };
        let named = step.slots();
        let before: Vec<Expr<'_>> = named.iter().map(|(name, slot)| array(Role::Slot(name), slot.dtype())).collect();
        let mut after = before.clone();
        dx = kernel.trace(x, dx, &mut after);
        slots.extend(before.iter().zip(&after).map(|(before, after)| (before.node(), after.node())));
    }
    let (end, out) = match (work, &job.store) {
        (Work::Answer(Question { fold, .. }), _) => (End::Fold(fold.into()), dx),
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
        End::Fold(_) => Vec::new(),
        _ => slots.into_iter().filter(|(before, after)| before != after).map(|(before, after)| (input(before), after)).collect(),
    };
    let (compute, out) = (job.compute, out.node());
    let known = arrays.iter().all(|array| is_supported(array.dtype)) && !matches!(end, End::Master(dtype) if !is_supported(dtype));
    known.then(|| (Recording { compute, arrays, nodes, slots, out, end }, graph.scalars()))
}

/// Records how parts of a fold become one, and what factor follows from the norms if one is asked for; with the scalars of that.
pub(super) fn record_join(fold: Fold, factor: Option<&dyn Factor>) -> (Recording, Vec<f64>) {
    let graph = Graph::new();
    let norms = Norms { parameter: graph.input(), gradient: graph.input() };
    let (end, out) = match factor {
        None => (End::Total(fold.into()), norms.gradient),
        Some(factor) => (End::Factor(fold.into()), factor.trace(norms)),
    };
    let arrays = ["parameter", "gradient"].map(|name| Array { role: Role::Norm(name), dtype: DType::F64 }).into();
    (Recording { compute: DType::F64, arrays, nodes: graph.nodes(), slots: Vec::new(), out: out.node(), end }, graph.scalars())
}

impl Recording {
    /// Whether blocks find numbers.
    pub(super) fn finds(&self) -> bool {
        matches!(self.end, End::Fold(_) | End::Total(_) | End::Factor(_))
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
            Role::Gradient | Role::Factor | Role::Norm(_) => false,
            Role::Slot(_) => self.slots.iter().any(|&(slot, _)| slot == array),
        }
    }
}
