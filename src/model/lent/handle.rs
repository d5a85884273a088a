//! [`Lent`], a handle of a parameter or gradient, and how two handles are compared.

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
    /// A handle of `lender`. If it is no tensor, its shape and dtype are read here, once for the whole call.
    pub(crate) fn new(lender: &'a dyn Lend) -> Self {
        lender
            .tensor()
            .map_or_else(|| Lent::Memory(Known::new(lender)), |tensor| Lent::Tensor(tensor.clone()))
    }

    /// The handle without a lifetime, if it is of a tensor. Other memory is borrowed from its owner.
    pub(crate) fn into_owned(self) -> Option<Lent<'static>> {
        if let Lent::Tensor(tensor) = self { Some(Lent::Tensor(tensor)) } else { None }
    }

    /// A handle of a range of the elements, as a vector.
    pub(crate) fn part(&self, elements: Range<usize>) -> Result<Self> {
        Ok(match self {
            Lent::Tensor(tensor) => {
                Lent::Tensor(tensor.detach().flatten_all()?.narrow(0, elements.start, elements.len())?)
            }
            Lent::Memory(known) => Lent::Part(Arc::new(LentPart::new(*known, elements))),
            Lent::Part(part) => Lent::Part(Arc::new(part.part(elements))),
        })
    }

    /// A handle of no elements of `lender`, in a shape of the same rank.
    pub(crate) fn none(lender: &'a dyn Lend) -> Result<Self> {
        let Some(tensor) = lender.tensor() else {
            return Ok(Lent::Part(Arc::new(LentPart::none(Known::new(lender)))));
        };
        Ok(Lent::Tensor((0..tensor.rank()).try_fold(tensor.detach(), |x, dim| x.narrow(dim, 0, 0))?))
    }
    /// Whether both are the same elements in the same order; `None` if the owners report too little. True for
    /// a tensor and its detached copy, one object, or lenders of one memory, offset, shape and dtype.
    pub(crate) fn is(&self, other: &Lent<'_>) -> Option<bool> {
        match (self, other) {
            (Lent::Tensor(a), Lent::Tensor(b)) => {
                Some(Lend::memory(a) == Lend::memory(b) && a.layout() == b.layout())
            }
            (Lent::Memory(a), Lent::Memory(b)) => a.is(b),
            _ => Some(false),
        }
    }

    /// Whether both lie at one address in one order. False if others can access the memory of one.
    pub(crate) fn lies_with(&self, other: &Lent<'_>) -> Result<bool> {
        // Memory that others can access may have a lock, which the nested reads would take twice.
        if self.memory().is_some() || other.memory().is_some() || self.elem_count() == 0 {
            return Ok(false);
        }
        // Nested, because an owner that converts its numbers for each reader could lend both at one address,
        // one after the other.
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
