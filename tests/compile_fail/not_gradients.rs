//! A tensor alone does not say whose gradient it is.

use candle_core::{Tensor, Var};
use optimisers::{Outcome, Result, StateTree, update};

pub fn misplaced(state: &mut StateTree, model: &Var, gradient: &Tensor) -> Result<Outcome> {
    update(state, model, gradient)
}
