//! State on the CPU for parameters elsewhere. Without a GPU the parameters are on the CPU as well, and go the
//! same way.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, Adam, AdamW, Adjust, Centralise, ClipGlobalNorm, Descent, DynamicScale, Engine, ErrorKind,
    IntoOptimiser, Kahan, LossScaler, MixedPrecision, Momentum, Offload, Optimiser, OptimiserChain,
    Parameter, Rule, SplitMaster, StateTree, StochasticRounding, Update, setup, setup_with, update,
};

use support::common::{
    Vars, assert_same, bits, devices, grads, is_kind, model, not_finite, random, rules_and_chains, says,
    snapshot, tensor, unnamed,
};

pub fn offloaded(inner: impl IntoOptimiser + Clone) -> Optimiser {
    Optimiser::new(Offload::new(inner).everywhere())
}

/// A rule with everything that may be inside of `Offload` for a parameter of this dtype.
pub fn kept(rule: Box<dyn Rule>, dtype: DType) -> Vec<Optimiser> {
    let mut all: Vec<Optimiser> = vec![
        Optimiser::new(rule.clone()),
        Optimiser::new(MixedPrecision::new(DType::F32, rule.clone())),
        Optimiser::new(MixedPrecision::new(DType::F64, rule.clone())),
        Optimiser::new(Kahan::new(rule.clone())),
        Optimiser::new(StochasticRounding::new(3, rule.clone())),
    ];
    if dtype != DType::F16 {
        all.push(Optimiser::new(SplitMaster::new(rule)));
    }
    all
}

/// Every bit of the state that does not depend on where it is, and of the most precise copies of the
/// parameters.
pub fn numbers(model: &Vars, state: &StateTree) -> Vec<(String, Vec<u64>)> {
    let mut all: Vec<(String, Vec<u64>)> = model.iter().map(|(path, x)| (path.clone(), bits(x))).collect();
    all.extend(
        state
            .masters(model)
            .expect("masters")
            .into_iter()
            .map(|(path, master)| (format!("{path}/master"), bits(&master))),
    );
    for leaf in state.leaves() {
        for name in leaf.tensor_names().into_iter().filter(|name| name != "master") {
            let tensor = leaf.tensor(&name).expect("a copy");
            assert!(tensor.device().is_cpu(), "{name}");
            all.push((format!("{}/{name}", leaf.path()), bits(&tensor)));
        }
        let counters = leaf
            .counters()
            .into_iter()
            .chain([("steps".to_string(), leaf.steps())]);
        all.extend(counters.map(|(name, count)| (format!("{}/{name}", leaf.path()), vec![count])));
        all.extend(
            leaf.numbers()
                .into_iter()
                .map(|(name, number)| (format!("{}/{name}", leaf.path()), vec![number.to_bits()])),
        );
    }
    all
}

/// Runs an optimiser on the CPU, and offloaded for parameters on a device, and compares every bit after every
/// call.
fn assert_same_as_on_cpu(
    inner: Optimiser,
    device: &Device,
    engine: Engine,
    shapes: &[&[usize]],
    dtypes: [DType; 2],
    calls: u64,
) {
    let on = |device: &Device, seed: u64, dtype: DType| -> Vec<Tensor> {
        (seed..)
            .zip(shapes)
            .map(|(seed, shape)| random(seed, shape, dtype, device))
            .collect()
    };
    let (here, there) = (
        model(&on(&Device::Cpu, 1, dtypes[0])),
        model(&on(device, 1, dtypes[0])),
    );
    let mut inside = setup(inner.clone(), &here).expect("a state");
    let mut outside = setup(offloaded(inner.clone()), &there).expect("a state");
    for call in 0..calls {
        // Now and then a parameter takes no part.
        let gradients = |device: &Device| {
            let all = on(device, 100 * (1 + call), dtypes[1]).into_iter().enumerate();
            grads(all.map(|(i, gradient)| (call != 1 || i != 0).then_some(gradient)))
        };
        let expected = Update::new(&mut inside)
            .engine(engine)
            .apply(&here, &gradients(&Device::Cpu))
            .expect("an update");
        let outcome = Update::new(&mut outside)
            .engine(engine)
            .apply(&there, &gradients(device))
            .expect("an update");
        assert_eq!(outcome, expected, "{}", inner.name());
        assert_same(
            &[numbers(&there, &outside)],
            &[numbers(&here, &inside)],
            (inner.name(), dtypes, call),
        );
    }
    outside
        .check_masters(&there)
        .expect("parameters that are their masters rounded");
}

#[test]
fn every_optimiser_has_the_bits_that_it_has_on_the_cpu() {
    for device in devices() {
        for dtypes in [
            [DType::F16, DType::F16],
            [DType::BF16, DType::F32],
            [DType::F32, DType::BF16],
            [DType::F64, DType::F64],
        ] {
            for rule in rules_and_chains() {
                for inner in kept(rule, dtypes[0]) {
                    assert_same_as_on_cpu(inner, &device, Engine::Fused, &[&[4, 5], &[3], &[]], dtypes, 6);
                }
            }
        }
    }
}

#[test]
fn every_engine_can_be_asked() {
    let rule = OptimiserChain::new((AccumGrad::new(2), ClipGlobalNorm::new(0.3), AdamW::new(0.01)));
    for inner in kept(Box::new(rule), DType::BF16) {
        for engine in [Engine::Tensors, Engine::FusedWith(optimisers::Isa::PORTABLE)] {
            assert_same_as_on_cpu(
                inner.clone(),
                &Device::Cpu,
                engine,
                &[&[4, 5], &[3, 0], &[7]],
                [DType::BF16, DType::F32],
                4,
            );
        }
    }
}

/// A leaf of several batches comes in parts, which are on their way at the same time; where the whole leaf is
/// needed, it comes whole.
#[test]
fn large_leaves_come_in_parts_without_a_trace() {
    let shapes: [&[usize]; 2] = [&[1025, 1024], &[10]];
    let rule = || Box::new(OptimiserChain::new((AccumGrad::new(2), AdamW::new(0.01)))) as Box<dyn Rule>;
    let clipped = || {
        Box::new(OptimiserChain::new((
            ClipGlobalNorm::new(0.3),
            Momentum::new(0.01),
        ))) as Box<dyn Rule>
    };
    let centred = || {
        Box::new(OptimiserChain::new((
            Momentum::new(0.01),
            Centralise::default(),
            Descent::new(0.1),
        ))) as Box<dyn Rule>
    };
    let inner: [Optimiser; 5] = [
        Optimiser::new(MixedPrecision::new(DType::F32, clipped())),
        Optimiser::new(SplitMaster::new(rule())),
        Optimiser::new(StochasticRounding::new(3, clipped())),
        Optimiser::new(Kahan::new(rule())),
        Optimiser::new(centred()),
    ];
    for device in devices() {
        for inner in inner.iter().cloned() {
            assert_same_as_on_cpu(
                inner,
                &device,
                Engine::Fused,
                &shapes,
                [DType::BF16, DType::F32],
                2,
            );
        }
    }
}

/// Gradients that are views, with elements in between or in another order.
#[test]
fn parts_of_views() {
    let [transposed, shifted] = [[1000, 1100], [1101, 1000]].map(|shape| tensor(2, &shape, DType::F32));
    for gradient in [
        transposed.t().expect("a view"),
        shifted.narrow(0, 1, 1100).expect("a view"),
    ] {
        let copied = gradient.copy().expect("a copy");
        let run = |gradient: &Tensor| {
            let model = model(&[tensor(1, &[1100, 1000], DType::F32)]);
            let mut state = setup(offloaded(Adam::new(0.1)), &model).expect("a state");
            update(&mut state, &model, &grads([Some(gradient.clone())])).expect("an update");
            numbers(&model, &state)
        };
        assert_same(&[run(&gradient)], &[run(&copied)], gradient.stride());
    }
}

/// Enough elements for several batches, which are on their way at the same time.
#[test]
fn batches_overlap_without_a_trace() {
    let shapes: [&[usize]; 6] = [&[300], &[1 << 20], &[7], &[0], &[1000, 1049], &[5, 4]];
    let clipped = OptimiserChain::new((ClipGlobalNorm::new(0.3), AdamW::new(0.01)));
    for device in devices() {
        for inner in [
            Optimiser::new(MixedPrecision::new(DType::F32, clipped.clone())),
            Optimiser::new(Momentum::new(0.01)),
        ] {
            assert_same_as_on_cpu(
                inner,
                &device,
                Engine::Fused,
                &shapes,
                [DType::BF16, DType::BF16],
                2,
            );
        }
    }
}

/// The norm is over all leaves, wherever they are, and the window of a leaf that is not offloaded is that of
/// the others.
#[test]
fn leaves_that_are_offloaded_and_others_are_one_model() {
    let rule = || OptimiserChain::new((AccumGrad::new(2), ClipGlobalNorm::new(0.3), Adam::new(0.01)));
    let run = |some: bool| {
        let x = model(&[1, 2, 3].map(|seed| tensor(seed, &[6], DType::BF16)));
        let mixed = || MixedPrecision::new(DType::F32, rule());
        let choose = |path: &str, _: Parameter<'_>| {
            Some(if some && path != "1" {
                offloaded(mixed())
            } else {
                Optimiser::new(mixed())
            })
        };
        let mut state = setup_with(&x, choose).expect("a state");
        let outcomes: Vec<_> = (0..6)
            .map(|call| {
                let gradients =
                    grads([1, 2, 3].map(|seed| Some(tensor(10 * call + seed, &[6], DType::BF16))));
                update(&mut state, &x, &gradients).expect("an update")
            })
            .collect();
        (outcomes, numbers(&x, &state))
    };
    let (outcomes, all) = run(true);
    assert!(
        outcomes
            .iter()
            .any(|outcome| outcome.global_norm.is_some_and(|norm| norm > 0.3)),
        "{outcomes:?}"
    );
    assert_eq!((outcomes, all), run(false));
}

#[test]
fn a_skipped_call_changes_nothing() {
    let rules: [Optimiser; 3] = [
        offloaded(MixedPrecision::new(DType::F32, Adam::new(0.01))),
        offloaded(OptimiserChain::new((ClipGlobalNorm::new(0.3), Adam::new(0.01)))),
        offloaded(Kahan::new(OptimiserChain::new((
            AccumGrad::new(2),
            Adam::new(0.01),
        )))),
    ];
    for optimiser in rules {
        let x = model(&[1, 2].map(|seed| tensor(seed, &[6], DType::F16)));
        let mut state = setup(optimiser, &x).expect("a state");
        let mut scaler = LossScaler::with(DynamicScale {
            initial: 8.0,
            ..DynamicScale::default()
        });
        for call in 0..6 {
            let loss = Tensor::new(1f32, &Device::Cpu).expect("a loss");
            let scale: f64 = scaler
                .scale(&loss)
                .and_then(|loss| Ok(loss.tensor().to_scalar::<f32>()?.into()))
                .expect("a scaled loss");
            let second = if call % 3 == 1 { f64::INFINITY } else { scale };
            let gradients = [(1, scale), (2, second)]
                .map(|(seed, scale)| (tensor(10 * call + seed, &[6], DType::F16) * scale).ok());
            let before = numbers(&x, &state);
            let outcome = Update::new(&mut state)
                .scaler(&mut scaler)
                .apply(&x, &grads(gradients))
                .expect("an update");
            let skipped = outcome.status == not_finite("1");
            assert_eq!(skipped, call % 3 == 1);
            assert_eq!(numbers(&x, &state) == before, skipped);
        }
    }
}

/// What a call does not apply does not go up: a parameter that was changed stays so until then.
#[test]
fn only_applied_leaves_go_up() {
    for inner in [
        offloaded(MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((AccumGrad::new(2), Descent::new(0.5))),
        )),
        offloaded(OptimiserChain::new((AccumGrad::new(2), Descent::new(0.5)))),
    ] {
        let x = model(&[tensor(1, &[4], DType::BF16)]);
        let mut state = setup(inner, &x).expect("a state");
        let changed = tensor(2, &[4], DType::BF16);
        x["0"].set(&changed).expect("a change");
        let gradient = grads([Some(tensor(3, &[4], DType::BF16))]);
        is_kind(
            &update(&mut state, &x, &gradient).expect_err("stale"),
            ErrorKind::Changed,
            &["its master"],
        );
        Update::new(&mut state)
            .keep_masters()
            .apply(&x, &gradient)
            .expect("an update");
        assert_eq!(bits(&x["0"]), bits(&changed));
        Update::new(&mut state)
            .keep_masters()
            .apply(&x, &gradient)
            .expect("an update");
        assert_ne!(bits(&x["0"]), bits(&changed));
        state.check_masters(&x).expect("the parameter of the master");
    }
}

#[test]
fn a_changed_parameter_is_noticed_and_can_be_taken_over() {
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        for inner in kept(Box::new(Adam::new(0.1)), dtype) {
            let x = model(&[tensor(1, &[5000], dtype)]);
            let mut state = setup(offloaded(inner.clone()), &x).expect("a state");
            let gradient = grads([Some(tensor(2, &[5000], dtype))]);
            update(&mut state, &x, &gradient).expect("an update");
            x["0"].set(&tensor(3, &[5000], dtype)).expect("a change");
            let before = numbers(&x, &state);
            for error in [
                update(&mut state, &x, &gradient).expect_err("stale"),
                state.check_masters(&x).expect_err("stale"),
            ] {
                let found = (error.kind(), error.path(), error.element());
                assert_eq!(
                    found,
                    (ErrorKind::Changed, Some("0"), Some(0)),
                    "{}: {error}",
                    inner.name()
                );
                assert!(
                    error.to_string().contains("its master"),
                    "{}: {error}",
                    inner.name()
                );
            }
            assert_eq!(numbers(&x, &state), before);
            state.refresh_masters(&x).expect("new masters");
            assert_eq!(
                bits(&x["0"]),
                bits(&tensor(3, &[5000], dtype)),
                "{}",
                inner.name()
            );
            assert_eq!(
                bits(&state.masters(&x).expect("masters")["0"]),
                bits(&x["0"]),
                "{}",
                inner.name()
            );
            update(&mut state, &x, &gradient).expect("an update");
        }
    }
}

#[test]
fn masters_are_set_as_on_the_cpu() {
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for inner in kept(Box::new(Adam::new(0.1)), dtype) {
            let values = BTreeMap::from([("0".to_string(), tensor(2, &[50], DType::F64))]);
            let [expected, got] = [inner.clone(), offloaded(inner)].map(|optimiser| {
                let x = model(&[tensor(1, &[50], dtype)]);
                let mut state = setup(optimiser, &x).expect("a state");
                state.set_masters(&x, &values).expect("new masters");
                state
                    .check_masters(&x)
                    .expect("parameters that are their masters rounded");
                numbers(&x, &state)
            });
            assert_eq!(got, expected);
        }
    }
}

#[test]
fn on_the_cpu_there_is_only_the_inner_optimiser() {
    for inner in kept(
        Box::new(OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(0.1)))),
        DType::BF16,
    ) {
        let [expected, got] = [inner.clone(), Optimiser::new(Offload::new(inner))].map(|optimiser| {
            let x = model(&[tensor(1, &[9], DType::BF16)]);
            let mut state = setup(optimiser, &x).expect("a state");
            for call in 0..3 {
                update(
                    &mut state,
                    &x,
                    &grads([Some(tensor(2 + call, &[9], DType::BF16))]),
                )
                .expect("an update");
            }
            (
                state.bytes(),
                state.leaf("0").map(|leaf| leaf.tensor_names()),
                unnamed(snapshot(&x, &state)),
            )
        });
        assert_eq!(got, expected);
    }
}

#[test]
fn hyper_parameters_reach_the_rule() {
    let mut rule = Offload::new(StochasticRounding::new(
        1,
        OptimiserChain::new((AccumGrad::new(2), AdamW::new(0.1))),
    ))
    .everywhere();
    rule.adjust(0.5).expect("a learning rate");
    rule.adjust_field("seed", 9u64).expect("a seed");
    let chain = OptimiserChain::new((AccumGrad::new(2), AdamW::new(0.5)));
    let inner = StochasticRounding::new(9, chain.clone());
    let expected = Offload::new(inner.clone()).everywhere();
    assert_eq!(
        (format!("{rule:?}"), rule.fields()),
        (format!("{expected:?}"), expected.fields())
    );
    assert_eq!(
        rule.name(),
        "Offload(StochasticRounding(OptimiserChain(AccumGrad, AdamW)))"
    );

    let x = model(&[tensor(1, &[4], DType::BF16)]);
    for optimiser in [
        offloaded(inner),
        offloaded(MixedPrecision::new(DType::F32, chain)),
    ] {
        let mut state = setup(optimiser, &x).expect("a state");
        // A count may decide what state there is; here it does not.
        state.all().adjust_field("n", 3u64).expect("a count");
        state.adjust(0.25).expect("a learning rate");
        assert_eq!(state.leaf("0").and_then(|leaf| leaf.learning_rate()), Some(0.25));
    }
    let mut mixed = setup(offloaded(MixedPrecision::new(DType::F32, Adam::new(0.1))), &x).expect("a state");
    is_kind(
        &mixed.all().adjust_field("dtype", 1.0).expect_err("a setting"),
        ErrorKind::Argument,
        &["MixedPrecision: dtype is a setting, which cannot be adjusted"],
    );
}

#[test]
fn what_does_not_fit_is_refused() {
    let nested = setup(
        Offload::new(Offload::new(Adam::new(0.1))),
        &model(&[tensor(1, &[4], DType::F32)]),
    )
    .expect_err("nested");
    says(&nested, &["an Offload is inside of another"]);
    let half = setup(
        offloaded(SplitMaster::new(Adam::new(0.1))),
        &model(&[tensor(1, &[4], DType::F16)]),
    )
    .expect_err("half");
    is_kind(&half, ErrorKind::Tensor, &["F16, expected BF16", "SplitMaster"]);
    let negative = setup(Offload::new(Adam::new(-1.0)), &model(&[])).expect_err("out of range");
    is_kind(&negative, ErrorKind::Argument, &["Adam: eta is -1"]);

    let x = model(&[tensor(1, &[4], DType::BF16), tensor(2, &[3], DType::BF16)]);
    let mut state = setup(offloaded(MixedPrecision::new(DType::F32, Adam::new(0.1))), &x).expect("a state");
    let before = numbers(&x, &state);
    let fine = Some(tensor(3, &[4], DType::BF16));
    let shape = update(
        &mut state,
        &x,
        &grads([fine.clone(), Some(tensor(3, &[4], DType::BF16))]),
    )
    .expect_err("another shape");
    is_kind(
        &shape,
        ErrorKind::Tensor,
        &["\"1\": the gradient has shape [4], expected [3]"],
    );
    let integers = Tensor::zeros(3, DType::U32, &Device::Cpu).ok();
    let integers = update(&mut state, &x, &grads([fine, integers])).expect_err("integers");
    is_kind(&integers, ErrorKind::Tensor, &["\"1\": the gradient is U32"]);
    assert_eq!(numbers(&x, &state), before);
}
