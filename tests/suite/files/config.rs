//! Optimisers from JSON and TOML.

use std::collections::BTreeMap;

use candle_core::{DType, Device};
use optimisers::config::{OptimiserConfig, Registry};
use optimisers::{
    Adam, AdamW, Adjust, ClipGlobalNorm, ClipGrad, ClipNorm, FieldValue, MixedPrecision, Momentum, Offload,
    Optimiser, OptimiserChain, Parameter, Q8, Rule, SignDecay, Sizes, StateTree, StoreAs, WeightDecay, rules,
};
use serde_json::{Value, json};

use support::common::{Vars, assert_same, grads, random, trajectory, unnamed, var};

pub(crate) fn read(value: Value) -> OptimiserConfig {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{value}: {error}"))
}

fn built(value: Value) -> Optimiser {
    read(value.clone())
        .optimiser()
        .unwrap_or_else(|error| panic!("{value}: {error}"))
}

/// The configuration after a way through JSON, and one through TOML.
pub(crate) fn copies(config: &OptimiserConfig) -> [OptimiserConfig; 2] {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct File {
        optimiser: OptimiserConfig,
    }
    let json = serde_json::to_string(config).expect("JSON");
    let toml = toml::to_string(&File {
        optimiser: config.clone(),
    })
    .expect("TOML");
    let file: File = toml::from_str(&toml).unwrap_or_else(|error| panic!("{toml}: {error}"));
    [
        serde_json::from_str(&json).unwrap_or_else(|error| panic!("{json}: {error}")),
        file.optimiser,
    ]
}

/// Another value of the same type that the rule with this default allows, and how JSON writes it.
fn other(value: FieldValue) -> (FieldValue, Value) {
    let near = |value: f64| match value {
        0.0 => 0.375,
        // RAdam's threshold is 4 at least.
        4.0 => 5.0,
        value if value.is_infinite() => value.signum() * 3.0,
        value => value * 0.875,
    };
    match value {
        FieldValue::Real(a) => (near(a).into(), json!(near(a))),
        FieldValue::Pair(a, b) => ((near(a), near(b)).into(), json!([near(a), near(b)])),
        FieldValue::Triple(a, b, c) => (
            (near(a), near(b), near(c)).into(),
            json!([near(a), near(b), near(c)]),
        ),
        FieldValue::Count(_) => (7u64.into(), json!(7)),
        FieldValue::Flag(value) => ((!value).into(), json!(!value)),
        FieldValue::Choice(choice) => {
            let other = choice.names().last().expect("a name");
            (
                FieldValue::Choice(choice.named(other).expect("a choice")),
                json!(other),
            )
        }
        FieldValue::Sizes(_) => (Sizes::from([2, 3]).into(), json!([2, 3])),
        _ => panic!("{value:?} is a type that this test does not know"),
    }
}

#[test]
fn every_rule_with_each_field() {
    for rules::Listing { name, rule, .. } in rules::catalogue() {
        let name = name.to_string();
        let mut all = serde_json::Map::new();
        let mut cases = vec![(json!(name), rule.clone()), (json!({&name: {}}), rule.clone())];
        let mut adjusted = rule.clone();
        for (field, default) in rule.fields() {
            let (value, text) = other(default);
            let mut one = rule.clone();
            assert!(
                value != default
                    && one.set_field(field, value).unwrap()
                    && adjusted.set_field(field, value).unwrap()
            );
            cases.push((json!({&name: {field: text}}), one));
            all.insert(field.to_string(), text);
        }
        cases.push((json!({&name: all}), adjusted));
        for (text, expected) in cases {
            let config = read(text.clone());
            assert_eq!(
                format!("{:?}", config.optimiser().unwrap()),
                format!("{expected:?}"),
                "{text}"
            );
            for copy in copies(&config) {
                assert_eq!(copy, config);
                assert_eq!(
                    format!("{:?}", copy.optimiser().unwrap()),
                    format!("{expected:?}"),
                    "{text}"
                );
            }
        }
    }
}

/// Configurations and what they mean, in code.
fn chains() -> Vec<(Value, Optimiser)> {
    vec![
        (
            json!([{"ClipGrad": {"delta": 0.5}}, {"WeightDecay": {"lambda": 0.1}}, {"Adam": {"eta": 0.01}}]),
            Optimiser::new(OptimiserChain::new((
                ClipGrad::new(0.5),
                WeightDecay::new(0.1),
                Adam::new(0.01),
            ))),
        ),
        (
            json!([{"ClipGlobalNorm": {"omega": 0.3}}, {"AdamW": {"eta": 0.01, "lambda": 0.1, "couple": false, "beta": [0, 0.99]}}]),
            Optimiser::new(OptimiserChain::new((
                ClipGlobalNorm::new(0.3),
                AdamW {
                    lambda: 0.1,
                    couple: false,
                    beta: (0.0, 0.99),
                    ..AdamW::new(0.01)
                },
            ))),
        ),
        (
            json!(["ClipGrad", [["SignDecay"], {"ClipNorm": {"omega": 1, "p": "inf"}}], "Momentum", []]),
            Optimiser::new(OptimiserChain::new((
                ClipGrad::default(),
                OptimiserChain::new((
                    OptimiserChain::new((SignDecay::default(),)),
                    ClipNorm {
                        p: f64::INFINITY,
                        ..ClipNorm::new(1.0)
                    },
                )),
                Momentum::default(),
                OptimiserChain::new(()),
            ))),
        ),
        (json!([]), Optimiser::new(OptimiserChain::new(()))),
        (
            json!({"MixedPrecision": {"dtype": "F64", "inner": [{"AccumGrad": {"n": 2}}, "Nesterov"]}}),
            Optimiser::new(MixedPrecision::new(
                DType::F64,
                OptimiserChain::new((optimisers::AccumGrad::new(2), optimisers::Nesterov::default())),
            )),
        ),
        (
            json!({"MixedPrecision": {"inner": {"Adam": {"eta": 1}}, "dtype": "F32"}}),
            Optimiser::new(MixedPrecision::new(DType::F32, Adam::new(1.0))),
        ),
        (
            json!({"MixedPrecision": {"dtype": "F32", "inner": ["ClipGrad", {"StoreAs": {"slots": "Q8", "inner": ["Adam", "ClipGrad"]}}]}}),
            Optimiser::new(MixedPrecision::new(
                DType::F32,
                OptimiserChain::new((
                    ClipGrad::default(),
                    StoreAs::all(Q8, OptimiserChain::new((Adam::default(), ClipGrad::default()))),
                )),
            )),
        ),
        (
            json!({"StoreAs": {"slots": {"m": "BF16", "v": "Q8"}, "inner": {"Adam": {"eta": 1}}}}),
            Optimiser::new(StoreAs::new(
                [("m", DType::BF16.into()), ("v", Q8)],
                Adam::new(1.0),
            )),
        ),
        (
            json!({"Offload": {"MixedPrecision": {"inner": {"Adam": {"eta": 1}}, "dtype": "F32"}}}),
            Optimiser::new(Offload::new(MixedPrecision::new(DType::F32, Adam::new(1.0)))),
        ),
        (
            json!({"Offload": ["ClipGrad", "Adam"]}),
            Optimiser::new(Offload::new(OptimiserChain::new((
                ClipGrad::default(),
                Adam::default(),
            )))),
        ),
    ]
}

#[test]
fn a_chain_moves_as_the_tuple_in_code() {
    for dtype in [DType::F32, DType::BF16] {
        let tensors = |seed| {
            [
                random(seed, &[7, 5], dtype, &Device::Cpu),
                random(seed + 1, &[3], dtype, &Device::Cpu),
            ]
        };
        let steps: Vec<_> = (10..16).map(|seed| grads(tensors(seed).map(Some))).collect();
        for (text, expected) in chains() {
            let run = |optimiser: Optimiser| -> Vec<_> {
                trajectory(Default::default(), optimiser, &tensors(1), &steps)
                    .into_iter()
                    .map(unnamed)
                    .collect()
            };
            let config = read(text.clone());
            let expected = run(expected);
            assert_same(&run(config.optimiser().unwrap()), &expected, &text);
            for copy in copies(&config) {
                assert_eq!(copy, config);
                assert_same(&run(copy.optimiser().unwrap()), &expected, &text);
            }
        }
    }
}

#[test]
fn toml_and_json_mean_the_same() {
    let pairs = [
        ("optimiser = 'AdamW'", json!("AdamW")),
        (
            "[optimiser.AdamW]\neta = 1\nbeta = [0.5, 0]",
            json!({"AdamW": {"eta": 1, "beta": [0.5, 0]}}),
        ),
        (
            "[[optimiser]]\nClipNorm = { p = inf }\n[[optimiser]]\nAdam = {}",
            json!([{"ClipNorm": {"p": "inf"}}, "Adam"]),
        ),
        (
            "optimiser = ['ClipGrad', { Descent = { eta = 0.5 } }]",
            json!(["ClipGrad", {"Descent": {"eta": 0.5}}]),
        ),
        (
            "[optimiser.MixedPrecision]\ndtype = 'F32'\ninner = ['Adam']",
            json!({"MixedPrecision": {"dtype": "F32", "inner": ["Adam"]}}),
        ),
    ];
    for (text, expected) in pairs {
        let table: toml::Table = toml::from_str(text).unwrap();
        let config: OptimiserConfig = table["optimiser"].clone().try_into().unwrap();
        assert_eq!(
            format!("{:?}", config.optimiser().unwrap()),
            format!("{:?}", built(expected)),
            "{text}"
        );
    }
    // In whatever order.
    let texts = [r#"{"StoreAs": {"slots": {"v": "Q8", "m": "F32"}, "inner": {"AdamW": {"eta": 1, "lambda": 2}}}}"#;
        2];
    let other =
        r#"{"StoreAs": {"inner": {"AdamW": {"lambda": 2, "eta": 1}}, "slots": {"m": "F32", "v": "Q8"}}}"#;
    let [one, same]: [OptimiserConfig; 2] = texts.map(|text| serde_json::from_str(text).unwrap());
    assert!(one == same && one == serde_json::from_str(other).unwrap());
    assert_ne!(one, serde_json::from_str(&other.replace("Q8", "F16")).unwrap());
    let alone: OptimiserConfig = toml::from_str("[AdamW]\neta = 0.5").unwrap();
    assert_eq!(alone, read(json!({"AdamW": {"eta": 0.5}})));
}

const PATHS: [&str; 5] = [
    "encoder.0.bias",
    "encoder.0.weight",
    "encoder.norm.running_mean",
    "head.bias",
    "head.weight",
];

pub(crate) fn model() -> Vars {
    PATHS
        .iter()
        .map(|path| (path.to_string(), var(&random(1, &[3], DType::BF16, &Device::Cpu))))
        .collect()
}

/// Patterns with their optimisers.
pub(crate) type Choices<'c> = &'c [(&'c str, Value)];

pub(crate) fn by_path(choices: Choices<'_>) -> OptimiserConfig {
    let choice = |(pattern, optimiser): &(&str, Value)| json!({"pattern": pattern, "optimiser": optimiser});
    read(json!({"ByPath": choices.iter().map(choice).collect::<Vec<_>>()}))
}

#[test]
fn the_first_pattern_that_matches_decides() {
    let mixed = json!({"MixedPrecision": {"dtype": "F32", "inner": ["ClipGrad", "Adam"]}});
    for left_out in [json!("LeaveOut"), json!(null)] {
        let config = by_path(&[
            ("*.running_*", left_out),
            ("head.????", json!("Descent")),
            ("*.bias", json!("Momentum")),
            ("*e*d*r.*.weight", json!([])),
            ("*", json!({"Offload": mixed})),
        ]);
        for config in copies(&config).into_iter().chain([config.clone()]) {
            let state = config.setup(&model()).unwrap();
            let names: Vec<_> = state
                .leaves()
                .map(|leaf| (leaf.path(), leaf.optimiser().name()))
                .collect();
            let expected = [
                ("encoder.0.bias", "Momentum"),
                ("encoder.0.weight", "OptimiserChain"),
                ("head.bias", "Descent"),
                (
                    "head.weight",
                    "Offload(MixedPrecision(F32, OptimiserChain(ClipGrad, Adam)))",
                ),
            ];
            assert_eq!(names, expected.map(|(path, name)| (path, name.to_string())));
        }
    }
}

/// Every row of the first table of the page `memory`, and decays.
#[test]
fn every_way_to_store_parameters_can_be_written() {
    let cases = [
        (
            json!({"SplitMaster": {"bits": 32, "inner": "AdamW"}}),
            "SplitMaster(AdamW)",
        ),
        (
            json!({"SplitMaster": {"bits": 24, "inner": {"StoreAs": {"slots": "Q8", "inner": "AdamW"}}}}),
            "SplitMaster(24 bits, StoreAs(Q8, AdamW))",
        ),
        (
            json!({"Kahan": {"inner": ["ClipGrad", "AdamW"]}}),
            "Kahan(OptimiserChain(ClipGrad, AdamW))",
        ),
        (
            json!({"Offload": {"StochasticRounding": {"seed": 7, "inner": "AdamW"}}}),
            "Offload(StochasticRounding(AdamW))",
        ),
        (
            json!({"DecoupledDecay": {"decay_lambda": 0.5, "inner": "Lion"}}),
            "DecoupledDecay(Lion)",
        ),
        (
            json!({"MixedPrecision": {"dtype": "F32", "inner": ["ClipGrad", {"DecoupledDecay": {"decay_lambda": 0.5, "inner": "Lion", "cautious": true, "decay_eta_max": 0.25}}]}}),
            "MixedPrecision(F32, OptimiserChain(ClipGrad, DecoupledDecay(cautious, Lion)))",
        ),
    ];
    for (value, name) in cases {
        let config = read(value);
        let optimiser = config.optimiser().expect("an optimiser");
        assert_eq!(optimiser.name(), name);
        for copy in copies(&config) {
            let copy = copy.optimiser().expect("an optimiser");
            assert_eq!(
                (copy.name(), copy.fields()),
                (optimiser.name(), optimiser.fields())
            );
        }
    }
    let stochastic = built(json!({"StochasticRounding": {"seed": 7, "inner": "AdamW"}}));
    assert_eq!(stochastic.field("seed"), Some(FieldValue::Count(7)));
    let decayed =
        built(json!({"DecoupledDecay": {"decay_lambda": 0.5, "inner": "Lion", "decay_eta_max": 0.25}}));
    assert_eq!(
        ["decay_lambda", "decay_eta_max"].map(|field| decayed.field(field)),
        [0.5, 0.25].map(|value| Some(value.into()))
    );
}

#[test]
fn a_tied_variable_is_found_under_each_of_its_paths() {
    let tied = var(&random(1, &[3], DType::F32, &Device::Cpu));
    let model = Vars::from([
        ("embedding".to_string(), tied.clone()),
        ("head".to_string(), tied),
    ]);
    let state = by_path(&[("head", json!("Momentum"))]).setup(&model).unwrap();
    assert_eq!(state.leaf("embedding").unwrap().optimiser().name(), "Momentum");
    let state = by_path(&[("embedding", json!("Adam"))]).setup(&model).unwrap();
    assert_eq!(state.leaf("head").unwrap().optimiser().name(), "Adam");
}

optimisers::hyper_parameters! {
    /// A rule that the crate does not have.
    pub struct Stretch {
        /// The factor.
        factor: f64 = 2.0 => optimisers::range::any,
    }
}

impl Rule for Stretch {
    fn init(&self, _x: Parameter<'_>) -> optimisers::Result<optimisers::State> {
        Ok(optimisers::State::empty())
    }

    fn apply<'a>(
        &'a self,
        state: &'a mut optimisers::State,
        _x: Parameter<'a>,
        dx: optimisers::Gradient<'a>,
    ) -> optimisers::Result<optimisers::Flow<'a>> {
        Ok(optimisers::Flow::Step(
            dx.with_tensors(state, |_, _, dx, _| Ok((dx * self.factor)?)),
        ))
    }
}

#[test]
fn rules_of_ones_own() {
    let registry = Registry::default().with(Stretch::default()).with(AdamW {
        lambda: 0.5,
        ..AdamW::default()
    });
    assert_eq!(registry.rules().count(), rules::catalogue().len() + 1);
    let cases: [(Value, Optimiser); 3] = [
        (json!("Stretch"), Optimiser::new(Stretch { factor: 2.0 })),
        (
            json!({"Stretch": {"factor": -3}}),
            Optimiser::new(Stretch { factor: -3.0 }),
        ),
        (
            json!({"AdamW": {"eta": 1}}),
            Optimiser::new(AdamW {
                lambda: 0.5,
                ..AdamW::new(1.0)
            }),
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(
            format!("{:?}", registry.optimiser(&read(text)).unwrap()),
            format!("{expected:?}")
        );
    }
    let model = model();
    let config = by_path(&[
        ("head.*", json!(["Stretch", "Descent"])),
        ("*", json!("LeaveOut")),
    ]);
    let state: StateTree = registry.setup(&config, &model).unwrap();
    assert_eq!(state.len(), 2);
    let message = config.setup(&model).unwrap_err().to_string();
    assert!(
        message.contains("at ByPath[0].optimiser[0]: there is no rule \"Stretch\""),
        "{message}"
    );
}

/// A table whose name is a tag, as serde_yaml writes an enum.
#[test]
fn a_tag_of_yaml_is_a_table_of_its_name() {
    use serde::Deserialize;
    use serde::de::value::{EnumAccessDeserializer, Error, MapAccessDeserializer, MapDeserializer};
    let tagged = |rule: &'static str, fields: BTreeMap<&'static str, f64>| {
        let table = MapDeserializer::<_, Error>::new([(rule, fields)].into_iter());
        OptimiserConfig::deserialize(EnumAccessDeserializer::new(MapAccessDeserializer::new(table)))
    };
    let read = |text: &str| serde_json::from_str::<OptimiserConfig>(text).expect("a configuration");
    assert_eq!(
        tagged("AdamW", BTreeMap::from([("eta", 0.25)])),
        Ok(read(r#"{"AdamW": {"eta": 0.25}}"#))
    );
    let wrong = tagged("AdamW", BTreeMap::from([("lr", 0.25)]))
        .and_then(|config| config.optimiser().map_err(serde::de::Error::custom));
    assert!(
        wrong
            .expect_err("no such key")
            .to_string()
            .contains("did you mean eta?")
    );
}
