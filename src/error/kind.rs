//! Kinds of errors, for a program to decide on.

/// The kind of an [`Error`](crate::Error).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A tensor (gradient, parameter, master, state, or tensor of a file) has a wrong shape, dtype or device.
    ///
    /// The tensor may also be missing, or have a number that is too large for the dtype that stores it.
    Tensor,
    /// A tensor, or the norm of a gradient, has a number that is infinite or NaN.
    NotFinite,
    /// A hyper-parameter, schedule, pattern or configuration is out of range, of a wrong type, or not
    /// possible for this call.
    Argument,
    /// No parameter, field, state tensor, rule or key has this name.
    /// [`Error::expected`](crate::Error::expected) lists the names that exist.
    UnknownName,
    /// The state was made for another model, or no state can be made for this model.
    Model,
    /// A parameter or its copy was changed outside of `update`, and the call would overwrite the change.
    Changed,
    /// No parameter has a gradient (also on a single rank), or a required gradient is missing.
    NoGradient,
    /// The loss was not scaled, or its scale is at its floor.
    LossScale,
    /// Memory does not have the dtype, length or layout that its tensor or its owner declares.
    Memory,
    /// A device or the CPU has no memory left for a tensor. [`Error::got`](crate::Error::got) has the number
    /// of bytes, if it is known.
    ///
    /// The program can repeat the call once there is memory. The failed call has changed nothing, unless it
    /// failed [in the middle](crate::update#what-is-left-in-the-middle) of a commit.
    OutOfMemory,
    /// A rule, a model or gradients from outside of this crate break the contract of their trait.
    Contract,
    /// The call is not possible for this optimiser, parameter or state.
    Unsupported,
    /// A file cannot be opened, read or written.
    Io,
    /// A file is damaged, of another format, or incomplete.
    File,
    /// A file was written by another rule, or by the same rule with other settings.
    OtherRule,
    /// Ranks make different calls or have different values, or another rank refuses.
    Ranks,
    /// The ranks cannot communicate.
    Communication,
    /// An error of another library, such as a failed tensor operation of candle's, or of a rule from outside
    /// of this crate.
    Other,
}
