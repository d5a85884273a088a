//! A handle of a parameter or gradient for the length of a call.

use std::ops::{Deref, Range};
use std::sync::Arc;

use super::known::Known;
use super::part::LentPart;
use super::{Lend, read};
use crate::error::Result;
use crate::tensors::Tensor;

/// A handle of a parameter or gradient. It lives for one call.
#[derive(Clone)]
pub(crate) enum Lent<'a> {
    Tensor(Tensor),
    Memory(Known<'a>),
    Part(Arc<LentPart<'a>>),
}

impl<'a> Deref for Lent<'a> {
    type Target = dyn Lend + 'a;

    fn deref(&self) -> &Self::Target {
        match self {
            Lent::Tensor(tensor) => tensor,
            Lent::Memory(known) => known,
            Lent::Part(part) => &**part,
        }
    }
}

impl std::fmt::Debug for Lent<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lent").field("shape", &self.shape()).field("dtype", &self.dtype()).finish()
    }
}

impl<'a> Lent<'a> {
    /// The handle of a lender, which outlives it. The owner is asked for shape and dtype here, and not again.
    pub(crate) fn new(lender: &'a dyn Lend) -> Self {
        lender
            .tensor()
            .map_or_else(|| Lent::Memory(Known::new(lender)), |tensor| Lent::Tensor(tensor.clone()))
    }

    /// The handle by itself, if it is of a tensor; other memory is only lent.
    pub(crate) fn into_owned(self) -> Option<Lent<'static>> {
        if let Lent::Tensor(tensor) = self { Some(Lent::Tensor(tensor)) } else { None }
    }

    /// A range of its elements, as a vector.
    pub(crate) fn part(&self, elements: Range<usize>) -> Result<Self> {
        Ok(match self {
            Lent::Tensor(tensor) => {
                Lent::Tensor(tensor.detach().flatten_all()?.narrow(0, elements.start, elements.len())?)
            }
            Lent::Memory(known) => Lent::Part(Arc::new(LentPart::new(*known, elements))),
            Lent::Part(part) => Lent::Part(Arc::new(part.part(elements))),
        })
    }

    /// None of its elements, in a shape of the same rank.
    pub(crate) fn none(lender: &'a dyn Lend) -> Result<Self> {
        let Some(tensor) = lender.tensor() else {
            return Ok(Lent::Part(Arc::new(LentPart::none(Known::new(lender)))));
        };
        Ok(Lent::Tensor((0..tensor.rank()).try_fold(tensor.detach(), |x, dim| x.narrow(dim, 0, 0))?))
    }
    /// Whether both are the same elements in the same order, as far as the owners say: one tensor (or its
    /// detached copy), one object, or two handles of one. `None` if the owners say too little.
    pub(crate) fn is(&self, other: &Lent<'_>) -> Option<bool> {
        match (self, other) {
            (Lent::Tensor(a), Lent::Tensor(b)) => {
                Some(Lend::memory(a) == Lend::memory(b) && a.layout() == b.layout())
            }
            (Lent::Memory(a), Lent::Memory(b)) => a.is(b),
            _ => Some(false),
        }
    }

    /// Whether both lie at one address in one order, in memory that is nobody else's. One is read inside the
    /// other: different memory then has different addresses.
    pub(crate) fn lies_with(&self, other: &Lent<'_>) -> Result<bool> {
        if self.memory().is_some() || other.memory().is_some() || self.elem_count() == 0 {
            return Ok(false);
        }
        let mut is_one = false;
        read("gradient", &**self, &mut |a| {
            read("gradient", &**other, &mut |b| {
                is_one = a.place() == b.place();
                Ok(())
            })
        })?;
        Ok(is_one)
    }
}
