//! A step of the whole model, from `setup` to the outcome of an update.
//!
//! [`update`] has the public functions, [`pipeline`] the stages: call, plan, reduce, commit, outcome.

pub(crate) mod call;
pub(crate) mod contribution;
#[cfg(feature = "candle")]
pub(crate) mod functional;
pub(crate) mod leaf;
pub(crate) mod loss_scaler;
pub(crate) mod outcome;
pub(crate) mod pipeline;
pub(crate) mod ranks;
pub(crate) mod setup;
pub(crate) mod streamed;
pub(crate) mod summary;
pub(crate) mod update;
#[cfg(feature = "candle")]
mod wire;
