//! Windows of accumulation with gradients that weigh nothing, sums that overflow, and calls without anything
//! to collect.

use candle_core::DType;
use optimisers::{
    AccumGrad, AdamW, Average, Centralise, ClipGlobalNorm, ClipGrad, ClipNorm, Descent, Engine, LossScaler,
    MixedPrecision, Momentum, NonFinite, OptimiserChain, Outcome, Prodigy, Rule, SkipReason, StateTree,
    Status, StoreAs, Update, setup, setup_with, update,
};

use crate::model::models::of;
use support::common::{Grads, Vars, engines, given_up, grads, model, not_finite, snapshot, values};

const NAN: f64 = f64::NAN;

fn weighted(n: u64) -> AccumGrad {
    AccumGrad {
        average: Average::Weighted,
        ..AccumGrad::new(n)
    }
}

fn one(gradient: f64) -> Grads {
    grads([Some(of(&[gradient, gradient], DType::F32))])
}

/// A call for a parameter of two elements in which nothing may be infinite or NaN.
fn finite(engine: Engine, state: &mut StateTree, x: &Vars, gradient: f64, weight: u64) -> Outcome {
    Update::new(state)
        .engine(engine)
        .finite_only()
        .weight(weight)
        .apply(x, &one(gradient))
        .expect("an update")
}

fn zeros() -> Vars {
    model(&[of(&[0.0, 0.0], DType::F32)])
}

/// The gradients of a window with their weights, NaN with weight 0, in front and behind of which other rules
/// stand.
#[test]
fn a_gradient_of_weight_0_is_not_read() {
    let windows = [
        [(NAN, 0), (2.0, 1), (8.0, 2)],
        [(2.0, 1), (NAN, 0), (8.0, 2)],
        [(2.0, 1), (8.0, 2), (NAN, 0)],
    ];
    let rules: [Box<dyn Rule>; 6] = [
        Box::new(OptimiserChain::new((weighted(3), Descent::new(1.0)))),
        Box::new(OptimiserChain::new((
            ClipGrad::new(100.0),
            weighted(3),
            Descent::new(1.0),
        ))),
        Box::new(OptimiserChain::new((
            ClipNorm::new(100.0),
            weighted(3),
            Descent::new(1.0),
        ))),
        Box::new(OptimiserChain::new((
            ClipGlobalNorm::new(100.0),
            weighted(3),
            Descent::new(1.0),
        ))),
        Box::new(OptimiserChain::new((
            weighted(3),
            ClipGlobalNorm::new(100.0),
            Descent::new(1.0),
        ))),
        Box::new(OptimiserChain::new((weighted(3), weighted(1), Descent::new(1.0)))),
    ];
    for engine in engines() {
        for (rule, window) in rules.iter().flat_map(|rule| windows.map(|window| (rule, window))) {
            let x = zeros();
            let mut state = setup(MixedPrecision::new(DType::F64, rule.clone()), &x).expect("a state");
            let outcomes = window.map(|(gradient, weight)| finite(engine, &mut state, &x, gradient, weight));
            let seen = outcomes.map(|outcome| (outcome.status, outcome.applied, outcome.accumulated));
            let held = || (Status::Accumulated, 0, 1);
            assert_eq!(
                seen,
                [held(), held(), (Status::Stepped, 1, 0)],
                "{} on {engine:?}",
                rule.name()
            );
            assert_eq!(
                values(&x["0"]),
                [-6.0, -6.0],
                "{} on {engine:?}: {window:?}",
                rule.name()
            );
        }
    }
}

/// What comes before has read it, and state that would be spoiled stays guarded.
#[test]
fn rules_before_a_window_read_every_gradient() {
    let x = zeros();
    let mut state = setup(
        OptimiserChain::new((Momentum::new(1.0), weighted(2), Descent::new(1.0))),
        &x,
    )
    .expect("a state");
    let before = snapshot(&x, &state);
    let outcome = finite(Engine::Fused, &mut state, &x, NAN, 0);
    assert_eq!(outcome.status, not_finite("0"));
    assert!(snapshot(&x, &state) == before);
    let after = [(1.0, 0), (2.0, 1)]
        .map(|(gradient, weight)| finite(Engine::Fused, &mut state, &x, gradient, weight).status);
    assert_eq!(after, [Status::Accumulated, Status::Stepped]);
    assert!(
        (values(&x["0"])[0] + 0.9 + 2.0).abs() < 1e-6,
        "the momentum of both, the mean of the second"
    );

    // A function that has no state is not run.
    let x = model(&[of(&[0.0, 0.0], DType::F32).reshape((1, 2)).expect("a matrix")]);
    let mut state = setup(
        OptimiserChain::new((Centralise::default(), weighted(2), Descent::new(1.0))),
        &x,
    )
    .expect("a state");
    for (gradient, weight, status) in [
        ([NAN, 1.0], 0, Status::Accumulated),
        ([1.0, 3.0], 5, Status::Stepped),
    ] {
        let grads = grads([of(&gradient, DType::F32).reshape((1, 2)).ok()]);
        let outcome = Update::new(&mut state)
            .finite_only()
            .weight(weight)
            .apply(&x, &grads)
            .expect("an update");
        assert_eq!(outcome.status, status);
    }
    assert_eq!(values(&x["0"]), [1.0, -1.0]);
}

/// A rule without a weighted mean takes gradients of any weight.
#[test]
fn a_weight_of_0_is_for_weighted_means() {
    for average in [Average::Mean, Average::Sum] {
        let x = zeros();
        let mut state = setup(
            OptimiserChain::new((
                AccumGrad {
                    average,
                    ..AccumGrad::new(2)
                },
                Descent::new(1.0),
            )),
            &x,
        )
        .expect("a state");
        assert_eq!(
            finite(Engine::Fused, &mut state, &x, NAN, 0).status,
            not_finite("0")
        );
        (0..2).for_each(|_| _ = finite(Engine::Fused, &mut state, &x, 3.0, 0));
        assert_eq!(
            values(&x["0"])[0],
            if average == Average::Sum { -6.0 } else { -3.0 }
        );
    }
}

/// Weight decay would move the parameter if a gradient of zeros were applied.
#[test]
fn a_window_of_weight_0_makes_no_step() {
    let x = model(&[of(&[1.0, 1.0], DType::F32), of(&[1.0, 1.0], DType::F32)]);
    let rule = OptimiserChain::new((
        weighted(2),
        AdamW {
            lambda: 0.5,
            ..AdamW::new(0.1)
        },
    ));
    let mut state = setup(rule, &x).expect("a state");
    let both = grads([
        Some(of(&[1.0, 1.0], DType::F32)),
        Some(of(&[1.0, 1.0], DType::F32)),
    ]);
    let mut call = |grads: &Grads, weight: u64| {
        let outcome = Update::new(&mut state)
            .weight(weight)
            .apply(&x, grads)
            .expect("an update");
        (outcome.status, outcome.applied)
    };
    let held = || (Status::Accumulated, 0);
    assert_eq!(
        [call(&both, 0), call(&one(1.0), 0)],
        [held(), held()],
        "a whole window"
    );
    assert_eq!([values(&x["0"]), values(&x["1"])], [[1.0, 1.0], [1.0, 1.0]]);
    assert_eq!(
        [call(&both, 0), call(&one(1.0), 3)],
        [held(), (Status::Stepped, 1)],
        "only one has a gradient that counts"
    );
    assert_eq!(values(&x["1"]), [1.0, 1.0]);
    assert_eq!([call(&both, 1), call(&both, 0)], [held(), (Status::Stepped, 2)]);
    assert_eq!(
        state.leaves().map(|leaf| leaf.steps()).collect::<Vec<_>>(),
        [2, 1]
    );
}

/// Sums that overflow where they are kept: in F16, and of gradients that F32 has just room for.
#[test]
fn a_sum_that_overflows_ends_its_window() {
    let rules = |collect: AccumGrad, non_finite| -> [Box<dyn Rule>; 4] {
        let global = ClipGlobalNorm {
            non_finite,
            ..ClipGlobalNorm::new(1.0)
        };
        let leaf = ClipNorm {
            non_finite,
            p: f64::INFINITY,
            ..ClipNorm::new(1.0)
        };
        [
            Box::new(OptimiserChain::new((collect.clone(), Descent::new(1.0)))),
            Box::new(OptimiserChain::new((collect.clone(), global, Descent::new(1.0)))),
            Box::new(OptimiserChain::new((collect.clone(), leaf, Descent::new(1.0)))),
            Box::new(OptimiserChain::new((
                ClipGrad::new(3e38),
                collect,
                Descent::new(1.0),
            ))),
        ]
    };
    for engine in engines() {
        for (dtype, gradient, weight) in [
            (DType::F16, 20.0, 4096),
            (DType::BF16, 2e38, 1),
            (DType::F32, 2e38, 1),
        ] {
            for rule in rules(weighted(3), NonFinite::Error) {
                let x = zeros();
                let what = format!("{} in {dtype:?} on {engine:?}", rule.name());
                let mut state = setup(StoreAs::new([("acc", dtype)], rule), &x).expect("a state");
                let calls: Vec<Outcome> = (0..3)
                    .map(|_| finite(engine, &mut state, &x, gradient, weight))
                    .collect();
                let last = &calls[2];
                assert_eq!(
                    (&last.status, last.applied, last.accumulated),
                    (&given_up("0"), 0, 0),
                    "{what}"
                );
                assert!(
                    calls[..2]
                        .iter()
                        .all(|outcome| outcome.status == Status::Accumulated)
                );
                assert_eq!(values(&x["0"]), [0.0, 0.0], "{what}");
                // New windows begin with the next call, and end as any other.
                let next: Vec<Status> = (0..3)
                    .map(|_| finite(engine, &mut state, &x, 0.5, 1).status)
                    .collect();
                assert_eq!(
                    next,
                    [Status::Accumulated, Status::Accumulated, Status::Stepped],
                    "{what}"
                );
                assert_eq!(values(&x["0"]), [-0.5, -0.5], "{what}");
            }
        }
    }
    // A rule that skips by itself is no standstill either, after a gradient that was not finite.
    for rule in &rules(AccumGrad::new(2), NonFinite::Skip)[1..3] {
        let x = zeros();
        let mut state = setup(rule.clone(), &x).expect("a state");
        let mut call = |gradient| update(&mut state, &x, &one(gradient)).expect("an update").status;
        use Status::{Accumulated, Stepped};
        assert_eq!(
            [call(NAN), call(f64::INFINITY)],
            [Accumulated, not_finite("0")],
            "{}",
            rule.name()
        );
        assert_eq!(
            [call(0.5), call(0.5), call(0.5)],
            [given_up("0"), Accumulated, Stepped],
            "{}",
            rule.name()
        );
        assert_eq!(
            [call(0.5), call(NAN), call(0.5)],
            [Accumulated, not_finite("0"), Stepped],
            "{}",
            rule.name()
        );
    }
}

/// A loss scale has nothing to do with a sum that overflows, and every window of the model begins anew.
#[test]
fn a_window_that_is_given_up_leaves_the_loss_scale() {
    let x = model(&[of(&[0.0], DType::F32), of(&[0.0], DType::F32)]);
    let rule = |n, dtype| {
        StoreAs::new(
            [("acc", dtype)],
            OptimiserChain::new((AccumGrad::new(n), Descent::new(1.0))),
        )
    };
    let choose = |path: &str| {
        if path == "0" {
            rule(2, DType::F16)
        } else {
            rule(4, DType::F32)
        }
    };
    let mut state = setup_with(&x, |path, _| Some(choose(path))).expect("a state");
    let mut scaler = LossScaler::dynamic();
    let mut call = |first: f64| {
        let _ = scaler.scale(&of(&[1.0], DType::F32)).expect("a loss");
        let scale = scaler.current();
        let grads = grads([first, 1.0].map(|gradient| Some(of(&[gradient * scale], DType::F32))));
        let outcome = Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&x, &grads)
            .expect("an update");
        assert_eq!(scaler.current(), 65536.0);
        (outcome.status, outcome.applied)
    };
    use Status::{Accumulated, Stepped};
    let held = || (Accumulated, 0);
    assert_eq!([call(70_000.0), call(1.0)], [held(), (given_up("0"), 0)]);
    assert_eq!([call(2.0), call(4.0)], [held(), (Stepped, 1)]);
    assert_eq!([call(2.0), call(4.0)], [held(), (Stepped, 2)]);
    assert_eq!([values(&x["0"]), values(&x["1"])], [[-6.0], [-1.0]]);
}

/// The mean of weighted means is that of all gradients.
#[test]
fn a_mean_has_the_weight_of_its_gradients() {
    let x = zeros();
    let mut state = setup(
        OptimiserChain::new((weighted(2), weighted(2), Descent::new(1.0))),
        &x,
    )
    .expect("a state");
    for (gradient, weight) in [(1.0, 1), (2.0, 2), (3.0, 3), (5.0, 2)] {
        finite(Engine::Fused, &mut state, &x, gradient, weight);
    }
    assert_eq!(values(&x["0"]), [-3.0, -3.0]);
}

/// A gradient of a frozen leaf is none for the others: their windows go on, and what has none stays as it is.
#[test]
fn where_only_frozen_leaves_have_gradients() {
    let frozen = |rule: Box<dyn Rule>| {
        let x = model(&[of(&[1.0, 1.0], DType::F32), of(&[1.0, 1.0], DType::F32)]);
        let mut state = setup(rule, &x).expect("a state");
        let both = grads([
            Some(of(&[1.0, 2.0], DType::F32)),
            Some(of(&[2.0, 1.0], DType::F32)),
        ]);
        (0..3).for_each(|_| _ = update(&mut state, &x, &both).expect("an update"));
        state.at("0").expect("a leaf").freeze();
        (x, state)
    };
    // After three calls, a window of 2 is half-way and one of 3 has just ended.
    let window = |n| Box::new(OptimiserChain::new((AccumGrad::new(n), Prodigy::default()))) as Box<dyn Rule>;
    const NOTHING: Status = Status::Skipped(SkipReason::NothingToMove);
    let cases: [(Box<dyn Rule>, [Status; 3]); 4] = [
        (Box::new(Prodigy::default()), [NOTHING; 3]),
        (window(1), [NOTHING; 3]),
        (
            window(2),
            [Status::Stepped, Status::Accumulated, Status::Accumulated],
        ),
        (window(3), [const { Status::Accumulated }; 3]),
    ];
    for (rule, statuses) in cases {
        let name = rule.name();
        let (x, mut state) = frozen(rule);
        for status in statuses {
            let before = snapshot(&x, &state);
            let outcome = update(&mut state, &x, &one(1.0)).expect("an update");
            assert_eq!((&outcome.status, outcome.frozen), (&status, 1), "{name}");
            assert_eq!(
                snapshot(&x, &state) == before,
                status == NOTHING,
                "{name}: {status:?}"
            );
            assert_eq!(outcome.applied, usize::from(status == Status::Stepped));
        }
    }
}
