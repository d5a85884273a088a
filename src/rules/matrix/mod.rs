//! Rules that take a parameter as a matrix, and what they share: its form, products, bases.

mod bases;
mod form;
mod low_rank;
mod mean;
mod momentum;
mod orthogonal;
mod stack;
mod tensors;

pub(crate) use form::Matrices;
pub use form::MatrixForm;
pub(crate) use momentum::momentum_step;
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
    range::non_negative(first).or(range::non_negative(second)).and(Some("two finite numbers of 0 or more"))
}

/// The rules of this family with their defaults.
pub(super) fn listings() -> Vec<Listing> {
    vec![
        listing::<Adafactor>(
            "dx' = η·rms(x)·u, u = dx / √v with v from means of rows and columns",
            "Shazeer & Stern 2018, arXiv 1804.04235",
        ),
        listing::<Muon>("dx' = η·u, u the momentum with singular values of about 1", "Jordan et al. 2024"),
        listing::<NorMuon>(
            "dx' = η·w·‖u‖ / ‖w‖, w Muon's u divided by the root mean square of its rows",
            "Li et al. 2025, arXiv 2510.05491",
        ),
        listing::<AdaMuon>(
            "dx' = η·scale·w / rms(w), w = u / √v, u Muon's of the momentum's sign",
            "Si et al. 2025, arXiv 2507.11005",
        ),
        listing::<SOAP>(
            "dx' = η·L·(m̂' / (√v̂' + ε))·Rᵀ, Adam in the eigenvectors L, R of mean dx·dxᵀ, dxᵀ·dx",
            "Vyas et al. 2024, arXiv 2409.11321",
        ),
        listing::<Shampoo>(
            "dx' = η·(mean dx·dxᵀ)^-¼·m̂·(mean dxᵀ·dx)^-¼, as long as Adam's",
            "Gupta, Koren & Singer 2018, arXiv 1802.09568",
        ),
        listing::<GaLore>(
            "dx' = η·α·Pᵀ·u, u Adam's step for P·dx, P random",
            "Zhao et al. 2024, arXiv 2403.03507",
        ),
        listing::<APOLLO>(
            "dx' = η·α·dx·s, s by how much Adam scales P·dx, P random",
            "Zhu et al. 2024, arXiv 2412.05270",
        ),
    ]
}
