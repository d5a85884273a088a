//! Random optimisers through checkpoints and over ranks: equal descriptions, equal bits after more steps.
//!
//! `RANDOM_SEED` says which is the first random case. A failure names its seed.

use candle_core::{DType, Device, Tensor};
use optimisers::{Checkpoint, Optimiser, Setup, StateTree, setup, update};

use crate::common::{Grads, Vars, assert_same, grads, model, random, snapshot};
use crate::config_written::{optimiser, seeds};
use crate::crafted_checkpoints::{file_of, open};
use crate::random_models::Dice;
use crate::threads::on;

/// How many optimisers go each way.
const CASES: u64 = 1000;

/// The steps before a state is taken elsewhere, and all of them.
const BEFORE: usize = 2;
const ALL: usize = BEFORE + 10;

fn tensors(seed: u64) -> [Tensor; 2] {
    [random(seed, &[4, 3], DType::BF16, &Device::Cpu), random(seed + 1, &[3], DType::BF16, &Device::Cpu)]
}

fn gradients() -> Vec<Grads> {
    (0..ALL as u64).map(|step| grads(tensors(100 + 2 * step).map(Some))).collect()
}

/// A state of this optimiser after some steps; `None` if the optimiser refuses the model or a step.
fn trained(optimiser: Box<dyn Optimiser>, gradients: &[Grads]) -> Option<(Vars, StateTree)> {
    let model = model(&tensors(1));
    let mut state = setup(optimiser, &model).ok()?;
    gradients.iter().try_for_each(|gradients| update(&mut state, &model, gradients).map(drop)).ok()?;
    Some((model, state))
}

fn described(state: &StateTree) -> Vec<String> {
    state.leaves().map(|leaf| format!("{}: {:?}", leaf.path(), leaf.optimiser())).collect()
}

/// The same rule with the values that it has without a file.
fn untouched(optimiser: &dyn Optimiser) -> Box<dyn Optimiser> {
    let mut other = dyn_clone::clone_box(optimiser);
    for place in optimiser.places() {
        // A value that does not fit the others is left as it is.
        if place.ends_with("eta") && !place.ends_with("beta") {
            let _ = other.set_field(&place, 0.0625.into());
        }
    }
    if other.check().is_ok() { other } else { dyn_clone::clone_box(optimiser) }
}

#[test]
fn a_thousand_random_optimisers_go_on_from_a_checkpoint() {
    let gradients = gradients();
    let mut went_on = 0;
    for seed in seeds(CASES) {
        let made = || optimiser(&mut Dice(seed));
        let (Some((saved_model, saved)), Some((whole, end))) = (trained(made(), &gradients[..BEFORE]), trained(made(), &gradients)) else {
            continue;
        };
        let file = open(&file_of(Checkpoint::new(&saved).model(&saved_model))).expect("a file");
        let Some((other, mut state)) = trained(untouched(&*made()), &gradients[..1]) else { continue };
        let restored = file.restore_with_model(&mut state, &other).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert_eq!(restored.defaults, [], "seed {seed}");
        assert_eq!(described(&state), described(&saved), "seed {seed}");
        gradients[BEFORE..].iter().for_each(|gradients| drop(update(&mut state, &other, gradients).expect("a step")));
        assert_same(&[snapshot(&other, &state)], &[snapshot(&whole, &end)], format!("seed {seed}"));
        went_on += 1;
    }
    assert!(went_on > CASES / 2, "{went_on}");
}

#[test]
fn a_thousand_random_optimisers_go_over_ranks_and_back() {
    let gradients = gradients();
    let folder = tempfile::tempdir().expect("a folder");
    let mut went_on = 0;
    // One world for all: a thread for each rank.
    let path = folder.path().join("state");
    let (first, count) = (seeds(1).next().expect("a seed"), CASES);
    let cases = on(2, {
        let (gradients, path) = (gradients.clone(), path.clone());
        move |world| {
            let mut files = Vec::new();
            for seed in first..first + count {
                let made = || optimiser(&mut Dice(seed));
                if trained(made(), &gradients).is_none() {
                    continue;
                }
                let model = model(&tensors(1));
                let Ok(mut state) = Setup::over(&world).setup(made(), &model) else { continue };
                let steps = gradients[..BEFORE].iter().try_for_each(|gradients| update(&mut state, &model, gradients).map(drop));
                if steps.is_err() {
                    continue;
                }
                Checkpoint::new(&state).model(&model).save(&path).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                if optimisers::Communicator::rank(&world) == 0 {
                    files.push((seed, std::fs::read(&path).expect("the file"), described(&state)));
                }
            }
            files
        }
    });
    for (seed, file, descriptions) in cases.into_iter().flatten() {
        let made = || optimiser(&mut Dice(seed));
        let (Some((other, mut state)), Some((whole, end))) = (trained(made(), &gradients[..1]), trained(made(), &gradients)) else {
            panic!("seed {seed}");
        };
        assert_eq!(descriptions, described(&state), "seed {seed}");
        let file = open(&file).expect("a file");
        file.restore_with_model(&mut state, &other).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        gradients[BEFORE..].iter().for_each(|gradients| drop(update(&mut state, &other, gradients).expect("a step")));
        // Gradients of two equal ranks have the same mean.
        assert_same(&[snapshot(&other, &state)], &[snapshot(&whole, &end)], format!("seed {seed}"));
        went_on += 1;
    }
    assert!(went_on > CASES / 3, "{went_on}");
}
