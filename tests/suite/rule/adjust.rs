//! Hyper-parameters by name and by place, on a rule, on a state and on a part of one.

use candle_core::{DType, Device};
use optimisers::{
    AccumGrad, AdEMAMix, Adam, AdamW, Adjust, Cautious, Checkpoint, ClipGlobalNorm, ClipGrad, ClipNorm,
    Descent, Error, ErrorKind, FieldValue, Flow, Gradient, Kahan, MixedPrecision, Momentum, NonFinite,
    Offload, Optimiser, OptimiserChain, Parameter, RMSProp, Rule, Scale, SplitMaster, State, StateTree,
    StochasticRounding, StoreAs, WeightDecay, setup, setup_with, update,
};

use support::common::{Vars, grads, is_kind, model, random, snapshot, var};
use support::crafted_checkpoints::{file_of, open};

/// Rates at 5, 6.0 and 6.3; a `None` at 0 and 6.1.
fn chain() -> impl Rule + Clone + PartialEq {
    let inner = (
        Cautious::new(AdamW::new(0.25)),
        None::<Descent>,
        WeightDecay::new(0.5),
        Descent::new(0.125),
    );
    OptimiserChain::new((
        None::<ClipGrad>,
        AccumGrad::new(1),
        ClipGlobalNorm::new(5.0),
        Some(ClipNorm::new(2.0)),
        WeightDecay::new(0.1),
        Momentum::new(0.5),
        OptimiserChain::new(inner),
    ))
}

const PLACES: &str = "1.n, 1.average, 2.omega, 2.non_finite, 2.group, 3.omega, 3.p, 3.non_finite, \
                      4.lambda, 5.eta, 5.rho, 6.0.eta, 6.0.beta, 6.0.lambda, 6.0.epsilon, 6.0.couple, \
                      6.0.bias_correction, 6.2.lambda, 6.3.eta";

const NAMES: &str = "n, average, omega, non_finite, group, p, lambda, eta, rho, beta, epsilon, couple, \
                     bias_correction";

/// A name, what it is set to, what fields have then, and which these are.
type Good = (&'static str, FieldValue, FieldValue, &'static [&'static str]);

fn good() -> Vec<Good> {
    fn plain(name: &'static str, value: impl Into<FieldValue>, reached: &'static [&'static str]) -> Good {
        let value = value.into();
        (name, value, value, reached)
    }
    vec![
        plain("n", 3u64, &["1.n"]),
        plain("omega", 1.0, &["2.omega", "3.omega"]),
        plain("non_finite", NonFinite::Skip, &["2.non_finite", "3.non_finite"]),
        plain("p", f64::INFINITY, &["3.p"]),
        plain("lambda", 0.25, &["4.lambda", "6.0.lambda", "6.2.lambda"]),
        plain("6.lambda", 0.0, &["6.0.lambda", "6.2.lambda"]),
        plain("6.2.lambda", 0.0, &["6.2.lambda"]),
        plain("rho", 0.75, &["5.rho"]),
        plain("beta", (0.5, 0.6), &["6.0.beta"]),
        plain("6.0.epsilon", 1e-3, &["6.0.epsilon"]),
        plain("couple", false, &["6.0.couple"]),
        plain("bias_correction", false, &["6.0.bias_correction"]),
        // Learning rates are multiplied, and the last one is set.
        ("eta", 1.0.into(), 8.0.into(), &["6.3.eta"]),
        ("6.eta", 0.5.into(), 2.0.into(), &["6.3.eta"]),
        plain("6.3.eta", 0.5, &["6.3.eta"]),
        plain("6.0.eta", 1.0, &["6.0.eta"]),
        plain("5.eta", 0.0, &["5.eta"]),
    ]
}

/// All that is this value to a field: a whole number is real where a real one belongs, and a count likewise.
fn spellings(value: FieldValue) -> Vec<FieldValue> {
    match value {
        FieldValue::Real(real) if real.fract() == 0.0 => {
            vec![value, (real as i32).into(), (real as u64).into()]
        }
        FieldValue::Count(count) => vec![value, (count as i32).into()],
        _ => vec![value],
    }
}

optimisers::choice! {
    /// An enum with a name of `NonFinite`.
    enum Other {
        /// The only one.
        Skip,
    }
}

/// A name, a value for it, and why it is refused.
type Bad = (&'static str, FieldValue, ErrorKind, &'static str);

fn bad() -> Vec<Bad> {
    fn value(name: &'static str, value: impl Into<FieldValue>, words: &'static str) -> Bad {
        (name, value.into(), ErrorKind::Argument, words)
    }
    let mut all = vec![
        value(
            "beta",
            0.5,
            "AdamW: beta is 0.5, expected a pair of reals; pass such a value, or set one number, as in `beta2`",
        ),
        value(
            "beta",
            (0.9, 1.0),
            "AdamW: beta is (0.9, 1), expected two numbers in [0, 1)",
        ),
        value("eta", true, "Momentum: eta is true, expected a real number"),
        value(
            "6.0.eta",
            -1,
            "AdamW: eta is -1, expected a finite number of 0 or more",
        ),
        value(
            "5.eta",
            f64::NAN,
            "Momentum: eta is NaN, expected a finite number of 0 or more",
        ),
        value(
            "eta",
            -1.0,
            "Descent: eta is -8, expected a finite number of 0 or more",
        ),
        value(
            "omega",
            0.0,
            "ClipGlobalNorm: omega is 0, expected a number above 0",
        ),
        value("n", 0u64, "AccumGrad: n is 0, expected 1 or more"),
        value("n", 2.0, "AccumGrad: n is 2, expected a count"),
        value("n", -2, "AccumGrad: n is -2, expected a count"),
        value(
            "non_finite",
            Other::Skip,
            "non_finite is Skip, expected one of Error, Pass, Skip",
        ),
    ];
    let nowhere = "alpha 0.eta 7.eta 6.1.eta 05.eta +5.eta 5..eta .eta 5. eta.5 5.0.eta 6.0.0.eta -5.eta";
    all.extend(
        nowhere
            .split(' ')
            .map(|name| (name, 0.5.into(), ErrorKind::UnknownName, "has no field")),
    );
    all
}

fn boxed(rule: impl Rule) -> Box<dyn Rule> {
    Box::new(rule)
}

/// The chain in everything that can be around it.
fn wrapped() -> Vec<Optimiser> {
    let inner = Optimiser::new(MixedPrecision::new(DType::F32, chain()));
    vec![
        Optimiser::new(chain()),
        Optimiser::new(boxed(boxed(chain()))),
        Optimiser::new(Some(chain())),
        Optimiser::new(StoreAs::new([("m", DType::BF16)], chain())),
        Optimiser::new(MixedPrecision::new(
            DType::F64,
            StoreAs::new([("m", DType::BF16)], Some(boxed(chain()))),
        )),
        Optimiser::new(Kahan::new(chain())),
        Optimiser::new(SplitMaster::new(chain())),
        Optimiser::new(StochasticRounding::new(7, chain())),
        Optimiser::new(Offload::new(inner.clone())),
        Optimiser::new(Offload::new(inner).everywhere()),
    ]
}

fn variables() -> Vars {
    model(&[
        random(1, &[3], DType::BF16, &Device::Cpu),
        random(2, &[2, 2], DType::BF16, &Device::Cpu),
    ])
}

fn with_places(optimiser: &Optimiser) -> Vec<(String, FieldValue)> {
    let fields = optimiser
        .places()
        .into_iter()
        .zip(optimiser.fields())
        .map(|(place, (_, value))| (place, value));
    fields.filter(|(place, _)| place != "seed").collect()
}

fn of_leaves(state: &StateTree) -> Vec<Vec<(String, FieldValue)>> {
    state.leaves().map(|leaf| with_places(leaf.optimiser())).collect()
}

/// A field reads as it was set, no other one changes, and steps are those of a state that was set up so.
#[test]
fn a_name_sets_what_it_reaches_through_everything_around_it() {
    let gradients = |seed| {
        grads(
            variables()
                .values()
                .map(|x| Some(random(seed, x.dims(), DType::F32, &Device::Cpu))),
        )
    };
    for optimiser in wrapped() {
        let before = with_places(&optimiser);
        assert_eq!(
            before
                .iter()
                .map(|(place, _)| place.as_str())
                .collect::<Vec<_>>()
                .join(", "),
            PLACES
        );
        for (name, value, set, reached) in good() {
            let of = |(place, old): &(String, FieldValue)| {
                (
                    place.clone(),
                    if reached.contains(&place.as_str()) {
                        set
                    } else {
                        *old
                    },
                )
            };
            let after: Vec<_> = before.iter().map(of).collect();
            for spelling in spellings(value) {
                let what = format!("{name} = {spelling:?} in {}", optimiser.name());
                let mut rule = optimiser.clone();
                rule.adjust_field(name, spelling).expect("a field of the rule");
                assert_eq!(
                    (with_places(&rule), rule.field(name)),
                    (after.clone(), Some(value)),
                    "{what}"
                );

                let [model, expected] = [variables(), variables()];
                let mut state = setup(optimiser.clone(), &model).expect("a state");
                state
                    .at("1")
                    .and_then(|mut leaf| leaf.adjust_field(name, spelling))
                    .expect("a leaf's field");
                assert_eq!(of_leaves(&state), [before.clone(), after.clone()], "{what}");
                state
                    .all()
                    .adjust_field(name, spelling)
                    .expect("a field of all leaves");
                assert_eq!(of_leaves(&state), [after.clone(), after.clone()], "{what}");
                let rates = state
                    .leaves()
                    .map(|leaf| leaf.learning_rate().map(FieldValue::Real));
                assert!(rates.eq([rule.field("eta"), rule.field("eta")]), "{what}");

                let mut adjusted = setup(rule, &expected).expect("a state");
                for seed in 0..3 {
                    update(&mut state, &model, &gradients(seed)).expect("a step");
                    update(&mut adjusted, &expected, &gradients(seed)).expect("a step");
                }
                assert_eq!(snapshot(&model, &state), snapshot(&expected, &adjusted), "{what}");
                let mut restored = setup(optimiser.clone(), &model).expect("a state");
                let file = open(&file_of(Checkpoint::new(&state))).expect("a checkpoint");
                file.restore(&mut restored).expect("a state");
                assert_eq!(of_leaves(&restored), of_leaves(&state), "{what}");
            }
        }
    }
}

#[test]
fn bad_names_types_and_values_change_nothing() {
    let optimisers: [Optimiser; 2] = [
        Optimiser::new(chain()),
        Optimiser::new(MixedPrecision::new(DType::F32, chain())),
    ];
    for optimiser in optimisers {
        let model = variables();
        let mut state = setup(optimiser.clone(), &model).expect("a state");
        state
            .at("1")
            .and_then(|mut leaf| leaf.adjust_field("rho", 0.75))
            .expect("an optimiser of its own");
        let before = snapshot(&model, &state);
        for (name, value, kind, words) in bad() {
            let (mut rule, good) = (optimiser.clone(), ("epsilon", 0.5.into()));
            let errors = [
                rule.adjust_field(name, value),
                rule.adjust_fields([good, (name, value)]),
                state.all().adjust_field(name, value),
                state.all().adjust_fields([good, (name, value)]),
                state
                    .at("1")
                    .and_then(|mut leaf| leaf.adjust_fields([good, (name, value)])),
            ];
            for error in errors.map(|outcome| outcome.expect_err(name)) {
                is_kind(&error, kind, &[words]);
                let names = if name == "alpha" { NAMES } else { PLACES };
                let listed = (kind == ErrorKind::UnknownName).then(|| format!("one of: {names}"));
                assert!(
                    listed.is_none() || error.expected() == listed.as_deref(),
                    "{error}"
                );
            }
            assert_eq!(with_places(&rule), with_places(&optimiser), "{name}");
            assert_eq!(
                rule.field(name).is_none(),
                kind == ErrorKind::UnknownName,
                "{name}"
            );
            assert_eq!(snapshot(&model, &state), before, "{name}");
        }
    }
}

/// Not even a field that is fixed is refused its own value.
#[test]
fn a_field_that_decides_the_state_is_fixed() {
    let (centred, chain) = (
        RMSProp {
            centred: true,
            ..RMSProp::new(0.1)
        },
        OptimiserChain::new((ClipGrad::new(1.0), RMSProp::new(0.1))),
    );
    type Fixed<'w> = (Optimiser, &'w str, FieldValue, &'w [&'w str]);
    let layout = "centred decides the layout";
    let cases: [Fixed<'_>; 5] = [
        (
            Optimiser::new(centred),
            "centred",
            false.into(),
            &[layout, "eta, rho, epsilon"],
        ),
        (
            Optimiser::new(chain.clone()),
            "1.centred",
            true.into(),
            &[layout, "1.eta, 1.rho, 1.epsilon"],
        ),
        (
            Optimiser::new(chain.clone()),
            "centred",
            true.into(),
            &[layout, "delta, eta, rho, epsilon"],
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::F64, chain)),
            "centred",
            true.into(),
            &[layout],
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::F32, Adam::new(0.1))),
            "dtype",
            64u64.into(),
            &[
                "MixedPrecision",
                "dtype",
                "set up a new state",
                "eta, beta, epsilon",
            ],
        ),
    ];
    for (mut rule, name, value, words) in cases {
        let (model, own) = (variables(), rule.field(name));
        let mut state = setup(rule.clone(), &model).expect("a state");
        let before = snapshot(&model, &state);
        is_kind(
            &state.all().adjust_field(name, value).expect_err("fixed"),
            ErrorKind::Argument,
            words,
        );
        own.into_iter()
            .for_each(|own| state.all().adjust_field(name, own).expect("its own value"));
        assert_eq!(snapshot(&model, &state), before);
        // Without a state there is no layout yet.
        assert_eq!(rule.adjust_field(name, value).is_ok(), own.is_some(), "{name}");
    }
}

#[test]
fn one_leaf_that_refuses_a_value_refuses_it_for_all() {
    let model = variables();
    let choose = |path: &str, _: Parameter<'_>| -> Option<Optimiser> {
        Some(if path == "1" {
            Optimiser::new(AdEMAMix::new(0.1))
        } else {
            Optimiser::new(OptimiserChain::new((Scale::new(0.5), Momentum::new(0.1))))
        })
    };
    let mut state = setup_with(&model, choose).expect("a state");
    let before = snapshot(&model, &state);
    let error = state
        .all()
        .adjust_field("alpha", -1.0)
        .expect_err("an alpha of AdEMAMix");
    is_kind(
        &error,
        ErrorKind::Argument,
        &["parameter \"1\": AdEMAMix: alpha is -1, expected"],
    );
    assert_eq!((error.path(), snapshot(&model, &state)), (Some("1"), before));
    state
        .at("0")
        .and_then(|mut leaf| leaf.adjust_field("alpha", -1.0))
        .expect("an alpha of Scale");
    // A leaf without the field is passed over; the error has the fields of all.
    state.all().adjust_field("rho", 0.25).expect("Momentum's");
    let fields = |name: &str| state.leaves().map(|leaf| leaf.field(name)).collect::<Vec<_>>();
    assert_eq!(fields("alpha"), [-1.0, 5.0].map(|alpha| Some(alpha.into())));
    assert_eq!(fields("rho"), [Some(0.25.into()), None]);
    let error = state.all().adjust_field("delta", 0.1).expect_err("nobody's");
    assert_eq!(
        error.expected(),
        Some("one of: alpha, eta, rho, beta, lambda, epsilon, warmup")
    );
}

#[test]
fn a_selection_ends_at_a_dot() {
    let paths = [
        "encoder.0.weight",
        "encoder.bias",
        "encoder2.weight",
        "head.weight",
    ];
    let model: Vars = paths
        .map(|path| (path.to_string(), var(&random(1, &[3], DType::F32, &Device::Cpu))))
        .into();
    let rates = |state: &StateTree| {
        state
            .leaves()
            .map(|leaf| leaf.learning_rate())
            .collect::<Vec<_>>()
    };
    let selected = [
        ("", "0123"),
        ("encoder", "01"),
        ("encoder.0", "0"),
        ("encoder.0.weight", "0"),
    ];
    let others = [
        ("encoder2", "2"),
        ("head.weight", "3"),
        ("enc", ""),
        ("encoder.", ""),
    ];
    let none = [
        ("encoder.0.weigh", ""),
        ("weight", ""),
        ("encoder.0.weight.x", ""),
    ];
    for (path, places) in selected.into_iter().chain(others).chain(none) {
        let mut state = setup(Adam::new(0.1), &model).expect("a state");
        if let Err(error) = state.at(path).and_then(|mut leaves| leaves.adjust(0.5)) {
            let words = [&*format!("{path:?} selects no leaf"), "encoder2.weight"];
            is_kind(&error, ErrorKind::UnknownName, &words);
        }
        let expected = ["0", "1", "2", "3"].map(|place| Some(if places.contains(place) { 0.5 } else { 0.1 }));
        assert_eq!(rates(&state), expected, "{path:?}");
    }
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    let mistyped = state.at("encoder.0.wieght").expect_err("no leaf");
    is_kind(
        &mistyped,
        ErrorKind::UnknownName,
        &["selects no leaf (did you mean encoder.0.weight?), expected one of: "],
    );
    state
        .select_where(|leaf| leaf.path().ends_with("bias"))
        .and_then(|mut leaf| leaf.adjust(0.5))
        .expect("a rate");
    assert_eq!(rates(&state), [0.1, 0.5, 0.1, 0.1].map(Some));
    state.adjust(0.2).expect("one rate for all");
    assert_eq!(rates(&state), [Some(0.2); 4]);
    let error = state.select_where(|leaf| leaf.steps() > 0).expect_err("no leaf");
    is_kind(&error, ErrorKind::UnknownName, &["selects no leaf"]);
}

/// The place of a field is that of its member's state tensors.
#[test]
fn places_are_those_of_state_tensors() {
    for optimiser in wrapped() {
        let state = setup(optimiser, &variables()).expect("a state");
        let names = state.leaf("0").expect("a leaf").tensor_names();
        let members: Vec<_> = names.iter().filter_map(|name| name.rsplit_once('.')).collect();
        assert_eq!(
            members,
            [("1", "acc"), ("5", "velocity"), ("6.0", "m"), ("6.0", "v")]
        );
    }
}

/// A rule with a range that depends on two fields.
#[derive(Clone, Debug, PartialEq)]
struct Ordered {
    low: f64,
    high: f64,
}

impl optimisers::Describe for Ordered {
    fn describe(&mut self, rule: &mut optimisers::Describer<'_>) {
        rule.kind("Ordered");
        rule.field("low", &mut self.low, 0.0, optimisers::range::any);
        rule.field("high", &mut self.high, 1.0, optimisers::range::any);
        rule.require(|| {
            if self.low < self.high {
                Ok(())
            } else {
                Err(Error::other("low is not below high"))
            }
        });
    }
}

#[test]
fn several_fields_are_set_in_their_order_and_checked_together() {
    let mut rule = Ordered { low: 0.0, high: 1.0 };
    is_kind(
        &rule.adjust_field("low", 2.0).expect_err("alone"),
        ErrorKind::Other,
        &["low is not below high"],
    );
    rule.adjust_fields([("low", 2.0.into()), ("high", 2.0.into()), ("high", 3.into())])
        .expect("together");
    assert_eq!(rule, Ordered { low: 2.0, high: 3.0 });
    rule.adjust_fields([]).expect("nothing to change");

    let mut state = setup(chain(), &variables()).expect("a state");
    let values = [
        ("5.eta", 1.into()),
        ("eta", 1e-3.into()),
        ("5.eta", 2.into()),
        ("6.lambda", 0.0.into()),
    ];
    state.all().adjust_fields(values).expect("four fields");
    for leaf in state.leaves() {
        let expected = [2.0, 0.25, 1e-3 / 0.25, 0.0].map(|value| Some(value.into()));
        assert_eq!(
            ["5.eta", "6.0.eta", "6.3.eta", "6.2.lambda"].map(|place| leaf.field(place)),
            expected
        );
    }
}

/// Requirements may take for granted that the rules before are right.
#[test]
fn nothing_is_required_behind_the_first_fault() {
    #[derive(Clone, Debug)]
    struct Fussy;
    impl optimisers::Describe for Fussy {
        fn describe(&mut self, rule: &mut optimisers::Describer<'_>) {
            rule.kind("Fussy");
            rule.require(|| unreachable!("the rule before it is wrong"));
        }
    }
    impl Rule for Fussy {
        fn apply<'a>(
            &'a self,
            _: &'a mut State,
            _: Parameter<'a>,
            dx: Gradient<'a>,
        ) -> optimisers::Result<Flow<'a>> {
            Ok(Flow::Step(dx))
        }
    }
    let chain = OptimiserChain::new((Adam::new(-1.0), OptimiserChain::new((Fussy, Fussy))));
    is_kind(
        &chain.check().expect_err("a negative rate"),
        ErrorKind::Argument,
        &["Adam: eta is -1"],
    );
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

optimisers::hyper_parameters! {
    /// A rule with fields that are named as settings of stores and wrappers.
    struct Namesake {
        /// Also a setting of `SplitMaster`.
        bits: f64 = 1.0 => optimisers::range::positive,
        /// Also a setting of `MixedPrecision`.
        dtype: f64 = 1.0 => optimisers::range::positive,
    }
}

impl Rule for Namesake {
    fn apply<'a>(
        &'a self,
        _state: &'a mut State,
        _x: Parameter<'a>,
        dx: Gradient<'a>,
    ) -> optimisers::Result<Flow<'a>> {
        Ok(Flow::Step(dx))
    }
}

#[test]
fn a_setting_is_refused_by_its_name_unless_a_field_has_that_name() {
    let with = |name: &'static str, optimiser: Optimiser| (name, optimiser);
    let settings = [
        with(
            "dtype",
            Optimiser::new(MixedPrecision::new(DType::F32, Adam::new(0.1))),
        ),
        with("bits", Optimiser::new(SplitMaster::of_24_bits(Adam::new(0.1)))),
        with("unscaled", Optimiser::new(Cautious::new(Adam::new(0.1)))),
        with(
            "slots",
            Optimiser::new(StoreAs::all(optimisers::SlotFormat::Q8, Adam::new(0.1))),
        ),
    ];
    for (name, mut optimiser) in settings {
        let words = format!("{name} is a setting, which cannot be adjusted, expected one of: eta, beta");
        let refused = optimiser.adjust_field(name, 1.0).expect_err("a setting");
        is_kind(&refused, ErrorKind::Argument, &[&words, "set up a new state"]);
    }
    let mut split = Optimiser::new(SplitMaster::of_24_bits(Namesake::default()));
    split.adjust_field("bits", 3.0).expect("a field");
    let mut mixed = Optimiser::new(MixedPrecision::new(DType::F32, Namesake::default()));
    mixed.adjust_field("dtype", 5.0).expect("a field");
    assert_eq!(
        (split.field("bits"), mixed.field("dtype")),
        (Some(3.0.into()), Some(5.0.into()))
    );
    // Nor does the setting of one leaf hide the field of another.
    let model = variables();
    let mut state = setup_with(&model, |path, _| {
        Some(match path {
            "0" => Optimiser::new(SplitMaster::of_24_bits(Adam::new(0.1))),
            _ => Optimiser::new(Namesake::default()),
        })
    })
    .expect("a state");
    state
        .all()
        .adjust_field("bits", 3.0)
        .expect("a field of other leaves");
    let bits: Vec<Option<FieldValue>> = state.leaves().map(|leaf| leaf.field("bits")).collect();
    assert_eq!((bits[0], bits[1]), (None, Some(3.0.into())));
    let refused = state
        .at("0")
        .expect("a leaf")
        .adjust_field("bits", 3.0)
        .expect_err("a setting");
    is_kind(
        &refused,
        ErrorKind::Argument,
        &["parameter \"0\"", "SplitMaster: bits is a setting"],
    );
}

#[test]
fn all_fields_are_set_by_as_many_values() {
    let mut rule = chain();
    let values: Vec<FieldValue> = rule.fields().into_iter().map(|(_, value)| value).collect();
    let more = [&values[..], &[1.0.into()]].concat();
    for others in [&values[1..], &more] {
        let refused = rule.set_fields(others).expect_err("another count").to_string();
        let words = format!(
            "the number of values is {}, expected {}",
            others.len(),
            values.len()
        );
        assert!(refused.contains(&words), "{refused}");
    }
    rule.set_fields(&values).expect("a value for each field");
    assert_eq!(rule, chain());
}
