//! `StochasticRounding`: unbiased, and reproducible from its seed.

use candle_core::{DType, Var};
use half::bf16;
use optimisers::{
    AccumGrad, AdamW, Adjust, Descent, Engine, ErrorKind, Isa, Kahan, Momentum, OptimiserChain,
    StochasticRounding, Update, setup, update,
};

use support::common::{
    Vars, bits16, constant, engines, grads, instruction_sets, is_kind, model, nearest16, values,
};

/// The mean of a million roundings of one number, against the number: within five standard deviations of that
/// mean, so that a correct rounding fails once in 1.7 million seeds; the seed is fixed.
#[test]
fn stochastic_rounding_is_unbiased() {
    const COUNT: usize = 1 << 20;
    for (dtype, start, step) in [
        (DType::BF16, 1.0, 1e-4),
        (DType::BF16, -3.0, 2e-3),
        (DType::F16, 1.0, 1e-5),
        (DType::F16, 2e-5, 1.3e-8),
    ] {
        let x = model(&[constant(start, COUNT, dtype)]);
        let exact = values(&constant(start, 1, dtype))[0] as f32 - step as f32;
        let mut state = setup(StochasticRounding::new(1, Descent::new(step)), &x).expect("a state");
        update(&mut state, &x, &grads([Some(constant(1.0, COUNT, DType::F32))])).expect("an update");
        let rounded = values(&x["0"]);
        let mean = rounded.iter().sum::<f64>() / COUNT as f64;
        let (low, high) = rounded
            .iter()
            .fold((f64::MAX, f64::MIN), |(low, high), &x| (low.min(x), high.max(x)));
        assert!(
            low <= exact.into()
                && high >= exact.into()
                && high - low <= (f64::from(exact.abs()) * 2f64.powi(-7)).max(2f64.powi(-24))
        );
        let deviation = ((high - f64::from(exact)) * (f64::from(exact) - low) / COUNT as f64).sqrt();
        assert!(
            (mean - f64::from(exact)).abs() <= 5.0 * deviation,
            "{dtype:?} {start} {step}: {mean} for {exact}, deviation {deviation:e}"
        );
    }
}

/// No finite number becomes infinite that rounding to nearest keeps, and none is hidden that it does not
/// keep.
#[test]
fn beyond_the_largest_number_it_rounds_to_nearest() {
    const COUNT: usize = 4096;
    for (dtype, largest, unit) in [
        (DType::F16, 65504.0, 32.0),
        (DType::BF16, f64::from(bf16::MAX), 2f64.powi(120)),
    ] {
        for engine in engines().into_iter().chain(instruction_sets()) {
            for part in [0.0, 1e-3, 0.25, 0.499, 0.5, 0.501, 0.75, 1.0, 40.0] {
                for sign in [1.0, -1.0] {
                    let x = model(&[constant(sign * largest, COUNT, dtype)]);
                    let mut state =
                        setup(StochasticRounding::new(1, Descent::new(1.0)), &x).expect("a state");
                    let step = constant(-sign * part * unit, COUNT, DType::F32);
                    let sum = sign * largest - values(&step)[0];
                    Update::new(&mut state)
                        .engine(engine)
                        .apply(&x, &grads([Some(step)]))
                        .expect("an update");
                    let got = bits16(&x["0"]);
                    assert!(
                        got.iter().all(|bits| *bits == nearest16(dtype, sum)),
                        "{dtype:?} {engine:?} {sign} {part}: {got:x?}"
                    );
                }
            }
            // Below it is as anywhere.
            let x = model(&[constant(largest - unit, COUNT, dtype)]);
            let mut state = setup(StochasticRounding::new(1, Descent::new(1.0)), &x).expect("a state");
            let step = grads([Some(constant(-0.5 * unit, COUNT, DType::F32))]);
            Update::new(&mut state)
                .engine(engine)
                .apply(&x, &step)
                .expect("an update");
            let raised = values(&x["0"]).into_iter().filter(|x| *x == largest).count();
            assert!(
                (COUNT / 2 - 200..COUNT / 2 + 200).contains(&raised),
                "{dtype:?} {engine:?}: {raised}"
            );
        }
    }
}

/// The same seed gives the same bits on any engine and number of threads; another seed, step or path gives
/// others.
#[test]
fn random_bits_depend_on_seed_step_path_and_element_only() {
    let run = |seed: u64, path: &str, threads: usize, engine: Engine| {
        let x: Vars = [(
            path.to_string(),
            Var::from_tensor(&constant(1.0, 100_003, DType::BF16)).expect("a variable"),
        )]
        .into();
        let mut state = setup(StochasticRounding::new(seed, Descent::new(1e-3)), &x).expect("a state");
        let gradient = support::common::Grads::from([(path.to_string(), constant(1.0, 100_003, DType::F32))]);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .expect("threads");
        let mut step = || {
            pool.install(|| Update::new(&mut state).engine(engine).apply(&x, &gradient))
                .expect("an update");
            bits16(&x[path])
        };
        [step(), step()]
    };
    let first = run(1, "a", 1, Engine::Fused);
    assert_eq!(first, run(1, "a", 3, Engine::Fused));
    assert_eq!(first, run(1, "a", 2, Engine::FusedWith(Isa::PORTABLE)));
    assert_eq!(first, run(1, "a", 1, Engine::Tensors));
    assert_ne!(first, run(2, "a", 1, Engine::Fused));
    assert_ne!(first, run(1, "b", 1, Engine::Fused));
    let start = bf16::ONE.to_bits();
    let moved = |bits: &[u16], before: u16| bits.iter().map(|bits| *bits != before).collect::<Vec<_>>();
    assert_ne!(
        moved(&first[0], start),
        first[0]
            .iter()
            .zip(&first[1])
            .map(|(a, b)| a != b)
            .collect::<Vec<_>>()
    );
}

#[test]
fn a_seed_is_a_field_and_a_wrapper_hands_on_all_others() {
    let mut rule = StochasticRounding::new(1, OptimiserChain::new((AccumGrad::new(2), AdamW::new(0.1))));
    rule.adjust(0.5).expect("a learning rate");
    rule.adjust_field("seed", 9u64).expect("a seed");
    assert_eq!(
        rule,
        StochasticRounding::new(9, OptimiserChain::new((AccumGrad::new(2), AdamW::new(0.5))))
    );
    let fields = rule
        .fields()
        .into_iter()
        .map(|(_, value)| value)
        .collect::<Vec<_>>();
    let mut other = StochasticRounding::new(1, OptimiserChain::new((AccumGrad::new(1), AdamW::new(0.1))));
    other.set_fields(&fields).expect("fields of the same rule");
    assert_eq!(other, rule);
    let mut kahan = Kahan::new(Momentum::new(0.1));
    is_kind(
        &kahan.adjust_field("seed", 1u64).expect_err("no seed"),
        ErrorKind::UnknownName,
        &["\"seed\""],
    );
    kahan.adjust_field("rho", 0.5).expect("a field");
    assert_eq!(kahan.field("rho"), Some(0.5.into()));
}
