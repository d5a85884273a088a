//! Schedules, layers by precision, sharpness-aware steps, candle around them.

pub(crate) mod audit;
mod autocast;
mod candle_optimizer;
pub(crate) mod cuts;
mod destructure;
mod plateau;
pub(crate) mod precision;
mod precision_training;
mod sam;
mod schedule;
mod schedules;
mod segments;
