//! The gradients of a call.

use candle_core::Tensor;

use super::call::sources;
use super::exchange::RankGradients;
use crate::engine::Sources;
use crate::error::Result;
use crate::gradients::GradientLookUp;
use crate::lent::Lend;
use crate::tree::Leaf;

/// The gradients of a call.
#[derive(Clone, Copy)]
pub(super) enum CallGradients<'g> {
    /// From the caller.
    Own(&'g dyn GradientLookUp),
    /// From all ranks, for this rank's part of each leaf.
    Ranks(&'g RankGradients<'g>),
}

impl<'g> CallGradients<'g> {
    /// Those of a leaf, which may be tied, and of its twin: each once.
    pub(super) fn sources(self, index: usize, leaf: &Leaf, x: &dyn Lend, low: Option<&Tensor>) -> Result<Sources<'g>> {
        match self {
            CallGradients::Own(grads) => sources(leaf, x, low, grads),
            CallGradients::Ranks(ranks) => ranks.promised(index),
        }
    }
}
