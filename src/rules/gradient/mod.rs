//! Steps that stand before or behind a rule in a chain: decay, clipping, noise, accumulation.

pub(crate) mod window_sum;

list! {
    weight_decay::WeightDecay, "dx' = dx + λ·x", "L2 regularisation";
    sign_decay::SignDecay, "dx' = dx + λ·sign(x)", "L1 regularisation";
    scale::Scale, "dx' = α·dx", "the sign or size of the objective";
    clamp::Clamp, "dx' = x - clamp(x - dx, low, high)", "bounds on the parameter";
    clip_grad::ClipGrad, "dx' = clamp(dx, -δ, δ)", "clipping by value";
    clip_norm::ClipNorm, "dx' = dx·min(1, ω / ‖dx‖ₚ), per tensor", "Pascanu et al. 2012, arXiv 1211.5063";
    clip_global_norm::ClipGlobalNorm, "dx' = dx·min(1, ω / ‖all dx‖₂)", "Pascanu et al. 2012, arXiv 1211.5063";
    skip_outliers::SkipOutliers, "no step where ‖all dx‖₂ > mean + σ·deviation of the last norms", "OLMo et al. 2024, arXiv 2501.00656";
    #[cfg(feature = "candle")]
    adaptive_clip::AdaptiveClip, "dx' = dx·min(1, ω·‖x‖ / ‖dx‖), per row", "Brock et al. 2021, arXiv 2102.06171";
    #[cfg(feature = "candle")]
    centralise::Centralise, "dx' = dx - mean of dx, per row", "Yong et al. 2020, arXiv 2004.01461";
    #[cfg(feature = "candle")]
    grad_noise::GradNoise, "dx' = dx + N(0, σ² / t^γ)", "Neelakantan et al. 2015, arXiv 1511.06807";
    accum_grad::AccumGrad, "the mean of n gradients, every n-th call", "gradient accumulation";
}
