//! [`Lent`], a handle of a parameter or gradient, and how two handles are compared.
//!
//! An owner may report another shape or dtype each time. So a handle of memory that is no tensor stores the
//! shape and dtype that the owner reports first ([`FixedLender`]), or the shape and dtype of a range of the
//! elements ([`LentPart`]). Each loan is compared with the stored values.

use std::ops::{Deref, Range};
use std::sync::Arc;

use super::lend::LEND_AS_REPORTED;
use super::{Lend, MemoryMut, View, read};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::{DType, Shape};
use crate::tensors::Tensor;

/// A handle of a parameter or gradient, for one call.
#[derive(Clone)]
pub(crate) enum Lent<'a> {
    Tensor(Tensor),
    Memory(FixedLender<'a>),
    Part(Arc<LentPart<'a>>),
}

impl<'a> Deref for Lent<'a> {
    type Target = dyn Lend + 'a;

    fn deref(&self) -> &Self::Target {
        match self {
            Lent::Tensor(tensor) => tensor,
            Lent::Memory(lender) => lender,
            Lent::Part(part) => &**part,
        }
    }
}

impl std::fmt::Debug for Lent<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lent")
            .field("shape", &self.shape())
            .field("dtype", &self.dtype())
            .finish()
    }
}

impl<'a> Lent<'a> {
    /// A handle of `lender`. Unless `lender` is a tensor, its shape and dtype are read here, once for the
    /// call.
    pub(crate) fn new(lender: &'a dyn Lend) -> Self {
        lender.tensor().map_or_else(
            || Lent::Memory(FixedLender::new(lender)),
            |tensor| Lent::Tensor(tensor.clone()),
        )
    }

    /// The handle without a lifetime, if it is of a tensor; `None` for memory that is borrowed from its
    /// owner.
    pub(crate) fn into_owned(self) -> Option<Lent<'static>> {
        if let Lent::Tensor(tensor) = self {
            Some(Lent::Tensor(tensor))
        } else {
            None
        }
    }

    /// A handle of a range of the elements, as a vector.
    pub(crate) fn part(&self, elements: Range<usize>) -> Result<Self> {
        Ok(match self {
            Lent::Tensor(tensor) => Lent::Tensor(tensor.detach().flatten_all()?.narrow(
                0,
                elements.start,
                elements.len(),
            )?),
            Lent::Memory(lender) => Lent::Part(Arc::new(LentPart::new(*lender, elements))),
            Lent::Part(part) => Lent::Part(Arc::new(part.part(elements))),
        })
    }

    /// A handle of no elements of `lender`, in a shape of the same rank.
    pub(crate) fn empty_part(lender: &'a dyn Lend) -> Result<Self> {
        let Some(tensor) = lender.tensor() else {
            return Ok(Lent::Part(Arc::new(LentPart::empty(FixedLender::new(lender)))));
        };
        Ok(Lent::Tensor(
            (0..tensor.rank()).try_fold(tensor.detach(), |x, dim| x.narrow(dim, 0, 0))?,
        ))
    }

    /// Whether two handles have the same elements in the same order; `None` if the owners report too little.
    /// True for a tensor and its detached copy, one object, or lenders of one memory, offset, shape and
    /// dtype.
    pub(crate) fn has_same_elements(&self, other: &Lent<'_>) -> Option<bool> {
        match (self, other) {
            (Lent::Tensor(a), Lent::Tensor(b)) => {
                Some(Lend::memory(a) == Lend::memory(b) && a.layout() == b.layout())
            }
            (Lent::Memory(a), Lent::Memory(b)) => a.has_same_elements(b),
            _ => Some(false),
        }
    }

    /// Whether two handles have their elements at the same address, in the same order. False if other code can access
    /// the memory of either.
    pub(crate) fn has_same_address(&self, other: &Lent<'_>) -> Result<bool> {
        // Memory that other code can access may have a lock, which the nested reads would take twice.
        if self.memory().is_some() || other.memory().is_some() || self.elem_count() == 0 {
            return Ok(false);
        }
        // The reads are nested, because an owner that converts its numbers for each reader could lend both
        // handles at one address, one after the other.
        let mut is_same = false;
        read("gradient", &**self, &mut |a| {
            read("gradient", &**other, &mut |b| {
                is_same = a.address_and_order() == b.address_and_order();
                Ok(())
            })
        })?;
        Ok(is_same)
    }
}

/// A lender with the shape and dtype that it reported at the start of the call.
///
/// The call is planned with these values, and each loan is compared with them, even if the owner reports
/// other values later.
#[derive(Clone, Copy)]
pub(crate) struct FixedLender<'a> {
    lender: &'a dyn Lend,
    shape: &'a [usize],
    dtype: DType,
}

impl<'a> FixedLender<'a> {
    fn new(lender: &'a dyn Lend) -> Self {
        FixedLender {
            lender,
            shape: lender.shape(),
            dtype: lender.dtype(),
        }
    }

    /// Address and size of the lender. Two lenders with equal address and size are one object, unless the
    /// size is 0: an object of size 0 may share the address of another object.
    pub(crate) fn object(&self) -> (usize, usize) {
        (std::ptr::from_ref(self.lender).addr(), size_of_val(self.lender))
    }

    /// Whether two lenders lend the same elements in the same order; `None` if the owners report too little.
    fn has_same_elements(&self, other: &FixedLender<'_>) -> Option<bool> {
        if self.object() == other.object() && self.object().1 > 0 {
            return Some(true);
        }
        match (self.memory(), other.memory()) {
            (None, None) => None,
            (a, b) if a != b => Some(false),
            _ => Some(
                self.offset()? == other.offset()? && (self.shape, self.dtype) == (other.shape, other.dtype),
            ),
        }
    }
}

impl Lend for FixedLender<'_> {
    fn lent_shape(&self) -> &[usize] {
        self.shape
    }

    fn lent_dtype(&self) -> DType {
        self.dtype
    }

    fn memory(&self) -> Option<usize> {
        self.lender.memory()
    }

    fn offset(&self) -> Option<usize> {
        self.lender.offset()
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        self.lender.read(run)
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        self.lender.write(run)
    }
}

/// A range of the elements of a parameter: a vector, or nothing in a shape of the parameter's rank.
pub(crate) struct LentPart<'a> {
    whole: FixedLender<'a>,
    shape: Shape,
    elements: Range<usize>,
}

impl<'a> LentPart<'a> {
    fn new(whole: FixedLender<'a>, elements: Range<usize>) -> Self {
        LentPart {
            whole,
            shape: elements.len().into(),
            elements,
        }
    }

    /// No elements, in a shape of the same rank.
    fn empty(whole: FixedLender<'a>) -> Self {
        LentPart {
            whole,
            shape: vec![0; whole.lent_shape().len()].into(),
            elements: 0..0,
        }
    }

    /// A range of the elements of this part.
    fn part(&self, elements: Range<usize>) -> Self {
        LentPart::new(
            self.whole,
            self.elements.start + elements.start..self.elements.start + elements.end,
        )
    }
}

/// The error for lent memory that lacks a part.
fn missing_part() -> Error {
    Error::new(
        ErrorKind::Memory,
        "a part does not lie in the lent memory in row-major order",
    )
    .with_remedy(LEND_AS_REPORTED)
}

impl Lend for LentPart<'_> {
    fn lent_shape(&self) -> &[usize] {
        self.shape.dims()
    }

    fn lent_dtype(&self) -> DType {
        self.whole.lent_dtype()
    }

    fn memory(&self) -> Option<usize> {
        self.whole.memory()
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        self.whole.read(&mut |view| {
            let part = view
                .in_order()
                .and_then(|memory| memory.part(self.elements.clone()));
            run(View::new(part.ok_or_else(missing_part)?))
        })
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        self.whole
            .write(&mut |memory| run(memory.part(self.elements.clone()).ok_or_else(missing_part)?))
    }
}
