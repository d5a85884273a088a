//! The recorder: a [`Value`] that records operations instead of computing them.

use std::cell::{Cell, RefCell};
use std::ops::{Add, Div, Mul, Neg, Sub};

use super::Value;

/// An operation on one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Unary {
    /// `-a`
    Neg,
    /// `√a`
    Sqrt,
    /// `|a|`
    Abs,
}

/// An operation on two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Binary {
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a * b`
    Mul,
    /// `a / b`
    Div,
}

/// A comparison of two numbers; false if either is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Comparison {
    /// `a < b`
    Lt,
    /// `a <= b`
    Le,
    /// `a == b`
    Eq,
}

/// An operation of a recorded computation. Operands are indices of earlier nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Node {
    /// The n-th input, which is different for each element.
    Input(usize),
    /// The n-th scalar of [`Graph::into_parts`]: the same for all elements, passed at run time.
    Scalar(usize),
    /// A function of one number.
    Unary(Unary, usize),
    /// A function of two numbers.
    Binary(Binary, usize, usize),
    /// The truth value of a comparison.
    Compare(Comparison, usize, usize),
    /// `Select(mask, yes, no)`: `yes` where the mask holds, `no` elsewhere.
    Select(usize, usize, usize),
}

/// A recorded computation: nodes in the order of their execution, without branches.
///
/// Nodes do not contain the values of scalars, so a new learning rate or step needs no new kernel. The fields
/// are cells, because all [`Expr`]s of a recording share the graph, and operators have no `&mut` to it.
#[derive(Debug)]
pub(crate) struct Graph {
    inputs: Cell<usize>,
    nodes: RefCell<Vec<Node>>,
    scalars: RefCell<Vec<f64>>,
}

impl Graph {
    /// An empty recording in the memory of these vectors, which are cleared.
    pub(crate) fn new(mut nodes: Vec<Node>, mut scalars: Vec<f64>) -> Self {
        nodes.clear();
        scalars.clear();
        Graph {
            inputs: Cell::new(0),
            nodes: RefCell::new(nodes),
            scalars: RefCell::new(scalars),
        }
    }

    /// The nodes in the order of execution, and the values of the scalars in the order of their nodes.
    pub(crate) fn into_parts(self) -> (Vec<Node>, Vec<f64>) {
        (self.nodes.into_inner(), self.scalars.into_inner())
    }

    /// Records the next input. The first is input 0.
    pub(crate) fn input(&self) -> Expr<'_> {
        let input = self.inputs.get();
        self.inputs.set(input + 1);
        self.push(Node::Input(input))
    }

    fn push(&self, node: Node) -> Expr<'_> {
        let mut nodes = self.nodes.borrow_mut();
        nodes.push(node);
        Expr {
            graph: self,
            node: nodes.len() - 1,
        }
    }

    fn scalar(&self, value: f64) -> Expr<'_> {
        let mut scalars = self.scalars.borrow_mut();
        scalars.push(value);
        self.push(Node::Scalar(scalars.len() - 1))
    }
}

/// A number in a recorded computation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expr<'g> {
    graph: &'g Graph,
    node: usize,
}

impl Expr<'_> {
    /// The index of this value's node in [`Graph::into_parts`].
    pub(crate) fn node(self) -> usize {
        self.node
    }
}

/// A truth value in a recorded computation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Condition<'g>(Expr<'g>);

impl<'g> Expr<'g> {
    fn unary(self, op: Unary) -> Self {
        self.graph.push(Node::Unary(op, self.node))
    }

    fn compare(self, op: Comparison, other: Self) -> Condition<'g> {
        Condition(self.graph.push(Node::Compare(op, self.node, other.node)))
    }
}

impl Neg for Expr<'_> {
    type Output = Self;
    fn neg(self) -> Self {
        self.unary(Unary::Neg)
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident)*) => {$(
        impl $trait for Expr<'_> {
            type Output = Self;
            fn $method(self, other: Self) -> Self {
                self.graph.push(Node::Binary(Binary::$trait, self.node, other.node))
            }
        }

        impl $trait<f64> for Expr<'_> {
            type Output = Self;
            fn $method(self, other: f64) -> Self {
                $trait::$method(self, self.graph.scalar(other))
            }
        }
    )*};
}

operators!(Add add Sub sub Mul mul Div div);

impl super::sealed::Sealed for Expr<'_> {}

impl<'g> Value for Expr<'g> {
    type Mask = Condition<'g>;

    fn constant(self, value: f64) -> Self {
        self.graph.scalar(value)
    }

    fn sqrt(self) -> Self {
        self.unary(Unary::Sqrt)
    }

    fn abs(self) -> Self {
        self.unary(Unary::Abs)
    }

    fn lt(self, other: Self) -> Condition<'g> {
        self.compare(Comparison::Lt, other)
    }

    fn le(self, other: Self) -> Condition<'g> {
        self.compare(Comparison::Le, other)
    }

    fn equal(self, other: Self) -> Condition<'g> {
        self.compare(Comparison::Eq, other)
    }

    fn select(mask: Condition<'g>, yes: Self, no: Self) -> Self {
        yes.graph.push(Node::Select(mask.0.node, yes.node, no.node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_stay_out_of_the_nodes() {
        let record = |eta: f64| {
            let graph = Graph::new(Vec::new(), Vec::new());
            let (x, dx) = (graph.input(), graph.input());
            let _ = x - dx * eta;
            graph.into_parts()
        };
        let ((nodes, slow), (same, fast)) = (record(0.1), record(0.5));
        assert_eq!(nodes, same);
        assert_eq!((slow, fast), (vec![0.1], vec![0.5]));
    }
}
