//! What ranks do wrong: one outcome everywhere, nothing has moved, and nobody waits for ever.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use optimisers::{
    AccumGrad, Adafactor, AdamW, Checkpoint, CheckpointFile, ClipGlobalNorm, Communicator, Descent, Ema,
    Error, ErrorKind, Flow, Gradient, IntoOptimiser, Kahan, LAMB, LocalRank, LossScaler, MixedPrecision,
    Momentum, Offload, Optimiser, OptimiserChain, Outcome, Parameter, Result, Rule, Setup, Slot, SplitMaster,
    State, StateTree, StochasticRounding, Update, hyper_parameters, range, trainables, update,
};

use crate::model::models::CPU;
use support::common::{Grads, Vars, assert_same, grads, is_kind, model, muon, says, snapshot, tensor};
use support::reports::{gradients, parameters};
use support::threads::{Failure, Leaving, on};

/// What one rank of three does wrong is an error on all, nothing has moved, and the next call works.
#[test]
fn an_error_on_one_rank_is_an_error_on_all() {
    let wrongs: [(&str, Wrong, &[&str]); 9] = [
        (
            "shape",
            |_, state, model| update(state, model, &grads([Some(tensor(1, &[7], DType::F32))])),
            &["rank 1", "[7]", "\"0\""],
        ),
        (
            "name",
            |_, state, model| {
                update(
                    state,
                    model,
                    &Grads::from([("x".to_string(), tensor(1, &[5], DType::F32))]),
                )
            },
            &["rank 1", "\"x\""],
        ),
        (
            "dtype",
            |_, state, model| {
                update(
                    state,
                    model,
                    &grads([None, Tensor::zeros(5, DType::U32, CPU).ok()]),
                )
            },
            &["rank 1", "U32"],
        ),
        (
            "model",
            |_, state, _| {
                update(
                    state,
                    &model(&parameters(DType::BF16)),
                    &gradients(0, 0, DType::F32),
                )
            },
            &["rank 1"],
        ),
        (
            "rate",
            |_, state, model| {
                state.adjust(0.5)?;
                let outcome = update(state, model, &gradients(0, 0, DType::F32));
                state.adjust(0.1)?;
                outcome
            },
            &["rank 1 differs in the optimiser of \"0\"", "eta = 0.5 on rank 1"],
        ),
        (
            "renamed",
            |_, state, model| {
                state.rename("1", "other")?;
                let outcome = update(
                    state,
                    model,
                    &gradients(0, 0, DType::F32)
                        .into_iter()
                        .filter(|(path, _)| path != "1")
                        .collect::<Grads>(),
                );
                state.rename("other", "1")?;
                outcome
            },
            &["rank 1", "the name of parameter 1"],
        ),
        (
            "frozen",
            |_, state, model| {
                state.at("1")?.freeze();
                let outcome = update(state, model, &gradients(0, 0, DType::F32));
                state.at("1")?.thaw();
                outcome
            },
            &["rank 1", "the progress of \"1\"", "frozen"],
        ),
        (
            "way",
            |_, state, model| {
                Update::new(state)
                    .finite_only()
                    .apply(model, &gradients(0, 0, DType::F32))
            },
            &["rank 1", "the options of the call", "finite_only on rank 1"],
        ),
        (
            "changed",
            |_, state, model| {
                let before = model["0"].copy()?;
                model["0"].set(&(&before + 1.0)?)?;
                let outcome = update(state, model, &gradients(0, 0, DType::F32));
                model["0"].set(&before)?;
                outcome
            },
            &["rank 1", "\"0\""],
        ),
    ];
    let mixed = || {
        MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((ClipGlobalNorm::new(0.5), AdamW::new(0.1))),
        )
    };
    let optimisers: [Optimiser; 9] = [
        Optimiser::new(mixed()),
        Optimiser::new(MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((AccumGrad::new(2), AdamW::new(0.1))),
        )),
        Optimiser::new(Kahan::new(Momentum::new(0.1))),
        Optimiser::new(SplitMaster::new(AdamW::new(0.1))),
        Optimiser::new(StochasticRounding::new(1, AdamW::new(0.1))),
        Optimiser::new(OptimiserChain::new((Momentum::new(0.1), Ema::new(0.9)))),
        Optimiser::new(LAMB::new(0.1)),
        Optimiser::new(muon()),
        Optimiser::new(Adafactor::new(0.1)),
    ];
    let mut errors = 0;
    for (what, wrong, words) in wrongs {
        // A change is noticed by a rank that has a part of the parameter and a copy.
        let is_seen_by_all = what != "changed";
        for optimiser in &optimisers[..if is_seen_by_all { 9 } else { 1 }] {
            for bad in if is_seen_by_all { 0..3 } else { 1..2 } {
                an_error(optimiser.clone(), bad, what, wrong, words);
                errors += 1;
            }
        }
    }
    assert!(errors > 200, "{errors}");
}

type Wrong = fn(&LocalRank, &mut StateTree, &Vars) -> Result<Outcome>;

fn an_error(optimiser: Optimiser, bad: usize, what: &'static str, wrong: Wrong, words: &[&str]) {
    // The words are those for rank 1.
    let words: Vec<String> = words
        .iter()
        .map(|word| word.replace("rank 1", &format!("rank {bad}")))
        .collect();
    on(3, move |world| {
        let model = model(&parameters(DType::BF16));
        let mut state = Setup::over(&world)
            .build(optimiser.clone(), &model)
            .expect("a state");
        let good = |state: &mut StateTree, call| update(state, &model, &gradients(call, 0, DType::F32));
        good(&mut state, 0).expect("a good call");
        let before = snapshot(&model, &state);
        let error = if world.rank() == bad {
            wrong(&world, &mut state, &model)
        } else {
            good(&mut state, 1)
        };
        let error = error.expect_err("an error on all");
        // A rank's own error does not name it.
        let is_own = world.rank() == bad && error.kind() != ErrorKind::Ranks;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        says(&error, &words[usize::from(is_own)..]);
        assert_eq!(error.rank(), (!is_own).then_some(bad), "{error}");
        assert_same(&[snapshot(&model, &state)], &[before], what);
        good(&mut state, 1).expect("the next call");
    });
}

/// A norm is that of all ranks together, and its error says whose gradient it was.
#[test]
fn a_gradient_that_is_not_finite_names_its_rank() {
    for bad in 0..3 {
        on(3, move |world| {
            let model = model(&parameters(DType::F32));
            let rule = OptimiserChain::new((ClipGlobalNorm::new(0.5), AdamW::new(0.1)));
            let mut state = Setup::over(&world).build(rule, &model).expect("a state");
            let mut grads = gradients(1, 0, DType::F32);
            if world.rank() == bad {
                let first = grads["1"]
                    .flatten_all()
                    .and_then(|x| x.narrow(0, 0, 1))
                    .and_then(|x| x / 0.0)
                    .expect("infinite");
                let others = grads["1"]
                    .flatten_all()
                    .and_then(|x| x.narrow(0, 1, x.elem_count() - 1))
                    .expect("the others");
                let all = Tensor::cat(&[first, others], 0)
                    .and_then(|x| x.reshape(grads["1"].shape()))
                    .expect("a gradient");
                grads.insert("1".to_string(), all);
            }
            let error = update(&mut state, &model, &grads).expect_err("a refusal");
            is_kind(
                &error,
                ErrorKind::NotFinite,
                &["2-norm", &format!("the cause is the gradient of rank {bad}")],
            );
            assert_eq!((error.path(), error.rank()), (Some("1"), Some(bad)), "{error}");
            update(&mut state, &model, &gradients(1, 0, DType::F32)).expect("the next call");
        });
    }
}

#[test]
fn states_of_other_models_and_rules_are_refused() {
    let told = |make: fn(&LocalRank) -> Result<StateTree>, words: &'static [&'static str]| {
        for error in on(3, move |world| make(&world).expect_err("a refusal")) {
            says(&error, words);
        }
    };
    fn of(world: &LocalRank, seed: u64, length: usize, rule: impl IntoOptimiser) -> Result<StateTree> {
        let last = world.rank() == 2;
        Setup::over(world).build(
            rule,
            &model(&[
                tensor(1, &[3], DType::F32),
                tensor(
                    if last { seed } else { 2 },
                    &[if last { length } else { 4 }],
                    DType::F32,
                ),
            ]),
        )
    }
    told(
        |world| of(world, 3, 4, Descent::new(0.1)),
        &["rank 2", "values", "\"1\"", "same weights"],
    );
    told(
        |world| of(world, 2, 5, Descent::new(0.1)),
        &["rank 2", "shape", "\"1\"", "[5]", "[4]"],
    );
    told(
        |world| {
            of(
                world,
                2,
                4,
                Descent::new(if world.rank() == 2 { 0.2 } else { 0.1 }),
            )
        },
        &["rank 2", "optimiser", "0.2"],
    );
    told(
        |world| {
            of(
                world,
                2,
                4,
                Descent::new(if world.rank() == 1 { -1.0 } else { 0.1 }),
            )
        },
        &["eta"],
    );
    told(
        |world| Setup::over(world).build(Descent::new(0.1), &Vars::new()),
        &["no trainable"],
    );
}

/// Who has the element finds what was changed there, and all hear of it.
#[test]
fn masters_are_looked_at_by_those_who_have_them() {
    on(2, |world| {
        let model = model(&parameters(DType::BF16));
        let mut state = Setup::over(&world)
            .build(MixedPrecision::new(DType::F32, AdamW::new(0.1)), &model)
            .expect("a state");
        update(&mut state, &model, &gradients(0, 0, DType::F32)).expect("an update");
        state.check_masters(&model).expect("as they were left");
        assert_eq!(
            state.leaf("0").expect("a leaf").part(),
            [0..32_768, 32_768..33_001][world.rank()]
        );
        let mut values: Vec<f32> = model["0"]
            .to_dtype(DType::F32)
            .and_then(|x| x.to_vec1())
            .expect("values");
        values[33_000] = 7.0;
        let values = Tensor::from_vec(values, 33_001, CPU)
            .and_then(|x| x.to_dtype(DType::BF16))
            .expect("values");
        model["0"].set(&values).expect("a change");
        says(
            &state.check_masters(&model).expect_err("one rank finds it"),
            &["parameter \"0\": its value is 7 at element 33000"],
        );
        state.refresh_masters(&model).expect("the change is taken over");
        state.check_masters(&model).expect("masters of what is there");
        update(&mut state, &model, &gradients(1, 0, DType::F32)).expect("an update");
    });
}

/// What needs the whole state says so, and leaves everything as it was.
#[test]
fn what_is_not_done_over_ranks_is_refused() {
    on(2, |world| {
        let model = model(&parameters(DType::BF16));
        let mut state = Setup::over(&world)
            .build(MixedPrecision::new(DType::F32, AdamW::new(0.1)), &model)
            .expect("a state");
        let parameters = trainables(&model).expect("parameters");
        let refusals: Vec<Error> = vec![
            state.add(Descent::new(0.1), &model).expect_err("refused"),
            state
                .add_with(&model, |_, _| Some(Descent::new(0.1)))
                .expect_err("refused"),
            Update::functional(&state)
                .apply(&parameters, &gradients(0, 0, DType::F32))
                .expect_err("refused"),
            state
                .all()
                .replace(Offload::new(Descent::new(0.1)).everywhere(), &model)
                .expect_err("refused"),
        ];
        for error in refusals {
            is_kind(&error, ErrorKind::Unsupported, &["2 ranks"]);
        }
        update(&mut state, &model, &gradients(0, 0, DType::F32)).expect("an update");
    });
}

/// A thousand ranks that leave in the middle of something: the others are told in the same call, whatever it
/// is.
#[test]
fn a_rank_that_leaves_anywhere_wakes_the_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = Arc::new(folder.path().join("run"));
    let shapes: [&[usize]; 2] = [&[20_000], &[3, 4]];
    let weights = shapes.map(|shape| tensor(1, shape, DType::BF16));
    let of_call = [0, 1, 2].map(|call| grads(shapes.map(|shape| Some(tensor(call, shape, DType::F32)))));
    let mut survivors = 0;
    for seed in 0..1000usize {
        let (leaver, words, path) = (seed % 3, seed * 7 % 47, path.clone());
        let (weights, of_call) = (weights.clone(), of_call.clone());
        let said = on(3, move |rank| {
            let left = if rank.rank() == leaver { words } else { usize::MAX };
            let world = Leaving::new(rank, left, Failure::Before);
            let model = model(&weights);
            let average = || Ema::new(0.9);
            let rules: [Box<dyn Rule>; 2] = [
                Box::new(OptimiserChain::new((
                    ClipGlobalNorm::new(0.5),
                    AdamW::new(0.1),
                    average(),
                ))),
                Box::new(OptimiserChain::new((Momentum::new(0.1), average()))),
            ];
            let run = || -> optimisers::Result<()> {
                let mut state = Setup::over(&world)
                    .build(MixedPrecision::new(DType::F32, rules[seed % 2].clone()), &model)?;
                for gradients in &of_call {
                    update(&mut state, &model, gradients)?;
                }
                Checkpoint::new(&state).model(&model).save(&*path)?;
                state.with_averages(&model, || Ok::<_, optimisers::Error>(()))?;
                CheckpointFile::open(&*path)
                    .and_then(|file| file.restore(&mut state))
                    .map(drop)
            };
            run().map_err(|error| error.to_string())
        });
        for (rank, said) in said.into_iter().enumerate() {
            match said {
                Ok(()) => survivors += 1,
                Err(error) if rank == leaver => {
                    assert!(error.contains("this rank leaves"), "{seed}: {error}")
                }
                Err(error) => assert!(
                    error.contains(&format!("rank {leaver} has left")),
                    "{seed}: {error}"
                ),
            }
        }
    }
    // Some had said all.
    assert!((1..1500).contains(&survivors), "{survivors}");
}

hyper_parameters! {
    /// Says that it is divisible, and counts in a tensor.
    struct Counting {
        /// Nothing.
        eta: f64 = 0.1 => range::any,
    }
}

impl Rule for Counting {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::for_slots(x, &[])?.with_slot(Slot::zeros("count"), x, 1)
    }

    fn apply<'a>(&'a self, _: &'a mut State, _: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx))
    }

    fn is_divisible(&self) -> bool {
        true
    }
}

#[test]
fn a_divisible_rule_keeps_a_number_for_each_element() {
    for error in on(2, |world| {
        Setup::over(&world)
            .build(Counting::new(0.1), &model(&[tensor(1, &[33_001], DType::F32)]))
            .expect_err("refused")
    }) {
        is_kind(
            &error,
            ErrorKind::Contract,
            &["\"0\"", "Counting", "\"count\"", "[1]", "`is_divisible`"],
        );
    }
}

/// The errors of two ranks that make different calls, or the same with different arguments, with the state
/// that they share.
fn errors_apart(
    optimiser: impl IntoOptimiser + Clone,
    call: impl Fn(usize, &mut StateTree, &Vars) -> Result<()> + Send + Sync + 'static,
) -> Vec<Error> {
    on(2, move |world| {
        let model = model(&parameters(DType::BF16));
        let mut state = Setup::over(&world)
            .build(optimiser.clone(), &model)
            .expect("a state");
        let error = call(world.rank(), &mut state, &model).expect_err("an error on each rank");
        update(&mut state, &model, &gradients(0, 0, DType::F32)).expect("the ranks are in step again");
        error
    })
}

/// Two ranks as in `errors_apart`, whose errors both say these words.
fn apart(
    optimiser: impl IntoOptimiser + Clone,
    words: &[&str],
    call: impl Fn(usize, &mut StateTree, &Vars) -> Result<()> + Send + Sync + 'static,
) {
    for error in errors_apart(optimiser, call) {
        is_kind(&error, ErrorKind::Ranks, words);
    }
}

fn mixed_adamw() -> MixedPrecision<AdamW> {
    MixedPrecision::new(DType::F32, AdamW::new(0.1))
}

/// A scaler that refuses the call on one rank leaves no other waiting.
#[test]
fn a_loss_that_one_rank_has_not_scaled() {
    let errors = errors_apart(mixed_adamw(), |rank, state, model| {
        let mut scaler = LossScaler::dynamic();
        if rank == 0 {
            let _ = scaler.scale(&Tensor::zeros((), DType::F32, CPU)?)?;
        }
        Update::new(state)
            .scaler(&mut scaler)
            .apply(model, &gradients(0, 0, DType::F32))
            .map(|_| ())
    });
    is_kind(&errors[0], ErrorKind::Ranks, &["rank 1", "scale"]);
    is_kind(&errors[1], ErrorKind::LossScale, &["scale"]);
}

/// Calls that look at masters or averages are not taken for each other.
#[test]
fn another_look_at_masters_on_one_rank() {
    apart(
        mixed_adamw(),
        &["rank 1 called `masters`", "rank 0 `check_masters`"],
        |rank, state, model| match rank {
            0 => state.check_masters(model),
            _ => state.masters(model).map(|_| ()),
        },
    );
    apart(
        mixed_adamw(),
        &["rank 1 called `masters`", "rank 0 `refresh_masters`"],
        |rank, state, model| match rank {
            0 => state.refresh_masters(model),
            _ => state.masters(model).map(|_| ()),
        },
    );
    apart(
        OptimiserChain::new((Momentum::new(0.1), Ema::new(0.9))),
        &["rank 1 called `with_averages`", "rank 0 `averages`"],
        |rank, state, model| match rank {
            0 => state.averages(model).map(|_| ()),
            _ => state.with_averages(model, || Ok(())),
        },
    );
}

/// Masters follow weights that are the same everywhere, and no others.
#[test]
fn other_weights_on_one_rank_are_no_new_masters() {
    apart(
        mixed_adamw(),
        &["rank 1", "the values of \"0\""],
        |rank, state, model| {
            let before = model["0"].copy()?;
            model["0"].set(&(&before + rank as f64)?)?;
            let refreshed = state.refresh_masters(model);
            model["0"].set(&before)?;
            refreshed
        },
    );
}

/// All ranks write one file, of optimisers that are the same.
#[test]
fn other_files_and_other_rates_on_one_rank() {
    apart(
        mixed_adamw(),
        &["rank 1", "the path to save at", "1.safetensors"],
        |rank, state, model| {
            let folder = tempfile::tempdir().expect("a folder");
            state
                .save_masters(model, folder.path().join(format!("{rank}.safetensors")))
                .map(|_| ())
        },
    );
    apart(
        AdamW::new(0.1),
        &["rank 1", "the optimiser of \"0\"", "eta = 0.2 on rank 1"],
        |rank, state, _| {
            state.adjust(if rank == 1 { 0.2 } else { 0.1 })?;
            let saved = state
                .save_torch(std::env::temp_dir().join("never.safetensors"))
                .map(|_| ());
            state.adjust(0.1)?;
            saved
        },
    );
}
