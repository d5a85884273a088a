use candle_core::DType;

use super::shown::errors;

errors! {
/// What a choice of precisions, or of dtypes for gradients, is refused for.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PrecisionError {
    /// A dtype that the parameters or the arithmetic cannot have there.
    #[error("{place} asks for {got:?}, expected {expected}")]
    Dtype {
        /// What asks for it: a pattern, an adaptor or a function.
        place: String,
        /// The dtype.
        got: DType,
        /// The dtypes that are possible.
        expected: &'static str,
    },

    /// A parameter below an [`Autocast`](crate::Autocast) that is not F32.
    #[error(
        "parameter {path:?} of a layer with automatic casts is {got:?}, expected F32: make it with a builder of F32, or, where parameters are to be {got:?}, use `InDtype`"
    )]
    NotF32 {
        /// The parameter.
        path: String,
        /// Its dtype.
        got: DType,
    },

    /// A layer that keeps statistics of its inputs, in place of one that is made anew for each forward pass.
    #[error(
        "{path:?} is a running statistic, which would be forgotten: a layer with automatic casts is made anew in each forward pass; leave {layer} out of the list"
    )]
    RunningStatistics {
        /// The statistic.
        path: String,
        /// The layer's type.
        layer: &'static str,
    },

    /// A constructor that does not ask for the same tensors each time.
    #[error(
        "the constructor of {layer} asks for {path:?} in a forward pass, and did not when the layer was made; it must do the same each time. Known: {}",
        known.join(", ")
    )]
    Unforeseen {
        /// The tensor.
        path: String,
        /// The layer's type.
        layer: &'static str,
        /// The tensors that it asked for at first.
        known: Vec<String>,
    },
}
}

impl PrecisionError {
    /// A dtype that the engines do not compute with.
    pub(crate) fn unsupported(place: impl Into<String>, got: DType) -> Self {
        PrecisionError::Dtype { place: place.into(), got, expected: "F16, BF16, F32 or F64" }
    }
}
