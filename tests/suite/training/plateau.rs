//! Learning rates that fall when a metric stops improving, against torch's `ReduceLROnPlateau`.

use candle_core::{DType, Device};
use optimisers::{
    AccumGrad, Checkpoint, CheckpointFile, Descent, ErrorKind, Momentum, OptimiserChain, Parameter,
    ReduceOnPlateau, Rule, Schedule, Setup, StateTree, setup, setup_with,
};

use support::common::{Vars, is_kind, model, random, says};
use support::crafted_checkpoints::{Pieces, file_of, open};
use support::threads::on;

const LOSS: &[f64] = &[
    2.5,
    2.4,
    2.41,
    2.4,
    2.3999,
    2.39,
    2.4,
    2.4,
    2.4,
    2.4,
    2.4,
    2.4,
    2.4,
    1.0,
    1.1,
    1.2,
    0.99,
    f64::NAN,
    1.5,
    1.5,
    1.5,
    1.5,
    1.5,
    1.5,
];

const ACCURACY: &[f64] = &[
    -0.5,
    0.1,
    0.1,
    0.12,
    0.125,
    0.11,
    0.11,
    0.3,
    0.3001,
    0.31,
    0.2,
    0.2,
    0.2,
    0.2,
    0.2,
    0.2,
    0.33,
    0.2,
    0.2,
    0.2,
    f64::INFINITY,
    0.2,
    0.2,
    0.2,
];

/// A run of torch's, for groups with the rates 0.3 and 0.02.
struct Run {
    plateau: ReduceOnPlateau,
    metrics: &'static [f64],
    /// After which observations rates have changed, and to what.
    changes: &'static [(usize, f64, f64)],
    /// The best metric, `num_bad_epochs` and `cooldown_counter` at the end.
    end: (f64, u64, u64),
}

/// torch 2.15.0, with `repr` of every rate.
fn runs() -> [Run; 6] {
    let min = ReduceOnPlateau::new;
    let max = || min().rising();
    [
        Run {
            plateau: min().patience(2),
            metrics: LOSS,
            changes: &[
                (4, 0.03, 0.002),
                (8, 0.003, 0.0002),
                (11, 0.00030000000000000003, 2e-05),
                (19, 3.0000000000000004e-05, 2.0000000000000003e-06),
                (22, 3.0000000000000005e-06, 2.0000000000000004e-07),
            ],
            end: (0.99, 1, 0),
        },
        Run {
            plateau: min().factor(0.3).patience(1).cooldown(2).relative_threshold(0.05),
            metrics: LOSS,
            changes: &[
                (2, 0.09, 0.006),
                (6, 0.027, 0.0018),
                (10, 0.0081, 0.00054),
                (15, 0.00243, 0.000162),
                (19, 0.0007289999999999999, 4.86e-05),
                (23, 0.00021869999999999998, 1.458e-05),
            ],
            end: (1.0, 0, 2),
        },
        Run {
            plateau: min()
                .factor(0.5)
                .patience(0)
                .absolute_threshold(0.01)
                .min_eta(0.01),
            metrics: LOSS,
            changes: &[
                (2, 0.15, 0.01),
                (3, 0.075, 0.01),
                (4, 0.0375, 0.01),
                (5, 0.01875, 0.01),
                (6, 0.01, 0.01),
            ],
            end: (1.0, 0, 0),
        },
        Run {
            plateau: max().factor(0.7).patience(2).relative_threshold(0.1),
            metrics: ACCURACY,
            changes: &[
                (6, 0.21, 0.013999999999999999),
                (10, 0.147, 0.009799999999999998),
                (13, 0.10289999999999999, 0.006859999999999998),
                (16, 0.07202999999999998, 0.004801999999999998),
                (19, 0.05042099999999999, 0.0033613999999999983),
                (23, 0.03529469999999999, 0.002352979999999999),
            ],
            end: (f64::INFINITY, 0, 0),
        },
        Run {
            plateau: max()
                .factor(0.9)
                .patience(1)
                .absolute_threshold(0.02)
                .epsilon(0.005)
                .cooldown(1),
            metrics: ACCURACY,
            changes: &[
                (3, 0.27, 0.02),
                (6, 0.24300000000000002, 0.02),
                (9, 0.21870000000000003, 0.02),
                (12, 0.19683000000000003, 0.02),
                (15, 0.17714700000000003, 0.02),
                (18, 0.15943230000000003, 0.02),
                (22, 0.14348907000000002, 0.02),
            ],
            end: (f64::INFINITY, 0, 0),
        },
        Run {
            plateau: min().factor(1e-3).patience(0).epsilon(1e-7),
            metrics: &[3.0; 12],
            changes: &[(1, 0.0003, 2e-05), (2, 3e-07, 2e-08), (3, 3e-10, 2e-08)],
            end: (3.0, 0, 0),
        },
    ]
}

fn variables() -> Vars {
    model(&[
        random(1, &[3], DType::F32, &Device::Cpu),
        random(2, &[2], DType::F32, &Device::Cpu),
    ])
}

/// Leaves with the rates 0.3 and 0.02, of which the second is frozen.
fn state(model: &Vars) -> StateTree {
    let mut state = setup_with(model, |path, _| {
        Some(Descent::new(if path == "0" { 0.3 } else { 0.02 }))
    })
    .expect("a state");
    state.at("1").expect("a leaf").freeze();
    state
}

fn rates(state: &StateTree) -> [f64; 2] {
    ["0", "1"].map(|path| {
        state
            .leaf(path)
            .and_then(|leaf| leaf.learning_rate())
            .expect("a rate")
    })
}

#[test]
fn rates_fall_as_with_torch_bit_for_bit() {
    for Run {
        plateau,
        metrics,
        changes,
        end,
    } in runs()
    {
        let model = variables();
        let mut state = state(&model);
        let mut reducer = plateau.clone();
        let mut expected = [0.3, 0.02];
        for (index, metric) in metrics.iter().enumerate() {
            let change = changes.iter().find(|(at, ..)| *at == index);
            expected = change.map_or(expected, |(_, first, second)| [*first, *second]);
            assert_eq!(
                reducer.observe(*metric, &mut state).expect("an observation"),
                change.is_some(),
                "{plateau:?}, {index}"
            );
            assert_eq!(rates(&state), expected, "{plateau:?}, {index}");
        }
        let counts = serde_json::to_value(&reducer).expect("JSON");
        assert_eq!(
            (reducer.best(), &counts["bad"], &counts["cooling"]),
            (Some(end.0), &end.1.into(), &end.2.into()),
            "{plateau:?}"
        );
    }
}

/// After which observations rates are reduced, and the best metric at the end.
fn reductions(
    plateau: &ReduceOnPlateau,
    metrics: impl IntoIterator<Item = f64>,
) -> (Vec<usize>, Option<f64>) {
    let model = variables();
    let (mut state, mut plateau) = (state(&model), plateau.clone());
    let reduces = |metric: f64| plateau.observe(metric, &mut state).expect("an observation");
    let reduced = metrics.into_iter().map(reduces).collect::<Vec<_>>();
    let places = reduced
        .iter()
        .enumerate()
        .filter(|(_, reduced)| **reduced)
        .map(|(place, _)| place)
        .collect();
    (places, plateau.best())
}

/// torch's margin of a metric below 0 is on the wrong side of the best: what stands still improves there.
#[test]
fn the_relative_margin_of_a_metric_below_zero_is_as_wide_as_above() {
    let falling = ReduceOnPlateau::new().patience(2);
    let rising = || falling.clone().rising();
    for constant in [1.0, -1.0, 0.0, 1e-300, -1e-300] {
        for plateau in [falling.clone(), rising()] {
            assert_eq!(
                reductions(&plateau, [constant; 8]),
                (vec![3, 6], Some(constant)),
                "{plateau:?} of {constant}"
            );
        }
    }
    // Worse by less than the margin, better by less, and better by more.
    let worse = (0..8).map(|call| -100.0 + 0.005 * f64::from(call));
    assert_eq!(reductions(&falling, worse), (vec![3, 6], Some(-100.0)));
    let better = (0..8).map(|call| -100.0 - 0.001 * f64::from(call));
    assert_eq!(reductions(&falling, better), (vec![3, 6], Some(-100.0)));
    let improves = (0..8).map(|call| -100.0 - 0.02 * f64::from(call));
    assert!(reductions(&falling, improves).0.is_empty());
    for (step, reduced) in [(-0.005, vec![3, 6]), (0.001, vec![3, 6]), (0.02, vec![])] {
        let metrics = (0..8).map(|call| -100.0 + step * f64::from(call));
        assert_eq!(reductions(&rising(), metrics).0, reduced, "by {step}");
    }
    // From above 0 to below.
    assert_eq!(
        reductions(&falling, [1.0, -1.0, -1.0, -1.0, -1.0]),
        (vec![4], Some(-1.0))
    );
    assert_eq!(
        reductions(&rising(), [-1.0, 1.0, 1.0, 1.0, 1.0]),
        (vec![4], Some(1.0))
    );
}

/// Saved and restored after every observation, in a state with other rates, it goes on as if nothing had
/// been.
#[test]
fn a_run_goes_on_after_a_checkpoint_at_any_place() {
    for Run {
        plateau,
        metrics,
        changes,
        end,
    } in runs()
    {
        let model = variables();
        let mut reducer = plateau.clone();
        let mut current = state(&model);
        for (index, metric) in metrics.iter().enumerate() {
            let file = open(&file_of(Checkpoint::new(&current).plateau(&reducer))).expect("a checkpoint");
            let restored = file.plateau().expect("numbers in range").expect("a plateau");
            assert_eq!(restored, reducer);
            reducer = restored;
            current = setup(Descent::new(7.0), &model).expect("a state");
            file.restore(&mut current).expect("a state");
            let changes_now = changes.iter().any(|(at, ..)| *at == index);
            assert_eq!(
                reducer.observe(*metric, &mut current).expect("an observation"),
                changes_now
            );
        }
        let last = changes.last().map(|(_, first, second)| [*first, *second]);
        assert_eq!((Some(rates(&current)), reducer.best()), (last, Some(end.0)));
    }
}

/// What the schedule is a factor of falls, so that warm-up and decay go on from there.
#[test]
fn a_relative_schedule_goes_on_from_what_is_reduced() {
    let model = variables();
    let mut state = state(&model);
    state
        .schedule(Schedule::linear(0.0, 1.0, 4).relative())
        .expect("a schedule");
    let mut plateau = ReduceOnPlateau::new().factor(0.5).patience(0).min_eta(0.015);
    let own = |state: &StateTree| {
        ["0", "1"].map(|path| {
            state
                .leaf(path)
                .and_then(|leaf| leaf.field("eta"))
                .expect("a rate")
        })
    };
    for metric in [1.0, 1.0] {
        plateau.observe(metric, &mut state).expect("an observation");
    }
    let first = ([0.0, 0.0], [0.15, 0.015].map(Into::into));
    assert_eq!(
        (rates(&state), own(&state)),
        first,
        "in the first step of the warm-up"
    );
    state.set_steps(2).expect("a count");
    assert_eq!(rates(&state), [0.075, 0.0075]);
    assert!(plateau.observe(1.0, &mut state).expect("an observation"));
    assert_eq!(
        (rates(&state), own(&state)),
        ([0.0375, 0.0075], [0.075, 0.015].map(Into::into))
    );

    let mut restored = setup(Descent::new(7.0), &model).expect("a state");
    open(&file_of(Checkpoint::new(&state)))
        .and_then(|file| file.restore(&mut restored))
        .expect("a state");
    restored.set_steps(4).expect("a count");
    assert_eq!(rates(&restored), [0.075, 0.015]);

    // Where a schedule alone decides, no reduction would have an effect.
    let mut state = setup(Descent::new(0.5), &model).expect("a state");
    state.schedule(Schedule::cosine(0.5, 0.0, 9)).expect("a schedule");
    let mut plateau = ReduceOnPlateau::new();
    let error = plateau.observe(1.0, &mut state).expect_err("refused at once");
    is_kind(
        &error,
        ErrorKind::Argument,
        &["a schedule sets its eta", "`relative`"],
    );
    assert_eq!(plateau, ReduceOnPlateau::new(), "what is refused does not count");
}

/// Of several rates in a chain the product is reduced, of other fields a place; a part of the model can have
/// a plateau of its own.
#[test]
fn parts_of_a_model_and_members_of_a_chain_are_chosen() {
    let model = variables();
    let choose = |path: &str, _: Parameter<'_>| -> Option<Box<dyn Rule>> {
        let chain = OptimiserChain::new((Momentum::new(0.25), Momentum::new(1.0)));
        Some(if path == "0" {
            Box::new(chain)
        } else {
            Box::new(AccumGrad::new(2))
        })
    };
    let mut state = setup_with(&model, choose).expect("a state");
    let fresh = ReduceOnPlateau::new().factor(0.5).patience(0);
    let mut plateau = fresh.clone().field("rho");
    let several = plateau.observe(1.0, &mut state).expect_err("two fields");
    is_kind(
        &several,
        ErrorKind::Argument,
        &[
            "several members of its chain have rho",
            "ReduceOnPlateau::field",
            "0.rho",
        ],
    );
    assert_eq!(several.path(), Some("0"), "{several}");
    assert_eq!(
        plateau,
        fresh.clone().field("rho"),
        "what is refused does not count"
    );
    let mut plateau = fresh.clone();
    let none = plateau
        .observe(1.0, state.at("1").expect("a leaf"))
        .expect_err("no rate");
    is_kind(&none, ErrorKind::UnknownName, &["no field \"eta\""]);
    assert_eq!(plateau, fresh, "what is refused does not count");

    // `min_eta` is one of the rate, too: 0.25, 0.125, 0.1.
    let plateaus = [
        (fresh.clone(), 0.25),
        (fresh.clone().field("1.eta"), 0.25),
        (fresh.min_eta(0.1), 0.4),
    ];
    for (mut plateau, last) in plateaus {
        let mut state = setup_with(&model, choose).expect("a state");
        for metric in [1.0, 1.0, 1.0] {
            plateau
                .observe(metric, state.at("0").expect("a leaf"))
                .expect("an observation");
        }
        let leaf = state.leaf("0").expect("a leaf");
        assert_eq!(
            ["0.eta", "1.eta"].map(|field| leaf.field(field)),
            [Some(0.25.into()), Some(last.into())]
        );
    }
}

#[test]
fn settings_out_of_range_are_refused_where_they_are_used_saved_and_read() {
    let model = variables();
    let mut state = state(&model);
    let good = ReduceOnPlateau::new;
    let refused = [
        (good().factor(1.0), "factor"),
        (good().factor(0.0), "factor"),
        (good().factor(f64::NAN), "factor"),
        (good().min_eta(-1.0), "min_eta"),
        (good().epsilon(f64::INFINITY), "epsilon"),
        (good().relative_threshold(1.0), "threshold"),
        (good().absolute_threshold(-1e-4), "threshold"),
    ];
    for (mut plateau, name) in refused {
        let error = plateau.observe(1.0, &mut state).expect_err("refused");
        is_kind(
            &error,
            ErrorKind::Argument,
            &[&format!("ReduceOnPlateau: {name} is ")],
        );
        let folder = tempfile::tempdir().expect("a folder");
        assert!(
            Checkpoint::new(&state)
                .plateau(&plateau)
                .save(folder.path().join("run"))
                .is_err()
        );
    }
    let plain = Pieces::of(&file_of(Checkpoint::new(&state)));
    assert!(
        plain.description.get("plateau").is_none(),
        "the file of a version without plateaus"
    );
    assert_eq!(
        open(&plain.bytes())
            .and_then(|file| file.plateau())
            .expect("a file"),
        None
    );
    let pieces = Pieces::of(&file_of(
        Checkpoint::new(&state).plateau(&ReduceOnPlateau::default()),
    ));
    for (name, value) in [
        ("bad", serde_json::json!(11)),
        ("cooling", serde_json::json!(1)),
        ("best", serde_json::json!("nan")),
    ] {
        let mut damaged = pieces.clone();
        damaged.description["plateau"][name] = value;
        let error = open(&damaged.bytes())
            .and_then(|file| file.plateau())
            .expect_err("refused");
        says(&error, &["ReduceOnPlateau", name]);
    }
    assert_eq!(rates(&state), [0.3, 0.02]);
}

#[test]
fn ranks_save_one_plateau_and_refuse_two() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run");
    let saved = path.clone();
    let refused = on(2, move |world| {
        let mut state = Setup::over(&world)
            .build(Descent::new(0.5), &variables())
            .expect("a state");
        let mut plateau = ReduceOnPlateau::default();
        plateau.observe(3.0, &mut state).expect("an observation");
        Checkpoint::new(&state)
            .plateau(&plateau)
            .save(&saved)
            .expect("a file");
        plateau
            .observe(optimisers::Communicator::rank(&world) as f64, &mut state)
            .expect("an observation");
        Checkpoint::new(&state)
            .plateau(&plateau)
            .save(&saved)
            .expect_err("two metrics")
            .to_string()
    });
    assert!(
        refused
            .iter()
            .all(|error| error.contains("differs in the plateau")),
        "{refused:?}"
    );
    let plateau = CheckpointFile::open(&path)
        .and_then(|file| file.plateau())
        .expect("a file")
        .expect("a plateau");
    assert_eq!(plateau.best(), Some(3.0));
}
