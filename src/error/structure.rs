use candle_core::{DType, Shape};

use super::shown::errors;

errors! {
/// A flat vector or a model does not fit what [`destructure`](crate::destructure) gave.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StructureError {
    /// A flat vector of another shape than `destructure` gave.
    #[error("the flat vector has shape {got:?}, expected {expected:?}: pass one as long as `destructure` gave")]
    FlatShape {
        /// The vector's shape in the structure.
        expected: Shape,
        /// The shape of what was given.
        got: Shape,
    },

    /// A flat vector of another dtype than `destructure` gave.
    #[error("the flat vector has dtype {got:?}, expected {expected:?}; convert it with `to_dtype`")]
    FlatDtype {
        /// The vector's dtype in the structure.
        expected: DType,
        /// The dtype of what was given.
        got: DType,
    },

    /// A model with other parameters, or other ties between them, than a structure.
    #[error(
        "parameter {path:?} has the paths {got:?} in the model, expected {expected:?}: pass the model that `destructure` saw, or its equal"
    )]
    OtherPaths {
        /// The first parameter that differs.
        path: String,
        /// All its paths in the structure; none if it is not there.
        expected: Vec<String>,
        /// All its paths in the model; none if it is not there.
        got: Vec<String>,
    },
}
}
