//! Published algorithms and the steps that stand beside them in a chain, one per file.
//!
#![doc = ""]
#![doc = include_str!("table.md")]

mod bases;
mod interpolation;
mod low_rank;
mod mars;
mod moments;
mod stack;
mod window_sum;

use crate::rule::Rule;

/// A row of the [`catalogue`].
#[doc(hidden)]
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Listing {
    /// The rule's name.
    pub name: &'static str,
    /// What it computes, in short.
    pub recurrence: &'static str,
    /// Where it comes from.
    pub source: &'static str,
    /// The rule with its defaults.
    pub rule: Box<dyn Rule>,
}

// Every rule is listed once, below. The listing exports it and makes its row of `catalogue`, from which configurations and the tests take the rules and
// the table its rows.
macro_rules! list {
    ($($module:ident::$Rule:ident, $recurrence:literal, $source:literal;)*) => {
        $(mod $module;)*
        $(pub use $module::$Rule;)*

        /// The rules alone.
        pub(crate) mod listed {
            $(pub use super::$Rule;)*
        }

        /// Every rule of this crate with its defaults.
        #[doc(hidden)]
        pub fn catalogue() -> Vec<Listing> {
            vec![$(Listing {
                name: stringify!($Rule),
                recurrence: $recurrence,
                source: $source,
                rule: Box::new($Rule::default()),
            }),*]
        }
    };
}

list! {
    descent::Descent, "dx' = η·dx", "Cauchy 1847";
    momentum::Momentum, "v = ρ·v + η·dx; dx' = v", "Polyak 1964";
    nesterov::Nesterov, "v = ρ·v - η·dx; dx' = η·dx - ρ·v", "Nesterov 1983; Sutskever et al. 2013";
    rprop::Rprop, "dx' = step·sign(dx), with a step that grows while the sign stays", "Riedmiller & Braun 1993";
    rmsprop::RMSProp, "dx' = η·dx / (√v + ε)", "Hinton 2012; Graves 2013, arXiv 1308.0850";
    adagrad::AdaGrad, "dx' = η·dx / (√Σdx² + ε)", "Duchi, Hazan & Singer 2011";
    adadelta::AdaDelta, "dx' = dx·√(u + ε) / √(v + ε), u the mean of dx'²", "Zeiler 2012, arXiv 1212.5701";
    adam::Adam, "dx' = η·m̂ / (√v̂ + ε)", "Kingma & Ba 2014, arXiv 1412.6980";
    adamw::AdamW, "dx' = η·(m̂ / (√v̂ + ε) + λ·x)", "Loshchilov & Hutter 2017, arXiv 1711.05101";
    radam::RAdam, "dx' = r·η·m̂ / (√v̂ + ε)", "Liu et al. 2019, arXiv 1908.03265";
    adamax::AdaMax, "dx' = η·m̂ / (u + ε), u the decaying maximum of the gradients", "Kingma & Ba 2014, arXiv 1412.6980";
    oadam::OAdam, "u = η·m̂ / (√v̂ + ε); dx' = 2·uₜ - uₜ₋₁", "Daskalakis et al. 2017, arXiv 1711.00141";
    amsgrad::AMSGrad, "dx' = η·m / (√max v + ε)", "Reddi, Kale & Kumar 2018, arXiv 1904.09237";
    nadam::NAdam, "dx' = η·(β₁·m̂ + (1 - β₁)·dx / (1 - β₁ᵗ)) / (√(β₂·v̂) + ε)", "Dozat 2016";
    adabelief::AdaBelief, "dx' = η·m̂ / (√ŝ + ε), s the mean of (dx - m)²", "Zhuang et al. 2020, arXiv 2010.07468";
    yogi::Yogi, "v = v - (1 - β₂)·sign(v - dx²)·dx²; dx' = η·m̂ / (√v̂ + ε)", "Zaheer et al. 2018";
    ademamix::AdEMAMix, "dx' = η·((m̂ + α·slow) / (√v̂ + ε) + λ·x)", "Pagliardini et al. 2024, arXiv 2409.03137";
    adan::Adan, "dx' = η·(m̂ + β₂·d̂) / (√n̂ + ε), d the mean difference of gradients", "Xie et al. 2022, arXiv 2208.06677";
    adopt::ADOPT, "m = β₁·m + (1 - β₁)·clamp(dx / √vₜ₋₁); dx' = η·(m + λ·x)", "Taniguchi et al. 2024, arXiv 2411.02853";
    laprop::LaProp, "m = β₁·m + (1 - β₁)·dx / (√v̂ + ε); dx' = η·(m̂ + λ·x)", "Ziyin, Wang & Ueda 2020, arXiv 2002.04839";
    grams::Grams, "dx' = η·(abs(m̂ / (√v̂ + ε))·sign(dx) + λ·x)", "Cao, Li & Song 2024, arXiv 2412.17107";
    madgrad::MADGRAD, "z = x₀ - Σ l·dx / (∛(Σ l·dx²) + ε); dx' = (1 - ρ)·(x - z), l = η·√t", "Defazio & Jelassi 2021, arXiv 2101.11075";
    stable_adamw::StableAdamW, "dx' = η / max(1, r)·(m̂ / (√v̂ + ε) + λ·x), r = rms(dx / √v̂)", "Wortsman et al. 2023, arXiv 2304.13013";
    mars_adamw::MarsAdamW, "AdamW with c = dx + γ·β₁ / (1 - β₁)·(dx - dxₜ₋₁), ‖c‖ ≤ 1, for dx", "Yuan et al. 2024, arXiv 2411.10438";
    mars_lion::MarsLion, "Lion::signum with c = dx + γ·β / (1 - β)·(dx - dxₜ₋₁), ‖c‖ ≤ 1, for dx", "Yuan et al. 2024, arXiv 2411.10438";
    nadamw::NAdamW, "dx' = η·((μₜ₊₁·m̂ + (1 - μₜ)·d̂x) / (√v̂ + ε) + λ·x), μ growing to β₁", "Dozat 2016; Loshchilov & Hutter 2017, arXiv 1711.05101";
    amsgradw::AMSGradW, "dx' = η·(m̂ / (√(max v)^ + ε) + λ·x)", "Reddi, Kale & Kumar 2018, arXiv 1904.09237";
    schedule_free_sgd::ScheduleFreeSGD, "z -= η·(dx + λ·y); x̄ = mean of z; y = β·x̄ + (1 - β)·z", "Defazio et al. 2024, arXiv 2405.15682";
    schedule_free_radam::ScheduleFreeRAdam, "ScheduleFree with r·η, r of RAdam", "Defazio et al. 2024, arXiv 2405.15682";
    lion::Lion, "dx' = η·(sign(β₁·m + (1 - β₁)·dx) + λ·x)", "Chen et al. 2023, arXiv 2302.06675";
    lars::LARS, "u = dx + λ·x; v = ρ·v + η·r·u, r = trust·‖x‖ / ‖u‖; dx' = v", "You, Gitman & Ginsburg 2017, arXiv 1708.03888";
    lamb::LAMB, "u = m̂ / (√v̂ + ε) + λ·x; dx' = η·u·‖x‖ / ‖u‖", "You et al. 2019, arXiv 1904.00962";
    adafactor::Adafactor, "dx' = η·rms(x)·u, u = dx / √v with v from means of rows and columns", "Shazeer & Stern 2018, arXiv 1804.04235";
    muon::Muon, "dx' = η·u, u the momentum with singular values of about 1", "Jordan et al. 2024";
    normuon::NorMuon, "dx' = η·w·‖u‖ / ‖w‖, w Muon's u divided by the root mean square of its rows", "Li et al. 2025, arXiv 2510.05491";
    adamuon::AdaMuon, "dx' = η·scale·w / rms(w), w = u / √v, u Muon's of the momentum's sign", "Si et al. 2025, arXiv 2507.11005";
    soap::SOAP, "dx' = η·L·(m̂' / (√v̂' + ε))·Rᵀ, Adam in the eigenvectors L, R of mean dx·dxᵀ, dxᵀ·dx", "Vyas et al. 2024, arXiv 2409.11321";
    shampoo::Shampoo, "dx' = η·(mean dx·dxᵀ)^-¼·m̂·(mean dxᵀ·dx)^-¼, as long as Adam's", "Gupta, Koren & Singer 2018, arXiv 1802.09568";
    galore::GaLore, "dx' = η·α·Pᵀ·u, u Adam's step for P·dx, P random", "Zhao et al. 2024, arXiv 2403.03507";
    apollo::APOLLO, "dx' = η·α·dx·s, s by how much Adam scales P·dx, P random", "Zhu et al. 2024, arXiv 2412.05270";
    prodigy::Prodigy, "dx' = d·η·m / (√v + d·ε), d = max(d, r / Σ abs s) of the whole model", "Mishchenko & Defazio 2023, arXiv 2306.06101";
    schedule_free::ScheduleFree, "z -= η·(dx / (√v̂ + ε) + λ·y); x̄ = mean of z; y = β₁·x̄ + (1 - β₁)·z", "Defazio et al. 2024, arXiv 2405.15682";
    weight_decay::WeightDecay, "dx' = dx + λ·x", "L2 regularisation";
    sign_decay::SignDecay, "dx' = dx + λ·sign(x)", "L1 regularisation";
    scale::Scale, "dx' = α·dx", "the sign or size of the objective";
    clamp::Clamp, "dx' = x - clamp(x - dx, low, high)", "bounds on the parameter";
    clip_grad::ClipGrad, "dx' = clamp(dx, -δ, δ)", "clipping by value";
    clip_norm::ClipNorm, "dx' = dx·min(1, ω / ‖dx‖ₚ), per tensor", "Pascanu et al. 2012, arXiv 1211.5063";
    clip_global_norm::ClipGlobalNorm, "dx' = dx·min(1, ω / ‖all dx‖₂)", "Pascanu et al. 2012, arXiv 1211.5063";
    skip_outliers::SkipOutliers, "no step where ‖all dx‖₂ > mean + σ·deviation of the last norms", "OLMo et al. 2024, arXiv 2501.00656";
    adaptive_clip::AdaptiveClip, "dx' = dx·min(1, ω·‖x‖ / ‖dx‖), per row", "Brock et al. 2021, arXiv 2102.06171";
    centralise::Centralise, "dx' = dx - mean of dx, per row", "Yong et al. 2020, arXiv 2004.01461";
    grad_noise::GradNoise, "dx' = dx + N(0, σ² / t^γ)", "Neelakantan et al. 2015, arXiv 1511.06807";
    lookahead::Lookahead, "every k-th step: slow += α·(x - dx - slow); dx' = x - slow", "Zhang et al. 2019, arXiv 1907.08610";
    ema::Ema, "dx' = dx; average = δ·average + (1 - δ)·(x - dx)", "exponential moving average of the weights";
    uniform_average::UniformAverage, "dx' = dx; average = mean of x - dx", "Polyak & Juditsky 1992; Izmailov et al. 2018, arXiv 1803.05407";
    accum_grad::AccumGrad, "the mean of n gradients, every n-th call", "gradient accumulation";
}
