//! Where the gradients of a call come from.

use candle_core::Tensor;

use super::exchange::RankGradients;
use super::how::sources;
use crate::engine::Sources;
use crate::error::Result;
use crate::gradients::GradientLookUp;
use crate::lent::Lend;
use crate::tree::Leaf;

/// The gradients of a call.
#[derive(Clone, Copy)]
pub(super) enum Given<'g> {
    /// From the caller.
    Own(&'g dyn GradientLookUp),
    /// From all ranks, for this rank's part of each leaf.
    Ranks(&'g RankGradients<'g>),
}

impl<'g> Given<'g> {
    /// Those of a leaf, which may be tied, and of its twin: each once.
    pub(super) fn sources(self, index: usize, leaf: &Leaf, x: &dyn Lend, low: Option<&Tensor>) -> Result<Sources<'g>> {
        match self {
            Given::Own(grads) => sources(leaf, x, low, grads),
            Given::Ranks(ranks) => ranks.promised(index),
        }
    }
}
