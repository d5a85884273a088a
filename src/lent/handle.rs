//! A parameter or gradient for the length of a call, whatever it is.

use std::ops::{Deref, Range};
use std::sync::Arc;

use candle_core::Tensor;

use super::Lend;
use super::part::LentPart;
use crate::error::Result;

/// A parameter or gradient of a call.
#[derive(Clone)]
pub(crate) enum Lent<'a> {
    Tensor(Tensor),
    Memory(&'a dyn Lend),
    Part(Arc<LentPart<'a>>),
}

impl<'a> Deref for Lent<'a> {
    type Target = dyn Lend + 'a;

    fn deref(&self) -> &Self::Target {
        match self {
            Lent::Tensor(tensor) => tensor,
            Lent::Memory(lender) => *lender,
            Lent::Part(part) => &**part,
        }
    }
}

impl std::fmt::Debug for Lent<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lent").field("shape", self.shape()).field("dtype", &self.dtype()).finish()
    }
}

impl<'a> Lent<'a> {
    /// What is lent for a longer time than the handle.
    pub(crate) fn new(lender: &'a dyn Lend) -> Self {
        lender.tensor().map_or(Lent::Memory(lender), |tensor| Lent::Tensor(tensor.clone()))
    }

    /// These of its elements, as a vector.
    pub(crate) fn part(&self, elements: Range<usize>) -> Result<Self> {
        Ok(match self {
            Lent::Tensor(tensor) => Lent::Tensor(tensor.detach().flatten_all()?.narrow(0, elements.start, elements.len())?),
            Lent::Memory(lender) => Lent::Part(Arc::new(LentPart::new(*lender, elements))),
            Lent::Part(part) => Lent::Part(Arc::new(part.part(elements))),
        })
    }

    /// None of its elements, in a shape of the same rank.
    pub(crate) fn none(lender: &'a dyn Lend) -> Result<Self> {
        let Some(tensor) = lender.tensor() else { return Ok(Lent::Part(Arc::new(LentPart::none(lender)))) };
        Ok(Lent::Tensor((0..tensor.rank()).try_fold(tensor.detach(), |x, dim| x.narrow(dim, 0, 0))?))
    }
}
