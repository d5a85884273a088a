//! The text to train on where none is given: this crate.

macro_rules! embed {
    ($($path:literal)*) => {
        &[$(include_str!(concat!("../../", $path))),*]
    };
}

/// What is written about the crate, and its rules.
pub(crate) const SOURCES: &[&str] = embed! {
    "README.md"
    "ARCHITECTURE.md"
    "src/guide/coming_from.md"
    "src/guide/measurements.md"
    "src/rules/gradient/accum_grad.rs"
    "src/rules/adam/adabelief.rs"
    "src/rules/descent/adadelta.rs"
    "src/rules/matrix/adafactor.rs"
    "src/rules/descent/adagrad.rs"
    "src/rules/adam/adam.rs"
    "src/rules/adam/adamax.rs"
    "src/rules/adam/adamw.rs"
    "src/rules/adam/adan.rs"
    "src/rules/gradient/whole/adaptive_clip.rs"
    "src/rules/adam/ademamix.rs"
    "src/rules/adam/amsgrad.rs"
    "src/rules/gradient/whole/centralise.rs"
    "src/rules/gradient/clip_global_norm.rs"
    "src/rules/gradient/clip_grad.rs"
    "src/rules/gradient/clip_norm.rs"
    "src/rules/descent/descent.rs"
    "src/rules/average/ema.rs"
    "src/rules/gradient/whole/grad_noise.rs"
    "src/rules/adam/lamb.rs"
    "src/rules/descent/lars.rs"
    "src/rules/descent/lion.rs"
    "src/rules/average/lookahead.rs"
    "src/rules/matrix/mod.rs"
    "src/rules/mod.rs"
    "src/rules/moments.rs"
    "src/rules/descent/momentum.rs"
    "src/rules/matrix/muon.rs"
    "src/rules/adam/nadam.rs"
    "src/rules/descent/nesterov.rs"
    "src/rules/adam/oadam.rs"
    "src/rules/adam/prodigy.rs"
    "src/rules/adam/radam.rs"
    "src/rules/descent/rmsprop.rs"
    "src/rules/descent/rprop.rs"
    "src/rules/gradient/scale.rs"
    "src/rules/schedule_free/schedule_free.rs"
    "src/rules/gradient/sign_decay.rs"
    "src/rules/average/uniform_average.rs"
    "src/rules/gradient/weight_decay.rs"
    "src/rules/adam/yogi.rs"
    "src/numbers/value/expr.rs"
    "src/numbers/value/lane.rs"
    "src/numbers/value/mod.rs"
};
