//! Known traps of low precision, each with the test that it cannot occur here. Others are in `traps`,
//! `scaling`, `masters` and `narrow`.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, Adam, AdamW, Checkpoint, CheckpointFile, ClipGlobalNorm, Descent, ErrorKind, LossScaler,
    MixedPrecision, OptimiserChain, Parameter, StateTree, Status, Update, setup, setup_with, update,
};

use support::common::{Vars, grads, model, not_finite, values};

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

fn full(value: f64, count: usize, dtype: DType) -> Tensor {
    Tensor::full(value, count, &Device::Cpu)
        .and_then(|tensor| tensor.to_dtype(dtype))
        .expect("a tensor")
}

fn moment(state: &StateTree, name: &str) -> f64 {
    let leaf = state.leaves().next().expect("a leaf");
    values(&leaf.tensor(name).expect("a copy"))[0]
}

/// 1e-8 is 0 in f16, and a gradient of zeros would be divided by it.
#[test]
fn t4_epsilon_is_not_lost_in_f16() {
    for dtype in HALVES {
        let x = model(&[full(1.0, 2, dtype)]);
        let mut state = setup(
            OptimiserChain::new((
                Adam::default(),
                AdamW {
                    lambda: 0.0,
                    ..AdamW::default()
                },
            )),
            &x,
        )
        .expect("a state");
        update(&mut state, &x, &grads([Some(full(0.0, 2, dtype))])).expect("an update");
        assert_eq!(values(&x["0"]), [1.0; 2]);
    }
}

/// (1 - β₂)·g² of a gradient of 1e-3 is below all f16 numbers.
#[test]
fn t6_small_second_moments_are_kept() {
    for dtype in HALVES {
        let gradient = full(1e-3, 1, dtype);
        let x = model(&[full(1.0, 1, dtype)]);
        let mut state = setup(Adam::default(), &x).expect("a state");
        update(&mut state, &x, &grads([Some(gradient.clone())])).expect("an update");
        let expected = 1e-3 * values(&gradient)[0].powi(2);
        assert!((moment(&state, "v") / expected - 1.0).abs() < 1e-6);
    }
}

/// β₂ᵗ is 1 in bf16 for a long time, and 1 - β₂ᵗ is a divisor.
#[test]
fn t7_bias_corrections_are_taken_in_f64() {
    for dtype in HALVES {
        let x = model(&[full(1.0, 1, dtype)]);
        let rule = Adam {
            eta: 0.25,
            beta: (0.9, 0.9999),
            epsilon: 0.0,
            ..Adam::default()
        };
        let mut state = setup(MixedPrecision::new(DType::F32, rule), &x).expect("a state");
        for step in 1..=3 {
            update(&mut state, &x, &grads([Some(full(0.5, 1, dtype))])).expect("an update");
            // With a constant gradient both moments, corrected, give a step of η.
            assert!(
                (moment(&state, "master") - (1.0 - 0.25 * f64::from(step))).abs() < 1e-4,
                "{}",
                moment(&state, "master")
            );
        }
    }
}

/// A sum of ones stands still at 256 in bf16 and at 2048 in f16; squares of 300 are infinite in f16.
#[test]
fn t9_norms_are_taken_in_f64() {
    for (dtype, value, count) in [
        (DType::BF16, 1.0, 10_000),
        (DType::F16, 1.0, 10_000),
        (DType::F16, 300.0, 400),
    ] {
        let x = model(&[full(0.0, count, dtype)]);
        let mut state = setup(
            OptimiserChain::new((ClipGlobalNorm::new(1e9), Descent::new(0.0))),
            &x,
        )
        .expect("a state");
        let outcome = update(&mut state, &x, &grads([Some(full(value, count, dtype))])).expect("an update");
        assert_eq!(outcome.global_norm, Some(value * (count as f64).sqrt()));
    }
}

/// One scale and one decision for all parameters, whatever rules they have: no group steps while another is
/// skipped.
#[test]
fn t13_groups_of_parameters_step_or_skip_together() {
    let x = model(&[full(1.0, 2, DType::F16), full(1.0, 3, DType::F16)]);
    let choose = |path: &str, _: Parameter<'_>| {
        Some(MixedPrecision::new(
            DType::F32,
            Descent::new(if path == "0" { 0.5 } else { 0.25 }),
        ))
    };
    let mut state = setup_with(&x, choose).expect("a state");
    let mut scaler = LossScaler::dynamic();
    let loss = Tensor::new(1f32, &Device::Cpu).expect("a loss");
    for (second, status, left) in [
        (f64::INFINITY, not_finite("1"), 1.0),
        (32768.0, Status::Stepped, 0.5),
    ] {
        let _ = scaler.scale(&loss).expect("a loss");
        let gradients = grads([
            Some(full(32768.0, 2, DType::F16)),
            Some(full(second, 3, DType::F16)),
        ]);
        assert_eq!(
            Update::new(&mut state)
                .scaler(&mut scaler)
                .apply(&x, &gradients)
                .expect("an update")
                .status,
            status
        );
        assert_eq!(values(&x["0"])[0], left);
    }
    assert_eq!(values(&x["1"])[0], 0.75);
}

/// A rule after `AccumGrad` sees the mean: four micro-gradients whose mean is short are not clipped one by
/// one.
#[test]
fn t15_the_mean_is_clipped_and_not_its_parts() {
    let x = model(&[full(0.0, 1, DType::F32)]);
    let mut state = setup(
        OptimiserChain::new((AccumGrad::new(4), ClipGlobalNorm::new(1.0), Descent::new(1.0))),
        &x,
    )
    .expect("a state");
    for gradient in [100.0, -100.0, 2.0, 0.0] {
        update(&mut state, &x, &grads([Some(full(gradient, 1, DType::F32))])).expect("an update");
    }
    assert_eq!(values(&x["0"]), [-0.5]);
}

/// f32 moments of a bf16 parameter come back as f32, and a file of another dtype is not taken over silently.
#[test]
fn t28_dtypes_do_not_drift_on_load() {
    let (narrow, wide) = (
        model(&[full(1.0, 2, DType::BF16)]),
        model(&[full(1.0, 2, DType::F32)]),
    );
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state.safetensors");
    let mut state = setup(Adam::default(), &narrow).expect("a state");
    update(
        &mut state,
        &narrow,
        &grads([Some(full(1.0 / 3.0, 2, DType::F32))]),
    )
    .expect("an update");
    Checkpoint::new(&state)
        .model(&narrow)
        .save(&path)
        .expect("a file");
    let mut loaded = setup(Adam::default(), &narrow).expect("a state");
    CheckpointFile::open(&path)
        .and_then(|file| file.restore(&mut loaded))
        .expect("the state");
    assert_eq!(moment(&loaded, "m"), f64::from(0.1f32 * (1.0f32 / 3.0)));
    let mut other = setup(Adam::default(), &wide).expect("a state");
    let refused = CheckpointFile::open(&path).and_then(|file| file.restore_with_model(&mut other, &wide));
    let refused = refused.expect_err("another dtype");
    assert_eq!(
        (refused.kind(), refused.path()),
        (ErrorKind::Tensor, Some("0")),
        "{refused}"
    );
    assert_eq!(
        (refused.got(), refused.expected(), refused.file()),
        (Some("BF16"), Some("F32"), Some(&*path)),
        "{refused}"
    );
}

/// Moments have digits that the parameter's dtype has no room for.
#[test]
fn t30_moments_are_not_stored_through_the_parameters_dtype() {
    for dtype in HALVES {
        let x: Vars = model(&[full(1.0, 1, dtype)]);
        for mixed in [false, true] {
            let mut state = match mixed {
                true => setup(MixedPrecision::new(DType::F32, Adam::default()), &x),
                false => setup(Adam::default(), &x),
            }
            .expect("a state");
            update(&mut state, &x, &grads([Some(full(1.0, 1, DType::F32))])).expect("an update");
            assert_eq!(moment(&state, "v"), f64::from((1.0 - 0.999f64) as f32));
        }
    }
}
