//! Errors about a tensor: a gradient, a parameter, a master, state, or one of a file.

use std::fmt::{Debug, Display};

use super::{Error, ErrorKind};

/// Floating-point dtypes, in words.
pub(crate) const FLOATS: &str = "F16, BF16, F32 or F64";

impl Error {
    /// A tensor of another shape. `what` is the tensor: "the gradient".
    pub(crate) fn shape(what: impl Display, got: impl Debug, expected: impl Debug) -> Self {
        Error::new(ErrorKind::Tensor, format!("{what} has shape"))
            .with_got(format_args!("{got:?}"))
            .with_expected(format_args!("{expected:?}"))
    }

    /// A tensor of another dtype. `expected` is in words.
    pub(crate) fn dtype(what: impl Display, got: impl Debug, expected: impl Display) -> Self {
        Error::new(ErrorKind::Tensor, format!("{what} is"))
            .with_got(format_args!("{got:?}"))
            .with_expected(expected)
    }

    /// A tensor on another device.
    pub(crate) fn device(what: impl Display, got: impl Debug, expected: impl Debug) -> Self {
        Error::new(ErrorKind::Tensor, format!("{what} is on"))
            .with_got(format_args!("{got:?}"))
            .with_expected(format_args!("{expected:?}"))
    }

    /// A tensor with a number that is infinite or NaN.
    pub(crate) fn not_finite(what: impl Display, value: f64, element: usize) -> Self {
        Error::new(ErrorKind::NotFinite, format!("{what} is"))
            .with_got(value)
            .at_element(element)
            .with_expected("a finite number")
    }

    /// A tensor with a number that is infinite in the dtype in which it is to be stored.
    pub(crate) fn too_large(what: impl Display, value: f64, element: usize, dtype: impl Debug) -> Self {
        Error::new(ErrorKind::Tensor, format!("{what} is"))
            .with_got(value)
            .at_element(element)
            .with_expected(format_args!("a number that {dtype:?} can hold"))
    }

    /// A tensor that is not there. `problem` is a clause: "the file has no tensor \"w\"".
    pub(crate) fn missing(problem: impl Into<String>) -> Self {
        Error::new(ErrorKind::Tensor, problem.into())
    }
}
