//! `ClipNorm` with exponents of every size.

use candle_core::DType::{F32, F64};
use candle_core::{Device, Tensor};
use optimisers::{ClipNorm, Descent, OptimiserChain, Update, setup};

use support::common::{engines, grads, model, values};

/// Powers of the elements themselves would overflow or vanish, also in f64.
#[test]
fn large_exponents_neither_overflow_nor_vanish() {
    for engine in engines() {
        for dtype in [F32, F64] {
            for (size, p) in [(1e5, 64.0), (1e-6, 64.0), (3e38, 9.0), (1e-30, 12.0), (7.0, 1000.0), (0.1, 0.5)] {
                let numbers = [size, -size / 2.0, 0.0, size / 4.0];
                let gradient = Tensor::new(&numbers, &Device::Cpu).and_then(|gradient| gradient.to_dtype(dtype)).expect("a gradient");
                let model = model(&[gradient.zeros_like().expect("zeros")]);
                let omega = size / 10.0;
                let chain = OptimiserChain::new((ClipNorm { p, ..ClipNorm::new(omega) }, Descent::new(1.0)));
                let mut state = setup(chain, &model).expect("a state");
                Update::new(&mut state).engine(engine).apply(&model, &grads([Some(gradient)])).expect("an update");
                let norm = numbers.iter().map(|number| (number.abs() / size).powf(p)).sum::<f64>().powf(1.0 / p) * size;
                for (got, number) in values(&model["0"]).into_iter().zip(numbers) {
                    let expected = -number * omega / norm;
                    let close = (got - expected).abs() <= expected.abs() * if dtype == F32 { 1e-6 } else { 1e-13 };
                    assert!(close, "{got:e} for {expected:e}: {size:e}, p = {p}, {dtype:?}, {engine:?}");
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
            let mut state = setup(OptimiserChain::new((ClipNorm { p, ..ClipNorm::new(1.0) }, Descent::new(1.0))), &model).expect("a state");
            let gradient = model["0"].zeros_like().expect("zeros");
            Update::new(&mut state).engine(engine).apply(&model, &grads([Some(gradient)])).expect("an update");
            assert_eq!(values(&model["0"]), [1.0; 3]);
        }
    }
}
