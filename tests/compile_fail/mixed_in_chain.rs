//! A chain transforms gradients; `MixedPrecision` stores the parameter.

use candle_core::{DType::F32, Var};
use optimisers::{Adam, ClipGrad, MixedPrecision, OptimiserChain, Result, StateTree, setup};

pub fn misplaced(model: &Var) -> Result<StateTree> {
    setup(OptimiserChain::new((MixedPrecision::new(F32, Adam::new(1e-3)), ClipGrad::new(1.0))), model)
}
