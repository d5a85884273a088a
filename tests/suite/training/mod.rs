//! Schedules, layers by precision, sharpness-aware steps, candle around them.

pub(crate) mod audit;
mod autocast;
mod candle_optimizer;
mod cut_gradients;
pub(crate) mod cuts;
mod destructure;
mod driven_fields;
mod fused_cuts;
mod plateau;
pub(crate) mod precision;
mod precision_training;
mod sam;
mod schedule;
mod scheduler;
