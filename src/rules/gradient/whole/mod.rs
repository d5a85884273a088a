//! Steps on whole gradients, with candle's tensor operations.

mod adaptive_clip;
mod centralise;
mod grad_noise;

pub use adaptive_clip::AdaptiveClip;
pub use centralise::Centralise;
pub use grad_noise::GradNoise;

use crate::rules::listing::{Listing, listing};

/// These rules with their defaults.
pub(super) fn listings() -> [Listing; 3] {
    [
        listing::<AdaptiveClip>(
            "dx' = dx·min(1, ω·‖x‖ / ‖dx‖), per row",
            "Brock et al. 2021, arXiv 2102.06171",
        ),
        listing::<Centralise>("dx' = dx - mean of dx, per row", "Yong et al. 2020, arXiv 2004.01461"),
        listing::<GradNoise>("dx' = dx + N(0, σ² / t^γ)", "Neelakantan et al. 2015, arXiv 1511.06807"),
    ]
}
