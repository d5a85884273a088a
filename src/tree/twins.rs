//! The low-precision halves of models that are pairs.

use std::collections::HashMap;

use crate::engine::set_tensor;
use crate::error::Result;
use crate::model::lent::Lend;
use crate::model::{Model, See, Visitor};
use crate::tensors::{Tensor, TensorId};

/// The twins that compute in place of variables, by variable.
#[derive(Clone, Debug, Default)]
pub(crate) struct Twins(HashMap<TensorId, Tensor>);

impl<'m> See<'m> for Twins {
    fn tensor(&mut self, _: &str, _: &Tensor) {}

    fn lent(&mut self, _: &str, _: &'m dyn Lend) {}

    fn twin(&mut self, precise: &Tensor, low: &Tensor) {
        self.insert(precise, low);
    }
}

impl Twins {
    /// The twins of every [`Twin`](crate::Twin) in a model.
    pub(crate) fn of<M: Model + ?Sized>(model: &M) -> Self {
        let mut twins = Twins::default();
        model.visit(&mut Visitor::seeing(&mut twins));
        twins
    }

    /// Inserts a pair, and returns whether the variable had no other twin before.
    pub(crate) fn insert(&mut self, precise: &Tensor, low: &Tensor) -> bool {
        self.0.insert(precise.id(), low.clone()).is_none_or(|before| before.id() == low.id())
    }

    pub(crate) fn get(&self, precise: &dyn Lend) -> Option<&Tensor> {
        if self.is_empty() { None } else { self.0.get(&precise.tensor()?.id()) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn low(&self) -> impl Iterator<Item = &Tensor> {
        self.0.values()
    }

    /// Sets the twin of a variable, if it has one, to the variable, rounded.
    pub(crate) fn follow(&self, precise: &dyn Lend) -> Result<()> {
        self.get(precise).map_or(Ok(()), |low| Ok(set_tensor(low, &precise.to_tensor()?)?))
    }
}
