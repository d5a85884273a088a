use std::io;

use candle_core::{DType, Shape};

use super::shown::errors;

errors! {
/// Why weights cannot be read or taken over. Nothing has changed then.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The file system failed.
    #[error("cannot read the file: {source}")]
    Io {
        /// What went wrong.
        source: io::Error,
    },

    /// Not a safetensors file, or a damaged or truncated one.
    #[error("not a whole safetensors file, so truncated, damaged or of another format: {source}")]
    Format {
        /// What is wrong with it.
        source: safetensors::SafeTensorError,
    },

    /// A tensor that two files have.
    #[error("more than one file has a tensor {name:?}; pass the parts of one model only")]
    TwoFiles {
        /// The tensor.
        name: String,
    },

    /// A parameter that no file has.
    #[error("no tensor {path:?}; there are: {}", available.join(", "))]
    Missing {
        /// The parameter.
        path: String,
        /// Some tensors that there are.
        available: Vec<String>,
    },

    /// A tensor of another shape than its parameter.
    #[error("{path:?} has shape {found:?} in the file, expected {expected:?}: it belongs to another model")]
    Shape {
        /// The parameter.
        path: String,
        /// The shape in the file.
        found: Shape,
        /// The parameter's shape.
        expected: Shape,
    },

    /// A tensor of a dtype that is not converted to the parameter's.
    #[error("{path:?} is {found} in the file, and the parameter {expected:?}; only F16, BF16, F32 and F64 are converted into each other")]
    Dtype {
        /// The parameter.
        path: String,
        /// The dtype in the file.
        found: String,
        /// The parameter's dtype.
        expected: DType,
    },

    /// A number that is infinite or NaN.
    #[error("{path:?} has {value} at element {index}; to take it over all the same call `Weights::accepting_non_finite` first")]
    NonFinite {
        /// The parameter.
        path: String,
        /// The first offending element, in row-major order.
        index: usize,
        /// Its value.
        value: f64,
    },

    /// A number that the parameter's dtype can only hold as an infinity.
    #[error(
        "{path:?} has {value} at element {index}, which is too large for {dtype:?}; give the parameter another dtype, or, to make it infinite, call `Weights::accepting_non_finite` first"
    )]
    TooLarge {
        /// The parameter.
        path: String,
        /// The first offending element, in row-major order.
        index: usize,
        /// Its value.
        value: f64,
        /// The parameter's dtype.
        dtype: DType,
    },
}
}
