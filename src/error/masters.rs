use candle_core::{DType, DeviceLocation, Shape};

use super::shown::errors;

errors! {
/// What the precise copies of parameters are refused for: masters, and the pairs of a [`Twin`](crate::Twin).
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum MasterError {
    /// A master copy in a dtype other than F32 and F64.
    #[error("MixedPrecision keeps its copy in F32 or F64, got {got:?}")]
    Dtype {
        /// The dtype asked for.
        got: DType,
    },

    /// A parameter that is no part of an f32.
    #[error("SplitMaster needs BF16 parameters (or F32 and F64, which it leaves alone), got F16; use MixedPrecision or Kahan")]
    SplitDtype,

    /// An `Offload` inside of another.
    #[error("an Offload is inside of another; one keeps the whole state on the CPU already")]
    NestedOffload,

    /// A parameter that was changed since its master was made or written.
    #[error(
        "parameter {path:?} is {parameter} at element {index}, but its master is {master}: it was changed outside of `update`, which would overwrite it. Call `refresh_masters` to go on from the parameters, or `Update::keep_masters` to go on from the masters"
    )]
    Stale {
        /// The parameter.
        path: String,
        /// The first element that differs, of those that were compared.
        index: usize,
        /// Its value in the parameter.
        parameter: f64,
        /// Its value in the master.
        master: f64,
    },

    /// A parameter that was changed between `setup` and its first step, with a rule that keeps a copy of where it starts.
    #[error(
        "parameter {path:?} is {parameter} at element {index}, but {slot:?}, which its rule started as a copy of it, is {copy}: it was changed after the state was made. Call `refresh_masters` to start from the parameters, or `Update::keep_masters` to keep the copy as it is"
    )]
    StaleCopy {
        /// The parameter.
        path: String,
        /// The state tensor.
        slot: String,
        /// The first element that differs.
        index: usize,
        /// Its value in the parameter, or in its master.
        parameter: f64,
        /// Its value in the copy.
        copy: f64,
    },

    /// A low-precision twin that was changed, or whose parameter was.
    #[error(
        "the twin of parameter {path:?} is {twin} at element {index}, but the parameter is {parameter}: one of them was changed outside of `update`. Call `Twin::refresh` to go on from the precise model (`refresh_masters`, if that has new weights), or `Update::keep_masters`, whose step overwrites the twin"
    )]
    StaleTwin {
        /// The parameter.
        path: String,
        /// The first element that differs, of those that were compared.
        index: usize,
        /// Its value in the twin.
        twin: f64,
        /// Its value in the precise model.
        parameter: f64,
    },

    /// A twin that is no low-precision copy of its parameter.
    #[error("the twin of {path:?} is {:?} of {:?}, expected the shape {:?} and a dtype no wider than {:?}", got.1, got.0, expected.0, expected.1)]
    TwinMismatch {
        /// The parameter.
        path: String,
        /// The precise variable's shape and dtype.
        expected: (Shape, DType),
        /// The twin's.
        got: (Shape, DType),
    },

    /// A twin on another device than its parameter.
    #[error("the twin of parameter {path:?} is on {got:?}, expected the parameter's {expected:?}: make both models on one device")]
    TwinDevice {
        /// The parameter.
        path: String,
        /// Its device.
        expected: DeviceLocation,
        /// The twin's device.
        got: DeviceLocation,
    },

    /// A parameter in two pairs of one model.
    #[error("parameter {path:?} has twins in two pairs of this model, of which a step would write one; pass one pair, and `Twin::refresh` the other after the step")]
    TwoTwins {
        /// The parameter.
        path: String,
    },

    /// An optimiser with copies of its own on a model with a twin.
    #[error("parameter {path:?} has a twin, and {optimiser} keeps a copy of its own; use the rule inside it alone")]
    TwinStorage {
        /// The parameter.
        path: String,
        /// The optimiser.
        optimiser: String,
    },

    /// No value for a parameter.
    #[error("no value for the parameter {path:?}; every leaf of the state needs one")]
    Missing {
        /// The parameter.
        path: String,
    },

    /// A value for a parameter that the model lacks.
    #[error("a value for {path:?}, but the model has no such variable; there are: {}", available.join(", "))]
    Unknown {
        /// The name.
        path: String,
        /// Some names that exist.
        available: Vec<String>,
    },

    /// A value that does not fit its parameter.
    #[error("the value for {path:?} is {:?} of {:?}, expected the shape {:?} and a dtype like {:?}", got.1, got.0, expected.0, expected.1)]
    Shape {
        /// The parameter.
        path: String,
        /// Its shape and dtype.
        expected: (Shape, DType),
        /// The value's.
        got: (Shape, DType),
    },

    /// A value that the parameter's dtype can only hold as an infinity.
    #[error(
        "the value for {path:?} has {value} at element {index}, which is too large for {dtype:?}; give the parameter another dtype, or, to make it infinite, take the values from a file with `Weights::accepting_non_finite`"
    )]
    TooLarge {
        /// The parameter.
        path: String,
        /// The first such element, in row-major order.
        index: usize,
        /// Its value.
        value: f64,
        /// The parameter's dtype.
        dtype: DType,
    },

    /// A value that is infinite or NaN.
    #[error("the value for {path:?} has {value} at element {index}")]
    NonFinite {
        /// The parameter.
        path: String,
        /// The first such element, in row-major order.
        index: usize,
        /// Its value.
        value: f64,
    },
}
}
