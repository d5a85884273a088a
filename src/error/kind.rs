//! Kinds of errors, for a program to decide on.

/// What kind of thing went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A tensor is not what it has to be: a gradient, a parameter, a master, state, or one of a file.
    ///
    /// It has another shape, dtype or device, is not there, or has a number that is too large for the dtype in
    /// which it is to be stored.
    Tensor,
    /// A tensor, or the norm of a gradient, has a number that is infinite or NaN.
    NotFinite,
    /// What the program chose makes no sense: a hyper-parameter, a schedule, a pattern, a configuration.
    ///
    /// It is out of range, of another type, or cannot be set here.
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
    /// An error of another library, such as a tensor operation of candle's that failed, or of a rule outside of
    /// this crate.
    Other,
}
