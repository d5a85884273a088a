//! What can go wrong, with the facts and the remedy.

mod checkpoint;
mod climb;
mod configuration;
mod context;
mod into_candle;
mod masters;
mod matrices;
mod messages;
mod names;
mod patterns;
mod precision;
#[cfg(feature = "printed")]
mod printing;
mod schedules;
mod shown;
mod slices;
mod state;
mod storage;
mod structure;
#[cfg(feature = "torch")]
mod torch;
mod weights;
mod world;

use std::path::PathBuf;

use candle_core::{DType, DeviceLocation, Shape};

#[cfg(feature = "printed")]
pub use self::printing::PrintingError;
#[cfg(feature = "torch")]
pub use self::torch::TorchError;
pub use self::{
    checkpoint::CheckpointError,
    climb::ClimbError,
    configuration::ConfigurationError,
    masters::MasterError,
    matrices::MatrixError,
    patterns::PatternError,
    precision::PrecisionError,
    schedules::ScheduleError,
    slices::SliceError,
    state::StateError,
    storage::StorageError,
    structure::StructureError,
    weights::WeightsError,
    world::{CommunicationError, RanksError},
};
pub(crate) use names::listed;
use names::{inside, meant};
use shown::errors;

use crate::field::FieldValue;

/// The result of this crate's functions. With a second argument it is the standard library's: `use
/// optimisers::*` takes nothing away from a program that writes `Result<T, E>`.
pub type Result<T, E = Error> = std::result::Result<T, E>;

errors! {
/// Everything that this crate refuses, and what a device may fail at.
///
/// Bad input is refused before anything is written: after an error from [`update`](crate::update) the model and the state are
/// as they were, unless a device failed [in the middle](crate::update#what-is-left-in-the-middle).
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),

    /// A hyper-parameter has a value outside its range.
    #[error("{rule}: {field} is {value}, expected {expected}")]
    HyperParameter {
        /// The rule.
        rule: String,
        /// The hyper-parameter.
        field: String,
        /// Its value.
        value: FieldValue,
        /// The range.
        expected: String,
    },

    /// A name that no rule in reach has.
    #[error("no rule here has a field {name:?}{}; there are: {}", meant(name, available), available.join(", "))]
    UnknownField {
        /// The name.
        name: String,
        /// The names that exist.
        available: Vec<String>,
    },

    /// A hyper-parameter was given a value of another type.
    #[error("{rule}: {field} takes {expected}, got {got}; the fields are: {}", available.join(", "))]
    FieldType {
        /// The rule.
        rule: String,
        /// The hyper-parameter.
        field: String,
        /// Its type.
        expected: &'static str,
        /// What was given.
        got: Box<FieldValue>,
        /// The names that exist.
        available: Vec<String>,
    },

    /// Learning rates of which the one that is asked for cannot be made.
    #[error(
        "{rule} has several learning rates ({}), and {conflict}",
        members.iter().map(|(place, value)| format!("{place} = {value}")).collect::<Vec<_>>().join(", ")
    )]
    ConflictingRates {
        /// The rule.
        rule: String,
        /// The places of the learning rates in it, and their values.
        members: Vec<(String, FieldValue)>,
        /// What does not go together, and what to do.
        conflict: String,
    },

    /// A field that decides what the state looks like cannot be adjusted.
    #[error("{rule}: {field} decides the layout of the state and cannot be adjusted; set up a new state, or give the parameters another rule by `Selection::replace`. Adjustable: {}", available.join(", "))]
    FixedField {
        /// The rule.
        rule: String,
        /// The field.
        field: String,
        /// The names that can be adjusted.
        available: Vec<String>,
    },

    /// A rule whose [`describe`](crate::Describe::describe) cannot be made sense of.
    #[error("`Describe::describe` of {} is wrong: {fault}", if rule.is_empty() { "a rule" } else { rule })]
    Description {
        /// The rule's kind; empty if it says none.
        rule: String,
        /// What is wrong, and what to do.
        fault: &'static str,
    },

    /// The model has no trainable parameter.
    #[error("the model has no trainable floating-point variable; make its tensors `Var`s (a `VarMap` does), or choose fewer to leave out")]
    EmptyModel,

    /// A variable whose dtype no rule can train.
    #[error("parameter {path:?} has dtype {dtype:?}, expected F16, BF16, F32 or F64; convert it, or leave it out with `setup_with`")]
    UnsupportedDtype {
        /// The parameter.
        path: String,
        /// Its dtype.
        dtype: DType,
    },

    /// A state does not fit its rule or its parameter.
    #[error(transparent)]
    State(#[from] StateError),

    /// Two different variables with one path.
    #[error("two variables of the model have the path {path:?}; rename one")]
    DuplicatePath {
        /// The path.
        path: String,
    },

    /// Different optimisers for the paths of one parameter.
    #[error(fmt = messages::tied_choices)]
    TiedChoices {
        /// Two paths of the parameter.
        paths: [String; 2],
        /// What was chosen for each.
        chosen: [String; 2],
    },

    /// The model has a variable that the state does not know.
    #[error(fmt = messages::unknown_parameter)]
    UnknownParameter {
        /// The parameter's path in the model.
        path: String,
    },

    /// The state has a leaf that the model lacks.
    #[error("the state has a leaf {path:?} that the model lacks: pass the model that `setup` saw, or `remove` the leaf")]
    MissingParameter {
        /// The leaf.
        path: String,
    },

    /// A new path that exists already.
    #[error("the state knows the path {path:?} already; rename or remove the old parameter first (or `rebind` the state to a new model)")]
    PathTaken {
        /// The path.
        path: String,
    },

    /// Two variables in the place of one.
    #[error(fmt = messages::untied)]
    Untied {
        /// A path of the state's variable.
        first: String,
        /// Another.
        second: String,
    },

    /// A variable of another shape or dtype than the one that the state was made for.
    #[error("parameter {path:?} is {:?} of {:?} in the model, expected {:?} of {:?}", got.1, got.0, expected.1, expected.0)]
    OtherParameter {
        /// The parameter.
        path: String,
        /// The shape and dtype of the state's parameter.
        expected: (Shape, DType),
        /// The model's.
        got: (Shape, DType),
    },

    /// A gradient for a name that the state does not know.
    #[error("gradient for {path:?}, but the state has no such parameter; there are: {}", available.join(", "))]
    UnknownGradient {
        /// The name.
        path: String,
        /// Some names that exist.
        available: Vec<String>,
    },

    /// Two gradients for one path in a list.
    #[error("there are two gradients for {path:?} in the list; add them up, or leave one out")]
    DuplicateGradient {
        /// The path.
        path: String,
    },

    /// A gradient or a result of another shape than its parameter.
    #[error("gradient of {path:?} has shape {got:?}, expected the parameter's {expected:?}")]
    GradientShape {
        /// The parameter.
        path: String,
        /// Its shape.
        expected: Shape,
        /// The gradient's shape.
        got: Shape,
    },

    /// A gradient on another device than its parameter.
    #[error("gradient of {path:?} is on {got:?}, expected the parameter's {expected:?}; move it with `to_device`")]
    GradientDevice {
        /// The parameter.
        path: String,
        /// Its device.
        expected: DeviceLocation,
        /// The gradient's device.
        got: DeviceLocation,
    },

    /// A gradient that is not floating-point.
    #[error("gradient of {path:?} has dtype {got:?}, expected F16, BF16, F32 or F64")]
    GradientDtype {
        /// The parameter.
        path: String,
        /// The gradient's dtype.
        got: DType,
    },

    /// No leaf has a gradient.
    #[error(fmt = messages::no_gradients)]
    NoGradients {
        /// How many parameters the state has.
        leaves: usize,
    },

    /// Leaves without a gradient in a state that requires all.
    #[error(fmt = messages::missing_gradients)]
    MissingGradients {
        /// How many.
        missing: usize,
        /// How many parameters the state has.
        leaves: usize,
        /// Their paths, or the first of them.
        paths: Vec<String>,
    },

    /// A norm is infinite or NaN, and the rule is to refuse it.
    #[error(fmt = messages::non_finite_norm)]
    NonFiniteNorm {
        /// The parameter, or the first offending one of the whole model.
        path: String,
        /// The norm.
        norm: f64,
        /// Its exponent.
        p: f64,
    },

    /// An update through a loss scaler whose loss was not scaled.
    #[error(fmt = messages::unscaled_loss)]
    UnscaledLoss,

    /// Gradients that overflow even with the smallest loss scale.
    #[error(fmt = messages::loss_scale_floor)]
    LossScaleFloor {
        /// The first offending parameter.
        path: String,
        /// The floor.
        floor: f64,
    },

    /// Masters or twins do not fit their parameters.
    #[error(transparent)]
    Master(#[from] MasterError),

    /// A parameter is not made of the matrices that its rule works on.
    #[error(transparent)]
    Matrix(#[from] MatrixError),

    /// No rule keeps averages.
    #[error("no parameter has an average: add `Ema` or `UniformAverage` to the end of the chain, or take `ScheduleFree`")]
    NoAverages,

    /// Averages, or what [`Sam`](crate::Sam) has moved the parameters to, stand in the model where its parameters are needed.
    #[error(fmt = messages::averages_in_model)]
    AveragesInModel {
        /// The first such parameter.
        path: String,
    },

    /// A flat vector or a model does not fit what `destructure` gave.
    #[error(transparent)]
    Structure(#[from] StructureError),

    /// A path, prefix or predicate that selects no leaf.
    #[error("{selection} selects no leaf; there are: {}", available.join(", "))]
    EmptySelection {
        /// What was asked for.
        selection: String,
        /// Some paths that exist.
        available: Vec<String>,
    },

    /// A parameter's setup failed.
    #[error("parameter {path:?}: {source}")]
    Parameter {
        /// The parameter.
        path: String,
        /// What went wrong.
        source: Box<Error>,
    },

    /// A checkpoint could not be written or taken over.
    #[error("checkpoint {}: {source}", file.display())]
    Checkpoint {
        /// The file.
        file: PathBuf,
        /// What went wrong.
        source: Box<CheckpointError>,
    },

    /// Weights could not be read or taken over.
    #[error("weights {}: {source}", files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", "))]
    Weights {
        /// The file, or all files where it is in none.
        files: Vec<PathBuf>,
        /// What went wrong.
        source: Box<WeightsError>,
    },

    /// The state of torch's optimiser could not be read, taken over or written.
    #[error("torch state {}: {_1}", _0.display())]
    Torch(PathBuf, #[source] Box<TorchError>) if "torch",

    /// Parameters or layers cannot have a precision.
    #[error(transparent)]
    Precision(#[from] PrecisionError),

    /// A step cannot be printed as one kernel.
    #[error(transparent)]
    Printing(#[from] PrintingError) if "printed",

    /// A scheduler does not drive what it is to.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),

    /// A model cannot be moved along its gradient.
    #[error(transparent)]
    Climb(#[from] ClimbError),

    /// Patterns do not decide over the parameters.
    #[error(transparent)]
    Pattern(#[from] PatternError),

    /// A part of a configuration is wrong.
    #[error("configuration{}: {source}", inside(.place))]
    Configuration {
        /// The part, such as `[1].AdamW.beta`; empty for the whole.
        place: String,
        /// What is wrong with it.
        source: Box<ConfigurationError>,
    },

    /// What the ranks of a job cannot do together.
    #[error(transparent)]
    Ranks(#[from] RanksError),

    /// Memory that a caller lends is not what it is said to be.
    #[error(transparent)]
    Slice(#[from] SliceError),

    /// The memory of a tensor is not what the tensor says.
    #[error(transparent)]
    Storage(#[from] StorageError),

    /// The ranks of a job cannot communicate.
    #[error(transparent)]
    Communication(#[from] CommunicationError),

    /// An error of another library or of a rule outside this crate.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}
}
