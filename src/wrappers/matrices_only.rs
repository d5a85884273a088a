//! The short way to a [`Fallback`] for rules that take matrices alone.

use super::Fallback;
use crate::rule::Rule;
use crate::rules::{AdaMuon, Muon, NorMuon};

macro_rules! matrices_only {
    ($($Rule:ident)*) => {$(
        impl $Rule {
            /// Gives parameters that are no matrices, and those that [`Fallback::except`] names, to another
            /// rule.
            pub fn with_fallback<F: Rule + Clone>(self, fallback: F) -> Fallback<Self, F> {
                Fallback::new(self, fallback)
            }
        }
    )*};
}

matrices_only!(Muon NorMuon AdaMuon);
