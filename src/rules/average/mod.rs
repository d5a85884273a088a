//! Rules that average the weights after the steps of other rules in a chain.

mod averaged;
mod ema;
mod lookahead;
mod uniform_average;

pub use ema::Ema;
pub use lookahead::Lookahead;
pub use uniform_average::UniformAverage;

use super::listing::{Listing, listing};

/// The rules of this family with their defaults.
pub(super) fn listings() -> Vec<Listing> {
    vec![
        listing::<Lookahead>(
            "every k-th step: slow += α·(x - dx - slow); dx' = x - slow",
            "Zhang et al. 2019, arXiv 1907.08610",
        ),
        listing::<Ema>(
            "dx' = dx; average = δ·average + (1 - δ)·(x - dx)",
            "exponential moving average of the weights",
        ),
        listing::<UniformAverage>(
            "dx' = dx; average = mean of x - dx",
            "Polyak & Juditsky 1992; Izmailov et al. 2018, arXiv 1803.05407",
        ),
    ]
}
