//! Configurations that are refused: where, what came, what exists. None panics.

use candle_core::{DType, Device};
use optimisers::config::{OptimiserConfig, Registry};
use optimisers::{AdamW, Error, ErrorKind, rules, setup, update};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::files::config::{Choices, by_path, model, read};
use support::common::{Grads, Vars, is_kind, needs_matrices, random, says, var};

/// The gradient itself would be the step of a parameter that was meant to rest.
#[test]
fn a_whole_optimiser_without_a_rule_is_refused() {
    for nothing in [
        json!("None"),
        json!({"Kahan": {"inner": "None"}}),
        json!({"Fallback": {"inner": "Muon", "fallback": "None"}}),
    ] {
        let words = ["makes steps", "the gradient itself is the step", "`LeaveOut`"];
        let error = read(nothing.clone()).optimiser().expect_err("no rule");
        is_kind(&error, ErrorKind::Argument, &words);
        let choice = by_path(&[("*.bias", nothing), ("*", json!("Adam"))]);
        let error = choice.setup(&model()).expect_err("no rule");
        is_kind(&error, ErrorKind::Argument, &words);
        says(&error, &["ByPath[0].optimiser"]);
    }
    assert!(read(json!(["None", "Adam"])).optimiser().is_ok(), "a member");
}

#[test]
fn what_cannot_be_an_optimiser_is_not_read() {
    let rule = "expected a rule such as";
    let cases: [(Value, &[&str]); 20] = [
        (
            json!(42),
            &["configuration: got 42, ", rule, "or a list of rules"],
        ),
        (json!(null), &[rule, "got null"]),
        (json!(true), &[rule, "got true"]),
        (json!({}), &[rule, "got {}"]),
        (json!([0.5, 0.5]), &["at [0]: ", rule, "got 0.5"]),
        (json!({"Adam": {}, "ClipGrad": {}}), &[rule, "\"ClipGrad\":{}"]),
        (
            json!(["Adam", ["ClipGrad", null]]),
            &["at [1][1]: ", rule, "got null"],
        ),
        (
            json!({"Adam": 0.1}),
            &["at Adam: got 0.1, expected a table such as {\"eta\": 0.001} or {\"inner\": \"Adam\"}"],
        ),
        (
            json!([{"Adam": [0.1]}]),
            &["at [0].Adam: got [0.1], expected a table such as"],
        ),
        (
            json!({"MixedPrecision": {"dtype": "F32", "inner": [{"Adam": 1}]}}),
            &["at MixedPrecision.inner[0].Adam: "],
        ),
        (
            json!({"Offload": {"Adam": 0.1}}),
            &["at Offload.Adam: got 0.1, expected a table such as"],
        ),
        (
            json!({"Kahan": "Adam"}),
            &["at Kahan: got \"Adam\", expected a table such as {\"eta\": 0.001} or {\"inner\": \"Adam\"}"],
        ),
        (json!({"Adam": {"inner": 1}}), &["at Adam.inner: ", rule, "got 1"]),
        (
            json!({"Fallback": {"inner": "Muon", "fallback": {}}}),
            &["at Fallback.fallback: ", rule, "got {}"],
        ),
        (
            json!({"Both": {"members": "Adam"}}),
            &["at Both.members: got \"Adam\", expected a list of rules"],
        ),
        (
            json!({"Both": {"members": ["Adam", 1]}}),
            &["at Both.members[1]: ", rule, "got 1"],
        ),
        (
            json!({"Kahan": {"inner": "LeaveOut"}}),
            &["at Kahan.inner: LeaveOut cannot be here"],
        ),
        (
            json!(["LeaveOut"]),
            &["at [0]: LeaveOut cannot be here: it can only be a whole optimiser"],
        ),
        (
            json!([{"ByPath": []}]),
            &["at [0]: ByPath cannot be here: it chooses among optimisers and goes around all of them"],
        ),
        (
            json!({"ByPath": {"*": "Adam"}}),
            &["at ByPath: got {\"*\":\"Adam\"}, expected a list such as [{\"pattern\": \"*\""],
        ),
    ];
    let by_path: [(Value, &[&str]); 6] = [
        (
            json!("Adam"),
            &["at ByPath[1]: got \"Adam\", expected a table such as {\"pattern\": \"*.bias\""],
        ),
        (
            json!({"pattern": "*"}),
            &["at ByPath[1]: got {\"pattern\":\"*\"}, expected a table such as"],
        ),
        (
            json!({"path": "*", "optimiser": "Adam"}),
            &["at ByPath[1]: there is no key \"path\", expected one of: pattern, optimiser"],
        ),
        (
            json!({"pattern": 1, "optimiser": "Adam"}),
            &["at ByPath[1].pattern: got 1, expected a text in which * stands"],
        ),
        (
            json!({"pattern": "*", "optimiser": {"ByPath": []}}),
            &["at ByPath[1].optimiser: ByPath cannot be here"],
        ),
        (
            json!({"pattern": "*", "optimiser": [1]}),
            &["at ByPath[1].optimiser[0]: got 1, expected a rule"],
        ),
    ];
    let in_list = |(choice, words)| {
        (
            json!({"ByPath": [{"pattern": "nan", "optimiser": null}, choice]}),
            words,
        )
    };
    for (text, words) in cases.into_iter().chain(by_path.map(in_list)) {
        let error = serde_json::from_value::<OptimiserConfig>(text.clone())
            .expect_err("an error")
            .to_string();
        assert!(
            words.iter().all(|word| error.contains(word)),
            "{words:?} in {error:?} for {text}"
        );
    }
    let twice = serde_json::from_str::<OptimiserConfig>(r#"[{"Adam": {"eta": 1, "eta": 2}}]"#)
        .unwrap_err()
        .to_string();
    assert!(
        twice.contains("at [0].Adam.eta: the key is repeated here, with 2, expected the key once"),
        "{twice}"
    );
    let long = serde_json::from_value::<OptimiserConfig>(json!(vec![1; 1000]))
        .unwrap_err()
        .to_string();
    assert!(long.len() < 300, "{long}");
}

#[test]
fn what_no_rule_takes_is_not_built() {
    let cases: [(Value, &str, &[&str]); 19] = [
        (
            json!("AdamX"),
            "",
            &[
                "there is no rule \"AdamX\" (did you mean Adam?), expected one of: Descent, ",
                "AdamW",
            ],
        ),
        (
            json!(["Adam", {"adamw": {}}]),
            "[1]",
            &["there is no rule \"adamw\" (did you mean AdamW?)"],
        ),
        (json!("inf"), "", &["there is no rule \"inf\""]),
        (
            json!({"AdamW": {"rho": 1}}),
            "AdamW",
            &["there is no key \"rho\", expected one of: eta, beta, lambda, epsilon, couple"],
        ),
        (
            json!(["Adam", {"AdamW": {"beta": 0.5}}]),
            "[1].AdamW.beta",
            &["got 0.5, expected a pair of reals"],
        ),
        (
            json!({"AdamW": {"beta": [0.5, 0.5, 0.5]}}),
            "AdamW.beta",
            &["got [0.5,0.5,0.5], expected a pair of reals"],
        ),
        (
            json!({"AdamW": {"eta": null}}),
            "AdamW.eta",
            &["got null, expected a real number"],
        ),
        (
            json!({"AdamW": {"eta": "fast"}}),
            "AdamW.eta",
            &["got \"fast\", expected a real number"],
        ),
        (
            json!({"AdamW": {"eta": {"start": 1}}}),
            "AdamW.eta",
            &["got {\"start\":1}, expected a real number"],
        ),
        (
            json!({"AdamW": {"couple": 1}}),
            "AdamW.couple",
            &["got 1, expected true or false"],
        ),
        (
            json!({"AccumGrad": {"n": 2.5}}),
            "AccumGrad.n",
            &["got 2.5, expected a count"],
        ),
        (
            json!({"AccumGrad": {"n": 0}}),
            "AccumGrad.n",
            &["AccumGrad: n is 0, expected 1 or more"],
        ),
        (
            json!({"Muon": {"ns_steps": 1u64 << 63}}),
            "Muon.ns_steps",
            &["ns_steps is 9223372036854775808, expected 100 or less"],
        ),
        (
            json!({"ClipNorm": {"non_finite": "Ignore"}}),
            "ClipNorm.non_finite",
            &["got \"Ignore\", expected one of Error, Pass, Skip"],
        ),
        (
            json!({"DecoupledDecay": {"decay_lambda": -1, "inner": "Lion"}}),
            "DecoupledDecay.decay_lambda",
            &["decay_lambda is -1, expected"],
        ),
        (
            json!({"DecoupledDecay": {"decay_lambda": 0.1, "inner": "ClipGrad"}}),
            "DecoupledDecay",
            &["ClipGrad has no field \"eta\", expected one of: delta"],
        ),
        (
            json!({"Adam": {"eta": -1}}),
            "Adam.eta",
            &["Adam: eta is -1, expected a finite number of 0 or more"],
        ),
        (
            json!([[{"Adam": {"eta": "inf"}}]]),
            "[0][0].Adam.eta",
            &["Adam: eta is inf, expected a finite number of 0 or more"],
        ),
        (
            json!({"MixedPrecision": {"dtype": "F32", "inner": [{"Adam": {"beta": [0.9, 1]}}]}}),
            "MixedPrecision.inner[0].Adam.beta",
            &["Adam: beta is (0.9, 1), expected two numbers in [0, 1)"],
        ),
    ];
    for (text, expected_place, words) in cases {
        assert_not_built(text, expected_place, words);
    }
}

/// Settings, what stands inside, and where optimisers stand that decide how a parameter is stored.
#[test]
fn what_no_wrapper_takes_is_not_built() {
    let stored = "MixedPrecision cannot be here: it decides how the parameter is stored and goes around the \
                  whole rule";
    let offloaded = "Offload cannot be here: it decides where the state";
    let cases: [(Value, &str, &[&str]); 32] = [
        (
            json!("MixedPrecision"),
            "MixedPrecision",
            &["got {}, expected a table such as {\"dtype\":\"F32\",\"inner\":\"Adam\"}"],
        ),
        (
            json!({"MixedPrecision": {"dtype": "F32"}}),
            "MixedPrecision",
            &["got {\"dtype\":\"F32\"}, expected a table", "\"inner\":\"Adam\"}"],
        ),
        (
            json!({"MixedPrecision": {"dtype": "F32", "inner": "Adam", "rule": 1}}),
            "MixedPrecision",
            &["there is no key \"rule\", expected one of: dtype, inner"],
        ),
        (
            json!({"MixedPrecision": {"dtyp": "F32", "inner": "Adam"}}),
            "MixedPrecision",
            &["there is no key \"dtyp\" (did you mean dtype?), expected one of: dtype, inner"],
        ),
        (
            json!({"MixedPrecision": {"dtype": "BF16", "inner": "Adam"}}),
            "MixedPrecision.dtype",
            &["got \"BF16\", expected \"F32\" or \"F64\""],
        ),
        (
            json!({"MixedPrecision": {"dtype": 32, "inner": "Adam"}}),
            "MixedPrecision.dtype",
            &["got 32"],
        ),
        (
            json!(["ClipGrad", {"MixedPrecision": {"dtype": "F32", "inner": "Adam"}}]),
            "[1]",
            &[stored],
        ),
        (
            json!({"MixedPrecision": {"dtype": "F32", "inner": {"MixedPrecision": {"dtype": "F64", "inner": "Adam"}}}}),
            "MixedPrecision.inner",
            &[stored],
        ),
        (
            json!({"Fallback": {"inner": "Muon", "fallback": {"Kahan": {"inner": "Adam"}}}}),
            "Fallback.fallback",
            &["Kahan cannot be here"],
        ),
        (json!(["ClipGrad", {"Offload": "Adam"}]), "[1]", &[offloaded]),
        (
            json!({"MixedPrecision": {"dtype": "F32", "inner": {"Offload": "Adam"}}}),
            "MixedPrecision.inner",
            &[offloaded],
        ),
        (
            json!({"Offload": {"Offload": "Adam"}}),
            "Offload",
            &["an Offload is inside of another"],
        ),
        (
            json!({"StoreAs": {"slots": "Q4", "inner": "Adam"}}),
            "StoreAs.slots",
            &["expected \"Q8\", \"F16\"", "Q4"],
        ),
        (
            json!({"StoreAs": {"slots": {"m": 8}, "inner": "Adam"}}),
            "StoreAs.slots.m",
            &["expected \"Q8\"", "8"],
        ),
        (
            json!({"StoreAs": {"inner": "Adam"}}),
            "StoreAs",
            &["expected a table such as {\"slots\":\"Q8\",\"inner\":\"Adam\"}"],
        ),
        (
            json!({"SplitMaster": {"bits": 16, "inner": "Adam"}}),
            "SplitMaster.bits",
            &["got 16, expected 24 or 32"],
        ),
        (
            json!({"SplitMaster": {"bits": 24}}),
            "SplitMaster",
            &["expected a table such as {\"bits\":24,\"inner\":\"Adam\"}"],
        ),
        (
            json!({"StochasticRounding": {"seed": -1, "inner": "Adam"}}),
            "StochasticRounding.seed",
            &["got -1.0, expected a count"],
        ),
        (
            json!({"StochasticRounding": {"inner": "Adam"}}),
            "StochasticRounding",
            &["expected a table such as {\"seed\":0,\"inner\""],
        ),
        (
            json!(["ClipGrad", {"Kahan": {"inner": "Adam"}}]),
            "[1]",
            &["Kahan cannot be here: it decides how the parameter is stored"],
        ),
        (
            json!({"DecoupledDecay": {"decay_lambda": "a lot", "inner": "Lion"}}),
            "DecoupledDecay.decay_lambda",
            &["got \"a lot\", expected a real number"],
        ),
        (
            json!({"DecoupledDecay": {"inner": "Lion"}}),
            "DecoupledDecay",
            &["got {\"inner\":\"Lion\"}, expected a table such as \
               {\"decay_lambda\":0.1,\"decay_eta_max\":0.0,\"inner\":\"Adam\"}"],
        ),
        (
            json!({"DecoupledDecay": {"lambda": 0.1, "inner": "Lion"}}),
            "DecoupledDecay",
            &["there is no key \"lambda\" (did you mean decay_lambda?)"],
        ),
        (
            json!({"DecoupledDecay": {"decay_lambda": 0.1, "inner": "Lion", "cautious": 1}}),
            "DecoupledDecay.cautious",
            &["got 1, expected false or true"],
        ),
        (
            json!({"Fallback": {"inner": "Muon", "fallback": "Adam", "except": "a"}}),
            "Fallback.except",
            &["got \"a\", expected a list of patterns such as [\"embedding*\"]"],
        ),
        (
            json!({"Fallback": {"inner": "Muon", "fallback": "Adam", "except": ["a", 1]}}),
            "Fallback.except[1]",
            &["got 1"],
        ),
        (
            json!({"Fallback": {"inner": "Muon"}}),
            "Fallback",
            &[
                "got {\"inner\":\"Muon\"}, expected",
                "\"inner\":\"Adam\",\"fallback\":\"Adam\"}",
            ],
        ),
        (
            json!({"Adam": {"inner": "Adam"}}),
            "Adam",
            &["there is no key \"inner\", expected one of: eta, beta, epsilon"],
        ),
        (
            json!("Cautious"),
            "Cautious",
            &["got {}, expected a table such as {\"inner\":\"Adam\"}"],
        ),
        (
            json!({"Cautious": {"inner": {"Shampoo": {"eta": 1}}}}),
            "Cautious.inner",
            &[
                "got {\"Shampoo\":{\"eta\":1}}, expected Adam, AdamW, NAdam, Lion (or a rule that \
               `Registry::with` was given in Cautious)",
            ],
        ),
        (
            json!({"Cautious": {"inner": ["Adam"], "unscaled": "yes"}}),
            "Cautious.unscaled",
            &["got \"yes\", expected false or true"],
        ),
        (
            json!({"Cautious": {"inner": {"AdamW": {"rho": 1}}}}),
            "Cautious.inner.AdamW",
            &["there is no key \"rho\", expected one of: eta"],
        ),
    ];
    for (text, expected_place, words) in cases {
        assert_not_built(text, expected_place, words);
    }
}

/// Not built alone, and not as a choice by path.
fn assert_not_built(text: Value, expected_place: &str, words: &[&str]) {
    let model = Vars::from([("w".to_string(), var(&random(1, &[2], DType::F32, &Device::Cpu)))]);
    let config = read(text.clone());
    let nested = read(json!({"ByPath": [{"pattern": "*", "optimiser": text}]}));
    let inside = format!(
        "ByPath[0].optimiser{}{expected_place}",
        if expected_place.starts_with(['[']) {
            ""
        } else {
            "."
        }
    );
    let errors = [
        (config.optimiser().unwrap_err(), expected_place),
        (config.setup(&model).unwrap_err(), expected_place),
        (nested.setup(&model).unwrap_err(), inside.trim_end_matches('.')),
    ];
    for (error, expected_place) in errors {
        let message = error.to_string();
        assert!(
            words.iter().all(|word| message.contains(word)),
            "{words:?} in {message:?} for {text}"
        );
        assert_eq!(error.place(), Some(expected_place), "{error}");
    }
}

#[test]
fn a_program_can_tell_what_is_wrong() {
    let cases = [
        (
            json!("AdamX"),
            "",
            ErrorKind::UnknownName,
            None,
            "there is no rule \"AdamX\"",
        ),
        (
            json!({"Adam": {"rho": 1}}),
            "Adam",
            ErrorKind::UnknownName,
            None,
            "there is no key \"rho\"",
        ),
        (
            json!({"Adam": {"eta": null}}),
            "Adam.eta",
            ErrorKind::Argument,
            Some("null"),
            "expected a real number",
        ),
        (
            json!({"Adam": {"eta": -1}}),
            "Adam.eta",
            ErrorKind::Argument,
            Some("-1"),
            "Adam: eta is -1",
        ),
        (
            json!({"ByPath": [{"pattern": "x", "optimiser": "Adam"}]}),
            "ByPath[0].pattern",
            ErrorKind::Argument,
            None,
            "the pattern \"x\" matches no parameter",
        ),
    ];
    for (text, place, kind, got, words) in cases {
        let error = read(text).setup(&model()).unwrap_err();
        is_kind(&error, kind, &[words]);
        assert_eq!((error.place(), error.got()), (Some(place), got), "{error}");
    }
}

/// The first field out of its range, if it was given; a default belongs to the whole table.
#[test]
fn the_place_is_that_of_the_field_at_fault() {
    let registry = Registry::default().with(AdamW {
        lambda: -1.0,
        ..AdamW::default()
    });
    let cases = [
        (json!("AdamW"), "AdamW", "AdamW: lambda is -1"),
        (
            json!({"AdamW": {"eta": 0.5, "couple": false}}),
            "AdamW",
            "AdamW: lambda is -1",
        ),
        (json!({"AdamW": {"eta": -1}}), "AdamW.eta", "AdamW: eta is -1"),
        (
            json!({"AdamW": {"lambda": -2, "eta": 0.5}}),
            "AdamW.lambda",
            "AdamW: lambda is -2",
        ),
        (
            json!(["Adam", {"AdamW": {"lambda": -2, "beta": [2, 0]}}]),
            "[1].AdamW.beta",
            "AdamW: beta is (2, 0)",
        ),
        (
            json!({"Cautious": {"inner": {"AdamW": {"lambda": 0, "epsilon": -1}}}}),
            "Cautious.inner.AdamW.epsilon",
            "AdamW: epsilon is -1",
        ),
        (
            json!({"StochasticRounding": {"seed": 1, "inner": {"AdamW": {"eta": -1}}}}),
            "StochasticRounding.inner.AdamW.eta",
            "AdamW: eta is -1",
        ),
    ];
    for (text, place, words) in cases {
        let error = registry.optimiser(&read(text.clone())).expect_err("refused");
        assert_eq!(error.place(), Some(place), "{error} for {text}");
        assert!(error.to_string().contains(words), "{error} for {text}");
    }
}

#[test]
fn patterns_that_do_not_fit_the_model() {
    let (out, adam) = (|| json!("LeaveOut"), || json!("Adam"));
    let cases: [(Choices<'_>, &str, &[&str]); 6] = [
        (
            &[("*.bias", adam())],
            "ByPath",
            &["parameter \"encoder.0.weight\": no pattern matches this parameter; the patterns are: *.bias"],
        ),
        (
            &[],
            "ByPath",
            &["parameter \"encoder.0.bias\": no pattern matches this parameter; the patterns are: none"],
        ),
        (
            &[("*bais", out()), ("*", adam())],
            "ByPath[0].pattern",
            &["\"*bais\" matches no parameter, expected one that matches one of: encoder.0.bias, "],
        ),
        (
            &[("Head.*", out()), ("head", adam()), ("*", adam())],
            "ByPath[0].pattern",
            &["\"Head.*\" matches no parameter"],
        ),
        (
            &[("*", adam()), ("*.bias", out())],
            "ByPath[1].pattern",
            &[
                "\"*.bias\" decides nothing",
                "\"*\" comes first and matches \"encoder.0.bias\"",
            ],
        ),
        (
            &[("*", adam()), ("", out())],
            "ByPath[1].pattern",
            &["\"\" matches no parameter"],
        ),
    ];
    for (choices, expected_place, words) in cases {
        let config = by_path(choices);
        let error = config.setup(&model()).unwrap_err();
        let message = error.to_string();
        assert!(
            words.iter().all(|word| message.contains(word)),
            "{words:?} in {message:?}"
        );
        assert_eq!(error.place(), Some(expected_place), "{error}");

        let message = config.optimiser().unwrap_err().to_string();
        assert!(
            message.contains("ByPath") && message.contains("call `setup` with the model"),
            "{message}"
        );
    }
    let empty = "no trainable floating-point variable";
    let none_left = by_path(&[("*", out())]).setup(&model()).unwrap_err();
    is_kind(
        &none_left,
        ErrorKind::Model,
        &["leaves out all 5 trainable variables of the model: encoder.0.bias"],
    );
    is_kind(
        &by_path(&[("*", adam())]).setup(&Vars::new()).unwrap_err(),
        ErrorKind::Model,
        &[empty],
    );
}

/// JSON out of the words that configurations are made of, and others.
fn arbitrary() -> impl Strategy<Value = Value> {
    let rules: Vec<String> = rules::catalogue()
        .iter()
        .map(|rule| rule.name.to_string())
        .collect();
    let fields = rules::catalogue()
        .into_iter()
        .flat_map(|listing| listing.rule.fields())
        .map(|(name, _)| name.to_string());
    let words = [
        "MixedPrecision",
        "Cautious",
        "unscaled",
        "DecoupledDecay",
        "decay_lambda",
        "Kahan",
        "members",
        "None",
        "StoreAs",
        "slots",
        "Q8",
        "Offload",
        "ByPath",
        "LeaveOut",
        "dtype",
        "inner",
        "F32",
        "F64",
        "pattern",
        "optimiser",
        "*",
        "w?",
        "inf",
        "Skip",
    ];
    let keys: Vec<String> = rules
        .iter()
        .cloned()
        .chain(fields)
        .chain(words.map(str::to_string))
        .collect();
    let word = prop_oneof![8 => prop::sample::select(keys), 1 => any::<String>()].boxed();
    let leaf = prop_oneof![
        1 => Just(Value::Null),
        1 => any::<bool>().prop_map(Value::from),
        1 => any::<u64>().prop_map(Value::from),
        1 => any::<f64>().prop_map(Value::from),
        2 => (0.0..1.0).prop_map(Value::from),
        2 => word.clone().prop_map(Value::from),
        4 => prop::sample::select(rules.clone()).prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 32, 4, move |inner| {
        let pattern = prop_oneof![Just("*".to_string()), word.clone()];
        let choice = (pattern, inner.clone())
            .prop_map(|(pattern, optimiser)| json!({"pattern": pattern, "optimiser": optimiser}));
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map(word.clone(), inner.clone(), 1..3)
                .prop_map(|map| map.into_iter().collect()),
            prop::collection::vec(choice, 0..3).prop_map(|choices| json!({"ByPath": choices})),
            inner.clone().prop_map(|inner| json!({"Offload": inner})),
            (inner.clone(), inner.clone())
                .prop_map(|(inner, other)| json!({"Fallback": {"inner": inner, "fallback": other}})),
            inner
                .clone()
                .prop_map(|inner| json!({"StoreAs": {"slots": "Q8", "inner": inner}})),
            inner
                .clone()
                .prop_map(|inner| json!({"Cautious": {"inner": inner}})),
            inner
                .clone()
                .prop_map(|inner| json!({"DecoupledDecay": {"decay_lambda": 0.1, "inner": inner}})),
            inner.prop_map(|inner| json!({"MixedPrecision": {"dtype": "F32", "inner": inner}})),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn no_json_panics(value in arbitrary()) {
        let Ok(config) = serde_json::from_value::<OptimiserConfig>(value) else { return Ok(()) };
        let copy: OptimiserConfig = serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
        prop_assert_eq!(&copy, &config);
        let model = Vars::from([("w".to_string(), var(&random(1, &[3], DType::BF16, &Device::Cpu)))]);
        if let Ok(optimiser) = config.optimiser() {
            let made = setup(optimiser, &model);
            // Not all rules take vectors, and the rule that a fallback chooses for them may lack what is
            // around it.
            let of_rows = |error: &Error| error.kind() == ErrorKind::Argument && error.to_string().contains("rows of a matrix");
            let has_copy = |error: &Error| error.to_string().contains("a copy or an average of the parameter");
            let of_vectors = |error: &Error| needs_matrices(error) || of_rows(error) || has_copy(error) || error.kind() == ErrorKind::UnknownName;
            let other_model = |error: &Error| error.path() == Some("w") && of_vectors(error);
            prop_assert!(made.as_ref().err().is_none_or(other_model), "{:?}", made.err());
        }
        if let Ok(mut state) = config.setup(&model) {
            let grads = Grads::from([("w".to_string(), random(2, &[3], DType::BF16, &Device::Cpu))]);
            let _ = update(&mut state, &model, &grads);
        }
    }

    #[test]
    fn no_text_panics(text in any::<String>()) {
        let _ = serde_json::from_str::<OptimiserConfig>(&text);
        let _ = toml::from_str::<OptimiserConfig>(&text);
    }
}

/// Chains in chains are built 64 deep, within `ByPath` of TOML 61, and refused beyond, by the formats' own
/// limits at the latest.
#[test]
fn deep_nesting_is_built_or_refused() {
    for (depth, json_reads, toml_reads) in [
        (61, true, true),
        (64, true, false),
        (65, false, false),
        (100, false, false),
        (10_000, false, false),
    ] {
        let list = format!("{}\"Adam\"{}", "[".repeat(depth), "]".repeat(depth));
        let json = serde_json::from_str::<OptimiserConfig>(&list).map_err(|error| error.to_string());
        let toml = format!("ByPath = [{{ pattern = \"*\", optimiser = {list} }}]");
        let toml = toml::from_str::<OptimiserConfig>(&toml).map_err(|error| error.to_string());
        for (config, reads) in [(json, json_reads), (toml, toml_reads)] {
            match config {
                Ok(config) => {
                    assert!(reads, "{depth} lists");
                    assert!(
                        config
                            .setup(&model())
                            .unwrap()
                            .leaves()
                            .all(|leaf| leaf.tensor_names().len() == 2)
                    );
                }
                Err(error) => assert!(
                    !reads
                        && ["recursion", "nested more than 64 deep"]
                            .iter()
                            .any(|reason| error.contains(reason)),
                    "{depth} lists: {error}"
                ),
            }
        }
    }
}
