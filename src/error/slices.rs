use candle_core::{DType, Shape};

use super::shown::errors;

errors! {
/// Memory that a caller lends is not what it is said to be.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum SliceError {
    /// A slice with another number of elements than its shape.
    #[error("parameter {path:?} of shape {shape:?} has {expected} elements, got a slice of {got}")]
    Length {
        /// The parameter.
        path: String,
        /// Its shape.
        shape: Shape,
        /// How many elements that is.
        expected: usize,
        /// How many the slice has.
        got: usize,
    },

    /// Bytes of a dtype that parameters and gradients do not have.
    #[error("memory of {dtype:?} cannot be lent, expected F16, BF16, F32 or F64")]
    Dtype {
        /// The dtype that was named.
        dtype: DType,
    },

    /// Bytes that end within a number.
    #[error("{got} bytes are no whole number of {dtype:?}, which has {}", dtype.size_in_bytes())]
    Bytes {
        /// The dtype that was named.
        dtype: DType,
        /// How many bytes there are.
        got: usize,
    },

    /// Bytes that begin where a number of the dtype may not.
    #[error("bytes of {dtype:?} have to begin at a multiple of {} in memory; copy them to a vector of the dtype", dtype.size_in_bytes())]
    Alignment {
        /// The dtype that was named.
        dtype: DType,
    },

    /// Something that works with candle's variables alone was asked of other memory.
    #[error("this needs candle variables, and {path:?} is memory of another kind")]
    NeedsVariables {
        /// The parameter.
        path: String,
    },
}
}
