//! One member of a chain by its place, and several fields at once.

use candle_core::{DType, Device};
use optimisers::{
    Adam, Adjust, Cautious, CheckpointFile, ClipGrad, Descent, Error, ErrorKind, FieldValue, Kahan,
    MixedPrecision, Momentum, Offload, Optimiser, OptimiserChain, RMSProp, Rule, SplitMaster, StateTree,
    StochasticRounding, StoreAs, WeightDecay, setup,
};

use support::common::{Vars, is_kind, model, random, snapshot};

/// Rates at 1, 2.0 and 2.2; a `None` at 0 and 2.1.
fn chain() -> impl Rule + Clone + PartialEq {
    let inner = OptimiserChain::new((Cautious::new(Adam::new(0.2)), None::<Descent>, Descent::new(0.3)));
    OptimiserChain::new((None::<ClipGrad>, Momentum::new(0.1), inner))
}

const PLACES: [&str; 6] = ["1.eta", "1.rho", "2.0.eta", "2.0.beta", "2.0.epsilon", "2.2.eta"];

fn boxed(rule: impl Rule) -> Box<dyn Rule> {
    Box::new(rule)
}

/// The chain in everything that can be around it.
fn wrapped() -> Vec<Box<dyn Optimiser>> {
    let inner: Box<dyn Optimiser> = Box::new(MixedPrecision::new(DType::F32, chain()));
    vec![
        Box::new(chain()),
        Box::new(boxed(chain())),
        Box::new(boxed(boxed(chain()))),
        Box::new(Some(chain())),
        Box::new(StoreAs::new([("m", DType::BF16)], chain())),
        Box::new(MixedPrecision::new(DType::F64, StoreAs::new([("m", DType::BF16)], Some(boxed(chain()))))),
        Box::new(Kahan::new(chain())),
        Box::new(SplitMaster::new(chain())),
        Box::new(StochasticRounding::new(7, chain())),
        Box::new(Offload::new(inner.clone())),
        Box::new(Offload::new(inner).everywhere()),
    ]
}

fn variables(dtype: DType) -> Vars {
    model(&[random(1, &[3], dtype, &Device::Cpu), random(2, &[2, 2], dtype, &Device::Cpu)])
}

fn with_places(optimiser: &dyn Optimiser) -> Vec<(String, FieldValue)> {
    let fields =
        optimiser.places().into_iter().zip(optimiser.fields()).map(|(place, (_, value))| (place, value));
    fields.filter(|(place, _)| place != "seed").collect()
}

#[test]
fn places_are_counted_alike_whatever_is_around_a_chain() {
    for mut optimiser in wrapped() {
        let name = optimiser.name();
        let before = with_places(&optimiser);
        assert_eq!(before.iter().map(|(place, _)| place.as_str()).collect::<Vec<_>>(), PLACES, "{name}");
        for (i, place) in PLACES.into_iter().enumerate() {
            let value = if place.ends_with("beta") {
                (0.5, 0.25).into()
            } else {
                FieldValue::Real(0.0625 * (i + 1) as f64)
            };
            assert!(optimiser.set_field(place, value).expect("a value of the right type"), "{name}: {place}");
            assert_eq!(optimiser.field(place), Some(value), "{name}: {place}");
        }
        let expected =
            [0.0625.into(), 0.125.into(), 0.1875.into(), (0.5, 0.25).into(), 0.3125.into(), 0.375.into()];
        assert_eq!(
            with_places(&optimiser).into_iter().map(|(_, value)| value).collect::<Vec<FieldValue>>(),
            expected,
            "{name}"
        );
    }
}

/// What a place says of a field, the name of a tensor says of that.
#[test]
fn places_are_those_of_state_tensors() {
    for optimiser in wrapped() {
        let state = setup(optimiser, &variables(DType::BF16)).expect("a state");
        let leaf = state.leaf("0").expect("a leaf");
        let members = leaf.optimiser().places();
        let of_members = leaf.tensor_names().into_iter().filter(|name| name.contains('.'));
        let mut found = 0;
        for name in of_members {
            let (place, _) = name.rsplit_once('.').expect("a place");
            let rate = format!("{place}.eta");
            assert!(members.contains(&rate), "{}: {name}", leaf.optimiser().name());
            found += 1;
        }
        assert_eq!(found, 3, "one of Momentum and two of Adam");
    }
}

#[test]
fn the_place_of_a_chain_is_about_all_its_members() {
    let mut rule = OptimiserChain::new((
        Momentum::new(0.5),
        OptimiserChain::new((Adam::new(0.25), Momentum::new(0.125))),
    ));
    rule.adjust_field("1.rho", 0.75).expect("one member");
    assert_eq!(["0.rho", "1.1.rho"].map(|place| rule.field(place)), [0.9, 0.75].map(|rho| Some(rho.into())));
    rule.adjust_field("rho", 0.5).expect("two members");
    assert_eq!(["0.rho", "1.1.rho"].map(|place| rule.field(place)), [Some(0.5.into()); 2]);
    // Learning rates are multiplied, and the last one is set.
    let rates = |rule: &dyn Optimiser| ["0.eta", "1.0.eta", "1.1.eta"].map(|place| rule.field(place));
    assert_eq!(
        ["1.eta", "eta"].map(|place| rule.field(place)),
        [0.03125, 0.015625].map(|rate| Some(rate.into()))
    );
    rule.adjust_field("1.eta", 0.5).expect("two members");
    assert_eq!(rates(&rule), [0.5, 0.25, 2.0].map(|rate| Some(rate.into())));
    rule.adjust(0.5).expect("three members");
    assert_eq!(rates(&rule), [0.5, 0.25, 4.0].map(|rate| Some(rate.into())));
    rule.adjust_field("1.0.eta", 0.125).expect("one of them");
    assert_eq!(
        (rates(&rule), rule.field("eta")),
        ([0.5, 0.125, 4.0].map(|rate| Some(rate.into())), Some(0.25.into()))
    );
}

#[test]
fn a_place_where_nothing_is_changes_nothing_and_the_error_lists_places() {
    let places = format!("one of: {}", PLACES.join(", "));
    for name in [
        "0.eta",
        "3.eta",
        "2.1.eta",
        "01.eta",
        "+1.eta",
        "1..eta",
        ".eta",
        "1.",
        "eta.1",
        "1.0.eta",
        "2.0.0.eta",
        "-1.eta",
    ] {
        let mut rule = chain();
        let error = rule.adjust_field(name, 0.5).expect_err(name);
        assert_eq!(
            (error.kind(), error.expected()),
            (ErrorKind::UnknownName, Some(&*places)),
            "{name}: {error}"
        );
        assert_eq!((rule, chain().field(name)), (chain(), None), "{name}");

        let mut state = setup(chain(), &variables(DType::F32)).expect("a state");
        let error = state.adjust_field(name, 0.5).expect_err(name);
        assert_eq!(
            (error.kind(), error.expected()),
            (ErrorKind::UnknownName, Some(&*places)),
            "{name}: {error}"
        );
    }
    let error = chain().adjust_field("1.eta", true).expect_err("a flag");
    is_kind(&error, ErrorKind::Argument, &["Momentum: eta is true, expected a real number"]);
    let centred = OptimiserChain::new((ClipGrad::new(1.0), RMSProp::new(0.1)));
    let error = setup(centred, &variables(DType::F32))
        .expect("a state")
        .adjust_field("1.centred", true)
        .expect_err("fixed");
    is_kind(&error, ErrorKind::Argument, &["centred decides the layout", "1.eta, 1.rho, 1.epsilon"]);
}

#[test]
fn a_state_adjusts_one_member_and_a_selection_that_of_its_leaves() {
    let model = variables(DType::BF16);
    let mut state = setup(MixedPrecision::new(DType::F32, chain()), &model).expect("a state");
    state.adjust_field("2.2.eta", 1).expect("a member");
    state.at("1").expect("a leaf").adjust_field("1.eta", 0.5).expect("a member");
    let rates = |path: &str| {
        ["1.eta", "2.0.eta", "2.2.eta"].map(|place| state.leaf(path).and_then(|leaf| leaf.field(place)))
    };
    assert_eq!(rates("0"), [0.1, 0.2, 1.0].map(|rate| Some(FieldValue::Real(rate))));
    assert_eq!(rates("1"), [0.5, 0.2, 1.0].map(|rate| Some(FieldValue::Real(rate))));
}

#[test]
fn several_fields_change_together_or_not_at_all() {
    let mut rule = chain();
    rule.adjust_fields([
        ("1.eta", 1.into()),
        ("2.0.beta", (0.9, 0.99).into()),
        ("eta", 1e-3.into()),
        ("1.eta", 2.into()),
    ])
    .expect("four fields");
    assert_eq!(rule.field("2.0.beta"), Some((0.9, 0.99).into()));
    assert_eq!(
        ["1.eta", "2.0.eta", "2.2.eta"].map(|place| rule.field(place)),
        [2.0, 0.2, 1e-3 / 0.2].map(|rate| Some(rate.into())),
        "in their order"
    );

    let model = variables(DType::F32);
    let mut state = setup(chain(), &model).expect("a state");
    state.at("1").expect("a leaf").adjust_field("eta", 0.7).expect("rates");
    let before = snapshot(&model, &state);
    use ErrorKind::{Argument, UnknownName};
    type Fields = [(&'static str, FieldValue); 2];
    let bad: [(ErrorKind, &str, Fields); 4] = [
        (UnknownName, "has no field \"3.eta\"", [("eta", 0.5.into()), ("3.eta", 0.5.into())]),
        (Argument, "beta is 0.5, expected a pair of reals", [("eta", 0.5.into()), ("beta", 0.5.into())]),
        (
            Argument,
            "beta is (0.9, 1), expected two numbers",
            [("eta", 0.5.into()), ("beta", (0.9, 1.0).into())],
        ),
        (
            Argument,
            "eta is -1, expected a finite number",
            [("1.eta", (-1.0).into()), ("beta", (0.9, 0.9).into())],
        ),
    ];
    for (kind, what, values) in bad {
        let mut rule = chain();
        is_kind(&rule.adjust_fields(values).expect_err("refused"), kind, &[what]);
        assert_eq!(rule, chain());
        is_kind(&state.adjust_fields(values).expect_err("refused"), kind, &[what]);
        is_kind(&state.at("1").expect("a leaf").adjust_fields(values).expect_err("refused"), kind, &[what]);
        assert_eq!(snapshot(&model, &state), before, "{values:?}");
    }
    state.adjust_fields([("2.2.eta", 0.5.into()), ("beta", (0.8, 0.9).into())]).expect("both");
    assert!(state.leaves().all(
        |leaf| (leaf.field("2.2.eta"), leaf.field("beta")) == (Some(0.5.into()), Some((0.8, 0.9).into()))
    ));
    state.adjust_fields([]).expect("nothing to change");
}

optimisers::hyper_parameters! {
    /// The default of `low` is below that of `high`, and has to stay there.
    pub struct Between {
        /// Anything.
        low: f64 = 0.0 => optimisers::range::any,
        /// Anything.
        high: f64 = 1.0 => optimisers::range::any,
    }
}

/// A rule with a range that depends on two fields.
#[derive(Clone, Debug, PartialEq)]
struct Ordered(Between);

impl optimisers::Describe for Ordered {
    fn describe(&mut self, rule: &mut optimisers::Describer<'_>) {
        rule.kind("Ordered");
        rule.field("low", &mut self.0.low, 0.0, optimisers::range::any);
        rule.field("high", &mut self.0.high, 1.0, optimisers::range::any);
        rule.require(|| {
            if self.0.low < self.0.high { Ok(()) } else { Err(Error::other("low is not below high")) }
        });
    }
}

#[test]
fn fields_that_only_fit_together_are_changed_together() {
    let mut rule = Ordered(Between::default());
    is_kind(&rule.adjust_field("low", 2.0).expect_err("alone"), ErrorKind::Other, &["low is not below high"]);
    rule.adjust_fields([("low", 2.0.into()), ("high", 3.0.into())]).expect("together");
    assert_eq!(rule, Ordered(Between { low: 2.0, high: 3.0 }));
}

/// A file has the fields in their order, and says nothing of places.
#[test]
fn members_that_were_adjusted_apart_come_back_from_a_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    let rates = |state: &StateTree| {
        ["1.eta", "2.0.eta", "2.2.eta"].map(|place| state.leaf("1").and_then(|leaf| leaf.field(place)))
    };
    for optimiser in wrapped() {
        let mut state = setup(optimiser.clone(), &variables(DType::BF16)).expect("a state");
        state
            .adjust_fields([("1.eta", 0.5.into()), ("2.0.eta", 0.25.into()), ("2.2.eta", 0.125.into())])
            .expect("three members");
        state.save(&path).expect("a file");
        let mut restored = setup(optimiser, &variables(DType::BF16)).expect("a state");
        CheckpointFile::open(&path).and_then(|file| file.restore(&mut restored)).expect("a state");
        assert_eq!(rates(&restored), [0.5, 0.25, 0.125].map(|rate| Some(FieldValue::Real(rate))));
        assert_eq!(rates(&restored), rates(&state));
    }
}

#[test]
fn a_weight_decay_of_two_is_adjusted_alone() {
    let mut rule = OptimiserChain::new((WeightDecay::new(0.1), Adam::new(0.1), WeightDecay::new(0.2)));
    rule.adjust_field("2.lambda", 0.0).expect("a member");
    assert_eq!(rule, OptimiserChain::new((WeightDecay::new(0.1), Adam::new(0.1), WeightDecay::new(0.0))));
}
