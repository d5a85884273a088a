use candle_core::Shape;

/// Memory that a caller lends is not what it is said to be.
#[derive(Debug, thiserror::Error)]
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

    /// Something other than an update or a reading of initial values was asked of slices.
    #[error("this needs candle variables, got `ParameterSlices`: call it with what `ParameterSlices::with_variables` gives")]
    NeedsVariables,

    /// A state that is divided among ranks.
    #[error(
        "parameters in slices cannot be updated over several ranks yet; train candle variables there, or one rank per process with gradients added up before"
    )]
    Ranks,
}
