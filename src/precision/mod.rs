//! In which dtype parameters are kept and layers compute.

mod autocast;
mod builder;
mod in_dtype;
mod policy;

use candle_core::{DType, Module, Tensor};

pub use autocast::{Autocast, AutocastLayer};
pub use in_dtype::InDtype;
pub use policy::PrecisionPolicy;

use crate::error::{PrecisionError, Result};
use crate::numbers::is_supported;

/// Refuses dtypes that parameters and layers cannot have; `place` says who asks.
fn expect_supported(place: impl Into<String>, got: DType) -> Result<()> {
    if is_supported(got) {
        return Ok(());
    }
    Err(PrecisionError::unsupported(place, got).into())
}

/// Runs a module in a dtype, and hands its output on in another. An input that is not floating-point goes in as it is.
fn run_in(dtype: DType, module: &(impl Module + ?Sized), input: &Tensor, back: DType) -> candle_core::Result<Tensor> {
    let input = if input.dtype().is_float() { input.to_dtype(dtype)? } else { input.clone() };
    module.forward(&input)?.to_dtype(back)
}
