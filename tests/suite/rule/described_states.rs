//! Random optimisers through checkpoints and over ranks: equal descriptions, equal bits after more steps.
//!
//! `RANDOM_SEED` says which is the first random case. A failure names its seed.

use candle_core::{DType, Device, Tensor};
use optimisers::{Adjust, Checkpoint, Communicator, FieldValue, Optimiser, Setup, StateTree, setup, update};

use serde_json::Value;

use crate::files::config_written::{near, optimiser, seeds};
use crate::whole::random_models::Dice;
use support::common::{Grads, Vars, assert_same, grads, model, random, snapshot};
use support::crafted_checkpoints::{Pieces, file_of, open};
use support::threads::on;

/// How many optimisers go each way.
const CASES: usize = 1000;

/// The steps before a state is taken elsewhere, and all of them.
const BEFORE: usize = 2;
const ALL: usize = BEFORE + 10;

/// Two small tensors, and with `is_cut` one that two ranks divide.
fn tensors(seed: u64, is_cut: bool) -> Vec<Tensor> {
    let shapes: [&[usize]; 3] = [&[4, 3], &[3], &[40_000]];
    let shapes = if is_cut { &shapes[..] } else { &shapes[..2] };
    shapes
        .iter()
        .zip(seed..)
        .map(|(shape, seed)| random(seed, shape, DType::BF16, &Device::Cpu))
        .collect()
}

fn gradients(is_cut: bool) -> Vec<Grads> {
    (0..ALL as u64)
        .map(|step| grads(tensors(100 + 3 * step, is_cut).into_iter().map(Some)))
        .collect()
}

/// A state of this optimiser after some steps; `None` if the optimiser refuses the model or a step.
fn trained(optimiser: Optimiser, is_cut: bool, gradients: &[Grads]) -> Option<(Vars, StateTree)> {
    let model = model(&tensors(1, is_cut));
    let mut state = setup(optimiser, &model).ok()?;
    gradients
        .iter()
        .try_for_each(|gradients| update(&mut state, &model, gradients).map(drop))
        .ok()?;
    Some((model, state))
}

fn described(state: &StateTree) -> Vec<String> {
    state
        .leaves()
        .map(|leaf| format!("{}: {:?}", leaf.path(), leaf.optimiser()))
        .collect()
}

fn made(seed: u64) -> Optimiser {
    optimiser(&mut Dice(seed))
}

/// The same optimiser with other values of its hyper-parameters, after a step. Those that are no real numbers
/// stay: they may decide on its tensors.
fn other(seed: u64, is_cut: bool, gradients: &[Grads]) -> Option<(Vars, StateTree)> {
    let (mut optimiser, mut dice) = (made(seed), Dice(!seed));
    for (place, (_, value)) in optimiser.places().into_iter().zip(optimiser.fields()) {
        if matches!(
            value,
            FieldValue::Real(_) | FieldValue::Pair(..) | FieldValue::Triple(..)
        ) {
            // What does not fit the other fields is left as it is.
            let _ = optimiser.adjust_field(&place, near(value, &mut dice));
        }
    }
    trained(optimiser, is_cut, &gradients[..1])
}

#[test]
fn a_thousand_random_optimisers_go_on_from_a_checkpoint() {
    let gradients = gradients(false);
    let (mut went_on, mut changed) = (0, 0);
    for seed in seeds(3 * CASES as u64) {
        let saved = trained(made(seed), false, &gradients[..BEFORE]);
        let whole = trained(made(seed), false, &gradients);
        let (Some((saved_model, saved)), Some((whole, end)), Some((other, mut state))) =
            (saved, whole, other(seed, false, &gradients))
        else {
            continue;
        };
        changed += usize::from(described(&state) != described(&saved));
        let bytes = file_of(Checkpoint::new(&saved).model(&saved_model));
        assert_kinds(&Pieces::of(&bytes).description["optimisers"], seed);
        let file = open(&bytes).expect("a file");
        let restored = file
            .restore_with_model(&mut state, &other)
            .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert!(
            restored.differences.iter().all(|other| other.file.is_some()),
            "seed {seed}"
        );
        assert_eq!(described(&state), described(&saved), "seed {seed}");
        gradients[BEFORE..]
            .iter()
            .for_each(|gradients| drop(update(&mut state, &other, gradients).expect("a step")));
        assert_same(
            &[snapshot(&other, &state)],
            &[snapshot(&whole, &end)],
            format!("seed {seed}"),
        );
        went_on += 1;
        if went_on == CASES {
            break;
        }
    }
    assert_eq!(went_on, CASES, "of three times as many");
    assert!(changed > 500, "{changed} had other hyper-parameters");
}

/// Refuses a name of a rule that says more than its kind, such as `MixedPrecision(F32, Adam)`.
fn assert_kinds(description: &Value, seed: u64) {
    match description {
        Value::Object(of) => of.iter().for_each(|(key, value)| match (key.as_str(), value) {
            ("kind", Value::String(kind)) => assert!(!kind.contains('('), "seed {seed}: {kind}"),
            (_, value) => assert_kinds(value, seed),
        }),
        Value::Array(all) => all.iter().for_each(|value| assert_kinds(value, seed)),
        _ => {}
    }
}

/// Whether the model of this case has a tensor that ranks divide.
fn is_cut(seed: u64) -> bool {
    seed.is_multiple_of(10)
}

#[test]
fn a_thousand_random_optimisers_go_over_ranks_and_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state");
    let all = [false, true].map(gradients);
    // One world for all: a thread for each rank.
    let cases = on(2, {
        let all = all.clone();
        move |world| {
            let of_seed = |seed: u64| {
                let (cut, gradients) = (is_cut(seed), &all[usize::from(is_cut(seed))]);
                // One that goes on from a checkpoint on one rank.
                if trained(made(seed), cut, gradients).is_none() || other(seed, cut, gradients).is_none() {
                    return None;
                }
                // The calls of two ranks weigh twice as much in a window as those that one rank adds later.
                if format!("{:?}", made(seed)).contains("average: Weighted") {
                    return None;
                }
                let model = model(&tensors(1, cut));
                let mut state = Setup::over(&world).build(made(seed), &model).ok()?;
                gradients[..BEFORE]
                    .iter()
                    .try_for_each(|gradients| update(&mut state, &model, gradients).map(drop))
                    .ok()?;
                Checkpoint::new(&state)
                    .model(&model)
                    .save(&path)
                    .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                Some((
                    seed,
                    (world.rank() == 0).then(|| std::fs::read(&path).expect("the file")),
                    described(&state),
                ))
            };
            seeds(3 * CASES as u64)
                .filter_map(of_seed)
                .take(CASES)
                .collect::<Vec<_>>()
        }
    });
    let (mut went_on, mut divided) = (0, 0);
    for (seed, file, descriptions) in cases.into_iter().next().expect("rank 0") {
        let (cut, gradients) = (is_cut(seed), &all[usize::from(is_cut(seed))]);
        let (other, mut state) = other(seed, cut, gradients).unwrap_or_else(|| panic!("seed {seed}"));
        let file = open(&file.expect("rank 0 has it")).expect("a file");
        file.restore_with_model(&mut state, &other)
            .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert_eq!(described(&state), descriptions, "seed {seed}");
        gradients[BEFORE..]
            .iter()
            .for_each(|gradients| drop(update(&mut state, &other, gradients).expect("a step")));
        let (whole, end) = trained(made(seed), cut, gradients).unwrap_or_else(|| panic!("seed {seed}"));
        // Gradients of two equal ranks have the same mean.
        let what = format!("seed {seed}, {:?}", made(seed));
        assert_same(&[snapshot(&other, &state)], &[snapshot(&whole, &end)], what);
        went_on += 1;
        divided += usize::from(cut);
    }
    assert_eq!(went_on, CASES, "of three times as many");
    assert!(divided > 20, "{divided} with a divided parameter");
}
