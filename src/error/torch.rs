use std::io;

use candle_core::{DType, Shape};

use super::shown::errors;

errors! {
/// Why the state of torch's optimiser was not read, taken over or written. The state here is as it was then.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum TorchError {
    /// The file system failed.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// What went wrong.
        source: io::Error,
    },

    /// Neither of the formats, or a damaged or truncated file.
    #[error("neither a whole safetensors file nor one that `torch.save` writes since torch 1.6: {reason}")]
    Format {
        /// What is wrong with it.
        reason: String,
    },

    /// A file without the state of an optimiser.
    #[error("no optimiser state in the file: {reason}")]
    NoState {
        /// What was looked for.
        reason: &'static str,
    },

    /// A file with the states of several optimisers, or none at the place that was asked for.
    #[error("the file has optimiser states at {}; name one of these places with `TorchState::open_at`", places.join(", "))]
    Places {
        /// Where they are.
        places: Vec<String>,
    },

    /// Parameters that have numbers for names.
    #[error(
        "the file numbers its {parameters} parameters and does not name them: give their names in the order of the optimiser's groups with `TorchState::named`, or save `param_names` along"
    )]
    NoNames {
        /// How many there are.
        parameters: usize,
    },

    /// More or fewer names than parameters.
    #[error(
        "{names} names for the {parameters} parameters of the file: name all that the optimiser has, in the order of its groups, frozen ones too"
    )]
    Names {
        /// How many names were given.
        names: usize,
        /// How many parameters there are.
        parameters: usize,
    },

    /// A parameter that the state lacks.
    #[error(
        "the file has a parameter {name:?} that the state lacks; it has: {}. Where only the names differ, `TorchState::renamed` translates them",
        available.join(", ")
    )]
    UnknownParameter {
        /// Its name in the file.
        name: String,
        /// Some that the state has.
        available: Vec<String>,
    },

    /// A parameter that the file lacks.
    #[error(
        "no parameter {path:?} in the file; it has: {}. Where only the names differ, `TorchState::renamed` translates them",
        available.join(", ")
    )]
    MissingParameter {
        /// The parameter.
        path: String,
        /// Some that the file has.
        available: Vec<String>,
    },

    /// Two parameters of the file that are one in the state.
    #[error("two parameters of the file are {path:?} in the state; name each once")]
    Twice {
        /// The parameter.
        path: String,
    },

    /// A hyper-parameter that is missing or of another type.
    #[error("the file's {key} is {found}, expected {expected}")]
    Setting {
        /// torch's name for it.
        key: String,
        /// What the file has.
        found: String,
        /// Its type.
        expected: &'static str,
    },

    /// An optimiser that has no counterpart here.
    #[error(
        "no rule here continues an optimiser with the hyper-parameters {}; there are counterparts of Adam, AdamW, SGD, RMSprop, Adagrad and Lion",
        keys.join(", ")
    )]
    UnknownOptimiser {
        /// Its hyper-parameters.
        keys: Vec<String>,
    },

    /// A parameter whose rule has no counterpart in torch, or several.
    #[error("parameter {path:?}: {rule} has {found}; torch's counterparts are {expected}")]
    NoCounterpart {
        /// The parameter.
        path: String,
        /// The optimiser here.
        rule: String,
        /// None, or which rules.
        found: String,
        /// The rules that have one.
        expected: &'static str,
    },

    /// A parameter with another optimiser.
    #[error("parameter {path:?}: the file is of torch's {torch}, and {rule} continues its {here}; set up {remedy}")]
    OtherRule {
        /// The parameter.
        path: String,
        /// The optimiser of the file.
        torch: String,
        /// The optimiser here.
        rule: String,
        /// What it is the counterpart of.
        here: String,
        /// What continues the file's.
        remedy: String,
    },

    /// A hyper-parameter with another value, or a definition that is another.
    #[error("parameter {path:?}: torch's {key} is {torch} in the file and {here} here; {remedy}")]
    Differs {
        /// The parameter.
        path: String,
        /// torch's name for it.
        key: String,
        /// Its value in the file.
        torch: String,
        /// What the rule here has for it.
        here: String,
        /// What can be done.
        remedy: &'static str,
    },

    /// What the hyper-parameters here do not say in torch's.
    #[error("parameter {path:?}: torch has no counterpart of {what}")]
    Unrepresentable {
        /// The parameter.
        path: String,
        /// What it is.
        what: String,
    },

    /// Parameters of several optimisers.
    #[error("{first:?} is trained as by torch's {}, {second:?} as by its {}: one optimiser there is of one kind", kinds.0, kinds.1)]
    Kinds {
        /// A parameter.
        first: String,
        /// Another.
        second: String,
        /// Their optimisers in torch.
        kinds: (&'static str, &'static str),
    },

    /// An entry that the file lacks, or that no rule here takes.
    #[error("parameter {path:?}: the file {problem} {key:?}; it has: {}", available.join(", "))]
    Entry {
        /// The parameter.
        path: String,
        /// torch's name for the entry.
        key: String,
        /// What the file does: lack it, or have it without need.
        problem: &'static str,
        /// What it has of this parameter.
        available: Vec<String>,
    },

    /// An entry that is no tensor or number that can be read.
    #[error("parameter {path:?}: {key} is {found}, expected {expected}")]
    Value {
        /// The parameter.
        path: String,
        /// torch's name for the entry.
        key: String,
        /// What the file has.
        found: String,
        /// What it should be.
        expected: &'static str,
    },

    /// A tensor of another shape than its parameter.
    #[error("parameter {path:?}: {key} has shape {found:?} in the file, expected {expected:?}: it belongs to another parameter")]
    Shape {
        /// The parameter.
        path: String,
        /// torch's name for the entry.
        key: String,
        /// Its shape in the file.
        found: Shape,
        /// The parameter's.
        expected: Shape,
    },

    /// A number that no sound state has.
    #[error("parameter {path:?}: {key} has {value} at element {index}, expected {expected} that {dtype:?} can hold")]
    Number {
        /// The parameter.
        path: String,
        /// torch's name for the entry.
        key: String,
        /// The first offending element, in the order in which they are stored.
        index: usize,
        /// Its value.
        value: f64,
        /// What it should be.
        expected: &'static str,
        /// The dtype in the state.
        dtype: DType,
    },
}
}
