//! Loss scaling, the finite check, and accumulation with both.

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    AccumGrad, Adam, Average, Checkpoint, CheckpointFile, ClipGlobalNorm, ClipGrad, ClipNorm, Descent,
    DynamicScale, Engine, ErrorKind, IntoOptimiser, LossScaler, MixedPrecision, OnOverflow, Optimiser,
    OptimiserChain, Outcome, StateTree, Status, Update, setup, setup_with, update,
};
use serde::Deserialize;

use support::common::{
    Grads, Snapshot, Vars, assert_same, bits, engines, grads, is_kind, model, not_finite, optimisers_for,
    snapshot, tensor, values,
};

fn of(values: &[f64], dtype: DType) -> Tensor {
    Tensor::new(values, &Device::Cpu)
        .and_then(|tensor| tensor.to_dtype(dtype))
        .expect("a tensor")
}

/// Marks a loss as scaled, for tests that make up the gradients.
fn scaled(scaler: &mut LossScaler) -> f64 {
    let loss = Tensor::new(1f32, &Device::Cpu).expect("a loss");
    scaler
        .scale(&loss)
        .and_then(|loss| Ok(loss.tensor().to_scalar::<f32>()?.into()))
        .expect("a scaled loss")
}

#[derive(Deserialize)]
struct Golden {
    loss_scaler: Vec<Sequence>,
}

#[derive(Deserialize)]
struct Sequence {
    args: Arguments,
    steps: Vec<GoldenStep>,
}

#[derive(Deserialize)]
struct Arguments {
    init_scale: f64,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u64,
}

#[derive(Deserialize)]
struct GoldenStep {
    overflow: bool,
    scale_before: f64,
    scale_after: f64,
    stepped: bool,
}

#[test]
fn the_scale_moves_as_torchs_grad_scaler_does() {
    let golden: Golden = serde_json::from_str(include_str!("../../golden/mixed.json")).expect("golden data");
    assert_eq!(golden.loss_scaler.len(), 3);
    for Sequence {
        args:
            Arguments {
                init_scale,
                growth_factor,
                backoff_factor,
                growth_interval,
            },
        steps,
    } in golden.loss_scaler
    {
        let dynamic = DynamicScale {
            initial: init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            ..DynamicScale::default()
        };
        let mut scaler = LossScaler::with(dynamic);
        let model = model(&[tensor(1, &[3], DType::F16)]);
        let mut state = setup(MixedPrecision::new(DType::F32, Adam::new(1e-3)), &model).expect("a state");
        for GoldenStep {
            overflow,
            scale_before,
            scale_after,
            stepped,
        } in steps
        {
            assert_eq!(scaler.current(), scale_before);
            assert_eq!(scaled(&mut scaler), scale_before);
            let gradient = of(
                &[0.5, if overflow { f64::INFINITY } else { 0.25 }, -1.0],
                DType::F16,
            );
            let outcome = Update::new(&mut state)
                .scaler(&mut scaler)
                .apply(&model, &grads([Some(gradient)]))
                .expect("an update");
            assert_eq!(outcome.status == Status::Stepped, stepped);
            assert_eq!(
                (outcome.status == not_finite("0"), outcome.loss_scale),
                (overflow, Some(scale_before))
            );
            assert_eq!(scaler.current(), scale_after);
        }
    }
}

fn run(
    optimiser: &(impl IntoOptimiser + Clone),
    dtype: DType,
    engine: Engine,
    scale: Option<f64>,
) -> (Vec<Snapshot>, Vec<Outcome>) {
    let model = model(&[
        tensor(1, &[4, 5], dtype),
        tensor(2, &[7], dtype),
        tensor(3, &[3, 0], dtype),
    ]);
    let mut state = setup(optimiser.clone(), &model).expect("a state");
    let mut scaler = LossScaler::fixed(scale.unwrap_or(1.0));
    let (mut snapshots, mut outcomes) = (Vec::new(), Vec::new());
    for call in 0..6u64 {
        let gradient = |seed: u64, shape: &[usize]| {
            (tensor(seed + 10 * call, shape, DType::F32) * scale.unwrap_or(1.0)).ok()
        };
        let gradients = grads([gradient(5, &[4, 5]), gradient(6, &[7]), gradient(7, &[3, 0])]);
        let update = Update::new(&mut state).engine(engine);
        let outcome = match scale {
            None => update.apply(&model, &gradients),
            Some(_) => {
                scaled(&mut scaler);
                update.scaler(&mut scaler).apply(&model, &gradients)
            }
        };
        let mut outcome = outcome.expect("an update");
        outcome.loss_scale = None;
        outcomes.push(outcome);
        snapshots.push(snapshot(&model, &state));
    }
    (snapshots, outcomes)
}

/// A power of two is divided out without a trace, before norms, clipping and every rule, and the reported
/// norm is without it.
#[test]
fn scaling_by_a_power_of_two_changes_no_bit() {
    for dtype in [DType::F16, DType::F32, DType::F64] {
        for optimiser in optimisers_for(dtype) {
            for engine in [Engine::Fused, Engine::Tensors] {
                let plain = run(&optimiser, dtype, engine, None);
                let scaled = run(&optimiser, dtype, engine, Some(1024.0));
                assert_same(&scaled.0, &plain.0, &optimiser);
                assert_eq!(scaled.1, plain.1);
            }
        }
    }
}

/// T19, T20: one number that is not finite, and nothing moves: no parameter, no state, no counter.
#[test]
fn an_overflow_leaves_everything_as_it_is() {
    for optimiser in optimisers_for(DType::F16) {
        let model = model(&[
            tensor(1, &[4], DType::F16),
            tensor(2, &[9], DType::F16),
            tensor(3, &[5], DType::F16),
        ]);
        let mut state = setup(optimiser.clone(), &model).expect("a state");
        let gradients = |seed| {
            [
                tensor(seed, &[4], DType::F16),
                tensor(seed + 1, &[9], DType::F16),
                tensor(seed + 2, &[5], DType::F16),
            ]
        };
        update(&mut state, &model, &grads(gradients(10).map(Some))).expect("an update");
        let before = snapshot(&model, &state);
        for bad in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            for engine in engines() {
                let mut scaler = LossScaler::dynamic();
                scaled(&mut scaler);
                let mut with_bad = grads(gradients(20).map(Some));
                with_bad.insert(
                    "1".into(),
                    of(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, bad], DType::F16),
                );
                let outcome = Update::new(&mut state)
                    .engine(engine)
                    .scaler(&mut scaler)
                    .apply(&model, &with_bad)
                    .expect("a skipped update");
                assert_eq!(outcome.status, not_finite("1"), "{optimiser:?}");
                assert_eq!(
                    (outcome.applied, outcome.accumulated, scaler.current()),
                    (0, 0, 32768.0)
                );
                assert_same(
                    &[snapshot(&model, &state)],
                    std::slice::from_ref(&before),
                    &optimiser,
                );
            }
        }
    }
}

/// A clamp makes infinity finite, so the check must see what is before it; and the square of a large number
/// is no overflow.
#[test]
fn the_check_sees_the_gradients_themselves() {
    let x = model(&[tensor(1, &[2], DType::F64)]);
    let step = |rule: Optimiser, gradient: [f64; 2]| {
        let mut state = setup(rule, &x).expect("a state");
        Update::new(&mut state)
            .finite_only()
            .apply(&x, &grads([Some(of(&gradient, DType::F64))]))
    };
    let clamped = || {
        Optimiser::new(OptimiserChain::new((
            ClipGrad::new(1.0),
            ClipGlobalNorm::new(1.0),
            Descent::new(0.1),
        )))
    };
    assert_eq!(
        step(clamped(), [f64::INFINITY, 1.0]).expect("skipped").status,
        not_finite("0")
    );
    assert_eq!(
        step(clamped(), [1e300, 1.0]).expect("clamped").status,
        Status::Stepped
    );
    let global = || Optimiser::new(OptimiserChain::new((ClipGlobalNorm::new(1.0), Descent::new(0.1))));
    assert_eq!(
        step(global(), [f64::NAN, 1.0]).expect("skipped").status,
        not_finite("0")
    );
    let error = step(global(), [1e300, 1.0]).expect_err("a norm that is not finite");
    is_kind(
        &error,
        ErrorKind::NotFinite,
        &["\"0\": the 2-norm of its gradient is inf"],
    );
    let largest = Optimiser::new(OptimiserChain::new((
        ClipNorm {
            p: f64::INFINITY,
            ..ClipNorm::new(1.0)
        },
        Descent::new(0.1),
    )));
    assert_eq!(
        step(largest, [1e300, 1.0]).expect("clipped").status,
        Status::Stepped
    );
}

/// T8: 65536 times an f16 loss is no f16 number.
#[test]
fn t8_a_half_precision_loss_is_widened_before_it_is_scaled() {
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        let loss = of(&[3.0], dtype);
        let scaled = LossScaler::dynamic().scale(&loss).expect("a scaled loss");
        let scaled = scaled.tensor();
        assert_eq!(
            scaled.dtype(),
            if dtype == DType::F64 {
                DType::F64
            } else {
                DType::F32
            }
        );
        assert_eq!(values(scaled), [3.0 * 65536.0]);
    }
}

/// T10, T12: gradients are divided before they are clipped, by the scale that the loss was multiplied by,
/// also when the scale grows in this very call.
#[test]
fn t10_t12_gradients_are_unscaled_by_their_own_scale_and_then_clipped() {
    let x = model(&[of(&[0.0, 0.0], DType::F32)]);
    let mut state = setup(
        OptimiserChain::new((ClipGlobalNorm::new(1.0), Descent::new(1.0))),
        &x,
    )
    .expect("a state");
    let mut scaler = LossScaler::with(DynamicScale {
        initial: 8.0,
        growth_interval: 1,
        ..DynamicScale::default()
    });
    for (scale, gradient, norm, moved) in [
        (8.0, [3.0, 4.0], 5.0, [-0.6, -0.8]),
        (16.0, [0.3, 0.4], 0.5, [-0.3, -0.4]),
    ] {
        let before = values(&x["0"]);
        assert_eq!(scaled(&mut scaler), scale);
        let gradient = of(&gradient.map(|g| g * scale), DType::F32);
        let outcome = Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&x, &grads([Some(gradient)]))
            .expect("an update");
        assert!((outcome.global_norm.expect("a norm") - norm).abs() < 1e-6);
        for ((after, before), moved) in values(&x["0"]).iter().zip(before).zip(moved) {
            assert!((after - before - moved).abs() < 1e-6, "{after} from {before}");
        }
    }
}

fn collecting(n: u64) -> OptimiserChain<(AccumGrad, Descent)> {
    OptimiserChain::new((AccumGrad::new(n), Descent::new(1.0)))
}

/// One micro-batch of a window of two elements each.
fn micro(scaler: &mut LossScaler, state: &mut StateTree, x: &Vars, gradient: f64) -> Status {
    let scale = scaled(scaler);
    let gradient = of(&[gradient * scale], DType::F32);
    Update::new(state)
        .scaler(scaler)
        .apply(x, &grads([Some(gradient)]))
        .expect("an update")
        .status
}

/// T11, T16: micro-gradients with different scales, and one that overflows, which does not count.
#[test]
fn t11_t16_a_window_takes_each_gradient_by_its_own_scale_and_does_not_count_an_overflow() {
    let x = model(&[of(&[0.0], DType::F32)]);
    let mut state = setup(collecting(3), &x).expect("a state");
    let mut scaler = LossScaler::with(DynamicScale {
        initial: 1024.0,
        growth_interval: 1,
        ..DynamicScale::default()
    });
    assert_eq!(micro(&mut scaler, &mut state, &x, 3.0), Status::Accumulated);
    assert_eq!(scaler.current(), 1024.0, "the scale grows only with steps");
    assert_eq!(micro(&mut scaler, &mut state, &x, f64::INFINITY), not_finite("0"));
    assert_eq!(scaler.current(), 512.0);
    assert_eq!(micro(&mut scaler, &mut state, &x, 6.0), Status::Accumulated);
    assert_eq!(micro(&mut scaler, &mut state, &x, 9.0), Status::Stepped);
    assert_eq!(scaler.current(), 1024.0);
    assert_eq!(values(&x["0"]), [-6.0]);
}

#[test]
fn an_overflow_can_end_the_window() {
    for wrapped in [false, true] {
        let x = model(&[of(&[0.0], DType::BF16)]);
        let rule = collecting(2);
        let mut state = match wrapped {
            true => setup(
                MixedPrecision::new(DType::F32, OptimiserChain::new((Some(rule),))),
                &x,
            ),
            false => setup(rule, &x),
        }
        .expect("a state");
        let mut scaler = LossScaler::fixed(4.0).on_overflow(OnOverflow::EndWindow);
        for gradient in [100.0, f64::NAN, 2.0] {
            micro(&mut scaler, &mut state, &x, gradient);
        }
        assert_eq!(values(&x["0"]), [0.0]);
        assert_eq!(micro(&mut scaler, &mut state, &x, 4.0), Status::Stepped);
        assert_eq!(values(&x["0"]), [-3.0]);
    }
}

/// T24, T25: hysteresis and floor, as in DeepSpeed; an overflow is never silent.
#[test]
fn t24_t25_hysteresis_and_floor() {
    let x = model(&[of(&[0.0], DType::F32)]);
    let mut state = setup(Descent::new(1.0), &x).expect("a state");
    let dynamic = DynamicScale {
        initial: 4.0,
        growth_interval: 2,
        hysteresis: 2,
        floor: 2.0,
        ..DynamicScale::default()
    };
    let mut scaler = LossScaler::with(dynamic);
    let mut scales = Vec::new();
    for good in [false, false, true, true, false, false] {
        micro(&mut scaler, &mut state, &x, if good { 1.0 } else { f64::NAN });
        scales.push(scaler.current());
    }
    // The first overflow is borne, the second halves; two good steps double and make it bear one again.
    assert_eq!(scales, [4.0, 2.0, 2.0, 4.0, 4.0, 2.0]);
}

#[test]
fn an_overflow_at_the_floor_is_an_error() {
    let x = model(&[of(&[1.0], DType::F32)]);
    let mut state = setup(Descent::new(1.0), &x).expect("a state");
    let mut scaler = LossScaler::with(DynamicScale {
        initial: 2.0,
        floor: 1.0,
        ..DynamicScale::default()
    });
    assert_eq!(micro(&mut scaler, &mut state, &x, f64::NAN), not_finite("0"));
    scaled(&mut scaler);
    let error = Update::new(&mut state)
        .scaler(&mut scaler)
        .apply(&x, &grads([Some(of(&[f64::NAN], DType::F32))]))
        .expect_err("at the floor");
    is_kind(&error, ErrorKind::LossScale, &["at its floor of 1"]);
    assert_eq!((error.path(), error.got()), (Some("0"), Some("1")), "{error}");
    assert_eq!((values(&x["0"]), scaler.current()), (vec![1.0], 1.0));
}

#[test]
fn bad_scales_and_unscaled_losses_are_refused() {
    let x = model(&[of(&[1.0], DType::F32)]);
    let mut state = setup(Descent::new(1.0), &x).expect("a state");
    let gradient = || grads([Some(of(&[1.0], DType::F32))]);
    let loss = Tensor::new(1f32, &Device::Cpu).expect("a loss");
    let default = DynamicScale::default();
    let bad = [
        ("scale", LossScaler::fixed(0.0)),
        ("scale", LossScaler::fixed(-1.0)),
        ("scale", LossScaler::fixed(f64::NAN)),
        ("scale", LossScaler::fixed(f64::INFINITY)),
        (
            "growth_factor",
            LossScaler::with(DynamicScale {
                growth_factor: 0.5,
                ..default
            }),
        ),
        (
            "backoff_factor",
            LossScaler::with(DynamicScale {
                backoff_factor: 0.0,
                ..default
            }),
        ),
        (
            "backoff_factor",
            LossScaler::with(DynamicScale {
                backoff_factor: 2.0,
                ..default
            }),
        ),
        (
            "growth_interval",
            LossScaler::with(DynamicScale {
                growth_interval: 0,
                ..default
            }),
        ),
        (
            "hysteresis",
            LossScaler::with(DynamicScale {
                hysteresis: 0,
                ..default
            }),
        ),
        (
            "floor",
            LossScaler::with(DynamicScale {
                floor: f64::NAN,
                ..default
            }),
        ),
    ];
    for (name, mut scaler) in bad {
        let scaling = scaler.scale(&loss).expect_err("refused");
        let updating = Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&x, &gradient())
            .expect_err("refused");
        for error in [scaling, updating] {
            is_kind(&error, ErrorKind::Argument, &[&format!("LossScaler: {name} is ")]);
        }
    }
    let mut scaler = LossScaler::fixed(2.0);
    let unscaled = ["a loss that was not scaled"];
    is_kind(
        &Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&x, &gradient())
            .expect_err("no loss"),
        ErrorKind::LossScale,
        &unscaled,
    );
    scaled(&mut scaler);
    Update::new(&mut state)
        .scaler(&mut scaler)
        .apply(&x, &gradient())
        .expect("an update");
    is_kind(
        &Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&x, &gradient())
            .expect_err("one loss, one update"),
        ErrorKind::LossScale,
        &unscaled,
    );
    assert_eq!(values(&x["0"]), [0.5]);
}

#[test]
fn accumulated_gradients_become_a_mean_a_sum_or_a_weighted_mean() {
    let gradients = [(1.0, 1), (4.0, 2), (7.0, 5)];
    for (average, expected) in [
        (Average::Mean, 4.0),
        (Average::Sum, 12.0),
        (Average::Weighted, 44.0 / 8.0),
    ] {
        for dtype in [DType::BF16, DType::F64] {
            let x = model(&[of(&[0.0], dtype)]);
            let rule = OptimiserChain::new((
                AccumGrad {
                    average,
                    ..AccumGrad::new(3)
                },
                Descent::new(1.0),
            ));
            let mut state = setup(MixedPrecision::new(DType::F64, rule), &x).expect("a state");
            for _ in 0..2 {
                for (gradient, weight) in gradients {
                    let gradients = grads([Some(of(&[gradient], dtype))]);
                    Update::new(&mut state)
                        .weight(weight)
                        .apply(&x, &gradients)
                        .expect("an update");
                }
            }
            assert_eq!(values(&x["0"]), [-2.0 * expected], "{average:?}");
        }
    }
}

/// A weighted mean over micro-batches is the mean over all tokens, also where a parameter received no
/// gradient for some.
#[test]
fn a_missing_gradient_has_no_weight() {
    let x = model(&[of(&[0.0], DType::F64), of(&[0.0], DType::F64)]);
    let rule = OptimiserChain::new((
        AccumGrad {
            average: Average::Weighted,
            ..AccumGrad::new(2)
        },
        Descent::new(1.0),
    ));
    let mut state = setup(rule, &x).expect("a state");
    let both = grads([Some(of(&[1.0], DType::F64)), Some(of(&[5.0], DType::F64))]);
    let one: Grads = grads([Some(of(&[4.0], DType::F64))]);
    Update::new(&mut state)
        .weight(1)
        .apply(&x, &both)
        .expect("an update");
    Update::new(&mut state)
        .weight(2)
        .apply(&x, &one)
        .expect("an update");
    assert_eq!((values(&x["0"]), values(&x["1"])), (vec![-3.0], vec![-5.0]));
}

/// Parts of a model with norms of their own.
#[test]
fn groups_are_clipped_apart() {
    let x = model(&[
        of(&[0.0], DType::F64),
        of(&[0.0], DType::F64),
        of(&[0.0], DType::F64),
    ]);
    let rule = |group, omega| {
        OptimiserChain::new((
            ClipGlobalNorm {
                group,
                ..ClipGlobalNorm::new(omega)
            },
            Descent::new(1.0),
        ))
    };
    let mut state = setup_with(&x, |path, _| {
        Some(if path == "2" { rule(7, 1.0) } else { rule(3, 2.5) })
    })
    .expect("a state");
    let gradients = grads([3.0, 4.0, 10.0].map(|g| Some(of(&[g], DType::F64))));
    let outcome = update(&mut state, &x, &gradients).expect("an update");
    assert_eq!(
        (outcome.global_norm, outcome.group_norms),
        (Some(5.0), vec![(3, 5.0), (7, 10.0)])
    );
    assert_eq!(
        x.values().flat_map(|x: &Var| values(x)).collect::<Vec<_>>(),
        [-1.5, -2.0, -1.0]
    );
}

/// After an accumulation the norm is that of the mean, and is checked with it.
#[test]
fn the_norm_of_the_mean_is_clipped() {
    let x = model(&[of(&[0.0, 0.0], DType::F32)]);
    let mut state = setup(
        OptimiserChain::new((AccumGrad::new(2), ClipGlobalNorm::new(1.0), Descent::new(1.0))),
        &x,
    )
    .expect("a state");
    let mut scaler = LossScaler::fixed(64.0);
    for (gradient, norm) in [([6.0, 0.0], None), ([0.0, 8.0], Some(5.0))] {
        scaled(&mut scaler);
        let gradient = of(&gradient.map(|g| 64.0 * g), DType::F32);
        let outcome = Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&x, &grads([Some(gradient)]))
            .expect("an update");
        assert_eq!(outcome.global_norm, norm);
    }
    assert_eq!(
        bits(&x["0"]),
        bits(&of(&[-0.6f32 as f64, -0.8f32 as f64], DType::F32))
    );
}

/// Scale, good steps and tolerance go on after a restart as without it.
#[test]
fn a_scaler_is_saved_with_the_state() {
    let x = model(&[of(&[1.0], DType::F32)]);
    let mut state = setup(Descent::new(0.01), &x).expect("a state");
    let mut scaler = LossScaler::with(DynamicScale {
        initial: 64.0,
        growth_interval: 3,
        hysteresis: 2,
        ..DynamicScale::default()
    });
    let outcomes = [1.0, f64::NAN, 1.0, f64::NAN, 1.0];
    for gradient in outcomes {
        micro(&mut scaler, &mut state, &x, gradient);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    Checkpoint::new(&state)
        .model(&x)
        .scaler(&scaler)
        .save(&path)
        .expect("a file");

    let mut restored = CheckpointFile::open(&path)
        .and_then(|file| file.scaler())
        .expect("a file")
        .expect("a scaler");
    assert_eq!(restored, scaler);
    let go_on = |scaler: &mut LossScaler| {
        let x = model(&[of(&[1.0], DType::F32)]);
        let mut state = setup(Descent::new(0.01), &x).expect("a state");
        [1.0, 1.0, 1.0, f64::NAN, f64::NAN].map(|gradient| {
            micro(scaler, &mut state, &x, gradient);
            scaler.current()
        })
    };
    assert_eq!(go_on(&mut restored), go_on(&mut scaler));
    Checkpoint::new(&state).save(&path).expect("a file");
    assert_eq!(
        CheckpointFile::open(&path)
            .and_then(|file| file.scaler())
            .expect("a file"),
        None
    );
}
