//! Rules that take the gradient as one tensor, because they use candle's tensor operations.

mod adaptive_clip;
mod centralise;
mod grad_noise;

pub use adaptive_clip::AdaptiveClip;
pub use centralise::Centralise;
pub use grad_noise::GradNoise;
