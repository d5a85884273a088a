//! Windows of accumulation that are added up pairwise.

use candle_core::{DType, Tensor};
use optimisers::{
    AccumGrad, Average, Checkpoint, CheckpointFile, ClipGlobalNorm, Descent, Engine, ErrorKind,
    OptimiserChain, Rule, StateTree, Status, StoreAs, Summation, Update, setup, setup_with, update,
};

use crate::model::models::{CPU, of};
use support::common::{
    Grads, Vars, bits, engines, given_up, is_kind, model, not_finite, numbers, pairwise, snapshot, values,
};
use support::crafted_checkpoints::{file_of, open};

/// More elements than go through a chain at once, and an odd end.
const LENGTH: usize = 301;

fn chain(collect: AccumGrad) -> OptimiserChain<(AccumGrad, Descent)> {
    OptimiserChain::new((collect, Descent::new(1.0)))
}

fn zeros() -> Vars {
    model(&[of(&[0.0; LENGTH], DType::F32)])
}

/// A gradient of numbers of many sizes, so that each order of a sum has bits of its own.
fn gradient(call: u64) -> Vec<f32> {
    numbers(call + 1, LENGTH)
        .into_iter()
        .enumerate()
        .map(|(i, number)| (number * 2f64.powi((i as i32 * 7) % 13 - 6)) as f32)
        .collect()
}

fn given(values: Vec<f32>) -> Grads {
    Grads::from([("0".to_string(), Tensor::new(values, CPU).expect("a tensor"))])
}

/// The sum of the first half, of a power of two of terms, and that of the others.
fn tree(terms: &[f32]) -> f32 {
    match terms {
        [] => 0.0,
        [one] => *one,
        _ => {
            let (first, others) = terms.split_at(terms.len().next_power_of_two() / 2);
            tree(first) + tree(others)
        }
    }
}

/// What a window of these gradients, each with its weight, comes to.
fn expected(window: &[(u64, f32)], total: f32, sum: impl Fn(&[f32]) -> f32) -> Vec<f32> {
    let terms =
        |i: usize| window.iter().map(|(call, weight)| gradient(*call)[i] * weight).collect::<Vec<_>>();
    (0..LENGTH).map(|i| sum(&terms(i)) / total).collect()
}

/// How far the parameter is from zero, which steps of 1 have taken it.
fn moved(x: &Vars) -> Vec<f32> {
    x["0"].to_vec1::<f32>().expect("values").into_iter().map(|x| -x).collect()
}

fn back_to_zero(x: &Vars) {
    x["0"].set(&x["0"].zeros_like().expect("zeros")).expect("the parameter");
}

fn step(state: &mut StateTree, x: &Vars, call: u64) -> Status {
    update(state, x, &given(gradient(call))).expect("an update").status
}

/// On every engine, in windows one after another.
#[test]
fn neighbours_are_added_first() {
    for (engine, n) in
        engines().into_iter().flat_map(|engine| [1, 2, 3, 4, 5, 6, 7, 8, 13, 16].map(|n| (engine, n)))
    {
        for average in [Average::Mean, Average::Sum] {
            let x = zeros();
            let mut state = setup(chain(AccumGrad { average, ..pairwise(n) }), &x).expect("a state");
            for first in [0, n] {
                let calls = first..first + n;
                for call in calls.clone() {
                    let outcome = Update::new(&mut state)
                        .engine(engine)
                        .apply(&x, &given(gradient(call)))
                        .expect("an update");
                    assert_eq!(outcome.status == Status::Stepped, call + 1 == first + n);
                }
                let window: Vec<_> = calls.map(|call| (call, 1.0)).collect();
                let total = if average == Average::Sum { 1.0 } else { n as f32 };
                assert_eq!(moved(&x), expected(&window, total, tree), "{n} on {engine:?}");
                let in_order =
                    expected(&window, total, |terms| terms.iter().fold(0.0, |sum, term| sum + term));
                assert_eq!(moved(&x) == in_order, n <= 3, "{n}: another order would not be seen");
                assert!(state.leaves().all(|leaf| {
                    leaf.counters().iter().all(|(name, count)| name.ends_with('t') || *count == 0)
                }));
                back_to_zero(&x);
            }
        }
    }
}

#[test]
fn it_takes_a_tensor_for_each_doubling() {
    for (n, names) in [
        (1, "acc"),
        (2, "acc"),
        (3, "acc"),
        (4, "acc acc1"),
        (7, "acc acc1"),
        (8, "acc acc1 acc2"),
        (15, "acc acc1 acc2"),
    ] {
        let x = zeros();
        let state = setup(pairwise(n), &x).expect("a state");
        assert_eq!(state.leaf("0").expect("a leaf").tensor_names().join(" "), names, "{n}");
        assert_eq!(state.bytes(), 4 * LENGTH * names.split(' ').count());
    }
    let many = setup(pairwise(u64::MAX), &zeros()).expect("a state");
    assert_eq!(many.leaf("0").expect("a leaf").tensor_names().len(), 63);
}

/// Of gradients that are missing, or weigh nothing, the next takes the place: in a window of 8 the first, the
/// last, one in the middle, almost all.
#[test]
fn what_does_not_count_has_no_place() {
    let absent: [&[u64]; 6] = [&[0], &[7], &[3], &[2, 3, 6], &[0, 1, 2, 3, 4, 5, 6], &[1, 2, 3, 4, 5, 6, 7]];
    for (engine, absent) in engines().into_iter().flat_map(|engine| absent.map(|absent| (engine, absent))) {
        for average in [Average::Mean, Average::Weighted] {
            let x = zeros();
            let mut state = setup(chain(AccumGrad { average, ..pairwise(8) }), &x).expect("a state");
            let mut window = Vec::new();
            for call in 0..8 {
                let (is_absent, weighted) = (absent.contains(&call), average == Average::Weighted);
                let weight = if weighted { call % 3 + 1 } else { 1 };
                let (grads, weight) = match (is_absent, weighted) {
                    (true, true) => (given(vec![f32::NAN; LENGTH]), 0),
                    (true, false) => (Grads::new(), 1),
                    (false, _) => {
                        window.push((call, weight as f32));
                        (given(gradient(call)), weight)
                    }
                };
                let update =
                    Update::new(&mut state).engine(engine).finite_only().allow_no_gradients().weight(weight);
                let status = update.apply(&x, &grads).expect("an update").status;
                assert_eq!(status, if call == 7 { Status::Stepped } else { Status::Accumulated });
            }
            let total =
                if average == Average::Mean { 8.0 } else { window.iter().map(|(_, weight)| weight).sum() };
            assert_eq!(moved(&x), expected(&window, total, tree), "without {absent:?} on {engine:?}");
        }
    }
}

/// A leaf that was away adds its own gradients, and so does one whose window became shorter or longer.
#[test]
fn a_window_may_change() {
    let ones = |calls: std::ops::Range<u64>| calls.map(|call| (call, 1.0)).collect::<Vec<_>>();
    let x = zeros();
    let mut state = setup(chain(pairwise(8)), &x).expect("a state");
    let away = |state: &mut StateTree| state.at("0").expect("a leaf").freeze();
    (0..3).for_each(|call| _ = step(&mut state, &x, call));
    away(&mut state);
    assert!(Update::new(&mut state).allow_no_gradients().apply(&x, &Grads::new()).is_ok());
    state.all().thaw();
    let statuses: Vec<Status> = (3..8).map(|call| step(&mut state, &x, call)).collect();
    assert_eq!(statuses.last(), Some(&Status::Stepped));
    assert_eq!(moved(&x), expected(&ones(0..8), 8.0, tree), "no call of others has passed");

    for (before, calls, after, ends) in
        [(4, 3, 7, 7), (7, 5, 6, 6), (7, 6, 4, 8), (3, 1, 2, 2), (2, 1, 1, 2), (15, 9, 12, 12)]
    {
        let x = zeros();
        let mut state = setup(chain(pairwise(before)), &x).expect("a state");
        (0..calls).for_each(|call| _ = step(&mut state, &x, call));
        state.adjust_field("n", after).expect("as many tensors");
        let statuses: Vec<Status> = (calls..ends).map(|call| step(&mut state, &x, call)).collect();
        assert_eq!(
            statuses.iter().position(|status| *status == Status::Stepped),
            Some(statuses.len() - 1),
            "{before} to {after}"
        );
        let (window, total) = (ones(0..ends), ends as f32);
        if (before, after) == (7, 4) {
            // There is no tensor for the seventh, which joins the last two; the eighth ends the window.
            let joined = |g: &[f32]| tree(&g[..4]) + (((g[4] + g[5]) + g[6]) + g[7]);
            assert_eq!(moved(&x), expected(&window, total, joined), "{before} to {after}");
        } else {
            assert_eq!(moved(&x), expected(&window, total, tree), "{before} to {after}");
        }
    }
}

#[test]
fn another_number_of_tensors_is_another_rule() {
    let x = zeros();
    let mut state = setup(chain(pairwise(8)), &x).expect("a state");
    (0..3).for_each(|call| _ = step(&mut state, &x, call));
    let before = snapshot(&x, &state);
    for n in [1u64, 4, 7, 16] {
        is_kind(
            &state.adjust_field("n", n).expect_err("fixed"),
            ErrorKind::Argument,
            &["n decides the layout", "`Selection::replace`"],
        );
    }
    is_kind(
        &state.adjust_field("order", Summation::InOrder).expect_err("fixed"),
        ErrorKind::Argument,
        &["order decides the layout"],
    );
    assert!(snapshot(&x, &state) == before);
    for (collect, n) in [(pairwise(4), 4), (pairwise(16), 16), (AccumGrad::new(5), 5)] {
        let mut state = state.clone();
        let replaced = state.all().replace(chain(collect), &x).expect("another rule");
        assert!(replaced[0].kept.iter().all(|name| name.starts_with("1.")), "{replaced:?}");
        assert!(replaced[0].dropped.iter().any(|name| name == "0.acc2"), "{replaced:?}");
        let counters = state.leaf("0").expect("a leaf").counters();
        assert!(
            counters.contains(&("0.calls".to_string(), 0))
                && counters.contains(&("0.received".to_string(), 0)),
            "{n}: {counters:?}"
        );
    }
    // With one tensor both orders have the same sum in it.
    for (first, second) in
        [(Summation::InOrder, Summation::Pairwise), (Summation::Pairwise, Summation::InOrder)]
    {
        let x = zeros();
        let mut state = setup(chain(AccumGrad { order: first, ..AccumGrad::new(3) }), &x).expect("a state");
        (0..2).for_each(|call| _ = step(&mut state, &x, call));
        state.adjust_field("order", second).expect("the same tensors");
        assert_eq!(step(&mut state, &x, 2), Status::Stepped);
        assert_eq!(moved(&x), expected(&[(0, 1.0), (1, 1.0), (2, 1.0)], 3.0, tree));
    }
}

/// A window that outgrows its tensors, as a leaf's can that had another n than the others: what comes goes
/// into the last sum.
#[test]
fn no_window_is_too_long() {
    let x: Vars =
        ["a", "b"].map(|path| (path.to_string(), support::common::var(&of(&[0.0], DType::F64)))).into();
    let n = |path: &str| if path == "a" { 4 } else { 3 };
    let mut state = setup_with(&x, |path, _| Some(chain(pairwise(n(path))))).expect("a state");
    let call = |state: &mut StateTree, gradient: f64| {
        let grads: Grads = ["a", "b"].map(|path| (path.to_string(), of(&[gradient], DType::F64))).into();
        update(state, &x, &grads).expect("an update");
        -values(&x["a"])[0]
    };
    (0..4).for_each(|_| _ = call(&mut state, 0.0));
    // From the fifth to the seventh, and as its windows end with multiples of 7 now, on to the fourteenth.
    let sums: Vec<f64> = (0..10)
        .map(|number| {
            if number == 3 {
                state.at("a").expect("a leaf").adjust_field("n", 7).expect("as many tensors");
            }
            call(&mut state, 3f64.powi(number))
        })
        .collect();
    assert_eq!(sums[..9], [0.0; 9]);
    assert_eq!(sums[9], (0..10).map(|number| 3f64.powi(number)).sum::<f64>() / 10.0);
}

#[test]
fn a_checkpoint_goes_on_in_the_middle_of_a_window() {
    for saved_after in 1..8 {
        let x = zeros();
        let mut state = setup(chain(pairwise(8)), &x).expect("a state");
        (0..saved_after).for_each(|call| _ = step(&mut state, &x, call));
        let file: CheckpointFile = open(&file_of(Checkpoint::new(&state).model(&x))).expect("a checkpoint");
        let restored = zeros();
        let mut from_file = setup(chain(pairwise(8)), &restored).expect("a state");
        file.restore_with_model(&mut from_file, &restored).expect("the same state");
        assert!(snapshot(&restored, &from_file) == snapshot(&x, &state), "after {saved_after}");
        (saved_after..8).for_each(|call| _ = step(&mut from_file, &restored, call));
        assert_eq!(
            moved(&restored),
            expected(&(0..8).map(|call| (call, 1.0)).collect::<Vec<_>>(), 8.0, tree)
        );
        for other in [pairwise(4), AccumGrad::new(8)] {
            let mut state = setup(chain(other), &restored).expect("a state");
            let before = snapshot(&restored, &state);
            let error = file.restore_with_model(&mut state, &restored).expect_err("another layout");
            is_kind(&error, ErrorKind::OtherRule, &["0.acc1"]);
            assert_eq!(error.path(), Some("0"));
            assert!(snapshot(&restored, &state) == before);
        }
    }
}

/// In whatever dtype each part is kept, the engines agree; a sum that overflows there gives all windows up.
#[test]
fn parts_are_stored_as_asked() {
    let stored =
        |dtype| StoreAs::new([("acc", dtype), ("acc1", dtype), ("acc2", DType::F32)], chain(pairwise(8)));
    let run = |engine: Engine| {
        let x = zeros();
        let mut state = setup(stored(DType::BF16), &x).expect("a state");
        assert_eq!(state.bytes(), LENGTH * (2 + 2 + 4));
        (0..8).for_each(|call| {
            _ = Update::new(&mut state).engine(engine).apply(&x, &given(gradient(call))).expect("an update")
        });
        bits(&x["0"])
    };
    let [first, others @ ..] = &engines()[..] else { panic!("engines") };
    others.iter().for_each(|other| assert_eq!(run(*other), run(*first), "{other:?}"));

    for engine in engines() {
        for rule in [
            Box::new(stored(DType::F16)) as Box<dyn Rule>,
            Box::new(OptimiserChain::new((stored(DType::F16), ClipGlobalNorm::new(1e9)))),
        ] {
            let x = zeros();
            let mut state = setup(rule, &x).expect("a state");
            let mut call = |gradient: f32| {
                let update = Update::new(&mut state).engine(engine).finite_only();
                let outcome = update.apply(&x, &given(vec![gradient; LENGTH])).expect("an update");
                outcome.status
            };
            let window: Vec<_> = [40_000.0, 40_000.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0].map(&mut call).into();
            assert_eq!(window[..7], [const { Status::Accumulated }; 7]);
            assert_eq!(window[7], given_up("0"), "{engine:?}");
            assert_eq!([0.5; 8].map(&mut call)[7], Status::Stepped);
            assert_eq!(moved(&x), [0.5; LENGTH]);
        }
    }
}

/// A call that is skipped changes none of the parts, and a gradient that is not finite stays in the sum where
/// nobody looks.
#[test]
fn a_skipped_call_is_none() {
    let x = zeros();
    let mut state = setup(chain(pairwise(4)), &x).expect("a state");
    for call in 0..4 {
        let before = snapshot(&x, &state);
        let skipped = Update::new(&mut state)
            .finite_only()
            .apply(&x, &given(vec![f32::NAN; LENGTH]))
            .expect("an update");
        assert_eq!(skipped.status, not_finite("0"));
        assert!(snapshot(&x, &state) == before);
        step(&mut state, &x, call);
    }
    assert_eq!(moved(&x), expected(&[(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)], 4.0, tree));
    update(&mut state, &x, &given(vec![f32::INFINITY; LENGTH])).expect("an update");
    (1..4).for_each(|call| _ = step(&mut state, &x, call));
    assert!(moved(&x).iter().all(|x| x.is_infinite()));
    is_kind(
        &setup(pairwise(0), &x).expect_err("no calls"),
        ErrorKind::Argument,
        &["AccumGrad: n is 0, expected 1 or more"],
    );
}
