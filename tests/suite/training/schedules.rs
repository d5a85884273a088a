//! Schedules of a state: what acts, what stays the leaf's own, and what becomes of both.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;
use optimisers::config::OptimiserConfig;
use optimisers::{
    AccumGrad, Adam, AdamW, CandleOptimizer, Checkpoint, ClipGlobalNorm, Communicator, Descent, ErrorKind,
    FieldValue, Momentum, Muon, OptimiserChain, Outcome, Parameter, Q8, RMSProp, ReduceOnPlateau, Rprop,
    Rule, Schedule, Setup, StateTree, StoreAs, Update, Warning, WeightDecay, setup, setup_with, update,
};

use crate::whole::random_models::Dice;
use support::common::{Vars, grads, is_kind, model, random, says, values};
use support::crafted_checkpoints::{Pieces, file_of, open};
use support::threads::on;

/// A vector under 0 and a matrix under 1.
fn variables() -> Vars {
    model(&[
        random(1, &[3], DType::F32, &Device::Cpu),
        random(2, &[3, 3], DType::F32, &Device::Cpu),
    ])
}

/// What Muon's documentation recommends: matrices with Muon, the rest with AdamW, each with its rate.
fn mixed(model: &Vars) -> StateTree {
    let choose = |_: &str, x: Parameter<'_>| -> Option<Box<dyn Rule>> {
        Some(if x.rank() == 2 {
            Box::new(Muon::new(0.02))
        } else {
            Box::new(AdamW::new(3e-4))
        })
    };
    setup_with(model, choose).expect("a state")
}

fn rates(state: &StateTree) -> Vec<f64> {
    state.leaves().filter_map(|leaf| leaf.learning_rate()).collect()
}

fn own(state: &StateTree, field: &str) -> Vec<Option<FieldValue>> {
    state.leaves().map(|leaf| leaf.field(field)).collect()
}

fn acting(state: &StateTree, field: &str) -> Vec<Option<FieldValue>> {
    state.leaves().map(|leaf| leaf.acting().field(field)).collect()
}

/// A step with gradients of ones.
fn step(model: &Vars, state: &mut StateTree) -> Outcome {
    let gradients = grads(model.values().map(|x| x.ones_like().ok()));
    update(state, model, &gradients).expect("an update")
}

fn restored(file: &[u8], state: &mut StateTree) {
    open(file)
        .and_then(|file| file.restore(state))
        .expect("a restore");
}

/// What a state with schedules is: rates of the leaves' own, a count of steps, and who follows what.
#[derive(Clone, Debug, Default)]
struct Expected {
    steps: u64,
    own: BTreeMap<String, f64>,
    /// With whether it is that of all.
    schedules: BTreeMap<String, (Schedule, bool)>,
    for_all: Option<Schedule>,
}

impl Expected {
    fn rate(&self, path: &str) -> f64 {
        let own = self.own[path];
        self.schedules.get(path).map_or(own, |(schedule, _)| {
            let value = schedule.at(self.steps);
            if is_relative(schedule) { own * value } else { value }
        })
    }

    fn is_absolute(&self, path: &str) -> bool {
        self.schedules
            .get(path)
            .is_some_and(|(schedule, _)| !is_relative(schedule))
    }
}

fn is_relative(schedule: &Schedule) -> bool {
    *schedule == schedule.clone().relative()
}

/// Steps, skips, edits, and ways through a file, in any order.
#[test]
fn a_rate_is_a_function_of_the_own_rate_and_the_count() {
    for seed in 0..300 {
        let dice = &mut Dice(seed);
        let mut model = vec![
            random(1, &[2], DType::F32, &Device::Cpu),
            random(2, &[2], DType::F32, &Device::Cpu),
        ]
        .into_iter()
        .map(|x| Var::from_tensor(&x).expect("a variable"))
        .collect::<Vec<_>>();
        let mut state = setup(Adam::new(0.5), &model).expect("a state");
        let mut expected = Expected {
            own: BTreeMap::from([("0".into(), 0.5), ("1".into(), 0.5)]),
            ..Default::default()
        };
        for operation in 0..40 {
            let path = dice.below(model.len()).to_string();
            let rate = dice.of(&[0.5, 0.25, 1.0]);
            let curve = dice.of(&[
                Schedule::linear(0.75, 0.25, 5),
                Schedule::cosine(1.0, 0.125, 7),
                Schedule::warmup_stable_decay(0.5, 0.1, 2, 3, 4),
            ]);
            let curve = if dice.one_in(2) { curve.relative() } else { curve };
            match dice.below(12) {
                0..=3 => {
                    let gradients = grads(model.iter().map(|x| x.ones_like().ok()));
                    let outcome = update(&mut state, &model, &gradients).expect("an update");
                    let moves = state.leaves().any(|leaf| !leaf.is_frozen());
                    assert_eq!(outcome.has_stepped(), moves);
                    let first = state
                        .leaves()
                        .find(|leaf| !leaf.is_frozen())
                        .map(|leaf| expected.rate(leaf.path()));
                    assert_eq!(
                        outcome.learning_rate, first,
                        "seed {seed}, {operation}: the rate of the step"
                    );
                    expected.steps += u64::from(moves);
                }
                4 => {
                    let gradients = grads(model.iter().map(|x| x.affine(f64::INFINITY, 0.0).ok()));
                    let _ = Update::new(&mut state)
                        .finite_only()
                        .apply(&model, &gradients)
                        .expect("a skip");
                }
                5 => {
                    let adjusted = state.at(&path).and_then(|mut leaf| leaf.adjust(rate));
                    let is_refused = expected.is_absolute(&path) && expected.own[&path] != rate;
                    assert_eq!(adjusted.is_err(), is_refused);
                    if adjusted.is_ok() {
                        expected.own.insert(path, rate);
                    }
                }
                6 => {
                    let leaf = state.at(&path).expect("a leaf");
                    if dice.one_in(2) {
                        leaf.freeze()
                    } else {
                        leaf.thaw()
                    }
                }
                7 => {
                    let replaced = state
                        .at(&path)
                        .and_then(|leaf| leaf.replace(Descent::new(rate), &model));
                    let is_refused = expected.is_absolute(&path) && expected.own[&path] != rate;
                    assert_eq!(replaced.is_err(), is_refused, "seed {seed}, {operation}");
                    // The file below needs one rule for all.
                    let rate = if is_refused { expected.own[&path] } else { rate };
                    state
                        .at(&path)
                        .and_then(|leaf| leaf.replace(Adam::new(rate), &model))
                        .expect("the old rule");
                    expected.own.insert(path, rate);
                }
                8 if model.len() < 4 => {
                    let new = model.len().to_string();
                    model.push(Var::ones(2, DType::F32, &Device::Cpu).expect("a variable"));
                    let mut of_all = expected.schedules.iter().filter(|(_, (_, is_of_all))| *is_of_all);
                    let is_refused = expected.for_all.as_ref().is_some_and(|all| !is_relative(all))
                        && of_all.any(|(path, _)| expected.own[path] != rate);
                    assert_eq!(
                        state.add(Adam::new(rate), &model).is_err(),
                        is_refused,
                        "seed {seed}, {operation}"
                    );
                    if is_refused {
                        model.pop();
                    } else {
                        expected.own.insert(new.clone(), rate);
                        let given = expected.for_all.clone().map(|all| (new, (all, true)));
                        expected.schedules.extend(given);
                    }
                }
                9 => {
                    let file = file_of(Checkpoint::new(&state));
                    let mut other = setup(Adam::new(7.0), &model).expect("a state");
                    restored(&file, &mut other);
                    state = other;
                }
                10 => {
                    state
                        .at(&path)
                        .and_then(|mut leaf| leaf.schedule(curve.clone()))
                        .expect("a schedule");
                    expected.schedules.insert(path, (curve, false));
                }
                11 => {
                    let mut all = expected.own.values();
                    let first = all.next().expect("a leaf");
                    let is_refused = !is_relative(&curve) && all.any(|own| own != first);
                    assert_eq!(
                        state.schedule(curve.clone()).is_err(),
                        is_refused,
                        "seed {seed}, {operation}"
                    );
                    if !is_refused {
                        let paths = expected
                            .own
                            .keys()
                            .map(|path| (path.clone(), (curve.clone(), true)));
                        expected.schedules = paths.collect();
                        expected.for_all = Some(curve);
                    }
                }
                _ => {}
            }
            assert_eq!(state.steps(), expected.steps, "seed {seed}, {operation}");
            for leaf in state.leaves() {
                let found = (leaf.field("eta"), leaf.learning_rate());
                let rate = (
                    Some(expected.own[leaf.path()].into()),
                    Some(expected.rate(leaf.path())),
                );
                assert_eq!(
                    found,
                    rate,
                    "seed {seed}, {operation}, {:?}: {expected:?}",
                    leaf.path()
                );
            }
        }
    }
}

/// Warm-up and cosine over two groups. Whoever stops it and where, the files are those of one run, and the
/// program never says where it stands.
#[test]
fn a_run_that_is_stopped_and_resumed_is_one_run() {
    const STEPS: u64 = 200;
    let fresh = || {
        let model = variables();
        let mut state = mixed(&model);
        let schedule = Schedule::warmup_stable_then(1.0, 20, 0, Schedule::cosine(1.0, 0.1, STEPS - 20));
        state.schedule(schedule.relative()).expect("a schedule");
        (model, state)
    };
    let train = |model: &Vars, state: &mut StateTree, until: u64| {
        while state.steps() < until {
            let seed = 10 + state.steps();
            let gradients = model
                .values()
                .map(|x| Some(random(seed, x.dims(), DType::F32, &Device::Cpu)));
            let outcome = update(state, model, &grads(gradients)).expect("an update");
            assert_eq!(outcome.warnings, []);
        }
        file_of(Checkpoint::new(state).model(model))
    };
    let (model, mut state) = fresh();
    let whole = train(&model, &mut state, STEPS);
    let dice = &mut Dice(7);
    let mut stops: Vec<u64> = (0..10).map(|_| dice.below(STEPS as usize) as u64).collect();
    stops.sort_unstable();
    let mut file: Option<Vec<u8>> = None;
    for until in stops.into_iter().chain([STEPS]) {
        let (model, mut state) = fresh();
        if let Some(file) = &file {
            open(file)
                .and_then(|file| file.restore_with_model(&mut state, &model))
                .expect("a restore");
        }
        // What comes after the save is lost with the process.
        file = Some(train(&model, &mut state, until));
        train(&model, &mut state, until + 3);
    }
    assert!(file.as_ref() == Some(&whole), "other bytes");
}

/// T23: neither micro-batches nor skipped calls nor errors count.
#[test]
fn t23_a_schedule_advances_with_applied_steps() {
    let x = model(&[random(1, &[3], DType::F32, &Device::Cpu)]);
    let mut state = setup(OptimiserChain::new((AccumGrad::new(2), Descent::default())), &x).expect("a state");
    let schedule = Schedule::linear(1.0, 0.5, 4);
    state.schedule(schedule.clone()).expect("a schedule");
    let finite = grads([Some(random(2, &[3], DType::F32, &Device::Cpu))]);
    let infinite = grads([finite["0"].affine(f64::INFINITY, 0.0).ok()]);
    let calls = [
        (&finite, 0),
        (&infinite, 0),
        (&finite, 1),
        (&finite, 1),
        (&finite, 2),
    ];
    for (gradient, steps) in calls {
        Update::new(&mut state)
            .finite_only()
            .apply(&x, gradient)
            .expect("an update");
        assert_eq!((state.steps(), rates(&state)), (steps, vec![schedule.at(steps)]));
    }
    update(&mut state, &x, &grads([None])).expect_err("no gradient");
    assert_eq!((state.steps(), rates(&state)), (2, vec![schedule.at(2)]));
    state.set_steps(1).expect("a count");
    assert_eq!((state.steps(), rates(&state)), (1, vec![schedule.at(1)]));

    let x = model(&[random(1, &[3], DType::F32, &Device::Cpu)]);
    let mut state = setup(Descent::default(), &x).expect("a state");
    state.schedule(schedule.clone()).expect("a schedule");
    let begun = Update::new(&mut state).begin(&x).expect("a step");
    begun.push("0", finite["0"].clone()).expect("a push");
    let outcome = begun.finish().expect("a step");
    assert_eq!((outcome.learning_rate, state.steps()), (Some(1.0), 1));
    // One that is dropped does not count.
    Update::new(&mut state)
        .begin(&x)
        .and_then(|begun| begun.push("0", finite["0"].clone()))
        .expect("a push");
    assert_eq!((state.steps(), rates(&state)), (1, vec![schedule.at(1)]));
    // The functional form counts in the state that it returns.
    let parameters = x
        .iter()
        .map(|(path, x)| (path.clone(), x.as_detached_tensor()))
        .collect();
    let (next, ..) = Update::functional(&state)
        .apply(&parameters, &finite)
        .expect("a step");
    assert_eq!(
        (state.steps(), next.steps(), rates(&next)),
        (1, 2, vec![schedule.at(2)])
    );
}

#[test]
fn one_schedule_for_different_rates_is_refused_and_names_two_leaves() {
    let model = variables();
    let mut state = mixed(&model);
    let error = state
        .schedule(Schedule::cosine(0.02, 0.0, 100))
        .expect_err("refused");
    let flattened = "one schedule would make two different values equal: its eta, 0.02, and that of \"0\", \
                     0.0003";
    is_kind(
        &error,
        ErrorKind::Argument,
        &[flattened, "Schedule::relative", "state.at(path)", "adjust"],
    );
    assert_eq!(
        (error.path(), rates(&state)),
        (Some("1"), vec![3e-4, 0.02]),
        "nothing has changed: {error}"
    );

    state
        .schedule(Schedule::linear(0.5, 1.0, 2).relative())
        .expect("factors");
    for steps in 0..4 {
        let factor = [0.5, 0.75, 1.0, 1.0][steps as usize];
        assert_eq!(rates(&state), [3e-4 * factor, 0.02 * factor], "exactly");
        assert_eq!(own(&state, "eta"), [3e-4, 0.02].map(|rate| Some(rate.into())));
        step(&model, &mut state);
    }
    state.adjust(0.01).expect("one rate");
    state
        .schedule(Schedule::cosine(0.02, 0.0, 100))
        .expect("leaves of one rate");
    assert_eq!(rates(&state), [Schedule::cosine(0.02, 0.0, 100).at(4); 2]);
}

/// A later schedule takes the place of an earlier one for the same numbers, whatever they are called.
#[test]
fn schedules_drive_numbers_of_parts_and_members() {
    let chain = || {
        OptimiserChain::new((
            WeightDecay::new(0.1),
            AdamW {
                lambda: 0.5,
                ..AdamW::new(1e-3)
            },
        ))
    };
    let half = |field: &str| Schedule::constant(0.5).relative().field(field);
    let set = |field: &str, value| Schedule::constant(value).field(field);
    // Schedules in their order, each with its part, and the fields of two leaves that act then.
    let fields = ["0.lambda", "1.eta", "1.beta", "1.lambda"];
    type Given = Vec<(&'static str, Schedule)>;
    let cases: [(Given, [[FieldValue; 4]; 2]); 7] = [
        (
            vec![("", set("eta", 1.0))],
            [[0.1.into(), 1.0.into(), (0.9, 0.999).into(), 0.5.into()]; 2],
        ),
        (
            vec![("", half("0.lambda")), ("1", half("1.lambda"))],
            [
                [0.05.into(), 1e-3.into(), (0.9, 0.999).into(), 0.5.into()],
                [0.05.into(), 1e-3.into(), (0.9, 0.999).into(), 0.25.into()],
            ],
        ),
        (
            vec![("", set("eta", 1.0)), ("1", half("1.eta"))],
            [
                [0.1.into(), 1.0.into(), (0.9, 0.999).into(), 0.5.into()],
                [0.1.into(), 5e-4.into(), (0.9, 0.999).into(), 0.5.into()],
            ],
        ),
        (
            vec![("1", set("1.eta", 1.0)), ("", half("eta"))],
            [[0.1.into(), 5e-4.into(), (0.9, 0.999).into(), 0.5.into()]; 2],
        ),
        (
            vec![("", set("beta1", 0.5)), ("", half("1.beta2"))],
            [[0.1.into(), 1e-3.into(), (0.5, 0.4995).into(), 0.5.into()]; 2],
        ),
        (
            vec![("", set("1.beta1", 0.5)), ("", set("beta1", 0.25))],
            [[0.1.into(), 1e-3.into(), (0.25, 0.999).into(), 0.5.into()]; 2],
        ),
        (
            vec![("", half("eta")), ("", set("eta", 2.0))],
            [[0.1.into(), 2.0.into(), (0.9, 0.999).into(), 0.5.into()]; 2],
        ),
    ];
    for (given, expected) in cases {
        let mut state = setup(chain(), &variables()).expect("a state");
        for (path, schedule) in &given {
            state
                .at(path)
                .and_then(|mut part| part.schedule(schedule.clone()))
                .expect("a schedule");
        }
        for (leaf, expected) in state.leaves().zip(expected) {
            let got = fields.map(|field| leaf.acting().field(field).expect("a field"));
            assert_eq!(got, expected, "{:?} of {given:?}", leaf.path());
            assert_eq!(
                format!("{:?}", leaf.optimiser()),
                format!("{:?}", chain()),
                "the own ones stay"
            );
        }
    }
}

/// All is refused when a schedule is given, and nothing changes.
#[test]
fn what_cannot_be_driven_is_refused() {
    let chain = OptimiserChain::new((
        WeightDecay::new(0.5),
        AdamW {
            lambda: 0.25,
            ..AdamW::new(0.5)
        },
    ));
    let mut state = setup(chain, &variables()).expect("a state");
    let one = || Schedule::constant(1e-3);
    let cases: [(Schedule, ErrorKind, &[&str]); 13] = [
        (
            one().field("rho"),
            ErrorKind::UnknownName,
            &["no field \"rho\"", "lambda"],
        ),
        (
            one().field("beta3"),
            ErrorKind::UnknownName,
            &["no field \"beta3\""],
        ),
        (
            one().field("beta0"),
            ErrorKind::UnknownName,
            &["no field \"beta0\""],
        ),
        (
            one().field("beta"),
            ErrorKind::Argument,
            &["its beta is (0.9, 0.999)", "`beta1`"],
        ),
        (
            one().relative().field("lambda"),
            ErrorKind::Argument,
            &["0.lambda = 0.5, 1.lambda = 0.25", "Schedule::field(\"0.lambda\")"],
        ),
        (
            one().field("1.couple"),
            ErrorKind::Argument,
            &["its 1.couple is true"],
        ),
        (
            Schedule::constant(f64::NAN),
            ErrorKind::Argument,
            &["Schedule: eta is NaN", "a finite number"],
        ),
        (
            Schedule::exponential(0.0, f64::INFINITY, 2),
            ErrorKind::Argument,
            &["Schedule: eta is inf"],
        ),
        (
            Schedule::constant(0.5).then(4, Schedule::cosine_restarts(0.5, 0.1, 10, 0.5)),
            ErrorKind::Argument,
            &["Schedule: factor is 0.5, expected a finite number of 1 or more"],
        ),
        (
            Schedule::constant(-1.0).relative(),
            ErrorKind::Argument,
            &["in step 0", "\"0\"", "eta is -0.5"],
        ),
        (
            Schedule::linear(0.5, -0.5, 100),
            ErrorKind::Argument,
            &["in step 100", "a finite number of 0 or more"],
        ),
        (
            Schedule::linear(0.9, 1.1, 9).field("beta1"),
            ErrorKind::Argument,
            &["leaves the range", "beta is (1.1, 0.999)"],
        ),
        (
            Schedule::exponential(0.1, 1.1, 1).field("beta1"),
            ErrorKind::Argument,
            &["leaves the range"],
        ),
    ];
    for (schedule, kind, words) in cases {
        let error = state.schedule(schedule.clone()).expect_err("refused");
        assert_eq!(error.kind(), kind, "{schedule:?}: {error}");
        says(&error, words);
        assert!(
            state
                .leaves()
                .all(|leaf| std::ptr::eq(leaf.acting(), leaf.optimiser())),
            "nothing has changed"
        );
    }
    let leaving = [
        Schedule::linear(0.0, 0.5, 10).then(10, Schedule::one_minus_square_root(0.5, -1e-3, 10)),
        Schedule::cosine_restarts(0.5, -1e-3, 100, 1.0),
        Schedule::cosine_restarts(0.5, -1e-9, 2, 2.0),
        Schedule::exponential(0.5, -0.5, 2),
        Schedule::step(0.5, -0.5, 2),
        Schedule::warmup_stable_decay(0.5, -0.1, 10, 10, 10),
        Schedule::linear(1e-8, -1e-8, 2).field("epsilon"),
        Schedule::polynomial(0.5, -0.5, 10, 0.5).relative(),
    ];
    for schedule in leaving {
        let error = state.schedule(schedule.clone()).expect_err("refused");
        is_kind(&error, ErrorKind::Argument, &["the schedule leaves the range"]);
    }
    let mut empty = setup(Adam::new(0.5), &variables()).expect("a state");
    empty.remove("").expect("no leaf is left");
    let error = empty.schedule(one()).expect_err("no leaf");
    is_kind(
        &error,
        ErrorKind::UnknownName,
        &["selects no leaf", "`add` parameters to the state first"],
    );
    // What is cut before it leaves, and what grows for as long as one likes.
    let staying = [
        Schedule::linear(0.5, -0.5, 100).then(50, Schedule::constant(0.0)),
        Schedule::constant(1.0)
            .then(5, Schedule::linear(0.5, -0.5, 100))
            .then(50, Schedule::constant(0.0)),
        Schedule::exponential(1e-7, 1.1, 1),
        Schedule::exponential(2.0, 1.1, 1).relative(),
        Schedule::one_cycle(0.5, 3),
        Schedule::one_cycle(0.5, 100),
        Schedule::inverse_square_root(0.5, 10),
        Schedule::polynomial(0.5, 0.0, 10, 0.5),
        Schedule::cosine_restarts(0.5, 0.0, 10, 1.5),
        Schedule::linear(0.0, 0.5, u64::MAX),
    ];
    for schedule in staying {
        state
            .schedule(schedule.clone())
            .unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
    }
}

#[test]
fn by_hand_an_own_rate_is_set_unless_a_schedule_alone_decides() {
    let model = variables();
    let chain = || OptimiserChain::new((RMSProp::new(1.0), Momentum::new(1.0), Descent::new(0.5)));
    let mut state = setup(chain(), &model).expect("a state");
    state.schedule(Schedule::constant(0.25)).expect("a schedule");
    let words = [
        "a schedule sets its eta",
        "would be 0.1, expected 0.5, as before",
        "Schedule::constant",
        "`relative`",
    ];
    for field in ["eta", "1.eta", "2.eta"] {
        let value = if field == "1.eta" { 0.2 } else { 0.1 };
        let error = state
            .all()
            .adjust_fields([("0.rho", 0.5.into()), (field, value.into())])
            .expect_err(field);
        is_kind(&error, ErrorKind::Argument, &words);
        let rho = state.leaf("0").and_then(|leaf| leaf.field("0.rho"));
        assert_eq!(
            (error.path(), rho),
            (Some("0"), Some(0.9.into())),
            "nothing has changed"
        );
    }
    state.adjust(0.5).expect("the rate that it has");
    // A schedule of one member leaves the others to the user.
    state
        .schedule(Schedule::constant(0.25).field("2.eta"))
        .expect("a schedule");
    state.all().adjust_field("1.eta", 0.5).expect("a rate");
    assert_eq!(rates(&state), [0.125; 2]);

    state
        .schedule(Schedule::constant(0.5).relative())
        .expect("a schedule");
    state.adjust(0.125).expect("an own rate");
    assert_eq!(
        (own(&state, "eta"), rates(&state)),
        (vec![Some(0.125.into()); 2], vec![0.0625; 2])
    );
    // A name that reaches several sets all of them, or none.
    let chain = OptimiserChain::new((
        WeightDecay::new(0.5),
        AdamW {
            lambda: 0.25,
            ..AdamW::new(0.5)
        },
    ));
    let mut state = setup(chain, &model).expect("a state");
    state
        .schedule(Schedule::constant(0.125).field("0.lambda"))
        .expect("a schedule");
    is_kind(
        &state.all().adjust_field("lambda", 0.1).expect_err("refused"),
        ErrorKind::Argument,
        &["0.lambda"],
    );
    state.all().adjust_field("1.lambda", 0.1).expect("another one");
    // Of a pair the number is set that no schedule drives.
    state
        .schedule(Schedule::constant(0.5).field("beta1"))
        .expect("a schedule");
    state.all().adjust_field("beta", (0.1, 0.2)).expect_err("both");
    state
        .all()
        .adjust_field("beta", (0.9, 0.2))
        .expect("the other number");
    assert_eq!(acting(&state, "beta"), [Some((0.5, 0.2).into()); 2]);
    let mut plateau = ReduceOnPlateau::new().field("beta1");
    is_kind(
        &plateau.observe(1.0, &mut state).expect_err("refused"),
        ErrorKind::Argument,
        &["its beta1"],
    );

    // The trait of candle-nn sets rates by hand, too; its next step returns the error.
    let x = Var::ones(2, DType::F32, &Device::Cpu).expect("a variable");
    let mut optimizer = CandleOptimizer::new(vec![x.clone()], Adam::new(0.5)).expect("an optimiser");
    optimizer
        .state_mut()
        .schedule(Schedule::constant(0.5).relative())
        .expect("a schedule");
    optimizer.set_learning_rate(0.25);
    assert_eq!(optimizer.learning_rate(), 0.125);
    optimizer
        .state_mut()
        .schedule(Schedule::constant(0.5))
        .expect("a schedule");
    optimizer.set_learning_rate(0.125);
    let loss = x.sqr().and_then(|x| x.sum_all()).expect("a loss");
    let error = optimizer.backward_step(&loss).expect_err("refused").to_string();
    assert!(error.contains("a schedule sets its eta"), "{error}");

    // What a schedule makes of an own value has to be in range too.
    let mut state = setup(Adam::new(0.5), &model).expect("a state");
    state
        .schedule(Schedule::linear(1.0, 2.0, 9).relative().field("beta1"))
        .expect_err("0.9·2");
    state.all().adjust_field("beta", (0.25, 0.5)).expect("a pair");
    state
        .schedule(Schedule::linear(1.0, 2.0, 9).relative().field("beta1"))
        .expect("0.25·2");
    let error = state.all().adjust_field("beta", (0.5, 0.5)).expect_err("0.5·2");
    is_kind(
        &error,
        ErrorKind::Argument,
        &["in step 9 the schedule leaves the range"],
    );
    assert_eq!(own(&state, "beta"), [Some((0.25, 0.5).into()); 2]);
}

#[test]
fn another_optimiser_and_new_leaves_go_on_under_the_schedules() {
    for (curve, is_relative) in [
        (Schedule::cosine(1e-3, 0.0, 40), false),
        (Schedule::cosine(1.0, 0.0, 40), true),
    ] {
        let schedule = if is_relative {
            curve.clone().relative()
        } else {
            curve.clone()
        };
        let model = variables();
        let mut state = setup(AdamW::new(1e-3), &model).expect("a state");
        state.schedule(schedule).expect("a schedule");
        state
            .schedule(Schedule::constant(0.5).relative().field("lambda"))
            .expect("a schedule");
        (0..10).for_each(|_| drop(step(&model, &mut state)));
        // Into another store and a chain.
        let rule = |eta| OptimiserChain::new((ClipGlobalNorm::new(1.0), StoreAs::all(Q8, AdamW::new(eta))));
        let rate = |own: f64| {
            if is_relative {
                own * curve.at(10)
            } else {
                curve.at(10)
            }
        };
        let replaced = state.at("0").and_then(|leaf| leaf.replace(rule(4e-3), &model));
        if is_relative {
            replaced.expect("another rate");
            assert_eq!(rates(&state), [rate(4e-3), rate(1e-3)]);
        } else {
            let words = [
                "so a new own value would have no effect; the own value would be 0.004, expected 0.001, as \
                 before",
            ];
            is_kind(&replaced.expect_err("no effect"), ErrorKind::Argument, &words);
        }
        state
            .at("0")
            .and_then(|leaf| leaf.replace(rule(1e-3), &model))
            .expect("the same rate");
        assert_eq!(rates(&state), [rate(1e-3); 2]);
        let change = state
            .at("0")
            .and_then(|leaf| leaf.replace(Momentum::new(1e-3), &model))
            .expect("momentum");
        assert!(
            change[0].dropped.contains(&"schedule of lambda".to_string()),
            "{change:?}"
        );

        let mut larger = model.clone();
        larger.insert(
            "2".to_string(),
            Var::zeros(2, DType::F32, &Device::Cpu).expect("a variable"),
        );
        let added = state.add(AdamW::new(8e-3), &larger);
        if is_relative {
            added.expect("a leaf");
            assert_eq!(rates(&state)[2], rate(8e-3));
        } else {
            let words = [
                "one schedule would make two different values equal: its eta, 0.008, and that of \
                          \"0\", 0.001",
            ];
            is_kind(&added.expect_err("another rate"), ErrorKind::Argument, &words);
            state.add(AdamW::new(1e-3), &larger).expect("the same rate");
            assert_eq!(rates(&state)[2], rate(1e-3));
        }
        assert_eq!(
            acting(&state, "lambda")[2],
            Some(0.005.into()),
            "what was given to all"
        );
        state
            .at("2")
            .and_then(|leaf| leaf.replace(AccumGrad::new(2), &larger))
            .expect("no rate at all");
        (0..10).for_each(|_| drop(step(&larger, &mut state)));
        assert_eq!(
            state.leaf("1").and_then(|leaf| leaf.learning_rate()),
            Some(if is_relative {
                1e-3 * curve.at(20)
            } else {
                curve.at(20)
            })
        );
    }
}

/// What was given to all is not lost with its last leaf, and each gets what it has a field for.
#[test]
fn new_leaves_get_the_schedules_of_all_in_their_order() {
    let both = variables();
    let first: Vars = both
        .iter()
        .take(1)
        .map(|(path, x)| (path.clone(), x.clone()))
        .collect();
    let chain = || OptimiserChain::new((RMSProp::new(0.5), Descent::new(1.0)));
    let mut state = setup(Adam::new(0.5), &first).expect("a state");
    state.add(chain(), &both).expect("a chain");
    state.schedule(Schedule::constant(0.25)).expect("for both");
    state
        .schedule(Schedule::constant(0.5).relative().field("0.eta"))
        .expect("for the chain");
    assert_eq!(rates(&state), [0.25, 0.25]);
    let file = file_of(Checkpoint::new(&state));
    for is_restored in [false, true] {
        if is_restored {
            restored(&file, &mut state);
        }
        state.remove("").expect("all leaves");
        state.add(Adam::new(0.5), &first).expect("a leaf");
        state.add(chain(), &both).expect("a chain");
        assert_eq!(rates(&state), [0.25, 0.25], "restored: {is_restored}");
        assert_eq!(acting(&state, "0.eta"), [None, Some(0.25.into())]);
    }
}

/// Names, sizes and copies change nothing, and frozen leaves are driven like the others.
#[test]
fn schedules_stay_with_their_leaves() {
    let mut state = setup(Adam::new(0.5), &variables()).expect("a state");
    state.at("1").expect("a leaf").freeze();
    state
        .schedule(Schedule::exponential(1.0, 0.5, 1).relative())
        .expect("a schedule");
    state.rename("", "layers").expect("new names");
    state.rename("layers", "").expect("the old names");
    let mut state = state.try_clone().expect("a copy");
    let longer = model(&[
        random(1, &[3], DType::F32, &Device::Cpu),
        random(2, &[5, 3], DType::F32, &Device::Cpu),
    ]);
    state
        .resize_rows("1", &longer, &[Some(0), Some(1), Some(2), None, None])
        .expect("more rows");
    state.set_steps(2).expect("a count");
    assert_eq!(
        (rates(&state), own(&state, "eta")),
        (vec![0.125; 2], vec![Some(0.5.into()); 2])
    );
    state.remove("0").expect("a leaf less");
    state.set_steps(1).expect("a count");
    assert_eq!(rates(&state), [0.25]);
}

/// Leaves that share an optimiser share the one that acts; a value that stays is not set again.
#[test]
fn leaves_share_what_acts() {
    let mut state = setup(Adam::new(0.5), &variables()).expect("a state");
    let places = |state: &StateTree| -> Vec<*const ()> {
        state
            .leaves()
            .map(|leaf| std::ptr::from_ref(leaf.acting()).cast())
            .collect()
    };
    state
        .schedule(Schedule::constant(0.5).then(2, Schedule::linear(0.5, 0.0, 8)))
        .expect("a schedule");
    for (steps, rate) in [(1, 0.5), (2, 0.5), (4, 0.375), (6, 0.25)] {
        state.set_steps(steps).expect("a count");
        let now = places(&state);
        assert!(now[0] == now[1] && rates(&state)[0] == rate, "step {steps}");
    }
}

#[test]
fn a_file_has_the_count_the_schedules_and_own_values() {
    let fresh = || mixed(&variables());
    let mut state = fresh();
    let description = |state: &StateTree| Pieces::of(&file_of(Checkpoint::new(state))).description;
    let plain = description(&state);
    assert!(plain.get("schedules").is_none() && plain["leaves"]["0"].get("schedules").is_none());
    assert_eq!(plain["steps"], 0);
    state
        .schedule(Schedule::linear(1.0, 0.5, 4).relative())
        .expect("a schedule");
    state
        .at("1")
        .and_then(|mut leaf| leaf.schedule(Schedule::constant(0.5).field("rho")))
        .expect("a schedule");
    state.set_steps(2).expect("a count");
    let pieces = Pieces::of(&file_of(Checkpoint::new(&state)));
    let curve =
        serde_json::json!({"Between": {"start": 1.0, "end": 0.5, "steps": 4, "easing": {"Power": 1.0}}});
    let schedules = serde_json::json!([
        {"curve": curve, "field": null, "relative": true},
        {"curve": {"Constant": 0.5}, "field": "rho", "relative": false},
    ]);
    assert_eq!(
        (&pieces.description["schedules"], &pieces.description["steps"]),
        (&schedules, &2.into())
    );
    assert_eq!(
        pieces.description["leaves"]["1"]["schedules"],
        serde_json::json!([0, 1])
    );
    assert_eq!(pieces.description["for_all"], serde_json::json!([0]));

    // The same in a process that says nothing of them.
    let mut same = fresh();
    same.adjust(7.0).expect("rates that are not the saved ones");
    restored(&file_of(Checkpoint::new(&state)), &mut same);
    assert_eq!(
        (same.steps(), rates(&same), own(&same, "eta")),
        (2, rates(&state), own(&state, "eta"))
    );
    let mut same = fresh();
    restored(&file_of(Checkpoint::new(&state)), &mut same);
    assert_eq!(file_of(Checkpoint::new(&same)), file_of(Checkpoint::new(&state)));
    let file = open(&file_of(Checkpoint::new(&state))).expect("a file");
    assert_eq!(file.steps(), 2);
    let config = |state: &StateTree| OptimiserConfig::of_state(state).expect("a configuration");
    assert_eq!(config(&state), config(&fresh()), "a configuration has own values");

    type Damage = fn(&mut serde_json::Value);
    let damage: [(&str, Damage); 7] = [
        ("a schedule that is not there", |file| {
            file["leaves"]["1"]["schedules"] = serde_json::json!([2])
        }),
        ("which the rule lacks", |file| {
            file["schedules"][1]["field"] = "xi".into()
        }),
        ("leaves the range", |file| {
            file["schedules"][1]["curve"]["Constant"] = (-1.0).into()
        }),
        ("not in order", |file| {
            file["schedules"][1]["curve"] = serde_json::json!({"Joined": []})
        }),
        ("equal", |file| file["schedules"][0]["relative"] = false.into()),
        ("not in order", |file| {
            let parts =
                serde_json::json!([[0, {"Constant": 0.5}], [5, {"Constant": 0.5}], [3, {"Constant": 0.5}]]);
            file["schedules"][1]["curve"] = serde_json::json!({ "Joined": parts });
        }),
        ("the count of applied steps", |file| {
            file["steps"] = u64::MAX.into()
        }),
    ];
    for (words, damage) in damage {
        let mut damaged = pieces.clone();
        damage(&mut damaged.description);
        let mut other = fresh();
        let error = open(&damaged.bytes())
            .and_then(|file| file.restore(&mut other))
            .expect_err("refused");
        says(&error, &[words]);
        assert_eq!(
            (other.steps(), rates(&other)),
            (0, vec![3e-4, 0.02]),
            "nothing has changed"
        );
    }
}

/// Every bit of a schedule comes back from a file.
#[test]
fn curves_of_every_kind_come_back() {
    let third = 1.0 / 3.0;
    let curves = [
        Schedule::constant(third),
        Schedule::polynomial(third, 1e-300, 7, 0.1 + 0.2),
        Schedule::cosine(third, 5e-324, u64::MAX),
        Schedule::one_minus_square_root(third, 0.0, 9),
        Schedule::cosine_restarts(third, 0.1, 3, 1.1),
        Schedule::one_cycle(third, 12),
        Schedule::exponential(third, 0.7, 5),
        Schedule::step(third, 0.7, 5),
        Schedule::inverse_square_root(third, 6),
        Schedule::warmup_stable_decay(third, 0.1, 3, 4, 5).then(15, Schedule::constant(0.7)),
        (1..200).fold(Schedule::constant(third), |curve, i| {
            curve.then(i, Schedule::constant(third / i as f64))
        }),
    ];
    for curve in curves {
        let mut state = setup(Adam::new(third), &variables()).expect("a state");
        state.schedule(curve.clone()).expect("a schedule");
        let mut other = setup(Adam::new(third), &variables()).expect("a state");
        restored(&file_of(Checkpoint::new(&state)), &mut other);
        other.schedule(curve.clone()).expect("a schedule");
        assert!(other.warnings().is_empty(), "{curve:?} is another one");
        for step in [0, 1, 2, 5, 11, 100, u64::MAX / 2] {
            [&mut state, &mut other]
                .into_iter()
                .for_each(|state| state.set_steps(step).expect("a count"));
            assert_eq!(rates(&other), [curve.at(step); 2], "{curve:?} in step {step}");
        }
    }
}

/// Where both have one, the program's counts, in either order.
#[test]
fn a_schedule_that_is_not_the_files_is_warned_of_once() {
    let (model, curve) = (variables(), |steps| Schedule::cosine(1.0, 0.25, steps));
    let mut saved = setup(Adam::new(1.0), &model).expect("a state");
    saved.schedule(curve(40)).expect("a schedule");
    saved
        .schedule(Schedule::constant(0.5).field("beta1"))
        .expect("a schedule");
    (0..20).for_each(|_| drop(step(&model, &mut saved)));
    let file = file_of(Checkpoint::new(&saved));
    for (schedule, differs) in [
        (curve(40), false),
        (curve(80), true),
        (curve(40).relative(), true),
    ] {
        for is_before in [true, false] {
            let mut state = setup(Adam::new(1.0), &model).expect("a state");
            let give = |state: &mut StateTree| state.schedule(schedule.clone()).expect("a schedule");
            if is_before {
                give(&mut state);
                restored(&file, &mut state);
            } else {
                restored(&file, &mut state);
                give(&mut state);
            }
            give(&mut state);
            assert_eq!((state.steps(), rates(&state)), (20, vec![schedule.at(20); 2]));
            assert_eq!(
                acting(&state, "beta"),
                [Some((0.5, 0.999).into()); 2],
                "the file's goes on"
            );
            let known = state.warnings().to_vec();
            let met: Vec<Warning> = (0..5).flat_map(|_| step(&model, &mut state).warnings).collect();
            assert_eq!(
                (&met, met.len()),
                (&known, usize::from(differs)),
                "{schedule:?}, before: {is_before}"
            );
            if let [
                Warning::ScheduleDiffers {
                    path,
                    field,
                    program,
                    file,
                },
            ] = &met[..]
            {
                assert_eq!((&**path, &**field), ("0", "eta"));
                assert!(
                    file.contains("steps: 40") && program.as_ref() != Some(file),
                    "{}",
                    met[0]
                );
                says_all(
                    &met[0],
                    &[
                        "\"0\"",
                        "`state.set_steps(0)`",
                        "follows the schedule of the program",
                    ],
                );
            }
        }
    }
    // A second phase is meant, in the same process and after steps on the file's schedule.
    let mut resumed = setup(Adam::new(1.0), &model).expect("a state");
    restored(&file, &mut resumed);
    step(&model, &mut resumed);
    for mut state in [saved, resumed] {
        state.schedule(curve(80)).expect("a schedule");
        state.set_steps(0).expect("a count");
        assert_eq!(
            (step(&model, &mut state).warnings, state.warnings()),
            (vec![], &[][..])
        );
    }
}

fn says_all(warning: &Warning, words: &[&str]) {
    let said = warning.to_string();
    assert!(words.iter().all(|word| said.contains(word)), "{said}");
}

#[test]
fn steps_at_a_scheduled_rate_of_0_are_warned_of_once() {
    let model = variables();
    let fresh = || setup(Adam::new(0.5), &model).expect("a state");
    let run = |state: &mut StateTree, steps: usize| -> Vec<Warning> {
        (0..steps).flat_map(|_| step(&model, state).warnings).collect()
    };
    let expected = |step| Warning::ScheduledRateOfZero {
        path: "0".to_string(),
        step,
    };
    let mut state = fresh();
    state
        .schedule(Schedule::cosine(0.5, 0.0, 10))
        .expect("a schedule");
    assert_eq!(run(&mut state, 10), [], "a run of as many steps");
    assert_eq!(run(&mut state, 20), [expected(10)]);
    assert_eq!(state.warnings(), [expected(10)]);
    says_all(&expected(10), &["\"0\"", "step 10", "more steps", "peak / steps"]);
    // A first step that moves nothing.
    let mut state = fresh();
    state
        .schedule(Schedule::linear(0.0, 1.0, 3).relative())
        .expect("a schedule");
    assert_eq!(run(&mut state, 5), [expected(0)]);
    // No end, an end above 0, a rate that is 0 all the time, and a field that may well be 0.
    let quiet = [
        Schedule::constant(0.0).relative(),
        Schedule::linear(0.5, 1e-3, 3),
        Schedule::warmup_stable_decay(0.5, 1e-3, 3, 3, 3),
        Schedule::inverse_square_root(0.5, 4),
        Schedule::cosine_restarts(1.0, 0.0, 3, 1.0).relative(),
        Schedule::linear(1.0, 0.0, 3).relative().field("epsilon"),
    ];
    for schedule in quiet {
        let mut state = fresh();
        state.schedule(schedule).expect("a schedule");
        assert_eq!(run(&mut state, 12), []);
    }
    let mut state = fresh();
    state
        .at("0")
        .and_then(|mut leaf| leaf.schedule(Schedule::linear(0.0, 1.0, 3)))
        .expect("a schedule");
    state.at("0").expect("a leaf").freeze();
    assert_eq!(run(&mut state, 1), [], "it would not have moved");
}

#[test]
fn ranks_at_different_steps_of_a_schedule_are_refused() {
    let refused = on(2, |world| {
        let model = variables();
        let mut state = Setup::over(&world)
            .build(Adam::new(0.5), &model)
            .expect("a state");
        state
            .schedule(Schedule::linear(1.0, 0.5, 10))
            .expect("a schedule");
        assert_eq!(step(&model, &mut state).learning_rate, Some(1.0));
        state.set_steps(1 + world.rank() as u64).expect("a count");
        let gradients = grads(model.values().map(|x| x.ones_like().ok()));
        let error = update(&mut state, &model, &gradients).expect_err("two rates");
        (error.kind(), error.to_string())
    });
    for (kind, text) in refused {
        assert!(
            kind == ErrorKind::Ranks && text.contains("differs in the count of applied steps"),
            "{text}"
        );
    }
}

/// The chain of RMSProp's documentation, against torch's recurrence written out, while the rate moves.
#[test]
fn rmsprop_with_momentum_and_a_schedule_is_torchs() {
    let x = model(&[random(1, &[4], DType::F64, &Device::Cpu)]);
    let mut expected = values(&x["0"]);
    let mean = RMSProp {
        rho: 0.99,
        ..RMSProp::new(1.0)
    };
    let rule = OptimiserChain::new((mean, Momentum::new(1.0), Descent::new(0.01)));
    let mut state = setup(rule, &x).expect("a state");
    let schedule = Schedule::cosine(0.02, 0.0, 20);
    state.schedule(schedule.clone()).expect("a schedule");
    let (mut mean, mut buffer) = ([0.0; 4], [0.0; 4]);
    for call in 0..15 {
        let gradient = random(10 + call, &[4], DType::F64, &Device::Cpu);
        for (i, g) in values(&gradient).into_iter().enumerate() {
            mean[i] = 0.99 * mean[i] + (1.0 - 0.99) * g * g;
            buffer[i] = 0.9 * buffer[i] + g / (f64::sqrt(mean[i]) + 1e-8);
            expected[i] -= schedule.at(call) * buffer[i];
        }
        update(&mut state, &x, &grads([Some(gradient)])).expect("an update");
        for (got, expected) in values(&x["0"]).into_iter().zip(expected.clone()) {
            assert!(
                (got - expected).abs() < 1e-12,
                "step {call}: {got} for {expected}"
            );
        }
    }
}

/// Two schedules on the two numbers of a pair are tried together, each with the other's values.
#[test]
fn schedules_of_one_pair_are_tried_together() {
    let x = Var::zeros(2, DType::F32, &Device::Cpu).expect("a variable");
    let make = || setup(Rprop::new(0.5), &x).expect("a state");
    let smallest = |to| Schedule::linear(1e-6, to, 10).field("gamma1");
    let largest = |to| Schedule::linear(50.0, to, 10).field("gamma2");

    // Each is in order with the own value of the other.
    let mut state = make();
    state.schedule(smallest(40.0)).expect("below 50");
    let error = state.schedule(largest(1.0)).expect_err("the two cross");
    is_kind(
        &error,
        ErrorKind::Argument,
        &[
            "in step 10 the schedule leaves the range",
            "gamma is (40, 1)",
            "first give the one that makes room",
        ],
    );

    // Curves that cross only between the steps of their extremes are refused by the step itself.
    let mut state = make();
    let late = Schedule::cosine(1.5, 10.5, 10).field("gamma2");
    state.schedule(late).expect("above 1e-6");
    let early = Schedule::linear(1.0, 10.0, 10).field("gamma1");
    state.schedule(early).expect("in order at 0 and 10");
    let gradient = Tensor::ones(2, DType::F32, &Device::Cpu).expect("ones");
    let mut step = || update(&mut state, &x, &[("", &gradient)]);
    step().expect("in order");
    let before = values(&x);
    let error = step().expect_err("the two cross");
    is_kind(
        &error,
        ErrorKind::Argument,
        &[
            "in step 1 the schedule leaves the range",
            "let neither cross the other",
        ],
    );
    assert_eq!(values(&x), before);

    // The smallest is above the own value of the largest, but never above that of its schedule.
    let mut state = make();
    state.schedule(largest(100.0)).expect("above 1e-6");
    state.schedule(smallest(60.0)).expect("below 100");
    state.set_steps(10).expect("a step");
    let leaf = state.leaf("").expect("a leaf");
    assert_eq!(leaf.acting().field("gamma"), Some((60.0, 100.0).into()));
}
