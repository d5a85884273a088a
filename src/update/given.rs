//! Where the gradients of a call come from.

use candle_core::Tensor;

use super::exchange::RankGradients;
use super::how::sources;
use crate::engine::Sources;
use crate::error::Result;
use crate::gradients::Gradients;
use crate::tree::Leaf;

/// The gradients of a call.
pub(super) enum Given<'g, G: ?Sized> {
    /// From the caller.
    Own(&'g G),
    /// From all ranks, for this rank's part of each leaf.
    Ranks(&'g RankGradients<'g>),
}

impl<G: ?Sized> Clone for Given<'_, G> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<G: ?Sized> Copy for Given<'_, G> {}

impl<G: Gradients + ?Sized> Given<'_, G> {
    /// Those of a leaf, which may be tied, and of its twin: each once.
    pub(super) fn sources(self, index: usize, leaf: &Leaf, x: &Tensor, low: Option<&Tensor>) -> Result<Sources> {
        match self {
            Given::Own(grads) => sources(leaf, x, low, grads),
            Given::Ranks(ranks) => ranks.promised(index),
        }
    }
}
