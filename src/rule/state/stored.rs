//! Conversion of state tensors from one format to another.

use super::format::SlotFormat;
use crate::engine::{Buffer, rounded};
use crate::error::Result;
use crate::numbers::codes::BLOCK;
use crate::numbers::{Code, DType, Records, elem_count};
use crate::rule::State;

/// The fewest elements that a tensor in 8 bits has. A multiple of the block.
const LEAST_CODED: usize = 32 * BLOCK;

impl State {
    pub(crate) fn code_of(&self, slot: &str) -> Code {
        if self.traits_of(slot).sign.is_some() { Code::NonNegative } else { Code::Signed }
    }

    /// Converts tensors to `format`, also of held rules, and returns how many were converted.
    ///
    /// With a `name` these are the tensors of this name, which must all fit the format. Without one these are
    /// all tensors that fit.
    pub(crate) fn store_as(&mut self, name: Option<&str>, format: SlotFormat) -> Result<usize> {
        let mut converted = 0;
        for index in 0..self.tensors.len() {
            let own = self.tensors[index].0;
            let (traits, code) = (self.traits_of(own), self.code_of(own));
            match name {
                Some(name) if name == own => traits.check_format(own, format)?,
                None if traits.check_format(own, format).is_ok() => {}
                _ => continue,
            }
            converted += 1;
            let buffer = &mut self.tensors[index].1;
            let stored = match format {
                // Made anew, because a conversion would make a copy in F32, which for 8 bits takes several
                // times the memory of the state.
                _ if buffer.is_zero() => {
                    let (dtype, records) = match format {
                        SlotFormat::Dtype(dtype) => (dtype, None),
                        SlotFormat::Q8 => (DType::U8, Some(Records::Codes(code))),
                    };
                    Buffer::of_zeros(buffer.shape().into(), dtype, records, buffer.device())?
                }
                SlotFormat::Dtype(dtype) => Buffer::new(&rounded(&buffer.tensor()?, dtype)?)?,
                SlotFormat::Q8 => Buffer::coded(&buffer.tensor()?, code)?,
            };
            // A new buffer lacks this mark, by which checks of gradients find squares that would overflow.
            *buffer = stored.of_squares(buffer.is_of_squares());
        }
        self.children
            .iter_mut()
            .try_fold(converted, |converted, child| Ok(converted + child.state.store_as(name, format)?))
    }

    /// Converts tensors that are too small for 8 bits back to F32. The state is for `part` elements of a
    /// parameter with `whole` elements.
    pub(crate) fn widen_small(&mut self, part: usize, whole: usize) -> Result<()> {
        for (_, buffer) in self.tensors.iter_mut().filter(|(_, buffer)| buffer.code().is_some()) {
            // A tensor as long as the part counts as long as the whole, so that all ranks decide alike.
            let elements = elem_count(buffer.shape());
            if (if elements == part { whole } else { elements }) < LEAST_CODED {
                *buffer = Buffer::new(&buffer.tensor()?)?.of_squares(buffer.is_of_squares());
            }
        }
        self.children.iter_mut().try_for_each(|child| child.state.widen_small(part, whole))
    }
}
