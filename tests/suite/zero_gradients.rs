//! Parameters whose gradient is zero for a long time: rounding must not add up.

use candle_core::{DType, Device, Tensor};
use optimisers::{Adjust, FieldValue, Rule, rules, setup, update};

use crate::common::{Snapshot, bits, grads, model, random, snapshot};

/// Rules that move a parameter on their own, as their documentation says.
const RESTLESS: [&str; 3] = ["AMSGrad", "GradNoise", "Yogi"];

/// What a rule computes with, other than the number of the step.
fn without_counters(snapshot: Snapshot) -> Snapshot {
    snapshot.into_iter().filter(|(name, _)| !name.ends_with("/t") && !name.ends_with("/steps")).collect()
}

/// Whether every bit of a parameter in f32 is the same after 100 000 zero gradients. A rule of which nothing but counters has moved in a
/// thousand steps is not asked for more.
fn stays(mut rule: Box<dyn Rule>) -> bool {
    rule.set_field("lambda", FieldValue::Real(0.0)).expect("a real number");
    let x = model(&[random(1, &[2, 2], DType::F32, &Device::Cpu)]);
    let mut state = setup(rule, &x).expect("a state");
    let before = bits(&x["0"]);
    let zeros = grads([Some(Tensor::zeros((2, 2), DType::F32, &Device::Cpu).expect("zeros"))]);
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
        assert_eq!(stays(listing.rule), !RESTLESS.contains(&listing.name), "{}", listing.name);
    }
}
