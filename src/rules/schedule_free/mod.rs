//! Rules that need no learning-rate schedule: the gradient is taken between two sequences of weights.

pub(crate) mod interpolation;

#[expect(clippy::module_inception, reason = "the rule has the name of its family")]
mod schedule_free;
mod schedule_free_radam;
mod schedule_free_sgd;

pub use schedule_free::ScheduleFree;
pub use schedule_free_radam::ScheduleFreeRAdam;
pub use schedule_free_sgd::ScheduleFreeSGD;

use super::listing::{Listing, listing};

/// The rules of this family with their defaults.
pub(super) fn listings() -> Vec<Listing> {
    vec![
        listing::<ScheduleFreeSGD>(),
        listing::<ScheduleFreeRAdam>(),
        listing::<ScheduleFree>(),
    ]
}
