//! While the model is where `Sam` has moved it to, its state is lent.

use candle_core::{Var, backprop::GradStore};
use optimisers::{Result, Sam, StateTree, Update, update};

pub fn too_early(model: &Var, state: &mut StateTree, grads: &GradStore) -> Result<()> {
    let climbed = Sam::new(0.05).ascend(Update::new(state), model, grads)?;
    update(state, model, grads)?;
    climbed.restore()
}
