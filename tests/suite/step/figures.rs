//! Norms of gradients, parameters and updates that are found on request.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, Adam, AdamW, Average, ClipGlobalNorm, ClipNorm, Descent, Engine, ErrorKind, LAMB, LeafFigures,
    LossScaler, MixedPrecision, Optimiser, OptimiserChain, Outcome, Setup, SplitMaster, StateTree, Status,
    Update, setup, trainables, update,
};

use support::common::{
    Grads, Vars, assert_same, constant, engines, grads, is_kind, model, muon, not_finite, optimisers_for,
    rules_and_chains, snapshot, tensor, values,
};
use support::reports::{gradients, parameters};
use support::threads::on;

/// A number of calls in which every window of the tests ends.
const CALLS: u64 = 6;

fn with_figures(engine: Engine, state: &mut StateTree, model: &Vars, grads: &Grads) -> Outcome {
    Update::new(state)
        .engine(engine)
        .with_figures()
        .apply(model, grads)
        .expect("an update")
}

fn norm(numbers: &[f64]) -> f64 {
    numbers.iter().map(|number| number * number).sum::<f64>().sqrt()
}

fn assert_near(got: f64, expected: f64, of: f64, what: &str) {
    assert!(
        (got - expected).abs() <= 1e-10 * of,
        "{what}: {got:e} for {expected:e}"
    );
}

#[test]
fn norms_are_those_of_what_moves() {
    let x = [tensor(1, &[4, 3], DType::F64), tensor(2, &[5], DType::F64)];
    for rule in rules_and_chains() {
        for engine in [Engine::Fused, Engine::Tensors] {
            let model = model(&x);
            let mut state = setup(rule.clone(), &model).expect("a state");
            let mut is_first = true;
            for call in 0..CALLS {
                let dx = [
                    tensor(10 + call, &[4, 3], DType::F64),
                    tensor(20 + call, &[5], DType::F64),
                ];
                let before: Vec<Vec<f64>> = model.values().map(|x| values(x)).collect();
                let outcome = with_figures(engine, &mut state, &model, &grads(dx.clone().map(Some)));
                assert_eq!(outcome.figures.len(), outcome.applied, "{rule:?}");
                is_first &= outcome.status == Status::Stepped;
                for (leaf, figures) in outcome.figures.iter().enumerate() {
                    let LeafFigures {
                        path,
                        gradient,
                        parameter,
                        update,
                        ..
                    } = figures;
                    let moved: Vec<f64> = before[leaf]
                        .iter()
                        .zip(values(&model[path]))
                        .map(|(before, after)| before - after)
                        .collect();
                    assert_near(*parameter, norm(&before[leaf]), *parameter, &format!("{rule:?}"));
                    assert_near(*update, norm(&moved), parameter + update, &format!("{rule:?}"));
                    if is_first {
                        assert_near(
                            *gradient,
                            norm(&values(&dx[leaf])),
                            *gradient,
                            &format!("{rule:?}"),
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_step_has_the_same_bits_with_figures() {
    for (dtype, gradient) in [
        (DType::BF16, DType::F32),
        (DType::F32, DType::BF16),
        (DType::F16, DType::F16),
    ] {
        for optimiser in optimisers_for(dtype) {
            let x = [tensor(1, &[4, 5], dtype), tensor(2, &[3], dtype)];
            let models = [model(&x), model(&x)];
            let mut states = models
                .each_ref()
                .map(|model| setup(optimiser.clone(), model).expect("a state"));
            for call in 0..CALLS {
                let second = (call % 3 != 1).then(|| tensor(20 + call, &[3], gradient));
                let dx = grads([Some(tensor(10 + call, &[4, 5], gradient)), second]);
                let without = Update::new(&mut states[0])
                    .finite_only()
                    .apply(&models[0], &dx)
                    .expect("an update");
                let mut with = Update::new(&mut states[1])
                    .finite_only()
                    .with_figures()
                    .apply(&models[1], &dx)
                    .expect("an update");
                assert!(without.figures.is_empty());
                with.figures = Vec::new();
                assert_eq!(with, without, "{}", optimiser.name());
                let snapshots = [0, 1].map(|i| snapshot(&models[i], &states[i]));
                assert_same(&snapshots[1..], &snapshots[..1], optimiser.name());
            }
        }
    }
}

fn several() -> Vec<Optimiser> {
    vec![
        Optimiser::new(AdamW::new(0.1)),
        Optimiser::new(MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((ClipGlobalNorm::new(0.5), Adam::new(0.1))),
        )),
        Optimiser::new(SplitMaster::new(OptimiserChain::new((
            AccumGrad::new(2),
            ClipNorm::new(0.3),
            LAMB::new(0.1),
        )))),
        Optimiser::new(MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((AccumGrad::new(4), muon())),
        )),
    ]
}

/// The figures of four calls.
fn figures(setup: Setup, engine: Engine, optimiser: &Optimiser, dtype: DType) -> Vec<Vec<LeafFigures>> {
    let model = model(&parameters(dtype));
    let mut state = setup.build(optimiser.clone(), &model).expect("a state");
    (0..4)
        .map(|call| with_figures(engine, &mut state, &model, &gradients(call, 0, DType::F32)).figures)
        .collect()
}

#[test]
fn figures_are_the_same_on_any_threads_ranks_and_engines() {
    for optimiser in several() {
        let expected = figures(Setup::default(), Engine::Fused, &optimiser, DType::BF16);
        assert!(
            expected.iter().any(|figures| figures.len() == 5),
            "{}",
            optimiser.name()
        );
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .expect("a pool");
            let got = pool.install(|| figures(Setup::default(), Engine::Fused, &optimiser, DType::BF16));
            assert_eq!(got, expected, "{} on {threads} threads", optimiser.name());
        }
        let rule = optimiser.clone();
        let of_ranks = on(2, move |world| {
            figures(Setup::over(&world), Engine::Fused, &rule, DType::BF16)
        });
        assert_eq!(
            of_ranks,
            [expected.clone(), expected.clone()],
            "{} on 2 ranks",
            optimiser.name()
        );
        for engine in engines() {
            let got = figures(Setup::default(), engine, &optimiser, DType::BF16);
            for (got, expected) in got
                .iter()
                .flat_map(|call| call.iter())
                .zip(expected.iter().flat_map(|call| call.iter()))
            {
                assert_eq!(got.path, expected.path);
                let pairs = [
                    (got.gradient, expected.gradient),
                    (got.parameter, expected.parameter),
                    (got.update, expected.update),
                ];
                // The emulated device adds up in another order.
                let allowed = if matches!(engine, Engine::Fused | Engine::Tensors) {
                    0.0
                } else {
                    1e-6
                };
                let is_near = pairs
                    .iter()
                    .all(|(got, expected)| (got - expected).abs() <= allowed * expected);
                assert!(
                    is_near,
                    "{} on {engine:?}: {got:?} for {expected:?}",
                    optimiser.name()
                );
            }
        }
    }
}

#[test]
fn ranks_ask_for_figures_together() {
    let errors = on(2, |world| {
        let model = model(&parameters(DType::F32));
        let mut state = Setup::over(&world)
            .build(Adam::new(0.1), &model)
            .expect("a state");
        let update = Update::new(&mut state);
        let update = if optimisers::Communicator::rank(&world) == 1 {
            update.with_figures()
        } else {
            update
        };
        update
            .apply(&model, &gradients(0, 0, DType::F32))
            .expect_err("ranks that differ")
    });
    for error in errors {
        is_kind(
            &error,
            ErrorKind::Ranks,
            &["rank 1 differs in", "figures on rank 1"],
        );
        assert_eq!(error.rank(), Some(1), "{error}");
    }
}

/// Without the loss scale, of the master, and of what `AccumGrad` hands on.
#[test]
fn the_gradient_is_the_one_that_makes_the_step() {
    let x = constant(1.0, 4, DType::BF16);
    let model = model(&[x]);
    let chain = |average| {
        let collect = AccumGrad {
            average,
            ..AccumGrad::new(3)
        };
        MixedPrecision::new(DType::F32, OptimiserChain::new((collect, Descent::new(1e-4))))
    };
    for (average, expected) in [
        (Average::Mean, 3.0),
        (Average::Sum, 9.0),
        (Average::Weighted, 35.0 / 8.0),
    ] {
        let mut state = setup(chain(average), &model).expect("a state");
        let mut scaler = LossScaler::fixed(1024.0);
        for (number, weight) in [(1.0, 1), (2.0, 2), (6.0, 5)] {
            let step = |state: &mut StateTree, scaler: &mut LossScaler| {
                let _ = scaler
                    .scale(&constant(1.0, 1, DType::F32))
                    .expect("a scaled loss");
                let update = Update::new(state).weight(weight).with_figures();
                update
                    .scaler(scaler)
                    .apply(&model, &grads([Some(constant(1024.0 * number, 4, DType::F32))]))
                    .expect("an update")
            };
            let outcome = step(&mut state, &mut scaler);
            if number < 6.0 {
                assert!(outcome.figures.is_empty());
                continue;
            }
            let figures = &outcome.figures[0];
            assert_near(
                figures.gradient,
                2.0 * expected,
                10.0,
                "a mean of four equal numbers",
            );
            assert!(
                (figures.update / (2e-4 * expected) - 1.0).abs() < 1e-6,
                "{figures}"
            );
        }
    }
}

#[test]
fn only_what_moves_has_figures() {
    let model = model(&[
        constant(1.0, 2, DType::F32),
        constant(2.0, 2, DType::F32),
        constant(0.0, 2, DType::F32),
    ]);
    let mut state = setup(Descent::new(0.5), &model).expect("a state");
    state.at("0").expect("the leaf").freeze();
    let one = || Some(constant(1.0, 2, DType::F32));
    let outcome = with_figures(Engine::Fused, &mut state, &model, &grads([one(), None, one()]));
    assert_eq!(
        outcome
            .figures
            .iter()
            .map(|leaf| leaf.path.as_str())
            .collect::<Vec<_>>(),
        ["2"]
    );
    assert_eq!(outcome.figures[0].ratio(), f64::INFINITY);

    let infinite = Some(constant(f64::INFINITY, 2, DType::F32));
    let bad = grads([None, infinite.clone(), one()]);
    let skipped = Update::new(&mut state)
        .finite_only()
        .with_figures()
        .apply(&model, &bad)
        .expect("a skipped call");
    assert_eq!((skipped.status, skipped.figures.len()), (not_finite("1"), 0));
    let moved = with_figures(Engine::Fused, &mut state, &model, &grads([None, infinite, one()]));
    assert_eq!(
        moved
            .figures
            .iter()
            .filter(|leaf| leaf.ratio() > 10.0)
            .map(|leaf| leaf.path.as_str())
            .collect::<Vec<_>>(),
        ["1"]
    );
}

#[test]
fn the_ratio_tells_what_does_not_learn_and_what_explodes() {
    let of = |numbers: [f64; 2], dx: [f64; 2]| {
        let tensor = |numbers: [f64; 2]| Tensor::new(&numbers, &Device::Cpu).expect("a tensor");
        let model = model(&[tensor(numbers)]);
        let mut state = setup(Descent::new(1.0), &model).expect("a state");
        with_figures(Engine::Fused, &mut state, &model, &grads([Some(tensor(dx))]))
            .figures
            .remove(0)
    };
    assert_eq!(of([3.0, 4.0], [3.0, 4.0]).ratio(), 1.0);
    assert_eq!(of([3.0, 4.0], [0.0, 0.0]).ratio(), 0.0);
    assert_eq!(
        of([0.0, 0.0], [3.0, 4.0]).ratio(),
        f64::INFINITY,
        "a bias that starts at zero"
    );
    assert!(of([0.0, 0.0], [0.0, 0.0]).ratio().is_nan() && of([3.0, 4.0], [f64::NAN, 4.0]).ratio().is_nan());
    let line = "0: gradient 5.000e-1, parameter 5.000e0, update 5.000e-1, ratio 1.000e-1";
    assert_eq!(of([3.0, 4.0], [0.3, 0.4]).to_string(), line);
}

#[test]
fn the_functional_form_has_the_same_figures() {
    let x = [tensor(1, &[7], DType::F32)];
    let model = model(&x);
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    let dx = grads([Some(tensor(2, &[7], DType::F32))]);
    let parameters = trainables(&model).expect("the parameters");
    let (_, _, functional) = Update::functional(&state)
        .with_figures()
        .apply(&parameters, &dx)
        .expect("an update");
    let outcome = with_figures(Engine::Fused, &mut state, &model, &dx);
    assert_eq!(functional, outcome);
    assert_eq!(outcome.figures.len(), 1);
    assert!(
        update(&mut state, &model, &dx)
            .expect("an update")
            .figures
            .is_empty()
    );
}
