//! Several rules are a chain when they are put into one.

use candle_core::Var;
use optimisers::{Adam, ClipGrad, Result, StateTree, setup};

pub fn misplaced(model: &Var) -> Result<StateTree> {
    setup((ClipGrad::new(1.0), Adam::new(1e-3)), model)
}
