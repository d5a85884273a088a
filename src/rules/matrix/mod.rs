//! Rules that take a parameter as matrices, and what these rules share: forms, products and bases.

mod bases;
mod form;
mod low_rank;
mod momentum;
mod orthogonal;
mod stack;
mod tensors;

pub(crate) use form::Matrices;
pub use form::MatrixForm;
pub use orthogonal::{NewtonSchulz, Products, StepScale};
pub(crate) use orthogonal::{Orthogonal, at_most_100, orthogonal_parameters};
pub(crate) use tensors::{as_matrix, norms, row_norms};

mod adafactor;
mod adamuon;
mod apollo;
mod galore;
mod muon;
mod normuon;
mod shampoo;
mod soap;

pub use adafactor::Adafactor;
pub use adamuon::AdaMuon;
pub use apollo::APOLLO;
pub use galore::GaLore;
pub use muon::Muon;
pub use normuon::NorMuon;
pub use shampoo::Shampoo;
pub use soap::SOAP;

use super::listing::{Listing, listing};
use crate::rule::range;

/// The check of two finite numbers of 0 or more.
fn both_non_negative((first, second): (f64, f64)) -> Option<&'static str> {
    range::non_negative(first)
        .or(range::non_negative(second))
        .and(Some("two finite numbers of 0 or more"))
}

/// The rules of this family with their defaults.
pub(super) fn listings() -> Vec<Listing> {
    vec![
        listing::<Adafactor>(),
        listing::<Muon>(),
        listing::<NorMuon>(),
        listing::<AdaMuon>(),
        listing::<SOAP>(),
        listing::<Shampoo>(),
        listing::<GaLore>(),
        listing::<APOLLO>(),
    ]
}
