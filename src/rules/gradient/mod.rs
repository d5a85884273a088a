//! Steps before or after a rule in a chain: decay, clipping, noise, accumulation.

mod accum_grad;
mod clamp;
mod clip_global_norm;
mod clip_grad;
mod clip_norm;
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
    let mut all = vec![
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
    ];
    #[cfg(feature = "candle")]
    all.extend(whole::listings());
    all.push(listing::<AccumGrad>("the mean of n gradients, every n-th call", "gradient accumulation"));
    all
}
