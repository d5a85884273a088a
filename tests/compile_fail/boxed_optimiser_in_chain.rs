//! A box of an optimiser holds everything about a leaf; it is no member of a chain.

use candle_core::Var;
use optimisers::{Adam, ClipGrad, Optimiser, OptimiserChain, Result, StateTree, setup};

pub fn misplaced(model: &Var) -> Result<StateTree> {
    let boxed: Box<dyn Optimiser> = Box::new(Adam::new(1e-3));
    setup(OptimiserChain::new((ClipGrad::new(1.0), boxed)), model)
}
