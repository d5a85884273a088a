//! Published optimiser rules, and the rules that a chain has before or after them. One rule per file.
//!
#![doc = ""]
#![doc = include_str!("table.md")]

pub(crate) mod adam;
pub(crate) mod average;
pub(crate) mod descent;
pub(crate) mod gradient;
mod listing;
mod mars;
#[cfg(feature = "candle")]
pub(crate) mod matrix;
mod moments;
mod rule_by;
pub(crate) mod schedule_free;

pub use adam::*;
pub use average::*;
pub use descent::*;
pub use gradient::*;
pub use listing::{Listing, recurrence};
pub use schedule_free::*;
// These items are named, because the compiler's error mentions a missing feature only for named items.
#[cfg(feature = "candle")]
pub use gradient::{AdaptiveClip, Centralise, GradNoise};
#[cfg(feature = "candle")]
pub use matrix::{APOLLO, AdaMuon, Adafactor, GaLore, Muon, NorMuon, SOAP, Shampoo};

use rule_by::rule_by;

/// Every rule of this crate with its defaults.
#[doc(hidden)]
pub fn catalogue() -> Vec<Listing> {
    let families = [
        descent::listings(),
        adam::listings(),
        schedule_free::listings(),
        #[cfg(feature = "candle")]
        matrix::listings(),
        gradient::listings(),
        average::listings(),
    ];
    families.into_iter().flatten().collect()
}
