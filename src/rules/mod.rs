//! Published algorithms and the steps that stand beside them in a chain, one per file.
//!
#![doc = ""]
#![doc = include_str!("table.md")]

use crate::rule::Rule;

/// A row of the [`catalogue`].
#[doc(hidden)]
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Listing {
    /// The rule's name.
    pub name: &'static str,
    /// What it computes, in short.
    pub recurrence: &'static str,
    /// Where it comes from.
    pub source: &'static str,
    /// The rule with its defaults.
    pub rule: Box<dyn Rule>,
}

// A family lists each of its rules once. The list exports the rule and makes its row of `catalogue`, from
// which configurations and tests take the rules, and the table its rows.
macro_rules! list {
    ($($(#[$when:meta])? $module:ident::$Rule:ident, $recurrence:literal, $source:literal;)*) => {
        // A rule may have its family's name.
        $($(#[$when])? #[allow(clippy::module_inception)] pub(super) mod $module;)*
        $($(#[$when])? pub use $module::$Rule;)*

        /// The rules alone.
        #[allow(unused_imports, unreachable_pub, reason = "those of candle are named besides")]
        pub(super) mod listed {
            $($(#[$when])? pub use super::$Rule;)*
        }

        /// The rules of this family with their defaults.
        pub(super) fn listing() -> Vec<$crate::rules::Listing> {
            [$($(#[$when])? $crate::rules::Listing {
                name: stringify!($Rule),
                recurrence: $recurrence,
                source: $source,
                rule: Box::new($Rule::default()),
            }),*].into()
        }
    };
}

macro_rules! families {
    ($($(#[$when:meta])? $family:ident)*) => {
        $($(#[$when])? pub(crate) mod $family;)*

        pub use listed::*;

        /// The rules alone.
        #[allow(unused_imports, unreachable_pub, reason = "those of candle are named besides")]
        pub(crate) mod listed {
            $($(#[$when])? pub use super::$family::listed::*;)*
        }

        /// Every rule of this crate with its defaults.
        #[doc(hidden)]
        pub fn catalogue() -> Vec<Listing> {
            [$($(#[$when])? $family::listing()),*].into_iter().flatten().collect()
        }
    };
}

// Named, so that the compiler says of each which feature it needs.
#[cfg(feature = "candle")]
pub use gradient::{AdaptiveClip, Centralise, GradNoise};
#[cfg(feature = "candle")]
pub use matrix::{APOLLO, AdaMuon, Adafactor, GaLore, Muon, NorMuon, SOAP, Shampoo};

families! { descent adam schedule_free #[cfg(feature = "candle")] matrix gradient average }

mod mars;
mod moments;
