//! `Kahan`: what rounding loses is added to the next step.

use candle_core::{DType, Device, Tensor};
use optimisers::{Descent, ErrorKind, IntoOptimiser, Kahan, StateTree, Update, setup, update};

use support::common::{Grads, constant, engines, grads, is_kind, model, snapshot, values};

/// Ten thousand steps of which each is lost in bf16, and too small for f16 in part: the compensated parameter
/// goes with the f32 run.
#[test]
fn kahan_follows_f32_where_plain_rounding_stands_still() {
    fn run(optimiser: impl IntoOptimiser, dtype: DType) -> Vec<f64> {
        let x = model(&[constant(1.0, 4, dtype)]);
        let mut state = setup(optimiser, &x).expect("a state");
        for _ in 0..10_000 {
            let gradient = Tensor::new(&[1.0, 0.3, -0.7, 0.01f64], &Device::Cpu)
                .and_then(|g| g.to_dtype(DType::F32))
                .ok();
            update(&mut state, &x, &grads([gradient])).expect("an update");
        }
        values(&x["0"])
    }
    let rule = Descent::new(5e-5);
    let exact = run(rule.clone(), DType::F32);
    for (dtype, digit) in [(DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
        let kahan = run(Kahan::new(rule.clone()), dtype);
        for (kahan, exact) in kahan.iter().zip(&exact) {
            // The parameter is rounded once. The compensation is at most half a digit of it and is rounded in
            // every step, by at most half a digit of that.
            let bound = digit * exact.abs() + 10_000.0 * 0.5 * digit * digit;
            assert!((kahan - exact).abs() <= bound, "{dtype:?}: {kahan} for {exact}");
        }
        assert_eq!(
            run(rule.clone(), dtype),
            [1.0; 4],
            "without compensation nothing moves"
        );
    }
}

/// What an infinite sum has lost cannot be made up for; it does not become NaN.
#[test]
fn an_infinite_parameter_under_kahan_stays_infinite() {
    for engine in engines() {
        for (dtype, largest) in [(DType::F16, 65504.0), (DType::BF16, 3.3895e38)] {
            let x = Tensor::new(&[largest, -largest, 1.0], &Device::Cpu)
                .and_then(|x| x.to_dtype(dtype))
                .unwrap();
            let model = model(&[x]);
            let mut state = setup(Kahan::new(Descent::new(1.0)), &model).unwrap();
            let up = Tensor::new(&[-largest, largest, 0.5], &Device::Cpu)
                .and_then(|dx| dx.to_dtype(DType::F64))
                .unwrap();
            let down = up.neg().unwrap();
            for gradient in [&up, &down, &down] {
                Update::new(&mut state)
                    .engine(engine)
                    .apply(&model, &grads([Some(gradient.clone())]))
                    .unwrap();
                let now = values(&model["0"]);
                assert_eq!(
                    now[..2],
                    [f64::INFINITY, f64::NEG_INFINITY],
                    "{dtype:?} {engine:?}"
                );
                assert!(now[2].is_finite());
            }
        }
    }
}

/// What the old weights have lost is many times a small new one.
#[test]
fn weights_from_outside_are_refused_under_kahan() {
    for engine in engines() {
        for dtype in [DType::F16, DType::BF16] {
            let x = model(&[constant(50.0, 3, dtype)]);
            let mut state = setup(Kahan::new(Descent::new(1.0)), &x).expect("a state");
            let zeros = || grads([Some(constant(0.0, 3, DType::F32))]);
            let step = |state: &mut StateTree, gradients: &Grads| {
                Update::new(state).engine(engine).apply(&x, gradients).map(drop)
            };
            step(&mut state, &grads([Some(constant(0.01, 3, DType::F32))])).expect("an update");
            let lost = state.masters(&x).expect("masters");
            x["0"].set(&constant(0.25, 3, dtype)).expect("new weights");
            let before = snapshot(&x, &state);
            let error = step(&mut state, &zeros()).expect_err("new weights");
            is_kind(
                &error,
                ErrorKind::Changed,
                &[
                    "what roundings have lost",
                    "`refresh_masters`",
                    "`Update::keep_masters`",
                ],
            );
            assert_eq!(snapshot(&x, &state), before, "{dtype:?} {engine:?}");
            state.refresh_masters(&x).expect("masters");
            step(&mut state, &zeros()).expect("an update");
            assert_eq!(values(&x["0"]), [0.25; 3], "{dtype:?} {engine:?}");
            // Before, the new weights got what the old ones had lost.
            assert!(
                (values(&lost["0"])[0] - 50.0).abs() > 0.009,
                "{dtype:?}: {lost:?}"
            );
        }
    }
}
