//! What stands behind the `VarBuilder` of a policy.

use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::{Init, VarBuilder, VarMap, var_builder::SimpleBackend};

use super::PrecisionPolicy;
use crate::error::{Error, PrecisionError, Result};
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

impl PrecisionPolicy {
    /// A builder that makes each variable in `variables` with its dtype, for any candle-nn model.
    ///
    /// Initial values are drawn in F32 and rounded. The policy decides whatever float dtype the model asks for; integers are not its concern.
    /// The builder's own dtype, which models use for their constants, is that of the last pattern. A variable that `variables` has already is
    /// taken as it is, and must have the dtype of the policy.
    ///
    /// Errors come out of the model's constructor. Call [`check`](PrecisionPolicy::check) when the model is built.
    pub fn builder(&self, variables: &VarMap, device: &Device) -> VarBuilder<'static> {
        self.builder_with(variables, None, device)
    }

    /// Builds a model whose variables take their values from files: converted to the dtype of the policy, rounded once, and never drawn at random.
    ///
    /// The variables go into `variables` when all has succeeded, the [`check`](PrecisionPolicy::check) included, and otherwise none does.
    /// Masters start from the rounded values; [`Weights::load_masters`] gives them those of the files.
    ///
    /// # Errors
    /// What `build` returns: if a tensor is missing or does not fit, as [`Weights::load_into`]. Also as [`check`](PrecisionPolicy::check), and if
    /// `variables` has one of the paths already.
    ///
    /// ```
    /// use candle_core::{DType::{BF16, F32}, Device};
    /// use candle_nn::{VarBuilder, VarMap, linear};
    /// use optimisers::{PrecisionPolicy, Weights};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("model.safetensors");
    /// let saved = VarMap::new();
    /// linear(4, 2, VarBuilder::from_varmap(&saved, F32, &Device::Cpu).pp("fc"))?;
    /// saved.save(&path)?;
    ///
    /// let policy = PrecisionPolicy::new([("*.bias", F32), ("*", BF16)])?;
    /// let variables = VarMap::new();
    /// let model = policy.build_from(&Weights::open([&path])?, &variables, &Device::Cpu, |builder| linear(4, 2, builder.pp("fc")))?;
    /// assert_eq!(model.weight().dtype(), BF16);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn build_from<M, E: From<Error>>(
        &self,
        weights: &Weights,
        variables: &VarMap,
        device: &Device,
        build: impl FnOnce(VarBuilder<'static>) -> std::result::Result<M, E>,
    ) -> std::result::Result<M, E> {
        let built = VarMap::new();
        let model = build(self.builder_with(&built, Some(weights.clone()), device))?;
        self.check(&built)?;
        move_all(&built, variables)?;
        Ok(model)
    }

    fn builder_with(&self, variables: &VarMap, weights: Option<Weights>, device: &Device) -> VarBuilder<'static> {
        let dtype = self.dtypes.last().copied().unwrap_or(DType::F32);
        let backend = VariablesByPolicy { policy: self.clone(), variables: variables.clone(), weights };
        VarBuilder::from_backend(Box::new(backend), dtype, device.clone())
    }
}

/// Moves the variables of one map into another, all or none.
fn move_all(from: &VarMap, to: &VarMap) -> Result<()> {
    let (mut from, mut to) = (locked(from), locked(to));
    if let Some(path) = from.keys().filter(|path| to.contains_key(*path)).min() {
        return Err(PrecisionError::VariableExists { path: path.clone() }.into());
    }
    to.extend(from.drain());
    Ok(())
}
