//! A step beside the training: other optimisers for the same parameters, which come back after it.

use std::sync::Arc;

use candle_core::Tensor;

use super::{Leaf, NormHistories, StateTree, Twins};
use crate::engine::set_tensor;
use crate::error::Result;
use crate::rule::{Optimiser, State};

impl StateTree {
    /// A tree for the same parameters, over the same ranks, with other optimisers and states. Windows and gradients that may be missing are the
    /// training's concern.
    pub(crate) fn beside(&self, make: impl Fn(usize, &Leaf) -> Result<(Arc<dyn Optimiser>, State)>) -> Result<Self> {
        let leaves = self.leaves.iter().enumerate().map(|(index, leaf)| {
            let (optimiser, state) = make(index, leaf)?;
            Ok(leaf.with_optimiser(optimiser, state))
        });
        let tree = self.with_leaves(leaves.collect::<Result<_>>()?, self.left_out.clone());
        Ok(StateTree { calls: 0, norms: NormHistories::default(), requires_all: false, ..tree }.without_warnings())
    }

    /// Keeps these parameters, whole copies by the index of their leaf, until they are [put back](StateTree::put_back). Meanwhile what needs them is refused.
    pub(crate) fn put_aside(&mut self, copies: Vec<(usize, Tensor)>) {
        for (leaf, copy) in copies {
            self.leaves[leaf].aside = Some(copy);
        }
    }

    /// Makes the variables of the model, in the order of the leaves, what was put aside.
    pub(crate) fn put_back(&mut self, parameters: &[Tensor], twins: &Twins) -> Result<()> {
        for (leaf, x) in self.leaves.iter_mut().zip(parameters) {
            if let Some(aside) = &leaf.aside {
                set_tensor(x, aside)?;
                twins.follow(x)?;
            }
            leaf.aside = None;
        }
        Ok(())
    }
}
