//! Parts of a training loop beside the update: schedules, sharpness-aware steps, mixed precision, audits.

pub(crate) mod accumulator;
#[cfg(feature = "candle")]
pub(crate) mod audit;
#[cfg(feature = "candle")]
pub(crate) mod candle_optimizer;
#[cfg(feature = "candle")]
pub(crate) mod destructure;
pub(crate) mod plateau;
#[cfg(feature = "candle")]
pub(crate) mod precision;
pub(crate) mod sam;
#[cfg(feature = "candle")]
pub(crate) mod segments;
