//! The learning rate of a chain: the product of those of its members, read and set as one.

use candle_core::{DType, Device};
use candle_nn::Optimizer;
use optimisers::{
    AMSGradW, AdaDelta, AdaGrad, AdaMax, Adafactor, Adam, AdamW, Adjust, CandleOptimizer, Centralise,
    Checkpoint, ClipGlobalNorm, ClipGrad, DecoupledDecay, Descent, Ema, ErrorKind, Fallback, FieldValue,
    Flow, Gradient, Lion, Momentum, Muon, NAdam, NAdamW, Nesterov, OptimiserChain, Parameter, RAdam, RMSProp,
    ReduceOnPlateau, Result, Rule, Scale, Schedule, State, StateTree, UniformAverage, WeightDecay, setup,
    setup_with, update,
};

use support::common::{Vars, grads, is_kind, model, random, says, snapshot};
use support::crafted_checkpoints::{file_of, open};

pub type Boxed = Box<dyn Rule>;

fn boxed(rule: impl Rule) -> Boxed {
    Box::new(rule)
}

/// Makes a rule with its learning rate in its last member.
pub type WithRate = fn(f64) -> Boxed;

/// What the page "coming from" says that torch's optimisers are here, and those of optax that are chains.
pub const OF_TORCH: [(&str, WithRate); 27] = [
    ("SGD", |eta| boxed(Descent::new(eta))),
    ("SGD(momentum)", |eta| boxed(Momentum::new(eta))),
    ("SGD(momentum), to the letter", |eta| {
        boxed(OptimiserChain::new((Momentum::new(1.0), Descent::new(eta))))
    }),
    ("SGD(nesterov)", |eta| boxed(Nesterov::new(eta))),
    ("SGD(nesterov), to the letter", |eta| {
        boxed(OptimiserChain::new((Nesterov::new(1.0), Descent::new(eta))))
    }),
    ("SGD(weight_decay)", |eta| {
        boxed(OptimiserChain::new((WeightDecay::new(0.1), Descent::new(eta))))
    }),
    ("SGD(momentum, weight_decay)", |eta| {
        boxed(OptimiserChain::new((
            WeightDecay::new(0.1),
            Momentum::new(1.0),
            Descent::new(eta),
        )))
    }),
    ("Adam", |eta| boxed(Adam::new(eta))),
    ("AdamW", |eta| boxed(AdamW::new(eta))),
    ("Adam(weight_decay)", |eta| {
        boxed(OptimiserChain::new((WeightDecay::new(0.1), Adam::new(eta))))
    }),
    ("AdamW(amsgrad)", |eta| boxed(AMSGradW::new(eta))),
    ("RMSprop", |eta| {
        boxed(RMSProp {
            rho: 0.99,
            ..RMSProp::new(eta)
        })
    }),
    ("RMSprop(centered)", |eta| {
        boxed(RMSProp {
            centred: true,
            ..RMSProp::new(eta)
        })
    }),
    ("RMSprop(momentum)", |eta| {
        boxed(OptimiserChain::new((
            RMSProp::new(1.0),
            Momentum::new(1.0),
            Descent::new(eta),
        )))
    }),
    ("RMSprop(momentum), without a Descent", |eta| {
        boxed(OptimiserChain::new((RMSProp::new(1.0), Momentum::new(eta))))
    }),
    ("Adagrad", |eta| boxed(AdaGrad::new(eta))),
    ("Adadelta", |eta| {
        boxed(OptimiserChain::new((AdaDelta::default(), Descent::new(eta))))
    }),
    ("NAdam", |eta| {
        boxed(NAdamW {
            lambda: 0.0,
            ..NAdamW::new(eta)
        })
    }),
    ("Optimisers.jl's NAdam", |eta| boxed(NAdam::new(eta))),
    ("RAdam", |eta| boxed(RAdam::new(eta))),
    ("Adamax", |eta| boxed(AdaMax::new(eta))),
    ("Adafactor", |eta| boxed(Adafactor::new(eta))),
    ("Muon", |eta| boxed(Muon::new(eta))),
    ("maximize", |eta| {
        boxed(OptimiserChain::new((Scale::new(-1.0), AdamW::new(eta))))
    }),
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
        boxed(OptimiserChain::new((
            ClipGrad::new(1.0),
            OptimiserChain::new(moved),
        )))
    }),
];

const BEFORE: f64 = 0.02;
const AFTER: f64 = 0.002;

fn matrices() -> Vars {
    model(&[
        random(1, &[3, 2], DType::F32, &Device::Cpu),
        random(2, &[2, 4], DType::F32, &Device::Cpu),
    ])
}

/// Parameters and state after a step before `change` and two behind it.
fn run(rule: impl Rule + Clone, change: impl FnOnce(&mut StateTree)) -> Vec<Vec<u64>> {
    let model = matrices();
    let mut state = setup(rule, &model).expect("a state");
    let step = |state: &mut StateTree, call: u64| {
        let gradients = model
            .values()
            .zip(100 * call..)
            .map(|(x, seed)| Some(random(seed, x.dims(), DType::F32, &Device::Cpu)));
        update(state, &model, &grads(gradients)).expect("an update");
    };
    step(&mut state, 0);
    change(&mut state);
    (1..3).for_each(|call| step(&mut state, call));
    snapshot(&model, &state)
        .into_iter()
        .map(|(_, bits)| bits)
        .collect()
}

/// Sets the rate in the field that has it, which is found by its value.
fn by_hand(rule: &Boxed, rate: f64) -> impl FnOnce(&mut StateTree) {
    let (places, fields) = (rule.places(), rule.fields());
    let is_rate = |(i, (name, value)): (usize, &(&str, FieldValue))| {
        (*name == "eta" && *value == BEFORE.into()).then(|| places[i].clone())
    };
    let place = fields
        .iter()
        .enumerate()
        .filter_map(is_rate)
        .next_back()
        .expect("a rate");
    move |state| state.all().adjust_field(&place, rate).expect("a rate")
}

/// What sets the rate of a state, and to what.
type Setter = (f64, fn(&mut StateTree) -> Result<()>);

const SETTERS: [Setter; 6] = [
    (AFTER, |state| state.adjust(AFTER)),
    (AFTER, |state| state.all().adjust_field("eta", AFTER)),
    (AFTER, |state| {
        ["0", "1"]
            .into_iter()
            .try_for_each(|path| state.at(path)?.adjust(AFTER))
    }),
    (AFTER, |state| state.schedule(Schedule::constant(AFTER))),
    (BEFORE * 0.125, |state| {
        state.schedule(Schedule::constant(0.125).relative())
    }),
    (BEFORE * 0.125, |state| {
        let mut plateau = ReduceOnPlateau::new().factor(0.125).patience(0);
        let fallen = [1.0, 1.0].map(|loss| plateau.observe(loss, &mut *state).expect("an observation"));
        assert_eq!(fallen, [false, true]);
        Ok(())
    }),
];

/// A decay around them is in proportion to the rate of the whole, and what sets that reaches through it.
#[test]
fn torchs_optimisers_have_one_learning_rate_whoever_sets_it() {
    for (name, with_rate) in OF_TORCH {
        let mut adjusted = with_rate(BEFORE);
        assert_eq!(adjusted.field("eta"), Some(BEFORE.into()), "{name}");
        adjusted.adjust(AFTER).expect("a rate");
        let variables = matrices().values().cloned().collect();
        let mut optimizer = CandleOptimizer::new(variables, with_rate(BEFORE)).expect("an optimiser");
        optimizer.set_learning_rate(AFTER);
        assert_eq!(optimizer.learning_rate(), AFTER, "{name}");
        let mut told: Vec<_> = optimizer
            .state()
            .leaves()
            .map(|leaf| format!("{:?}", leaf.optimiser()))
            .collect();
        told.push(format!("{adjusted:?}"));
        assert_eq!(told, vec![format!("{:?}", with_rate(AFTER)); 3], "{name}");

        // No decay may be around an average.
        let decayed = if name.ends_with("AveragedModel") {
            boxed(OptimiserChain::new((WeightDecay::new(0.5), with_rate(BEFORE))))
        } else {
            boxed(DecoupledDecay::new(0.5, with_rate(BEFORE)))
        };
        let rules = [with_rate(BEFORE), decayed];
        let expected = rules
            .each_ref()
            .map(|rule| run(rule.clone(), by_hand(rule, AFTER)));
        assert_ne!(expected[0], expected[1], "{name}: a decay");
        for rule in rules {
            let expected = [AFTER, BEFORE * 0.125].map(|rate| run(rule.clone(), by_hand(&rule, rate)));
            for (i, (rate, set)) in SETTERS.into_iter().enumerate() {
                let got = run(rule.clone(), |state| set(state).expect("a rate"));
                assert_eq!(
                    got,
                    expected[usize::from(rate != AFTER)],
                    "{name}: {i} of {}",
                    rule.name()
                );
            }
        }
    }
}

fn real(value: f64) -> Option<FieldValue> {
    Some(value.into())
}

/// Fields of a leaf.
fn fields<const N: usize>(state: &StateTree, path: &str, names: [&str; N]) -> [Option<FieldValue>; N] {
    let leaf = state.leaf(path).expect("a leaf");
    names.map(|name| leaf.field(name))
}

/// Fields that act in the next step.
fn acting<const N: usize>(state: &StateTree, path: &str, names: [&str; N]) -> [Option<FieldValue>; N] {
    let leaf = state.leaf(path).expect("a leaf");
    names.map(|name| leaf.acting().field(name))
}

/// Rates at 0, 1.0 and 1.2; a `None` at 1.1.
fn nested(outer: f64, inner: f64, last: f64) -> impl Rule + Clone + PartialEq {
    let inner = OptimiserChain::new((Momentum::new(inner), None::<Descent>, Descent::new(last)));
    OptimiserChain::new((RMSProp::new(outer), inner, ClipGrad::new(1.0)))
}

const NESTED: [&str; 4] = ["0.eta", "1.0.eta", "1.2.eta", "eta"];

/// As well if the product is in range and its last factor is not.
#[test]
fn a_rate_that_no_last_factor_makes_is_refused() {
    let remedy = [
        "0.eta = 0, 1.0.eta = 0.25, 1.2.eta = 0.125",
        "no value of 1.2.eta makes the product 0.5, because the product of the others is 0",
        "by their places",
    ];
    let infinite = OptimiserChain::new((nested(1e200, 1e200, 1.0), Descent::new(0.5)));
    let cases: [(Boxed, f64, &[&str]); 5] = [
        (boxed(nested(0.0, 0.25, 0.125)), 0.5, &remedy),
        (
            boxed(infinite),
            0.5,
            &["because the product of the others is inf"],
        ),
        (boxed(nested(-1.0, 1.0, 1.0)), 0.5, &["RMSProp: eta is -1"]),
        (boxed(nested(1.0, 1.0, 1.0)), -0.5, &["Descent: eta is -0.5"]),
        (boxed(nested(1e-300, 1.0, 1.0)), 1e300, &["Descent: eta is inf"]),
    ];
    for (mut rule, rate, words) in cases {
        let before = format!("{rule:?}");
        says(&rule.adjust(rate).expect_err("refused"), words);
        assert_eq!(format!("{rule:?}"), before);
    }
    let mut rule = nested(0.0, 0.25, 0.125);
    rule.adjust(0.0).expect("the rate that it has");
    assert!(rule == nested(0.0, 0.25, 0.125));

    let model = matrices();
    let choose =
        |path: &str, _: Parameter<'_>| Some(nested(if path == "0" { 0.5 } else { 0.0 }, 0.25, 0.125));
    let mut state = setup_with(&model, choose).expect("a state");
    let before = snapshot(&model, &state);
    let refused = [
        state.adjust(0.5),
        state
            .all()
            .adjust_fields([("delta", 2.0.into()), ("eta", 0.5.into())]),
        state.at("1").and_then(|mut leaf| leaf.adjust(0.5)),
        state
            .at("1")
            .and_then(|mut leaf| leaf.schedule(Schedule::constant(0.5))),
    ];
    for error in refused.map(|outcome| outcome.expect_err("refused")) {
        says(&error, &remedy);
        assert_eq!(
            (error.path(), snapshot(&model, &state)),
            (Some("1"), before.clone()),
            "{error}"
        );
    }
    // A factor of a rate of 0 is 0, whatever it is.
    state
        .schedule(Schedule::constant(0.5).relative())
        .expect("a schedule");
    assert_eq!(acting(&state, "1", NESTED), [0.0, 0.25, 0.0625, 0.0].map(real));
}

/// What of a driven chain is adjusted by hand stays so, and what drives goes on: a value is that of the last
/// member, a factor is one of what the leaf has.
#[test]
fn a_rate_is_driven_while_a_member_is_adjusted_by_hand() {
    let model = matrices();
    let cases = [
        (
            Schedule::linear(4.0, 2.0, 2).field("1.2.eta"),
            [[0.5, 0.25, 4.0, 0.5], [0.5, 1.0, 3.0, 1.5]],
        ),
        (
            Schedule::linear(1.0, 0.5, 2).relative(),
            [[0.5, 0.25, 0.125, 0.015625], [0.5, 1.0, 0.09375, 0.046875]],
        ),
    ];
    for (schedule, after) in cases {
        let mut state = setup(nested(0.5, 0.25, 0.125), &model).expect("a state");
        state.schedule(schedule.clone()).expect("a schedule");
        assert_eq!(acting(&state, "1", NESTED), after[0].map(real));
        state.all().adjust_field("1.0.eta", 1.0).expect("a rate");
        state.set_steps(1).expect("a count");
        assert_eq!(acting(&state, "1", NESTED), after[1].map(real), "{schedule:?}");
        assert_eq!(fields(&state, "1", NESTED), [0.5, 1.0, 0.125, 0.0625].map(real));

        // The last one is still the schedule's, also in another process.
        let mut restored = setup(nested(1.0, 1.0, 1.0), &model).expect("a state");
        let file = open(&file_of(Checkpoint::new(&state))).expect("a checkpoint");
        file.restore(&mut restored).expect("a state");
        assert_eq!(acting(&restored, "1", NESTED), after[1].map(real));
        assert_eq!(fields(&restored, "1", NESTED), fields(&state, "1", NESTED));
    }
    // A new rule goes on at the driven rate, wherever it has it.
    for (schedule, rate) in [
        (Schedule::linear(0.5, 0.25, 2), 0.375),
        (Schedule::linear(1.0, 0.5, 2).relative(), 0.75 / 64.0),
    ] {
        let mut state = setup(nested(0.5, 0.25, 0.125), &model).expect("a state");
        state.schedule(schedule).expect("a schedule");
        state.set_steps(1).expect("a count");
        assert_eq!(
            acting(&state, "0", NESTED),
            [0.5, 0.25, rate / 0.125, rate].map(real)
        );
        state
            .all()
            .replace(Adam::new(1.0 / 64.0), &model)
            .expect("one rate");
        assert_eq!(acting(&state, "0", ["eta"]), [real(rate)]);
        state
            .all()
            .replace(nested(0.5, 0.5, 1.0 / 16.0), &model)
            .expect("three rates");
        assert_eq!(
            acting(&state, "0", NESTED),
            [0.5, 0.5, rate / 0.25, rate].map(real)
        );
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
    let schedule = Schedule::cosine(0.1, 0.01, 50);
    state.schedule(schedule.clone()).expect("a schedule");
    for step in 0..50 {
        state.set_steps(step).expect("a count");
        let rates = ["0", "1"].map(|path| {
            state
                .leaf(path)
                .and_then(|leaf| leaf.learning_rate())
                .expect("a rate")
        });
        assert!(
            rates
                .into_iter()
                .all(|rate| (rate - schedule.at(step)).abs() < 1e-16),
            "step {step}"
        );
    }
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
        Switch {
            is_second: false,
            first,
            second,
        }
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
        if self.is_second {
            self.second.apply(second, x, dx)
        } else {
            self.first.apply(first, x, dx)
        }
    }
}

/// Rules of which one acts have a rate each, and setting it sets all.
#[test]
fn alternatives_have_learning_rates_of_their_own() {
    let rule = OptimiserChain::new((
        Momentum::new(0.5),
        Switch::new(Descent::new(1.0), Scale::new(1.0)),
        Switch::new(Adam::new(1.0), Adam::new(1.0)),
    ));
    let places = [
        "0.eta",
        "0.rho",
        "1.is_second",
        "1.0.eta",
        "1.1.alpha",
        "2.is_second",
        "2.0.eta",
    ];
    assert_eq!(rule.places()[..7], places);
    let apart = |first, second| {
        OptimiserChain::new((
            Momentum::new(0.5),
            Switch::new(Descent::new(first), Descent::new(second)),
        ))
    };
    let mut adjusted = apart(0.25, 0.125);
    let rates = |rule: &dyn Rule| ["eta", "1.eta", "1.1.eta"].map(|place| rule.field(place));
    assert_eq!(rates(&adjusted), [None, None, real(0.125)]);
    adjusted.adjust(1.0).expect("two rates");
    assert_eq!(
        (rates(&adjusted), &adjusted),
        ([1.0, 2.0, 2.0].map(real), &apart(2.0, 2.0))
    );
    adjusted.adjust_field("1.1.eta", 0.5).expect("one rate");
    assert_eq!(adjusted, apart(2.0, 0.5));

    let model = matrices();
    let mut state = setup(apart(0.25, 0.125), &model).expect("a state");
    assert_eq!(state.leaf("0").and_then(|leaf| leaf.learning_rate()), None);
    let flattened = state.schedule(Schedule::constant(0.5)).expect_err("two rates");
    let words = [
        "one schedule would make two different values equal: its eta, 0.0625, and that of \"0\", \
                  0.125",
    ];
    is_kind(&flattened, ErrorKind::Argument, &words);
    state
        .schedule(Schedule::linear(1.0, 0.0, 2).relative())
        .expect("a schedule");
    state.set_steps(1).expect("a count");
    let places = ["1.0.eta", "1.1.eta"];
    assert_eq!(
        acting(&state, "0", places),
        [0.125, 0.0625].map(real),
        "each has its own"
    );
    let mut plateau = ReduceOnPlateau::new().factor(0.5).patience(0);
    let fallen = [1.0, 1.0].map(|loss| plateau.observe(loss, &mut state).expect("an observation"));
    assert_eq!(fallen, [false, true]);
    let mut restored = setup(apart(1.0, 1.0), &model).expect("a state");
    let file = open(&file_of(Checkpoint::new(&state))).expect("a checkpoint");
    file.restore(&mut restored).expect("a state");
    for state in [&state, &restored] {
        assert_eq!(acting(state, "0", places), [0.0625, 0.03125].map(real));
        assert_eq!(fields(state, "0", places), [0.125, 0.0625].map(real));
    }
    state.adjust(0.5).expect("one rate");
    state
        .schedule(Schedule::constant(0.25))
        .expect("one schedule for one rate");
    assert_eq!(acting(&state, "0", places), [real(0.5); 2]);
}

/// A number that is right for one of them alone is not made up.
#[test]
fn alternatives_with_different_rates_in_front_of_a_rate_are_refused() {
    let rule = |first, second| {
        OptimiserChain::new((
            Switch::new(Momentum::new(first), Momentum::new(second)),
            Descent::new(0.5),
        ))
    };
    let mut same = rule(0.25, 0.25);
    same.adjust(0.5).expect("one product");
    assert_eq!(same.field("1.eta"), real(2.0));
    let without = OptimiserChain::new((Descent::new(0.5), Switch::new(Descent::new(0.5), Scale::new(1.0))));
    let model = matrices();
    for rule in [boxed(rule(0.25, 0.125)), boxed(without)] {
        let places = rule
            .places()
            .into_iter()
            .filter(|place| place.ends_with("eta"))
            .collect::<Vec<_>>();
        let mut state = setup(rule.clone(), &model).expect("a state");
        let refused = [
            rule.clone().adjust(0.5),
            state.adjust(0.5),
            state.schedule(Schedule::constant(0.5)),
        ];
        for error in refused.map(|outcome| outcome.expect_err("refused")) {
            let several = [
                "several learning rates",
                "the rates of alternatives differ",
                "`setup`",
            ];
            let words = [&several[..], &[&places[0], &places[1]]].concat();
            is_kind(&error, ErrorKind::Argument, &words);
        }
        assert_eq!(rule.field("eta"), None);
    }
    // A decay is in proportion to one rate.
    let switch = |first, second| Switch::new(Descent::new(first), Descent::new(second));
    let error = setup(DecoupledDecay::new(0.5, switch(0.5, 0.25)), &model).expect_err("two rates");
    let decay = "a decay has no single rate to be proportional to";
    says(
        &error,
        &["Switch(Descent, Descent)", "0.eta = 0.5, 1.eta = 0.25", decay],
    );
    let expected = run(
        OptimiserChain::new((DecoupledDecay::new(0.5, Descent::new(0.25)),)),
        |_| (),
    );
    assert_eq!(
        run(DecoupledDecay::new(0.5, switch(0.25, 0.25)), |_| ())[..2],
        expected[..2]
    );
}

/// `adjust` before `setup` is `adjust` behind it.
#[test]
fn a_fallback_is_adjusted_before_setup_as_its_leaves_are_afterwards() {
    let [matrix, vector] = [&[3, 2][..], &[3]].map(|shape| random(1, shape, DType::F32, &Device::Cpu));
    let model = model(&[matrix, vector]);
    let second = OptimiserChain::new((RMSProp::new(0.5), Descent::new(0.003)));
    let fallback = Fallback::new(Muon::new(0.02), second);
    let mut rule = DecoupledDecay::new(0.1, OptimiserChain::new((ClipGlobalNorm::new(1.0), fallback)));
    let told = |state: &StateTree| {
        let optimisers = state.leaves().map(|leaf| leaf.optimiser());
        optimisers
            .map(|optimiser| (optimiser.places(), optimiser.fields()))
            .collect::<Vec<_>>()
    };
    for (name, value, is_there) in [
        ("eta", 0.25, true),
        ("rho", 0.5, true),
        ("delta", 1.0, false),
        ("1.eta", 0.125, true),
        ("omega", 2.0, true),
    ] {
        let mut before = rule.clone();
        let mut state = setup(before.clone(), &model).expect("a state");
        let outcomes = [
            state.all().adjust_field(name, value),
            before.adjust_field(name, value),
        ];
        assert_eq!(outcomes.map(|outcome| outcome.is_ok()), [is_there; 2], "{name}");
        assert_eq!(
            told(&setup(before, &model).expect("a state")),
            told(&state),
            "{name}"
        );
    }
    let name =
        "DecoupledDecay(OptimiserChain(ClipGlobalNorm, Fallback(Muon, OptimiserChain(RMSProp, Descent))))";
    assert_eq!(rule.name(), name);
    let rates = ["eta", "1.0.eta", "1.1.eta", "1.1.1.eta"].map(|name| rule.field(name));
    assert_eq!(rates, [None, real(0.02), real(0.0015), real(0.003)]);
    rule.adjust_field("1.1.eta", 0.001).expect("the second rule's");
    let state = setup(rule, &model).expect("a state");
    let rates: Vec<_> = state.leaves().map(|leaf| leaf.learning_rate()).collect();
    assert_eq!(rates, [Some(0.02), Some(0.001)]);
}
