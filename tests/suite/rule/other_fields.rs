//! A rule that describes other fields than before. A schedule then cannot set them, and an update says so
//! before anything is written.

use std::sync::atomic::{AtomicU8, Ordering};

use candle_core::{DType, Device};
use optimisers::{
    Describe, Describer, ErrorKind, Flow, Gradient, OptimiserChain, Parameter, Result, Rule, Schedule, State,
    StateTree, WeightDecay, range, setup, update,
};

use support::common::{Grads, Vars, grads, is_kind, model, random, snapshot};

thread_local! {
    /// How `Changing` describes itself: 0 as at first, 1 by a field of another type, 2 by no field.
    static FAULT: AtomicU8 = const { AtomicU8::new(0) };
}

#[derive(Clone, Debug)]
struct Changing {
    eta: f64,
    count: u64,
}

impl Describe for Changing {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("Changing");
        match FAULT.with(|fault| fault.load(Ordering::Relaxed)) {
            0 => rule.field("eta", &mut self.eta, 1.0, range::any),
            1 => rule.field("eta", &mut self.count, 1, range::any),
            _ => {}
        }
    }
}

impl Rule for Changing {
    fn apply<'a>(&'a self, _: &'a mut State, _: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx.scale(self.eta)))
    }
}

fn set(fault: u8) {
    FAULT.with(|own| own.store(fault, Ordering::Relaxed));
}

fn scheduled(rule: impl Rule) -> (Vars, StateTree, Grads) {
    let model = model(&[random(1, &[5], DType::F32, &Device::Cpu)]);
    let mut state = setup(rule, &model).expect("a state");
    state
        .schedule(Schedule::linear(0.5, 0.25, 10).relative())
        .expect("a schedule");
    (
        model,
        state,
        grads([Some(random(2, &[5], DType::F32, &Device::Cpu))]),
    )
}

#[test]
fn an_update_refuses_them_before_it_writes() {
    let rule = || Changing { eta: 1.0, count: 1 };
    for fault in [1, 2] {
        for nested in [false, true] {
            let (model, mut state, grads) = match nested {
                false => scheduled(rule()),
                true => scheduled(OptimiserChain::new((WeightDecay::new(0.1), rule()))),
            };
            update(&mut state, &model, &grads).expect("a step");
            set(fault);
            // The step is whole, and its end cannot make the rate of the next.
            let moved = update(&mut state, &model, &grads);
            assert_eq!(moved.expect("a step").applied, 1, "{fault} {nested}");
            let before = snapshot(&model, &state);
            let words = [
                "`Describe::describe` of",
                "is wrong: it has described other fields before",
            ];
            is_kind(
                &update(&mut state, &model, &grads).expect_err("a fault"),
                ErrorKind::Contract,
                &words,
            );
            is_kind(
                &state.set_steps(7).expect_err("a fault"),
                ErrorKind::Contract,
                &words,
            );
            assert!(snapshot(&model, &state) == before && state.steps() == 2);
            set(0);
            update(&mut state, &model, &grads).expect("a step");
            let rate = state.leaf("0").and_then(|leaf| leaf.learning_rate());
            assert_eq!(
                rate.zip(
                    state
                        .leaf("0")
                        .and_then(|leaf| leaf.acting().field("eta")?.to_string().parse().ok())
                ),
                Some((0.425, 0.425))
            );
        }
    }
}
