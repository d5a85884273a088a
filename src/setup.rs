//! From a model to its state.

use std::sync::Arc;

use candle_core::Tensor;

use crate::error::{Error, Result};
use crate::model::{Model, Variable, in_path_order};
use crate::rule::Optimiser;
use crate::tree::{StateTree, chosen, is_trainable};

/// Makes the state of `optimiser` for every trainable parameter of `model`.
///
/// # Errors
/// If a hyper-parameter is out of range, the model has no trainable parameter, or the device has no memory left.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap, linear};
/// use optimisers::{AdamW, setup};
///
/// let variables = VarMap::new();
/// let _layer = linear(4, 2, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu).pp("layer"))?;
/// let state = setup(AdamW::new(1e-3), &variables)?;
/// let paths: Vec<_> = state.leaves().map(|leaf| leaf.path()).collect();
/// assert_eq!(paths, ["layer.bias", "layer.weight"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn setup<O: Optimiser, M: Model + ?Sized>(optimiser: O, model: &M) -> Result<StateTree> {
    optimiser.check()?;
    let optimiser: Arc<dyn Optimiser> = Arc::new(optimiser);
    build(variables(model)?.into_iter().map(|variable| (variable, Some(optimiser.clone()))))
}

/// Makes a state in which `choose` says, for each trainable parameter by its path and tensor, which optimiser it gets, or that it gets none.
///
/// A parameter without optimiser costs nothing: no state, and updates pass it over. That is the place of the frozen base of a LoRA model, and of
/// BatchNorm's running statistics in a `VarMap` (which are left alone anyway, as they never get a gradient, but would have state). To mix optimisers of different types return boxes, or
/// [`Either`](crate::Either) of two rules.
///
/// `choose` is asked for every path of a parameter that has several (a tied weight), and has to give the same answer for all: an optimiser of
/// the same name with the same hyper-parameters, or none.
///
/// # Errors
/// As [`setup`]; a model of which everything was left out is an error, too, and so are different answers for the paths of one parameter.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use optimisers::{AdamW, setup_with};
/// use std::collections::BTreeMap;
///
/// let variable = |n: usize| Var::zeros(n, DType::F32, &Device::Cpu);
/// let model = BTreeMap::from([("fc.weight", variable(6)?), ("fc.bias", variable(2)?), ("bn.running_mean", variable(2)?)]);
/// let state = setup_with(&model, |path, _| match path {
///     _ if path.contains("running_") => None,
///     _ if path.ends_with("bias") => Some(AdamW::new(1e-3)),
///     _ => Some(AdamW { lambda: 0.01, ..AdamW::new(1e-3) }),
/// })?;
/// assert_eq!(state.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn setup_with<O, M>(model: &M, mut choose: impl FnMut(&str, &Tensor) -> Option<O>) -> Result<StateTree>
where
    O: Optimiser,
    M: Model + ?Sized,
{
    build(chosen(variables(model)?, &mut choose)?)
}

/// The state of variables with their optimisers; those without one are left out.
pub(crate) fn build(choices: impl IntoIterator<Item = (Variable, Option<Arc<dyn Optimiser>>)>) -> Result<StateTree> {
    let mut state = StateTree::new(Vec::new(), Vec::new());
    state.extend(choices)?;
    if state.is_empty() {
        return Err(Error::EmptyModel);
    }
    Ok(state)
}

/// The model's trainable variables.
pub(crate) fn variables<M: Model + ?Sized>(model: &M) -> Result<Vec<Variable>> {
    in_path_order(model, is_trainable)
}
