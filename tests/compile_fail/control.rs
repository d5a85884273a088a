//! Compiles: the same pieces in their places.

use candle_core::{DType::F32, Var};
use optimisers::{Adam, ClipGrad, MixedPrecision, OptimiserChain, Result, StateTree, model, setup};

pub struct Net {
    pub hidden: Var,
    pub forgotten: Var,
}
model!(Net { hidden, .. });

pub fn control(model: &Var) -> Result<StateTree> {
    setup(
        MixedPrecision::new(F32, OptimiserChain::new((ClipGrad::new(1.0), Adam::new(1e-3)))),
        model,
    )
}
