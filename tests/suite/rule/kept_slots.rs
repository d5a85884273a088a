//! Slots that cannot matter are not kept, and no bit changes.

use candle_core::DType;
use optimisers::{
    Adam, AdamW, Adjust, Checkpoint, Engine, ErrorKind, FieldValue, MixedPrecision, Momentum, Optimiser,
    OptimiserChain, Q8, Rule, SplitMaster, StateTree, StoreAs, Update, setup, update,
};

use support::common::{
    Grads, Vars, bits, bits16, engines, for_any_shape, grads, is_kind, model, rules_and_chains, snapshot,
    tensor,
};
use support::crafted_checkpoints::{file_of, open};

const SHAPE: [usize; 2] = [19, 31];

/// A field, and the value with which its first decay is 0.
type Decayed = (&'static str, FieldValue);

/// The field with which the first decay is 0.
fn without_decay(rule: &dyn Rule) -> Option<Decayed> {
    rule.fields().into_iter().find_map(|(name, value)| match (name, value) {
        ("beta", FieldValue::Pair(_, second)) => Some((name, FieldValue::Pair(0.0, second))),
        ("rho", FieldValue::Real(_)) => Some((name, FieldValue::Real(0.0))),
        _ => None,
    })
}

fn gradients(seed: u64, dtype: DType) -> Grads {
    grads([Some(tensor(seed, &SHAPE, dtype))])
}

fn parameter(model: &Vars) -> Vec<u64> {
    bits(&model["0"])
}

fn stores(rule: Box<dyn Rule>) -> Vec<(DType, Box<dyn Optimiser>)> {
    vec![
        (DType::F32, Box::new(rule.clone())),
        (DType::F64, Box::new(rule.clone())),
        (DType::BF16, Box::new(MixedPrecision::new(DType::F32, rule.clone()))),
        (DType::BF16, Box::new(SplitMaster::new(StoreAs::all(Q8, rule)))),
    ]
}

/// All rules whose first decay can be 0 so that a tensor of theirs does not matter: the same steps with the
/// tensor and without it, on every engine.
#[test]
fn no_bit_changes_without_what_cannot_matter() {
    let mut named = Vec::new();
    for rule in rules_and_chains().into_iter().map(for_any_shape) {
        let Some((field, value)) = without_decay(&*rule) else { continue };
        let mut zero = rule.clone();
        if zero.set_field(field, value).is_err() || zero.check().is_err() {
            continue;
        }
        let bytes = |rule: Box<dyn Rule>| {
            setup(rule, &model(&[tensor(1, &SHAPE, DType::F32)])).expect("a state").bytes()
        };
        if bytes(zero.clone()) == bytes(rule.clone()) {
            continue;
        }
        named.push(rule.name());
        for ((dtype, with), (_, without)) in stores(rule.clone()).into_iter().zip(stores(zero.clone())) {
            // A kernel has its compiler for each store.
            let is_emulated = |engine: &Engine| *engine != Engine::Emulated || dtype == DType::BF16;
            for engine in engines().into_iter().filter(is_emulated) {
                let (x, y) = (model(&[tensor(1, &SHAPE, dtype)]), model(&[tensor(1, &SHAPE, dtype)]));
                let (mut kept, mut state) =
                    (setup(with.clone(), &x).expect("a state"), setup(without.clone(), &y).expect("a state"));
                kept.adjust_field(field, value).expect("a decay may become 0");
                assert!(state.bytes() < kept.bytes(), "{}", rule.name());
                for step in 0..20 {
                    let gradients = gradients(7 + step, dtype);
                    Update::new(&mut kept).engine(engine).apply(&x, &gradients).expect("an update");
                    Update::new(&mut state).engine(engine).apply(&y, &gradients).expect("an update");
                    assert_eq!(
                        parameter(&x),
                        parameter(&y),
                        "{} of {dtype:?} on {engine:?}, step {step}",
                        rule.name()
                    );
                }
            }
        }
    }
    for expected in ["Adam", "AdamW", "Momentum", "Nesterov", "RAdam", "Yogi"] {
        assert!(named.iter().any(|name| name == expected), "{expected} is not among {named:?}");
    }
}

#[test]
fn a_decay_that_would_make_it_matter_is_refused() {
    let x = model(&[tensor(1, &SHAPE, DType::BF16)]);
    let zero = || Adam { beta: (0.0, 0.99), ..Adam::new(1e-3) };
    let mut state = setup(
        MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((zero(), Momentum { rho: 0.0, ..Momentum::new(1.0) })),
        ),
        &x,
    )
    .expect("a state");
    update(&mut state, &x, &gradients(1, DType::BF16)).expect("an update");
    let before = snapshot(&x, &state);
    for (field, value) in [
        ("beta", FieldValue::Pair(0.9, 0.99)),
        ("0.beta", FieldValue::Pair(0.5, 0.9)),
        ("rho", FieldValue::Real(0.9)),
    ] {
        let error = state.adjust_field(field, value).expect_err("refused");
        is_kind(&error, ErrorKind::Argument, &["not kept", "set up the state", field]);
        assert_eq!(error.path(), Some("0"), "{error}");
        assert!(snapshot(&x, &state) == before, "something changed");
    }
    // What leaves it without meaning is fine, and so is the learning rate.
    state.adjust_field("beta", (0.0, 0.9)).expect("another decay of the squares");
    state.adjust(1e-2).expect("a rate");
    // A decay that became 0 may come back: the tensor is there.
    let mut state = setup(AdamW::new(1e-3), &x).expect("a state");
    state.adjust_field("beta", (0.0, 0.99)).expect("a decay of 0");
    state.adjust_field("beta", (0.9, 0.99)).expect("the tensor is kept");
}

#[test]
fn files_go_on_without_it_and_say_where_it_is() {
    let zero = || Adam { beta: (0.0, 0.99), ..Adam::new(1e-3) };
    let run = |state: &mut StateTree, x: &Vars, steps: std::ops::Range<u64>| {
        steps.for_each(|step| _ = update(state, x, &gradients(step, DType::BF16)).expect("an update"));
    };
    let start = || model(&[tensor(1, &SHAPE, DType::BF16)]);
    let with = |rule: Adam, x: &Vars| setup(SplitMaster::new(rule), x).expect("a state");
    let (x, y) = (start(), start());
    let (mut whole, mut first) = (with(zero(), &x), with(zero(), &y));
    run(&mut whole, &x, 0..10);
    run(&mut first, &y, 0..6);
    let file = open(&file_of(Checkpoint::new(&first).model(&y))).expect("a file");
    let z = start();
    let mut resumed = with(zero(), &z);
    file.restore_with_model(&mut resumed, &z).expect("a state without the mean");
    run(&mut resumed, &z, 6..10);
    assert_eq!(bits16(&x["0"]), bits16(&z["0"]));
    assert!(snapshot(&x, &whole) == snapshot(&z, &resumed));

    // A state with the mean has the decay of the file then, with which the mean does not matter, and keeps it
    // no longer.
    let w = start();
    let mut keeps = with(Adam::new(1e-3), &w);
    run(&mut keeps, &w, 90..92);
    file.restore_with_model(&mut keeps, &w).expect("a file without the mean");
    run(&mut keeps, &w, 6..10);
    assert_eq!(bits16(&x["0"]), bits16(&w["0"]));
    assert!(snapshot(&x, &whole) == snapshot(&w, &keeps));
    assert_eq!(keeps.bytes(), whole.bytes());
    keeps.adjust_field("beta", (0.9, 0.99)).expect_err("the mean is no longer kept");

    let keeps = with(Adam::new(1e-3), &z);
    let file = open(&file_of(Checkpoint::new(&keeps))).expect("a file");
    let error = file.restore(&mut resumed).expect_err("the state has no room for the mean");
    is_kind(&error, ErrorKind::OtherRule, &["\"m\"", "not kept"]);
}
