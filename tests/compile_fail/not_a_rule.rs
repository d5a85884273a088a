//! A name is no optimiser.

use candle_core::Var;
use optimisers::{Result, StateTree, setup};

pub fn misplaced(model: &Var) -> Result<StateTree> {
    setup("Adam".to_string(), model)
}
