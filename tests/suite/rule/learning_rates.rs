//! The learning rate of a chain: the product of those of its members, read and set as one.

use candle_core::{DType, Device, Tensor};
use candle_nn::Optimizer;
use optimisers::{
    AMSGradW, AdaDelta, AdaGrad, AdaMax, Adafactor, Adam, AdamW, Adjust, CandleOptimizer, Centralise,
    Checkpoint, ClipGlobalNorm, ClipGrad, DecoupledDecay, Descent, Ema, ErrorKind, Fallback, FieldValue,
    Flow, Gradient, Kahan, Lion, MixedPrecision, Momentum, Muon, NAdam, NAdamW, Nesterov, OptimiserChain,
    Parameter, RAdam, RMSProp, ReduceOnPlateau, Result, Rprop, Rule, Scale, Schedule, Scheduler, State,
    StateTree, UniformAverage, WeightDecay, setup, setup_with, update,
};

use support::common::{Vars, bits, grads, is_kind, model, random, says, snapshot};
use support::crafted_checkpoints::{file_of, open};

pub type Boxed = Box<dyn Rule>;

fn boxed(rule: impl Rule) -> Boxed {
    Box::new(rule)
}

/// Makes a rule with its learning rate in its last member.
pub type WithRate = fn(f64) -> Boxed;

/// What the page "coming from" says that torch's optimisers are here, and those of optax that are chains.
pub const OF_TORCH: [(&str, WithRate); 28] = [
    ("SGD", |eta| boxed(Descent::new(eta))),
    ("SGD(momentum)", |eta| boxed(Momentum::new(eta))),
    ("SGD(momentum), to the letter", |eta| {
        boxed(OptimiserChain::new((Momentum::new(1.0), Descent::new(eta))))
    }),
    ("SGD(nesterov)", |eta| boxed(Nesterov::new(eta))),
    ("SGD(nesterov), to the letter", |eta| {
        boxed(OptimiserChain::new((Nesterov::new(1.0), Descent::new(eta))))
    }),
    ("SGD(weight_decay)", |eta| boxed(OptimiserChain::new((WeightDecay::new(0.1), Descent::new(eta))))),
    ("SGD(momentum, weight_decay)", |eta| {
        boxed(OptimiserChain::new((WeightDecay::new(0.1), Momentum::new(1.0), Descent::new(eta))))
    }),
    ("Adam", |eta| boxed(Adam::new(eta))),
    ("AdamW", |eta| boxed(AdamW::new(eta))),
    ("Adam(weight_decay)", |eta| boxed(OptimiserChain::new((WeightDecay::new(0.1), Adam::new(eta))))),
    ("AdamW(amsgrad)", |eta| boxed(AMSGradW::new(eta))),
    ("RMSprop", |eta| boxed(RMSProp { rho: 0.99, ..RMSProp::new(eta) })),
    ("RMSprop(centered)", |eta| boxed(RMSProp { centred: true, ..RMSProp::new(eta) })),
    ("RMSprop(momentum)", |eta| {
        boxed(OptimiserChain::new((RMSProp::new(1.0), Momentum::new(1.0), Descent::new(eta))))
    }),
    ("RMSprop(momentum), without a Descent", |eta| {
        boxed(OptimiserChain::new((RMSProp::new(1.0), Momentum::new(eta))))
    }),
    ("Adagrad", |eta| boxed(AdaGrad::new(eta))),
    ("Adadelta", |eta| boxed(OptimiserChain::new((AdaDelta::default(), Descent::new(eta))))),
    ("NAdam", |eta| boxed(NAdamW { lambda: 0.0, ..NAdamW::new(eta) })),
    ("Optimisers.jl's NAdam", |eta| boxed(NAdam::new(eta))),
    ("RAdam", |eta| boxed(RAdam::new(eta))),
    ("Adamax", |eta| boxed(AdaMax::new(eta))),
    ("Adafactor", |eta| boxed(Adafactor::new(eta))),
    ("Muon", |eta| boxed(Muon::new(eta))),
    ("Rprop", |eta| boxed(Rprop::new(eta))),
    ("maximize", |eta| boxed(OptimiserChain::new((Scale::new(-1.0), AdamW::new(eta))))),
    ("clip_grad_norm_ and AveragedModel", |eta| {
        let inner = OptimiserChain::new((Momentum::new(1.0), None::<Scale>, Descent::new(eta)));
        boxed(OptimiserChain::new((
            ClipGlobalNorm::new(1.0),
            inner,
            Ema::new(0.9),
            UniformAverage::default(),
        )))
    }),
    ("optax's scale_by_adam and scale_by_learning_rate", |eta| {
        boxed(OptimiserChain::new((Adam::new(1.0), Descent::new(eta))))
    }),
    ("optax's scale_by_lion in a chain", |eta| {
        let moved: Vec<Boxed> = vec![
            boxed(Centralise::default()),
            boxed(Lion::new(1.0)),
            boxed(Scale::new(0.5)),
            boxed(Descent::new(eta)),
        ];
        boxed(OptimiserChain::new((ClipGrad::new(1.0), OptimiserChain::new(moved))))
    }),
];

const BEFORE: f64 = 0.02;
const AFTER: f64 = 0.002;

fn matrices() -> Vars {
    model(&[random(1, &[3, 2], DType::F32, &Device::Cpu), random(2, &[2, 4], DType::F32, &Device::Cpu)])
}

fn gradients(model: &Vars, call: u64) -> std::collections::BTreeMap<String, Tensor> {
    grads(
        model
            .values()
            .zip(100 * call..)
            .map(|(x, seed)| Some(random(seed, x.dims(), DType::F32, &Device::Cpu))),
    )
}

/// Parameters and state after a step before `change` and two behind it.
fn run(rule: impl Rule + Clone, change: impl FnOnce(&mut StateTree)) -> Vec<Vec<u64>> {
    let model = matrices();
    let mut state = setup(rule, &model).expect("a state");
    update(&mut state, &model, &gradients(&model, 0)).expect("an update");
    change(&mut state);
    for call in 1..3 {
        update(&mut state, &model, &gradients(&model, call)).expect("an update");
    }
    snapshot(&model, &state).into_iter().map(|(_, bits)| bits).collect()
}

/// The same with the rate set by hand in the field that has it, which is found by its value.
fn by_hand(rule: &Boxed, rate: f64) -> impl FnOnce(&mut StateTree) {
    let (places, fields) = (rule.places(), rule.fields());
    let is_rate = |(i, (name, value)): (usize, &(&str, FieldValue))| {
        (*name == "eta" && *value == BEFORE.into()).then(|| places[i].clone())
    };
    let place = fields.iter().enumerate().filter_map(is_rate).next_back().expect("a rate");
    move |state| state.adjust_field(&place, rate).expect("a rate")
}

fn drive(schedule: Schedule) -> impl FnOnce(&mut StateTree) {
    move |state| drop(Scheduler::new(schedule, state).expect("a scheduler"))
}

#[test]
fn torchs_optimisers_have_one_learning_rate_whoever_sets_it() {
    for (name, with_rate) in OF_TORCH {
        let (rule, expected) =
            (with_rate(BEFORE), run(with_rate(BEFORE), by_hand(&with_rate(BEFORE), AFTER)));
        assert_eq!(rule.field("eta"), Some(BEFORE.into()), "{name}");
        let mut adjusted = with_rate(BEFORE);
        adjusted.adjust(AFTER).expect("a rate");
        assert_eq!(format!("{adjusted:?}"), format!("{:?}", with_rate(AFTER)), "{name}");

        assert_eq!(
            run(rule.clone(), |state| state.adjust(AFTER).expect("a rate")),
            expected,
            "{name}: adjust"
        );
        assert_eq!(
            run(rule.clone(), |state| state.adjust_field("eta", AFTER).expect("a rate")),
            expected,
            "{name}: adjust_field"
        );
        let each = |state: &mut StateTree| {
            for path in ["0", "1"] {
                state.at(path).and_then(|mut leaf| leaf.adjust(AFTER)).expect("a rate");
            }
        };
        assert_eq!(run(rule.clone(), each), expected, "{name}: a selection");
        assert_eq!(run(rule.clone(), drive(Schedule::constant(AFTER))), expected, "{name}: a schedule");
        let eighth = run(rule.clone(), by_hand(&rule, BEFORE * 0.125));
        assert_eq!(
            run(rule.clone(), drive(Schedule::constant(0.125).relative())),
            eighth,
            "{name}: a relative schedule"
        );
        let mut plateau = ReduceOnPlateau::new().factor(0.125).patience(0);
        let mut fall = |state: &mut StateTree| {
            [1.0, 1.0].map(|loss| plateau.observe(loss, &mut *state).expect("an observation"))
        };
        assert_eq!(
            run(rule.clone(), |state| assert_eq!(fall(state), [false, true])),
            eighth,
            "{name}: a plateau"
        );
    }
}

#[test]
fn the_optimizer_of_candle_nn_sets_the_rate_of_every_one_of_torchs() {
    for (name, with_rate) in OF_TORCH {
        let trained = |set: fn(&mut CandleOptimizer<Boxed>, &Boxed)| -> Vec<Vec<u64>> {
            let model = matrices();
            let mut optimizer = CandleOptimizer::new(model.values().cloned().collect(), with_rate(BEFORE))
                .expect("an optimiser");
            for call in 0..3 {
                if call == 1 {
                    set(&mut optimizer, &with_rate(BEFORE));
                }
                let loss = model.values().map(|x| x.sqr()?.sum_all()).reduce(|a, b| a? + b?).expect("a term");
                optimizer.backward_step(&loss.expect("a loss")).expect("a step");
            }
            assert_eq!(optimizer.learning_rate(), AFTER, "{name}");
            model.values().map(|x| bits(x)).collect()
        };
        let expected = trained(|optimizer, rule| by_hand(rule, AFTER)(optimizer.state_mut()));
        assert_eq!(trained(|optimizer, _| optimizer.set_learning_rate(AFTER)), expected, "{name}");
    }
}

/// The decay is in proportion to the rate of the whole, and what sets that reaches through it.
#[test]
fn a_decay_around_every_one_of_torchs_follows_its_rate() {
    for (name, with_rate) in OF_TORCH {
        let decaying = |eta| DecoupledDecay::new(0.5, with_rate(eta));
        let expected = run(decaying(BEFORE), by_hand(&with_rate(BEFORE), AFTER));
        assert_eq!(
            run(decaying(BEFORE), |state| state.adjust(AFTER).expect("a rate")),
            expected,
            "{name}: adjust"
        );
        assert_eq!(run(decaying(BEFORE), drive(Schedule::constant(AFTER))), expected, "{name}: a schedule");
        assert_ne!(
            run(with_rate(BEFORE), |state| state.adjust(AFTER).expect("a rate")),
            expected,
            "{name}: without a decay"
        );
    }
}

fn leaf_field(state: &StateTree, path: &str, name: &str) -> Option<FieldValue> {
    state.leaf(path).expect("a leaf").field(name)
}

/// Rates at 0, 1.0 and 1.2; a `None` at 1.1.
fn nested(outer: f64, inner: f64, last: f64) -> impl Rule + Clone + PartialEq {
    let inner = OptimiserChain::new((Momentum::new(inner), None::<Descent>, Descent::new(last)));
    OptimiserChain::new((RMSProp::new(outer), inner, ClipGrad::new(1.0)))
}

#[test]
fn the_last_rate_of_nested_chains_is_set_and_a_place_sets_what_it_names() {
    let cases: [(&str, f64, [f64; 3]); 4] = [
        ("eta", 0.25, [0.5, 0.25, 2.0]),
        ("1.eta", 0.25, [0.5, 0.25, 1.0]),
        ("1.0.eta", 1.0, [0.5, 1.0, 0.125]),
        ("0.eta", 1.0, [1.0, 0.25, 0.125]),
    ];
    for (name, value, [outer, inner, last]) in cases {
        let (mut rule, expected) = (nested(0.5, 0.25, 0.125), nested(outer, inner, last));
        rule.adjust_field(name, value).expect("a rate");
        assert_eq!(rule, expected, "{name}");
        assert_eq!(rule.field(name), Some(value.into()));
        let optimisers: [Box<dyn optimisers::Optimiser>; 3] = [
            Box::new(nested(0.5, 0.25, 0.125)),
            Box::new(MixedPrecision::new(DType::F64, Some(boxed(nested(0.5, 0.25, 0.125))))),
            Box::new(Kahan::new(nested(0.5, 0.25, 0.125))),
        ];
        for optimiser in optimisers {
            let mut state = setup(optimiser, &matrices()).expect("a state");
            state.adjust_field(name, value).expect("a rate");
            let rates = ["0.eta", "1.0.eta", "1.2.eta"].map(|place| leaf_field(&state, "0", place));
            assert_eq!(rates, [outer, inner, last].map(|rate| Some(rate.into())), "{name}");
            assert_eq!(state.leaf("0").and_then(|leaf| leaf.learning_rate()), Some(outer * inner * last));
        }
    }
    // A whole number is a rate, a flag is none.
    let mut rule = nested(0.5, 0.25, 0.125);
    rule.adjust_field("eta", 1).expect("a rate");
    assert_eq!(rule, nested(0.5, 0.25, 8.0));
    says(
        &rule.adjust_field("eta", true).expect_err("a flag"),
        &["RMSProp: eta is true, expected a real number"],
    );
    // What is in range as a product and not as its last factor.
    let error = nested(-1.0, 1.0, 1.0).adjust(0.5).expect_err("out of range");
    says(&error, &["RMSProp: eta is -1"]);
    says(&nested(1.0, 1.0, 1.0).adjust(-0.5).expect_err("out of range"), &["Descent: eta is -0.5"]);
    says(&nested(1e-300, 1.0, 1.0).adjust(1e300).expect_err("out of range"), &["Descent: eta is inf"]);
}

#[test]
fn no_last_rate_makes_up_for_a_rate_of_zero() {
    let remedy = [
        "0.eta = 0, 1.0.eta = 0.25, 1.2.eta = 0.125",
        "no 1.2.eta makes their product 0.5, as that of the others is 0",
        "by their places",
    ];
    let mut rule = nested(0.0, 0.25, 0.125);
    for name in ["eta", "0.eta", "1.eta"] {
        let outcome = rule.clone().adjust_field(name, 0.5);
        assert_eq!(outcome.is_err(), name == "eta", "{name}");
    }
    says(&rule.adjust(0.5).expect_err("refused"), &remedy);
    assert_eq!(rule, nested(0.0, 0.25, 0.125));
    rule.adjust(0.0).expect("the rate that it has");
    assert_eq!(rule, nested(0.0, 0.25, 0.125));
    let infinite = OptimiserChain::new((
        OptimiserChain::new((Descent::new(1e200), Descent::new(1e200))),
        Descent::new(0.5),
    ));
    says(&infinite.clone().adjust(0.5).expect_err("refused"), &["as that of the others is inf"]);

    let model = matrices();
    let choose =
        |path: &str, _: Parameter<'_>| Some(nested(if path == "0" { 0.5 } else { 0.0 }, 0.25, 0.125));
    let mut state = setup_with(&model, choose).expect("a state");
    let before = snapshot(&model, &state);
    let refused = [
        state.adjust(0.5).expect_err("refused"),
        state.adjust_fields([("delta", 2.0.into()), ("eta", 0.5.into())]).expect_err("refused"),
        state.at("1").and_then(|mut leaf| leaf.adjust(0.5)).expect_err("refused"),
        Scheduler::new(Schedule::constant(0.5).below("1"), &mut state).expect_err("refused"),
    ];
    for error in refused {
        says(&error, &remedy);
        assert_eq!(error.path(), Some("1"), "{error}");
        assert_eq!(snapshot(&model, &state), before);
    }
    // A factor of a rate of 0 is 0, whatever it is.
    let _ = Scheduler::new(Schedule::constant(0.5).relative(), &mut state).expect("a scheduler");
    assert_eq!(
        ["0.eta", "1.0.eta", "1.2.eta"].map(|place| leaf_field(&state, "1", place)),
        [0.0, 0.25, 0.0625].map(|eta| Some(eta.into()))
    );
}

/// What of a driven chain is adjusted by hand stays so, and what drives goes on: one value is the rate, a
/// factor is one of what the leaf has.
#[test]
fn a_rate_is_driven_while_a_member_is_adjusted_by_hand() {
    let model = matrices();
    let rates =
        |state: &StateTree| ["0.eta", "1.0.eta", "1.2.eta", "eta"].map(|name| leaf_field(state, "1", name));
    for (schedule, after) in [
        (Schedule::linear(0.5, 0.25, 2), [[0.5, 0.25, 4.0, 0.5], [0.5, 1.0, 0.75, 0.375]]),
        (
            Schedule::linear(1.0, 0.5, 2).relative(),
            [[0.5, 0.25, 0.125, 0.015625], [0.5, 1.0, 0.09375, 0.046875]],
        ),
    ] {
        let mut state = setup(nested(0.5, 0.25, 0.125), &model).expect("a state");
        let mut scheduler = Scheduler::new(schedule.clone(), &mut state).expect("a scheduler");
        assert_eq!(rates(&state), after[0].map(|rate| Some(rate.into())));
        state.adjust_field("1.0.eta", 1.0).expect("a rate");
        scheduler.go_to(1, &mut state).expect("a step of the schedule");
        assert_eq!(rates(&state), after[1].map(|rate| Some(rate.into())), "{schedule:?}");

        // The last one is still the schedule's, also in another process and another chain.
        let mut restored = setup(nested(1.0, 1.0, 1.0), &model).expect("a state");
        open(&file_of(Checkpoint::new(&state)))
            .and_then(|file| file.restore(&mut restored))
            .expect("a state");
        for state in [&mut state, &mut restored] {
            let resumed = Scheduler::resume(schedule.clone(), 1, state).expect("a scheduler");
            assert_eq!((resumed, rates(state)), (scheduler.clone(), after[1].map(|rate| Some(rate.into()))));
            let [.., base] = if after[1][3] == 0.375 { [None; 2] } else { [Some(0.125), Some(0.0625)] };
            assert_eq!(state.leaf("1").and_then(|leaf| leaf.base("eta")), base);
        }
        // What is set by hand is where a new schedule begins.
        restored.adjust(0.25).expect("a rate");
        let _ = Scheduler::new(Schedule::constant(0.5).relative(), &mut restored).expect("a second phase");
        assert_eq!(rates(&restored), [0.5, 1.0, 0.25, 0.125].map(|rate| Some(rate.into())));
        assert_eq!(restored.leaf("1").and_then(|leaf| leaf.base("eta")), Some(0.25));
    }
}

/// A schedule drives the rate of the whole, wherever a new chain has it.
#[test]
fn another_chain_goes_on_at_the_driven_rate() {
    let model = matrices();
    let schedules = [
        (Schedule::linear(0.5, 0.25, 2), [0.375; 2]),
        (Schedule::linear(1.0, 0.5, 2).relative(), [0.75 * 0.25, 0.75 * 0.015625]),
    ];
    for (schedule, expected) in schedules {
        let mut state = setup(nested(0.5, 0.25, 0.125), &model).expect("a state");
        let mut scheduler = Scheduler::new(schedule, &mut state).expect("a scheduler");
        scheduler.go_to(1, &mut state).expect("a step of the schedule");
        let rate = |state: &StateTree| state.leaf("0").and_then(|leaf| leaf.learning_rate());
        state.all().replace(Adam::new(0.25), &model).expect("one rate");
        assert_eq!(rate(&state), Some(expected[0]));
        state.all().replace(nested(0.5, 0.25, 0.125), &model).expect("three rates");
        assert_eq!(rate(&state), Some(expected[1]));
        assert_eq!(
            ["0.eta", "1.0.eta"].map(|place| leaf_field(&state, "0", place)),
            [0.5, 0.25].map(|eta| Some(eta.into()))
        );
        scheduler.go_to(1, &mut state).expect("the same step");
        assert_eq!(rate(&state), Some(expected[1]));
    }
}

/// Products that no double is: leaves with other factors are at one rate all the same.
#[test]
fn one_schedule_drives_chains_whose_rates_are_products_of_other_factors() {
    let model = matrices();
    let choose = |path: &str, _: Parameter<'_>| -> Option<Boxed> {
        Some(if path == "0" {
            boxed(Descent::new(0.1))
        } else {
            boxed(OptimiserChain::new((Momentum::new(3.0), Descent::new(0.1 / 3.0))))
        })
    };
    let mut state = setup_with(&model, choose).expect("a state");
    state.adjust(0.1).expect("a rate");
    let mut scheduler = Scheduler::new(Schedule::cosine(0.1, 0.01, 50), &mut state).expect("a scheduler");
    for step in 1..50 {
        scheduler.go_to(step, &mut state).expect("a step of the schedule");
    }
    state.at("1").and_then(|mut leaf| leaf.adjust(0.02)).expect("a rate");
    let error = scheduler.go_to(50, &mut state).expect_err("two rates");
    is_kind(&error, ErrorKind::Schedule, &["one schedule would make its eta", "and that of \"0\"", "equal"]);
}

/// The first rule until a flag says that it is the turn of the second. Each has a state.
#[derive(Clone, Debug, PartialEq)]
pub struct Switch<A, B> {
    is_second: bool,
    first: A,
    second: B,
}

impl<A: Rule + Clone, B: Rule + Clone> Switch<A, B> {
    pub fn new(first: A, second: B) -> Self {
        Switch { is_second: false, first, second }
    }
}

impl<A: Rule + Clone, B: Rule + Clone> optimisers::Describe for Switch<A, B> {
    fn describe(&mut self, rule: &mut optimisers::Describer<'_>) {
        rule.kind("Switch");
        rule.field("is_second", &mut self.is_second, false, optimisers::range::any);
        rule.alternative(&mut self.first);
        rule.alternative(&mut self.second);
    }
}

impl<A: Rule + Clone, B: Rule + Clone> Rule for Switch<A, B> {
    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let [first, second] = state.parts().held.members()?;
        if self.is_second { self.second.apply(second, x, dx) } else { self.first.apply(first, x, dx) }
    }
}

/// Rules of which one acts have a rate each, and setting it sets all.
#[test]
fn alternatives_have_learning_rates_of_their_own() {
    let rule = |first, second| {
        OptimiserChain::new((
            Momentum::new(0.5),
            Switch::new(Descent::new(first), Scale::new(1.0)),
            Switch::new(Adam::new(first), Adam::new(second)),
        ))
    };
    let places = ["0.eta", "0.rho", "1.is_second", "1.0.eta", "1.1.alpha", "2.is_second", "2.0.eta"];
    assert_eq!(rule(1.0, 1.0).places()[..7], places);
    let apart = |first, second| {
        OptimiserChain::new((Momentum::new(0.5), Switch::new(Descent::new(first), Descent::new(second))))
    };
    let mut adjusted = apart(0.25, 0.125);
    assert_eq!(
        (adjusted.field("eta"), adjusted.field("1.eta"), adjusted.field("1.1.eta")),
        (None, None, Some(0.125.into()))
    );
    adjusted.adjust(1.0).expect("two rates");
    assert_eq!(adjusted, apart(2.0, 2.0));
    assert_eq!((adjusted.field("eta"), adjusted.field("1.eta")), (Some(1.0.into()), Some(2.0.into())));
    adjusted.adjust_field("1.1.eta", 0.5).expect("one rate");
    assert_eq!(adjusted, apart(2.0, 0.5));

    let model = matrices();
    let mut state = setup(apart(0.25, 0.125), &model).expect("a state");
    assert_eq!(state.leaf("0").and_then(|leaf| leaf.learning_rate()), None);
    let flattened = Scheduler::new(Schedule::constant(0.5), &mut state).expect_err("two rates");
    is_kind(
        &flattened,
        ErrorKind::Schedule,
        &["one schedule would make its eta, 0.0625, and that of \"0\", 0.125, equal"],
    );
    let mut scheduler =
        Scheduler::new(Schedule::linear(1.0, 0.0, 2).relative(), &mut state).expect("a scheduler");
    scheduler.go_to(1, &mut state).expect("a step of the schedule");
    let rates = |state: &StateTree| ["1.0.eta", "1.1.eta"].map(|place| leaf_field(state, "0", place));
    assert_eq!(rates(&state), [0.125, 0.0625].map(|rate| Some(rate.into())), "each has its own");
    let mut plateau = ReduceOnPlateau::new().factor(0.5).patience(0);
    assert_eq!(
        [1.0, 1.0].map(|loss| plateau.observe(loss, &mut state).expect("an observation")),
        [false, true]
    );
    assert_eq!(rates(&state), [0.0625, 0.03125].map(|rate| Some(rate.into())));
    let mut restored = setup(apart(1.0, 1.0), &model).expect("a state");
    open(&file_of(Checkpoint::new(&state))).and_then(|file| file.restore(&mut restored)).expect("a state");
    assert_eq!(rates(&restored), rates(&state));
    assert_eq!(
        ["1.0.eta", "1.1.eta"].map(|place| restored.leaf("0").and_then(|leaf| leaf.base(place))),
        [Some(0.125), Some(0.0625)]
    );
    state.adjust(0.5).expect("one rate");
    let _ = Scheduler::new(Schedule::constant(0.25), &mut state).expect("one schedule for one rate");
    assert_eq!(rates(&state), [Some(0.5.into()); 2]);
}

/// A number that is right for one of them alone is not made up.
#[test]
fn alternatives_with_different_rates_in_front_of_a_rate_are_refused() {
    let rule = |first, second| {
        OptimiserChain::new((Switch::new(Momentum::new(first), Momentum::new(second)), Descent::new(0.5)))
    };
    let mut same = rule(0.25, 0.25);
    same.adjust(0.5).expect("one product");
    assert_eq!(same.field("1.eta"), Some(2.0.into()));
    let without = OptimiserChain::new((Descent::new(0.5), Switch::new(Descent::new(0.5), Scale::new(1.0))));
    let model = matrices();
    for rule in [boxed(rule(0.25, 0.125)), boxed(without)] {
        let places = rule.places().into_iter().filter(|place| place.ends_with("eta")).collect::<Vec<_>>();
        let mut state = setup(rule.clone(), &model).expect("a state");
        let errors = [
            rule.clone().adjust(0.5).expect_err("refused"),
            state.adjust(0.5).expect_err("refused"),
            Scheduler::new(Schedule::constant(0.5), &mut state).expect_err("refused"),
        ];
        for error in errors {
            let words = [
                "several learning rates",
                "rules in place of each other differ",
                &places[0],
                &places[1],
                "`setup`",
            ];
            is_kind(&error, ErrorKind::Argument, &words);
        }
        assert_eq!(rule.field("eta"), None);
    }
    // A decay is in proportion to one rate.
    let switch = |first, second| Switch::new(Descent::new(first), Descent::new(second));
    let error = setup(DecoupledDecay::new(0.5, switch(0.5, 0.25)), &model).expect_err("two rates");
    says(
        &error,
        &["Switch(Descent, Descent)", "0.eta = 0.5, 1.eta = 0.25", "a decay is in proportion to none"],
    );
    let expected = run(OptimiserChain::new((DecoupledDecay::new(0.5, Descent::new(0.25)),)), |_| ());
    assert_eq!(run(DecoupledDecay::new(0.5, switch(0.25, 0.25)), |_| ())[..2], expected[..2]);
}

/// `adjust` before `setup` is `adjust` behind it.
#[test]
fn a_fallback_is_adjusted_before_setup_as_its_leaves_are_afterwards() {
    let model =
        model(&[random(1, &[3, 2], DType::F32, &Device::Cpu), random(2, &[3], DType::F32, &Device::Cpu)]);
    let rule = |eta, other| {
        let fallback =
            Fallback::new(Muon::new(eta), OptimiserChain::new((RMSProp::new(0.5), Descent::new(other))));
        DecoupledDecay::new(0.1, OptimiserChain::new((ClipGlobalNorm::new(1.0), fallback)))
    };
    let adjusted: [(&str, FieldValue); 5] = [
        ("eta", 0.25.into()),
        ("rho", 0.5.into()),
        ("delta", 1.0.into()),
        ("1.eta", 0.125.into()),
        ("omega", 2.0.into()),
    ];
    let mut found = 0;
    for (name, value) in adjusted {
        let mut before = rule(0.02, 0.003);
        let mut state = setup(before.clone(), &model).expect("a state");
        let after = state.adjust_field(name, value);
        assert_eq!(before.adjust_field(name, value).is_ok(), after.is_ok(), "{name}");
        found += usize::from(after.is_ok());
        let told = |state: &StateTree| {
            state
                .leaves()
                .map(|leaf| (leaf.optimiser().places(), leaf.optimiser().fields()))
                .collect::<Vec<_>>()
        };
        assert_eq!(told(&setup(before, &model).expect("a state")), told(&state), "{name}");
    }
    assert_eq!(found, 4);
    let mut rule = rule(0.02, 0.003);
    assert_eq!(
        rule.name(),
        "DecoupledDecay(OptimiserChain(ClipGlobalNorm, Fallback(Muon, OptimiserChain(RMSProp, Descent))))"
    );
    assert_eq!(
        ["eta", "1.0.eta", "1.1.eta", "1.1.1.eta"].map(|name| rule.field(name)),
        [None, Some(0.02), Some(0.0015), Some(0.003)].map(|eta| eta.map(FieldValue::Real))
    );
    rule.adjust_field("1.1.eta", 0.001).expect("the second rule's");
    let state = setup(rule, &model).expect("a state");
    let rates: Vec<_> = state.leaves().map(|leaf| leaf.learning_rate()).collect();
    assert_eq!(rates, [Some(0.02), Some(0.001)]);
}
