//! The dtypes of parameters and of layers' arithmetic.

mod autocast;
mod builder;
mod in_dtype;
mod policy;

use std::fmt::Display;

use candle_core::{DType, Module, Tensor};

pub use autocast::{Autocast, AutocastLayer};
pub use in_dtype::InDtype;
pub use policy::PrecisionPolicy;

use crate::error::{Error, ErrorKind, FLOATS, Result};
use crate::numbers::is_supported;

/// Refuses dtypes that parameters and layers cannot have. `place` is the name of the pattern or type that has
/// the dtype, for the error.
fn check_supported(place: impl Display, got: DType) -> Result<()> {
    if is_supported(got) {
        Ok(())
    } else {
        Err(unsupported(place, got, FLOATS))
    }
}

/// The error for an unsupported dtype that the program has chosen for `place`.
fn unsupported(place: impl Display, got: DType, expected: &str) -> Error {
    Error::new(ErrorKind::Argument, format!("the dtype of {place} is"))
        .with_got(format_args!("{got:?}"))
        .with_expected(expected)
}

/// Runs a module in `dtype`, and converts the output to `output_dtype`. An input that is not floating-point
/// is not converted.
fn run_in(
    dtype: DType,
    module: &(impl Module + ?Sized),
    input: &Tensor,
    output_dtype: DType,
) -> candle_core::Result<Tensor> {
    let input = if input.dtype().is_float() {
        input.to_dtype(dtype)?
    } else {
        input.clone()
    };
    module.forward(&input)?.to_dtype(output_dtype)
}
