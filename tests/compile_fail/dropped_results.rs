//! Results that are dropped, in a crate in which that is an error.
#![deny(unused_must_use)]

use candle_core::{Tensor, Var, backprop::GradStore};
use optimisers::{
    Accumulator, AdamW, Checkpoint, LossScaler, Result, Schedule, Setup, StateTree, Update, value::Value,
};

pub fn an_update(state: &mut StateTree) {
    Update::new(state).finite_only();
}

pub fn a_selection(state: &mut StateTree) -> Result<()> {
    state.at("encoder")?;
    Ok(())
}

pub fn a_schedule() {
    Schedule::constant(0.1).relative();
}

pub fn a_checkpoint(state: &StateTree) {
    Checkpoint::new(state);
}

pub fn a_setup() {
    Setup::default();
}

pub fn a_state(model: &Var) -> Result<()> {
    Setup::default().build(AdamW::new(1e-3), model)?;
    Ok(())
}

pub fn a_rule() {
    AdamW::new(1e-3);
}

pub fn a_loss(scaler: &mut LossScaler, loss: &Tensor) {
    scaler.scale(loss);
}

pub fn a_scaled_loss(scaler: &mut LossScaler, loss: &Tensor) -> Result<()> {
    scaler.scale(loss)?;
    Ok(())
}

pub fn gradients(accumulator: &mut Accumulator, _: &GradStore) {
    accumulator.take();
}

pub fn a_number<V: Value>(x: V) {
    x.sqrt();
}
