//! Dtypes of candle's that [`DType`](super::DType) has no name for.

use std::fmt;

/// A dtype of candle's that [`DType`](super::DType) does not name.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct OtherDType(pub(super) candle_core::DType);

impl OtherDType {
    /// The name in lower case, the size in bytes, and whether the dtype is a floating-point type.
    pub(super) fn facts(self) -> (&'static str, usize, bool) {
        (self.0.as_str(), self.0.size_in_bytes(), self.0.is_float())
    }
}

impl fmt::Debug for OtherDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
