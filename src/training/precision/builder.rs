//! The `VarBuilder` of a policy, which makes each variable in the dtype that the policy has for its path.

use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::{Init, VarBuilder, VarMap, var_builder::SimpleBackend};

use super::PrecisionPolicy;
use crate::error::{Error, Result};

/// Makes variables with the dtypes of a policy and with initial values.
struct VariablesByPolicy {
    policy: PrecisionPolicy,
    variables: VarMap,
}

impl VariablesByPolicy {
    fn get_or_make(
        &self,
        shape: Shape,
        path: &str,
        init: Init,
        requested: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let dtype = if requested.is_float() {
            self.policy.dtype(path)?
        } else {
            requested
        };
        let mut variables = lock(&self.variables);
        if let Some(variable) = variables.get(path) {
            const REMEDY: &str = "make the variable with the shape of the model and the dtype of the policy, \
                                  or build in an empty `VarMap`";
            let what = "the variable that is there already";
            return if *variable.shape() != shape {
                Err(Error::shape(what, variable.shape(), shape)
                    .with_remedy(REMEDY)
                    .at(path))
            } else if variable.dtype() != dtype {
                Err(Error::dtype(what, variable.dtype(), format_args!("{dtype:?}"))
                    .with_remedy(REMEDY)
                    .at(path))
            } else {
                Ok(variable.as_tensor().clone())
            };
        }
        let variable = Var::from_tensor(&init.var(shape, draw_dtype(dtype), device)?.to_dtype(dtype)?)?;
        let tensor = variable.as_tensor().clone();
        variables.insert(path.to_string(), variable);
        Ok(tensor)
    }
}

/// The variables of a map. A panic under the lock does no harm, because each variable is inserted whole.
fn lock(variables: &VarMap) -> MutexGuard<'_, HashMap<String, Var>> {
    variables.data().lock().unwrap_or_else(PoisonError::into_inner)
}

/// The dtype in which random numbers are drawn. On CUDA devices candle draws no numbers in 16 bits, and on
/// the CPU it would round the parameters of the distribution as well.
fn draw_dtype(dtype: DType) -> DType {
    if matches!(dtype, DType::F16 | DType::BF16) {
        DType::F32
    } else {
        dtype
    }
}

impl SimpleBackend for VariablesByPolicy {
    fn get(
        &self,
        shape: Shape,
        path: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        Ok(self.get_or_make(shape, path, init, dtype, device)?)
    }

    fn get_unchecked(&self, path: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let existing_shape = lock(&self.variables)
            .get(path)
            .map(|variable| variable.shape().clone());
        let Some(shape) = existing_shape else {
            candle_core::bail!("{path}: a new variable needs a shape, use `get` instead of `get_unchecked`")
        };
        self.get(shape, path, Init::default(), dtype, device)
    }

    fn contains_tensor(&self, path: &str) -> bool {
        lock(&self.variables).contains_key(path)
    }
}

impl PrecisionPolicy {
    /// A builder that makes each variable in `variables` with its dtype, for any candle-nn model.
    ///
    /// Initial values for 16 bits are drawn in F32 and rounded. If the model requests a floating-point dtype,
    /// the policy overrides that dtype. An integer dtype is made as requested. The builder's own dtype, which
    /// models use for their constants, is that of the last pattern. If `variables` has a variable already,
    /// the variable stays as it is, and must have the dtype of the policy.
    ///
    /// Errors of the builder come from the model's constructor. Call [`check`](PrecisionPolicy::check) when
    /// the model is built. [`Weights::load_into`](crate::Weights::load_into) loads values from files,
    /// converted and rounded once.
    pub fn builder(&self, variables: &VarMap, device: &Device) -> VarBuilder<'static> {
        let dtype = self.dtypes.last().copied().unwrap_or(DType::F32);
        let backend = VariablesByPolicy {
            policy: self.clone(),
            variables: variables.clone(),
        };
        VarBuilder::from_backend(Box::new(backend), dtype, device.clone())
    }
}
