//! The low-precision halves of models that are pairs.

use std::collections::HashMap;

use candle_core::{Tensor, TensorId};

use crate::engine::set_tensor;
use crate::error::Result;
use crate::model::{Model, Visitor};

/// What computes in the place of variables, by these.
#[derive(Clone, Debug, Default)]
pub(crate) struct Twins(HashMap<TensorId, Tensor>);

impl Twins {
    /// Those of every [`Twin`](crate::Twin) in a model.
    pub(crate) fn of<M: Model + ?Sized>(model: &M) -> Self {
        let mut twins = Twins::default();
        let mut see_twin = |precise: &Tensor, low: &Tensor| _ = twins.insert(precise, low);
        model.visit(&mut Visitor::with_twins(&mut |_, _| {}, &mut see_twin));
        twins
    }

    /// Takes in a pair. Whether the variable had no other twin before.
    pub(crate) fn insert(&mut self, precise: &Tensor, low: &Tensor) -> bool {
        self.0.insert(precise.id(), low.clone()).is_none_or(|before| before.id() == low.id())
    }

    pub(crate) fn get(&self, precise: &Tensor) -> Option<&Tensor> {
        self.0.get(&precise.id())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn low(&self) -> impl Iterator<Item = &Tensor> {
        self.0.values()
    }

    /// Sets the twin of a variable, if it has one, to that rounded.
    pub(crate) fn follow(&self, precise: &Tensor) -> Result<()> {
        Ok(self.get(precise).map_or(Ok(()), |low| set_tensor(low, precise))?)
    }
}
