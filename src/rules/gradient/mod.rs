//! Rules that a chain has before or after its main rule: decay, clipping, noise, accumulation.

mod accum_grad;
mod clamp;
mod clip_global_norm;
mod clip_grad;
pub(super) mod clip_norm;
mod scale;
mod sign_decay;
mod skip_outliers;
pub(super) mod weight_decay;
#[cfg(feature = "candle")]
mod whole;

pub use accum_grad::AccumGrad;
pub use clamp::Clamp;
pub use clip_global_norm::ClipGlobalNorm;
pub use clip_grad::ClipGrad;
pub use clip_norm::ClipNorm;
pub use scale::Scale;
pub use sign_decay::SignDecay;
pub use skip_outliers::SkipOutliers;
pub use weight_decay::WeightDecay;
#[cfg(feature = "candle")]
pub use whole::{AdaptiveClip, Centralise, GradNoise};

use super::listing::{Listing, listing};

/// The rules of this family with their defaults.
pub(super) fn listings() -> Vec<Listing> {
    Vec::from([
        listing::<WeightDecay>(),
        listing::<SignDecay>(),
        listing::<Scale>(),
        listing::<Clamp>(),
        listing::<ClipGrad>(),
        listing::<ClipNorm>(),
        listing::<ClipGlobalNorm>(),
        listing::<SkipOutliers>(),
        #[cfg(feature = "candle")]
        listing::<AdaptiveClip>(),
        #[cfg(feature = "candle")]
        listing::<Centralise>(),
        #[cfg(feature = "candle")]
        listing::<GradNoise>(),
        listing::<AccumGrad>(),
    ])
}
