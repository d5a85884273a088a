//! Counters and numbers at the ends of their ranges: what a state accepts from outside, a file and
//! `set_entries` accept alike, and what is saved after further steps can be restored.

use candle_core::DType;
use optimisers::{
    AccumGrad, Accumulator, Average, Checkpoint, Descent, Ema, ErrorKind, Hyperball, Muon, Optimiser,
    OptimiserChain, Prodigy, ScheduleFree, Setup, State, StateTree, StateValue, Update, setup, update,
};
use serde_json::json;

use support::common::{
    Vars, constant, for_any_shape, grads, is_kind, model, optimisers, rules_and_chains, says, tensor,
    values as values_of,
};
use support::crafted_checkpoints::{Pieces, file_of, open};
use support::tested::Tested;
use support::threads::on;

/// The largest count that is accepted.
const MOST: u64 = u64::MAX / 2;

const SHAPES: [&[usize]; 2] = [&[4, 3], &[3]];

fn started(optimiser: &Optimiser, dtype: DType) -> (Vars, StateTree) {
    let x = model(&SHAPES.map(|shape| tensor(1, shape, dtype)));
    let mut state = setup(optimiser.clone(), &x).expect("a state");
    step(&mut state, &x, 2).expect("an update");
    (x, state)
}

fn step(state: &mut StateTree, x: &Vars, seed: u64) -> optimisers::Result<()> {
    let gradients = x.values().map(|x| Some(tensor(seed, x.dims(), x.dtype())));
    update(state, x, &grads(gradients)).map(drop)
}

/// All optimisers that take a matrix and a vector.
fn all() -> impl Iterator<Item = Optimiser> {
    optimisers().into_iter().filter(|optimiser| {
        setup(
            optimiser.clone(),
            &model(&SHAPES.map(|shape| tensor(1, shape, DType::F32))),
        )
        .is_ok()
    })
}

/// Saves the state and restores it.
fn comes_back(state: &StateTree, optimiser: &Optimiser, dtype: DType, what: &str) {
    let file = open(&file_of(Checkpoint::new(state)))
        .expect("a file")
        .accepting_non_finite();
    let (_, mut restored) = started(optimiser, dtype);
    file.restore(&mut restored)
        .unwrap_or_else(|error| panic!("{}, {what}: {error}", optimiser.name()));
    assert_eq!(restored.steps(), state.steps(), "{}, {what}", optimiser.name());
}

/// The entries that are counters, with path and name.
fn counters(state: &StateTree) -> Vec<(String, String)> {
    let entries = state.entries().expect("entries").into_iter();
    let counters = entries.filter(|(.., value)| matches!(value, StateValue::Counter(_)));
    counters.map(|(path, name, _)| (path.to_string(), name)).collect()
}

#[test]
fn counts_at_their_limit_are_saved_and_come_back() {
    for optimiser in all() {
        let (x, mut state) = started(&optimiser, DType::F32);
        let counters = counters(&state);
        let with = |count| {
            counters
                .iter()
                .map(move |(path, name)| (path, name, StateValue::Counter(count)))
        };
        let error = state
            .set_entries(with(MOST + 1))
            .expect_err("a count that is too large");
        is_kind(
            &error,
            ErrorKind::Argument,
            &["9223372036854775808", "a number of calls that can be made"],
        );
        state
            .set_entries(with(MOST))
            .unwrap_or_else(|error| panic!("{}: {error}", optimiser.name()));
        comes_back(&state, &optimiser, DType::F32, "set");
        for seed in 3..6 {
            // A window may refuse a weight, whose sum would be wrong.
            let stepped = step(&mut state, &x, seed);
            stepped.unwrap_or_else(|error| says(&error, &["the sum of the weights of its window"]));
            comes_back(&state, &optimiser, DType::F32, "after a step");
        }
    }
}

/// Each number takes the same values from `set_entries` and from a file, and no step leaves its range.
#[test]
fn numbers_have_one_range() {
    let sizes = [5e-324, 1e-300, 1e-3, 1.0, 2.0, 1e20, 1e40, 1e100, 1e160, f64::MAX];
    let values: Vec<f64> = sizes
        .into_iter()
        .flat_map(|size| [size, -size])
        .chain([0.0])
        .collect();
    let (mut tried, mut refused) = (0, 0);
    for (optimiser, dtype) in
        all().flat_map(|optimiser| [DType::F32, DType::F64].map(|dtype| (optimiser.clone(), dtype)))
    {
        let (_, state) = started(&optimiser, dtype);
        let names: Vec<String> = state
            .leaf("0")
            .expect("a leaf")
            .numbers()
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        for (index, name) in names.iter().enumerate() {
            for value in &values {
                tried += 1;
                let what = format!("{name} = {value:e}");
                let (x, mut state) = started(&optimiser, dtype);
                let set = state.set_entries([("0", name, StateValue::Number(*value))]);
                let mut pieces = Pieces::of(&file_of(Checkpoint::new(&state)));
                pieces.description["leaves"]["0"]["numbers"][index][1] = json!(*value);
                let (_, mut restored) = started(&optimiser, dtype);
                let file = open(&pieces.bytes()).expect("a file").restore(&mut restored);
                assert_eq!(
                    set.is_ok(),
                    file.is_ok(),
                    "{}, {what}: {set:?} {file:?}",
                    optimiser.name()
                );
                if let (Err(set), Err(file)) = (&set, &file) {
                    refused += 1;
                    assert_eq!((set.kind(), file.kind()), (ErrorKind::Argument, ErrorKind::File));
                    assert_eq!(
                        (set.got(), set.expected()),
                        (file.got(), file.expected()),
                        "{what}"
                    );
                    continue;
                }
                for seed in 3..5 {
                    step(&mut state, &x, seed).unwrap_or_else(|error| {
                        says(&error, &["`Hyperball` scales the norm of the parameter"])
                    });
                    let x: Vec<f64> = x.values().flat_map(|x| values_of(x)).collect();
                    // A number of F64 may be right for a master and too large for its parameter.
                    let is_wider = dtype == DType::F32 && optimiser.name().contains("F64");
                    assert!(
                        is_wider || x.iter().all(|x| x.is_finite()),
                        "{}, {what}: {x:?}",
                        optimiser.name()
                    );
                    comes_back(&state, &optimiser, dtype, &what);
                }
            }
        }
    }
    assert!(
        tried > 100 && refused > 50 && refused < tried,
        "{refused} of {tried}"
    );
}

#[test]
fn counts_of_a_program_have_the_same_limit() -> Tested {
    let (x, mut state) = started(&Optimiser::new(Descent::new(0.1)), DType::F32);
    let expected = "expected a number of calls that can be made";
    is_kind(
        &state.set_steps(MOST + 1).expect_err("a count"),
        ErrorKind::Argument,
        &["`set_steps`", expected],
    );
    assert_eq!(state.steps(), 1);
    state.set_steps(MOST)?;
    step(&mut state, &x, 3)?;
    comes_back(
        &state,
        &Optimiser::new(Descent::new(0.1)),
        DType::F32,
        "the count of the program",
    );

    let weighted = OptimiserChain::new((
        AccumGrad {
            average: Average::Weighted,
            ..AccumGrad::new(3)
        },
        Descent::new(0.1),
    ));
    let weighted = Optimiser::new(weighted);
    let (x, mut state) = started(&weighted, DType::F32);
    let gradients = || grads(x.values().map(|x| Some(tensor(3, x.dims(), x.dtype()))));
    let with = |state: &mut StateTree, weight| Update::new(state).weight(weight).apply(&x, &gradients());
    let error = with(&mut state, MOST + 1).expect_err("a weight");
    is_kind(
        &error,
        ErrorKind::Argument,
        &["Update: weight is 9223372036854775808", expected],
    );
    with(&mut state, MOST - 1)?;
    comes_back(&state, &weighted, DType::F32, "an open window");
    let error = with(&mut state, 1).expect_err("a sum of weights");
    is_kind(
        &error,
        ErrorKind::Argument,
        &[
            "\"0\"",
            "the sum of the weights of its window",
            "`Update::weight`",
        ],
    );
    comes_back(&state, &weighted, DType::F32, "after the refusal");

    let mut accumulator = Accumulator::new(optimisers::DType::F32, &x)?;
    accumulator.add_weighted(&gradients(), MOST)?;
    let error = accumulator.add(&gradients()).expect_err("a sum of weights");
    is_kind(
        &error,
        ErrorKind::Argument,
        &["the sum of the weights of the accumulator", "`take`"],
    );
    assert_eq!(
        (accumulator.weight(), accumulator.take()?.inner().len()),
        (MOST, 2)
    );
    Ok(())
}

/// Three ranks together weigh more than a count can be.
#[test]
fn ranks_refuse_weights_that_add_up_to_too_much() {
    on(3, |world| {
        let x = model(&[tensor(1, &[4], DType::F32)]);
        let mut state = Setup::over(&world).build(Descent::new(0.1), &x).expect("a state");
        let gradients = || grads([Some(tensor(2, &[4], DType::F32))]);
        let error = Update::new(&mut state)
            .weight(MOST)
            .apply(&x, &gradients())
            .expect_err("a sum of weights");
        is_kind(
            &error,
            ErrorKind::Argument,
            &["the sum of the weights of all 3 ranks", "`Update::weight`"],
        );
        Update::new(&mut state)
            .weight(MOST / 3)
            .apply(&x, &gradients())
            .expect("an update");
    });
}

/// Squares are not negative, in a file as in `set_entries`.
#[test]
fn a_file_with_a_negative_square_is_refused() -> Tested {
    let (mut refused, mut squares) = (0, 0);
    for rule in rules_and_chains() {
        let optimiser = Optimiser::new(for_any_shape(rule));
        let (_, state) = started(&optimiser, DType::F32);
        let names = state.leaf("0").expect("a leaf").tensor_names();
        for name in names {
            let mut pieces = Pieces::of(&file_of(Checkpoint::new(&state)));
            let Some(first) = pieces.tensor(&format!("0/{name}")).first_chunk_mut::<4>() else {
                continue;
            };
            *first = (-1f32).to_le_bytes();
            let (_, mut restored) = started(&optimiser, DType::F32);
            let stored = state.leaf("0").expect("a leaf").tensor(&name)?;
            let mut values = stored.flatten_all()?.to_vec1::<f32>()?;
            values[0] = -1.0;
            let values = candle_core::Tensor::from_vec(values, stored.shape(), &candle_core::Device::Cpu)?;
            let set = restored.set_entries([("0", &name, StateValue::Tensor(&values))]);
            let file = open(&pieces.bytes())?.restore(&mut restored);
            assert_eq!(
                set.is_ok(),
                file.is_ok(),
                "{}, {name}: {set:?} {file:?}",
                optimiser.name()
            );
            if let Err(error) = file {
                is_kind(
                    &error,
                    ErrorKind::Tensor,
                    &["the file's", "is -1 at element 0", "expected 0 or more"],
                );
                refused += 1;
            }
            squares += 1;
        }
    }
    assert!(refused > 20 && squares > refused, "{refused} of {squares}");
    Ok(())
}

mod out_of_range {
    use optimisers::{Flow, Gradient, Parameter, Parts, Result, Rule, hyper_parameters, range};

    use super::*;

    hyper_parameters! {
        /// Sets its number and its counter to the same value in each step.
        pub struct Counted {
            /// The value.
            value: f64 = 1.0 => range::any,
            /// The value at the start.
            start: f64 = 0.5 => range::any,
        }
    }

    impl Rule for Counted {
        fn init(&self, _x: Parameter<'_>) -> Result<State> {
            Ok(State::empty()
                .with_counter("t")
                .with_number("part", self.start, range::decay))
        }

        fn apply<'a>(
            &'a self,
            state: &'a mut State,
            _x: Parameter<'a>,
            dx: Gradient<'a>,
        ) -> Result<Flow<'a>> {
            let Parts {
                counters, numbers, ..
            } = state.parts();
            let ([t], [part]) = (counters.array()?, numbers.array()?);
            Ok(Flow::Step(
                dx.set_counter(t, self.value as u64).set_number(part, self.value),
            ))
        }
    }

    #[test]
    fn a_rule_starts_in_its_range() {
        let x = model(&[tensor(1, &[2], DType::F32)]);
        let error = setup(
            Counted {
                start: 1.0,
                ..Counted::default()
            },
            &x,
        )
        .expect_err("a number");
        is_kind(
            &error,
            ErrorKind::Contract,
            &[
                "the `init` of Counted makes the number \"part\"",
                "which is 1, expected a number in [0, 1)",
            ],
        );
    }

    /// A save would write what no restore takes.
    #[test]
    fn what_a_step_sets_out_of_range_is_not_saved() {
        for (value, expected) in [
            (0.75, None),
            (f64::NAN, None),
            (
                1.0,
                Some(r#""part" in the state of Counted is 1, expected a number in [0, 1)"#),
            ),
            (
                -0.5,
                Some(r#""part" in the state of Counted is -0.5, expected a number in [0, 1)"#),
            ),
            (
                1e19,
                Some(
                    r#""t" in the state of Counted is 10000000000000000000, expected a number of calls that can be made"#,
                ),
            ),
        ] {
            let x = model(&[tensor(1, &[2], DType::F32)]);
            let mut state = setup(Counted::new(value), &x).expect("a state");
            update(&mut state, &x, &grads([Some(tensor(2, &[2], DType::F32))])).expect("an update");
            match (Checkpoint::new(&state).to_bytes(), expected) {
                (Ok(_), None) => {}
                (Err(error), Some(expected)) => {
                    is_kind(&error, ErrorKind::Contract, &[expected, "`State::with_number`"])
                }
                (saved, _) => panic!("{value}: {:?}", saved.map(|(bytes, _)| bytes.len())),
            }
        }
    }
}

/// What ruined a run in silence.
#[test]
fn numbers_that_ruin_a_run_are_refused() {
    let rules: [(Optimiser, &str, f64, &str); 7] = [
        (
            Optimiser::new(Hyperball::new(Muon::new(0.1))),
            "radius",
            -5.0,
            "from 1.4e-45 to 1.46e48",
        ),
        (
            Optimiser::new(Hyperball::new(Muon::new(0.1))),
            "radius",
            1e300,
            "a norm of numbers of F32",
        ),
        (
            Optimiser::new(Prodigy::new(1.0)),
            "d",
            -1.0,
            "a number above 0, and at most 1e15",
        ),
        (
            Optimiser::new(Prodigy::new(1.0)),
            "d",
            0.0,
            "a number above 0, and at most 1e15",
        ),
        (
            Optimiser::new(ScheduleFree::new(0.1)),
            "largest_eta",
            1e300,
            "a number in [0, 1e100]",
        ),
        (
            Optimiser::new(ScheduleFree::new(0.1)),
            "weights",
            -1.0,
            "a finite number of 0 or more",
        ),
        (
            Optimiser::new(ScheduleFree::new(0.1)),
            "beta",
            1e-4,
            "a number in [1e-3, 1)",
        ),
    ];
    for (optimiser, name, value, expected) in rules {
        let x = model(&[tensor(1, &[4, 3], DType::F32)]);
        let mut state = setup(optimiser.clone(), &x).expect("a state");
        let error = state
            .set_entries([("0", name, StateValue::Number(value))])
            .expect_err("a number");
        is_kind(&error, ErrorKind::Argument, &[expected]);
        says(&error, &[name]);
    }
    // A rate that large weighs as the largest one.
    let x = model(&[constant(1.0, 2, DType::F64)]);
    let mut state = setup(ScheduleFree::new(1e300), &x).expect("a state");
    update(&mut state, &x, &grads([Some(constant(0.0, 2, DType::F64))])).expect("an update");
    let numbers = state.leaf("0").expect("a leaf").numbers();
    assert_eq!(
        numbers,
        [("largest_eta", 1e100), ("weights", 1e200), ("beta", 0.9)]
            .map(|(name, number)| (name.to_string(), number))
    );
    // An average that has missed as many steps as it has made, both at the limit.
    let average = Optimiser::new(OptimiserChain::new((Descent::new(0.1), Ema::new(0.5))));
    let (x, mut state) = started(&average, DType::F32);
    let at = |name| ("0", name, StateValue::Counter(MOST));
    state.set_entries([at("1.t"), at("1.missed")]).expect("counts");
    step(&mut state, &x, 3).expect("an update");
    assert_eq!(
        state.leaf("0").expect("a leaf").counters()[1..],
        [("1.t".to_string(), MOST), ("1.missed".to_string(), 0)]
    );
}
