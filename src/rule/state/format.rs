//! How state tensors are stored.

use crate::error::{Error, ErrorKind, Result};
use crate::numbers::{DType, is_supported};

/// How a state tensor is stored.
///
/// Arithmetic is in f32 or f64 all the same: a tensor is widened before a step and rounded after it, in the
/// same pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlotFormat {
    /// In this dtype: F16, BF16, F32 or F64.
    Dtype(DType),
    /// In 8 bits: 1.03 bytes for each element.
    ///
    /// Blocks of 128 elements of the whole parameter have one f32 each as their unit. A code is a small float
    /// with 3 bits of fraction. With a sign it has 4 bits of exponent. The largest number of a block is
    /// exact; others are at most a sixteenth of themselves off, down to 2⁻¹⁵ of it.
    ///
    /// A slot that is [not negative](crate::Slot::non_negative) has 5 bits of exponent, down to 2⁻³¹. Nothing
    /// but 0 becomes 0. A number goes to either neighbour at random, at most an eighth away, so that a mean
    /// that moves by a thousandth in a step does move. The choice is a hash of the number, the same in every
    /// run.
    ///
    /// Tensors with fewer than 4096 elements, such as biases and norms, stay in F32: they are not worth it.
    /// The size of the whole tensor decides, however it is divided among ranks. A number that is infinite or
    /// NaN stays so, and changes no other of its block. In a checkpoint a block is a row of 132 bytes: its
    /// scale as a little-endian f32, then the codes.
    Q8,
}

/// What a state tensor is, as far as it matters for how it can be stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meaning {
    SecondMoment,
    Copy,
    Other,
}

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
    /// Refuses a tensor that cannot be stored in this format.
    pub(crate) fn check(self, slot: &str, meaning: Meaning) -> Result<()> {
        let expected = match self {
            SlotFormat::Dtype(dtype) if !is_supported(dtype) => "F16, BF16, F32, F64 or Q8",
            SlotFormat::Dtype(DType::F16) if meaning == Meaning::SecondMoment => {
                "F32 or F64, as it is a second moment, and squares of small gradients are 0 in F16"
            }
            SlotFormat::Q8 if meaning == Meaning::Copy => {
                "F16, BF16, F32 or F64, as it is a copy of the parameter, of which 8 bits are no more than a \
                 sketch"
            }
            _ => return Ok(()),
        };
        Err(Error::new(ErrorKind::Argument, format!("state tensor {slot:?} is to be stored as"))
            .with_got(self)
            .with_expected(expected))
    }

    /// Whether a tensor may be stored in this format when all of a state is to be.
    pub(crate) fn fits(self, meaning: Meaning) -> bool {
        self.check("", meaning).is_ok()
    }
}
