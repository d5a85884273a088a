use std::io;

use candle_core::{DType, Shape};

use super::shown::errors;

errors! {
/// Why a checkpoint was not written or not taken over. Nothing has changed then: not the old file, not the state, not the model. Where only the flush of the
/// folder failed, the new file is in its place, and the message says so.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system failed.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// What went wrong.
        source: io::Error,
    },

    /// Not a safetensors file, or a damaged or truncated one.
    #[error("not a whole safetensors file, so truncated, damaged or of another format: {source}")]
    Format {
        /// What is wrong with it.
        source: safetensors::SafeTensorError,
    },

    /// A safetensors file that no checkpoint of this crate is.
    #[error("a safetensors file without optimiser state (its metadata has no \"optimisers\"); for plain weights use `Weights`")]
    NotACheckpoint,

    /// Another version of the format.
    #[error("format version {found}, this crate reads {supported}; the file was written by optimisers {by}, which reads it")]
    Version {
        /// The file's version.
        found: u64,
        /// The version that can be read.
        supported: u64,
        /// The version of the crate that wrote it.
        by: String,
    },

    /// The description of the state cannot be read.
    #[error("the description of the state is damaged: {reason}")]
    Record {
        /// What is wrong with it.
        reason: String,
    },

    /// The file is not what was written.
    #[error(
        "checksum {found}, expected {expected}: the file was damaged or edited; after an edit on purpose read it with `CheckpointFile::open_edited`"
    )]
    Checksum {
        /// The checksum of what the file holds.
        found: String,
        /// The one it should have.
        expected: String,
    },

    /// A parameter of the state that the file lacks.
    #[error("no parameter {path:?} in the file; it has: {}", available.join(", "))]
    MissingParameter {
        /// The parameter.
        path: String,
        /// Some that the file has.
        available: Vec<String>,
    },

    /// A parameter in the file that the state lacks.
    #[error("the file has a parameter {path:?} that the {place} lacks: it belongs to another model; pass the model that it was saved with")]
    ExtraParameter {
        /// The parameter.
        path: String,
        /// State or model.
        place: &'static str,
    },

    /// A parameter with another optimiser.
    #[error("parameter {path:?} has {expected}, the file's has {found}{difference}; set up the state with the rule of the file{remedy}")]
    OtherRule {
        /// The parameter.
        path: String,
        /// The optimiser in the state.
        expected: String,
        /// The optimiser in the file.
        found: String,
        /// Where they differ.
        difference: String,
        /// What else can be done.
        remedy: &'static str,
    },

    /// Hyper-parameters or counters that do not fit the rule of that name.
    #[error(
        "parameter {path:?}: the file's {rule} has the {what} {found:?}, expected {expected:?}: it was written by another version of the rule"
    )]
    OtherNames {
        /// The parameter.
        path: String,
        /// The rule.
        rule: String,
        /// Fields, tensors or counters.
        what: &'static str,
        /// The names in the file.
        found: Vec<String>,
        /// The names of the rule.
        expected: Vec<String>,
    },

    /// A hyper-parameter of another type.
    #[error("parameter {path:?}: the file's {rule}.{field} is not {expected}")]
    FieldType {
        /// The parameter.
        path: String,
        /// The rule.
        rule: String,
        /// The hyper-parameter.
        field: String,
        /// Its type.
        expected: &'static str,
    },

    /// A hyper-parameter outside of its range.
    #[error("parameter {path:?}: {source}")]
    Field {
        /// The parameter.
        path: String,
        /// What is wrong with it.
        source: Box<crate::Error>,
    },

    /// A tensor that the file's description names and the file lacks, or the other way round.
    #[error("the file {problem} the tensor {entry:?}")]
    Entry {
        /// The tensor's name.
        entry: String,
        /// What the file does: lack it, or have it without need.
        problem: &'static str,
    },

    /// A tensor of another shape.
    #[error(
        "{entry:?} has shape {found:?} in the file, expected {expected:?}: it belongs to another model; pass the model that it was saved with"
    )]
    Shape {
        /// The tensor's name.
        entry: String,
        /// Its shape in the file.
        found: Shape,
        /// The shape in the state or model.
        expected: Shape,
    },

    /// A tensor of another dtype.
    #[error("{entry:?} is {found} in the file, expected {expected:?}; to convert on purpose call `CheckpointFile::converting` first")]
    Dtype {
        /// The tensor's name.
        entry: String,
        /// Its dtype in the file.
        found: String,
        /// The dtype in the state or model.
        expected: DType,
    },

    /// A parameter of another dtype, with an optimiser whose state is bound to it.
    #[error(
        "{entry:?} is {found} in the file, expected {expected:?}: what {by} keeps cannot be converted; restore with the dtype of the file, and then replace the rule"
    )]
    FixedDtype {
        /// The parameter.
        entry: String,
        /// Its dtype in the file.
        found: String,
        /// Its dtype in the state.
        expected: DType,
        /// The optimiser.
        by: String,
    },

    /// A number that is infinite or NaN.
    #[error("{entry:?} has {value} at element {index}; to take it over all the same call `CheckpointFile::accepting_non_finite` first")]
    NonFinite {
        /// The tensor's name.
        entry: String,
        /// The first offending element, in row-major order.
        index: usize,
        /// Its value.
        value: f64,
    },

    /// A block of numbers in 8 bits with a negative unit.
    #[error(
        "{entry:?} has the scale {scale} in block {block}, which no numbers have; the file is damaged or was not written by this crate"
    )]
    Scale {
        /// The tensor's name.
        entry: String,
        /// The first offending block.
        block: usize,
        /// Its scale.
        scale: f32,
    },

    /// A number that the new dtype can only hold as an infinity.
    #[error(
        "{entry:?} has {value} at element {index}, which is too large for {dtype:?}; to make it infinite call `CheckpointFile::accepting_non_finite` first"
    )]
    TooLarge {
        /// The tensor's name.
        entry: String,
        /// The first offending element, in row-major order.
        index: usize,
        /// Its value.
        value: f64,
        /// The dtype that it is converted to.
        dtype: DType,
    },

    /// Parameters are asked for, and the file has only the state.
    #[error(
        "the file has no model, only optimiser state; save it with `Checkpoint::model`, or load the parameters from elsewhere and use `restore`"
    )]
    NoModel,

    /// A conversion that needs to write parameters, without a model.
    #[error(
        "parameter {path:?}: the file has a master and the state has none, so the parameter itself has to take its place; pass the model with `restore_with_model`"
    )]
    MasterNeedsModel {
        /// The parameter.
        path: String,
    },

    /// A conversion that needs to make a master, from a file without parameters.
    #[error("parameter {path:?}: the file has neither a master nor the parameter itself; save it with `Checkpoint::model`")]
    NoMaster {
        /// The parameter.
        path: String,
    },

    /// Two tensors with one name in the file.
    #[error("two tensors would have the name {entry:?} in the file; rename a parameter")]
    DuplicateEntry {
        /// The name.
        entry: String,
    },

    /// More names, hyper-parameters and notes than the header of a safetensors file can hold.
    #[error(
        "names, hyper-parameters and notes would take {bytes} bytes, and no safetensors file can have more than {largest}; save shorter notes, or keep them in a file of their own"
    )]
    HeaderTooLarge {
        /// What they would take.
        bytes: usize,
        /// What they may take.
        largest: usize,
    },

    /// A parameter of a dtype that files cannot hold.
    #[error("{entry:?} has dtype {dtype:?}, which cannot be saved")]
    UnsupportedDtype {
        /// The tensor's name.
        entry: String,
        /// Its dtype.
        dtype: DType,
    },

    /// Parameters and masters in the file that do not belong together.
    #[error(
        "parameter {path:?} is {parameter} at element {index} in the file and its master {master}: it was changed outside of `update` before it was saved. Use `restore`, load the parameters by themselves, and call `refresh_masters` or `Update::keep_masters`"
    )]
    StaleMaster {
        /// The parameter.
        path: String,
        /// The first element that differs.
        index: usize,
        /// Its value in the parameter.
        parameter: f64,
        /// Its value in the master.
        master: f64,
    },
}
}
