//! The dtypes of parameters and of layers' arithmetic.

mod autocast;
mod builder;
mod in_dtype;
mod policy;

use candle_core::{DType, Module, Tensor};

pub use autocast::{Autocast, AutocastLayer};
pub use in_dtype::InDtype;
pub use policy::PrecisionPolicy;

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
