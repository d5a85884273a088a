//! How state tensors are stored.

use candle_core::DType;

use super::State;
use crate::codes::{BLOCK, Code};
use crate::engine::{Buffer, is_supported, rounded};
use crate::error::{Result, StateError};

/// How a state tensor is stored. Arithmetic is in f32 or f64 all the same: a tensor is widened before a step and rounded after it, in the same pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlotFormat {
    /// In this dtype: F16, BF16, F32 or F64.
    Dtype(DType),
    /// In 8 bits, in blocks of 128 elements of the whole parameter, each with one f32 as its unit: 1.03 bytes for each element.
    ///
    /// A code is a small float with 3 bits of fraction, so that a number is at most a sixteenth off, relative to the largest of its block, which is exact. With a sign it
    /// has 4 bits of exponent: down to 2⁻¹⁵ of the largest. Where a slot says that it is [not negative](crate::Slot::non_negative), it has 5, down to 2⁻³¹, nothing
    /// that is not 0 becomes 0, and the last bit is rounded at random (by a hash of the number, the same in every run), so that a mean that
    /// moves by a thousandth in a step does move.
    ///
    /// Tensors with fewer than 4096 elements are not worth it and stay in the compute dtype, so biases and norms do. That is decided by the whole tensor, however it is divided
    /// among ranks. A block with a number that is infinite or NaN is NaN as a whole. In a checkpoint a row of 132 bytes stands for each block: its scale
    /// as a little-endian f32, then the codes.
    Q8,
}

/// What a state tensor is, as far as it matters for how it can be stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meaning {
    SecondMoment,
    Copy,
    Other,
}

/// From how many elements on a tensor is stored in 8 bits. A multiple of the block.
const LEAST_CODED: usize = 32 * BLOCK;

impl From<DType> for SlotFormat {
    fn from(dtype: DType) -> Self {
        SlotFormat::Dtype(dtype)
    }
}

impl std::fmt::Display for SlotFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SlotFormat::Dtype(dtype) => write!(f, "{dtype:?}"),
            SlotFormat::Q8 => f.write_str("Q8"),
        }
    }
}

impl SlotFormat {
    /// Refuses a tensor that cannot be stored so.
    pub(crate) fn check(self, slot: &str, meaning: Meaning) -> Result<()> {
        let expected = match self {
            SlotFormat::Dtype(dtype) if !is_supported(dtype) => "F16, BF16, F32, F64 or Q8",
            SlotFormat::Dtype(DType::F16) if meaning == Meaning::SecondMoment => {
                "F32, F64 or Q8, as it is a second moment, and squares of small gradients are 0 in F16"
            }
            SlotFormat::Q8 if meaning == Meaning::Copy => {
                "F16, BF16, F32 or F64, as it is a copy of the parameter, of which 8 bits are no more than a sketch"
            }
            _ => return Ok(()),
        };
        Err(StateError::Format { slot: slot.to_string(), format: self.to_string(), expected }.into())
    }

    /// Whether a tensor may be stored so where all of a state is to be.
    fn fits(self, meaning: Meaning) -> bool {
        self.check("", meaning).is_ok()
    }
}

impl State {
    pub(super) fn meaning(&self, slot: &str) -> Meaning {
        match slot {
            _ if self.second_moments.contains(&slot) => Meaning::SecondMoment,
            _ if self.renewals.iter().any(|(own, renewal)| *own == slot && renewal.is_copy()) => Meaning::Copy,
            _ => Meaning::Other,
        }
    }

    pub(super) fn code_of(&self, slot: &str) -> Code {
        if self.non_negative.contains(&slot) { Code::NonNegative } else { Code::Signed }
    }

    /// Converts every tensor of that name, or every one that can be stored so, and says how many there are.
    pub(crate) fn store_as(&mut self, name: Option<&str>, format: SlotFormat) -> Result<usize> {
        let mut converted = 0;
        for index in 0..self.tensors.len() {
            let own = self.tensors[index].0;
            let (meaning, code) = (self.meaning(own), self.code_of(own));
            match name {
                Some(name) if name == own => format.check(own, meaning)?,
                None if format.fits(meaning) => {}
                _ => continue,
            }
            let buffer = &mut self.tensors[index].1;
            *buffer = match format {
                SlotFormat::Dtype(dtype) => Buffer::new(&rounded(&buffer.tensor()?, dtype)?)?,
                SlotFormat::Q8 => Buffer::coded(&buffer.tensor()?, code)?,
            };
            converted += 1;
        }
        self.children.iter_mut().try_fold(converted, |converted, child| Ok(converted + child.state.store_as(name, format)?))
    }

    /// Takes tensors that are too small for it out of their 8 bits. The state is of `part` elements of a parameter of `whole`.
    pub(crate) fn widen_small(&mut self, part: usize, whole: usize) -> Result<()> {
        for (_, buffer) in self.tensors.iter_mut().filter(|(_, buffer)| buffer.code().is_some()) {
            let elements = buffer.shape().elem_count();
            if (if elements == part { whole } else { elements }) < LEAST_CODED {
                *buffer = Buffer::new(&buffer.tensor()?)?;
            }
        }
        self.children.iter_mut().try_for_each(|child| child.state.widen_small(part, whole))
    }
}
