//! Leaves without a gradient: what outcomes, leaves and the log say of them, and where they are an error.

use candle_core::{DType, Device, ModuleT, Tensor, Var};
use candle_nn::{BatchNormConfig, Optimizer, VarBuilder, VarMap, batch_norm};
use optimisers::{
    AccumGrad, Adam, AdamW, CandleOptimizer, Checkpoint, CheckpointFile, Descent, Error, ErrorKind,
    IntoOptimiser, LossScaler, MixedPrecision, Offload, OptimiserChain, Outcome, StateTree, Status, Update,
    Warning, setup, setup_with, trainables, update,
};

use crate::training::audit::names_what_cuts;
use support::common::{Grads, Vars, grads, is_kind, logged, model, not_finite, random, says, snapshot};
use support::crafted_checkpoints::{Pieces, file_of, open};

const CPU: &Device = &Device::Cpu;

fn tensor(value: f32) -> Tensor {
    Tensor::full(value, 3, CPU).expect("a tensor")
}

fn some(received: impl IntoIterator<Item = bool>) -> Grads {
    grads(received.into_iter().map(|received| received.then(|| tensor(1.0))))
}

fn started(optimiser: impl IntoOptimiser, leaves: usize) -> (Vars, StateTree) {
    let model = model(&vec![tensor(0.5); leaves]);
    let state = setup(optimiser, &model).expect("a state");
    (model, state)
}

fn step(state: &mut StateTree, model: &Vars, received: impl IntoIterator<Item = bool>) -> Outcome {
    update(state, model, &some(received)).expect("an update")
}

/// Calls without a gradient, and whether there ever was one.
fn waiting(state: &StateTree) -> Vec<(u64, bool)> {
    state
        .leaves()
        .map(|leaf| (leaf.calls_without_gradient(), leaf.has_had_gradient()))
        .collect()
}

/// The error, after which nothing has moved.
fn refused(state: &mut StateTree, model: &Vars, received: impl IntoIterator<Item = bool>) -> Error {
    let before = (snapshot(model, state), waiting(state));
    let error = update(state, model, &some(received)).expect_err("a missing gradient");
    assert_eq!((snapshot(model, state), waiting(state)), before);
    error
}

#[track_caller]
fn names(error: &Error, missing: usize, leaves: usize, expected: &[&str]) {
    let text = format!(
        "{missing} of {leaves} parameters have no gradient, and the state requires all: {}; ",
        expected.join(", ")
    );
    assert!(error.to_string().starts_with(&text), "{error}");
    assert_eq!(
        (error.kind(), error.got()),
        (ErrorKind::NoGradient, Some(&*expected.join(", "))),
        "{error}"
    );
}

#[test]
fn an_outcome_names_the_parameters_without_a_gradient() {
    let (model, mut state) = started(Adam::new(0.1), 4);
    state.at("3").expect("a leaf").freeze();
    let all = step(&mut state, &model, [true; 3]);
    assert_eq!(
        (all.applied, all.frozen, all.without_gradient.is_empty()),
        (3, 1, true)
    );
    let outcome = step(&mut state, &model, [true, false]);
    assert_eq!(outcome.without_gradient, ["1", "2"]);
    assert_eq!((outcome.without_gradient.len(), outcome.applied), (2, 1));
    assert_eq!(format!("{:?}", outcome.without_gradient), r#"["1", "2"]"#);
    assert!(outcome != all && outcome.without_gradient != ["1"]);
    // The names of an outcome stay, whatever becomes of the state.
    state.rename("1", "one").expect("a new name");
    let model: Vars = model
        .into_iter()
        .map(|(path, var)| (if path == "1" { "one".to_string() } else { path }, var))
        .collect();
    assert_eq!(step(&mut state, &model, [true]).without_gradient, ["2", "one"]);
    assert_eq!(outcome.without_gradient, ["1", "2"]);
}

#[test]
fn a_leaf_counts_its_calls_without_a_gradient() {
    let (model, mut state) = started(Adam::new(0.1), 3);
    assert_eq!(waiting(&state), [(0, false); 3]);
    for received in [[true, true, false], [true, false, false], [true, false, false]] {
        step(&mut state, &model, received);
    }
    assert_eq!(waiting(&state), [(0, true), (2, true), (3, false)]);
    step(&mut state, &model, [false, true, false]);
    assert_eq!(waiting(&state), [(1, true), (0, true), (4, false)]);

    // Neither a call that is skipped nor one that is refused counts.
    let poison = grads([Some(tensor(f32::NAN))]);
    let skipped = Update::new(&mut state)
        .finite_only()
        .apply(&model, &poison)
        .expect("an outcome");
    let stepped = step(&mut state.try_clone().expect("a copy"), &model, [true]);
    assert_eq!(
        (skipped.status, skipped.without_gradient),
        (not_finite("0"), stepped.without_gradient)
    );
    update(&mut state, &model, &Grads::new()).expect_err("no gradients");
    assert_eq!(waiting(&state), [(1, true), (0, true), (4, false)]);

    // A frozen leaf does not wait, and begins anew when it is thawed.
    state.at("2").expect("a leaf").freeze();
    step(&mut state, &model, [true, false]);
    assert_eq!(waiting(&state), [(0, true), (1, true), (4, false)]);
    state.all().thaw();
    assert_eq!(waiting(&state), [(0, true), (1, true), (0, false)]);
}

#[test]
fn a_gradient_that_is_collected_is_one() {
    let (model, mut state) = started(OptimiserChain::new((AccumGrad::new(3), Descent::new(0.1))), 3);
    step(&mut state, &model, [true, true, false]);
    assert_eq!(waiting(&state), [(0, true), (0, true), (1, false)]);
    step(&mut state, &model, [true, false, false]);
    // The last call of the window moves what has received before.
    let outcome = step(&mut state, &model, [true, false, false]);
    assert_eq!(
        (outcome.applied, waiting(&state)),
        (2, vec![(0, true), (2, true), (3, false)])
    );
    assert_eq!(outcome.without_gradient, ["2"]);
}

#[test]
fn waiting_is_kept_by_copies_and_checkpoints() {
    let rule = || OptimiserChain::new((AccumGrad::new(2), Adam::new(0.1)));
    let (model, mut state) = started(rule(), 3);
    step(&mut state, &model, [true, false, true]);
    let expected = [(0, true), (1, false), (0, true)];
    assert_eq!(waiting(&state), expected);
    assert_eq!(waiting(&state.try_clone().expect("a copy")), expected);

    let parameters = trainables(&model).expect("variables");
    let (next, ..) = Update::functional(&state)
        .apply(&parameters, &some([false, false, true]))
        .expect("an update");
    assert_eq!(waiting(&next), [(1, true), (2, false), (0, true)]);
    assert_eq!(waiting(&state), expected);

    let saved = Pieces::of(&file_of(Checkpoint::new(&state)));
    let mut resumed = setup(rule(), &model).expect("a state");
    open(&saved.bytes())
        .and_then(|file| file.restore(&mut resumed))
        .expect("the state");
    assert_eq!(waiting(&resumed), expected);

    // A count that the next call would overflow is refused.
    let mut edited = saved;
    edited.description["leaves"]["1"]["waited"] = u64::MAX.into();
    let error = open(&edited.bytes())
        .and_then(|file| file.restore(&mut resumed))
        .expect_err("too many calls");
    is_kind(
        &error,
        ErrorKind::File,
        &["the description of the state is damaged", "\"1\"", "waited"],
    );
    assert_eq!(waiting(&resumed), expected);
}

#[test]
fn the_log_names_them_once_in_the_life_of_a_state() {
    let (model, mut state) = started(Adam::new(0.1), 3);
    let (_, lines) = logged(|| step(&mut state, &model, [true; 3]));
    assert_eq!(lines, [""; 0]);
    let skip = grads([Some(tensor(f32::INFINITY)), None]);
    let (_, lines) = logged(|| {
        Update::new(&mut state)
            .finite_only()
            .apply(&model, &skip)
            .expect("an outcome")
    });
    assert_eq!(lines, [""; 0]);
    let (_, lines) = logged(|| {
        step(&mut state, &model, [false, true]);
        step(&mut state, &model, [true, false]);
        let mut copy = state.try_clone().expect("a copy");
        copy.rename("", "copy").expect("new names");
        let parameters = trainables(&model).expect("variables");
        let _ = Update::functional(&state)
            .apply(&parameters, &some([true]))
            .expect("an update");
    });
    let [line] = &lines[..] else {
        panic!("one line, got {lines:?}")
    };
    assert!(
        line.starts_with("2 of 3 parameters have no gradient and stay as they are: 0, 2. "),
        "{line}"
    );
    names_what_cuts(line);
    for words in ["audit(", "require_all", "allow_missing"] {
        assert!(line.contains(words), "no {words:?} in {line}");
    }
}

/// The empty calls that end a window, or that are all an update gets.
#[test]
fn a_call_that_may_have_no_gradient_does_not_warn_of_none() {
    let (model, mut state) = started(OptimiserChain::new((AccumGrad::new(4), Descent::new(0.1))), 3);
    step(&mut state, &model, [true; 3]);
    let (outcomes, lines) = logged(|| {
        [(); 3].map(|()| {
            Update::new(&mut state)
                .allow_no_gradients()
                .apply(&model, &Grads::new())
                .expect("an update")
        })
    });
    assert_eq!(
        outcomes.map(|outcome| (outcome.applied, outcome.warnings.len())),
        [(0, 0), (0, 0), (3, 0)]
    );
    assert_eq!((lines, state.warnings().len()), (vec![], 0));
    // Of some the call may not lack, one is missing.
    let some = Update::new(&mut state)
        .allow_no_gradients()
        .apply(&model, &some([true]))
        .expect("an update");
    assert!(
        matches!(&some.warnings[..], [Warning::WithoutGradient { missing: 2, .. }]),
        "{some:?}"
    );
}

#[test]
fn the_log_speaks_of_few_names_and_of_no_declared_ones() {
    let (model, mut state) = started(Adam::new(0.1), 40);
    state
        .select_where(|leaf| leaf.path().starts_with('1'))
        .expect("leaves")
        .allow_missing();
    state.at("39").expect("a leaf").freeze();
    let (outcome, lines) = logged(|| step(&mut state, &model, [true]));
    assert_eq!((outcome.without_gradient.len(), lines.len()), (38, 1));
    let names = lines[0]
        .split(": ")
        .nth(1)
        .and_then(|rest| rest.split(". ").next())
        .expect("names");
    let names: Vec<&str> = names.split(", ").collect();
    assert!(
        lines[0].starts_with("27 of 40") && names.len() == 21 && names[20] == "...",
        "{names:?}"
    );
    assert!(
        names.iter().all(|name| !name.starts_with('1') && *name != "39"),
        "{names:?}"
    );

    let (model, mut state) = started(Adam::new(0.1), 2);
    state.at("1").expect("a leaf").allow_missing();
    let (_, lines) = logged(|| step(&mut state, &model, [true]));
    assert_eq!(lines, [""; 0]);
}

#[test]
fn a_state_that_requires_all_refuses_a_missing_gradient() {
    let (model, mut state) = started(MixedPrecision::new(DType::F64, Adam::new(0.1)), 4);
    assert!(!state.requires_all());
    step(&mut state, &model, [true]);
    state.require_all();
    let error = refused(&mut state, &model, [true, false, false, true]);
    names(&error, 2, 4, &["1", "2"]);
    says(
        &error,
        &[
            "2 of 4",
            "1, 2",
            "nothing was changed",
            "ops::layer_norm_slow",
            "setup_with",
            "allow_missing",
            "freeze",
            "audit",
        ],
    );
    step(&mut state, &model, [true; 4]);

    // What is frozen or declared needs none.
    state.at("1").expect("a leaf").freeze();
    state.at("2").expect("a leaf").allow_missing();
    assert_eq!(
        step(&mut state, &model, [true, false, false, true]).without_gradient,
        ["2"]
    );
    names(&refused(&mut state, &model, [true]), 1, 4, &["3"]);
    state.all().thaw();
    names(&refused(&mut state, &model, [true]), 2, 4, &["1", "3"]);
    // A call that a number would skip is refused as well: another call would not be better.
    let error = Update::new(&mut state)
        .finite_only()
        .apply(&model, &grads([Some(tensor(f32::NAN))]))
        .expect_err("missing gradients");
    names(&error, 2, 4, &["1", "3"]);
}

#[test]
fn the_names_in_the_error_are_bounded() {
    let (model, mut state) = started(Descent::new(0.1), 50);
    state.require_all();
    let error = refused(&mut state, &model, [true]);
    is_kind(&error, ErrorKind::NoGradient, &["49 of 50 parameters"]);
    let paths: Vec<&str> = error.got().expect("names").split(", ").collect();
    assert_eq!((paths.len(), paths[20]), (21, "..."));
}

#[test]
fn the_requirement_stays_whatever_becomes_of_the_state() {
    let (mut model, mut state) = started(Adam::new(0.1), 2);
    state.require_all();
    state.at("0").expect("a leaf").allow_missing();
    let mut copy = state.try_clone().expect("a copy");
    names(&refused(&mut copy, &model, [true]), 1, 2, &["1"]);
    let parameters = trainables(&model).expect("variables");
    names(
        &Update::functional(&state)
            .apply(&parameters, &some([true]))
            .expect_err("a missing gradient"),
        1,
        2,
        &["1"],
    );
    let (next, ..) = Update::functional(&state)
        .apply(&parameters, &some([false, true]))
        .expect("an update");
    assert!(next.requires_all());
    let _ = Update::functional(&next)
        .apply(&parameters, &some([false, true]))
        .expect("an update");

    let other: Vars = self::model(&[tensor(1.0), tensor(1.0)]);
    copy.rebind(&other).expect("the same shapes");
    names(&refused(&mut copy, &other, [true]), 1, 2, &["1"]);

    model.insert(
        "2".to_string(),
        Var::from_tensor(&tensor(1.0)).expect("a variable"),
    );
    state.add(Adam::new(0.1), &model).expect("a new leaf");
    names(&refused(&mut state, &model, [true, true]), 1, 3, &["2"]);
    model.remove("1");
    state.remove("1").expect("the leaf");
    state.rename("2", "20").expect("a name");
    let model: Vars = model
        .into_iter()
        .map(|(path, var)| (if path == "2" { "20".to_string() } else { path }, var))
        .collect();
    names(&refused(&mut state, &model, [true]), 1, 2, &["20"]);

    // A checkpoint neither brings it nor takes it away.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state.safetensors");
    let (model, mut without) = started(Adam::new(0.1), 2);
    Checkpoint::new(&without).save(&path).expect("a file");
    let mut with = without.try_clone().expect("a copy");
    with.require_all();
    with.at("0").expect("a leaf").allow_missing();
    CheckpointFile::open(&path)
        .and_then(|file| file.restore(&mut with))
        .expect("the state");
    names(&refused(&mut with, &model, [true]), 1, 2, &["1"]);
    Checkpoint::new(&with).save(&path).expect("a file");
    CheckpointFile::open(&path)
        .and_then(|file| file.restore(&mut without))
        .expect("the state");
    assert!(!without.requires_all());
    without.require_all();
    names(&refused(&mut without, &model, [false, true]), 1, 2, &["0"]);
}

/// One micro-batch of a window is enough, and a window without one does not end.
#[test]
fn a_window_needs_one_gradient_of_each_parameter() {
    let (model, mut state) = started(OptimiserChain::new((AccumGrad::new(3), Descent::new(0.1))), 3);
    state.require_all();
    for received in [[true, false, false], [false, true, false]] {
        assert_eq!(step(&mut state, &model, received).status, Status::Accumulated);
    }
    names(&refused(&mut state, &model, [true, true, false]), 1, 3, &["2"]);
    let outcome = step(&mut state, &model, [false, false, true]);
    assert_eq!(
        (outcome.status, outcome.applied, outcome.without_gradient.len()),
        (Status::Stepped, 3, 0)
    );
}

#[test]
fn every_way_to_update_keeps_the_requirement() {
    // State on another device.
    let (model, mut state) = started(Offload::new(AdamW::new(0.1)).everywhere(), 2);
    state.require_all();
    names(&refused(&mut state, &model, [true]), 1, 2, &["1"]);
    step(&mut state, &model, [true, true]);
    state.all().allow_missing();
    step(&mut state, &model, [true]);
    assert_eq!(waiting(&state), [(0, true), (1, true)]);

    // A loss scaler, which goes on with the same loss.
    let (model, mut state) = started(MixedPrecision::new(DType::F64, Adam::new(0.1)), 2);
    state.require_all();
    let mut scaler = LossScaler::dynamic();
    let loss = model["0"].sqr().and_then(|x| x.sum_all()).expect("a loss");
    let gradients = scaler
        .scale(&loss)
        .and_then(|loss| Ok(loss.backward()?))
        .expect("gradients");
    names(
        &Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&model, &gradients)
            .expect_err("a missing gradient"),
        1,
        2,
        &["1"],
    );
    state.at("1").expect("a leaf").allow_missing();
    assert_eq!(
        Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&model, &gradients)
            .expect("an update")
            .without_gradient,
        ["1"]
    );

    // candle's trait.
    let variables: Vec<Var> = self::model(&[tensor(1.0), tensor(1.0)]).into_values().collect();
    let mut optimizer = CandleOptimizer::new(variables.clone(), Adam::new(0.1)).expect("an optimizer");
    optimizer.state_mut().require_all();
    let gradients = variables[0]
        .sum_all()
        .and_then(|x| x.backward())
        .expect("gradients");
    let error = optimizer
        .step(&gradients)
        .expect_err("a missing gradient")
        .to_string();
    assert!(error.starts_with("1 of 2 parameters have no gradient"), "{error}");
}

/// Its statistics are variables of the map, and nothing that a loss is differentiated by.
#[test]
fn batch_norm_needs_gradients_for_its_weight_and_bias_alone() {
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, CPU);
    let norm = batch_norm(4, BatchNormConfig::default(), builder.pp("norm")).expect("a norm");
    let input = random(1, &[5, 4], DType::F32, CPU);
    let mut of_map = setup_with(&variables, |path, _| {
        (!path.contains("running_")).then(|| Adam::new(0.1))
    })
    .expect("a state");
    let mut of_layer = setup(Adam::new(0.1), &norm).expect("a state");
    of_map.require_all();
    of_layer.require_all();
    for _ in 0..3 {
        let gradients = norm
            .forward_t(&input, true)
            .and_then(|x| x.powf(3.0)?.sum_all()?.backward())
            .expect("gradients");
        assert_eq!(
            update(&mut of_map, &variables, &gradients)
                .expect("an update")
                .applied,
            2
        );
        assert_eq!(
            update(&mut of_layer, &norm, &gradients)
                .expect("an update")
                .applied,
            2
        );
    }
}
