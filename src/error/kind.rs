//! Kinds of errors, for a program to decide on.

/// What kind of thing went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A tensor is not what it has to be: a gradient, a parameter, a master, state, or one of a file.
    Tensor(TensorProblem),
    /// A hyper-parameter, or another number or dtype, is out of range, of another type, or fixed.
    ///
    /// The program chose it.
    Argument,
    /// Nothing has this name: a parameter, a field, a rule, a key.
    /// [`Error::expected`](crate::Error::expected) lists what there is.
    UnknownName,
    /// The model is not the one that the state was made for, or no state can be made for it.
    Model,
    /// A parameter or a copy of it was changed outside of `update`, which would overwrite the change.
    Changed,
    /// No parameter has a gradient, or one that is required has none.
    NoGradient,
    /// The loss was not scaled, or its scale is at its floor.
    LossScale,
    /// Memory is not what its tensor or its owner says.
    Memory,
    /// Code outside of this crate does not keep to a trait: a rule, a model, or gradients.
    Contract,
    /// What was asked for cannot be done for this optimiser, parameter or state.
    Unsupported,
    /// A schedule or plateau cannot drive the hyper-parameters that it is for.
    Schedule,
    /// A configuration, or a pattern for paths, makes no sense.
    Configuration,
    /// A file cannot be opened, read or written.
    Io,
    /// A file is damaged, of another format, or lacks what it should have.
    File,
    /// A file is of another rule, or of other settings of it.
    OtherRule,
    /// Ranks do not do the same, or another rank refuses.
    Ranks,
    /// The ranks cannot communicate.
    Communication,
    /// A tensor operation of candle's failed, on a device for example.
    Candle,
    /// An error of another library, or of a rule outside of this crate.
    Other,
}

/// What is wrong with a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TensorProblem {
    /// It has another shape than expected.
    Shape,
    /// It has another dtype than expected.
    Dtype,
    /// It is on another device than expected.
    Device,
    /// It has a number that is infinite or NaN.
    NotFinite,
    /// It has a number that is too large for the dtype in which it is to be stored.
    TooLarge,
    /// It is not there.
    Missing,
}
