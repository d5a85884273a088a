//! The text to train on where none is given: this crate.

macro_rules! embed {
    ($($path:literal)*) => {
        &[$(include_str!(concat!("../../", $path))),*]
    };
}

/// What is written about the crate, and its rules.
pub(crate) const SOURCES: &[&str] = embed! {
    "README.md"
    "CHANGELOG.md"
    "src/rules/accum_grad.rs"
    "src/rules/adabelief.rs"
    "src/rules/adadelta.rs"
    "src/rules/adafactor.rs"
    "src/rules/adagrad.rs"
    "src/rules/adam.rs"
    "src/rules/adamax.rs"
    "src/rules/adamw.rs"
    "src/rules/adan.rs"
    "src/rules/adaptive_clip.rs"
    "src/rules/ademamix.rs"
    "src/rules/amsgrad.rs"
    "src/rules/centralise.rs"
    "src/rules/clip_global_norm.rs"
    "src/rules/clip_grad.rs"
    "src/rules/clip_norm.rs"
    "src/rules/descent.rs"
    "src/rules/ema.rs"
    "src/rules/grad_noise.rs"
    "src/rules/lamb.rs"
    "src/rules/lars.rs"
    "src/rules/lion.rs"
    "src/rules/lookahead.rs"
    "src/matrices/mod.rs"
    "src/rules/mod.rs"
    "src/rules/moments.rs"
    "src/rules/momentum.rs"
    "src/rules/muon.rs"
    "src/rules/nadam.rs"
    "src/rules/nesterov.rs"
    "src/rules/oadam.rs"
    "src/rules/prodigy.rs"
    "src/rules/radam.rs"
    "src/rules/rmsprop.rs"
    "src/rules/rprop.rs"
    "src/rules/scale.rs"
    "src/rules/schedule_free.rs"
    "src/rules/sign_decay.rs"
    "src/rules/uniform_average.rs"
    "src/rules/weight_decay.rs"
    "src/rules/yogi.rs"
    "src/value/expr.rs"
    "src/value/lane.rs"
    "src/value/mod.rs"
};
