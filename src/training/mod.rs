//! Parts of a training loop beside the update: schedules, sharpness-aware steps, mixed precision, audits.

pub(crate) mod accumulator;
pub(crate) mod audit;
pub(crate) mod candle_optimizer;
pub(crate) mod destructure;
pub(crate) mod precision;
pub(crate) mod sam;
pub(crate) mod scheduler;
pub(crate) mod twin;
