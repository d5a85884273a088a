//! A struct does not show its variables by itself.

use candle_core::Var;
use optimisers::{Descent, Result, StateTree, setup};

pub struct Net {
    pub weight: Var,
}

pub fn misplaced(model: &Net) -> Result<StateTree> {
    setup(Descent::new(0.1), model)
}
