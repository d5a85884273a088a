//! What stands around a training loop: schedules, sharpness-aware steps, averages of gradients, layers by
//! precision, candle's traits, looking into a loss.

pub(crate) mod accumulator;
pub(crate) mod audit;
pub(crate) mod candle_optimizer;
pub(crate) mod destructure;
pub(crate) mod precision;
pub(crate) mod sam;
pub(crate) mod scheduler;
pub(crate) mod twin;
