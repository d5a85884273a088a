//! Steps outside the training, by other optimisers. Afterwards the parameters come back.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use super::{Leaf, NormHistories, StateTree};
use crate::engine::set_lent;
use crate::error::Result;
use crate::model::Model;
use crate::model::lent::Lent;
use crate::rule::{Optimiser, State};
use crate::tensors::Tensor;

impl StateTree {
    /// A tree for the same parameters, over the same ranks, with other optimisers and states. The tree counts
    /// no windows, keeps no norms and no warnings, and requires no gradients, because all of these belong to
    /// the training.
    pub(crate) fn scratch_tree(
        &self,
        make: impl Fn(usize, &Leaf) -> Result<(Arc<Optimiser>, State)>,
    ) -> Result<Self> {
        let leaves = self.leaves.iter().enumerate().map(|(index, leaf)| {
            let (optimiser, state) = make(index, leaf)?;
            Ok(Box::new(leaf.with_optimiser(optimiser, state)))
        });
        let tree = self.with_leaves(leaves.collect::<Result<_>>()?, self.left_out.clone());
        Ok(StateTree {
            calls: 0,
            norms: NormHistories::default(),
            requires_all: false,
            ..tree
        }
        .without_warnings())
    }

    /// The variables of the model, in the order of the leaves. If an exchange was leaked, or a device failed
    /// at its end, the parameters that are still aside come back first.
    pub(crate) fn recover_parameters<'m, M: Model + ?Sized>(
        &mut self,
        model: &'m M,
    ) -> Result<Vec<Lent<'m>>> {
        let parameters = self.parameters(model)?;
        self.put_back(&parameters)?;
        Ok(parameters)
    }

    /// Sets the model's variables, which are in the order of the leaves, to the copies aside. If a device or
    /// an owner fails to write a copy, this copy stays aside for another try, and the other copies are still
    /// written.
    fn put_back(&mut self, parameters: &[Lent<'_>]) -> Result<()> {
        let mut first_failure = None;
        for (leaf, x) in self.leaves.iter_mut().zip(parameters) {
            let Some(copy) = &leaf.parameter_aside else {
                continue;
            };
            match catch_unwind(AssertUnwindSafe(|| set_lent(&**x, copy))) {
                Ok(Ok(())) => leaf.parameter_aside = None,
                failure => _ = first_failure.get_or_insert(failure),
            }
        }
        first_failure.map_or(Ok(()), |failure| {
            failure.unwrap_or_else(|panic| resume_unwind(panic))
        })
    }
}

/// A model with other values instead of its parameters. Dropping the exchange puts the parameters back.
#[derive(Debug)]
pub(crate) struct ParameterExchange<'s, 'm> {
    pub(crate) state: &'s mut StateTree,
    /// The variables of the model, in the order of the leaves.
    pub(super) parameters: Vec<Lent<'m>>,
}

impl<'s, 'm> ParameterExchange<'s, 'm> {
    /// Puts whole copies of parameters aside, each with the index of its leaf. Call this function before the
    /// first write, so that no failure loses a parameter. Until the parameters are back, calls that need them
    /// are refused.
    pub(crate) fn new(
        state: &'s mut StateTree,
        parameters: Vec<Lent<'m>>,
        copies: Vec<(usize, Tensor)>,
    ) -> Self {
        for (leaf, copy) in copies {
            state.leaves[leaf].parameter_aside = Some(copy);
        }
        ParameterExchange { state, parameters }
    }

    /// Keeps only the copies of the leaves for which `is_exchanged` holds.
    pub(crate) fn retain(&mut self, is_exchanged: impl Fn(usize, &Leaf) -> bool) {
        let leaves = self.state.leaves.iter_mut().enumerate();
        leaves
            .filter(|(index, leaf)| !is_exchanged(*index, leaf))
            .for_each(|(_, leaf)| leaf.parameter_aside = None);
    }

    pub(crate) fn put_back(&mut self) -> Result<()> {
        self.state.put_back(&self.parameters)
    }
}

impl Drop for ParameterExchange<'_, '_> {
    fn drop(&mut self) {
        // candle panics if a variable's storage was exchanged for a shorter one. A second panic would end the
        // process.
        match catch_unwind(AssertUnwindSafe(|| self.put_back())) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => log::error!("the parameters are not back in the model: {error}"),
            Err(_) => {
                log::error!("the parameters are not back in the model: a variable cannot be written any more")
            }
        }
    }
}
