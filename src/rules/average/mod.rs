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
        listing::<Lookahead>(),
        listing::<Ema>(),
        listing::<UniformAverage>(),
    ]
}
