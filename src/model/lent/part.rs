//! A range of the elements of a lender.

use std::ops::Range;

use super::known::Known;
use super::lend::KEEP_TO;
use super::{Lend, MemoryMut, View};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::{DType, Shape};

/// A range of the elements of a parameter: a vector, or nothing in a shape of the parameter's rank.
pub(crate) struct LentPart<'a> {
    of: Known<'a>,
    shape: Shape,
    elements: Range<usize>,
}

impl<'a> LentPart<'a> {
    pub(super) fn new(of: Known<'a>, elements: Range<usize>) -> Self {
        LentPart { of, shape: elements.len().into(), elements }
    }

    /// No elements, in a shape of the same rank.
    pub(super) fn none(of: Known<'a>) -> Self {
        LentPart { of, shape: vec![0; of.lent_shape().len()].into(), elements: 0..0 }
    }

    /// A range of the elements of this part.
    pub(super) fn part(&self, elements: Range<usize>) -> Self {
        LentPart::new(self.of, self.elements.start + elements.start..self.elements.start + elements.end)
    }
}

fn lacks() -> Error {
    Error::new(ErrorKind::Memory, "a part does not lie in the lent memory in row-major order")
        .with_remedy(KEEP_TO)
}

impl Lend for LentPart<'_> {
    fn lent_shape(&self) -> &[usize] {
        self.shape.dims()
    }

    fn lent_dtype(&self) -> DType {
        self.of.lent_dtype()
    }

    fn memory(&self) -> Option<usize> {
        self.of.memory()
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        self.of.read(&mut |view| {
            let part = view.in_order().and_then(|memory| memory.part(self.elements.clone()));
            run(View::new(part.ok_or_else(lacks)?))
        })
    }

    fn write(&self, run: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        self.of.write(&mut |memory| run(memory.part(self.elements.clone()).ok_or_else(lacks)?))
    }
}
