//! Parameters whose gradient is zero, for a long time: rounding must not add up, and nothing may be divided
//! by zero.

use candle_core::{DType, Device, Tensor};
use optimisers::{Adjust, Engine, FieldValue, Rule, Update, rules, setup, update};

use support::common::{Snapshot, bits, grads, model, random, snapshot};

/// Rules that move a parameter on their own, as their documentation says.
const RESTLESS: [&str; 3] = ["AMSGrad", "GradNoise", "Yogi"];

/// What a rule computes with, other than the number of the step.
fn without_counters(snapshot: Snapshot) -> Snapshot {
    snapshot
        .into_iter()
        .filter(|(name, _)| !name.ends_with("/t") && !name.ends_with("/steps"))
        .collect()
}

/// Whether every bit of a parameter in f32 is the same after 100 000 zero gradients. A rule of which nothing
/// but counters has moved in a thousand steps is not asked for more.
fn stays(mut rule: Box<dyn Rule>) -> bool {
    rule.set_field("lambda", FieldValue::Real(0.0))
        .expect("a real number");
    let x = model(&[random(1, &[2, 2], DType::F32, &Device::Cpu)]);
    let mut state = setup(rule, &x).expect("a state");
    let before = bits(&x["0"]);
    let zeros = grads([Some(
        Tensor::zeros((2, 2), DType::F32, &Device::Cpu).expect("zeros"),
    )]);
    let mut step = |count: usize| {
        for _ in 0..count {
            update(&mut state, &x, &zeros).expect("an update");
        }
        without_counters(snapshot(&x, &state))
    };
    if step(1) != step(1000) {
        step(99_000);
    }
    bits(&x["0"]) == before
}

#[test]
fn zero_gradients_leave_a_parameter_where_it_is() {
    for listing in rules::catalogue() {
        assert_eq!(
            stays(listing.rule),
            !RESTLESS.contains(&listing.name),
            "{}",
            listing.name
        );
    }
}

/// The ends of the ranges of numbers: 0, or a small one; 1, or what is next to it; where there is no end,
/// infinity, or a large one.
const ENDS: [f64; 6] = [0.0, 1e-30, 1.0 - f64::EPSILON / 2.0, 1.0, 1e6, f64::INFINITY];

/// A field's values with each of its numbers, and all of them, at each end. What is no such end is not in the
/// range.
fn at_ends(value: FieldValue) -> Vec<FieldValue> {
    let ends = ENDS.into_iter();
    match value {
        FieldValue::Real(_) => ends.map(FieldValue::Real).collect(),
        FieldValue::Pair(a, b) => ends
            .flat_map(|x| [(x, b), (a, x), (x, x)])
            .map(|(a, b)| FieldValue::Pair(a, b))
            .collect(),
        FieldValue::Triple(a, b, c) => ends
            .flat_map(|x| [(x, b, c), (a, x, c), (a, b, x), (x, x, x)])
            .map(|(a, b, c)| FieldValue::Triple(a, b, c))
            .collect(),
        FieldValue::Count(_) => [0, 1, 2, 100, u64::MAX].map(FieldValue::Count).to_vec(),
        FieldValue::Flag(_) => [false, true].map(FieldValue::Flag).to_vec(),
        _ => Vec::new(),
    }
}

/// The rule with this value, if that is in its range.
fn with(rule: &dyn Rule, field: &str, value: FieldValue) -> Option<Box<dyn Rule>> {
    let mut rule = dyn_clone::clone_box(rule);
    let is_set = rule.set_field(field, value).is_ok_and(|is_there| is_there);
    (is_set && rule.check().is_ok()).then_some(rule)
}

/// Where three gradients of zeros leave NaN, in the state of a matrix or a vector or in these.
pub fn nan_in(rule: &dyn Rule) -> Option<String> {
    for (dtype, engine) in [
        (DType::F32, Engine::Fused),
        (DType::F32, Engine::Tensors),
        (DType::F64, Engine::Fused),
    ] {
        for shape in [&[3, 4][..], &[5]] {
            let x = random(1, shape, dtype, &Device::Cpu);
            if rule.init((&x).into()).is_err() {
                continue;
            }
            let (model, zeros) = (model(std::slice::from_ref(&x)), grads([x.zeros_like().ok()]));
            let mut state = setup(dyn_clone::clone_box(rule), &model).expect("a state");
            for step in 1..=3 {
                // What is refused for this parameter's dtype moves nothing.
                if Update::new(&mut state)
                    .engine(engine)
                    .apply(&model, &zeros)
                    .is_err()
                {
                    return None;
                }
                for (name, numbers) in snapshot(&model, &state) {
                    if numbers.iter().any(|&bits| f64::from_bits(bits).is_nan()) {
                        return Some(format!(
                            "step {step} on {engine:?} in {dtype:?} of {shape:?}: {name} of {rule:?}"
                        ));
                    }
                }
            }
        }
    }
    None
}

/// ε = 0 too, where an element that never had a gradient is 0 / 0.
#[test]
fn no_rule_makes_nan_of_gradients_of_zeros() {
    let (mut tried, mut bad) = (0, Vec::new());
    for listing in rules::catalogue() {
        let fields = listing.rule.fields();
        // With everything at the low end of its range.
        let lowest = fields.iter().fold(listing.rule.clone(), |rule, (name, value)| {
            at_ends(*value)
                .into_iter()
                .find_map(|end| with(&*rule, name, end))
                .unwrap_or(rule)
        });
        for rule in [listing.rule, lowest] {
            bad.extend(nan_in(&*rule));
            let at_end = |(name, value): &(&'static str, FieldValue)| {
                let ends = at_ends(*value).into_iter();
                ends.filter_map(|end| with(&*rule, name, end)).collect::<Vec<_>>()
            };
            for rule in fields.iter().flat_map(at_end) {
                bad.extend(nan_in(&*rule));
                tried += 1;
            }
        }
    }
    assert!(
        bad.is_empty() && tried > 1000,
        "{} of {tried}: {bad:#?}",
        bad.len()
    );
}
