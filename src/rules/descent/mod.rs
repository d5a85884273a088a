//! Gradient descent with and without momentum, and with a rate for each element.

list! {
    descent::Descent, "dx' = η·dx", "Cauchy 1847";
    momentum::Momentum, "v = ρ·v + η·dx; dx' = v", "Polyak 1964";
    nesterov::Nesterov, "v = ρ·v - η·dx; dx' = η·dx - ρ·v", "Nesterov 1983; Sutskever et al. 2013";
    rprop::Rprop, "dx' = step·sign(dx), with a step that grows while the sign stays", "Riedmiller & Braun 1993";
    rmsprop::RMSProp, "dx' = η·dx / (√v + ε)", "Hinton 2012; Graves 2013, arXiv 1308.0850";
    adagrad::AdaGrad, "dx' = η·dx / (√Σdx² + ε)", "Duchi, Hazan & Singer 2011";
    adadelta::AdaDelta, "dx' = dx·√(u + ε) / √(v + ε), u the mean of dx'²", "Zeiler 2012, arXiv 1212.5701";
    madgrad::MADGRAD, "z = x₀ - Σ l·dx / (∛(Σ l·dx²) + ε); dx' = (1 - ρ)·(x - z), l = η·√t", "Defazio & Jelassi 2021, arXiv 2101.11075";
    mars_lion::MarsLion, "Lion::signum with c = dx + γ·β / (1 - β)·(dx - dxₜ₋₁), ‖c‖ ≤ 1, for dx", "Yuan et al. 2024, arXiv 2411.10438";
    lion::Lion, "dx' = η·(sign(β₁·m + (1 - β₁)·dx) + λ·x)", "Chen et al. 2023, arXiv 2302.06675";
    lars::LARS, "u = dx + λ·x; v = ρ·v + η·r·u, r = trust·‖x‖ / ‖u‖; dx' = v", "You, Gitman & Ginsburg 2017, arXiv 1708.03888";
}
