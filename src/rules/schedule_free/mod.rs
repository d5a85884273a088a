//! Rules without a schedule: the gradient is taken between two sequences of weights.

pub(crate) mod interpolation;

list! {
    schedule_free_sgd::ScheduleFreeSGD, "z -= η·(dx + λ·y); x̄ = mean of z; y = β·x̄ + (1 - β)·z", "Defazio et al. 2024, arXiv 2405.15682";
    schedule_free_radam::ScheduleFreeRAdam, "ScheduleFree with r·η, r of RAdam", "Defazio et al. 2024, arXiv 2405.15682";
    schedule_free::ScheduleFree, "z -= η·(dx / (√v̂ + ε) + λ·y); x̄ = mean of z; y = β₁·x̄ + (1 - β₁)·z", "Defazio et al. 2024, arXiv 2405.15682";
}
