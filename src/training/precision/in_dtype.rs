//! An adaptor that runs a module in a dtype of its own.

use candle_core::{DType, Module, Tensor};

use super::run_in;
use crate::error::Result;
use crate::model::{Model, Visitor};
use crate::numbers::check_supported;

/// Runs a module in a dtype: converts the input to this dtype, and the output back to the input's dtype.
///
/// Gradients pass through both conversions. The parameters of the module are not converted.
///
/// Use `InDtype` for layers whose parameters have another dtype than the rest of the model, such as F32 norms
/// in an F16 model. A [`PrecisionPolicy`](crate::PrecisionPolicy) decides the dtype of each parameter.
///
/// If the input is not floating-point (the tokens of an embedding), it is not converted, and the output stays
/// in the module's dtype.
///
/// ```
/// use candle_core::{DType::{F16, F32}, Device, Module, Tensor, Var};
/// use candle_nn::LayerNorm;
/// use optimisers::InDtype;
///
/// let weight = Var::ones(4, F32, &Device::Cpu)?;
/// let norm = InDtype::new(F32, LayerNorm::new_no_bias(weight.as_tensor().clone(), 1e-5))?;
/// let x = Tensor::new(&[[1f32, 2.0, 3.0, 4.0]], &Device::Cpu)?.to_dtype(F16)?;
/// let y = norm.forward(&x)?;
/// assert_eq!(y.dtype(), F16);
/// assert_eq!(y.sum_all()?.backward()?.get(&weight).map(Tensor::dtype), Some(F32));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # candle's norms
/// `candle_nn::LayerNorm` with a bias and `RmsNorm` run a fused operation without gradients: neither their
/// own parameters nor the layers before them would train. `LayerNorm` without a bias, `RmsNorm::forward_diff`
/// and `ops::layer_norm_slow` are differentiable. [A page](crate::guide::cuts) lists all such operations, and
/// [`StateTree::require_all`](crate::StateTree::require_all) refuses an update without gradients.
#[must_use]
#[derive(Clone, Debug, PartialEq)]
pub struct InDtype<M> {
    dtype: DType,
    module: M,
}

impl<M> InDtype<M> {
    /// Runs `module` in `dtype`.
    ///
    /// # Errors
    /// If `dtype` is not F16, BF16, F32 or F64.
    pub fn new(dtype: impl Into<DType>, module: M) -> Result<Self> {
        let dtype = dtype.into();
        check_supported("the dtype of InDtype", dtype)?;
        Ok(InDtype { dtype, module })
    }

    /// The dtype in which the module runs.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The module.
    pub fn module(&self) -> &M {
        &self.module
    }
}

impl<M: Module> Module for InDtype<M> {
    fn forward(&self, input: &Tensor) -> candle_core::Result<Tensor> {
        let output_dtype = if input.dtype().is_float() {
            input.dtype()
        } else {
            self.dtype
        };
        run_in(self.dtype, &self.module, input, output_dtype)
    }
}

/// Visits the module's parameters, under the paths that they have without the adaptor.
impl<M: Model> Model for InDtype<M> {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        self.module.visit(visitor);
    }
}
