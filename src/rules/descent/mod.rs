//! Gradient descent with and without momentum, and with a rate for each element.

mod adadelta;
mod adagrad;
#[expect(clippy::module_inception, reason = "the rule has the name of its family")]
mod descent;
pub(super) mod lars;
mod lion;
mod madgrad;
mod mars_lion;
mod momentum;
mod nesterov;
mod rmsprop;
mod rprop;

pub use adadelta::AdaDelta;
pub use adagrad::AdaGrad;
pub use descent::Descent;
pub use lars::LARS;
pub use lion::Lion;
pub use madgrad::MADGRAD;
pub use mars_lion::MarsLion;
pub use momentum::Momentum;
pub use nesterov::Nesterov;
pub use rmsprop::RMSProp;
pub use rprop::Rprop;

use super::listing::{Listing, listing};

/// The rules of this family with their defaults.
pub(super) fn listings() -> Vec<Listing> {
    vec![
        listing::<Descent>(),
        listing::<Momentum>(),
        listing::<Nesterov>(),
        listing::<Rprop>(),
        listing::<RMSProp>(),
        listing::<AdaGrad>(),
        listing::<AdaDelta>(),
        listing::<MADGRAD>(),
        listing::<MarsLion>(),
        listing::<Lion>(),
        listing::<LARS>(),
    ]
}
