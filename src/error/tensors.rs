//! Errors about a tensor: a gradient, parameter, master or state, or a tensor of a file.

use std::fmt::{Debug, Display};

use super::{Error, ErrorKind};

/// Floating-point dtypes, in words.
pub(crate) const FLOATS: &str = "F16, BF16, F32 or F64";

impl Error {
    /// The error for a tensor of another shape. `what` names the tensor: "the gradient".
    pub(crate) fn shape(what: impl Display, got: impl Debug, expected: impl Debug) -> Self {
        Error::new(ErrorKind::Tensor, format!("{what} has shape"))
            .with_got(format_args!("{got:?}"))
            .with_expected(format_args!("{expected:?}"))
    }

    /// The error for a tensor of another dtype. `expected` is text, because several dtypes may be allowed.
    pub(crate) fn dtype(what: impl Display, got: impl Debug, expected: impl Display) -> Self {
        Error::new(ErrorKind::Tensor, format!("{what} is"))
            .with_got(format_args!("{got:?}"))
            .with_expected(expected)
    }

    /// The error for a tensor on another device.
    pub(crate) fn device(what: impl Display, got: impl Debug, expected: impl Debug) -> Self {
        Error::new(ErrorKind::Tensor, format!("{what} is on"))
            .with_got(format_args!("{got:?}"))
            .with_expected(format_args!("{expected:?}"))
    }

    /// The error for a tensor with a number that is infinite or NaN.
    pub(crate) fn not_finite(what: impl Display, value: f64, element: usize) -> Self {
        Error::new(ErrorKind::NotFinite, format!("{what} is"))
            .with_got(value)
            .at_element(element)
            .with_expected("a finite number")
    }

    /// The error for a tensor with a number that would be infinite in the dtype that stores it.
    pub(crate) fn too_large(what: impl Display, value: f64, element: usize, dtype: impl Debug) -> Self {
        Error::new(ErrorKind::Tensor, format!("{what} is"))
            .with_got(value)
            .at_element(element)
            .with_expected(format_args!("a number that {dtype:?} can hold"))
    }

    /// The error of a call that has begun to write `begun` of `all` values; `self` if `begun` is 0.
    pub(crate) fn after_values(self, begun: usize, all: usize) -> Self {
        if begun == 0 {
            return self;
        }
        let problem = format!("the call failed after it had begun to write {begun} of {all} values");
        let mut halfway =
            Error::new(self.kind(), problem).with_remedy("set or restore all values again before you go on");
        if let Some(path) = self.path() {
            halfway = halfway.at(path);
        }
        halfway.caused_by(self)
    }

    /// The error of a device, or the CPU, that has no memory left.
    pub(crate) fn out_of_memory() -> Self {
        Error::new(ErrorKind::OutOfMemory, "there is no memory left").with_remedy(
            "keep moments in 8 bits (`StoreAs`), masters as `SplitMaster`, the state of a device in the CPU's \
             memory (`Offload`), or fewer activations (`Segments`)",
        )
    }

    /// Adds the number of bytes of the allocation, if the error is that there is no memory left.
    pub(crate) fn asking_for(self, bytes: usize) -> Self {
        match self.kind() {
            ErrorKind::OutOfMemory => self
                .with_problem("there is no memory left for")
                .with_got(format_args!("{bytes} bytes")),
            _ => self,
        }
    }

    /// The error for a missing tensor. `problem` is a clause: "the file has no tensor \"w\"".
    pub(crate) fn missing(problem: impl Into<String>) -> Self {
        Error::new(ErrorKind::Tensor, problem.into())
    }
}
