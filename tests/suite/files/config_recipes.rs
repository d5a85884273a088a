//! Every optimiser and schedule of README's and the guide's recipes as a configuration.

use candle_core::{DType, Device};
use optimisers::config::OptimiserConfig;
use optimisers::{
    AccumGrad, Adam, AdamW, Average, ClipGlobalNorm, DecoupledDecay, Ema, Kahan, Lion, MixedPrecision, Muon,
    Offload, Optimiser, OptimiserChain, Q8, Schedule, SkipOutliers, SplitMaster, StochasticRounding, StoreAs,
    UniformAverage, setup_with,
};
use serde_json::{Value, json};

use crate::files::config::read;
use support::common::{Vars, random, var};

/// What a recipe says in a text, and in code.
fn recipes() -> Vec<(Value, Optimiser)> {
    let clipped = |omega, eta| OptimiserChain::new((ClipGlobalNorm::new(omega), AdamW::new(eta)));
    let muon = || Muon::new(0.02).with_fallback(AdamW::new(3e-4));
    vec![
        // README: train in bf16. Recipes: fine-tune in bf16.
        (
            json!({"MixedPrecision": {"dtype": "F32", "inner": [{"ClipGlobalNorm": {"omega": 1}}, {"AdamW": {"eta": 1e-2}}]}}),
            Optimiser::new(MixedPrecision::new(DType::F32, clipped(1.0, 1e-2))),
        ),
        (
            json!({"MixedPrecision": {"dtype": "F32", "inner": [{"ClipGlobalNorm": {"omega": 1}}, {"AdamW": {"eta": 1e-5}}]}}),
            Optimiser::new(MixedPrecision::new(DType::F32, clipped(1.0, 1e-5))),
        ),
        // The page `memory`: how parameters are kept.
        (json!("AdamW"), Optimiser::new(AdamW::default())),
        (
            json!({"MixedPrecision": {"dtype": "F32", "inner": "AdamW"}}),
            Optimiser::new(MixedPrecision::new(DType::F32, AdamW::default())),
        ),
        (
            json!({"MixedPrecision": {"dtype": "F32", "inner": {"StoreAs": {"slots": "Q8", "inner": "AdamW"}}}}),
            Optimiser::new(MixedPrecision::new(
                DType::F32,
                StoreAs::all(Q8, AdamW::default()),
            )),
        ),
        (
            json!({"StoreAs": {"slots": "Q8", "inner": "AdamW"}}),
            Optimiser::new(StoreAs::all(Q8, AdamW::default())),
        ),
        (
            json!({"SplitMaster": {"bits": 32, "inner": "AdamW"}}),
            Optimiser::new(SplitMaster::new(AdamW::default())),
        ),
        (
            json!({"SplitMaster": {"bits": 24, "inner": {"StoreAs": {"slots": "Q8", "inner": "AdamW"}}}}),
            Optimiser::new(SplitMaster::of_24_bits(StoreAs::all(Q8, AdamW::default()))),
        ),
        (
            json!({"Kahan": {"inner": "AdamW"}}),
            Optimiser::new(Kahan::new(AdamW::default())),
        ),
        (
            json!({"StochasticRounding": {"seed": 7, "inner": "AdamW"}}),
            Optimiser::new(StochasticRounding::new(7, AdamW::default())),
        ),
        (
            json!({"Offload": {"Kahan": {"inner": "AdamW"}}}),
            Optimiser::new(Offload::new(Kahan::new(AdamW::default()))),
        ),
        // Accumulate gradients.
        (
            json!([{"AccumGrad": {"n": 4}}, {"Adam": {"eta": 0.01}}]),
            Optimiser::new(OptimiserChain::new((AccumGrad::new(4), Adam::new(0.01)))),
        ),
        (
            json!([{"AccumGrad": {"n": 4, "average": "Weighted"}}, "Adam"]),
            Optimiser::new(OptimiserChain::new((
                AccumGrad {
                    average: Average::Weighted,
                    ..AccumGrad::new(4)
                },
                Adam::default(),
            ))),
        ),
        // Averages of the weights.
        (
            json!(["Adam", {"Ema": {"delta": 0.999}}]),
            Optimiser::new(OptimiserChain::new((Adam::default(), Ema::new(0.999)))),
        ),
        (
            json!(["Adam", "UniformAverage"]),
            Optimiser::new(OptimiserChain::new((Adam::default(), UniformAverage::default()))),
        ),
        // Matrices.
        (
            json!({"Fallback": {
                "inner": {"Muon": {"eta": 0.02}}, "fallback": {"AdamW": {"eta": 3e-4}}, "except": ["embedding*", "head*"],
            }}),
            Optimiser::new(muon().except(["embedding*", "head*"])),
        ),
        (
            json!({"MixedPrecision": {"dtype": "F32", "inner": [{"ClipGlobalNorm": {"omega": 1}}, {"Fallback": {
                "inner": {"Muon": {"eta": 0.02}}, "fallback": {"AdamW": {"eta": 3e-4}}, "except": ["embedding", "*norm*"],
            }}]}}),
            Optimiser::new(MixedPrecision::new(
                DType::F32,
                OptimiserChain::new((ClipGlobalNorm::new(1.0), muon().except(["embedding", "*norm*"]))),
            )),
        ),
        // Watch a run; decay beside a rule.
        (
            json!(["SkipOutliers", "Adam"]),
            Optimiser::new(OptimiserChain::new((SkipOutliers::default(), Adam::default()))),
        ),
        (
            json!({"DecoupledDecay": {"decay_lambda": 0.1, "cautious": true, "inner": {"Lion": {"eta": 1e-4}}}}),
            Optimiser::new(DecoupledDecay::new(0.1, Lion::new(1e-4)).cautious()),
        ),
    ]
}

/// All that an optimiser says of itself, as a text of one form.
fn description(optimiser: &Optimiser) -> String {
    serde_json::to_string(&OptimiserConfig::of(optimiser).expect("a configuration")).expect("a text")
}

#[test]
fn every_recipe_can_be_written() {
    for (text, expected) in recipes() {
        let built = read(text.clone())
            .optimiser()
            .unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(description(&built), description(&expected), "{text}");
        assert_eq!(
            (built.name(), built.fields(), built.places()),
            (expected.name(), expected.fields(), expected.places()),
            "{text}"
        );
    }
}

/// The recipe for several learning rates.
#[test]
fn rates_by_path_can_be_written() {
    let variable = || var(&random(1, &[2], DType::F32, &Device::Cpu));
    let model: Vars = ["encoder.weight", "head.bias", "head.weight"]
        .map(|path| (path.to_string(), variable()))
        .into();
    let state = setup_with(&model, |path, _| {
        Some(AdamW::new(if path.starts_with("head") { 1e-2 } else { 1e-3 }))
    })
    .expect("a state");
    let config = read(json!({"ByPath": [
        {"pattern": "head*", "optimiser": {"AdamW": {"eta": 1e-2}}},
        {"pattern": "*", "optimiser": {"AdamW": {"eta": 1e-3}}},
    ]}));
    let again = config.setup(&model).expect("a state");
    let optimisers = |state: &optimisers::StateTree| {
        state
            .leaves()
            .map(|leaf| description(leaf.optimiser()))
            .collect::<Vec<_>>()
    };
    assert_eq!(optimisers(&again), optimisers(&state));
}

#[test]
fn the_schedules_of_recipes_can_be_written() {
    let cases = [
        (
            json!({"Cosine": {"start": 1e-3, "end": 0, "steps": 1000}}),
            Schedule::cosine(1e-3, 0.0, 1000),
        ),
        (
            json!({"Cosine": {"start": 0.01, "end": 0, "steps": 100}}),
            Schedule::cosine(0.01, 0.0, 100),
        ),
        (
            json!({"Cosine": {"start": 1, "end": 0, "steps": 100, "relative": true}}),
            Schedule::cosine(1.0, 0.0, 100).relative(),
        ),
        (
            json!({"Linear": {"start": 0.1, "end": 1, "steps": 100, "relative": true}}),
            Schedule::linear(0.1, 1.0, 100).relative(),
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(
            serde_json::from_value::<Schedule>(text.clone())
                .unwrap_or_else(|error| panic!("{text}: {error}")),
            expected
        );
    }
}
