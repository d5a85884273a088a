//! The method `with_fallback` of rules that take only matrices, which makes a [`Fallback`].

use super::Fallback;
use crate::rule::Rule;
use crate::rules::{AdaMuon, Muon, NorMuon};

macro_rules! matrices_only {
    ($($Rule:ident)*) => {$(
        impl $Rule {
            /// Makes a [`Fallback`]: parameters that are not matrices, and those that [`Fallback::except`]
            /// names, get another rule.
            pub fn with_fallback<F: Rule + Clone>(self, fallback: F) -> Fallback<Self, F> {
                Fallback::new(self, fallback)
            }
        }
    )*};
}

matrices_only!(Muon NorMuon AdaMuon);
