//! Calls that are skipped as their norm is an outlier: which, what counts for the next, and what goes with
//! them.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, AdamW, Checkpoint, ClipGlobalNorm, ClipGrad, Communicator, Descent, DynamicScale, ErrorKind,
    LossScaler, MixedPrecision, Optimiser, OptimiserChain, Outcome, Outlier, Parameter, Rule, Scale, Setup,
    SkipOutliers, SkipReason, StateTree, Status, Update, WeightDecay, setup, setup_with, trainables, update,
};

use support::common::{
    Vars, bits, constant, engines, good_steps, grads, is_kind, model, not_finite, says, snapshot, tensor,
    values,
};
use support::crafted_checkpoints::{Pieces, file_of, open};
use support::threads::on;

/// Norms from 1 to 2.
fn usual(call: u64) -> f64 {
    1.0 + ((call * 7919) % 1000) as f64 / 1000.0
}

/// One call with a gradient of this norm for a parameter of one element.
fn call(state: &mut StateTree, model: &Vars, norm: f64) -> Outcome {
    update(state, model, &grads([Some(constant(norm, 1, DType::F64))])).expect("an update")
}

/// The outlier for which a call was skipped.
fn outlier(outcome: &Outcome) -> Option<Outlier> {
    if let Some(SkipReason::Outlier(outlier)) = outcome.skipped() {
        Some(*outlier)
    } else {
        None
    }
}

fn parameter() -> Vars {
    model(&[constant(0.0, 1, DType::F64)])
}

fn small(sigma: f64) -> SkipOutliers {
    SkipOutliers {
        window: 32,
        ..SkipOutliers::new(sigma)
    }
}

fn chain(rule: SkipOutliers) -> OptimiserChain<(SkipOutliers, ClipGlobalNorm, Descent)> {
    OptimiserChain::new((rule, ClipGlobalNorm::new(1e12), Descent::new(0.5)))
}

/// The norms that a state keeps of a group, the oldest first, as its checkpoints have them.
fn norms_seen(state: &StateTree, group: u64) -> Vec<f64> {
    let description = Pieces::of(&file_of(Checkpoint::new(state))).description;
    let norms = description["norms"][group.to_string()].as_array();
    norms
        .into_iter()
        .flatten()
        .map(|norm| norm.as_f64().expect("a norm"))
        .collect()
}

/// After 40 usual calls.
fn seasoned(rule: impl Rule + Clone) -> (Vars, StateTree) {
    let x = parameter();
    let mut state = setup(rule, &x).expect("a state");
    for index in 0..40 {
        assert_eq!(call(&mut state, &x, usual(index)).status, Status::Stepped);
    }
    (x, state)
}

/// Which calls are skipped, by OLMo-core's formula in torch 2.15.0 (`torch.std_mean` of the last norms, the
/// skipped ones too).
#[test]
fn the_same_calls_are_skipped_as_by_olmo() {
    /// The window, σ, how many calls there are, norms that are not usual, from which call on all are 40 times
    /// as large, and what is skipped.
    type Run = (u64, f64, u64, &'static [(u64, f64)], u64, &'static [u64]);
    let runs: [Run; 3] = [
        (
            128,
            6.0,
            400,
            &[
                (30, 90.0),
                (62, 7.0),
                (63, 7.0),
                (100, 5.0),
                (101, 3.5),
                (150, 1e6),
                (151, 1e6),
                (152, 2e4),
                (200, 50.0),
                (290, 6.0),
                (300, 9.0),
                (301, 9.0),
                (302, 9.0),
            ],
            340,
            &[150, 151, 340, 341, 342, 346],
        ),
        (
            32,
            3.0,
            120,
            &[
                (18, 9.0),
                (19, 9.0),
                (20, 9.0),
                (40, 4.0),
                (60, 3.2),
                (80, 1e3),
                (81, 1e3),
                (82, 1e3),
                (83, 1e3),
                (84, 1e3),
            ],
            110,
            &[19, 60, 80, 81, 82, 83],
        ),
        (
            20,
            2.0,
            90,
            &[(19, 2.4), (40, 2.6), (41, 2.6), (42, 2.6), (70, 1e9)],
            u64::MAX,
            &[19, 40, 41, 42, 70],
        ),
    ];
    for (window, sigma, calls, unusual, regime, expected) in runs {
        let x = parameter();
        let mut state = setup(
            chain(SkipOutliers {
                window,
                ..SkipOutliers::new(sigma)
            }),
            &x,
        )
        .expect("a state");
        let mut skipped = Vec::new();
        for index in 0..calls {
            let spike = unusual
                .iter()
                .find(|(at, _)| *at == index)
                .map_or(usual(index), |(_, norm)| *norm);
            let norm = if index >= regime {
                40.0 * usual(index)
            } else {
                spike
            };
            let before = values(&x["0"]);
            let outcome = call(&mut state, &x, norm);
            assert_eq!(outcome.global_norm, Some(norm));
            let Some(outlier) = outlier(&outcome) else {
                assert_eq!((outcome.status, outcome.applied), (Status::Stepped, 1));
                continue;
            };
            skipped.push(index);
            assert_eq!(
                (outcome.status, outcome.applied),
                (Status::Skipped(SkipReason::Outlier(outlier)), 0)
            );
            assert_eq!((outlier.group, outlier.norm), (0, norm));
            assert!(outlier.limit < norm && outlier.limit > 1.0, "{outlier:?}");
            assert_eq!(values(&x["0"]), before);
        }
        assert_eq!(skipped, expected, "window {window}");
        assert_eq!(
            state.leaf("0").map(|leaf| leaf.steps()),
            Some(calls - skipped.len() as u64)
        );
        assert_eq!(norms_seen(&state, 0).len() as u64, window);
    }
}

/// Norms that are equal but for rounding say nothing of the next, and neither do norms of zero.
#[test]
fn norms_without_a_deviation_make_no_outliers() {
    for (usual, next, is_outlier) in [
        (1.0, 1.000_001, false),
        (1.0, 1.0001, true),
        (0.0, 1.0, false),
        (0.5, 0.0, false),
    ] {
        let x = parameter();
        let mut state = setup(chain(small(6.0)), &x).expect("a state");
        (0..40).for_each(|_| assert_eq!(call(&mut state, &x, usual).status, Status::Stepped));
        assert_eq!(
            outlier(&call(&mut state, &x, next)).is_some(),
            is_outlier,
            "{next} after {usual}"
        );
    }
}

/// A window of fewer norms than are asked for otherwise judges when it is full.
#[test]
fn a_short_window_judges_when_it_is_full() {
    for window in [2, 7, 18, 19, 20, 21, 50, 128] {
        let x = parameter();
        let mut state = setup(
            chain(SkipOutliers {
                window,
                ..SkipOutliers::new(3.0)
            }),
            &x,
        )
        .expect("a state");
        let expected = window.min(u64::max(20, window / 2) - 1);
        let judged = (0..200).find(|index| {
            let mut copy = state.try_clone().expect("a copy");
            let is_judged = outlier(&call(&mut copy, &x, 1e9)).is_some();
            call(&mut state, &x, usual(*index));
            is_judged
        });
        assert_eq!(judged, Some(expected), "window {window}");
    }
}

/// What the norm is of is what stands before, whatever comes behind it.
#[test]
fn clipping_behind_does_not_matter() {
    let optimisers: [Optimiser; 4] = [
        Optimiser::new(OptimiserChain::new((
            small(6.0),
            ClipGlobalNorm::new(0.5),
            Descent::new(0.5),
        ))),
        Optimiser::new(OptimiserChain::new((
            small(6.0),
            Scale::new(1.0),
            ClipGlobalNorm::new(0.5),
            Descent::new(0.5),
        ))),
        Optimiser::new(OptimiserChain::new((
            small(6.0),
            ClipGlobalNorm {
                group: 3,
                ..ClipGlobalNorm::new(0.5)
            },
            Descent::new(0.5),
        ))),
        Optimiser::new(OptimiserChain::new((
            OptimiserChain::new((small(6.0),)),
            Some(ClipGlobalNorm::new(0.5)),
            Descent::new(0.5),
        ))),
    ];
    let run = |engine, optimiser: Optimiser| {
        let x = model(&[tensor(1, &[5], DType::F32), tensor(2, &[70], DType::F32)]);
        let mut state = setup(optimiser, &x).expect("a state");
        let mut said = Vec::new();
        for index in 0..50u64 {
            let size = if index == 33 || index == 40 { 1e4 } else { 1.0 };
            let gradients = [
                tensor(10 + index, &[5], DType::F32),
                tensor(90 + index, &[70], DType::F32),
            ];
            let gradients = grads(gradients.map(|gradient| gradient.affine(size, 0.0).ok()));
            let outcome = Update::new(&mut state)
                .engine(engine)
                .apply(&x, &gradients)
                .expect("an update");
            said.push((outcome.status, outcome.global_norm));
        }
        (
            said,
            [bits(&x["0"]), bits(&x["1"])],
            norms_seen(&state, 0)
                .into_iter()
                .map(f64::to_bits)
                .collect::<Vec<_>>(),
        )
    };
    let expected = run(engines()[0], optimisers[0].clone());
    let is_outlier = |status: &Status| matches!(status, Status::Skipped(SkipReason::Outlier(_)));
    assert_eq!(
        expected.0.iter().filter(|(status, _)| is_outlier(status)).count(),
        1,
        "the first of two: {:?}",
        expected.0
    );
    for engine in engines() {
        for optimiser in &optimisers {
            let (said, parameters, norms) = run(engine, optimiser.clone());
            let is_emulated = format!("{engine:?}") == "Emulated";
            let skipped = |said: &[(Status, _)]| {
                said.iter()
                    .map(|(status, _)| (is_outlier(status), *status == Status::Stepped))
                    .collect::<Vec<_>>()
            };
            assert_eq!(
                skipped(&said),
                skipped(&expected.0),
                "{engine:?} {}",
                optimiser.name()
            );
            if !is_emulated {
                assert_eq!(
                    (parameters, norms),
                    (expected.1.clone(), expected.2.clone()),
                    "{engine:?} {}",
                    optimiser.name()
                );
            }
        }
    }
}

/// Behind a rule the norm is of what that has left.
#[test]
fn a_norm_is_of_what_the_rules_before_have_left() {
    let (x, mut state) = seasoned(OptimiserChain::new((
        ClipGrad::new(1.5),
        small(6.0),
        Descent::new(0.5),
    )));
    assert_eq!(call(&mut state, &x, 1e6).status, Status::Stepped);
    assert!(norms_seen(&state, 0).into_iter().all(|norm| norm <= 1.5));
}

#[test]
fn what_is_not_finite_is_an_overflow_and_counts_for_nothing() {
    for rule in [
        Box::new(OptimiserChain::new((small(6.0), Descent::new(0.5)))) as Box<dyn Rule>,
        // An error without the rule before.
        Box::new(chain(small(6.0))),
    ] {
        let (x, mut state) = seasoned(rule);
        let before = (snapshot(&x, &state), norms_seen(&state, 0));
        for number in [f64::INFINITY, f64::NAN] {
            let gradients = grads([Some(constant(number, 1, DType::F64))]);
            for finite_only in [true, false] {
                let update = Update::new(&mut state);
                let update = if finite_only { update.finite_only() } else { update };
                let outcome = update.apply(&x, &gradients).expect("an update");
                assert_eq!(outcome.status, not_finite("0"));
            }
        }
        assert_eq!((snapshot(&x, &state), norms_seen(&state, 0)), before);
        assert!(outlier(&call(&mut state, &x, 50.0)).is_some());
    }
}

/// Norms are those without the scale, an overflow lowers the scale and an outlier does not.
#[test]
fn a_loss_scaler_comes_first() {
    let x = model(&[constant(0.0, 1, DType::F16)]);
    let mut state = setup(MixedPrecision::new(DType::F32, chain(small(6.0))), &x).expect("a state");
    let mut scaler = LossScaler::with(DynamicScale {
        initial: 1024.0,
        ..DynamicScale::default()
    });
    let mut step = |norm: f64| {
        let scale = scaler.current();
        let _ = scaler.scale(&constant(1.0, 1, DType::F32)).expect("a loss");
        let gradients = grads([Some(constant(norm * scale, 1, DType::F16))]);
        let outcome = Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&x, &gradients)
            .expect("an update");
        (outcome, scaler.current(), good_steps(&scaler))
    };
    for index in 0..40 {
        assert_eq!(step(1.0 + (index % 4) as f64 / 4.0).0.status, Status::Stepped);
    }
    let (outcome, scale, good) = step(40.0);
    assert_eq!(
        (outlier(&outcome).map(|outlier| outlier.norm), scale, good),
        (Some(40.0), 1024.0, 40)
    );
    let (outcome, scale, good) = step(1000.0);
    assert_eq!((outcome.status, scale, good), (not_finite("0"), 512.0, 0));
    assert_eq!(step(1.5).0.status, Status::Stepped);
    assert_eq!(norms_seen(&state, 0)[29..], [1.75, 40.0, 1.5]);
}

/// A parameter without a gradient in the earlier calls of a window has no part in whether the window ends.
#[test]
fn an_outlier_ends_the_windows_of_all_parameters() {
    for collected in [0, 1] {
        let x = model(&[constant(0.0, 1, DType::F64), constant(0.0, 1, DType::F64)]);
        let rule = OptimiserChain::new((AccumGrad::new(2), small(6.0), Descent::new(1.0)));
        let mut state = setup(rule, &x).expect("a state");
        let gradient = |norm| Some(constant(norm, 1, DType::F64));
        let mut call =
            |gradients: [Option<Tensor>; 2]| update(&mut state, &x, &grads(gradients)).expect("an update");
        for index in 0..80 {
            call([gradient(usual(index / 2)), gradient(usual(index / 2))]);
        }
        let mut only_one = [None, None];
        only_one[collected] = gradient(99.0);
        assert_eq!(call(only_one).status, Status::Accumulated);
        assert!(outlier(&call([gradient(1.0), gradient(1.0)])).is_some());
        // The next call is the first of a new window.
        let status = [(); 2].map(|()| call([gradient(1.5), gradient(1.5)]).status);
        assert_eq!(
            status,
            [Status::Accumulated, Status::Stepped],
            "collected by {collected}"
        );
    }
}

/// Behind a window the outlier takes what was collected with it, before it the micro-batch only.
#[test]
fn an_outlier_ends_the_window_that_it_is_of() {
    let (x, mut state) = seasoned(OptimiserChain::new((
        small(6.0),
        AccumGrad::new(1),
        Descent::new(0.5),
    )));
    assert!(outlier(&call(&mut state, &x, 50.0)).is_some());

    let x = parameter();
    let mut state = setup(
        OptimiserChain::new((AccumGrad::new(2), small(6.0), Descent::new(1.0))),
        &x,
    )
    .expect("a state");
    for index in 0..80 {
        call(&mut state, &x, usual(index / 2));
    }
    let before = (values(&x["0"]), state.leaf("0").map(|leaf| leaf.steps()));
    assert_eq!(call(&mut state, &x, 99.0).status, Status::Accumulated);
    let outcome = call(&mut state, &x, 1.0);
    assert_eq!(
        outlier(&outcome).map(|outlier| outlier.norm),
        Some(50.0),
        "the mean"
    );
    assert_eq!(
        (values(&x["0"]), state.leaf("0").map(|leaf| leaf.steps())),
        before
    );
    // What was collected is gone, and the next call is the first of a new window.
    assert_eq!(call(&mut state, &x, 1.5).status, Status::Accumulated);
    assert_eq!(call(&mut state, &x, 1.5).status, Status::Stepped);
    assert_eq!(values(&x["0"])[0], before.0[0] - 1.5);

    let x = parameter();
    let mut state = setup(
        OptimiserChain::new((small(6.0), AccumGrad::new(2), Descent::new(1.0))),
        &x,
    )
    .expect("a state");
    for index in 0..40 {
        call(&mut state, &x, usual(index));
    }
    let before = values(&x["0"])[0];
    assert_eq!(call(&mut state, &x, 1.5).status, Status::Accumulated);
    assert!(
        outlier(&call(&mut state, &x, 50.0)).is_some(),
        "the micro-batch that would end the window"
    );
    assert_eq!(call(&mut state, &x, 1.75).status, Status::Stepped);
    assert_eq!(values(&x["0"])[0], before - 1.625);
}

/// Each group has norms of its own, one that is large skips the whole call, and all of them count. Leaves
/// without a part in the call have no part in its norms.
#[test]
fn groups_are_judged_each_by_its_own_norms() {
    let one = || constant(0.0, 1, DType::F64);
    let x = model(&[one(), one(), one()]);
    let choose = |path: &str, _: Parameter<'_>| -> Option<Box<dyn Rule>> {
        let skip = |group| OptimiserChain::new((SkipOutliers { group, ..small(6.0) }, Descent::new(0.5)));
        Some(match path {
            "0" => Box::new(skip(7)),
            "1" => Box::new(skip(2)),
            _ => Box::new(OptimiserChain::new((
                ClipGlobalNorm {
                    group: 5,
                    ..ClipGlobalNorm::new(1.0)
                },
                Descent::new(0.5),
            ))),
        })
    };
    let mut state = setup_with(&x, choose).expect("a state");
    let step = |state: &mut StateTree, norms: [Option<f64>; 3]| {
        let gradients = norms.map(|norm| norm.map(|norm| constant(norm, 1, DType::F64)));
        update(state, &x, &grads(gradients)).expect("an update")
    };
    for index in 0..40 {
        // 100 times as large, and seldom there.
        let second = (index % 2 == 0).then(|| 100.0 * usual(index));
        assert_eq!(
            outlier(&step(&mut state, [Some(usual(index)), second, Some(1e9)])),
            None
        );
    }
    assert_eq!(
        step(&mut state, [Some(1.5), Some(150.0), Some(1.0)]).status,
        Status::Stepped
    );
    for (norms, group) in [
        ([Some(50.0), Some(150.0), None], 7),
        ([Some(1.0), Some(5000.0), None], 2),
        ([Some(9e9), Some(9e9), None], 2),
    ] {
        let outcome = step(&mut state, norms);
        assert_eq!(
            outlier(&outcome).map(|outlier| outlier.group),
            Some(group),
            "{norms:?}"
        );
        assert_eq!(outcome.group_norms.len(), 2);
    }
    assert_eq!(norms_seen(&state, 7)[28..], [1.5, 50.0, 1.0, 9e9]);
    assert_eq!(norms_seen(&state, 2)[20..], [150.0, 150.0, 5000.0, 9e9]);
    assert_eq!((norms_seen(&state, 5).len(), norms_seen(&state, 0).len()), (0, 0));

    state.at("0").expect("a leaf").freeze();
    let seen = norms_seen(&state, 7);
    step(&mut state, [Some(1e3), Some(120.0), None]);
    assert_eq!(norms_seen(&state, 7), seen);
    // A leaf that comes later is judged by the norms there are.
    let mut grown = x.clone();
    grown.insert("new".to_string(), support::common::var(&one()));
    state
        .add(
            OptimiserChain::new((
                SkipOutliers {
                    group: 2,
                    ..small(6.0)
                },
                Descent::new(0.5),
            )),
            &grown,
        )
        .expect("a new leaf");
    assert_eq!(norms_seen(&state, 2).len(), 25);
}

#[test]
fn a_restored_state_skips_what_the_saved_one_would_have() {
    let (x, mut state) = seasoned(chain(small(6.0)));
    assert!(outlier(&call(&mut state, &x, 50.0)).is_some());
    let file = file_of(Checkpoint::new(&state).model(&x));
    let other = parameter();
    let mut restored = setup(chain(small(6.0)), &other).expect("a state");
    open(&file)
        .and_then(|file| file.restore_with_model(&mut restored, &other))
        .expect("a state");
    assert!(norms_seen(&restored, 0) == norms_seen(&state, 0));
    for norm in [50.0, 30.0, 1.5, 49.0, 20.0] {
        assert_eq!(
            call(&mut restored, &other, norm),
            call(&mut state, &x, norm),
            "{norm}"
        );
    }
    assert_eq!(snapshot(&other, &restored), snapshot(&x, &state));

    // A file of a state without norms, and norms that are none.
    let fresh = setup(chain(small(6.0)), &parameter()).expect("a state");
    let plain = file_of(Checkpoint::new(&fresh));
    assert!(
        Pieces::of(&plain).description.get("norms").is_none(),
        "the file of a version without outliers"
    );
    open(&plain)
        .and_then(|file| file.restore(&mut restored))
        .expect("a state");
    assert_eq!(norms_seen(&restored, 0).len(), 0);
    for number in [
        serde_json::json!(-1.0),
        serde_json::json!("nan"),
        serde_json::json!("inf"),
    ] {
        let mut damaged = Pieces::of(&file);
        damaged.description["norms"]["0"][3] = number;
        let error = open(&damaged.bytes())
            .and_then(|file| file.restore(&mut restored))
            .expect_err("refused");
        says(&error, &["among the norms of earlier calls"]);
    }
    assert_eq!(norms_seen(&restored, 0).len(), 0, "nothing has changed");
}

/// The functional update returns the norms with the state, and leaves those of its argument.
#[test]
fn a_functional_update_takes_the_norms_along() {
    let (x, state) = seasoned(chain(small(6.0)));
    let gradients = grads([Some(constant(50.0, 1, DType::F64))]);
    let parameters = trainables(&x).expect("parameters");
    let (next, same, outcome) = Update::functional(&state)
        .apply(&parameters, &gradients)
        .expect("an update");
    assert!(outlier(&outcome).is_some());
    assert_eq!(values(&same["0"]), values(&x["0"]));
    assert_eq!(
        (norms_seen(&state, 0).last(), norms_seen(&next, 0).last()),
        (Some(&usual(39)), Some(&50.0))
    );
}

/// All ranks skip the same calls, and their file is that of one process.
#[test]
fn ranks_judge_the_norm_of_all() {
    let gradient = |index: u64, rank: u64| {
        let size = if index >= 30 && index.is_multiple_of(3) {
            100.0
        } else {
            1.0
        };
        grads([
            tensor(100 * index + rank, &[33], DType::F32)
                .affine(size, 0.0)
                .ok(),
            Some(tensor(100 * index + rank + 50, &[2, 3], DType::F32)),
        ])
    };
    let optimiser = || {
        OptimiserChain::new((
            small(6.0),
            ClipGlobalNorm::new(0.5),
            WeightDecay::new(0.1),
            AdamW::new(0.01),
        ))
    };
    let parameters = || model(&[tensor(1, &[33], DType::F32), tensor(2, &[2, 3], DType::F32)]);
    let folder = tempfile::tempdir().expect("a folder");
    let run = move |state: &mut StateTree, x: &Vars, rank: u64| {
        let step = |index| update(state, x, &gradient(index, rank)).expect("an update");
        (0..45)
            .map(step)
            .map(|outcome| outcome.status)
            .collect::<Vec<_>>()
    };
    let whole = parameters();
    let mut state = setup(optimiser(), &whole).expect("a state");
    let expected = run(&mut state, &whole, 0);
    assert!(
        expected
            .iter()
            .filter(|status| matches!(status, Status::Skipped(SkipReason::Outlier(_))))
            .count()
            > 1,
        "{expected:?}"
    );
    Checkpoint::new(&state)
        .save(folder.path().join("whole"))
        .expect("a file");

    let path = folder.path().join("ranks");
    let ranks = on(2, move |world| {
        let x = parameters();
        let mut state = Setup::over(&world).build(optimiser(), &x).expect("a state");
        // The same gradients everywhere, so that their mean is that of one process.
        let said = run(&mut state, &x, 0);
        Checkpoint::new(&state).save(&path).expect("a file");
        let differs = run(&mut state, &x, world.rank() as u64);
        (said, differs, x.values().map(|x| bits(x)).collect::<Vec<_>>())
    });
    assert_eq!(ranks[0].0, expected);
    assert_eq!(ranks[0], ranks[1]);
    let file = |name: &str| std::fs::read(folder.path().join(name)).expect("a file");
    assert!(file("whole") == file("ranks"));
}

/// Ranks of which one has seen other norms would not skip the same calls. A skipped call moves nothing else
/// by which they could be told apart.
#[test]
fn ranks_with_other_norms_before_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run");
    let refused = on(2, move |world| {
        let x = parameter();
        let mut state = Setup::over(&world).build(chain(small(6.0)), &x).expect("a state");
        for index in 0..40 {
            call(&mut state, &x, usual(index));
        }
        let before = state.try_clone().expect("a copy");
        assert!(outlier(&call(&mut state, &x, 50.0)).is_some());
        let mut mine = if world.rank() == 1 { before } else { state };
        let gradients = grads([Some(constant(1.5, 1, DType::F64))]);
        [
            Checkpoint::new(&mine).save(&path).expect_err("two histories"),
            update(&mut mine, &x, &gradients).expect_err("two histories"),
        ]
    });
    for error in refused.iter().flatten() {
        is_kind(
            error,
            ErrorKind::Ranks,
            &["rank 1 differs in the history of norms"],
        );
        assert_eq!(error.rank(), Some(1), "{error}");
    }
}

#[test]
fn settings_out_of_range_are_refused() {
    for (rule, field) in [
        (SkipOutliers::new(0.0), "sigma"),
        (SkipOutliers::new(f64::NAN), "sigma"),
        (
            SkipOutliers {
                window: 1,
                ..SkipOutliers::default()
            },
            "window",
        ),
        (
            SkipOutliers {
                window: 1 << 17,
                ..SkipOutliers::default()
            },
            "window",
        ),
    ] {
        let error = setup(rule, &parameter()).expect_err("refused");
        is_kind(
            &error,
            ErrorKind::Argument,
            &[&format!("SkipOutliers: {field} is ")],
        );
    }
}

/// Each rule has the norm of the parameters that have it.
#[test]
fn clipping_and_limits_are_of_the_parameters_that_have_them() {
    let gradient = |value: f32| Tensor::new(&[value], &Device::Cpu).expect("a gradient");
    for engine in engines() {
        let x = model(&[gradient(0.0), gradient(0.0), gradient(0.0)]);
        let rules = |path: &str, _: Parameter<'_>| -> Option<Optimiser> {
            Some(match path {
                "0" => Optimiser::new(OptimiserChain::new((
                    small(6.0),
                    ClipGlobalNorm::new(5.0),
                    Descent::new(1.0),
                ))),
                "1" => Optimiser::new(OptimiserChain::new((
                    small(6.0),
                    Scale::new(2.0),
                    ClipGlobalNorm::new(5.0),
                    Descent::new(1.0),
                ))),
                _ => Optimiser::new(OptimiserChain::new((small(6.0), Descent::new(1.0)))),
            })
        };
        let mut state = setup_with(&x, rules).expect("a state");
        let outcome = Update::new(&mut state)
            .engine(engine)
            .apply(&x, &grads([3.0, 4.0, 12.0].map(|g| Some(gradient(g)))))
            .expect("a step");
        // √(3² + 4² + 12²), and √(3² + 8²) where it clips.
        assert_eq!(norms_seen(&state, 0), [13.0], "{engine:?}");
        let clipped = 5.0 / 73f64.sqrt();
        assert!(
            (outcome.global_norm.expect("a norm") - 73f64.sqrt()).abs() < 1e-6,
            "{outcome:?}"
        );
        for (path, expected) in [("0", -3.0 * clipped), ("1", -8.0 * clipped), ("2", -12.0)] {
            assert!(
                (values(&x[path])[0] - expected).abs() < 1e-5,
                "{path} on {engine:?}: {:?} for {expected}",
                values(&x[path])
            );
        }
    }
}
