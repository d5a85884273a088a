//! Laws that hold for every rule, chain and wrapper. They ask a rule and its state what it is, never for a
//! name.
//!
//! Each is a function of one rule or optimiser. The tests call it for all of the crate; [`assert_lawful`]
//! calls all of them for one.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, Adam, AdamW, AdaptiveClip, Adjust, ClipGlobalNorm, ClipNorm, Engine, ErrorKind, FieldValue,
    IntoOptimiser, Kind, Leaf, MixedPrecision, Momentum, Optimiser, OptimiserChain, Rule, SignDecay, Sizes,
    StateTree, Status, WeightDecay, rules, setup, update,
};

use crate::engine::engines::assert_bits_on_engines;
use crate::files::checkpoints::assert_resumes;
use crate::ranks::divided::assert_divides;
use crate::rules::zero_gradients::nan_in;
use crate::step::streamed_steps::assert_streams;
use crate::tree::edits::assert_replaces_itself;
use crate::whole::random_models::assert_models_agree;
use support::common::{
    Snapshot, Vars, assert_same, bits, bits16, constant, grads, model, nearest16, numbers, optimisers_for,
    rounding_to_nearest, rules_and_chains, snapshot, tensor, trajectory, unnamed, values,
};

const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// A number of calls in which every accumulation window of the tests ends.
const CALLS: u64 = 6;

fn from_values(values: impl IntoIterator<Item = f64>, dtype: DType) -> Tensor {
    Tensor::from_iter(values, &Device::Cpu)
        .and_then(|tensor| tensor.to_dtype(dtype))
        .expect("a tensor")
}

/// How many calls make a step: as many as there are before the first.
fn window(optimiser: impl IntoOptimiser) -> u64 {
    let x = model(&[tensor(1, &[1, 1], DType::F32)]);
    let mut state = setup(optimiser, &x).expect("a state");
    let is_collected = |_: &u64| {
        let outcome =
            update(&mut state, &x, &grads([Some(tensor(2, &[1, 1], DType::F32))])).expect("an update");
        outcome.status == Status::Accumulated
    };
    1 + (0..CALLS).take_while(is_collected).count() as u64
}

/// Chains with norms that are never reached: their factors are 1, so every element is treated alike and
/// leaves do not depend on each other.
fn chains_that_could_clip() -> Vec<Box<dyn Rule>> {
    const NEVER: f64 = 1e300;
    let mut all: Vec<Box<dyn Rule>> = vec![
        Box::new(ClipGlobalNorm::new(NEVER)),
        Box::new(AdaptiveClip::new(NEVER)),
        Box::new(OptimiserChain::new((
            AccumGrad::new(3),
            ClipGlobalNorm::new(NEVER),
            Adam::new(0.01),
        ))),
        Box::new(OptimiserChain::new((
            WeightDecay::new(0.1),
            ClipNorm::new(NEVER),
            AdamW::new(0.01),
        ))),
    ];
    for p in [1.0, 2.0, 3.0, f64::INFINITY] {
        all.push(Box::new(OptimiserChain::new((
            Momentum::new(0.1),
            ClipNorm {
                p,
                ..ClipNorm::new(NEVER)
            },
            SignDecay::new(0.01),
        ))));
    }
    all
}

/// [`chains_that_could_clip`], stored in every way that rounds all elements alike.
fn could_clip(parameter: DType) -> Vec<Optimiser> {
    chains_that_could_clip()
        .into_iter()
        .flat_map(|rule| rounding_to_nearest(parameter, rule))
        .collect()
}

fn state_tensor(leaf: &Leaf, name: &str) -> Tensor {
    leaf.tensor(name).expect("a copy")
}

/// What belongs to one leaf: its parameter, state and counters. Of a rule with norms and estimates of the
/// whole model the numbers are the model's.
fn of_leaf(model: &Vars, state: &StateTree, path: &str) -> Snapshot {
    let leaf = state.leaf(path).expect("the leaf");
    let of_model = |name: &str| {
        leaf.optimiser().rule().kind() == Kind::WholeModel
            && leaf.numbers().iter().any(|(number, _)| number == name)
    };
    let of_leaf = |name: &str| {
        name == path
            || name
                .strip_prefix(path)
                .and_then(|rest| rest.strip_prefix('/'))
                .is_some_and(|rest| !of_model(rest) && !rest.ends_with(MISSED))
    };
    snapshot(model, state)
        .into_iter()
        .filter(|(name, _)| of_leaf(name))
        .collect()
}

/// Every law of a rule, here and in other files of the suite, alone and stored in every way that rounds all
/// elements alike.
///
/// It is how a rule or wrapper of one's own is enrolled: by one line.
pub fn assert_lawful(rule: &dyn Rule) {
    let boxed = || dyn_clone::clone_box(rule);
    assert_eq!(nan_in(rule), None);
    assert_replaces_itself(boxed());
    assert_models_agree(&[boxed()], 10);
    assert_bits_on_engines(|dtype| rounding_to_nearest(dtype, boxed()));
    for (dtype, sizes) in [(DType::F32, &[2, 4][..]), (DType::BF16, &[3])] {
        let optimisers: [Optimiser; 2] = [
            Optimiser::new(boxed()),
            Optimiser::new(MixedPrecision::new(DType::F64, boxed())),
        ];
        optimisers
            .iter()
            .for_each(|optimiser| assert_divides(optimiser, dtype, sizes));
    }
    for dtype in DTYPES {
        for optimiser in rounding_to_nearest(dtype, boxed()) {
            assert_streams(optimiser.clone(), dtype, CALLS);
            let _ = assert_resumes(&optimiser, dtype, &Device::Cpu);
        }
        state_is_at_least_f32(boxed(), dtype);
        if rule.kind() == Kind::Elementwise {
            rounding_to_nearest(dtype, boxed())
                .into_iter()
                .for_each(|optimiser| halves_are_the_whole(optimiser, dtype));
        }
        for optimiser in rounding_to_nearest(dtype, boxed()) {
            keeps_dtype_and_shape(optimiser.clone(), dtype);
            a_leaf_without_gradient_stays(optimiser, dtype);
        }
    }
    for optimiser in rounding_to_nearest(DType::BF16, boxed()) {
        counts_zeros(optimiser.clone());
        keeps_its_state_where_it_is_adjusted(optimiser.clone());
        let _ = has_the_state_of_its_fields(optimiser.clone(), DType::BF16);
        if rule.kind() != Kind::WholeModel {
            goes_on_after_the_thaw(optimiser);
        }
    }
    for dtype in [DType::BF16, DType::F32] {
        is_the_same_beside_an_empty_chain(boxed(), dtype);
    }
    has_no_master_of_its_own_dtype(boxed());
    has_parameters_that_are_masters_rounded(boxed());
    for (dtype, largest) in SIZES {
        rounding_to_nearest(dtype, boxed())
            .into_iter()
            .for_each(|optimiser| bears_gradients_of_any_size(optimiser, dtype, largest));
    }
    stays_with_a_learning_rate_of_zero(boxed());
    steps_with_the_mean_behind_a_window(boxed());
}

fn keeps_dtype_and_shape(mut optimiser: Optimiser, dtype: DType) {
    let shapes: [&[usize]; 5] = [&[2, 3, 4], &[5], &[], &[3, 0], &[0]];
    // So that a step is more than the last digit.
    optimiser
        .set_field("estimate", FieldValue::Real(0.1))
        .expect("a real number");
    let tensors = |seed: u64| shapes.map(|shape| tensor(seed, shape, dtype));
    let model = model(&tensors(1));
    let mut state = setup(optimiser.clone(), &model).expect("a state");
    let of_state = |leaf: &Leaf| {
        leaf.tensor_names()
            .iter()
            .map(|name| state_tensor(leaf, name))
            .collect::<Vec<Tensor>>()
    };
    let states: Vec<Vec<Tensor>> = state.leaves().map(of_state).collect();
    for call in 0..CALLS {
        update(&mut state, &model, &grads(tensors(call).map(Some))).expect("an update");
    }
    for (((var, leaf), x), old) in model.values().zip(state.leaves()).zip(tensors(1)).zip(states) {
        let what = || format!("{} of {:?}", optimiser.name(), x.shape());
        assert_eq!((var.dtype(), var.shape()), (dtype, x.shape()), "{}", what());
        assert_eq!(leaf.steps(), CALLS / window(optimiser.clone()), "{}", what());
        let new = of_state(leaf);
        assert!(
            new.iter().zip(&old).all(|(new, old)| new.shape() == old.shape()),
            "{}",
            what()
        );
        // What treats every element alike has a number for each.
        assert!(
            optimiser.rule().kind() != Kind::Elementwise
                || new.iter().all(|tensor| tensor.shape() == x.shape()),
            "{}",
            what()
        );
        // A step that is lost in 16 bits is seen in the state.
        let seen_in_state =
            dtype.size_in_bytes() == 2 && new.iter().zip(&old).any(|(new, old)| bits(new) != bits(old));
        // A number alone stays where its norm does.
        let is_fixed = x.elem_count() == 1 && leaf.numbers().iter().any(|(name, _)| name.ends_with("radius"));
        let moves = x.elem_count() > 0 && !is_fixed;
        assert_eq!(
            bits(var) != bits(&x) || seen_in_state && !is_fixed,
            moves,
            "{}",
            what()
        );
    }
}

#[test]
fn dtype_and_shape_stay() {
    for dtype in DTYPES {
        optimisers_for(dtype)
            .into_iter()
            .for_each(|optimiser| keeps_dtype_and_shape(optimiser, dtype));
    }
}

fn state_is_at_least_f32(rule: Box<dyn Rule>, dtype: DType) {
    let x = model(&[tensor(1, &[3], dtype)]);
    for (optimiser, expected) in [
        (
            Optimiser::new(rule.clone()),
            if dtype == DType::F64 {
                DType::F64
            } else {
                DType::F32
            },
        ),
        (
            Optimiser::new(MixedPrecision::new(DType::F32, rule.clone())),
            if dtype == DType::F64 {
                DType::F64
            } else {
                DType::F32
            },
        ),
        (Optimiser::new(MixedPrecision::new(DType::F64, rule)), DType::F64),
    ] {
        let state = setup(optimiser.clone(), &x).expect("a state");
        let leaf = state.leaf("0").expect("the leaf");
        for name in leaf.tensor_names() {
            assert_eq!(
                state_tensor(leaf, &name).dtype(),
                expected,
                "{name} of {} for {dtype:?}",
                optimiser.name()
            );
        }
    }
}

/// Bare rules on 16-bit parameters keep their state in f32 at least.
#[test]
fn state_is_never_narrower_than_f32() {
    for dtype in DTYPES {
        rules_and_chains()
            .into_iter()
            .for_each(|rule| state_is_at_least_f32(rule, dtype));
    }
}

/// Parameters and gradients for laws that compare two optimisers.
fn run(optimiser: impl IntoOptimiser, dtype: DType) -> Vec<Snapshot> {
    let tensors = |seed: u64| [tensor(seed, &[4, 5], dtype), tensor(seed + 50, &[3], dtype)];
    let steps: Vec<_> = (0..CALLS)
        .map(|call| grads(tensors(1 + call).map(Some)))
        .collect();
    trajectory(Engine::Fused, optimiser, &tensors(0), &steps)
}

fn run_unnamed(optimiser: impl IntoOptimiser, dtype: DType) -> Vec<Snapshot> {
    run(optimiser, dtype).into_iter().map(unnamed).collect()
}

fn is_the_same_beside_an_empty_chain(rule: Box<dyn Rule>, dtype: DType) {
    let bare = run_unnamed(rule.clone(), dtype);
    assert_same(
        &run_unnamed(
            OptimiserChain::new((rule.clone(), OptimiserChain::new(()))),
            dtype,
        ),
        &bare,
        &rule,
    );
    assert_same(
        &run_unnamed(
            OptimiserChain::new((OptimiserChain::new(()), rule.clone())),
            dtype,
        ),
        &bare,
        &rule,
    );
    assert_same(
        &run_unnamed(
            OptimiserChain::new((OptimiserChain::new((rule.clone(),)),)),
            dtype,
        ),
        &bare,
        &rule,
    );
}

#[test]
fn an_empty_chain_changes_nothing() {
    for dtype in [DType::BF16, DType::F32] {
        rules_and_chains()
            .into_iter()
            .for_each(|rule| is_the_same_beside_an_empty_chain(rule, dtype));
    }
}

fn has_no_master_of_its_own_dtype(rule: Box<dyn Rule>) {
    for (parameter, master) in [
        (DType::F32, DType::F32),
        (DType::F64, DType::F32),
        (DType::F64, DType::F64),
    ] {
        let mixed = MixedPrecision::new(master, rule.clone());
        let bytes = |optimiser| {
            setup(optimiser, &model(&[tensor(1, &[3], parameter)]))
                .expect("a state")
                .bytes()
        };
        let boxed: [Optimiser; 2] = [Optimiser::new(mixed.clone()), Optimiser::new(rule.clone())];
        let [with, without] = boxed.map(bytes);
        assert_eq!(with, without, "{rule:?}");
        assert_same(
            &run_unnamed(mixed, parameter),
            &run_unnamed(rule.clone(), parameter),
            &rule,
        );
    }
}

#[test]
fn a_parameter_precise_enough_gets_no_master() {
    rules_and_chains()
        .into_iter()
        .for_each(has_no_master_of_its_own_dtype);
}

fn halves_are_the_whole(optimiser: Optimiser, dtype: DType) {
    let whole = |seed| tensor(seed, &[11], dtype);
    let halves =
        |seed| [whole(seed).narrow(0, 0, 4), whole(seed).narrow(0, 4, 7)].map(|half| half.expect("a half"));
    let (one, two) = (model(&[whole(0)]), model(&halves(0)));
    let mut states = [&one, &two].map(|model| setup(optimiser.clone(), model).expect("a state"));
    for call in 1..=CALLS {
        update(&mut states[0], &one, &grads([Some(whole(call))])).expect("an update");
        update(&mut states[1], &two, &grads(halves(call).map(Some))).expect("an update");
    }
    assert_eq!(
        bits(&one["0"]),
        [bits(&two["0"]), bits(&two["1"])].concat(),
        "{}",
        optimiser.name()
    );
}

#[test]
fn two_halves_are_the_whole() {
    for dtype in DTYPES {
        let elementwise = rules_and_chains()
            .into_iter()
            .filter(|rule| rule.kind() == Kind::Elementwise);
        let elementwise = elementwise.flat_map(|rule| rounding_to_nearest(dtype, rule));
        elementwise
            .chain(could_clip(dtype))
            .for_each(|optimiser| halves_are_the_whole(optimiser, dtype));
    }
}

fn a_leaf_without_gradient_stays(optimiser: Optimiser, dtype: DType) {
    let model = model(&[tensor(1, &[4], dtype), tensor(2, &[5], dtype)]);
    let mut state = setup(optimiser.clone(), &model).expect("a state");
    let gradient = |call| Some(tensor(call, &[4], dtype));
    for call in 0..CALLS {
        update(
            &mut state,
            &model,
            &grads([gradient(call), Some(tensor(call, &[5], dtype))]),
        )
        .expect("an update");
    }
    let before = [of_leaf(&model, &state, "0"), of_leaf(&model, &state, "1")];
    for call in 0..CALLS {
        let outcome = update(&mut state, &model, &grads([gradient(call)])).expect("an update");
        assert_eq!(outcome.without_gradient.len(), 1, "{}", optimiser.name());
    }
    // Whole windows have passed, so even the counters of windows are back where they were.
    let after = [of_leaf(&model, &state, "0"), of_leaf(&model, &state, "1")];
    assert_same(&after[1..], &before[1..], optimiser.name());
    assert_ne!(after[0], before[0], "{}", optimiser.name());
}

#[test]
fn a_missing_gradient_leaves_its_leaf_untouched() {
    for dtype in [DType::BF16, DType::F32] {
        optimisers_for(dtype)
            .into_iter()
            .for_each(|optimiser| a_leaf_without_gradient_stays(optimiser, dtype));
    }
}

/// The counters of a leaf, and how many steps it has made, after calls with these gradients.
fn counted(optimiser: Optimiser, gradient: impl Fn(u64) -> Tensor) -> (Vec<(String, u64)>, u64) {
    let model = model(&[tensor(1, &[4], DType::BF16)]);
    let mut state = setup(optimiser, &model).expect("a state");
    (0..CALLS).for_each(|call| {
        drop(update(&mut state, &model, &grads([Some(gradient(call))])).expect("an update"))
    });
    let leaf = state.leaf("0").expect("the leaf");
    (leaf.counters(), leaf.steps())
}

fn counts_zeros(optimiser: Optimiser) {
    let zeros = counted(optimiser.clone(), |_| constant(0.0, 4, DType::BF16));
    assert_eq!(
        zeros,
        counted(optimiser.clone(), |call| tensor(2 + call, &[4], DType::BF16)),
        "{}",
        optimiser.name()
    );
    assert_eq!(zeros.1, CALLS / window(optimiser.clone()), "{}", optimiser.name());
}

#[test]
fn a_gradient_of_zeros_is_a_gradient() {
    for optimiser in optimisers_for(DType::BF16) {
        counts_zeros(optimiser.clone());
        let (counters, steps) = counted(optimiser.clone(), |_| constant(0.0, 4, DType::BF16));
        let ticks = counters
            .iter()
            .filter(|(name, _)| name == "t" || name.ends_with(".t"));
        assert!(
            ticks.clone().all(|(_, t)| *t == CALLS || *t == steps),
            "{}: {counters:?}",
            optimiser.name()
        );
    }
}

/// The end of the name of the counter of steps for which an average has to make up.
const MISSED: &str = "missed";

/// All but the averages, which come closer to a parameter that does not move.
fn without_averages(of_leaf: Snapshot, leaf: &Leaf) -> Snapshot {
    let averaging: Vec<String> = leaf
        .counters()
        .into_iter()
        .filter_map(|(name, _)| Some(format!("{}/{}", leaf.path(), name.strip_suffix(MISSED)?)))
        .collect();
    of_leaf
        .into_iter()
        .filter(|(name, _)| !averaging.iter().any(|own| name.starts_with(own)))
        .collect()
}

/// A frozen leaf is untouched, and goes on after the thaw as if the calls between had not been, if they were
/// whole windows of accumulation.
fn goes_on_after_the_thaw(optimiser: Optimiser) {
    let (x, y) = (tensor(1, &[4], DType::BF16), tensor(2, &[5], DType::BF16));
    let (pair, alone) = (model(&[x.clone(), y]), model(&[x]));
    let [mut both, mut single] =
        [&pair, &alone].map(|model| setup(optimiser.clone(), model).expect("a state"));
    let away = window(optimiser.clone()).max(2);
    let frozen = |call: u64| (away..2 * away).contains(&call);
    for call in 0..CALLS + 2 * away {
        let (g, h) = (
            tensor(10 + call, &[4], DType::BF16),
            tensor(30 + call, &[5], DType::BF16),
        );
        let selected = both.at("0").expect("the leaf");
        if frozen(call) {
            selected.freeze()
        } else {
            selected.thaw()
        }
        let before = of_leaf(&pair, &both, "0");
        let outcome = update(&mut both, &pair, &grads([Some(g.clone()), Some(h)])).expect("an update");
        assert_eq!(outcome.frozen, usize::from(frozen(call)));
        if frozen(call) {
            assert_same(&[of_leaf(&pair, &both, "0")], &[before], optimiser.name());
        } else {
            update(&mut single, &alone, &grads([Some(g)])).expect("an update");
        }
    }
    let [both, single] = [(&pair, &both), (&alone, &single)].map(|(model, state)| {
        without_averages(of_leaf(model, state, "0"), state.leaf("0").expect("the leaf"))
    });
    assert_same(&[both], &[single], optimiser.name());
}

#[test]
fn a_frozen_leaf_continues_after_the_thaw() {
    let alone = optimisers_for(DType::BF16)
        .into_iter()
        .filter(|optimiser| optimiser.rule().kind() != Kind::WholeModel);
    alone
        .chain(could_clip(DType::BF16))
        .for_each(goes_on_after_the_thaw);
}

/// Numbers of every magnitude that a 16-bit dtype has, and ties between its numbers.
fn of_every_magnitude(seed: u64) -> impl Iterator<Item = f64> {
    numbers(seed, 400)
        .into_iter()
        .enumerate()
        .map(|(i, value)| value * 2f64.powi(i as i32 % 40 - 28))
}

fn has_parameters_that_are_masters_rounded(rule: Box<dyn Rule>) {
    let dtypes = [DType::BF16, DType::F32, DType::F64];
    for parameter in [DType::F16, DType::BF16] {
        for gradient in dtypes {
            for master in [DType::F32, DType::F64] {
                let model = model(&[from_values(of_every_magnitude(1), parameter)]);
                let mut state = setup(MixedPrecision::new(master, rule.clone()), &model).expect("a state");
                for call in 0..CALLS {
                    let gradient = from_values(of_every_magnitude(2 + call), gradient);
                    update(&mut state, &model, &grads([Some(gradient)])).expect("an update");
                    let leaf = state.leaf("0").expect("the leaf");
                    let master = leaf.tensor("master").expect("a copy");
                    let rounded: Vec<u16> = values(&master)
                        .into_iter()
                        .map(|value| nearest16(parameter, value))
                        .collect();
                    assert_eq!(bits16(&model["0"]), rounded, "{rule:?}");
                }
            }
        }
    }
}

#[test]
fn a_parameter_is_its_master_rounded() {
    rules_and_chains()
        .into_iter()
        .for_each(has_parameters_that_are_masters_rounded);
}

/// The powers of ten up to which gradients are borne.
const SIZES: [(DType, i32); 2] = [(DType::F32, 15), (DType::F64, 30)];

/// Tiny and huge gradients of both signs leave parameters and state finite.
fn bears_gradients_of_any_size(optimiser: Optimiser, dtype: DType, largest: i32) {
    let sizes = || (-largest..=largest).flat_map(|exponent| [10f64.powi(exponent), -10f64.powi(exponent)]);
    let model = model(&[from_values(sizes().map(|_| 1.0), dtype)]);
    let mut state = setup(optimiser.clone(), &model).expect("a state");
    for call in 0..4 * CALLS {
        let sign = if call % 5 == 4 { -1.0 } else { 1.0 };
        update(
            &mut state,
            &model,
            &grads([Some(from_values(sizes().map(|size| sign * size), dtype))]),
        )
        .expect("an update");
    }
    for (name, bits) in of_leaf(&model, &state, "0") {
        let finite = bits.iter().all(|&bits| f64::from_bits(bits).is_finite());
        assert!(finite, "{name} of {}", optimiser.name());
    }
}

#[test]
fn gradients_of_any_size_are_borne() {
    for (dtype, largest) in SIZES {
        optimisers_for(dtype)
            .into_iter()
            .for_each(|optimiser| bears_gradients_of_any_size(optimiser, dtype, largest));
    }
}

/// Whether it has a learning rate at all.
fn stays_with_a_learning_rate_of_zero(rule: Box<dyn Rule>) -> bool {
    let optimisers = [
        Optimiser::new(rule.clone()),
        Optimiser::new(MixedPrecision::new(DType::F32, rule)),
    ];
    let mut has_rate = false;
    for mut optimiser in optimisers {
        if optimiser
            .adjust(0.0)
            .is_err_and(|error| error.kind() == ErrorKind::UnknownName)
        {
            continue;
        }
        has_rate = true;
        let x = tensor(1, &[3, 3], DType::BF16);
        let (model, steps) = (
            model(std::slice::from_ref(&x)),
            [2, 3].map(|seed| grads([Some(tensor(seed, &[3, 3], DType::BF16))])),
        );
        let mut state = setup(optimiser.clone(), &model).expect("a state");
        for gradients in &steps {
            update(&mut state, &model, gradients).expect("an update");
        }
        assert_eq!(bits(&model["0"]), bits(&x), "{}", optimiser.name());
        assert_eq!(
            state.leaf("0").map(|leaf| leaf.steps()),
            Some(2 / window(optimiser))
        );
    }
    has_rate
}

#[test]
fn a_learning_rate_of_zero_moves_nothing() {
    let has_rate = rules::catalogue()
        .into_iter()
        .filter(|listing| stays_with_a_learning_rate_of_zero(listing.rule.clone()));
    assert!(has_rate.count() > 0);
}

/// A new learning rate moves no state and no counter.
fn keeps_its_state_where_it_is_adjusted(optimiser: Optimiser) {
    let model = model(&[tensor(1, &[9], DType::BF16)]);
    let mut state = setup(optimiser.clone(), &model).expect("a state");
    if state.leaf("0").expect("the leaf").learning_rate().is_none() {
        return;
    }
    let gradient = |call: u64| grads([Some(tensor(call, &[9], DType::BF16))]);
    for call in 0..CALLS {
        update(&mut state, &model, &gradient(call)).expect("an update");
    }
    let numbers = |state: &StateTree| [unnamed(of_leaf(&model, state, "0"))];
    let before = numbers(&state);
    // In all members of a chain.
    state.all().adjust_field("eta", 0.5).expect("a learning rate");
    assert_same(&numbers(&state), &before, optimiser.name());
    assert_eq!(state.leaf("0").and_then(|leaf| leaf.learning_rate()), Some(0.5));
}

#[test]
fn adjusting_keeps_the_state() {
    optimisers_for(DType::BF16)
        .into_iter()
        .for_each(keeps_its_state_where_it_is_adjusted);
}

/// Other values of a hyper-parameter, in its range and out of it.
fn others_of(value: FieldValue) -> Vec<FieldValue> {
    match value {
        FieldValue::Real(_) => [0.0, 0.5, 1.0, 7.0].map(FieldValue::Real).to_vec(),
        FieldValue::Pair(a, b) => [(0.0, b), (a, 0.0), (0.5, 0.5), (7.0, b)]
            .map(|(a, b)| FieldValue::Pair(a, b))
            .to_vec(),
        FieldValue::Triple(a, b, c) => {
            vec![
                FieldValue::Triple(0.0, b, c),
                FieldValue::Triple(a, 0.0, 0.0),
                FieldValue::Triple(0.5, 0.5, 0.5),
            ]
        }
        FieldValue::Count(_) => [0, 1, 2, 3, 5, 22, 2000].map(FieldValue::Count).to_vec(),
        FieldValue::Sizes(_) => [&[][..], &[10, 14], &[2, 4], &[1, 1]]
            .map(|sizes| FieldValue::Sizes(Sizes::new(sizes).expect("sizes")))
            .to_vec(),
        FieldValue::Flag(flag) => vec![FieldValue::Flag(!flag)],
        FieldValue::Choice(choice) => choice
            .names()
            .iter()
            .filter_map(|name| choice.named(name))
            .map(FieldValue::Choice)
            .collect(),
        other => panic!("no values like {other}"),
    }
}

/// Each field is refused, or the state is the one that a setup with its new value makes; then updates go on.
/// Returns the fields that were refused because they decide on the state.
fn has_the_state_of_its_fields(optimiser: Optimiser, dtype: DType) -> Vec<String> {
    let shapes: [&[usize]; 4] = [&[7], &[24, 20], &[2, 6, 5], &[3, 0]];
    let tensors = |seed: u64| shapes.map(|shape| tensor(seed, shape, dtype));
    let layout = |state: &StateTree| -> Vec<_> {
        let of_tensor = |leaf: &Leaf, name: String| {
            let tensor = state_tensor(leaf, &name);
            (name, tensor.dims().to_vec(), tensor.dtype())
        };
        state
            .leaves()
            .map(|leaf| {
                (
                    leaf.tensor_names()
                        .into_iter()
                        .map(|name| of_tensor(leaf, name))
                        .collect::<Vec<_>>(),
                    leaf.bytes(),
                )
            })
            .collect()
    };
    let mut deciding = Vec::new();
    for (place, (_, value)) in optimiser.places().into_iter().zip(optimiser.fields()) {
        for other in others_of(value) {
            let what = || format!("{}: {place} = {other} for {value}", optimiser.name());
            let model = model(&tensors(1));
            let mut fresh = optimiser.clone();
            let is_valid = fresh.set_field(&place, other).is_ok_and(|is_set| is_set) && fresh.check().is_ok();
            let fresh = is_valid
                .then(|| setup(fresh, &model).ok())
                .flatten()
                .map(|state| layout(&state));
            let mut state = setup(optimiser.clone(), &model).expect("a state");
            let before = snapshot(&model, &state);
            match (fresh, state.all().adjust_field(&place, other)) {
                (Some(fresh), Ok(())) => {
                    assert_eq!(layout(&state), fresh, "{}", what());
                    update(&mut state, &model, &grads(tensors(2).map(Some)))
                        .unwrap_or_else(|error| panic!("{}: {error}", what()));
                }
                // A leaf has one of the alternatives, without their places.
                (_, Err(error)) if error.kind() == ErrorKind::UnknownName => {}
                (Some(fresh), Err(error)) => {
                    assert_ne!(layout(&state), fresh, "{}: {error}", what());
                    assert_eq!(
                        (error.kind(), snapshot(&model, &state) == before),
                        (ErrorKind::Argument, true),
                        "{}: {error}",
                        what()
                    );
                    deciding.push(format!("{}.{place}", optimiser.name()));
                }
                (None, adjusted) => {
                    assert!(
                        adjusted.is_err() && snapshot(&model, &state) == before,
                        "{}",
                        what()
                    )
                }
            }
        }
    }
    deciding.dedup();
    deciding
}

#[test]
fn a_state_is_the_one_of_its_fields() {
    let mut deciding = Vec::new();
    for rule in rules_and_chains() {
        let _ = has_the_state_of_its_fields(
            Optimiser::new(MixedPrecision::new(DType::F32, rule.clone())),
            DType::BF16,
        );
        deciding.extend(has_the_state_of_its_fields(Optimiser::new(rule), DType::F32));
    }
    for expected in [
        "SOAP.max_size",
        "SOAP.matrix",
        "GaLore.rank",
        "APOLLO.rank",
        "Shampoo.max_size",
        "Adafactor.matrix",
        "RMSProp.centred",
    ] {
        assert!(
            deciding.iter().any(|field| field == expected),
            "{expected} is not among {deciding:?}"
        );
    }
}

/// n gradients and their mean are the same to a rule behind `AccumGrad`, bit for bit.
fn steps_with_the_mean_behind_a_window(member: Box<dyn Rule>) {
    const N: u64 = 5;
    if window(member.clone()) > 1 {
        return;
    }
    let x = tensor(0, &[2, 3], DType::F64);
    let (collected, direct) = (model(std::slice::from_ref(&x)), model(&[x]));
    let mut collecting = setup(
        OptimiserChain::new((AccumGrad::new(N), member.clone())),
        &collected,
    )
    .expect("a state");
    let mut stepping = setup(member.clone(), &direct).expect("a state");
    for step in 0..3 {
        let micro: Vec<Tensor> = (0..N)
            .map(|i| tensor(1 + step * N + i, &[2, 3], DType::F64))
            .collect();
        for gradient in &micro {
            update(&mut collecting, &collected, &grads([Some(gradient.clone())])).expect("an update");
        }
        let sum = micro[1..].iter().fold(values(&micro[0]), |sum, g| {
            sum.iter().zip(values(g)).map(|(a, b)| a + b).collect()
        });
        let mean = Tensor::from_vec(
            sum.iter().map(|sum| sum / N as f64).collect(),
            (2, 3),
            &Device::Cpu,
        )
        .ok();
        update(&mut stepping, &direct, &grads([mean])).expect("an update");
        assert_eq!(bits(&collected["0"]), bits(&direct["0"]), "{}", member.name());
    }
}

#[test]
fn accumulating_is_stepping_with_the_mean() {
    rules::catalogue()
        .into_iter()
        .for_each(|listing| steps_with_the_mean_behind_a_window(listing.rule));
}
