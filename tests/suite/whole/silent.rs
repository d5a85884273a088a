//! What hurts a run without an error: each is said once, with the remedy, and what is meant is not said.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, Optimizer, VarBuilder, VarMap, linear, loss::mse};
use optimisers::{
    AccumGrad, Adam, AdamW, Adjust, CandleOptimizer, Checkpoint, ClipGlobalNorm, Descent, ErrorKind,
    FieldValue, MixedPrecision, Momentum, OptimiserChain, Parameter, ReduceOnPlateau, Schedule, Segments,
    StateTree, Update, Warning, setup, setup_with, update,
};

use support::common::{Vars, bits, constant, grads, is_kind, logged, model, random, var};
use support::crafted_checkpoints::{file_of, open};

const CPU: &Device = &Device::Cpu;

fn pair(dtype: DType) -> Vars {
    model(&[random(1, &[6, 5], dtype, CPU), random(2, &[5], dtype, CPU)])
}

fn ones(model: &Vars) -> support::common::Grads {
    grads(model.values().map(|x| x.ones_like().ok()))
}

fn step(state: &mut StateTree, model: &Vars) {
    update(state, model, &ones(model)).expect("a step");
}

/// A layer that was made after the optimiser, from one `VarMap`.
#[test]
fn t51_a_layer_that_no_optimiser_has() {
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, CPU);
    let hidden = linear(4, 8, builder.pp("hidden")).expect("a layer");
    let optimizer = || CandleOptimizer::for_model(&hidden, Adam::new(0.1)).expect("an optimiser");
    let (mut warned, mut strict, mut allowed) = (optimizer(), optimizer(), optimizer());
    strict.state_mut().require_all();
    allowed.state_mut().require_all();
    allowed.state_mut().allow_others();
    let mut constant_end = optimizer();
    let output = linear(8, 1, builder.pp("output")).expect("a layer");
    let (inputs, targets) = (
        random(1, &[2, 4], DType::F32, CPU),
        random(2, &[2, 1], DType::F32, CPU),
    );
    let loss = |end: &dyn Module| mse(&end.forward(&hidden.forward(&inputs)?)?, &targets);

    let (_, lines) = logged(|| {
        for _ in 0..3 {
            warned
                .backward_step(&loss(&output).expect("a loss"))
                .expect("a step");
        }
    });
    let [
        Warning::NotInState {
            variables: 2,
            shapes: listed,
        },
    ] = warned.state().warnings()
    else {
        panic!("{:?}", warned.state().warnings())
    };
    let mut listed = listed.clone();
    listed.sort();
    assert_eq!(listed, ["[1, 8] of F32", "[1] of F32"]);
    assert_eq!(lines.len(), 1);
    for words in [
        "reaches 2 variables",
        "after the last layer",
        "`StateTree::allow_others`",
    ] {
        assert!(lines[0].contains(words), "{lines:?}");
    }

    let before = bits(hidden.weight());
    let error = strict
        .backward_step(&loss(&output).expect("a loss"))
        .expect_err("an error")
        .to_string();
    assert!(
        error.contains("reaches 2 variables") && error.contains("allow_others"),
        "{error}"
    );
    assert_eq!(bits(hidden.weight()), before);
    allowed
        .backward_step(&loss(&output).expect("a loss"))
        .expect("a step");
    assert_eq!(allowed.state().warnings(), []);

    // Constants have gradients in candle's store, too, and are no variables.
    let frozen = linear(8, 1, VarBuilder::zeros(DType::F32, CPU)).expect("constants");
    constant_end.state_mut().at("bias").expect("a leaf").freeze();
    constant_end
        .backward_step(&loss(&frozen).expect("a loss"))
        .expect("a step");
    assert_eq!(constant_end.state().warnings(), []);
    // Only the first loss is searched, and that after `require_all`.
    constant_end
        .backward_step(&loss(&output).expect("a loss"))
        .expect("a step");
    assert_eq!(constant_end.state().warnings(), []);
    constant_end.state_mut().require_all();
    assert!(
        constant_end
            .backward_step(&loss(&output).expect("a loss"))
            .is_err()
    );
}

/// A layer that was made after the state, in a segment.
#[test]
fn t51_a_segment_that_no_state_has() {
    let variable = |seed| var(&random(seed, &[4], DType::F32, CPU));
    let (body, head, running) = (variable(1), variable(2), variable(3));
    let input = random(4, &[4], DType::F32, CPU);
    let train = |state: &mut StateTree| {
        Segments::new(&input)
            .then(|x| x * body.as_tensor())
            .then(|x| (x * head.as_tensor())? + running.as_tensor())
            .then(|x| x.tanh())
            .train(Update::new(state), &body, |y| y.sqr()?.sum_all())
            .map(|(_, outcome)| outcome)
    };
    let mut state = setup(Descent::new(0.1), &body).expect("a state");
    let outcome = train(&mut state).expect("a step");
    let expected = [Warning::NotInState {
        variables: 2,
        shapes: vec!["[4] of F32".to_string(); 2],
    }];
    assert_eq!(
        (&outcome.warnings[..], state.warnings()),
        (&expected[..], &expected[..])
    );
    assert_eq!(train(&mut state).expect("a step").warnings, []);

    let mut strict = setup(Descent::new(0.1), &body).expect("a state");
    strict.require_all();
    let before = bits(&body);
    let error = train(&mut strict).expect_err("two variables");
    is_kind(
        &error,
        ErrorKind::Model,
        &["reaches 2 variables", "`StateTree::allow_others`"],
    );
    assert_eq!((bits(&body), strict.steps()), (before, 0));
    strict.allow_others();
    assert_eq!(train(&mut strict).expect("a step").warnings, []);

    // A variable that the state leaves out is known to it.
    let all = [&body, &head, &running];
    let choose = |path: &str, _: Parameter<'_>| (path == "0").then(|| Descent::new(0.1));
    let mut knowing = setup_with(&all, choose).expect("a state");
    let outcome = Segments::new(&input)
        .each(&all, |w, x| x * w.as_tensor())
        .train(Update::new(&mut knowing), &all, |y| y.sum_all())
        .expect("a step")
        .1;
    assert_eq!(outcome.warnings, []);
}

type Settle = fn(&mut StateTree);

/// The rate of the file's program, what it does before and after its first step, the rate of the program and
/// what it does before the restore; then what is said.
type Resume = (f64, Settle, Settle, f64, Settle, &'static [&'static str]);

/// What the program sets up is compared with what the program of the file had set up.
#[test]
fn t52_a_setting_that_the_file_replaces() {
    let none: Settle = |_| ();
    let new_rate: Settle = |state| state.adjust(0.02).expect("a rate");
    let plateau: Settle = |state| {
        let mut plateau = ReduceOnPlateau::new().factor(0.5).patience(0);
        for _ in 0..3 {
            plateau.observe(1.0, &mut *state).expect("a metric");
        }
    };
    let frozen: Settle = |state| state.at("0").expect("a leaf").freeze();
    let scheduled: Settle = |state| {
        state
            .schedule(Schedule::linear(0.1, 0.05, 9))
            .expect("a schedule")
    };
    let counted: Settle = |state| state.set_steps(7).expect("a count");
    let replaced: Settle = |state| {
        let model = pair(DType::F32);
        state.rebind(&model).expect("a model");
        state
            .all()
            .replace(Adam::new(0.02), &model)
            .expect("another rate");
    };
    const ETA: &str = "eta of \"0\" is 0.01 in the program and 0.1 in the file";
    const THAWED: &str = "frozen of \"0\" is true in the program and false in the file";
    let cases: [Resume; 20] = [
        (0.1, none, none, 0.1, none, &[]),
        (0.1, none, none, 0.1 + f64::EPSILON / 16.0, none, &[]),
        (0.1, none, none, 0.01, none, &[ETA]),
        (0.1, none, new_rate, 0.1, none, &[]),
        (0.1, none, replaced, 0.1, none, &[]),
        (0.1, new_rate, new_rate, 0.1, none, &[]),
        (0.1, none, plateau, 0.1, none, &[]),
        (
            0.1,
            none,
            plateau,
            0.2,
            none,
            &["eta of \"0\" is 0.2 in the program and 0.025 in the file"],
        ),
        (0.1, none, new_rate, 0.02, none, &[]),
        (
            0.1,
            none,
            none,
            0.1,
            new_rate,
            &["eta of \"0\" is 0.02 in the program and 0.1 in the file"],
        ),
        (0.1, new_rate, plateau, 0.1, new_rate, &[]),
        (0.1, none, none, 0.1, frozen, &[THAWED]),
        (0.1, none, none, 0.01, frozen, &[ETA, THAWED]),
        (
            0.1,
            frozen,
            none,
            0.1,
            none,
            &["frozen of \"0\" is false in the program and true in the file"],
        ),
        (0.1, none, frozen, 0.1, none, &[]),
        (0.1, frozen, none, 0.1, frozen, &[]),
        (0.1, none, none, 0.01, scheduled, &[]),
        (0.1, scheduled, none, 0.01, none, &[ETA]),
        (
            0.1,
            none,
            none,
            0.1,
            counted,
            &["the count of steps is 7 in the program and 1 in the file"],
        ),
        (0.1, counted, none, 0.1, counted, &[]),
    ];
    for (case, (of_file, before, after, own, settle, expected)) in cases.into_iter().enumerate() {
        let model = pair(DType::F32);
        let mut state = setup(Adam::new(of_file), &model).expect("a state");
        before(&mut state);
        step(&mut state, &model);
        after(&mut state);
        let file = file_of(Checkpoint::new(&state));
        let resume = |file: &[u8], keeps: bool| {
            let mut resumed = setup(Adam::new(own), &model).expect("a state");
            settle(&mut resumed);
            let opened = open(file).expect("the file");
            let opened = if keeps { opened.keeping_settings() } else { opened };
            opened.restore(&mut resumed).expect("the state");
            resumed
        };
        let mut resumed = resume(&file, false);
        let said = match resumed.warnings() {
            [] => &[][..],
            [Warning::SettingsDiffer { differences }] => differences,
            others => panic!("{case}: {others:?}"),
        };
        assert_eq!(said, expected, "{case}");
        assert_eq!(resume(&file, true).warnings(), [], "{case}");
        // The third run is set up as the second, so nothing is said again; nor is it within a run.
        step(&mut resumed, &model);
        let third = resume(&file_of(Checkpoint::new(&resumed)), false);
        assert_eq!(third.warnings(), [], "{case}");
        // Refused under a schedule.
        let _ = state.adjust(0.03);
        open(&file)
            .and_then(|file| file.restore(&mut state))
            .expect("an earlier state");
        assert_eq!(state.warnings(), [], "{case}");
    }
    let text = Warning::SettingsDiffer {
        differences: vec![ETA.to_string()],
    }
    .to_string();
    assert!(
        text.contains(ETA) && text.contains("`CheckpointFile::keeping_settings`"),
        "{text}"
    );
}

/// `restore` instead of `restore_with_model`.
#[test]
fn t53_a_model_that_was_not_restored() {
    let not_restored = |warnings: &[Warning]| matches!(warnings, [Warning::ModelNotRestored { .. }]);
    for (dtype, is_master) in [(DType::F32, false), (DType::BF16, true)] {
        let optimiser = || MixedPrecision::new(DType::F32, Momentum::new(0.1));
        let saved = pair(dtype);
        let mut state = setup(optimiser(), &saved).expect("a state");
        step(&mut state, &saved);
        let file = file_of(Checkpoint::new(&state).model(&saved));
        let resumed = || {
            let other = model(&[random(7, &[6, 5], dtype, CPU), random(8, &[5], dtype, CPU)]);
            let mut state = setup(optimiser(), &other).expect("a state");
            open(&file)
                .and_then(|file| file.restore(&mut state))
                .expect("the state");
            (state, other)
        };

        let (mut state, other) = resumed();
        let before: Vec<_> = other.values().map(|x| bits(x)).collect();
        match (is_master, update(&mut state, &other, &ones(&other))) {
            (true, Err(error)) => {
                let remedy = error.remedy().expect("a remedy");
                is_kind(
                    &error,
                    ErrorKind::Changed,
                    &["it is not the parameter of the file"],
                );
                assert!(
                    remedy.starts_with("restore both by `CheckpointFile::restore_with_model`"),
                    "{remedy}"
                );
                assert_eq!(other.values().map(|x| bits(x)).collect::<Vec<_>>(), before);
            }
            (false, Ok(outcome)) => {
                assert!(
                    not_restored(&outcome.warnings) && not_restored(state.warnings()),
                    "{outcome:?}"
                );
                step(&mut state, &other);
                assert!(not_restored(state.warnings()));
                let (mut state, other) = resumed();
                let streamed = Update::new(&mut state).begin(&other).expect("a step");
                for (path, gradient) in ones(&other) {
                    streamed.push(&path, gradient).expect("a gradient");
                }
                let outcome = streamed.finish().expect("an outcome");
                assert!(
                    not_restored(&outcome.warnings) && not_restored(state.warnings()),
                    "{outcome:?}"
                );
            }
            (_, other) => panic!("{other:?}"),
        }

        // The parameters come from elsewhere, or are meant to be others.
        let (mut state, other) = resumed();
        for (x, saved) in other.values().zip(saved.values()) {
            x.set(saved).expect("the same");
        }
        step(&mut state, &other);
        assert_eq!(state.warnings(), []);
        let (mut state, other) = resumed();
        state.refresh_masters(&other).expect("new masters");
        step(&mut state, &other);
        assert_eq!(state.warnings(), []);
        if is_master {
            let (mut state, other) = resumed();
            Update::new(&mut state)
                .keep_masters()
                .apply(&other, &ones(&other))
                .expect("a step");
            assert_eq!(state.warnings(), []);
        }
        let (mut state, other) = resumed();
        open(&file)
            .and_then(|file| file.restore_with_model(&mut state, &other))
            .expect("both");
        step(&mut state, &other);
        assert_eq!(state.warnings(), []);
        // Weights that are loaded in the wrong order.
        let (mut state, other) = resumed();
        open(&file)
            .and_then(|file| file.restore_with_model(&mut state, &other))
            .expect("both");
        other
            .values()
            .for_each(|x| x.set(&x.zeros_like().expect("zeros")).expect("other weights"));
        assert_eq!(update(&mut state, &other, &ones(&other)).is_err(), is_master);
        assert_eq!(not_restored(state.warnings()), !is_master);
        // Names that have changed since the save.
        let (mut state, other) = resumed();
        state.rename("", "layers").expect("a name");
        let named = ones(&other)
            .into_iter()
            .map(|(path, gradient)| (format!("layers.{path}"), gradient));
        let outcome = update(&mut state, &other, &named.collect::<support::common::Grads>());
        assert_eq!(outcome.is_err(), is_master);
        assert_eq!(not_restored(state.warnings()), !is_master);
        // A parameter that is another one, or has other rows, is not compared with the file.
        let (mut state, other) = resumed();
        for (x, saved) in other.values().zip(saved.values()) {
            x.set(saved).expect("the same");
        }
        let mut changed = Vars::from([("0".to_string(), other["0"].clone())]);
        state.remove("1").expect("a leaf");
        changed.insert("1".to_string(), var(&random(9, &[5], dtype, CPU)));
        state.add(optimiser(), &changed).expect("a leaf");
        let rows: Vec<Option<usize>> = (0..6).rev().map(Some).collect();
        let reversed: Vec<Tensor> = rows
            .iter()
            .flatten()
            .map(|row| saved["0"].narrow(0, *row, 1).expect("a row"))
            .collect();
        changed.insert("0".to_string(), var(&Tensor::cat(&reversed, 0).expect("rows")));
        state.resize_rows("0", &changed, &rows).expect("other rows");
        step(&mut state, &changed);
        assert_eq!(state.warnings(), []);
        // A file without the model has nothing to compare.
        let (mut state, other) = (
            setup(Momentum::new(0.1), &pair(DType::F32)).expect("a state"),
            pair(DType::F32),
        );
        let bare = file_of(Checkpoint::new(&state));
        open(&bare)
            .and_then(|file| file.restore(&mut state))
            .expect("the state");
        state.rebind(&other).expect("the same shapes");
        step(&mut state, &other);
        assert_eq!(state.warnings(), []);
    }
}

/// A part of the model that two states move.
#[test]
fn a_trunk_in_two_states() {
    let trunk = pair(DType::BF16);
    let states = [0.1, 0.2].map(|eta| setup(MixedPrecision::new(DType::F32, Adam::new(eta)), &trunk));
    let [mut actor, mut critic] = states.map(|state| state.expect("a state"));
    step(&mut actor, &trunk);
    let error = update(&mut critic, &trunk, &ones(&trunk)).expect_err("an error");
    is_kind(
        &error,
        ErrorKind::Changed,
        &["in another tree that moves it, too, make one tree for both, by `setup_with`"],
    );
}

/// Calls that are skipped for ever.
#[test]
fn t54_calls_without_a_step_between_them() {
    let model = model(&[constant(1.0, 3, DType::F32)]);
    let nan = grads([Some(constant(f64::NAN, 3, DType::F32))]);
    let rule = OptimiserChain::new((AccumGrad::new(2), Descent::new(0.1)));
    let mut state = setup(rule, &model).expect("a state");
    let skip = |state: &mut StateTree| {
        Update::new(state)
            .finite_only()
            .apply(&model, &nan)
            .expect("an outcome")
    };
    let (_, lines) = logged(|| {
        for call in 1..=25 {
            // What a window collects is no step.
            if call == 5 {
                step(&mut state, &model);
            }
            let outcome = skip(&mut state);
            assert_eq!(outcome.warnings.len(), usize::from(call == 10), "{call}");
            let said = state.warnings().iter().map(|warning| match warning {
                Warning::StepsSkipped { calls, .. } => *calls,
                other => panic!("{other}"),
            });
            assert_eq!(
                said.collect::<Vec<_>>(),
                if call < 10 { vec![] } else { vec![call] }
            );
        }
    });
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("10 calls were skipped since the last step") && lines[0].contains("\"0\""));
    assert!(
        state
            .to_string()
            .ends_with("; 25 calls skipped since the last step"),
        "{state}"
    );
    step(&mut state, &model);
    assert!(!state.to_string().contains("skipped"), "{state}");
    skip(&mut state);
    let again = state.try_clone().expect("a copy").to_string();
    assert!(
        again.ends_with("; 1 calls skipped since the last step"),
        "{again}"
    );

    // Nothing to move is no fault.
    let mut state = setup(Descent::new(0.1), &model).expect("a state");
    state.all().freeze();
    (0..20).for_each(|_| step(&mut state, &model));
    assert_eq!(state.warnings(), []);
}

/// Factors that are taken for rates.
#[test]
fn t55_rates_that_nobody_means() {
    let model = pair(DType::F32);
    let factors = || Schedule::linear(0.0, 1.0, 10).then(10, Schedule::cosine(1.0, 0.1, 90));
    let rates = || Schedule::linear(0.0, 1e-3, 10).then(10, Schedule::cosine(1e-3, 1e-4, 90));
    for (own, schedule, is_said) in [
        (1e-3, factors(), true),
        (1e-3, factors().relative(), false),
        (1e-3, rates(), false),
        (1.0, rates().relative(), false),
        (1e-4, rates(), false),
        (1e-3, rates().relative(), true),
        (0.05, factors(), true),
        (0.0, rates(), false),
        (0.2, factors().field("1.eta"), false),
        (1e-3, Schedule::constant(0.1).field("beta1"), false),
    ] {
        let chain = OptimiserChain::new((ClipGlobalNorm::new(1.0), AdamW::new(own)));
        let mut state = setup(chain, &model).expect("a state");
        state.schedule(schedule.clone()).expect("a schedule");
        let said = matches!(state.warnings(), [Warning::UnlikelyRate { path, .. }] if path == "0");
        assert_eq!(
            (said, state.warnings().len()),
            (is_said, usize::from(is_said)),
            "{own} {schedule:?}"
        );
        if is_said {
            let text = state.warnings()[0].to_string();
            assert!(
                text.contains("`.relative()`") && text.contains(&own.to_string()),
                "{text}"
            );
        }
    }
}

/// One number of a pair has the same name in every verb.
#[test]
fn one_number_of_a_pair() {
    let model = pair(DType::F32);
    let mut state = setup(
        OptimiserChain::new((ClipGlobalNorm::new(1.0), Adam::new(0.1))),
        &model,
    )
    .expect("a state");
    state.all().adjust_field("beta2", 0.98).expect("a number");
    state
        .at("1")
        .expect("a leaf")
        .adjust_fields([("1.beta1", 1u64.into()), ("beta1", 0.5.into())])
        .expect("numbers");
    let betas = |path: &str| {
        let leaf = state.leaf(path).expect("a leaf");
        ["beta", "beta1", "1.beta2"].map(|name| leaf.field(name).expect("a field"))
    };
    assert_eq!(betas("0"), [(0.9, 0.98).into(), 0.9.into(), 0.98.into()]);
    assert_eq!(betas("1"), [(0.5, 0.98).into(), 0.5.into(), 0.98.into()]);
    let mut rule = Adam::new(0.1);
    rule.adjust_field("beta1", 0.8).expect("a number");
    assert_eq!(rule.beta, (0.8, 0.999));
    assert!(rule.field("beta3").is_none() && rule.field("0.1beta1").is_none());
    for (name, value, kind, words) in [
        (
            "beta3",
            FieldValue::Real(0.5),
            ErrorKind::UnknownName,
            "did you mean beta1?",
        ),
        (
            "beta0",
            FieldValue::Real(0.5),
            ErrorKind::UnknownName,
            "did you mean beta",
        ),
        ("beta2", FieldValue::Real(1.5), ErrorKind::Argument, "beta"),
        ("beta2", (0.9, 0.99).into(), ErrorKind::Argument, "a real number"),
    ] {
        let errors = [
            rule.adjust_field(name, value),
            state.all().adjust_field(name, value),
        ];
        errors
            .into_iter()
            .for_each(|error| is_kind(&error.expect_err(name), kind, &[words]));
    }
    let error = state
        .schedule(Schedule::constant(0.5).field("beta3"))
        .expect_err("an error");
    is_kind(&error, ErrorKind::UnknownName, &["did you mean beta1?"]);
}
