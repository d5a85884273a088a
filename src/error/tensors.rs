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

    /// The error for a missing tensor. `problem` is a clause: "the file has no tensor \"w\"".
    pub(crate) fn missing(problem: impl Into<String>) -> Self {
        Error::new(ErrorKind::Tensor, problem.into())
    }
}
