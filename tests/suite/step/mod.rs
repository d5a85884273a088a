//! Updates, loss scaling, and what outcomes say.

mod bad_input;
mod batch_norm;
mod empty_batches;
mod error_places;
mod figures;
mod functional;
mod leaked_steps;
mod loss_scaler;
mod loss_scaler_shared;
mod missing_gradients;
mod owned_gradients;
mod parameters_come_back;
pub(crate) mod streamed_steps;
