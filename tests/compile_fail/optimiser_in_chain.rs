//! An `Optimiser` decides how a parameter is stored, so it is no member of a chain.

use candle_core::Var;
use optimisers::{Adam, ClipGrad, Optimiser, OptimiserChain, Result, StateTree, setup};

pub fn misplaced(model: &Var) -> Result<StateTree> {
    let adam = Optimiser::new(Adam::new(1e-3));
    setup(OptimiserChain::new((ClipGrad::new(1.0), adam)), model)
}
