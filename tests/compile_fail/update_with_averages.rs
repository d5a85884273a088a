//! While averages are in the model, its state is lent.

use candle_core::{Var, backprop::GradStore};
use optimisers::{Result, StateTree, update};

pub fn inside(model: &Var, state: &mut StateTree, grads: &GradStore) -> Result<()> {
    state.with_averages(model, || update(state, model, grads).map(drop))
}
