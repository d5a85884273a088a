//! Pairs of models: a precise one, which is trained, and its low-precision twin, which computes.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, DeviceLocation, Tensor, Var};
use candle_nn::VarMap;

use crate::engine::{UpdateTargets, storage_address};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{Model, Visitor, by_first_path};
use crate::numbers::is_wider;
use crate::tree::{Twins, is_trainable};

/// A model in F32 (or F64), and its twin in lower precision.
///
/// Forward and backward pass run on the twin. An update moves the variables of the precise model and writes
/// them, rounded, to the twin, in one pass. So the masters are your own variables, and there is no third
/// copy. Bytes per parameter are 4 + 2 and the rule's state, as with
/// [`MixedPrecision`](crate::MixedPrecision), but evaluation in full precision and export need no conversion.
///
/// Variables that the twin lacks, or shares, are trained as they are. If the twin has its own variable in the
/// same dtype, that is a copy that follows.
///
/// As a [`Model`], alone or as a part of another, it is the precise one. The twin follows when a state writes
/// that one: with updates, with new weights ([`set_masters`](crate::StateTree::set_masters),
/// [`refresh_masters`](crate::StateTree::refresh_masters), checkpoints) and with averages
/// ([`with_averages`](crate::StateTree::with_averages)).
///
/// # Updates
/// [`update`](crate::update) and the like take the pair as the model, and gradients of the twin's variables.
/// If a loss has gradients of the precise ones too, they are added, like those of tied variables.
///
/// An update is refused if the optimiser keeps copies of its own (a pair needs the rule alone); if a variable
/// has twins in two pairs of the model; over [ranks](crate::Setup::over); and if one of a pair was changed
/// outside of updates, as far as that is noticed (see [`MixedPrecision`](crate::MixedPrecision)).
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap, linear};
/// use optimisers::{Descent, Twin, setup, update};
///
/// let precise = VarMap::new();
/// let _ = linear(2, 1, VarBuilder::from_varmap(&precise, F32, &Device::Cpu))?;
///
/// let low = Twin::variables(&precise, |_path, _tensor| BF16)?;
/// let layer = linear(2, 1, VarBuilder::from_varmap(&low, BF16, &Device::Cpu))?;
/// let twin = Twin::new(&precise, &low)?;
///
/// let mut state = setup(Descent::new(0.1), &twin)?;
/// let loss = layer.forward(&Tensor::ones((3, 2), BF16, &Device::Cpu)?)?.to_dtype(F32)?.sqr()?.mean_all()?;
/// let outcome = update(&mut state, &twin, &loss.backward()?)?;
/// assert_eq!(outcome.applied, 2);
/// assert_eq!(state.bytes(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
#[derive(Clone, Debug)]
pub struct Twin {
    precise: BTreeMap<String, Tensor>,
    twins: Twins,
    /// The storages of the low-precision variables.
    _written: Arc<UpdateTargets>,
}

impl Twin {
    /// Pairs the variables of two models by path, and sets those of `low` to those of `precise`, rounded.
    ///
    /// # Errors
    /// If the twin has a variable that the precise model lacks, or one of another shape or device or of
    /// higher precision; if the models have no path in common. Nothing changes then.
    pub fn new<P: Model + ?Sized, L: Model + ?Sized>(precise: &P, low: &L) -> Result<Self> {
        let precise = by_first_path(precise, is_trainable)?;
        let mut twins = Twins::default();
        for (path, low) in by_first_path(low, is_trainable)? {
            let Some(high) = precise.get(&path) else {
                let error =
                    Error::new(ErrorKind::Model, "the twin has it, and the precise model does not").at(&path);
                return Err(error.with_remedy(REMEDY));
            };
            if high.id() == low.id() {
                continue;
            }
            if high.shape() != low.shape() {
                return Err(Error::shape("its twin", low.shape(), high.shape())
                    .at(&path)
                    .with_remedy(REMEDY));
            }
            if is_wider(low.dtype(), high.dtype()) {
                let expected = format!("a dtype no wider than {:?}", high.dtype());
                return Err(Error::dtype("its twin", low.dtype(), expected).at(&path).with_remedy(REMEDY));
            }
            if !high.device().same_device(low.device()) {
                return Err(on_another_device(&path, low.device().location(), high.device().location()));
            }
            twins.insert(high, &low);
        }
        if twins.is_empty() {
            return Err(Error::new(ErrorKind::Model, "the twin has no trainable variable of its own")
                .with_remedy(REMEDY));
        }
        let _written = Arc::new(UpdateTargets::new(twins.low().map(storage_address)));
        let twin = Twin { precise, twins, _written };
        twin.refresh()?;
        Ok(twin)
    }

    /// Variables with the names and values of `precise`, in the dtypes that `choose` returns.
    ///
    /// Build the twin on them, by `VarBuilder::from_varmap`.
    ///
    /// A variable that keeps its dtype is that of `precise` itself. That is right for variables that the twin
    /// moves while it computes, such as BatchNorm's running statistics: both share them.
    ///
    /// # Errors
    /// If two variables have the same path.
    pub fn variables<P: Model + ?Sized, D: Into<DType>>(
        precise: &P,
        choose: impl Fn(&str, &Tensor) -> D,
    ) -> Result<VarMap> {
        let map = VarMap::new();
        let mut variables = map.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for (path, tensor) in by_first_path(precise, Tensor::is_variable)? {
            let dtype =
                if tensor.dtype().is_float() { choose(&path, &tensor).into() } else { tensor.dtype() };
            let shared =
                if tensor.dtype() == dtype { tensor } else { tensor.to_dtype(dtype)?.detach().copy()? };
            variables.insert(path, Var::from_tensor(&shared)?);
        }
        drop(variables);
        Ok(map)
    }

    /// Sets the twin's variables to those of the precise model, rounded.
    ///
    /// Call it after putting new weights into the precise model.
    ///
    /// # Errors
    /// If a device fails.
    pub fn refresh(&self) -> Result<()> {
        self.precise.values().try_for_each(|high| self.twins.follow(high))
    }
}

/// The error that a twin is on another device than its parameter.
fn on_another_device(path: &str, got: DeviceLocation, expected: DeviceLocation) -> Error {
    Error::device("its twin", got, expected).with_remedy("make both models on one device").at(path)
}

const REMEDY: &str = "build the twin on the variables that `Twin::variables` makes";

/// The variables of the precise model.
impl Model for Twin {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        self.precise.visit(visitor);
        for precise in self.precise.values() {
            if let Some(low) = self.twins.get(precise) {
                visitor.twin(precise, low);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_twin_on_another_device_is_called_a_twin() {
        let error = on_another_device("w", DeviceLocation::Cuda { gpu_id: 0 }, DeviceLocation::Cpu);
        let text = "parameter \"w\": its twin is on Cuda { gpu_id: 0 }, expected Cpu; make both models on \
                    one device";
        assert_eq!(error.to_string(), text);
    }
}
