//! Dtypes that [`DType`](super::DType) has no name for: without candle there is none.

/// None.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Other {}

impl Other {
    pub(super) fn as_str(self) -> &'static str {
        match self {}
    }

    pub(super) fn size_in_bytes(self) -> usize {
        match self {}
    }

    pub(super) fn is_float(self) -> bool {
        match self {}
    }
}
