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
        listing::<Adam>("dx' = η·m̂ / (√v̂ + ε)", "Kingma & Ba 2014, arXiv 1412.6980"),
        listing::<AdamW>("dx' = η·(m̂ / (√v̂ + ε) + λ·x)", "Loshchilov & Hutter 2017, arXiv 1711.05101"),
        listing::<RAdam>("dx' = r·η·m̂ / (√v̂ + ε)", "Liu et al. 2019, arXiv 1908.03265"),
        listing::<AdaMax>(
            "dx' = η·m̂ / (u + ε), u the decaying maximum of the gradients",
            "Kingma & Ba 2014, arXiv 1412.6980",
        ),
        listing::<OAdam>("u = η·m̂ / (√v̂ + ε); dx' = 2·uₜ - uₜ₋₁", "Daskalakis et al. 2017, arXiv 1711.00141"),
        listing::<AMSGrad>("dx' = η·m / (√max v + ε)", "Reddi, Kale & Kumar 2018, arXiv 1904.09237"),
        listing::<NAdam>("dx' = η·(β₁·m̂ + (1 - β₁)·dx / (1 - β₁ᵗ)) / (√(β₂·v̂) + ε)", "Dozat 2016"),
        listing::<AdaBelief>(
            "dx' = η·m̂ / (√ŝ + ε), s the mean of (dx - m)²",
            "Zhuang et al. 2020, arXiv 2010.07468",
        ),
        listing::<Yogi>("v = v - (1 - β₂)·sign(v - dx²)·dx²; dx' = η·m̂ / (√v̂ + ε)", "Zaheer et al. 2018"),
        listing::<AdEMAMix>(
            "dx' = η·((m̂ + α·slow) / (√v̂ + ε) + λ·x)",
            "Pagliardini et al. 2024, arXiv 2409.03137",
        ),
        listing::<Adan>(
            "dx' = η·(m̂ + β₂·d̂) / (√n̂ + ε), d the mean difference of gradients",
            "Xie et al. 2022, arXiv 2208.06677",
        ),
        listing::<ADOPT>(
            "m = β₁·m + (1 - β₁)·clamp(dx / √vₜ₋₁); dx' = η·(m + λ·x)",
            "Taniguchi et al. 2024, arXiv 2411.02853",
        ),
        listing::<LaProp>(
            "m = β₁·m + (1 - β₁)·dx / (√v̂ + ε); dx' = η·(m̂ + λ·x)",
            "Ziyin, Wang & Ueda 2020, arXiv 2002.04839",
        ),
        listing::<Grams>(
            "dx' = η·(abs(m̂ / (√v̂ + ε))·sign(dx) + λ·x)",
            "Cao, Li & Song 2024, arXiv 2412.17107",
        ),
        listing::<StableAdamW>(
            "dx' = η / max(1, r)·(m̂ / (√v̂ + ε) + λ·x), r = rms(dx / √v̂)",
            "Wortsman et al. 2023, arXiv 2304.13013",
        ),
        listing::<MarsAdamW>(
            "AdamW with c = dx + γ·β₁ / (1 - β₁)·(dx - dxₜ₋₁), ‖c‖ ≤ 1, for dx",
            "Yuan et al. 2024, arXiv 2411.10438",
        ),
        listing::<NAdamW>(
            "dx' = η·((μₜ₊₁·m̂ + (1 - μₜ)·d̂x) / (√v̂ + ε) + λ·x), μ growing to β₁",
            "Dozat 2016; Loshchilov & Hutter 2017, arXiv 1711.05101",
        ),
        listing::<AMSGradW>(
            "dx' = η·(m̂ / (√(max v)^ + ε) + λ·x)",
            "Reddi, Kale & Kumar 2018, arXiv 1904.09237",
        ),
        listing::<LAMB>("u = m̂ / (√v̂ + ε) + λ·x; dx' = η·u·‖x‖ / ‖u‖", "You et al. 2019, arXiv 1904.00962"),
        listing::<Prodigy>(
            "dx' = d·η·m / (√v + d·ε), d = max(d, r / Σ abs s) of the whole model",
            "Mishchenko & Defazio 2023, arXiv 2306.06101",
        ),
    ]
}
