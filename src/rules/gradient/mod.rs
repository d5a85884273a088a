//! Steps that stand before or behind a rule in a chain: decay, clipping, noise, accumulation.

mod accum_grad;
#[cfg(feature = "candle")]
mod adaptive_clip;
#[cfg(feature = "candle")]
mod centralise;
mod clamp;
mod clip_global_norm;
mod clip_grad;
mod clip_norm;
#[cfg(feature = "candle")]
mod grad_noise;
mod scale;
mod sign_decay;
mod skip_outliers;
pub(super) mod weight_decay;

pub use accum_grad::AccumGrad;
#[cfg(feature = "candle")]
pub use adaptive_clip::AdaptiveClip;
#[cfg(feature = "candle")]
pub use centralise::Centralise;
pub use clamp::Clamp;
pub use clip_global_norm::ClipGlobalNorm;
pub use clip_grad::ClipGrad;
pub use clip_norm::ClipNorm;
#[cfg(feature = "candle")]
pub use grad_noise::GradNoise;
pub use scale::Scale;
pub use sign_decay::SignDecay;
pub use skip_outliers::SkipOutliers;
pub use weight_decay::WeightDecay;

use super::listing::{Listing, listing};

/// The rules of this family with their defaults.
pub(super) fn listings() -> Vec<Listing> {
    vec![
        listing::<WeightDecay>("dx' = dx + λ·x", "L2 regularisation"),
        listing::<SignDecay>("dx' = dx + λ·sign(x)", "L1 regularisation"),
        listing::<Scale>("dx' = α·dx", "the sign or size of the objective"),
        listing::<Clamp>("dx' = x - clamp(x - dx, low, high)", "bounds on the parameter"),
        listing::<ClipGrad>("dx' = clamp(dx, -δ, δ)", "clipping by value"),
        listing::<ClipNorm>("dx' = dx·min(1, ω / ‖dx‖ₚ), per tensor", "Pascanu et al. 2012, arXiv 1211.5063"),
        listing::<ClipGlobalNorm>("dx' = dx·min(1, ω / ‖all dx‖₂)", "Pascanu et al. 2012, arXiv 1211.5063"),
        listing::<SkipOutliers>(
            "no step where ‖all dx‖₂ > mean + σ·deviation of the last norms",
            "OLMo et al. 2024, arXiv 2501.00656",
        ),
        #[cfg(feature = "candle")]
        listing::<AdaptiveClip>(
            "dx' = dx·min(1, ω·‖x‖ / ‖dx‖), per row",
            "Brock et al. 2021, arXiv 2102.06171",
        ),
        #[cfg(feature = "candle")]
        listing::<Centralise>("dx' = dx - mean of dx, per row", "Yong et al. 2020, arXiv 2004.01461"),
        #[cfg(feature = "candle")]
        listing::<GradNoise>("dx' = dx + N(0, σ² / t^γ)", "Neelakantan et al. 2015, arXiv 1511.06807"),
        listing::<AccumGrad>("the mean of n gradients, every n-th call", "gradient accumulation"),
    ]
}
