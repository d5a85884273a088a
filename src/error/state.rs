use candle_core::{DType, DeviceLocation, Shape};

use super::shown::errors;

errors! {
/// A state that does not fit its rule or its parameter.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// A state tensor is to be stored in a way that the engines do not compute with, or that cannot hold its numbers.
    #[error("state tensor {slot:?} is to be stored as {format}, expected {expected}")]
    Format {
        /// The state tensor.
        slot: String,
        /// The dtype, or the name of the format.
        format: String,
        /// What is possible.
        expected: &'static str,
    },

    /// A choice between rules that was not made for the parameter.
    #[error("{rule} has not chosen for its parameter: the rule around it has to name it in `Describe::describe`")]
    Unsettled {
        /// The rule.
        rule: String,
    },

    /// A state tensor by a name that the rule has not.
    #[error("{rule} has no state tensor {slot:?}; it has: {}", available.join(", "))]
    Unknown {
        /// The name.
        slot: String,
        /// The rule.
        rule: String,
        /// The names that exist.
        available: Vec<String>,
    },

    /// A rule replaced a state tensor by one of another shape.
    #[error("parameter {path:?}: the rule replaced its state tensor {slot:?} of shape {expected:?} by one of shape {got:?}")]
    Shape {
        /// The parameter.
        path: String,
        /// The state tensor.
        slot: String,
        /// Its shape.
        expected: Shape,
        /// The replacement's shape.
        got: Shape,
    },

    /// A function of a rule returned a tensor that cannot stand in the place of the gradient.
    #[error(
        "parameter {path:?}: the function of its rule returned a tensor of shape {:?} and dtype {:?} on {:?}, expected F16, BF16, F32 or F64 of the parameter's shape {:?} on {:?}: mend what the rule gives to `Gradient::with_tensors`",
        got.0, got.1, got.2, expected.0, expected.1
    )]
    Returned {
        /// The parameter.
        path: String,
        /// The parameter's shape and device.
        expected: Box<(Shape, DeviceLocation)>,
        /// The shape, dtype and device of what was returned.
        got: Box<(Shape, DType, DeviceLocation)>,
    },

    /// A rule's sums and what follows from them do not go together.
    #[error("parameter {path:?}: the rule's `Gradient::map_with_sums` {what}: expected {expected}, got {got}")]
    Sums {
        /// The parameter.
        path: String,
        /// What does not fit.
        what: &'static str,
        /// How many there should be.
        expected: usize,
        /// How many there are.
        got: usize,
    },

    /// A rule works on another number of state tensors than it was given.
    #[error(
        "parameter {path:?}: {rule} works on {expected} state tensors, got {}; a rule that holds another must keep the state which that rule's `init` made",
        if got.is_empty() { "none".to_string() } else { got.join(", ") }
    )]
    Count {
        /// The parameter.
        path: String,
        /// The optimiser.
        rule: String,
        /// How many state tensors the arithmetic has.
        expected: usize,
        /// The names of those it was given.
        got: Vec<String>,
    },

    /// A state tensor that does not fit its parameter.
    #[error(
        "parameter {path:?}: {rule} works on its state tensor {slot:?} element by element, so it has to be a float tensor of shape {:?} on {:?}, got {:?} of {:?} on {:?}; a rule that holds another must make its state for the same parameter",
        expected.0, expected.1, got.0, got.1, got.2
    )]
    Misfit {
        /// The parameter.
        path: String,
        /// The optimiser.
        rule: String,
        /// The state tensor.
        slot: String,
        /// The parameter's shape and device.
        expected: Box<(Shape, DeviceLocation)>,
        /// The state tensor's shape, dtype and device.
        got: Box<(Shape, DType, DeviceLocation)>,
    },

    /// A rule works on other parts than its state has.
    #[error(
        "the rule works on {expected} {part}, and its state has {got}: `Rule::init` adds counters by `State::for_slots` or `with_counter`, numbers by `with_number`, and states of the rules that `Describe::describe` names by `with_held`"
    )]
    Parts {
        /// Which parts.
        part: &'static str,
        /// How many the rule works on.
        expected: usize,
        /// How many there are.
        got: usize,
    },

    /// A rule reads a counter or number that its state has not.
    #[error("the state has no {entry} {name:?}; it has: {}; `Rule::init` adds one by `State::with_{entry}`", if available.is_empty() { "none".to_string() } else { available.join(", ") })]
    Entry {
        /// A counter, or a number.
        entry: &'static str,
        /// The name.
        name: String,
        /// The names that exist.
        available: Vec<String>,
    },

    /// A state without those of the rules that its rule holds, or with more.
    #[error(
        "{rule} describes that it holds {expected} rules, and its `init` made the states of {got}: end an `init` of its own with `State::with_held`, once"
    )]
    Held {
        /// The rule.
        rule: String,
        /// How many rules it holds.
        expected: usize,
        /// How many states there are.
        got: usize,
    },

    /// Two entries of a state with one name.
    #[error(
        "the state of {rule} has two entries {name:?}: a rule that is around another lists its own tensors, counters and numbers beside that one's, so give them other names in its `init`"
    )]
    SameName {
        /// The rule.
        rule: String,
        /// The name.
        name: String,
    },

    /// A rule that does not say which of its alternatives acts.
    #[error(
        "{rule} holds alternatives with weights to evaluate with, and does not say which of them acts: let its `evaluation` ask that one, with its state from `State::held`"
    )]
    Alternatives {
        /// The rule.
        rule: String,
    },

    /// A function of a whole tensor that would get a part of it.
    #[error(
        "parameter {path:?}: {rule} says that it is divisible, and plans a function of the whole tensor, which would get a part of it on each rank; let its `is_divisible` say no"
    )]
    DividedFunction {
        /// The parameter.
        path: String,
        /// The rule.
        rule: String,
    },

    /// A state that another rule made.
    #[error("the state is not one that {rule} made; a rule that holds another must keep the state which that rule's `init` made")]
    Foreign {
        /// The rule.
        rule: String,
    },

    /// A state tensor of a rule that is [divisible](crate::Rule::is_divisible), of which a part of a parameter cannot have a part.
    #[error(
        "parameter {path:?}: {rule} says that it is divisible, and its state tensor {slot:?} has shape {got:?} for {elements} elements, not a number for each; let its `is_divisible` say no"
    )]
    Indivisible {
        /// The parameter.
        path: String,
        /// The rule.
        rule: String,
        /// The state tensor.
        slot: String,
        /// How many elements of the parameter this rank has.
        elements: usize,
        /// The state tensor's shape.
        got: Shape,
    },

    /// A parameter without rows.
    #[error("parameter {path:?} has shape {:?}, and its new variable {:?}: a number alone has no rows; `remove` the leaf and `add` it again", shapes[0], shapes[1])]
    NoRows {
        /// The parameter.
        path: String,
        /// Its shape, and that of its new variable.
        shapes: [Shape; 2],
    },

    /// A variable with another number of rows than were described.
    #[error("parameter {path:?} has shape {got:?} in the model, and its rows are described by {rows} entries: give one for each row")]
    RowCount {
        /// The parameter.
        path: String,
        /// How many rows were described.
        rows: usize,
        /// The variable's shape.
        got: Shape,
    },

    /// A row that the old parameter has not.
    #[error("row {row} of parameter {path:?} is to be the old row {old}, and there were {rows}, from 0 on: a new row is `None`")]
    UnknownRow {
        /// The parameter.
        path: String,
        /// The new row.
        row: usize,
        /// What it is said to have been.
        old: usize,
        /// How many rows the old parameter has.
        rows: usize,
    },

    /// A variable with other rows on another device.
    #[error("parameter {path:?} is on {got:?} in the model, expected {expected:?}: resize it there, and move the state by `rebind`")]
    RowDevice {
        /// The parameter.
        path: String,
        /// Where the old parameter is.
        expected: DeviceLocation,
        /// Where the new variable is.
        got: DeviceLocation,
    },

    /// A row that stays with other numbers than it had.
    #[error(
        "row {row} of parameter {path:?} is to be the old row {old}, but has {parameter} where the state has {kept}: copy the row as it was, or pass `None` for it, which makes it a new one. `StateTree::set_masters` changes parameters afterwards"
    )]
    ChangedRow {
        /// The parameter.
        path: String,
        /// The new row.
        row: usize,
        /// What it is said to have been.
        old: usize,
        /// The first number that differs.
        parameter: f64,
        /// The state's number in its place.
        kept: f64,
    },

    /// One variable in the place of two.
    #[error("{:?} and {:?} are two variables in this state and one in the model: untie them there, or `remove` one", paths[0], paths[1])]
    Joined {
        /// A path of each.
        paths: [String; 2],
    },
}
}
