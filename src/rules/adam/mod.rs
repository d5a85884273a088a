//! Rules that divide a mean of gradients by the root of a mean of their squares: Adam and its descendants.

mod adabelief;
#[expect(clippy::module_inception, reason = "the rule has the name of its family")]
pub(super) mod adam;
mod adamax;
pub(super) mod adamw;
mod adan;
mod ademamix;
mod adopt;
mod amsgrad;
mod amsgradw;
mod grams;
mod lamb;
mod laprop;
mod mars_adamw;
mod nadam;
mod nadamw;
mod oadam;
mod prodigy;
pub(super) mod radam;
mod stable_adamw;
mod yogi;

pub use adabelief::AdaBelief;
pub use adam::Adam;
pub use adamax::AdaMax;
pub use adamw::AdamW;
pub use adan::Adan;
pub use ademamix::AdEMAMix;
pub use adopt::ADOPT;
pub use amsgrad::AMSGrad;
pub use amsgradw::AMSGradW;
pub use grams::Grams;
pub use lamb::LAMB;
pub use laprop::LaProp;
pub use mars_adamw::MarsAdamW;
pub use nadam::NAdam;
pub use nadamw::NAdamW;
pub use oadam::OAdam;
pub use prodigy::Prodigy;
pub use radam::RAdam;
pub use stable_adamw::StableAdamW;
pub use yogi::Yogi;

use super::listing::{Listing, listing};

/// The rules of this family with their defaults.
pub(super) fn listings() -> Vec<Listing> {
    vec![
        listing::<Adam>(),
        listing::<AdamW>(),
        listing::<RAdam>(),
        listing::<AdaMax>(),
        listing::<OAdam>(),
        listing::<AMSGrad>(),
        listing::<NAdam>(),
        listing::<AdaBelief>(),
        listing::<Yogi>(),
        listing::<AdEMAMix>(),
        listing::<Adan>(),
        listing::<ADOPT>(),
        listing::<LaProp>(),
        listing::<Grams>(),
        listing::<StableAdamW>(),
        listing::<MarsAdamW>(),
        listing::<NAdamW>(),
        listing::<AMSGradW>(),
        listing::<LAMB>(),
        listing::<Prodigy>(),
    ]
}
