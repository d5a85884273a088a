//! What stands behind the `VarBuilder` of a policy.

use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::{Init, VarMap, var_builder::SimpleBackend};

use super::PrecisionPolicy;
use crate::error::{Error, Result};
use crate::weights::Weights;

/// Makes variables with the dtypes of a policy, from files or at random.
pub(super) struct VariablesByPolicy {
    pub(super) policy: PrecisionPolicy,
    pub(super) variables: VarMap,
    pub(super) weights: Option<Weights>,
}

impl VariablesByPolicy {
    fn variable(&self, shape: Shape, path: &str, init: Init, requested: DType, device: &Device) -> Result<Tensor> {
        let dtype = if requested.is_float() { self.policy.dtype(path)? } else { requested };
        let mut variables = locked(&self.variables);
        if let Some(variable) = variables.get(path) {
            let (expected, got) = ((shape, dtype), (variable.shape().clone(), variable.dtype()));
            if expected != got {
                return Err(Error::OtherParameter { path: path.to_string(), expected, got });
            }
            return Ok(variable.as_tensor().clone());
        }
        let values = match &self.weights {
            Some(weights) => weights.value(path, &shape, dtype)?.to_device(device)?,
            None => init.var(shape, drawn_in(dtype), device)?.to_dtype(dtype)?,
        };
        let variable = Var::from_tensor(&values)?;
        let tensor = variable.as_tensor().clone();
        variables.insert(path.to_string(), variable);
        Ok(tensor)
    }
}

/// The variables of a map; a thread that panicked cannot have left one half-made.
pub(super) fn locked(variables: &VarMap) -> MutexGuard<'_, HashMap<String, Var>> {
    variables.data().lock().unwrap_or_else(PoisonError::into_inner)
}

/// The dtype to draw random numbers in: candle's CUDA devices draw no 16-bit ones, and its CPU rounds the distribution's parameters, too.
fn drawn_in(dtype: DType) -> DType {
    if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype }
}

impl SimpleBackend for VariablesByPolicy {
    fn get(&self, shape: Shape, path: &str, init: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        Ok(self.variable(shape, path, init, dtype, device)?)
    }

    fn get_unchecked(&self, path: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let known = locked(&self.variables).get(path).map(|variable| variable.shape().clone());
        let shape = match (known, &self.weights) {
            (Some(shape), _) => shape,
            (None, Some(weights)) => weights.shape(path)?,
            (None, None) => candle_core::bail!("{path}: a new variable needs a shape, use `get` instead of `get_unchecked`"),
        };
        self.get(shape, path, Init::default(), dtype, device)
    }

    fn contains_tensor(&self, path: &str) -> bool {
        locked(&self.variables).contains_key(path) || self.weights.as_ref().is_some_and(|weights| weights.contains(path))
    }
}
