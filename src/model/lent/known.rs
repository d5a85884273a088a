//! A lender with the shape and dtype that it reported first.

use super::{Lend, MemoryMut, View};
use crate::error::Result;
use crate::numbers::DType;

/// A lender with the shape and dtype that it had when the call found it.
///
/// The call is planned with these values, and each loan is compared with them, even if the owner reports
/// others later.
#[derive(Clone, Copy)]
pub(crate) struct Known<'a> {
    lender: &'a dyn Lend,
    shape: &'a [usize],
    dtype: DType,
}

impl<'a> Known<'a> {
    pub(super) fn new(lender: &'a dyn Lend) -> Self {
        Known { lender, shape: lender.shape(), dtype: lender.dtype() }
    }

    /// Address and size of the lender. Two lenders with equal ones are one object, unless the size is 0: an
    /// object of size 0 may share the address of another.
    pub(crate) fn object(&self) -> (usize, usize) {
        (std::ptr::from_ref(self.lender).addr(), size_of_val(self.lender))
    }

    /// Whether both are the same elements in the same order; `None` if their owners report too little.
    pub(super) fn is(&self, other: &Known<'_>) -> Option<bool> {
        if self.object() == other.object() && self.object().1 > 0 {
            return Some(true);
        }
        match (self.memory(), other.memory()) {
            (None, None) => None,
            (own, others) if own != others => Some(false),
            _ => Some(
                self.offset()? == other.offset()? && (self.shape, self.dtype) == (other.shape, other.dtype),
            ),
        }
    }
}

impl Lend for Known<'_> {
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
