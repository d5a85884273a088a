//! Hyper-parameters by name, on a state and on a rule; parts of a model; freezing and thawing.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, Adam, AdamW, Adjust, ClipGlobalNorm, ClipGrad, ClipNorm, Descent, ErrorKind, FieldValue,
    MixedPrecision, Momentum, Nesterov, NonFinite, Optimiser, OptimiserChain, Parameter, RMSProp, Rule,
    StateTree, WeightDecay, setup, setup_with, update,
};

use support::common::{Grads, Vars, is_kind, random, snapshot, var};

const PATHS: [&str; 4] = ["encoder.0.weight", "encoder.bias", "encoder2.weight", "head.weight"];

fn model(dtype: DType) -> Vars {
    let leaf = |(seed, path): (usize, &&str)| {
        (path.to_string(), var(&random(seed as u64, &[3], dtype, &Device::Cpu)))
    };
    PATHS.iter().enumerate().map(leaf).collect()
}

fn gradients(seed: u64) -> Grads {
    let leaf = |(i, path): (usize, &&str)| {
        (path.to_string(), random(seed + i as u64, &[3], DType::F32, &Device::Cpu))
    };
    PATHS.iter().enumerate().map(leaf).collect()
}

fn rates(state: &StateTree) -> Vec<Option<f64>> {
    state.leaves().map(|leaf| leaf.learning_rate()).collect()
}

fn chain() -> impl Rule + Clone + PartialEq {
    OptimiserChain::new((
        AccumGrad::new(1),
        ClipGlobalNorm::new(5.0),
        ClipGrad::new(1.0),
        WeightDecay::new(0.1),
        Some(ClipNorm::new(2.0)),
        AdamW::new(0.1),
    ))
}

#[test]
fn a_selection_ends_at_a_dot() {
    let all = [true; 4];
    let cases: [(&str, [bool; 4]); 6] = [
        ("", all),
        ("encoder", [true, true, false, false]),
        ("encoder.0", [true, false, false, false]),
        ("encoder.0.weight", [true, false, false, false]),
        ("encoder2", [false, false, true, false]),
        ("head.weight", [false, false, false, true]),
    ];
    for (path, selected) in cases {
        let mut state = setup(chain(), &model(DType::F32)).unwrap();
        state.at(path).unwrap().adjust(0.5).unwrap();
        assert_eq!(rates(&state), selected.map(|yes| Some(if yes { 0.5 } else { 0.1 })), "{path:?}");
    }
    for path in ["enc", "encoder.", "encoder.0.weigh", "weight", "encoder.0.weight.x"] {
        let mut state = setup(chain(), &model(DType::F32)).unwrap();
        let error = state.at(path).unwrap_err();
        is_kind(&error, ErrorKind::UnknownName, &[&format!("{path:?} selects no leaf"), "encoder2.weight"]);
    }
}

#[test]
fn a_field_that_decides_the_layout_is_fixed() {
    let centred = RMSProp { centred: true, ..RMSProp::new(0.1) };
    let chain = OptimiserChain::new((ClipGrad::new(1.0), RMSProp::new(0.1)));
    let optimisers: [Box<dyn Optimiser>; 3] =
        [Box::new(centred), Box::new(chain.clone()), Box::new(MixedPrecision::new(DType::F64, chain))];
    for optimiser in optimisers {
        let (model, was) = (model(DType::F32), optimiser.field("centred"));
        let mut state = setup(optimiser, &model).unwrap();
        update(&mut state, &model, &gradients(1)).unwrap();
        for flag in [true, false] {
            if was == Some(FieldValue::Flag(flag)) {
                state.adjust_field("centred", flag).unwrap();
                continue;
            }
            let message = state.adjust_field("centred", flag).unwrap_err().to_string();
            assert!(
                message.contains("centred decides the layout") && message.contains("eta, rho, epsilon"),
                "{message}"
            );
        }
        assert_eq!(state.leaf(PATHS[0]).unwrap().optimiser().field("centred"), was);
        update(&mut state, &model, &gradients(2)).unwrap();
    }
    let mut rule = RMSProp::new(0.1);
    rule.adjust_field("centred", true).unwrap();
    assert!(rule.centred, "without a state nothing is laid out yet");
}

#[test]
fn a_predicate_selects_leaves() {
    let mut state = setup(chain(), &model(DType::F32)).unwrap();
    state.select_where(|leaf| leaf.path().ends_with("bias")).unwrap().adjust(0.5).unwrap();
    assert_eq!(rates(&state), [Some(0.1), Some(0.5), Some(0.1), Some(0.1)]);
    state.adjust(0.2).unwrap();
    assert_eq!(rates(&state), [Some(0.2); 4]);
    let error = state.select_where(|leaf| leaf.steps() > 0).unwrap_err();
    is_kind(&error, ErrorKind::UnknownName, &["selects no leaf"]);
}

/// Every field of [`chain`], a new value, and how many members have it.
fn by_name() -> Vec<(&'static str, FieldValue, usize)> {
    vec![
        ("n", 3u64.into(), 1),
        ("omega", 0.25.into(), 2),
        ("non_finite", NonFinite::Skip.into(), 2),
        ("p", f64::INFINITY.into(), 1),
        ("delta", 0.5.into(), 1),
        ("lambda", 0.01.into(), 2),
        ("eta", 0.7.into(), 1),
        ("beta", (0.5, 0.6).into(), 1),
        ("epsilon", 1e-3.into(), 1),
        ("couple", false.into(), 1),
    ]
}

#[test]
fn a_name_reaches_every_member_that_has_it() {
    let values = |rule: &dyn Optimiser, name: &str| -> Vec<FieldValue> {
        rule.fields().into_iter().filter(|(field, _)| *field == name).map(|(_, value)| value).collect()
    };
    for (name, value, members) in by_name() {
        let mut rule = OptimiserChain::new((chain(), None::<Descent>));
        let others = |rule: &dyn Optimiser| {
            rule.fields().into_iter().filter(|(field, _)| *field != name).collect::<Vec<_>>()
        };
        let before = others(&rule);
        rule.adjust_field(name, value).unwrap();
        assert_eq!(values(&rule, name), vec![value; members], "{name} on the rule");
        assert_eq!(others(&rule), before, "{name} on the rule");

        let boxed: Box<dyn Optimiser> =
            Box::new(MixedPrecision::new(DType::F32, OptimiserChain::new((chain(), None::<Descent>))));
        let mut state = setup(boxed, &model(DType::BF16)).unwrap();
        state.adjust_field(name, value).unwrap();
        for leaf in state.leaves() {
            assert_eq!(values(leaf.optimiser(), name), vec![value; members], "{name} on {}", leaf.path());
            assert_eq!(leaf.field(name), Some(value));
            assert_eq!(others(leaf.optimiser()), before, "{name} on {}", leaf.path());
        }
    }
}

#[test]
fn bad_names_types_and_values_change_nothing() {
    use ErrorKind::{Argument, UnknownName};
    let cases: [(&str, FieldValue, ErrorKind, &[&str]); 10] = [
        (
            "rho",
            0.5.into(),
            UnknownName,
            &["has no field \"rho\"", "n, average, order, omega", "eta, beta", "couple"],
        ),
        (
            "beta",
            0.5.into(),
            Argument,
            &["AdamW: beta is 0.5, expected a pair of reals", "eta, beta, lambda"],
        ),
        ("eta", true.into(), Argument, &["AdamW: eta is true, expected a real number"]),
        ("n", 2.0.into(), Argument, &["AccumGrad: n is 2, expected a count"]),
        ("n", (-2).into(), Argument, &["AccumGrad: n is -2, expected a count"]),
        ("eta", f64::NAN.into(), Argument, &["AdamW: eta is NaN, expected a finite number of 0 or more"]),
        ("eta", (-1).into(), Argument, &["AdamW: eta is -1, expected a finite number of 0 or more"]),
        ("omega", 0.0.into(), Argument, &["ClipGlobalNorm: omega is 0, expected a number above 0"]),
        ("n", 0u64.into(), Argument, &["AccumGrad: n is 0, expected 1 or more"]),
        ("beta", (0.9, 1.0).into(), Argument, &["AdamW: beta is (0.9, 1), expected two numbers in [0, 1)"]),
    ];
    for (name, value, kind, facts) in cases {
        let mut rule = chain();
        let error = rule.adjust_field(name, value).unwrap_err();
        is_kind(&error, kind, facts);
        assert_eq!(rule, chain(), "{name}");

        let model = model(DType::F32);
        let mut state = setup(chain(), &model).unwrap();
        let before = snapshot(&model, &state);
        let error = state.adjust_field(name, value).unwrap_err();
        is_kind(&error, kind, facts);
        assert_eq!(snapshot(&model, &state), before, "{name}");
    }
}

#[test]
fn a_whole_number_is_real_where_a_real_one_belongs() {
    let one = Some(FieldValue::Real(1.0));
    let mut rule = MixedPrecision::new(DType::F32, chain());
    let mut state = setup(rule.clone(), &model(DType::BF16)).unwrap();
    for (name, value) in [("eta", FieldValue::from(1)), ("eta", 1u64.into()), ("omega", 1.into())] {
        rule.adjust_field(name, 0.5).unwrap();
        rule.adjust_field(name, value).unwrap();
        assert_eq!(rule.field(name), one, "{name} on the rule");

        let boxed: &mut dyn Optimiser = &mut rule.clone();
        boxed.set_field(name, 0.5.into()).unwrap();
        assert!(boxed.set_field(name, value).unwrap());
        assert_eq!(boxed.field(name), one, "{name} on a boxed rule");

        state.adjust_field(name, 0.5).unwrap();
        state.adjust_field(name, value).unwrap();
        assert!(state.leaves().all(|leaf| leaf.field(name) == one), "{name} on a state");
    }
    assert_eq!(rates(&state), [Some(1.0); 4]);
    rule.adjust_field("n", 1).unwrap();
    assert_eq!(rule.field("n"), Some(FieldValue::Count(1)), "and a count where a count belongs");
}

#[test]
fn the_dtype_of_the_masters_is_fixed() {
    let rule = MixedPrecision::new(DType::F32, Adam::new(0.1));
    let model = model(DType::BF16);
    let mut state = setup(rule.clone(), &model).unwrap();
    let before = snapshot(&model, &state);
    for error in [
        rule.clone().adjust_field("dtype", 64u64).unwrap_err(),
        state.adjust_field("dtype", 64u64).unwrap_err(),
    ] {
        let message = error.to_string();
        for word in ["MixedPrecision", "dtype", "set up a new state", "eta, beta, epsilon"] {
            assert!(message.contains(word), "{word} in {message}");
        }
    }
    assert_eq!(snapshot(&model, &state), before);

    state.adjust(0.5).unwrap();
    update(&mut state, &model, &gradients(1)).unwrap();
    for leaf in state.leaves() {
        assert!(format!("{:?}", leaf.optimiser()).contains("F32"), "{:?}", leaf.optimiser());
        assert_eq!(leaf.tensor("master").unwrap().map(|master| master.dtype()), Some(DType::F32));
    }
}

#[test]
fn one_invalid_leaf_of_several_stops_all() {
    // `rho` is anything in Left's rule, and must be below 1 in that of the last leaf.
    let model = model(DType::F32);
    let choose = |path: &str, _: Parameter<'_>| -> Option<Box<dyn Optimiser>> {
        Some(if path == "head.weight" {
            Box::new(Momentum::new(0.1))
        } else {
            Box::new(OptimiserChain::new((Loose { rho: 0.5 }, Adam::new(0.1))))
        })
    };
    let mut state = setup_with(&model, choose).unwrap();
    let before = snapshot(&model, &state);
    let error = state.adjust_field("rho", 2.0).unwrap_err();
    is_kind(&error, ErrorKind::Argument, &["parameter \"head.weight\": Momentum: rho is 2, expected"]);
    assert_eq!(error.path(), Some("head.weight"));
    assert_eq!(snapshot(&model, &state), before);

    state.at("encoder").unwrap().adjust_field("rho", 2.0).unwrap();
    let rho: Vec<_> = state.leaves().map(|leaf| leaf.field("rho")).collect();
    assert_eq!(rho, [2.0, 2.0, 0.5, 0.9].map(|value| Some(FieldValue::Real(value))));

    let error = state.adjust_field("lambda", 0.1).unwrap_err().to_string();
    assert!(error.contains("rho, eta, beta, epsilon"), "all fields of all leaves: {error}");
    state.adjust_field("epsilon", 0.25).unwrap();
    assert_eq!(
        state.leaf("head.weight").unwrap().field("epsilon"),
        None,
        "a leaf without the field is passed over"
    );
}

optimisers::hyper_parameters! {
    /// A rule with a field of another range than Momentum's.
    pub struct Loose {
        /// Anything.
        rho: f64 = 0.0 => optimisers::range::any,
    }
}

impl optimisers::Elementwise for Loose {
    type Scalars = ();
    type Slots<T> = [T; 0];

    fn slots(&self) -> [optimisers::Slot; 0] {
        []
    }

    fn scalars(&self, _t: u64) {}

    fn step<V: optimisers::value::Value>((): (), _x: V, dx: V, _: &mut [V; 0]) -> V {
        dx
    }
}

#[test]
fn frozen_leaves_keep_everything_and_thaw() {
    let (model, twin) = (model(DType::F32), model(DType::F32));
    let mut state = setup(Adam::new(0.1), &model).unwrap();
    let mut expected = setup(Adam::new(0.1), &twin).unwrap();
    let encoder = |path: &str| path.starts_with("encoder.");
    let part = |all: &[(String, Vec<u64>)], yes: bool| -> Vec<_> {
        all.iter().filter(|(name, _)| encoder(name) == yes && !name.contains("Adam")).cloned().collect()
    };

    update(&mut state, &model, &gradients(0)).unwrap();
    update(&mut expected, &twin, &gradients(0)).unwrap();
    state.at("encoder").unwrap().freeze();
    let frozen: Vec<_> = state.leaves().map(|leaf| leaf.is_frozen()).collect();
    assert_eq!(frozen, [true, true, false, false]);
    let before = snapshot(&model, &state);
    for seed in 1..4 {
        let outcome = update(&mut state, &model, &gradients(seed)).unwrap();
        assert_eq!((outcome.applied, outcome.frozen), (2, 2));
        let others: Grads = gradients(seed).into_iter().filter(|(path, _)| !encoder(path)).collect();
        update(&mut expected, &twin, &others).unwrap();
    }
    let after = snapshot(&model, &state);
    assert_eq!(part(&after, true), part(&before, true));
    assert_ne!(part(&after, false), part(&before, false));

    state.at("encoder").unwrap().thaw();
    assert_eq!(update(&mut state, &model, &gradients(9)).unwrap().applied, 4);
    update(&mut expected, &twin, &gradients(9)).unwrap();
    assert_eq!(
        snapshot(&model, &state),
        snapshot(&twin, &expected),
        "as if the leaf had had no gradient meanwhile"
    );
}

#[test]
fn adjusting_keeps_the_moments() {
    for dtype in [DType::F32, DType::BF16] {
        let model = model(dtype);
        let mut state = setup(MixedPrecision::new(DType::F32, Nesterov::new(0.1)), &model).unwrap();
        update(&mut state, &model, &gradients(0)).unwrap();
        let numbers = |state: &StateTree| -> BTreeMap<_, _> {
            snapshot(&model, state).into_iter().filter(|(_, bits)| !bits.is_empty()).collect()
        };
        let before = numbers(&state);
        state.adjust(0.5).unwrap();
        state.at("head").unwrap().adjust_field("rho", 0.25).unwrap();
        assert_eq!(numbers(&state), before);
        assert_eq!(rates(&state), [Some(0.5); 4], "leaves that shared an optimiser share its new rate");
        assert_eq!(
            state.leaf("encoder.bias").unwrap().field("rho"),
            Some(0.9.into()),
            "and are adjusted apart"
        );
        assert_eq!(state.leaf("head.weight").unwrap().field("rho"), Some(0.25.into()));
    }
}

#[test]
fn a_step_uses_the_adjusted_rate() {
    let model = model(DType::F64);
    let before: Vec<_> = model.values().map(|var| support::common::values(var)).collect();
    let mut state = setup(Descent::new(0.1), &model).unwrap();
    state.at("encoder2").unwrap().adjust(0.5).unwrap();
    let ones: Grads = PATHS
        .iter()
        .map(|path| (path.to_string(), Tensor::ones(3, DType::F64, &Device::Cpu).unwrap()))
        .collect();
    update(&mut state, &model, &ones).unwrap();
    for ((path, var), before) in model.iter().zip(before) {
        let rate = if path == "encoder2.weight" { 0.5 } else { 0.1 };
        let expected: Vec<f64> = before.iter().map(|x| x - rate).collect();
        assert_eq!(support::common::values(var), expected, "{path}");
    }
}

mod raw {
    optimisers::hyper_parameters! {
        /// A rule with a field whose name is a keyword.
        pub struct Raw {
            /// The first.
            r#type: f64 = 1.0 => optimisers::range::any,
            /// The second.
            r#loop: f64 = 2.0 => optimisers::range::positive,
        }
    }
}

#[test]
fn a_raw_identifier_has_its_plain_name() {
    let mut rule = raw::Raw::default();
    assert_eq!(rule.fields(), [("type", 1.0.into()), ("loop", 2.0.into())]);
    rule.set_field("loop", 3.0.into()).expect("a field");
    assert_eq!((rule.r#type, rule.r#loop), (1.0, 3.0));
}
