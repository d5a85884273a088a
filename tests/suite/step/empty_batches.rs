//! Calls in which no parameter has a gradient, where they are allowed.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, Adam, Average, ClipGlobalNorm, Descent, ErrorKind, IntoOptimiser, LossScaler, MixedPrecision,
    OptimiserChain, Outcome, Prodigy, Rule, SkipReason, StateTree, Status, Update, setup, update,
};

use support::common::{Grads, Vars, engines, grads, is_kind, model, random, snapshot, values};

fn variables() -> Vars {
    model(&[
        random(1, &[3], DType::F32, &Device::Cpu),
        random(2, &[2, 2], DType::F32, &Device::Cpu),
    ])
}

fn gradients(seed: u64) -> Grads {
    grads([
        Some(random(seed, &[3], DType::F32, &Device::Cpu)),
        Some(random(seed + 1, &[2, 2], DType::F32, &Device::Cpu)),
    ])
}

fn empty(state: &mut StateTree, model: &Vars) -> Outcome {
    Update::new(state)
        .allow_no_gradients()
        .apply(model, &Grads::new())
        .expect("an update")
}

fn window(n: u64, rule: impl Rule + Clone) -> impl IntoOptimiser + Clone {
    MixedPrecision::new(
        DType::F64,
        OptimiserChain::new((AccumGrad::new(n), ClipGlobalNorm::new(1.0), rule)),
    )
}

#[test]
fn a_window_counts_a_call_without_any_gradient() {
    let (model, twin) = (variables(), variables());
    let (mut state, mut expected) = (
        setup(window(3, Adam::new(0.1)), &model).expect("a state"),
        setup(window(3, Adam::new(0.1)), &twin).expect("a state"),
    );
    // As if the gradients had been zeros.
    let zeros: Grads = gradients(1)
        .into_iter()
        .map(|(path, gradient)| (path, gradient.zeros_like().expect("zeros")))
        .collect();
    for call in 0..2 {
        let outcome = update(&mut state, &model, &gradients(10 * call)).expect("an update");
        assert_eq!(
            outcome,
            update(&mut expected, &twin, &gradients(10 * call)).expect("an update")
        );

        let outcome = empty(&mut state, &model);
        assert_eq!(
            (
                outcome.status,
                outcome.accumulated,
                outcome.without_gradient.len()
            ),
            (Status::Accumulated, 0, 2)
        );
        update(&mut expected, &twin, &zeros).expect("an update");
        assert_eq!(
            state.leaf("0").map(|leaf| leaf.counters()[0].clone()),
            Some(("0.calls".to_string(), 2))
        );

        // The last call of the window makes the step of what was collected.
        let outcome = empty(&mut state, &model);
        assert_eq!(
            (outcome.status, outcome.applied, outcome.without_gradient.len()),
            (Status::Stepped, 2, 0)
        );
        update(&mut expected, &twin, &zeros).expect("an update");
        let parameters = |model: &Vars| model.values().map(|x| values(x)).collect::<Vec<_>>();
        assert_eq!(parameters(&model), parameters(&twin));
    }
}

#[test]
fn a_window_of_nothing_ends_without_a_step() {
    for engine in engines() {
        let model = variables();
        let mut state = setup(window(2, Adam::new(0.1)), &model).expect("a state");
        let before = snapshot(&model, &state);
        for status in [
            Status::Accumulated,
            Status::Accumulated,
            Status::Accumulated,
            Status::Accumulated,
        ] {
            let outcome = Update::new(&mut state)
                .engine(engine)
                .allow_no_gradients()
                .apply(&model, &Grads::new())
                .expect("an update");
            assert_eq!((outcome.status, outcome.applied), (status, 0));
        }
        assert_eq!(
            snapshot(&model, &state),
            before,
            "two windows have begun and ended"
        );
        assert_eq!(
            update(&mut state, &model, &gradients(1))
                .expect("an update")
                .status,
            Status::Accumulated,
            "the first call of a window"
        );
    }
}

/// Without a window there is nothing to count, and rules that follow sums over the model do not move either.
#[test]
fn nothing_changes_where_no_window_counts() {
    let rules: [Box<dyn Rule>; 3] = [
        Box::new(Adam::new(0.1)),
        Box::new(Prodigy::new(1.0)),
        Box::new(OptimiserChain::new((ClipGlobalNorm::new(1.0), Prodigy::new(1.0)))),
    ];
    for rule in rules {
        let model = variables();
        let mut state = setup(rule, &model).expect("a state");
        for seed in 0..3 {
            update(&mut state, &model, &gradients(seed)).expect("an update");
        }
        let before = snapshot(&model, &state);
        let outcome = empty(&mut state, &model);
        assert_eq!(
            (outcome.status, outcome.without_gradient.len()),
            (Status::Skipped(SkipReason::NothingToMove), 2)
        );
        assert_eq!(snapshot(&model, &state), before);
    }
}

#[test]
fn prodigy_stays_where_it_is_in_a_window_of_nothing() {
    let model = variables();
    let mut state = setup(
        OptimiserChain::new((AccumGrad::new(1), Prodigy::new(1.0))),
        &model,
    )
    .expect("a state");
    for seed in 0..3 {
        update(&mut state, &model, &gradients(seed)).expect("an update");
    }
    let before = snapshot(&model, &state);
    empty(&mut state, &model);
    assert_eq!(snapshot(&model, &state), before);
}

#[test]
fn an_empty_call_is_an_error_if_it_is_not_allowed() {
    let model = variables();
    let mut state = setup(window(2, Descent::new(0.1)), &model).expect("a state");
    let error = update(&mut state, &model, &Grads::new()).expect_err("refused");
    is_kind(
        &error,
        ErrorKind::NoGradient,
        &["no gradient for any of the 2 parameters"],
    );
    // What else is wrong stays an error.
    let stranger = [("7", Tensor::ones(3, DType::F32, &Device::Cpu).expect("a tensor"))];
    let error = Update::new(&mut state)
        .allow_no_gradients()
        .apply(&model, &stranger)
        .expect_err("refused");
    is_kind(&error, ErrorKind::UnknownName, &["the gradient of \"7\""]);
}

#[test]
fn a_scaler_and_a_weighted_mean_take_an_empty_call() {
    let model = variables();
    let weighted = AccumGrad {
        average: Average::Weighted,
        ..AccumGrad::new(2)
    };
    let mut state = setup(OptimiserChain::new((weighted, Descent::new(1.0))), &model).expect("a state");
    let before = values(&model["0"]);
    let mut scaler = LossScaler::fixed(4.0);
    let gradient = random(5, &[3], DType::F32, &Device::Cpu);
    for (gradients, weight) in [
        (vec![("0", (&gradient * 4.0).expect("scaled"))], 3),
        (vec![], 100),
    ] {
        let _ = scaler.scale(&gradient).expect("a loss");
        let update = Update::new(&mut state).allow_no_gradients().weight(weight);
        update
            .scaler(&mut scaler)
            .apply(&model, &gradients)
            .expect("an update");
    }
    for ((after, before), gradient) in values(&model["0"]).into_iter().zip(before).zip(values(&gradient)) {
        assert!(
            (after - (before - gradient)).abs() < 1e-6,
            "a missing gradient has no weight"
        );
    }
}

#[test]
fn the_functional_form_takes_an_empty_call() {
    let model = variables();
    let state = setup(window(2, Descent::new(1.0)), &model).expect("a state");
    let start = optimisers::trainables(&model).expect("parameters");
    let error = Update::functional(&state)
        .apply(&start, &Grads::new())
        .expect_err("refused");
    is_kind(&error, ErrorKind::NoGradient, &["no gradient for any"]);
    let (state, next, outcome) = Update::functional(&state)
        .allow_no_gradients()
        .apply(&start, &Grads::new())
        .expect("an update");
    assert_eq!(outcome.status, Status::Accumulated);
    let (_, _, outcome) = Update::functional(&state)
        .apply(&next, &gradients(1))
        .expect("an update");
    assert_eq!(outcome.status, Status::Stepped);
}

/// A gradient that nobody takes is as none: sums over the model are not of it, and a window of others counts
/// the call.
#[test]
fn gradients_of_frozen_parameters_alone_move_nothing_but_windows() {
    let model = variables();
    let only_frozen = grads([Some(random(9, &[3], DType::F32, &Device::Cpu))]);
    for window in [None, Some(AccumGrad::new(3))] {
        let mut state =
            setup(OptimiserChain::new((window.clone(), Prodigy::new(1.0))), &model).expect("a state");
        for seed in 0..3 {
            update(&mut state, &model, &gradients(seed)).expect("an update");
        }
        state.at("0").expect("a leaf").freeze();
        let before = (values(&model["1"]), state.leaf("1").map(|leaf| leaf.numbers()));
        let outcome = update(&mut state, &model, &only_frozen).expect("an update");
        let status = if window.is_some() {
            Status::Accumulated
        } else {
            Status::Skipped(SkipReason::NothingToMove)
        };
        assert_eq!(
            (outcome.status, outcome.frozen, outcome.without_gradient.len()),
            (status, 1, 1)
        );
        assert_eq!(
            (values(&model["1"]), state.leaf("1").map(|leaf| leaf.numbers())),
            before
        );
    }
}
