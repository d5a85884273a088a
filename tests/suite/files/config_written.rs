//! Optimisers that were built in code, as configurations: what is built again is the same.
//!
//! `RANDOM_SEED` says which is the first random case. A failure names its seed.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor, Var};
use optimisers::config::{OptimiserConfig, Registry};
use optimisers::{
    Adam, AdamW, Adjust, Cautious, ClipGrad, DecoupledDecay, Descent, Describe, Describer, Elementwise,
    ErrorKind, Fallback, FieldValue, Flow, Gradient, Hyperball, Kahan, Leaf, Lion, MixedPrecision, Muon,
    NAdam, Offload, Optimiser, OptimiserChain, Parameter, Q8, Rule, Setup, Sizes, SlotFormat, SplitMaster,
    State, StateTree, StochasticRounding, StoreAs, Update, range, rules, setup, setup_with,
};

use serde_json::{Value, json};

use crate::files::config::{copies, read};
use crate::whole::random_models::Dice;
use support::common::{
    Grads, Snapshot, Vars, assert_same, for_any_shape, grads, is_kind, model, random, snapshot, var,
};

/// Another value of the type, near this one.
pub fn near(value: FieldValue, dice: &mut Dice) -> FieldValue {
    let mut real = |value: f64| match value {
        0.0 => dice.of(&[0.0, 0.375, 1e-30]),
        value if value.is_infinite() => dice.of(&[value, value.signum() * 3.0]),
        value => value * dice.of(&[1.0, 0.875, 0.1, 1.0 / 3.0]),
    };
    match value {
        FieldValue::Real(a) => real(a).into(),
        FieldValue::Pair(a, b) => (real(a), real(b)).into(),
        FieldValue::Triple(a, b, c) => (real(a), real(b), real(c)).into(),
        FieldValue::Count(_) => (1 + dice.below(9) as u64).into(),
        FieldValue::Flag(_) => dice.one_in(2).into(),
        FieldValue::Choice(choice) => {
            FieldValue::Choice(choice.named(dice.of(choice.names())).expect("a name"))
        }
        FieldValue::Sizes(_) => dice
            .of(&[
                Sizes::default(),
                Sizes::from([4, 3]),
                Sizes::from([1, 2, 3, 4, 5, 6]),
            ])
            .into(),
        other => panic!("{other:?} is a type that this test does not know"),
    }
}

/// The rule with other values for some of its fields, all in range.
fn with_other_fields<R: Rule + Clone>(mut rule: R, dice: &mut Dice) -> R {
    for (place, (_, value)) in rule.places().into_iter().zip(rule.fields()) {
        if dice.one_in(2) {
            // What does not fit the other fields is left as it is.
            let _ = rule.adjust_field(&place, near(value, dice));
        }
    }
    rule
}

fn cautious<R: Elementwise + Default>(dice: &mut Dice) -> Box<dyn Rule> {
    let rule = Cautious::new(R::default());
    let rule = if dice.one_in(2) { rule.unscaled() } else { rule };
    Box::new(with_other_fields(rule, dice))
}

fn format(dice: &mut Dice) -> SlotFormat {
    dice.of(&[Q8, DType::BF16.into(), DType::F32.into(), DType::F64.into()])
}

/// A rule, and what is around it, up to so deep.
fn rule(depth: usize, dice: &mut Dice) -> Box<dyn Rule> {
    let catalogue = rules::catalogue();
    let single = |dice: &mut Dice| {
        let listed = catalogue[dice.below(catalogue.len())].rule.clone();
        for_any_shape(with_other_fields(listed, dice))
    };
    let inside = |dice: &mut Dice| {
        if depth == 0 {
            single(dice)
        } else {
            rule(depth - 1, dice)
        }
    };
    match dice.below(15) {
        0 => {
            let members = (0..dice.below(4)).map(|_| inside(dice)).collect::<Vec<_>>();
            Box::new(OptimiserChain::new(members))
        }
        1 => Box::new(StoreAs::all(format(dice), inside(dice))),
        2 => {
            let named = ["m", "v", "acc"].map(|name| (name, format(dice)));
            let count = dice.below(4);
            Box::new(StoreAs::new(named.into_iter().take(count), inside(dice)))
        }
        3 => {
            let patterns = dice.of(&[vec![], vec!["1"], vec!["0", "?"]]);
            Box::new(Fallback::new(inside(dice), inside(dice)).except(patterns))
        }
        4 | 5 => {
            let decay = DecoupledDecay::new(dice.of(&[0.0, 0.1, 1.0 / 3.0]), inside(dice))
                .corrected(dice.of(&[0.0, 0.25]));
            let decay = if dice.one_in(2) { decay.cautious() } else { decay };
            // A rule without learning rate has no decay in proportion to it.
            if decay.check().is_ok() {
                Box::new(decay)
            } else {
                inside(dice)
            }
        }
        6 => match dice.below(4) {
            0 => cautious::<Adam>(dice),
            1 => cautious::<AdamW>(dice),
            2 => cautious::<NAdam>(dice),
            _ => cautious::<Lion>(dice),
        },
        // `None` alone is refused, because the gradient itself would be the step.
        7 => Box::new(OptimiserChain::new(vec![
            Box::new(None::<Box<dyn Rule>>) as Box<dyn Rule>
        ])),
        8 => {
            let ball = Hyperball::new(inside(dice));
            // A rule without learning rate has no length of a step.
            if ball.check().is_ok() {
                Box::new(ball)
            } else {
                inside(dice)
            }
        }
        _ => single(dice),
    }
}

pub fn optimiser(dice: &mut Dice) -> Optimiser {
    let rule = rule(3, dice);
    let stored: Optimiser = match dice.below(9) {
        0 | 1 => Optimiser::new(MixedPrecision::new(dice.of(&[DType::F32, DType::F64]), rule)),
        2 => Optimiser::new(SplitMaster::new(rule)),
        3 => Optimiser::new(SplitMaster::of_24_bits(rule)),
        4 => Optimiser::new(Kahan::new(rule)),
        5 => Optimiser::new(StochasticRounding::new(dice.number(), rule)),
        _ => Optimiser::new(rule),
    };
    if dice.one_in(5) {
        Optimiser::new(Offload::new(stored))
    } else {
        stored
    }
}

pub fn seeds(count: u64) -> impl Iterator<Item = u64> {
    let first: u64 = std::env::var("RANDOM_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(1);
    (0..count).map(move |i| first.wrapping_add(i))
}

/// What is for tests alone has no name in a configuration.
#[test]
fn an_offload_of_parameters_on_the_cpu_is_refused() {
    let optimiser = Offload::new(MixedPrecision::new(DType::F32, Adam::new(0.1))).everywhere();
    let made = Optimiser::new(optimiser.clone());
    for written in [OptimiserConfig::of(&optimiser), OptimiserConfig::of(&made)] {
        let error = written.expect_err("no name for it");
        is_kind(&error, ErrorKind::Unsupported, &["Offload::everywhere"]);
    }
    let state = setup(optimiser, &model(&[random(1, &[2], DType::BF16, &Device::Cpu)])).expect("a state");
    is_kind(
        &OptimiserConfig::of_state(&state).expect_err("no name for it"),
        ErrorKind::Unsupported,
        &["Offload::everywhere"],
    );
}

/// The optimiser that is built of what is written, by way of JSON and TOML.
fn again(optimiser: &Optimiser, seed: u64) -> Optimiser {
    let config = OptimiserConfig::of(optimiser).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    for copy in copies(&config) {
        assert_eq!(copy, config, "seed {seed}");
    }
    let built = config
        .optimiser()
        .unwrap_or_else(|error| panic!("seed {seed}: {error} in {config:?}"));
    assert_eq!(
        OptimiserConfig::of(&built).expect("a configuration"),
        config,
        "seed {seed}"
    );
    built
}

#[test]
fn a_thousand_random_optimisers_are_built_again() {
    for seed in seeds(1000) {
        let optimiser = optimiser(&mut Dice(seed));
        optimiser
            .check()
            .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert_eq!(
            format!("{:?}", again(&optimiser, seed)),
            format!("{optimiser:?}"),
            "seed {seed}"
        );
    }
}

/// The snapshots after ten updates, or why there are none.
fn ten_steps(
    optimiser: Optimiser,
    parameters: &[Tensor],
    gradients: &[Grads],
) -> Result<Vec<Snapshot>, String> {
    let model = model(parameters);
    let mut state = setup(optimiser, &model).map_err(|error| error.to_string())?;
    let mut step = |gradients| {
        Update::new(&mut state)
            .apply(&model, gradients)
            .map_err(|error| error.to_string())?;
        Ok(snapshot(&model, &state))
    };
    gradients.iter().map(&mut step).collect()
}

#[test]
fn what_is_built_again_has_the_same_bits_after_ten_steps() {
    let tensors = |seed| {
        [
            random(seed, &[7, 5], DType::BF16, &Device::Cpu),
            random(seed + 1, &[3], DType::BF16, &Device::Cpu),
        ]
    };
    let gradients: Vec<Grads> = (10..20).map(|seed| grads(tensors(seed).map(Some))).collect();
    let mut steps = 0;
    for seed in seeds(1000) {
        let optimiser = optimiser(&mut Dice(seed));
        let rebuilt = ten_steps(again(&optimiser, seed), &tensors(1), &gradients);
        match (ten_steps(optimiser, &tensors(1), &gradients), rebuilt) {
            (Ok(expected), Ok(got)) => {
                assert_same(&got, &expected, format!("seed {seed}"));
                steps += expected.len();
            }
            (expected, got) => assert_eq!(got, expected, "seed {seed}"),
        }
    }
    assert!(steps > 4000, "{steps} steps");
}

#[test]
fn what_cannot_be_read_again_is_not_written() {
    let nested = |depth: usize| {
        let mut rule: Box<dyn Rule> = Box::new(Descent::new(0.5));
        for _ in 0..depth {
            rule = Box::new(OptimiserChain::new(vec![rule]));
        }
        OptimiserConfig::of(&rule)
    };
    // The table of the rule is two deep.
    assert_eq!(copies(&nested(59).expect("a configuration")).len(), 2);
    nested(62).expect("a configuration");
    let message = nested(63).expect_err("refused").to_string();
    assert_eq!(message, "configuration: nested more than 64 deep");
}

/// A state by path, and what its configuration makes of the same model.
fn assert_same_choices(state: &StateTree, model: &Vars, seed: u64) -> OptimiserConfig {
    let config = OptimiserConfig::of_state(state).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    for copy in copies(&config) {
        assert_eq!(copy, config, "seed {seed}");
    }
    let again = config
        .setup(model)
        .unwrap_or_else(|error| panic!("seed {seed}: {error} in {config:?}"));
    let choices = |state: &StateTree| -> Vec<(String, OptimiserConfig)> {
        let written = |leaf: &Leaf| OptimiserConfig::of(leaf.optimiser()).expect("a configuration");
        state
            .leaves()
            .map(|leaf| (format!("{:?}", leaf.paths().collect::<Vec<_>>()), written(leaf)))
            .collect()
    };
    assert_eq!(choices(&again), choices(state), "seed {seed}: {config:?}");
    config
}

/// Paths of up to four names out of a few, also of names that patterns mean others by, with ties.
#[test]
fn random_choices_are_made_again() {
    let names = ["a", "b", "bias", "weight", "0", "1", "x*", "?", "*"];
    let (mut by_path, mut refused) = (0, 0);
    for seed in seeds(300) {
        let dice = &mut Dice(seed);
        let names = if dice.one_in(2) { &names[..] } else { &names[..6] };
        let tied: Vec<Var> = (0..2)
            .map(|seed| var(&random(seed, &[2], DType::F32, &Device::Cpu)))
            .collect();
        let mut vars = Vars::new();
        for _ in 0..1 + dice.below(12) {
            let path: Vec<&str> = (0..1 + dice.below(4)).map(|_| dice.of(names)).collect();
            let variable = if dice.one_in(6) {
                dice.of(&tied)
            } else {
                var(&random(1, &[2], DType::F32, &Device::Cpu))
            };
            vars.insert(path.join("."), variable);
        }
        // One optimiser for all paths of a variable.
        let choices: Vec<Option<f64>> = (0..3)
            .map(|i| (!dice.one_in(4)).then_some(0.5 + f64::from(i)))
            .collect();
        let by = dice.below(4);
        let mut chosen: HashMap<_, Option<f64>> = HashMap::new();
        for (path, variable) in &vars {
            let key = match by {
                0 => path.rsplit('.').next().map(str::len),
                1 => path.split('.').next().map(str::len),
                2 => Some(path.matches('.').count()),
                _ => Some(dice.below(3)),
            };
            chosen
                .entry(variable.id())
                .or_insert(choices[key.unwrap_or_default() % 3]);
        }
        let eta = |path: &str| chosen[&vars[path].id()];
        let Ok(state) = setup_with(&vars, |path, _| eta(path).map(Descent::new)) else {
            continue;
        };
        match OptimiserConfig::of_state(&state) {
            Ok(_) => {
                assert_same_choices(&state, &vars, seed);
                by_path += 1;
            }
            Err(error)
                if error
                    .to_string()
                    .contains("no pattern separates this parameter from one with another optimiser") =>
            {
                let [path, other] = [error.path(), error.got()].map(|path| path.expect("a path"));
                assert!(
                    path.contains(['*', '?']) && vars.contains_key(other),
                    "seed {seed}: {error}"
                );
                assert_eq!(error.kind(), ErrorKind::Argument);
                refused += 1;
            }
            Err(error) => panic!("seed {seed}: {error}"),
        }
    }
    assert!(by_path > 200 && refused > 1, "{by_path}, {refused}");
}

fn descents(paths: &[&str], eta: impl Fn(&str) -> Option<f64>) -> (StateTree, Vars) {
    let model: Vars = paths
        .iter()
        .map(|path| (path.to_string(), var(&random(1, &[2], DType::F32, &Device::Cpu))))
        .collect();
    (
        setup_with(&model, |path, _| eta(path).map(Descent::new)).expect("a state"),
        model,
    )
}

#[test]
fn each_parameter_has_its_path_and_most_have_one_pattern() {
    let choices = |config: &OptimiserConfig| -> Vec<(String, Value)> {
        let Value::Array(choices) = serde_json::to_value(config).expect("a value")["ByPath"].take() else {
            panic!("{config:?}")
        };
        let choice = |choice: Value| {
            (
                choice["pattern"].as_str().expect("a pattern").to_string(),
                choice["optimiser"].clone(),
            )
        };
        choices.into_iter().map(choice).collect()
    };
    let rate = |eta: f64| json!({"Descent": {"eta": eta}});
    let case = |paths: &[&str], eta: fn(&str) -> Option<f64>, expected: &[(&str, Value)]| {
        let (state, model) = descents(paths, eta);
        let expected: Vec<(String, Value)> = expected
            .iter()
            .map(|(pattern, value)| (pattern.to_string(), value.clone()))
            .collect();
        assert_eq!(choices(&assert_same_choices(&state, &model, 0)), expected);
    };
    let paths = [
        "a.0.bias",
        "a.0.weight",
        "a.1.bias",
        "a.1.weight",
        "b.0.bias",
        "b.0.weight",
        "b.weight",
    ];
    // What most have is for all others.
    case(
        &paths,
        |path| Some(if path.ends_with("bias") { 0.5 } else { 1.0 }),
        &[
            ("a.0.bias", rate(0.5)),
            ("a.1.bias", rate(0.5)),
            ("b.0.bias", rate(0.5)),
            ("*", rate(1.0)),
        ],
    );
    // What was left out stays so.
    case(
        &paths,
        |path| path.starts_with("a.").then_some(0.5),
        &[
            ("b.0.bias", json!("LeaveOut")),
            ("b.0.weight", json!("LeaveOut")),
            ("b.weight", json!("LeaveOut")),
            ("*", rate(0.5)),
        ],
    );
    // Three optimisers, in the order in which they come first.
    case(
        &paths,
        |path| {
            Some(if path == "b.0.bias" {
                2.0
            } else if path.starts_with("b") {
                0.5
            } else {
                1.0
            })
        },
        &[
            ("b.0.bias", rate(2.0)),
            ("b.0.weight", rate(0.5)),
            ("b.weight", rate(0.5)),
            ("*", rate(1.0)),
        ],
    );
    // No optimiser that most have.
    case(
        &["a", "b"],
        |path| Some(if path == "a" { 0.5 } else { 1.0 }),
        &[("a", rate(0.5)), ("b", rate(1.0))],
    );
    // A path with a star that matches nothing else.
    case(
        &["a*", "b", "c"],
        |path| Some(if path == "a*" { 0.5 } else { 1.0 }),
        &[("a*", rate(0.5)), ("*", rate(1.0))],
    );
    // One that matches another with the same optimiser, which then needs no pattern.
    case(
        &["a*", "ab", "b", "c", "d"],
        |path| Some(if path.starts_with('a') { 0.5 } else { 1.0 }),
        &[("a*", rate(0.5)), ("*", rate(1.0))],
    );

    let (state, _) = descents(&paths, |_| Some(0.5));
    assert_eq!(
        serde_json::to_value(OptimiserConfig::of_state(&state).expect("one for all")).expect("a value"),
        rate(0.5)
    );
    let (state, _) = descents(&["a*", "ab", "c", "d"], |path| {
        Some(if path == "a*" { 0.5 } else { 1.0 })
    });
    let message = OptimiserConfig::of_state(&state)
        .expect_err("refused")
        .to_string();
    let words = "parameter \"a*\": its path contains * or ?, which match any characters in a pattern, so no \
                 pattern separates this parameter from one with another optimiser: ab;";
    assert!(message.contains(words), "{message}");
}

/// What the state has now is written: rates that were adjusted, and the rule that a fallback has chosen.
#[test]
fn a_state_is_written_as_it_is() {
    let model: Vars = [("head", &[4, 3][..]), ("norm", &[3]), ("up", &[3, 4])]
        .map(|(path, shape)| (path.to_string(), var(&random(1, shape, DType::F32, &Device::Cpu))))
        .into();
    let rule = Muon::new(0.02).with_fallback(AdamW::new(3e-4)).except(["head"]);
    let mut state = Setup::default()
        .build(MixedPrecision::new(DType::F64, rule), &model)
        .expect("a state");
    state.at("norm").expect("a leaf").adjust(0.25).expect("a rate");
    let config = assert_same_choices(&state, &model, 0);
    let names: Vec<String> = config
        .setup(&model)
        .expect("a state")
        .leaves()
        .map(|leaf| leaf.optimiser().name())
        .collect();
    assert_eq!(
        names,
        ["AdamW", "AdamW", "Muon"].map(|rule| format!("MixedPrecision(F64, {rule})"))
    );
    assert_eq!(
        config
            .setup(&model)
            .expect("a state")
            .leaf("norm")
            .and_then(|leaf| leaf.learning_rate()),
        Some(0.25)
    );
}

/// Two thousand parameters in little time.
#[test]
fn a_large_state_is_written() {
    let x = random(1, &[2], DType::F32, &Device::Cpu);
    let model: Vars = (0..2000)
        .map(|i| {
            (
                format!("layer.{}.{}", i / 4, ["bias", "q", "k", "v"][i % 4]),
                var(&x),
            )
        })
        .collect();
    let rate = |path: &str| {
        if path.ends_with("bias") {
            0.5
        } else if path.contains('7') {
            0.25
        } else {
            1.0
        }
    };
    let state = setup_with(&model, |path, _| Some(Descent::new(rate(path)))).expect("a state");
    let start = std::time::Instant::now();
    assert_same_choices(&state, &model, 0);
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

/// A wrapper that the crate does not have, with a setting.
#[derive(Clone, Debug)]
struct Louder {
    factor: f64,
    is_odd: bool,
    inner: Box<dyn Rule>,
}

impl Describe for Louder {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("Louder");
        rule.setting("odd", self.is_odd);
        rule.field("factor", &mut self.factor, 1.0, range::positive);
        rule.holds(&mut self.inner);
    }
}

impl Rule for Louder {
    fn apply<'a>(
        &'a self,
        state: &'a mut State,
        x: Parameter<'a>,
        dx: Gradient<'a>,
    ) -> optimisers::Result<Flow<'a>> {
        self.inner
            .apply(state.parts().held.inner()?, x, dx.scale(self.factor))
    }
}

/// A rule that holds two and runs the second.
#[derive(Clone, Debug)]
struct Second {
    share: f64,
    rules: [Box<dyn Rule>; 2],
}

impl Describe for Second {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("Second");
        rule.field("share", &mut self.share, 0.5, range::decay);
        self.rules.iter_mut().for_each(|member| rule.member(member));
    }
}

impl Rule for Second {
    fn apply<'a>(
        &'a self,
        state: &'a mut State,
        x: Parameter<'a>,
        dx: Gradient<'a>,
    ) -> optimisers::Result<Flow<'a>> {
        let [_, second] = state.parts().held.members()?;
        self.rules[1].apply(second, x, dx)
    }
}

#[test]
fn wrappers_of_ones_own_are_one_line_each() {
    let registry = Registry::default()
        .with_wrapper(|inner| Louder {
            factor: 2.0,
            is_odd: false,
            inner,
        })
        .with_wrapper(|inner| Louder {
            factor: 3.0,
            is_odd: true,
            inner,
        })
        .with_pair(|first, second| Second {
            share: 0.5,
            rules: [first, second],
        })
        .with(Cautious::new(Descent::new(0.5)));
    let built = |value: Value| {
        registry
            .optimiser(&read(value.clone()))
            .unwrap_or_else(|error| panic!("{value}: {error}"))
    };
    let (adam, lion) = (|| Box::new(Adam::default()), || Box::new(Lion::new(0.5)));
    let clipped = OptimiserChain::new(vec![Box::new(ClipGrad::default()) as Box<dyn Rule>, lion()]);
    let cases: [(Value, Optimiser); 6] = [
        (
            json!({"Louder": {"inner": "Adam"}}),
            Optimiser::new(Louder {
                factor: 2.0,
                is_odd: false,
                inner: adam(),
            }),
        ),
        (
            json!({"Louder": {"inner": "Adam", "odd": true}}),
            Optimiser::new(Louder {
                factor: 3.0,
                is_odd: true,
                inner: adam(),
            }),
        ),
        (
            json!({"Louder": {"factor": 7, "odd": false, "inner": ["ClipGrad", {"Lion": {"eta": 0.5}}]}}),
            Optimiser::new(Louder {
                factor: 7.0,
                is_odd: false,
                inner: Box::new(clipped),
            }),
        ),
        (
            json!({"Kahan": {"inner": {"Second": {"members": ["Adam", {"Lion": {"eta": 0.5}}]}}}}),
            Optimiser::new(Kahan::new(Box::new(Second {
                share: 0.5,
                rules: [adam(), lion()],
            }) as Box<dyn Rule>)),
        ),
        (
            json!({"Second": {"share": 0.25, "members": [{"Louder": {"inner": "Adam"}}, "Adam"]}}),
            Optimiser::new(Second {
                share: 0.25,
                rules: [
                    Box::new(Louder {
                        factor: 2.0,
                        is_odd: false,
                        inner: adam(),
                    }),
                    adam(),
                ],
            }),
        ),
        (
            json!({"Cautious": {"inner": "Descent"}}),
            Optimiser::new(Cautious::new(Descent::new(0.5))),
        ),
    ];
    for (text, expected) in cases {
        let got = built(text.clone());
        assert_eq!(format!("{got:?}"), format!("{expected:?}"), "{text}");
        let config = OptimiserConfig::of(&expected).expect("a configuration");
        assert_eq!(
            format!("{:?}", registry.optimiser(&config).expect("its own text")),
            format!("{expected:?}"),
            "{text}"
        );
    }
    let refused = [
        (
            json!({"Louder": {"factor": -1, "inner": "Adam"}}),
            "at Louder.factor: Louder: factor is -1, expected a number above 0",
        ),
        (
            json!({"Louder": {"odd": 1, "inner": "Adam"}}),
            "at Louder.odd: got 1, expected false or true",
        ),
        (
            json!({"Louder": "Adam"}),
            "at Louder: got \"Adam\", expected a table such as",
        ),
        (
            json!({"Louder": {}}),
            "at Louder: got {}, expected a table such as {\"factor\":2.0,\"inner\":\"Adam\"}",
        ),
        (
            json!({"Louder": {"facotr": 1, "inner": "Adam"}}),
            "no key \"facotr\" (did you mean factor?), expected one of: odd, factor, inner",
        ),
        (
            json!({"Second": {"members": ["Adam"]}}),
            "at Second: got {\"members\":[\"Adam\"]}, expected a table such as \
             {\"share\":0.5,\"members\":[\"Adam\",\"Adam\"]}",
        ),
        (
            json!({"Second": {"inner": "Adam"}}),
            "at Second: there is no key \"inner\", expected one of: share, members",
        ),
        (
            json!({"Cautious": {"inner": "Descent", "unscaled": true}}),
            "at Cautious.inner: got \"Descent\", expected Adam, AdamW, NAdam, Lion (or a rule",
        ),
    ];
    for (text, words) in refused {
        let error = match serde_json::from_value::<OptimiserConfig>(text.clone()) {
            Ok(config) => registry.optimiser(&config).expect_err("refused").to_string(),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(words), "{error} for {text}");
    }
    let foreign = OptimiserConfig::of(&Louder {
        factor: 1.0,
        is_odd: false,
        inner: adam(),
    })
    .expect("a configuration");
    let message = foreign.optimiser().expect_err("refused").to_string();
    assert!(message.contains("there is no rule \"Louder\""), "{message}");
    // What a copy holds by number is its own.
    let chain = Registry::default().with(OptimiserChain::new((ClipGrad::new(3.0), Adam::default())));
    assert_eq!(
        chain
            .optimiser(&read(json!("OptimiserChain")))
            .expect("a chain")
            .name(),
        "OptimiserChain(ClipGrad, Adam)"
    );
    let message = chain
        .optimiser(&read(json!({"OptimiserChain": {"members": []}})))
        .expect_err("refused")
        .to_string();
    assert!(message.contains("there is no key \"members\""), "{message}");
    // Each takes the place of one like it.
    let names = |registry: &Registry| registry.names().filter(|name| *name == "Louder").count();
    assert_eq!(names(&registry), 1);
    let registry = registry.with_wrapper(|inner| Louder {
        factor: 5.0,
        is_odd: false,
        inner,
    });
    let factor = |value: Value| {
        registry
            .optimiser(&read(value))
            .expect("an optimiser")
            .field("factor")
    };
    assert_eq!(
        factor(json!({"Louder": {"inner": "Adam"}})),
        Some(FieldValue::Real(5.0))
    );
    assert_eq!(
        factor(json!({"Louder": {"inner": "Adam", "odd": true}})),
        Some(FieldValue::Real(3.0))
    );
}
