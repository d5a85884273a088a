//! What an owner has said of its memory, once.

use super::{Lend, MemoryMut, View};
use crate::error::Result;
use crate::numbers::DType;

/// A lender with the shape and the dtype that it named when it was found.
///
/// A call is planned with these, and what is lent is compared with these each time, whatever the owner says
/// meanwhile.
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

    /// The address and the size of the lender: two are one object if both are equal. An object without a size
    /// may be anywhere.
    pub(crate) fn object(&self) -> (usize, usize) {
        (std::ptr::from_ref(self.lender).addr(), size_of_val(self.lender))
    }

    /// Whether both are the same elements in the same order. `None` if their owners say too little.
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
