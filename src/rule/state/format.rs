//! The formats in which state tensors are stored: dtypes and 8 bits.

use crate::numbers::DType;

/// How a state tensor is stored.
///
/// Arithmetic is in f32 or f64 in any case: a tensor is widened before a step and rounded after it, in the
/// same pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlotFormat {
    /// In this dtype: F16, BF16, F32 or F64.
    Dtype(DType),
    /// In 8 bits: 1.03 bytes for each element.
    ///
    /// Each block of 128 elements of the whole parameter has one f32 as its scale. A code is a small float:
    /// sign, 4 bits of exponent, 3 bits of fraction. The largest number of a block is exact. Numbers down to
    /// 2⁻¹⁵ of it have an error of at most a sixteenth of their value.
    ///
    /// The codes of a [non-negative](crate::Slot::non_negative) slot have no sign and 5 bits of exponent,
    /// down to 2⁻³¹. Only 0 becomes 0. A number is rounded up or down at random, by at most an eighth, so
    /// that a mean that moves by a thousandth in a step does move. A hash of the number decides, so every run
    /// rounds alike.
    ///
    /// Tensors with fewer than 4096 elements, such as biases, stay in F32, because 8 bits save little there.
    /// The size of the whole tensor decides, however it is divided among ranks. Infinity and NaN have codes
    /// of their own and change no other number of their block. In a checkpoint a block is a row of 132 bytes:
    /// its scale as a little-endian f32, then the codes.
    Q8,
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
