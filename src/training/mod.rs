//! Parts of a training loop around the update: plateaus, segments, sharpness-aware steps, mixed precision.

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
