//! Numbers of the whole model that leaves remember: Prodigy's estimate is one for all, whoever joins late or
//! was away.

use candle_core::{DType, Var};
use optimisers::{
    AccumGrad, Adam, Arithmetic, Checkpoint, Descent, Flow, Gradient, Kind, OptimiserChain, Parameter, Parts,
    Prodigy, Resolved, Result, Rule, Setup, State, StateTree, Sums, Update, hyper_parameters, range, setup,
    setup_with, update, value::Value,
};

use support::common::{Grads, Vars, constant, engines, grads, model, snapshot, values};
use support::crafted_checkpoints::{file_of, open};
use support::threads::on;

/// Two parameters at 10.
fn two() -> Vars {
    model(&[constant(10.0, 1, DType::F64), constant(10.0, 1, DType::F64)])
}

/// Calls with the gradient of Σ(x - 3)², for the leaves there are.
fn calls(count: usize, state: &mut StateTree, x: &Vars) {
    for _ in 0..count {
        let gradients: Grads = x
            .iter()
            .map(|(path, x)| {
                (
                    path.clone(),
                    ((x.as_tensor() - 3.0).expect("a difference") * 2.0).expect("a gradient"),
                )
            })
            .collect();
        update(state, x, &gradients).expect("an update");
    }
}

/// The numbers of each leaf, without the places in chains before their names.
fn numbers(state: &StateTree) -> Vec<Vec<f64>> {
    state
        .leaves()
        .map(|leaf| leaf.numbers().into_iter().map(|(_, number)| number).collect())
        .collect()
}

/// A call in which other parameters alone have gradients is none of the estimate's calls.
#[test]
fn t66_numbers_stay_while_no_leaf_of_their_group_has_a_gradient() {
    let rule = |path: &str| -> Box<dyn Rule> {
        match path {
            "2" => Box::new(Adam::new(0.1)),
            _ => Box::new(Prodigy::default()),
        }
    };
    let x = model(&[10.0, 10.0, 1.0].map(|number| constant(number, 1, DType::F64)));
    for engine in engines() {
        let mut state = setup_with(&x, |path, _| Some(rule(path))).expect("a state");
        calls(5, &mut state, &x);
        let before = numbers(&state);
        assert!(
            before[0] == before[1] && before[0].iter().any(|number| *number != 0.0),
            "{before:?}"
        );
        let alone = Grads::from([("2".to_string(), constant(1.0, 1, DType::F64))]);
        Update::new(&mut state)
            .engine(engine)
            .apply(&x, &alone)
            .expect("an update");
        assert_eq!(numbers(&state)[..2], before[..2], "{engine:?}");
    }
}

fn are_shared(state: &StateTree) -> bool {
    numbers(state).windows(2).all(|leaves| leaves[0] == leaves[1])
}

/// Where the second of two parameters is after it was away for 200 calls and there for 100 more.
fn joined(
    join: impl FnOnce(&mut StateTree, &mut Vars),
    away: impl FnOnce(&Vars) -> StateTree,
    mut x: Vars,
) -> (f64, StateTree) {
    let mut state = away(&x);
    calls(200, &mut state, &x);
    join(&mut state, &mut x);
    calls(100, &mut state, &x);
    (values(&x["1"])[0], state)
}

#[test]
fn a_leaf_that_joins_late_has_the_estimate_of_the_model() {
    let only_first = || -> Vars { two().into_iter().filter(|(path, _)| path == "0").collect() };
    let second = || {
        (
            "1".to_string(),
            Var::from_tensor(&constant(10.0, 1, DType::F64)).expect("a variable"),
        )
    };
    let both = |x: &Vars| setup(Prodigy::default(), x).expect("a state");
    let frozen = |x: &Vars| {
        let mut state = both(x);
        state.at("1").expect("a leaf").freeze();
        state
    };
    let results = [
        (
            "thawed",
            joined(|state, _| state.at("1").expect("a leaf").thaw(), frozen, two()),
        ),
        (
            "added",
            joined(
                |state, x| {
                    x.extend([second()]);
                    state.add(Prodigy::default(), x).expect("a leaf");
                },
                both,
                only_first(),
            ),
        ),
        (
            "in a chain of its own",
            joined(
                |state, x| {
                    x.extend([second()]);
                    state
                        .add(OptimiserChain::new((None::<Adam>, Prodigy::default())), x)
                        .expect("a leaf");
                },
                both,
                only_first(),
            ),
        ),
        (
            "of another rule before",
            joined(
                |state, x| {
                    drop(
                        state
                            .at("1")
                            .expect("a leaf")
                            .replace(Prodigy::default(), x)
                            .expect("a rule"),
                    )
                },
                |x| {
                    let rule = |path: &str| -> Box<dyn Rule> {
                        if path == "0" {
                            Box::new(Prodigy::default())
                        } else {
                            Box::new(Descent::new(0.0))
                        }
                    };
                    setup_with(x, |path, _| Some(rule(path))).expect("a state")
                },
                two(),
            ),
        ),
        (
            "thawed after a restore",
            joined(
                |state, x| {
                    let file = open(&file_of(Checkpoint::new(state))).expect("a checkpoint");
                    *state = both(x);
                    file.restore(state).expect("a state");
                    state.at("1").expect("a leaf").thaw();
                },
                frozen,
                two(),
            ),
        ),
    ];
    for (how, (x, state)) in results {
        assert!((x - 3.0).abs() < 0.1, "{how}: {x}");
        assert!(are_shared(&state), "{how}: {:?}", numbers(&state));
    }
}

/// Of leaves that go away and come back in turns, and one that waits in its window, none has an estimate of
/// old.
#[test]
fn who_was_away_does_not_lead() {
    let x = two();
    let mut state = setup(Prodigy::default(), &x).expect("a state");
    for turn in 0..6 {
        let [here, away] = if turn % 2 == 0 { ["0", "1"] } else { ["1", "0"] };
        state.at(here).expect("a leaf").thaw();
        state.at(away).expect("a leaf").freeze();
        let before = snapshot(&x, &state);
        for _ in 0..10 {
            let known = numbers(&state)[0][0];
            calls(1, &mut state, &x);
            assert!(
                are_shared(&state) && numbers(&state)[0][0] >= known,
                "{:?}",
                numbers(&state)
            );
        }
        // Of a frozen leaf nothing else moves.
        let rest = |snapshot: Vec<(String, Vec<u64>)>| {
            let is_rest =
                |name: &str| name.starts_with(away) && !name.ends_with("/d") && !name.ends_with("/r");
            snapshot
                .into_iter()
                .filter(|(name, _)| is_rest(name))
                .collect::<Vec<_>>()
        };
        assert_eq!(rest(snapshot(&x, &state)), rest(before));
    }

    let rule = |path: &str| {
        OptimiserChain::new((
            AccumGrad::new(if path == "0" { 4 } else { 1 }),
            Prodigy::default(),
        ))
    };
    let mut state = setup_with(&x, |path, _| Some(rule(path))).expect("a state");
    for _ in 0..30 {
        let known = numbers(&state)[0][0];
        calls(1, &mut state, &x);
        assert!(
            are_shared(&state) && numbers(&state)[0][0] >= known,
            "{:?}",
            numbers(&state)
        );
    }
}

#[test]
fn ranks_share_as_one_process_does() {
    let train = |state: &mut StateTree, x: &Vars| {
        state.at("1").expect("a leaf").freeze();
        calls(60, state, x);
        state.at("1").expect("a leaf").thaw();
        calls(20, state, x);
    };
    let x = two();
    let mut state = setup(Prodigy::default(), &x).expect("a state");
    train(&mut state, &x);
    let of_ranks = on(2, move |world| {
        let x = two();
        let mut state = Setup::over(&world)
            .build(Prodigy::default(), &x)
            .expect("a state");
        train(&mut state, &x);
        (numbers(&state), values(&x["1"]))
    });
    for of_rank in of_ranks {
        assert_eq!(of_rank, (numbers(&state), values(&x["1"])));
    }
}

/// dx².
#[derive(Clone, Copy)]
struct Square;

impl Arithmetic for Square {
    type Slots<T> = [T; 0];

    fn step<V: Value>(self, _x: V, dx: V, _: &mut [V; 0]) -> V {
        dx * dx
    }
}

/// Rules that remember Σ dx², of a group from 1 on, or of a parameter by itself.
macro_rules! rules_with_a_sum {
    ($($Rule:ident),*) => {$(
        hyper_parameters! {
            /// A rule with a sum of squares.
            pub struct $Rule {
                /// The group; 0 for none.
                group: u64 = 1 => range::any,
            }
        }

        impl Rule for $Rule {
            fn init(&self, _x: Parameter<'_>) -> Result<State> {
                Ok(State::empty().with_number("sum", 0.0, range::non_negative))
            }

            fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
                let Parts { slots, numbers, .. } = state.parts();
                let sums = Sums::new(slots, numbers).sum(Square, 0..0);
                let sums = if self.group > 0 { sums.of_group(self, self.group) } else { sums };
                Ok(Flow::Step(dx.map_with_sums(sums, |sums| Resolved::new(Square, [sums[0]]))))
            }

            fn kind(&self) -> Kind {
                Kind::WholeModel
            }
        }
    )*};
}

rules_with_a_sum!(One, Other);

#[test]
fn sums_are_of_a_type_of_rule_and_a_group() {
    let rules = || -> [Box<dyn Rule>; 6] {
        [
            Box::new(One::new(1)),
            Box::new(One::new(2)),
            Box::new(Other::new(1)),
            Box::new(One::new(1)),
            Box::new(One::new(0)),
            Box::new(One::new(0)),
        ]
    };
    for engine in engines() {
        let model = model(&[(); 6].map(|()| constant(1.0, 2, DType::F32)));
        let place = |path: &str| path.parse::<usize>().expect("a place");
        let mut state = setup_with(&model, |path, _| rules().into_iter().nth(place(path))).expect("a state");
        let dx = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0].map(|dx| Some(constant(dx, 2, DType::F32)));
        Update::new(&mut state)
            .engine(engine)
            .apply(&model, &grads(dx))
            .expect("an update");
        let sums = [
            2.0 * (1.0 + 16.0),
            2.0 * 4.0,
            2.0 * 9.0,
            2.0 * (1.0 + 16.0),
            2.0 * 25.0,
            2.0 * 36.0,
        ];
        assert_eq!(numbers(&state), sums.map(|sum| vec![sum]), "{engine:?}");
    }
}
