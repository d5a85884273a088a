//! A file that has more than the state, or less: what is taken over by path, and whose settings count.

use std::collections::BTreeMap;

use candle_core::DType;
use optimisers::{
    Adam, Checkpoint, CheckpointFile, ErrorKind, FieldValue, MixedPrecision, OptimiserChain, Restored,
    Schedule, Setup, StateTree, WeightDecay, setup, setup_with, update,
};

use support::common::{Grads, Vars, assert_same, bits, is_kind, snapshot, tensor, var};
use support::crafted_checkpoints::{file_of, open};
use support::threads::on;

/// Variables of these lengths, and gradients for a call.
fn model(seed: u64, parts: &[(&str, usize)]) -> Vars {
    let x = |(i, (path, length)): (usize, &(&str, usize))| {
        (
            path.to_string(),
            var(&tensor(seed + i as u64, &[*length], DType::BF16)),
        )
    };
    parts.iter().enumerate().map(x).collect()
}

fn gradients(call: u64, model: &Vars) -> Grads {
    model
        .iter()
        .map(|(path, x)| (path.clone(), tensor(call, x.dims(), DType::BF16)))
        .collect()
}

fn rule(lambda: f64) -> MixedPrecision<OptimiserChain<(WeightDecay, Adam)>> {
    MixedPrecision::new(
        DType::F32,
        OptimiserChain::new((WeightDecay::new(lambda), Adam::new(0.1))),
    )
}

/// A file of a model after three steps, under a schedule, with a frozen part.
fn saved() -> (Vars, StateTree, Vec<u8>) {
    let x = model(1, &[("body.a", 5), ("body.b", 4), ("head.w", 7), ("old", 3)]);
    let mut state = setup(rule(0.01), &x).expect("a state");
    state
        .schedule(Schedule::linear(1.0, 0.0, 10).relative())
        .expect("a schedule");
    for call in 0..3 {
        update(&mut state, &x, &gradients(call, &x)).expect("an update");
    }
    state.at("body.b").expect("a leaf").freeze();
    let bytes = file_of(Checkpoint::new(&state).model(&x));
    (x, state, bytes)
}

/// The state and parameter of a leaf.
fn of_leaf(x: &Vars, state: &StateTree, path: &str) -> Vec<(String, Vec<u64>)> {
    let own = |name: &str| name == path || name.starts_with(&format!("{path}/"));
    snapshot(x, state)
        .into_iter()
        .filter(|(name, _)| own(name))
        .collect()
}

fn rate(state: &StateTree, path: &str) -> f64 {
    state
        .leaf(path)
        .and_then(|leaf| leaf.learning_rate())
        .expect("a rate")
}

fn paths(all: &[&str]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}

/// The head has another shape, a part is gone and one is new: the body goes on bit for bit, the rest stays.
#[test]
fn a_part_of_a_file_is_taken_over() {
    let (old, mut whole, bytes) = saved();
    let x = model(20, &[("adapter", 2), ("body.a", 5), ("body.b", 4), ("head.w", 2)]);
    let mut state = setup(rule(0.01), &x).expect("a state");
    update(&mut state, &x, &gradients(9, &x)).expect("an update");
    let before = snapshot(&x, &state);
    let file = || open(&bytes).expect("a checkpoint");
    // Each of the three is needed, and a pattern for nothing is a mistake.
    for (except, kind, says) in [
        (&["head.*", "old"][..], ErrorKind::Model, "adapter"),
        (&["adapter", "old"], ErrorKind::Tensor, "head.w"),
        (&["adapter", "head.*"], ErrorKind::Model, "old"),
        (
            &["adapter", "head.*", "old", "hat.*"],
            ErrorKind::Argument,
            "\"hat.*\" matches no parameter",
        ),
    ] {
        let error = file()
            .except(except.iter().copied())
            .restore_with_model(&mut state, &x);
        is_kind(&error.expect_err("refused"), kind, &[says]);
        assert_same(&[snapshot(&x, &state)], std::slice::from_ref(&before), says);
    }
    let file = file().except(["adapter", "head.*"]).except(["old"]);
    let restored = file.restore_with_model(&mut state, &x).expect("a part");
    assert_eq!(restored.taken, paths(&["body.a", "body.b"]));
    assert_eq!(restored.left, paths(&["adapter", "head.w"]));
    assert_eq!(restored.passed_over, paths(&["head.w", "old"]));
    assert_eq!(restored.differences, []);
    for path in ["body.a", "body.b"] {
        assert_eq!(of_leaf(&x, &state, path), of_leaf(&old, &whole, path));
    }
    for path in ["adapter", "head.w"] {
        let kept: Vec<_> = before
            .iter()
            .filter(|(name, _)| name.starts_with(path))
            .cloned()
            .collect();
        assert_eq!(of_leaf(&x, &state, path), kept);
    }
    assert_eq!(state.steps(), 3);
    // The file's schedule drives what is taken over, and nothing else.
    assert!((rate(&state, "body.a") - 0.07).abs() < 1e-12 && rate(&state, "adapter") == 0.1);
    update(&mut state, &x, &gradients(7, &x)).expect("an update");
    update(&mut whole, &old, &gradients(7, &old)).expect("an update");
    assert_eq!(of_leaf(&x, &state, "body.a"), of_leaf(&old, &whole, "body.a"));
}

/// A leaf that is left out may have any rule, and goes on under its own schedule at the file's count.
#[test]
fn what_is_left_out_has_its_own_rule_and_schedule() {
    let (_, _, bytes) = saved();
    let x = model(20, &[("body.a", 5), ("body.b", 4), ("head.w", 2), ("old", 3)]);
    let mut state = setup_with(&x, |path, _| {
        let of_file = MixedPrecision::new(
            DType::F32,
            Box::new(OptimiserChain::new((WeightDecay::new(0.01), Adam::new(0.1))))
                as Box<dyn optimisers::Rule>,
        );
        let own = MixedPrecision::new(DType::F32, Box::new(Adam::new(0.5)) as Box<dyn optimisers::Rule>);
        Some(if path == "head.w" { own } else { of_file })
    })
    .expect("a state");
    state
        .at("head.w")
        .expect("a leaf")
        .schedule(Schedule::linear(1.0, 0.0, 4).relative())
        .expect("a schedule");
    open(&bytes)
        .expect("a checkpoint")
        .except(["head.w"])
        .restore_with_model(&mut state, &x)
        .expect("a part");
    assert!((rate(&state, "head.w") - 0.125).abs() < 1e-12 && (rate(&state, "body.a") - 0.07).abs() < 1e-12);
}

/// Also if that schedule came from a file; and a pattern may be for a variable that has no state.
#[test]
fn what_is_left_out_keeps_the_schedule_of_an_earlier_file() {
    let (_, _, bytes) = saved();
    let x = model(
        20,
        &[
            ("body.a", 5),
            ("body.b", 4),
            ("head.w", 7),
            ("mean", 2),
            ("old", 3),
        ],
    );
    let mut state = setup_with(&x, |path, _| (path != "mean").then(|| rule(0.01))).expect("a state");
    let file = || open(&bytes).expect("a checkpoint").except(["mean"]);
    file().restore_with_model(&mut state, &x).expect("a whole file");
    file()
        .except(["head.*"])
        .restore_with_model(&mut state, &x)
        .expect("a part");
    assert_eq!(rate(&state, "head.w"), rate(&state, "body.a"));
}

/// By default the file's numbers count, with the switch the program's; what differs is listed either way.
#[test]
fn the_program_may_keep_its_settings() {
    let (old, whole, bytes) = saved();
    let x = model(30, &[("body.a", 5), ("body.b", 4), ("head.w", 7), ("old", 3)]);
    for keeps in [false, true] {
        let mut state = setup(rule(0.5), &x).expect("a state");
        state.schedule(Schedule::constant(0.25)).expect("a schedule");
        state.at("old").expect("a leaf").freeze();
        let file = open(&bytes).expect("a checkpoint");
        let file = if keeps { file.keeping_settings() } else { file };
        let Restored {
            taken, differences, ..
        } = file.restore_with_model(&mut state, &x).expect("a restore");
        assert_eq!(taken.len(), 4);
        let [lambda] = &differences[..] else {
            panic!("{differences:?}")
        };
        assert_eq!(
            (&*lambda.path, &*lambda.rule, &*lambda.field),
            ("body.a", "WeightDecay", "lambda")
        );
        assert_eq!(
            (lambda.program, lambda.file),
            (FieldValue::Real(0.5), Some(FieldValue::Real(0.01)))
        );
        let leaf = state.leaf("body.a").expect("a leaf");
        // The program's schedule counts in any case; the file's count of steps moves it.
        assert_eq!(
            (leaf.field("0.lambda"), leaf.learning_rate()),
            match keeps {
                true => (Some(FieldValue::Real(0.5)), Some(0.25)),
                false => (Some(FieldValue::Real(0.01)), Some(0.25)),
            }
        );
        assert_eq!(state.steps(), if keeps { 0 } else { 3 });
        let frozen: Vec<&str> = state
            .leaves()
            .filter(|leaf| leaf.is_frozen())
            .map(|leaf| leaf.path())
            .collect();
        assert_eq!(frozen, [if keeps { "old" } else { "body.b" }]);
        // What rules remember is the file's, with its counts.
        for (leaf, saved) in state.leaves().zip(whole.leaves()) {
            assert_eq!((leaf.counters(), leaf.steps()), (saved.counters(), saved.steps()));
            for name in leaf.tensor_names() {
                let of = |leaf: &optimisers::Leaf| bits(&leaf.tensor(&name).expect("a copy"));
                assert_eq!(of(leaf), of(saved), "{name}");
            }
        }
        assert!(x.iter().all(|(path, x)| bits(x) == bits(&old[path])));
    }
}

/// Ranks that keep their settings, or leave out other parts, do not agree.
#[test]
fn ranks_restore_the_same_part() {
    let (_, _, bytes) = saved();
    let all = on(2, move |world| {
        let x = model(20, &[("body.a", 5), ("body.b", 4), ("head.w", 2), ("old", 3)]);
        let mut state = Setup::over(&world).build(rule(0.5), &x).expect("a state");
        let file = || -> CheckpointFile { open(&bytes).expect("a checkpoint").except(["head.*"]) };
        let other = if optimisers::Communicator::rank(&world) == 0 {
            file()
        } else {
            file().keeping_settings()
        };
        let error = other.restore_with_model(&mut state, &x).expect_err("refused");
        is_kind(&error, ErrorKind::Ranks, &["what is restored"]);
        let restored = file()
            .keeping_settings()
            .restore_with_model(&mut state, &x)
            .expect("a part");
        update(&mut state, &x, &gradients(7, &x)).expect("an update");
        (
            restored,
            x.iter()
                .map(|(path, x)| (path.clone(), bits(x)))
                .collect::<BTreeMap<_, _>>(),
        )
    });
    let x = model(20, &[("body.a", 5), ("body.b", 4), ("head.w", 2), ("old", 3)]);
    let mut state = setup(rule(0.5), &x).expect("a state");
    let (_, _, bytes) = saved();
    let file = open(&bytes)
        .expect("a checkpoint")
        .except(["head.*"])
        .keeping_settings();
    let restored = file.restore_with_model(&mut state, &x).expect("a part");
    update(&mut state, &x, &gradients(7, &x)).expect("an update");
    let alone = (
        restored,
        x.iter().map(|(path, x)| (path.clone(), bits(x))).collect(),
    );
    all.into_iter().for_each(|of_rank| assert_eq!(of_rank, alone));
}
