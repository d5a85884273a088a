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
        listing::<ScheduleFreeSGD>(
            "z -= η·(dx + λ·y); x̄ = mean of z; y = β·x̄ + (1 - β)·z",
            "Defazio et al. 2024, arXiv 2405.15682",
        ),
        listing::<ScheduleFreeRAdam>(
            "ScheduleFree with r·η, r of RAdam",
            "Defazio et al. 2024, arXiv 2405.15682",
        ),
        listing::<ScheduleFree>(
            "z -= η·(dx / (√v̂ + ε) + λ·y); x̄ = mean of z; y = β₁·x̄ + (1 - β₁)·z",
            "Defazio et al. 2024, arXiv 2405.15682",
        ),
    ]
}
