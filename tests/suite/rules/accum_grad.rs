//! Windows of accumulation: who steps in which call, and on the mean of what.

use candle_core::DType;
use optimisers::{
    AccumGrad, Adam, Adjust, Average, Checkpoint, ClipGlobalNorm, Descent, DynamicScale, Ema, ErrorKind,
    LossScaler, OnOverflow, OptimiserChain, Outcome, Rule, Schedule, SkipReason, StateTree, Status, StoreAs,
    Update, Warning, setup, setup_with, trainables, update,
};

use crate::model::models::of;
use support::common::{
    Grads, Vars, grads, is_kind, model, not_finite, rules_and_chains, snapshot, tensor, values, var,
};
use support::crafted_checkpoints::{file_of, open};

/// A step subtracts what `AccumGrad` makes of a window.
fn collecting(n: u64) -> OptimiserChain<(AccumGrad, Descent)> {
    OptimiserChain::new((AccumGrad::new(n), Descent::new(1.0)))
}

fn zeros(paths: &[&str]) -> Vars {
    paths
        .iter()
        .map(|path| (path.to_string(), var(&of(&[0.0], DType::F64))))
        .collect()
}

/// A call in which these leaves have these gradients.
fn call(state: &mut StateTree, model: &Vars, gradients: &[(&str, f64)]) -> Outcome {
    let grads: Grads = gradients
        .iter()
        .map(|(path, gradient)| (path.to_string(), of(&[*gradient], DType::F64)))
        .collect();
    update(state, model, &grads).expect("an update")
}

/// A call in which all leaves have the same gradient, and where they are then.
fn all(state: &mut StateTree, model: &Vars, gradient: f64) -> Vec<f64> {
    let paths: Vec<(&str, f64)> = model.keys().map(|path| (path.as_str(), gradient)).collect();
    call(state, model, &paths);
    model.values().map(|x| values(x)[0]).collect()
}

/// What a window of the calls 1, 2, ... makes a step of, each of the weight of its number.
fn expected(average: Average, calls: u64) -> f64 {
    let numbers = 1..=calls;
    match average {
        Average::Mean => numbers.sum::<u64>() as f64 / calls as f64,
        Average::Sum => numbers.sum::<u64>() as f64,
        Average::Weighted => numbers.clone().map(|i| i * i).sum::<u64>() as f64 / numbers.sum::<u64>() as f64,
    }
}

/// A gradient of this number, with that weight.
fn numbered(state: &mut StateTree, model: &Vars, number: u64) -> Status {
    let grads = Grads::from([("a".to_string(), of(&[number as f64], DType::F64))]);
    Update::new(state)
        .weight(number)
        .apply(model, &grads)
        .expect("an update")
        .status
}

/// A copy that a rule moves in each call of a window is no copy any more: only what waits behind the window
/// has to be the parameter still.
#[test]
fn rules_with_copies_may_stand_in_front_of_a_window() {
    for rule in rules_and_chains() {
        let x = model(&[tensor(1, &[3, 4], DType::F32)]);
        let name = rule.name();
        let chain = OptimiserChain::new((rule, AccumGrad::new(4), Ema::new(0.5), Descent::new(1e-3)));
        let mut state = setup(chain, &x).expect("a state");
        let mut call = |seed: u64| update(&mut state, &x, &grads([Some(tensor(seed, &[3, 4], DType::F32))]));
        for seed in 0..3 {
            call(seed).unwrap_or_else(|error| panic!("{name}, call {seed}: {error}"));
        }
        x["0"].set(&tensor(9, &[3, 4], DType::F32)).expect("new weights");
        // A rule that collects for itself may have begun a step.
        match call(3) {
            Err(error) => is_kind(
                &error,
                ErrorKind::Changed,
                &["which the rule started as a copy of the parameter"],
            ),
            Ok(outcome) => assert_eq!(outcome.status, Status::Accumulated, "{name}"),
        }
    }
    // The average moves in each call, the parameter in each second one.
    let x = zeros(&["a"]);
    let mut state = setup(
        OptimiserChain::new((Ema::new(0.5), AccumGrad::new(2), Descent::new(1.0))),
        &x,
    )
    .expect("a state");
    assert_eq!(
        (
            all(&mut state, &x, 1.0),
            all(&mut state, &x, 1.0),
            all(&mut state, &x, 1.0)
        ),
        (vec![0.0], vec![-1.0], vec![-1.0])
    );
}

/// The length of windows, the calls before it is changed, the next length, and the call that ends the window.
#[test]
fn a_new_length_divides_by_the_calls_that_were_counted() {
    for average in [Average::Mean, Average::Sum, Average::Weighted] {
        for (before, calls, after, ends) in [
            (8, 5, 2, 6),
            (8, 5, 6, 6),
            (8, 5, 1, 6),
            (8, 5, 4, 8),
            (2, 1, 8, 8),
            (3, 0, 5, 5),
            (3, 0, 2, 2),
        ] {
            let model = zeros(&["a"]);
            let rule = OptimiserChain::new((
                AccumGrad {
                    average,
                    ..AccumGrad::new(before)
                },
                Descent::new(0.0),
            ));
            let mut state = setup(rule, &model).expect("a state");
            // A whole window, and a part of the next.
            (1..=before).for_each(|number| _ = numbered(&mut state, &model, number));
            (1..=calls).for_each(|number| _ = numbered(&mut state, &model, number));
            state.all().adjust_field("n", after).expect("a count");
            state.adjust(1.0).expect("a learning rate");
            for number in calls + 1..ends {
                assert_eq!(numbered(&mut state, &model, number), Status::Accumulated);
            }
            assert_eq!(numbered(&mut state, &model, ends), Status::Stepped);
            let (x, step) = (values(&model["a"])[0], expected(average, ends));
            assert!(
                (x + step).abs() < 1e-12,
                "{average:?}, {before} to {after}: {x} for {step}"
            );
        }
    }
}

/// The norm is of all leaves that have the rule, and a schedule advances once per window.
#[test]
fn a_thawed_leaf_is_in_step_with_the_others() {
    let model = zeros(&["a", "b"]);
    let rule = OptimiserChain::new((AccumGrad::new(2), ClipGlobalNorm::new(1.0), Descent::new(1.0)));
    let mut state = setup(rule, &model).expect("a state");
    state.schedule(Schedule::constant(1.0)).expect("a schedule");
    let mut seen = Vec::new();
    for number in 0..8 {
        match number {
            1 => state.at("a").expect("a leaf").freeze(),
            2 => state.at("a").expect("a leaf").thaw(),
            _ => {}
        }
        let outcome = call(&mut state, &model, &[("a", 3.0), ("b", 4.0)]);
        seen.push((outcome.status, outcome.applied, outcome.global_norm));
    }
    use Status::{Accumulated, Stepped};
    let (held, both) = ((Accumulated, 0, None), (Stepped, 2, Some(5.0)));
    let pairs = [held, both];
    assert_eq!(seen[..2], [(Accumulated, 0, None), (Stepped, 1, Some(4.0))]);
    assert_eq!(seen[2..], [pairs.clone(), pairs.clone(), pairs].concat());
    assert_eq!(state.steps(), 4);
}

/// A leaf has the mean of the calls in which it was there, those before it was frozen included.
#[test]
fn a_leaf_that_was_away_has_the_mean_of_its_own_calls() {
    let model = zeros(&["a", "b"]);
    let mut state = setup(collecting(4), &model).expect("a state");
    all(&mut state, &model, 2.0);
    state.at("a").expect("a leaf").freeze();
    all(&mut state, &model, 3.0);
    state.at("a").expect("a leaf").thaw();
    assert_eq!(all(&mut state, &model, 4.0), [0.0, 0.0]);
    assert_eq!(
        all(&mut state, &model, 9.0),
        [-(2.0 + 4.0 + 9.0) / 3.0, -(2.0 + 3.0 + 4.0 + 9.0) / 4.0]
    );
}

#[test]
fn an_added_leaf_joins_the_window() {
    let mut model = zeros(&["a"]);
    let mut state = setup(collecting(3), &model).expect("a state");
    all(&mut state, &model, 1.0);
    model.extend(zeros(&["b"]));
    state.add(collecting(3), &model).expect("a leaf");
    assert_eq!(all(&mut state, &model, 3.0), [0.0, 0.0]);
    assert_eq!(all(&mut state, &model, 5.0), [-3.0, -4.0]);
    model.remove("a");
    state.remove("a").expect("a leaf");
    assert_eq!(
        [1.0, 1.0, 4.0].map(|gradient| all(&mut state, &model, gradient)[0]),
        [-4.0, -4.0, -6.0]
    );
}

/// Leaves with windows of 2 and 3 calls, and one without: each ends with the multiples of its length, and a
/// call that is skipped is none.
#[test]
fn windows_of_several_lengths() {
    let model = zeros(&["none", "three", "two"]);
    let mut state = setup_with(&model, |path, _| {
        let n = match path {
            "two" => Some(AccumGrad::new(2)),
            "three" => Some(AccumGrad::new(3)),
            _ => None,
        };
        Some(OptimiserChain::new((n, Descent::new(1.0))))
    })
    .expect("a state");
    let nan: Grads = model
        .keys()
        .map(|path| (path.clone(), of(&[f64::NAN], DType::F64)))
        .collect();
    let mut steps = Vec::new();
    for number in 1..=12 {
        let outcome = Update::new(&mut state)
            .finite_only()
            .apply(&model, &nan)
            .expect("an update");
        assert_eq!(outcome.status, not_finite("none"));
        let before: Vec<f64> = model.values().map(|x| values(x)[0]).collect();
        let after = all(&mut state, &model, 1.0);
        steps.push(
            before
                .iter()
                .zip(after)
                .map(|(before, after)| before - after)
                .collect::<Vec<_>>(),
        );
        let expected = [1, 3, 2].map(|n| if number % n == 0 { 1.0 } else { 0.0 });
        assert_eq!(steps.last().expect("a step"), &expected, "call {number}");
    }
}

/// Of two in one chain the second counts the steps of the first, for leaves that were away, too.
#[test]
fn windows_of_windows() {
    for (first, second) in [(2, 3), (2, 2), (3, 2), (1, 4), (4, 1)] {
        let model = zeros(&["a", "b"]);
        let rule = OptimiserChain::new((AccumGrad::new(first), AccumGrad::new(second), Descent::new(1.0)));
        let mut state = setup(rule, &model).expect("a state");
        for number in 1..=3 * first * second {
            if number == 2 {
                state.at("a").expect("a leaf").freeze();
            }
            if number == 3 {
                state.at("a").expect("a leaf").thaw();
            }
            let outcome = call(&mut state, &model, &[("a", 1.0), ("b", 1.0)]);
            let moved = if number % (first * second) == 0 { 2 } else { 0 };
            assert!(
                outcome.applied == moved || number == 2,
                "{first} of {second}, call {number}: {}",
                outcome.applied
            );
        }
        assert_eq!(values(&model["b"]), [-3.0], "the mean of means of ones");
    }
}

/// Whatever is done to the tree, its windows go on.
#[test]
fn a_tree_that_changes_keeps_its_windows() {
    let at_two = || {
        let model = zeros(&["a", "b"]);
        let mut state = setup(collecting(3), &model).expect("a state");
        all(&mut state, &model, 1.0);
        all(&mut state, &model, 2.0);
        (model, state)
    };
    let (model, state) = at_two();
    let steps = |state: &mut StateTree, model: &Vars| assert_eq!(all(state, model, 6.0), [-3.0, -3.0]);

    let other = zeros(&["a", "b"]);
    let mut copy = state.try_clone().expect("a copy");
    copy.rebind(&other).expect("another model");
    steps(&mut copy, &other);

    let grads: Grads = model
        .keys()
        .map(|path| (path.clone(), of(&[6.0], DType::F64)))
        .collect();
    let (_, next, outcome) = Update::functional(&state)
        .apply(&trainables(&model).expect("parameters"), &grads)
        .expect("an update");
    assert_eq!(
        (outcome.status, values(&next["a"])),
        (Status::Stepped, vec![-3.0])
    );

    let (model, mut state) = at_two();
    state.rename("a", "c").expect("a new name");
    assert_eq!(call(&mut state, &model, &[("c", 6.0), ("b", 6.0)]).applied, 2);

    let (model, mut state) = at_two();
    state
        .at("a")
        .expect("a leaf")
        .replace(OptimiserChain::new((AccumGrad::new(3), Adam::new(1.0))), &model)
        .expect("another rule");
    assert_eq!(call(&mut state, &model, &[("a", 6.0), ("b", 6.0)]).applied, 2);
    // Without a window there is nothing to count, and new windows begin at once.
    state
        .all()
        .replace(Descent::new(0.0), &model)
        .expect("another rule");
    all(&mut state, &model, 1.0);
    state.all().replace(collecting(2), &model).expect("another rule");
    let statuses: Vec<Status> = (0..4)
        .map(|_| call(&mut state, &model, &[("a", 1.0)]).status)
        .collect();
    assert_eq!(
        statuses,
        [
            Status::Accumulated,
            Status::Stepped,
            Status::Accumulated,
            Status::Stepped
        ]
    );
}

#[test]
fn windows_that_are_ended_begin_together() {
    let model = zeros(&["a", "b"]);
    let rule = |path: &str| Some(collecting(if path == "a" { 2 } else { 4 }));
    let mut state = setup_with(&model, |path, _| rule(path)).expect("a state");
    let fixed = DynamicScale {
        growth_interval: 1000,
        initial: 1.0,
        ..DynamicScale::default()
    };
    let mut scaler = LossScaler::with(fixed).on_overflow(OnOverflow::EndWindow);
    let mut micro = |state: &mut StateTree, gradient: f64| {
        let scale = scaler.current();
        let _ = scaler.scale(&of(&[1.0], DType::F32)).expect("a loss");
        let grads: Grads = model
            .keys()
            .map(|path| (path.clone(), of(&[gradient * scale], DType::F64)))
            .collect();
        let outcome = Update::new(state)
            .scaler(&mut scaler)
            .apply(&model, &grads)
            .expect("an update");
        (outcome.status, outcome.applied)
    };
    use Status::{Accumulated, Stepped};
    let calls = [1.0, 1.0, 1.0, f64::NAN, 1.0, 1.0, 1.0, 1.0].map(|gradient| micro(&mut state, gradient));
    let (held, first, both) = (|| (Accumulated, 0), || (Stepped, 1), (Stepped, 2));
    assert_eq!(
        calls,
        [
            held(),
            first(),
            held(),
            (not_finite("a"), 0),
            held(),
            first(),
            held(),
            both
        ]
    );
}

/// The state of a chain in the middle of its windows, with a leaf that is frozen there.
fn saved(rule: &(impl Rule + Clone)) -> (Vars, StateTree) {
    let model = zeros(&["a", "b", "c"]);
    let mut state = setup(rule.clone(), &model).expect("a state");
    for number in 0..5 {
        if number == 1 {
            state.at("b").expect("a leaf").freeze();
        }
        all(&mut state, &model, number as f64);
    }
    (model, state)
}

fn go_on(model: &Vars, state: &mut StateTree) -> Vec<usize> {
    state.all().thaw();
    (0..12)
        .map(|number| call(state, model, &[("a", 1.0), ("b", number as f64), ("c", 2.0)]).applied)
        .collect()
}

/// A file goes on in the middle of a window.
#[test]
fn a_checkpoint_goes_on_with_its_windows() {
    let nested = OptimiserChain::new((
        AccumGrad::new(2),
        OptimiserChain::new((AccumGrad::new(3), AccumGrad::new(1))),
        Descent::new(1.0),
    ));
    let rules: [Box<dyn Rule>; 3] = [Box::new(collecting(3)), Box::new(collecting(7)), Box::new(nested)];
    for rule in rules {
        let (model, mut state) = saved(&rule);
        let file = open(&file_of(Checkpoint::new(&state).model(&model))).expect("a checkpoint");
        let expected = (go_on(&model, &mut state), snapshot(&model, &state));
        let model = zeros(&["a", "b", "c"]);
        let mut state = setup(rule.clone(), &model).expect("a state");
        file.restore_with_model(&mut state, &model)
            .expect("the same state");
        assert!(
            (go_on(&model, &mut state), snapshot(&model, &state)) == expected,
            "{}",
            rule.name()
        );
    }
}

/// What a leaf is expected to have collected.
#[derive(Clone, Default)]
struct Collected {
    n: u64,
    frozen: bool,
    sum: f64,
    calls: u64,
    received: bool,
    x: f64,
}

impl Collected {
    /// After this number of calls. Whether its window goes on.
    fn call(&mut self, number: u64, gradient: Option<f64>) -> bool {
        self.calls += 1;
        self.received |= gradient.is_some();
        self.sum += gradient.unwrap_or(0.0);
        if !number.is_multiple_of(self.n) {
            return true;
        }
        self.x -= if self.received {
            self.sum / self.calls as f64
        } else {
            0.0
        };
        (self.sum, self.calls, self.received) = (0.0, 0, false);
        false
    }
}

/// Any course of training: every leaf steps in the calls that its window says, on the mean of what it saw.
#[test]
fn windows_are_what_the_documentation_says() {
    const PATHS: [&str; 3] = ["a", "b", "c"];
    let mut random = 1u64;
    let mut below = |limit: usize| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % limit
    };
    for _ in 0..200 {
        let model = zeros(&PATHS);
        let mut leaves = PATHS.map(|_| Collected {
            n: 1 + below(4) as u64,
            ..Collected::default()
        });
        let n = |path: &str| {
            leaves
                .iter()
                .zip(PATHS)
                .find(|(_, known)| *known == path)
                .map(|(leaf, _)| leaf.n)
        };
        let mut state = setup_with(&model, |path, _| n(path).map(collecting)).expect("a state");
        let mut number = 0;
        for _ in 0..40 {
            let chosen = below(3);
            let mut selection = state.at(PATHS[chosen]).expect("a leaf");
            match below(8) {
                0 if leaves[chosen].frozen => selection.thaw(),
                0 => selection.freeze(),
                1 => {
                    leaves[chosen].n = 1 + below(4) as u64;
                    selection.adjust_field("n", leaves[chosen].n).expect("a count");
                }
                _ => {}
            }
            leaves
                .iter_mut()
                .zip(state.leaves())
                .for_each(|(leaf, own)| leaf.frozen = own.is_frozen());
            let gradients = PATHS.map(|_| (below(4) > 0).then(|| below(100) as f64));
            let given: Vec<(&str, f64)> = PATHS
                .into_iter()
                .zip(gradients)
                .filter_map(|(path, gradient)| Some((path, gradient?)))
                .collect();
            if leaves
                .iter()
                .zip(gradients)
                .all(|(leaf, gradient)| leaf.frozen || gradient.is_none())
            {
                continue;
            }
            call(&mut state, &model, &given);
            let trained = leaves.iter_mut().zip(gradients).filter(|(leaf, _)| !leaf.frozen);
            let open = trained
                .map(|(leaf, gradient)| leaf.call(number + 1, gradient))
                .filter(|open| *open)
                .count()
                > 0;
            number = if open { number + 1 } else { 0 };
            for (leaf, x) in leaves.iter().zip(model.values()) {
                assert!(
                    (values(x)[0] - leaf.x).abs() < 1e-9,
                    "{} for {}",
                    values(x)[0],
                    leaf.x
                );
            }
        }
    }
}

/// Wrapped, on any engine: the same steps.
#[test]
fn windows_are_the_same_in_any_wrapper() {
    for optimiser in support::common::optimisers_for(DType::F64) {
        let lengths: Vec<_> = optimiser
            .fields()
            .into_iter()
            .filter(|(name, _)| *name == "n")
            .collect();
        if lengths.is_empty() {
            continue;
        }
        let model: Vars = ["a", "b"]
            .map(|path| (path.to_string(), var(&of(&[1.0], DType::F64))))
            .into();
        let mut state = setup(optimiser.clone(), &model).expect("a state");
        for number in 0..13 {
            match number {
                1 => state.at("a").expect("a leaf").freeze(),
                2 => state.at("a").expect("a leaf").thaw(),
                _ => {}
            }
            let outcome = call(&mut state, &model, &[("a", 1.0), ("b", 1.0)]);
            assert!(
                number < 2 || outcome.applied != 1,
                "{}: call {number}",
                optimiser.name()
            );
        }
    }
}

/// A window that ends after k calls is a window of k calls, for every rule after it: the bits are the same.
#[test]
fn a_window_that_ends_early_is_a_shorter_window() {
    for rule in rules_and_chains() {
        if rule
            .fields()
            .iter()
            .any(|(name, _)| *name == "n" || name.ends_with(".n"))
        {
            // It has windows of its own, which would count windows.
            continue;
        }
        let run = |n: u64, releases: bool| {
            let x = model(&[tensor(1, &[3, 4], DType::F32), tensor(2, &[5], DType::F32)]);
            let chain = OptimiserChain::new((AccumGrad::new(n), rule.clone()));
            let mut state = setup(chain, &x).expect("a state");
            for call in 0..9 {
                // The second parameter has no gradient in every second call.
                let second = (call % 2 == 0).then(|| tensor(20 + call, &[5], DType::F32));
                let gradients = grads([Some(tensor(10 + call, &[3, 4], DType::F32)), second]);
                let outcome = update(&mut state, &x, &gradients).expect("an update");
                if releases && call % 3 == 2 {
                    assert_eq!((outcome.status, outcome.open_calls), (Status::Accumulated, 3));
                    let outcome = Update::new(&mut state).release_windows(&x).expect("a release");
                    assert_eq!((outcome.status, outcome.open_calls), (Status::Stepped, 0));
                }
            }
            state.all().adjust_field("0.n", 3).expect("a count");
            (state.steps(), snapshot(&x, &state))
        };
        assert_eq!(run(8, true), run(3, false), "{}", rule.name());
    }
}

/// For each kind of mean, whether a call is empty or not; and nothing that is collected is no step.
#[test]
fn what_windows_have_is_released_once() {
    for average in [Average::Mean, Average::Sum, Average::Weighted] {
        for calls in 1..4 {
            let model = zeros(&["a", "b"]);
            let collect = AccumGrad {
                average,
                ..AccumGrad::new(4)
            };
            let mut state =
                setup(OptimiserChain::new((collect.clone(), Descent::new(1.0))), &model).expect("a state");
            state.require_all();
            let before = snapshot(&model, &state);
            let nothing = Update::new(&mut state)
                .release_windows(&model)
                .expect("a release");
            assert_eq!((nothing.status, nothing.open_calls), (Status::default(), 0));
            assert_eq!(snapshot(&model, &state), before);
            // Calls without a gradient are counted, and move nothing.
            let empty = Update::new(&mut state)
                .allow_no_gradients()
                .apply(&model, &Grads::new());
            assert_eq!(empty.expect("an update").open_calls, 1);
            let nothing = Update::new(&mut state)
                .release_windows(&model)
                .expect("a release");
            assert_eq!((nothing.has_stepped(), nothing.open_calls), (false, 0));
            assert_eq!(snapshot(&model, &state), before);
            // A frozen parameter keeps what it has, and the next call is the first of a new window.
            numbered(&mut state, &model, 7);
            state.all().freeze();
            let nothing = Update::new(&mut state)
                .release_windows(&model)
                .expect("a release");
            assert_eq!((nothing.has_stepped(), nothing.open_calls), (false, 0));
            state.all().thaw();
            let mut state =
                setup(OptimiserChain::new((collect.clone(), Descent::new(1.0))), &model).expect("a state");
            state.require_all();

            (1..=calls).for_each(|number| _ = numbered(&mut state, &model, number));
            assert!(
                state
                    .to_string()
                    .ends_with(&format!("; {calls} calls in open windows"))
            );
            let outcome = Update::new(&mut state)
                .release_windows(&model)
                .expect("a release");
            assert_eq!((outcome.applied, outcome.open_calls, state.steps()), (1, 0, 1));
            assert_eq!(outcome.without_gradient, ["b"]);
            let (x, step) = (values(&model["a"])[0], expected(average, calls));
            assert!((x + step).abs() < 1e-12, "{average:?}, {calls}: {x} for {step}");
            assert!(!state.to_string().contains("open"));
        }
    }
}

/// The second of two counts the shorter window of the first as one; without one it has what it had.
#[test]
fn windows_of_windows_end_together() {
    for (calls, expected) in [
        (1, 1.0),
        (2, 1.5),
        (3, (1.5 + 3.0) / 2.0),
        (5, (1.5 + 3.5 + 5.0) / 3.0),
    ] {
        let model = zeros(&["a"]);
        let chain = OptimiserChain::new((AccumGrad::new(2), AccumGrad::new(4), Descent::new(1.0)));
        let mut state = setup(chain, &model).expect("a state");
        (1..=calls).for_each(|number| _ = numbered(&mut state, &model, number));
        let outcome = Update::new(&mut state)
            .release_windows(&model)
            .expect("a release");
        assert_eq!(
            (outcome.applied, values(&model["a"])[0]),
            (1, -expected),
            "{calls} calls"
        );
    }
}

/// The scale of each loss was divided out when it was collected. A sum that overflows is given up.
#[test]
fn a_scaler_needs_no_loss_to_release_windows() {
    let x = var(&of(&[0.0], DType::F16));
    let collect = StoreAs::new(
        [("acc", DType::F16)],
        AccumGrad {
            average: Average::Sum,
            ..AccumGrad::new(99)
        },
    );
    let mut state = setup(OptimiserChain::new((collect, Descent::new(1.0))), &x).expect("a state");
    let mut scaler = LossScaler::fixed(8.0);
    let given_up = SkipReason::WindowsGivenUp { path: String::new() };
    for (gradient, calls, reason) in [(2.0, 2, None), (8e3, 9, Some(given_up))] {
        for _ in 0..calls {
            let loss = (x.as_tensor() * gradient)
                .and_then(|loss| loss.sum_all())
                .expect("a loss");
            let grads = scaler
                .scale(&loss.to_dtype(DType::F32).expect("f32"))
                .and_then(|loss| Ok(loss.backward()?));
            Update::new(&mut state)
                .scaler(&mut scaler)
                .apply(&x, &grads.expect("gradients"))
                .expect("an update");
        }
        let outcome = Update::new(&mut state)
            .scaler(&mut scaler)
            .release_windows(&x)
            .expect("a release");
        assert_eq!(
            (outcome.skipped(), outcome.open_calls),
            (reason.as_ref(), 0),
            "{gradient}"
        );
        assert_eq!(values(&x), [-4.0], "{gradient}");
    }
    assert_eq!(scaler.current(), 8.0);
}

/// A file with an open window is named by a warning, and a run goes on from it.
#[test]
fn an_open_window_is_named_when_it_is_saved() {
    let model = zeros(&["a"]);
    let mut state = setup(collecting(4), &model).expect("a state");
    (1..=2).for_each(|number| _ = numbered(&mut state, &model, number));
    let folder = tempfile::tempdir().expect("a folder");
    let open_window = [Warning::WindowsOpen { calls: 2 }];
    let (bytes, warnings) = Checkpoint::new(&state).to_bytes().expect("bytes");
    assert_eq!(warnings, open_window);
    assert_eq!(
        Checkpoint::new(&state)
            .save(folder.path().join("run"))
            .expect("a save"),
        open_window
    );
    assert_eq!(
        state
            .save_masters(&model, folder.path().join("masters"))
            .expect("a save"),
        open_window
    );
    let mut resumed = setup(collecting(4), &model).expect("a state");
    open(&bytes)
        .expect("a checkpoint")
        .restore(&mut resumed)
        .expect("a restore");
    Update::new(&mut resumed)
        .release_windows(&model)
        .expect("a release");
    assert_eq!(values(&model["a"]), [-1.5]);
    assert_eq!(Checkpoint::new(&resumed).to_bytes().expect("bytes").1, []);
}
