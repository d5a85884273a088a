//! Weights that arrive after `setup`, for rules that keep a copy of the parameter.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use optimisers::value::Value;
use optimisers::{
    Adam, AdamW, Checkpoint, CheckpointFile, ClipGlobalNorm, Elementwise, Ema, ErrorKind, IntoOptimiser,
    Kahan, Lookahead, MixedPrecision, Offload, Optimiser, OptimiserChain, Prodigy, Rule, ScheduleFree, Setup,
    Slot, SplitMaster, StateTree, StochasticRounding, StoreAs, UniformAverage, Update, hyper_parameters,
    range, setup, trainables, update,
};

use support::common::{
    Grads, Vars, assert_same, bits, devices, engines, grads, is_kind, model, optimisers_for, random, says,
    snapshot, values, var,
};
use support::threads::on;

hyper_parameters! {
    /// dx' = η·(dx + λ·(x - anchor)): a rule of a user's, with a copy of where it started.
    struct Anchored {
        /// The learning rate.
        eta: f64 = 0.1 => range::non_negative,
        /// The pull.
        lambda: f64 = 0.5 => range::non_negative,
    }
}

impl Elementwise for Anchored {
    type Scalars = (f64, f64);
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::parameter("anchor")]
    }

    fn scalars(&self, _t: u64) -> (f64, f64) {
        (self.eta, self.lambda)
    }

    fn step<V: Value>((eta, lambda): (f64, f64), x: V, dx: V, [anchor]: &mut [V; 1]) -> V {
        (dx + (x - *anchor) * lambda) * eta
    }
}

/// Every rule with a copy of the parameter, and the name of the copy.
fn copying() -> Vec<(Box<dyn Rule>, &'static str)> {
    let behind = |rule: Box<dyn Rule>| {
        Box::new(OptimiserChain::new(vec![
            Box::new(Adam::new(0.1)) as Box<dyn Rule>,
            rule,
        ])) as Box<dyn Rule>
    };
    vec![
        (Box::new(ScheduleFree::new(0.1)), "z"),
        (behind(Box::new(Lookahead::new(2))), "1.slow"),
        (behind(Box::new(Ema::new(0.5))), "1.average"),
        (
            behind(Box::new(Ema {
                debias: true,
                ..Ema::new(0.5)
            })),
            "1.average",
        ),
        (behind(Box::new(UniformAverage::new(0))), "1.average"),
        (
            Box::new(Prodigy {
                estimate: 0.1,
                ..Prodigy::default()
            }),
            "start",
        ),
        (Box::new(Anchored::default()), "anchor"),
        (
            Box::new(StoreAs::new(
                [("average", DType::BF16)],
                OptimiserChain::new((Adam::new(0.1), Ema::new(0.5))),
            )),
            "1.average",
        ),
    ]
}

fn tensor(seed: u64, dtype: DType) -> Tensor {
    random(seed, &[40], dtype, &Device::Cpu)
}

fn gradients(seed: u64, dtype: DType) -> Grads {
    grads([Some(tensor(100 + seed, dtype))])
}

fn by_path(values: &Tensor) -> BTreeMap<String, Tensor> {
    [("0".to_string(), values.clone())].into()
}

fn states(optimiser: impl IntoOptimiser, x: &Tensor) -> (Vars, StateTree) {
    let x = model(std::slice::from_ref(x));
    let state = setup(optimiser, &x).expect("a state");
    (x, state)
}

fn copy(state: &StateTree, name: &str) -> Vec<f64> {
    values(&state.leaf("0").expect("the leaf").tensor(name).expect("a copy"))
}

/// `VarMap::load` after `setup`, for a rule that would put the parameter of `setup` back.
#[test]
fn weights_that_were_loaded_after_setup_are_noticed_at_the_first_step() {
    for (rule, slot) in copying() {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            for engine in engines() {
                let (x, mut state) = states(rule.clone(), &tensor(1, dtype));
                x["0"].set(&tensor(2, dtype)).expect("loaded weights");
                let before = snapshot(&x, &state);
                let step =
                    |state: &mut StateTree| Update::new(state).engine(engine).apply(&x, &gradients(0, dtype));
                let error = step(&mut state).expect_err("noticed");
                let (index, parameter, kept) = (0, values(&x["0"])[0], copy(&state, slot)[0]);
                let facts = [
                    format!("{slot:?}"),
                    format!("element {index}"),
                    format!("{parameter}"),
                    format!("{kept}"),
                ];
                is_kind(
                    &error,
                    ErrorKind::Changed,
                    &[
                        "parameter \"0\"",
                        "started as a copy of the parameter",
                        "refresh_masters",
                        "keep_masters",
                    ],
                );
                says(&error, &facts.each_ref().map(String::as_str));
                assert_same(&[snapshot(&x, &state)], &[before], &error);

                let mut kept = state.try_clone().expect("a copy");
                Update::new(&mut kept)
                    .engine(engine)
                    .keep_masters()
                    .apply(&x, &gradients(0, dtype))
                    .expect("on purpose");
            }
        }
    }
}

/// The copy of a rule would lead the parameter back to it. An average does not, and follows.
#[test]
fn new_weights_are_noticed_at_every_step() {
    for (rule, slot) in copying() {
        for (dtype, length) in [(DType::F32, 40), (DType::F64, 5000), (DType::BF16, 40)] {
            let values_of = |seed| random(seed, &[length], dtype, &Device::Cpu);
            let (x, mut state) = states(rule.clone(), &values_of(1));
            let mut step = |seed| update(&mut state, &x, &grads([Some(values_of(seed))]));
            for seed in 0..5 {
                step(seed).expect("an update");
            }
            x["0"].set(&values_of(2)).expect("new weights");
            if slot.ends_with("average") {
                step(7).expect("an update");
                continue;
            }
            let before = snapshot(&x, &state);
            let error = update(&mut state, &x, &grads([Some(values_of(7))])).expect_err("noticed");
            let says = [
                "parameter \"0\"",
                "outside of `update`",
                "refresh_masters",
                "keep_masters",
            ];
            is_kind(&error, ErrorKind::Changed, &says);
            assert_same(&[snapshot(&x, &state)], &[before], &error);
            // On purpose, once; the next ones are noticed again.
            let kept = Update::new(&mut state)
                .keep_masters()
                .apply(&x, &grads([Some(values_of(7))]));
            kept.expect("on purpose");
            update(&mut state, &x, &grads([Some(values_of(8))])).expect("an update");
            x["0"].set(&values_of(2)).expect("new weights");
            update(&mut state, &x, &grads([Some(values_of(9))])).expect_err("noticed");
            state.refresh_masters(&x).expect("new weights");
            update(&mut state, &x, &grads([Some(values_of(9))])).expect("an update");
        }
    }
}

/// What the crate itself writes is no change: averages that come and go, a step that was dropped when one
/// parameter had moved, the other ranks' parts.
#[test]
fn what_updates_write_is_no_new_weight() {
    let rule = || OptimiserChain::new((Adam::new(0.1), Lookahead::new(2), Ema::new(0.5)));
    let both = |seed| {
        grads([
            Some(tensor(seed, DType::F32)),
            Some(tensor(seed + 50, DType::F32)),
        ])
    };
    let run = move |setup: Setup| {
        let x = model(&[tensor(1, DType::F32), tensor(2, DType::F32)]);
        let mut state = setup.build(rule(), &x).expect("a state");
        for seed in 0..3 {
            update(&mut state, &x, &both(seed)).expect("an update");
            state
                .with_averages(&x, || Ok::<_, optimisers::Error>(()))
                .expect("averages");
        }
        (x, state)
    };
    on(2, move |world| drop(run(Setup::over(&world))));
    let (x, mut state) = run(Setup::default());
    let step = Update::new(&mut state).begin(&x).expect("a step");
    step.push("0", tensor(7, DType::F32)).expect("a push");
    drop(step);
    update(&mut state, &x, &both(8)).expect("an update");
    // Over ranks all notice, before anything is written.
    on(2, move |world| {
        let (x, mut state) = run(Setup::over(&world));
        x["1"].set(&tensor(9, DType::F32)).expect("new weights");
        let before = snapshot(&x, &state);
        let error = update(&mut state, &x, &both(9)).expect_err("noticed");
        says(&error, &["parameter \"1\"", "refresh_masters"]);
        assert_same(&[snapshot(&x, &state)], &[before], &error);
    });
}

/// What comes of `refresh_masters` and `set_masters` before the first step is what `setup` would have made.
#[test]
fn new_weights_before_the_first_step_are_those_of_a_fresh_setup() {
    for (rule, _) in copying() {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let (fresh, mut expected) = states(rule.clone(), &tensor(2, dtype));
            let (loaded, mut refreshed) = states(rule.clone(), &tensor(1, dtype));
            loaded["0"].set(&tensor(2, dtype)).expect("loaded weights");
            refreshed.refresh_masters(&loaded).expect("new weights");
            let (given, mut set) = states(rule.clone(), &tensor(1, dtype));
            set.set_masters(&given, &by_path(&tensor(2, dtype)))
                .expect("new weights");
            for call in 0..4 {
                let before = snapshot(&fresh, &expected);
                assert_same(
                    &[snapshot(&loaded, &refreshed)],
                    std::slice::from_ref(&before),
                    (rule.name(), call),
                );
                assert_same(&[snapshot(&given, &set)], &[before], (rule.name(), call));
                for (x, state) in [
                    (&fresh, &mut expected),
                    (&loaded, &mut refreshed),
                    (&given, &mut set),
                ] {
                    update(state, x, &gradients(call, dtype)).expect("an update");
                }
            }
        }
    }
}

/// The way to start a bf16 model from an f32 file: rounded parameters, `setup`, `set_masters`. Masters and
/// copies are those of an f32 run.
#[test]
fn copies_follow_masters_that_are_wider_than_the_parameter() {
    let wide = tensor(2, DType::F32);
    let narrow = wide.to_dtype(DType::BF16).expect("rounded");
    for (rule, slot) in copying() {
        let (fresh, mut expected) = states(rule.clone(), &wide);
        let wrapped: [Optimiser; 3] = [
            Optimiser::new(MixedPrecision::new(DType::F32, rule.clone())),
            Optimiser::new(SplitMaster::new(rule.clone())),
            Optimiser::new(Offload::new(MixedPrecision::new(DType::F32, rule.clone())).everywhere()),
        ];
        let mut others = wrapped.map(|optimiser| (optimiser.name(), states(optimiser, &narrow)));
        for (_, (x, state)) in &mut others {
            state.set_masters(x, &by_path(&wide)).expect("masters");
        }
        for call in 0..4 {
            for (name, (x, state)) in &others {
                let what = (name, slot, call);
                assert_eq!(
                    bits(&state.masters(x).expect("masters")["0"]),
                    bits(&fresh["0"]),
                    "{what:?}"
                );
                assert_eq!(copy(state, slot), copy(&expected, slot), "{what:?}");
            }
            update(&mut expected, &fresh, &gradients(call, DType::F32)).expect("an update");
            for (_, (x, state)) in &mut others {
                update(state, x, &gradients(call, DType::F32)).expect("an update");
            }
        }
    }
}

/// The recipe for a model that exists in f32: its weights become the masters of a low-precision copy, and the
/// masters become its weights. With tied weights, alone and over ranks, it ends with the bits of a training
/// of its own.
#[test]
fn a_precise_model_starts_and_ends_a_training_in_low_precision() {
    let tied = |dtype: DType| -> Vars {
        let shared = var(&tensor(1, dtype));
        [
            ("embedding", shared.clone()),
            ("head", shared),
            ("norm", var(&tensor(2, dtype))),
        ]
        .map(|(path, x)| (path.to_string(), x))
        .into()
    };
    let all = |model: &Vars| model.values().map(|x| bits(x)).collect::<Vec<_>>();
    let of_call = |call: u64| -> Grads {
        [("embedding", 3), ("head", 4), ("norm", 5)]
            .map(|(path, seed)| (path.to_string(), tensor(seed + 10 * call, DType::BF16)))
            .into()
    };
    let rule = || OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(1e-3)));
    let expected = tied(DType::F32);
    let mut state = setup(rule(), &expected).expect("a state");
    for call in 0..5 {
        update(&mut state, &expected, &of_call(call)).expect("an update");
    }
    for size in [1, 2, 3] {
        on(size, move |world| {
            let (precise, low) = (tied(DType::F32), tied(DType::BF16));
            let mut state = Setup::over(&world)
                .build(MixedPrecision::new(DType::F32, rule()), &low)
                .expect("a state");
            state
                .set_masters(&low, &trainables(&precise).expect("parameters"))
                .expect("masters");
            for call in 0..5 {
                update(&mut state, &low, &of_call(call)).expect("an update");
            }
            for (path, master) in state.masters(&low).expect("masters") {
                precise[&path].set(&master).expect("weights");
            }
            all(&precise)
        })
        .into_iter()
        .for_each(|precise| assert_eq!(precise, all(&expected), "{size} ranks"));
    }
}

/// In the middle of a training, too: an average starts anew, with no weight for what was before.
#[test]
fn copies_follow_at_any_step() {
    for (rule, slot) in copying() {
        for dtype in [DType::F32, DType::BF16] {
            for optimiser in [
                Optimiser::new(rule.clone()),
                Optimiser::new(MixedPrecision::new(DType::F32, rule.clone())),
                Optimiser::new(Offload::new(rule.clone()).everywhere()),
                Optimiser::new(Kahan::new(rule.clone())),
                Optimiser::new(StochasticRounding::new(1, rule.clone())),
            ] {
                let what = (optimiser.name(), dtype);
                let (x, mut state) = states(optimiser, &tensor(1, dtype));
                for call in 0..5 {
                    update(&mut state, &x, &gradients(call, dtype)).expect("an update");
                }
                x["0"].set(&tensor(2, dtype)).expect("loaded weights");
                state.refresh_masters(&x).expect("new weights");
                let stored = state
                    .leaf("0")
                    .and_then(|leaf| leaf.tensor(slot).ok())
                    .expect("a copy")
                    .dtype();
                assert_eq!(
                    copy(&state, slot),
                    values(&tensor(2, dtype).to_dtype(stored).expect("rounded")),
                    "{what:?}"
                );
                if let Some(average) = state.averages(&x).expect("averages").get("0") {
                    let near = |(a, b): (f64, f64)| (a - b).abs() <= 1e-2 * b.abs();
                    assert!(
                        values(average)
                            .into_iter()
                            .zip(values(&tensor(2, dtype)))
                            .all(near),
                        "{what:?}"
                    );
                }
                update(&mut state, &x, &gradients(7, dtype)).expect("an update");
                // The first weights after the new ones are the mean of themselves, however long the training
                // was.
                let restarts = rule.name().contains("UniformAverage") || rule.name() == "ScheduleFree";
                if restarts && dtype == DType::F32 {
                    let (average, weights) = (&state.averages(&x).expect("averages")["0"], &x["0"]);
                    let near = |(a, b): (f64, f64)| (a - b).abs() <= 1e-5;
                    assert!(
                        values(average).into_iter().zip(values(weights)).all(near),
                        "{what:?}"
                    );
                }
            }
        }
    }
}

/// Every optimiser there is, with and without copies: nothing moves, where nothing is new.
#[test]
fn refreshing_what_is_fresh_changes_nothing() {
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        for optimiser in optimisers_for(dtype) {
            let (x, mut state) = states(optimiser.clone(), &tensor(1, dtype));
            let before = snapshot(&x, &state);
            state.refresh_masters(&x).expect("masters");
            assert_same(&[snapshot(&x, &state)], &[before], optimiser.name());
        }
    }
}

/// Which tensors are copies does not depend on how the state came to be.
#[test]
fn a_state_knows_its_copies_wherever_it_comes_from() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    for (rule, slot) in copying() {
        let (x, state) = states(rule.clone(), &tensor(1, DType::F32));
        Checkpoint::new(&state).model(&x).save(&path).expect("a file");
        let (y, mut restored) = states(rule.clone(), &tensor(5, DType::F32));
        CheckpointFile::open(&path)
            .and_then(|file| file.restore_with_model(&mut restored, &y))
            .expect("a restored state");

        let z = model(&[tensor(1, DType::F32)]);
        let mut rebound = state.try_clone().expect("a copy");
        rebound.rebind(&z).expect("another model");

        let (w, mut replaced) = states(Adam::new(0.1), &tensor(1, DType::F32));
        replaced.all().replace(rule.clone(), &w).expect("another rule");

        for (x, mut state) in [(x, state), (y, restored), (z, rebound), (w, replaced)] {
            x["0"].set(&tensor(2, DType::F32)).expect("loaded weights");
            let error = update(&mut state, &x, &gradients(0, DType::F32)).expect_err("noticed");
            is_kind(
                &error,
                ErrorKind::Changed,
                &[&format!(
                    "as in {slot:?}, which the rule started as a copy of the parameter"
                )],
            );
            state.refresh_masters(&x).expect("new weights");
            assert_eq!(copy(&state, slot), {
                let stored = state
                    .leaf("0")
                    .and_then(|leaf| leaf.tensor(slot).ok())
                    .expect("a copy")
                    .dtype();
                values(&tensor(2, DType::F32).to_dtype(stored).expect("rounded"))
            });
            update(&mut state, &x, &gradients(0, DType::F32)).expect("an update");
        }
    }
}

/// A rule that is put into a running training starts from the master, not from the parameter, which is
/// rounded.
#[test]
fn a_new_rule_copies_the_master() {
    let wide = tensor(2, DType::F32);
    for (rule, slot) in copying() {
        let (x, mut state) = states(
            MixedPrecision::new(DType::F32, Adam::new(0.1)),
            &tensor(1, DType::BF16),
        );
        state.set_masters(&x, &by_path(&wide)).expect("masters");
        state
            .all()
            .replace(MixedPrecision::new(DType::F32, rule.clone()), &x)
            .expect("another rule");
        let stored = state
            .leaf("0")
            .and_then(|leaf| leaf.tensor(slot).ok())
            .expect("a copy")
            .dtype();
        assert_eq!(
            copy(&state, slot),
            values(&wide.to_dtype(stored).expect("rounded")),
            "{}",
            rule.name()
        );
        update(&mut state, &x, &gradients(0, DType::BF16)).expect("an update");
    }
}

/// One number among many, such as a row that was set to zero after `setup`.
#[test]
fn the_first_step_compares_every_element() {
    for device in devices() {
        let start = random(1, &[100_000], DType::F32, &device);
        let mut numbers = values(&start);
        numbers[77_777] = 7.0;
        let changed = Tensor::from_vec(numbers, 100_000, &device)
            .and_then(|x| x.to_dtype(DType::F32))
            .expect("a tensor");
        let gradient = grads([start.zeros_like().ok()]);
        for dtype in [DType::F32, DType::BF16] {
            let rule = OptimiserChain::new((Adam::new(0.1), Lookahead::new(6)));
            let optimisers: [Optimiser; 2] = [
                Optimiser::new(rule.clone()),
                Optimiser::new(MixedPrecision::new(DType::F64, rule)),
            ];
            for optimiser in optimisers {
                let (x, mut state) = states(optimiser, &start.to_dtype(dtype).expect("converted"));
                x["0"]
                    .set(&changed.to_dtype(dtype).expect("converted"))
                    .expect("one other weight");
                if device.is_cpu() {
                    says(
                        &update(&mut state, &x, &gradient).expect_err("noticed"),
                        &["element 77777", "is 7 "],
                    );
                }
                says(
                    &state.check_masters(&x).expect_err("noticed"),
                    &["element 77777", "is 7 "],
                );
                state.refresh_masters(&x).expect("new weights");
                update(&mut state, &x, &gradient).expect("an update");
            }
        }
    }
}

/// Copies in a dtype of their own are compared as they are stored.
#[test]
fn narrow_copies_raise_no_alarm() {
    let dtypes = [DType::F16, DType::BF16, DType::F32, DType::F64];
    for dtype in dtypes {
        for stored in dtypes {
            let rule = StoreAs::new(
                [("average", stored)],
                OptimiserChain::new((Adam::new(0.1), Ema::new(0.5))),
            );
            for optimiser in [
                Optimiser::new(rule.clone()),
                Optimiser::new(MixedPrecision::new(DType::F64, rule)),
            ] {
                let x = model(&[random(1, &[4000], dtype, &Device::Cpu)]);
                let mut state = setup(optimiser, &x).expect("a state");
                update(
                    &mut state,
                    &x,
                    &grads([Some(random(2, &[4000], dtype, &Device::Cpu))]),
                )
                .expect("an update");
            }
        }
    }
}
