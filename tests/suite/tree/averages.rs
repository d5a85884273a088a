//! Lookahead, averages of the weights, and evaluation with them.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Tensor, Var};
use optimisers::value::Value;
use optimisers::{
    AccumGrad, Adam, Arithmetic, Checkpoint, CheckpointFile, ClipNorm, Descent, Elementwise, Ema, Error,
    ErrorKind, Evaluation, FieldValue, Flow, Gradient, IntoOptimiser, Kahan, Lookahead, MixedPrecision,
    Momentum, Optimiser, OptimiserChain, Parameter, Rule, ScheduleFree, ScheduleFreeRAdam, ScheduleFreeSGD,
    Slot, SplitMaster, State, StateTree, UniformAverage, Update, Weights, hyper_parameters, range, setup,
    setup_with, trainables, update,
};

use support::common::{
    Vars, assert_same, bits, forget_ascent, grads, is_kind, logged, model, random, snapshot, values, var,
};

fn tensor(seed: u64, dtype: DType) -> Tensor {
    random(seed, &[5], dtype, &Device::Cpu)
}

fn all(x: &Vars) -> Vec<Vec<u64>> {
    x.values().map(|x| bits(x)).collect()
}

/// Averages come and go.
fn no_evaluation(state: &mut StateTree, x: &Vars) -> optimisers::Result<()> {
    state.with_averages(x, || Ok(()))
}

/// The parameter after each step of a rule, in f64.
fn trajectory(rule: impl Rule + Clone, steps: u64) -> Vec<Vec<f64>> {
    let x = model(&[tensor(1, DType::F64)]);
    let mut state = setup(rule, &x).expect("a state");
    let mut step = |call| {
        update(&mut state, &x, &grads([Some(tensor(10 + call, DType::F64))])).expect("an update");
        values(&x["0"])
    };
    (0..steps).map(&mut step).collect()
}

fn near(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{got:?} for {expected:?}");
    assert!(
        got.iter()
            .zip(expected)
            .all(|(got, expected)| (got - expected).abs() <= 1e-13),
        "{got:?} for {expected:?}"
    );
}

/// Two loops, as in the paper: k fast steps, then slow weights go a part of the way and the fast ones start
/// from them.
#[test]
fn lookahead_is_the_papers_two_loops() {
    let (k, alpha) = (3, 0.4);
    let rule = OptimiserChain::new((Descent::new(0.1), Lookahead { k, alpha }));
    let mut fast = values(&tensor(1, DType::F64));
    let mut slow = fast.clone();
    for (call, got) in (0..).zip(trajectory(rule, 8)) {
        let gradient = values(&tensor(10 + call, DType::F64));
        fast = fast.iter().zip(gradient).map(|(x, dx)| x - 0.1 * dx).collect();
        if (call + 1) % k == 0 {
            slow = slow
                .iter()
                .zip(&fast)
                .map(|(slow, fast)| slow + alpha * (fast - slow))
                .collect();
            fast.clone_from(&slow);
        }
        near(&got, &fast);
    }
}

fn averages(rule: impl Rule + Clone, steps: u64) -> Vec<f64> {
    let x = model(&[tensor(1, DType::F64)]);
    let mut state = setup(rule, &x).expect("a state");
    for call in 0..steps {
        update(&mut state, &x, &grads([Some(tensor(10 + call, DType::F64))])).expect("an update");
    }
    values(&state.averages(&x).expect("averages")["0"])
}

#[test]
fn averages_are_what_their_formulas_say() {
    let inner = Momentum::new(0.1);
    let path = trajectory(inner.clone(), 6);
    let start = values(&tensor(1, DType::F64));
    let weighted = |weights: &[f64]| -> Vec<f64> {
        let total: f64 = weights.iter().sum();
        (0..5)
            .map(|i| {
                weights
                    .iter()
                    .zip(&path)
                    .map(|(weight, x)| weight * x[i])
                    .sum::<f64>()
                    / total
            })
            .collect()
    };
    let delta = 0.8f64;
    let ages: Vec<f64> = (0..6).rev().map(|age| delta.powi(age)).collect();
    near(
        &averages(
            OptimiserChain::new((
                inner.clone(),
                Ema {
                    debias: true,
                    ..Ema::new(delta)
                },
            )),
            6,
        ),
        &weighted(&ages),
    );
    let plain = path.iter().fold(start, |average, x| {
        average
            .iter()
            .zip(x)
            .map(|(a, x)| delta * a + (1.0 - delta) * x)
            .collect()
    });
    near(
        &averages(OptimiserChain::new((inner.clone(), Ema::new(delta))), 6),
        &plain,
    );
    let late = Ema {
        debias: true,
        start: 4,
        ..Ema::new(delta)
    };
    near(
        &averages(OptimiserChain::new((inner.clone(), late)), 6),
        &weighted(&[0.0, 0.0, 0.0, 0.0, delta, 1.0]),
    );
    near(
        &averages(OptimiserChain::new((inner.clone(), UniformAverage::default())), 6),
        &weighted(&[1.0; 6]),
    );
    near(
        &averages(
            OptimiserChain::new((inner.clone(), UniformAverage { start: 4 })),
            6,
        ),
        &weighted(&[0.0, 0.0, 0.0, 0.0, 1.0, 1.0]),
    );
    near(
        &averages(OptimiserChain::new((inner, UniformAverage { start: 9 })), 6),
        &path[5],
    );
}

/// The averages of a model in which a parameter stays now and then, because it has no gradient or is frozen:
/// at each step they follow the recurrence, which every step of the model takes. Each step is resumed.
#[test]
fn a_parameter_that_stays_is_averaged_all_the_same() {
    let (delta, start) = (0.8, 3);
    /// How far the average goes in step t of the model.
    type Factor = fn(f64, u64) -> f64;
    let rules: [(Box<dyn Rule>, Factor); 5] = [
        (Box::new(Ema::new(delta)), |delta, _| 1.0 - delta),
        (
            Box::new(Ema {
                start,
                ..Ema::new(delta)
            }),
            |delta, t| if t > 3 { 1.0 - delta } else { 1.0 },
        ),
        (
            Box::new(Ema {
                debias: true,
                ..Ema::new(delta)
            }),
            |delta, t| (1.0 - delta) / (1.0 - delta.powi(t as i32)),
        ),
        (
            Box::new(Ema {
                debias: true,
                start,
                ..Ema::new(delta)
            }),
            |delta, t| match t {
                0..=3 => 1.0,
                t => (1.0 - delta) / (1.0 - delta.powi(t as i32 - 3)),
            },
        ),
        (Box::new(UniformAverage { start }), |_, t| {
            if t > 4 { 1.0 / (t - 3) as f64 } else { 1.0 }
        }),
    ];
    for (rule, factor) in rules {
        // Which parameter moves: all, the first, the second, both, the first by its freezing.
        for stays in [
            "111111111",
            "1000000000",
            "100101101",
            "0001",
            "0010011",
            "1f",
            "1ffff1ff11f",
            "ff10",
        ] {
            let x = model(&[tensor(1, DType::F64), tensor(2, DType::F64)]);
            let optimiser = || OptimiserChain::new((Descent::new(0.1), rule.clone()));
            let mut state = setup(optimiser(), &x).expect("a state");
            let mut average = values(&x["0"]);
            for (t, what) in (1..).zip(stays.chars()) {
                if what == 'f' {
                    state.at("0").expect("a leaf").freeze()
                } else {
                    state.at("0").expect("a leaf").thaw()
                }
                let own = (what != '0').then(|| tensor(10 + t, DType::F64));
                update(&mut state, &x, &grads([own, Some(tensor(30 + t, DType::F64))])).expect("an update");
                let factor = factor(delta, t);
                let new = values(&x["0"]);
                average = average
                    .iter()
                    .zip(&new)
                    .map(|(average, x)| average + factor * (x - average))
                    .collect();
                let (bytes, _) = Checkpoint::new(&state).to_bytes().expect("bytes");
                state = setup(optimiser(), &x).expect("a state");
                CheckpointFile::from_bytes("run", bytes)
                    .and_then(|file| file.restore(&mut state))
                    .expect("a restore");
                if state.leaf("0").is_some_and(|leaf| leaf.steps() > 0) {
                    near(&values(&state.averages(&x).expect("averages")["0"]), &average);
                }
            }
        }
    }
}

/// A call that is skipped, or collects, is no step of the model.
#[test]
fn calls_without_a_step_move_no_average() {
    let x = model(&[tensor(1, DType::F64), tensor(2, DType::F64)]);
    let rule = OptimiserChain::new((AccumGrad::new(2), Descent::new(0.1), Ema::new(0.5)));
    let mut state = setup(rule, &x).expect("a state");
    let both = |call: u64| {
        grads([
            Some(tensor(10 + call, DType::F64)),
            Some(tensor(20 + call, DType::F64)),
        ])
    };
    for call in 0..2 {
        update(&mut state, &x, &both(call)).expect("an update");
    }
    let average = || values(&state.averages(&x).expect("averages")["0"]);
    let before = average();
    let mut state = state.try_clone().expect("a copy");
    update(&mut state, &x, &grads([None, Some(tensor(3, DType::F64))])).expect("an update");
    let infinite = (tensor(3, DType::F64) / 0.0).expect("infinite");
    let skipped = Update::new(&mut state)
        .finite_only()
        .apply(&x, &grads([None, Some(infinite)]));
    assert!(skipped.expect("an update").skipped().is_some());
    assert_eq!(values(&state.averages(&x).expect("averages")["0"]), before);
    update(&mut state, &x, &grads([None, Some(tensor(4, DType::F64))])).expect("an update");
    let half: Vec<f64> = before
        .iter()
        .zip(values(&x["0"]))
        .map(|(a, x)| a + (x - a) * 0.5)
        .collect();
    near(&values(&state.averages(&x).expect("averages")["0"]), &half);
}

/// torch's `AveragedModel`, written out: the first call copies the model, every other one moves the average
/// towards it.
#[test]
fn an_average_that_starts_with_the_first_step_is_torchs() {
    let (inner, delta) = (Momentum::new(0.1), 0.8);
    let path = trajectory(inner.clone(), 6);
    for start in 1..=7 {
        let mut average = Vec::new();
        for x in path.iter().skip(start - 1) {
            average = match &average[..] {
                [] => x.clone(),
                average => average
                    .iter()
                    .zip(x)
                    .map(|(average, x)| delta * average + (1.0 - delta) * x)
                    .collect(),
            };
        }
        // Not begun yet, the average is the parameter.
        let expected = if start > path.len() { &path[5] } else { &average };
        let rule = Ema {
            start: start as u64,
            ..Ema::new(delta)
        };
        near(&averages(OptimiserChain::new((inner.clone(), rule)), 6), expected);
    }
}

#[test]
fn averaging_does_not_change_the_training() {
    let plain = trajectory(Adam::new(0.1), 6);
    assert_eq!(
        trajectory(
            OptimiserChain::new((Adam::new(0.1), Ema::new(0.9), UniformAverage::default())),
            6
        ),
        plain
    );
}

fn trained(optimiser: impl IntoOptimiser, dtype: DType) -> (Vars, StateTree) {
    let x = model(&[tensor(1, dtype), tensor(2, dtype)]);
    let mut state = setup(optimiser, &x).expect("a state");
    for call in 0..4 {
        update(
            &mut state,
            &x,
            &grads([Some(tensor(10 + call, dtype)), Some(tensor(20 + call, dtype))]),
        )
        .expect("an update");
    }
    (x, state)
}

/// In and out again leaves every bit, whatever keeps the parameter, and the average is that of the precise
/// numbers.
#[test]
fn averages_are_swapped_in_and_out_without_a_trace() {
    let rule = || {
        OptimiserChain::new((
            Adam::new(0.01),
            Ema {
                debias: true,
                ..Ema::new(0.5)
            },
        ))
    };
    let optimisers: [(Optimiser, DType); 5] = [
        (Optimiser::new(rule()), DType::F32),
        (Optimiser::new(rule()), DType::BF16),
        (
            Optimiser::new(MixedPrecision::new(DType::F32, rule())),
            DType::F16,
        ),
        (Optimiser::new(SplitMaster::new(rule())), DType::BF16),
        (Optimiser::new(Kahan::new(rule())), DType::BF16),
    ];
    for (optimiser, dtype) in optimisers {
        let (x, mut state) = trained(optimiser.clone(), dtype);
        let before = snapshot(&x, &state);
        let averages = state.averages(&x).expect("averages");
        assert_eq!(averages["0"].dtype(), DType::F32);
        let inside = state
            .with_averages(&x, || Ok::<_, Error>((values(&x["0"]), all(&x))))
            .expect("averages");
        assert_eq!(
            inside.0,
            values(&averages["0"].to_dtype(dtype).expect("rounded")),
            "{}",
            optimiser.name()
        );
        assert!(
            inside
                .1
                .iter()
                .zip(&before)
                .all(|(inside, (_, before))| inside != before)
        );
        assert_same(
            &[snapshot(&x, &state)],
            std::slice::from_ref(&before),
            optimiser.name(),
        );

        let error = state.with_averages(&x, || Err::<(), _>(Error::other("no data")));
        assert_eq!(error.expect_err("an error").to_string(), "no data");
        assert_same(
            &[snapshot(&x, &state)],
            std::slice::from_ref(&before),
            "after an error",
        );
        let panic = catch_unwind(AssertUnwindSafe(|| {
            state.with_averages(&x, || -> Result<(), Error> { panic!("on purpose") })
        }));
        assert!(panic.is_err());
        assert_same(&[snapshot(&x, &state)], &[before], "after a panic");
        update(
            &mut state,
            &x,
            &grads([Some(tensor(30, dtype)), Some(tensor(31, dtype))]),
        )
        .expect("an update");
    }
}

/// The error of an evaluation is of the program's own type.
#[test]
fn an_evaluation_returns_what_its_program_returns() {
    let (x, mut state) = trained(
        OptimiserChain::new((Descent::new(0.1), Ema::new(0.5))),
        DType::F32,
    );
    let mean = || x["0"].mean_all()?.to_scalar::<f32>();
    let of_candle: candle_core::Result<f32> = state.with_averages(&x, mean);
    let boxed: Result<f32, Box<dyn std::error::Error>> = state.with_averages(&x, || Ok(mean()?));
    let own = state.with_averages(&x, || -> optimisers::Result<_> { Ok(mean()?) });
    let averages = state.averages(&x).expect("averages");
    let expected = averages["0"]
        .mean_all()
        .and_then(|mean| mean.to_scalar::<f32>())
        .expect("a mean");
    assert_eq!(
        [
            of_candle.expect("a mean"),
            boxed.expect("a mean"),
            own.expect("a mean")
        ],
        [expected; 3]
    );
}

/// A storage that an evaluation has exchanged, which candle lets it do, is an error or a panic of its own;
/// the process goes on, and all others are back.
#[test]
fn a_variable_that_cannot_be_written_any_more_is_left() {
    /// Leaves one number.
    struct Shrink;
    impl InplaceOp1 for Shrink {
        fn name(&self) -> &'static str {
            "shrink"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
            *storage = CpuStorage::F32(vec![7.0]);
            Ok(())
        }
    }
    let (x, mut state) = trained(
        OptimiserChain::new((Descent::new(0.1), Ema::new(0.5))),
        DType::F32,
    );
    let before = bits(&x["0"]);
    let evaluate = || state.with_averages(&x, || x["1"].inplace_op1(&Shrink));
    let (outcome, log) = logged(|| catch_unwind(AssertUnwindSafe(evaluate)));
    assert!(!matches!(outcome, Ok(Ok(()))));
    assert!(
        log.iter().any(|line| line.contains("not back in the model")),
        "{log:?}"
    );
    assert_eq!(bits(&x["0"]), before);
}

#[test]
fn only_parameters_with_an_average_are_swapped() {
    let x = model(&[tensor(1, DType::F32), tensor(2, DType::F32)]);
    let plain = OptimiserChain::new((Descent::new(0.1), None::<Ema>));
    let averaging = OptimiserChain::new((Descent::new(0.1), Some(Ema::new(0.5))));
    let mut state = setup_with(&x, |path, _| {
        Some(if path == "0" {
            averaging.clone()
        } else {
            plain.clone()
        })
    })
    .expect("a state");
    update(
        &mut state,
        &x,
        &grads([Some(tensor(3, DType::F32)), Some(tensor(4, DType::F32))]),
    )
    .expect("an update");
    let before = all(&x);
    let inside = state.with_averages(&x, || Ok::<_, Error>(all(&x))).expect("one");
    assert_eq!((inside[0] == before[0], inside[1] == before[1]), (false, true));
    let mut without = setup(plain, &x).expect("a state");
    is_kind(
        &no_evaluation(&mut without, &x).expect_err("none"),
        ErrorKind::Unsupported,
        &["no parameter has an average"],
    );
}

/// What needs the parameters is refused while something else stands in their place, and what reads the
/// training's numbers finds them.
#[test]
fn other_weights_in_the_model_are_not_taken_for_its_parameters() {
    let rule = || OptimiserChain::new((Adam::new(0.1), Ema::new(0.5)));
    let optimisers: [(Optimiser, DType); 4] = [
        (Optimiser::new(rule()), DType::F32),
        (
            Optimiser::new(MixedPrecision::new(DType::F32, rule())),
            DType::BF16,
        ),
        (Optimiser::new(SplitMaster::new(rule())), DType::BF16),
        (Optimiser::new(ScheduleFree::new(0.1)), DType::F32),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    for (optimiser, dtype) in optimisers {
        let (x, mut state) = trained(optimiser.clone(), dtype);
        let before = snapshot(&x, &state);
        let masters = state.masters(&x).expect("masters");
        let averages = state.averages(&x).expect("averages");
        let file = folder
            .path()
            .join(format!("{}-masters.safetensors", optimiser.name()));
        state.save_masters(&x, &file).expect("a file");
        let saved = std::fs::read(&file).expect("the file");

        let gradients = grads([Some(tensor(30, dtype)), Some(tensor(31, dtype))]);
        forget_ascent(&mut state, &x, &gradients);
        let inside = snapshot(&x, &state);
        let same = |a: &BTreeMap<String, Tensor>, b: &BTreeMap<String, Tensor>| {
            a.iter().all(|(path, tensor)| bits(tensor) == bits(&b[path]))
        };
        assert!(
            same(&state.masters(&x).expect("masters"), &masters),
            "{}",
            optimiser.name()
        );
        assert!(
            same(&state.averages(&x).expect("averages"), &averages),
            "{}",
            optimiser.name()
        );
        state
            .check_masters(&x)
            .expect("masters of the parameters that were put aside");
        state.save_masters(&x, &file).expect("a file");
        assert_eq!(std::fs::read(&file).expect("the file"), saved);

        let copy = model(&[tensor(1, dtype), tensor(2, dtype)]);
        let refused = [
            update(&mut state, &x, &gradients).map(drop).expect_err("refused"),
            state.set_masters(&x, &masters).expect_err("refused"),
            state
                .set_masters(&x, &Weights::open([&file]).expect("weights"))
                .expect_err("refused"),
            state.refresh_masters(&x).expect_err("refused"),
            state.all().replace(rule(), &x).expect_err("refused"),
            state
                .at("1")
                .expect("a leaf")
                .replace(rule(), &x)
                .expect_err("refused"),
            state.rebind(&copy).expect_err("refused"),
            state.remove("0").expect_err("refused"),
            Update::functional(&state)
                .apply(&trainables(&x).expect("parameters"), &gradients)
                .expect_err("refused"),
            Checkpoint::new(&state).save(&file).expect_err("refused"),
            Checkpoint::new(&state)
                .model(&x)
                .save(&file)
                .expect_err("refused"),
        ];
        for error in refused {
            is_kind(
                &error,
                ErrorKind::Changed,
                &["other weights", "with_averages", "Sam::ascend"],
            );
        }
        assert_same(&[snapshot(&x, &state)], &[inside], "after the refusals");

        let mut grown = x.clone();
        grown.insert("new".to_string(), var(&tensor(9, dtype)));
        state.add(Descent::new(0.1), &grown).expect("a new leaf");
        state.rename("1", "one").expect("a new name");
        state.remove("new").expect("the new leaf");
        state.rename("one", "1").expect("the old name");
        no_evaluation(&mut state, &x).expect("parameters");
        assert_same(&[snapshot(&x, &state)], &[before], optimiser.name());
    }
}

/// x̄ of a schedule-free rule, which no state tensor has, is that of candle's operations on y and z, bit for
/// bit.
#[test]
fn averages_that_the_engine_computes() {
    let free = || ScheduleFree::new(0.1);
    let optimisers: [(Optimiser, DType); 6] = [
        (Optimiser::new(free()), DType::F32),
        (Optimiser::new(free()), DType::F64),
        (Optimiser::new(free()), DType::BF16),
        (
            Optimiser::new(MixedPrecision::new(
                DType::F32,
                OptimiserChain::new((ClipNorm::new(1.0), free())),
            )),
            DType::F16,
        ),
        (Optimiser::new(SplitMaster::new(free())), DType::BF16),
        (Optimiser::new(Kahan::new(free())), DType::BF16),
    ];
    for (optimiser, dtype) in optimisers {
        let x = model(&[
            random(1, &[7, 11], dtype, &Device::Cpu),
            random(2, &[70_001], dtype, &Device::Cpu),
        ]);
        let mut state = setup(optimiser.clone(), &x).expect("a state");
        for seed in [10, 20] {
            let gradient = |(at, x): (u64, &Var)| Some(random(seed + at, x.dims(), dtype, &Device::Cpu));
            update(&mut state, &x, &grads((0..).zip(x.values()).map(gradient))).expect("an update");
        }
        let (masters, averages) = (
            state.masters(&x).expect("masters"),
            state.averages(&x).expect("averages"),
        );
        for (path, y) in &masters {
            let leaf = state.leaf(path).expect("a leaf");
            let name = leaf
                .tensor_names()
                .into_iter()
                .find(|name| name.ends_with('z'))
                .expect("z");
            let z = leaf.tensor(&name).expect("a copy");
            let by_hand = || {
                let y = y.to_dtype(z.dtype())?;
                &y + ((&y - z)? * ((1.0 - 0.9) / 0.9))?
            };
            let by_hand = by_hand().expect("an average");
            assert_eq!(
                (averages[path].dtype(), bits(&averages[path])),
                (by_hand.dtype(), bits(&by_hand)),
                "{} {path}",
                optimiser.name()
            );
        }
    }
}

/// x̄ stays where it is if β changes, although it is computed from y, z and β.
#[test]
fn t60_a_schedule_free_mean_stays_if_beta_changes() {
    let rules: [(Box<dyn Rule>, FieldValue); 3] = [
        (Box::new(ScheduleFree::new(0.1)), (0.5, 0.999).into()),
        (Box::new(ScheduleFreeRAdam::new(0.1)), (0.5, 0.999).into()),
        (Box::new(ScheduleFreeSGD::new(0.1)), 0.5.into()),
    ];
    for (rule, beta) in rules {
        let name = rule.name();
        let x = model(&[tensor(1, DType::F64)]);
        let mut state = setup(rule, &x).expect("a state");
        let gradient = |call: u64| grads([Some(tensor(10 + call, DType::F64))]);
        for call in 0..8 {
            update(&mut state, &x, &gradient(call)).expect("an update");
        }
        let mean = |state: &StateTree| values(&state.averages(&x).expect("averages")["0"]);
        let before = mean(&state);
        state.all().adjust_field("beta", beta).expect("another β");
        assert_eq!(mean(&state), before, "{name}");

        // The next step weighs this mean and z.
        let weights = |state: &StateTree| state.leaf("0").expect("a leaf").numbers()[1].1;
        let weights_before = weights(&state);
        update(&mut state, &x, &gradient(8)).expect("an update");
        let z = values(&state.leaf("0").and_then(|leaf| leaf.tensor("z").ok()).expect("z"));
        let c = 1.0 - weights_before / weights(&state);
        let (after, y) = (mean(&state), values(&x["0"]));
        for (i, z) in z.into_iter().enumerate() {
            let next_mean = (1.0 - c) * before[i] + c * z;
            assert!(
                (after[i] - next_mean).abs() < 1e-12,
                "{name}: {}, {next_mean}",
                after[i]
            );
            assert!((y[i] - 0.5 * (next_mean + z)).abs() < 1e-12, "{name}");
        }
    }
}

hyper_parameters! {
    /// Evaluates with a state tensor that cannot take the parameter's place, or with half of it.
    struct Unlike {
        /// Whether its dtype is no float, in place of another shape.
        integers: bool = false => range::any,
        /// Whether it is halved.
        halved: bool = false => range::any,
    }
}

/// dx / 2
#[derive(Clone, Copy)]
struct Half;

impl Arithmetic for Half {
    type Slots<T> = [T; 0];

    fn step<V: Value>(self, _x: V, dx: V, _: &mut [V; 0]) -> V {
        dx * 0.5
    }
}

impl Rule for Unlike {
    fn init(&self, x: Parameter<'_>) -> optimisers::Result<State> {
        let (dims, dtype) = if self.integers {
            (x.shape(), DType::U32)
        } else {
            (&[1][..], DType::F32)
        };
        State::empty().with_tensor("unlike", &Tensor::zeros(dims, dtype, x.device())?)
    }

    fn apply<'a>(
        &'a self,
        _state: &'a mut State,
        _x: Parameter<'a>,
        dx: Gradient<'a>,
    ) -> optimisers::Result<Flow<'a>> {
        Ok(Flow::Step(dx))
    }

    fn evaluation<'s>(&self, state: &'s State) -> optimisers::Result<Option<Evaluation<'s>>> {
        let unlike = Evaluation::slot(state, "unlike");
        Ok(if self.halved {
            unlike.map(|unlike| unlike.map(Half))
        } else {
            unlike
        })
    }
}

#[test]
fn averages_that_cannot_take_the_parameters_place_are_refused() {
    for (integers, halved) in [(false, false), (false, true), (true, false), (true, true)] {
        let (x, mut state) = trained(Unlike { integers, halved }, DType::F32);
        let before = all(&x);
        let errors = [
            state.averages(&x).map(drop).expect_err("refused"),
            no_evaluation(&mut state, &x).expect_err("refused"),
        ];
        for error in errors {
            let (problem, facts) = match integers {
                true => (ErrorKind::Tensor, (Some("U32"), Some("F16, BF16, F32 or F64"))),
                false => (ErrorKind::Tensor, (Some("[1]"), Some("[5]"))),
            };
            assert_eq!((error.kind(), error.path()), (problem, Some("0")), "{error}");
            assert_eq!((error.got(), error.expected()), facts, "{error}");
        }
        assert_eq!(all(&x), before);
    }
}

/// An evaluation before the first step is of the parameters.
#[test]
fn before_the_first_step_there_is_nothing_to_exchange() {
    let x = model(&[tensor(1, DType::F32)]);
    let mut state = setup(OptimiserChain::new((Adam::new(0.1), Ema::new(0.5))), &x).expect("a state");
    x["0"].set(&tensor(2, DType::F32)).expect("loaded weights");
    let inside = state
        .with_averages(&x, || Ok::<_, Error>(all(&x)))
        .expect("none yet");
    assert_eq!(
        (inside, all(&x)),
        (
            vec![bits(&tensor(2, DType::F32))],
            vec![bits(&tensor(2, DType::F32))]
        )
    );
    assert!(state.averages(&x).expect("averages").is_empty());
}

hyper_parameters! {
    /// dx' = η·dx, with the mean of the gradients in a slot `average`: no weights to evaluate with.
    struct MeanGradient {
        /// The learning rate.
        eta: f64 = 0.1 => range::non_negative,
    }
}

impl Elementwise for MeanGradient {
    type Scalars = (f64, f64);
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::zeros("average")]
    }

    fn scalars(&self, t: u64) -> (f64, f64) {
        (self.eta, 1.0 / t as f64)
    }

    fn step<V: Value>((eta, part): (f64, f64), _x: V, dx: V, [average]: &mut [V; 1]) -> V {
        *average = *average + (dx - *average) * part;
        dx * eta
    }
}

/// The name of a tensor says nothing of whether it holds weights.
#[test]
fn a_tensor_called_average_is_not_taken_for_weights() {
    let (x, mut state) = trained(MeanGradient::default(), DType::F32);
    assert!(state.averages(&x).expect("averages").is_empty());
    is_kind(
        &no_evaluation(&mut state, &x).expect_err("none"),
        ErrorKind::Unsupported,
        &["no parameter has an average"],
    );
    // A rule that means something else by the name takes nothing over.
    let replaced = state.all().replace(Ema::new(0.5), &x).expect("another rule");
    assert_eq!(replaced[0].kept, [""; 0], "{replaced:?}");
    assert_eq!(
        values(
            &state
                .leaf("0")
                .and_then(|leaf| leaf.tensor("average").ok())
                .expect("an average")
        ),
        values(&x["0"])
    );
}
