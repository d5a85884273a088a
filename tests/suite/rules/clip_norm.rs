//! `ClipNorm` with exponents of every size, and what rules that clip make of a gradient that is not finite.

use candle_core::DType::{F32, F64};
use candle_core::{Device, Tensor};
use optimisers::{
    AdaptiveClip, ClipGlobalNorm, ClipGrad, ClipNorm, Descent, ErrorKind, NonFinite, OptimiserChain, Rule,
    Status, Update, setup,
};

use support::common::{engines, grads, is_kind, model, not_finite, values};

/// Powers of the elements themselves would overflow or vanish, also in f64.
#[test]
fn large_exponents_neither_overflow_nor_vanish() {
    for engine in engines() {
        for dtype in [F32, F64] {
            for (size, p) in [
                (1e5, 64.0),
                (1e-6, 64.0),
                (3e38, 9.0),
                (1e-30, 12.0),
                (7.0, 1000.0),
                (0.1, 0.5),
            ] {
                let numbers = [size, -size / 2.0, 0.0, size / 4.0];
                let gradient = Tensor::new(&numbers, &Device::Cpu)
                    .and_then(|gradient| gradient.to_dtype(dtype))
                    .expect("a gradient");
                let model = model(&[gradient.zeros_like().expect("zeros")]);
                let omega = size / 10.0;
                let chain = OptimiserChain::new((
                    ClipNorm {
                        p,
                        ..ClipNorm::new(omega)
                    },
                    Descent::new(1.0),
                ));
                let mut state = setup(chain, &model).expect("a state");
                Update::new(&mut state)
                    .engine(engine)
                    .apply(&model, &grads([Some(gradient)]))
                    .expect("an update");
                let norm = numbers
                    .iter()
                    .map(|number| (number.abs() / size).powf(p))
                    .sum::<f64>()
                    .powf(1.0 / p)
                    * size;
                for (got, number) in values(&model["0"]).into_iter().zip(numbers) {
                    let expected = -number * omega / norm;
                    let close =
                        (got - expected).abs() <= expected.abs() * if dtype == F32 { 1e-6 } else { 1e-13 };
                    assert!(
                        close,
                        "{got:e} for {expected:e}: {size:e}, p = {p}, {dtype:?}, {engine:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn gradients_of_zeros_pass_whatever_the_exponent() {
    for engine in engines() {
        for p in [0.5, 1.0, 2.0, 3.0, 64.0, f64::INFINITY] {
            let model = model(&[Tensor::ones(3, F32, &Device::Cpu).expect("ones")]);
            let mut state = setup(
                OptimiserChain::new((
                    ClipNorm {
                        p,
                        ..ClipNorm::new(1.0)
                    },
                    Descent::new(1.0),
                )),
                &model,
            )
            .expect("a state");
            let gradient = model["0"].zeros_like().expect("zeros");
            Update::new(&mut state)
                .engine(engine)
                .apply(&model, &grads([Some(gradient)]))
                .expect("an update");
            assert_eq!(values(&model["0"]), [1.0; 3]);
        }
    }
}

/// With an element that is infinite or NaN, the others being 1 and the limit 1 in all of them.
#[test]
fn what_clips_by_a_norm_refuses_a_gradient_that_is_not_finite() {
    let rules = |non_finite| -> [Box<dyn Rule>; 4] {
        [
            Box::new(ClipNorm {
                non_finite,
                ..ClipNorm::new(1.0)
            }),
            Box::new(ClipNorm {
                p: f64::INFINITY,
                non_finite,
                ..ClipNorm::new(1.0)
            }),
            Box::new(ClipGlobalNorm {
                non_finite,
                ..ClipGlobalNorm::new(1.0)
            }),
            Box::new(AdaptiveClip {
                non_finite,
                ..AdaptiveClip::new(1.0)
            }),
        ]
    };
    for engine in engines() {
        for odd in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            let gradient = Tensor::new(&[[1.0, odd], [1.0, 1.0]], &Device::Cpu)
                .and_then(|gradient| gradient.to_dtype(F32));
            let gradient = grads([gradient.ok()]);
            let apply = |clip: Box<dyn Rule>| {
                let x = model(&[Tensor::ones((2, 2), F32, &Device::Cpu).expect("ones")]);
                let mut state = setup(OptimiserChain::new((clip, Descent::new(1.0))), &x).expect("a state");
                (
                    Update::new(&mut state).engine(engine).apply(&x, &gradient),
                    values(&x["0"]),
                )
            };
            for clip in rules(NonFinite::Error) {
                let (refused, x) = apply(clip);
                let words = ["-norm of its gradient", "Pass or Skip"];
                is_kind(&refused.expect_err("not finite"), ErrorKind::NotFinite, &words);
                assert_eq!(x, [1.0; 4]);
            }
            for clip in rules(NonFinite::Skip) {
                let (outcome, x) = apply(clip);
                assert_eq!(
                    (outcome.expect("an outcome").status, x),
                    (not_finite("0"), vec![1.0; 4])
                );
            }
            for clip in rules(NonFinite::Pass) {
                let (outcome, x) = apply(clip);
                assert!(
                    outcome.is_ok_and(|outcome| outcome.status == Status::Stepped) && !x[1].is_finite(),
                    "{x:?}"
                );
            }
            // It has no norm.
            let (_, x) = apply(Box::new(ClipGrad::new(0.5)));
            let clipped = if odd.is_nan() {
                odd
            } else {
                1.0 - 0.5 * odd.signum()
            };
            assert_eq!(
                (x[0], x[1].to_bits(), x[2]),
                (0.5, clipped.to_bits(), 0.5),
                "{odd}"
            );
        }
    }
}
