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
        listing::<Descent>("dx' = η·dx", "Cauchy 1847"),
        listing::<Momentum>("v = ρ·v + η·dx; dx' = v", "Polyak 1964"),
        listing::<Nesterov>("v = ρ·v - η·dx; dx' = η·dx - ρ·v", "Nesterov 1983; Sutskever et al. 2013"),
        listing::<Rprop>(
            "dx' = step·sign(dx), with a step that grows while the sign stays",
            "Riedmiller & Braun 1993",
        ),
        listing::<RMSProp>("dx' = η·dx / (√v + ε)", "Hinton 2012; Graves 2013, arXiv 1308.0850"),
        listing::<AdaGrad>("dx' = η·dx / (√Σdx² + ε)", "Duchi, Hazan & Singer 2011"),
        listing::<AdaDelta>(
            "dx' = dx·√(u + ε) / √(v + ε), u the mean of dx'²",
            "Zeiler 2012, arXiv 1212.5701",
        ),
        listing::<MADGRAD>(
            "z = x₀ - Σ l·dx / (∛(Σ l·dx²) + ε); dx' = (1 - ρ)·(x - z), l = η·√t",
            "Defazio & Jelassi 2021, arXiv 2101.11075",
        ),
        listing::<MarsLion>(
            "Lion::signum with c = dx + γ·β / (1 - β)·(dx - dxₜ₋₁), ‖c‖ ≤ 1, for dx",
            "Yuan et al. 2024, arXiv 2411.10438",
        ),
        listing::<Lion>("dx' = η·(sign(β₁·m + (1 - β₁)·dx) + λ·x)", "Chen et al. 2023, arXiv 2302.06675"),
        listing::<LARS>(
            "u = dx + λ·x; v = ρ·v + η·r·u, r = trust·‖x‖ / ‖u‖; dx' = v",
            "You, Gitman & Ginsburg 2017, arXiv 1708.03888",
        ),
    ]
}
