//! What a rule that panics leaves.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Tensor};
use optimisers::{
    ClipNorm, Elementwise, Engine, Flow, Gradient, IntoOptimiser, Optimiser, OptimiserChain, Parameter,
    Result, Rule, Slot, State, StateTree, Update, hyper_parameters, range, setup_with, value::Value,
};

use crate::model::models::of;
use support::common::{Grads, Vars, engines, snapshot, values, var};

/// How often a step may run before it panics.
static STEPS_LEFT: AtomicUsize = AtomicUsize::new(usize::MAX);

hyper_parameters! {
    /// Descent that panics: at once, or in the middle of its arithmetic.
    struct Panicking {
        /// 0 does not panic, 1 while it prepares, 2 in its arithmetic.
        place: u64 = 0 => range::any,
    }
}

impl Elementwise for Panicking {
    type Scalars = u64;
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::zeros("sum")]
    }

    fn scalars(&self, _t: u64) -> u64 {
        assert_ne!(self.place, 1, "on purpose");
        self.place
    }

    fn step<V: Value>(place: u64, _x: V, dx: V, [sum]: &mut [V; 1]) -> V {
        if place == 2 {
            assert!(
                STEPS_LEFT
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                    .is_ok(),
                "on purpose"
            );
        }
        *sum = *sum + dx;
        dx
    }
}

hyper_parameters! {
    /// Panics in a function of the whole tensor.
    struct PanickingFunction {
        /// Not used.
        place: u64 = 0 => range::any,
    }
}

impl Rule for PanickingFunction {
    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(
            dx.with_tensors(state, |_, _, _, _| panic!("on purpose")),
        ))
    }
}

/// A model of which `b` has this rule, and the others one that does nothing wrong.
fn started(length: usize, rule: &(impl IntoOptimiser + Clone)) -> (Vars, StateTree, Grads) {
    let tensor = |value: f64| {
        Tensor::full(value, length, &Device::Cpu)
            .and_then(|x| x.to_dtype(DType::F32))
            .expect("a tensor")
    };
    let model: Vars = ["a", "b", "c"]
        .map(|path| (path.to_string(), var(&tensor(3.0))))
        .into();
    let grads = model.keys().map(|path| (path.clone(), tensor(1.0))).collect();
    let choose = |path: &str, _: Parameter<'_>| -> Option<Optimiser> {
        Some(if path == "b" {
            Optimiser::new(rule.clone())
        } else {
            Optimiser::new(Panicking::default())
        })
    };
    (model.clone(), setup_with(&model, choose).expect("a state"), grads)
}

fn panics(engine: Engine, model: &Vars, state: &mut StateTree, grads: &Grads) {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        Update::new(state).engine(engine).apply(model, grads)
    }));
    assert!(outcome.is_err(), "on {engine:?}");
}

/// One test only: the count of steps is for all threads.
#[test]
fn a_panic_leaves_what_the_documentation_says() {
    let first = Panicking::new(1);
    let function = PanickingFunction::default();
    let before_a_norm = OptimiserChain::new((Panicking::new(2), ClipNorm::new(1.0)));
    let early: [Box<dyn Rule>; 3] = [Box::new(first), Box::new(function), Box::new(before_a_norm)];
    for (engine, rule) in engines()
        .into_iter()
        .flat_map(|engine| early.iter().map(move |rule| (engine, rule)))
    {
        STEPS_LEFT.store(0, Ordering::Relaxed);
        let (model, mut state, grads) = started(5, rule);
        let before = snapshot(&model, &state);
        panics(engine, &model, &mut state, &grads);
        assert!(snapshot(&model, &state) == before, "{rule:?} on {engine:?}");
    }
    let recording = engines()
        .into_iter()
        .filter(|engine| *engine != Engine::Fused)
        .map(|engine| (engine, 1000, 0));
    for (engine, length, steps) in [(Engine::Fused, 5, 0), (Engine::Fused, 100_000, 2)]
        .into_iter()
        .chain(recording)
    {
        STEPS_LEFT.store(steps, Ordering::Relaxed);
        let (model, mut state, grads) = started(length, &Panicking::new(2));
        panics(engine, &model, &mut state, &grads);
        for (path, x) in &model {
            let leaf = state.leaf(path).expect("a leaf");
            let sum = values(&leaf.tensor("sum").expect("a copy"));
            let moved: Vec<bool> = values(x)
                .into_iter()
                .zip(sum)
                .map(|(x, sum)| {
                    assert!(
                        (x, sum) == (3.0, 0.0) || (x, sum) == (2.0, 1.0),
                        "an element with its state"
                    );
                    x == 2.0
                })
                .collect();
            let (any, all) = (moved.contains(&true), !moved.contains(&false));
            let counted = [leaf.steps(), leaf.counters()[0].1];
            if path == "b" {
                assert!(
                    !all && counted == [0, 0] && any == (steps > 0),
                    "{engine:?}, {length}"
                );
            } else {
                assert!(
                    any == all && counted == [u64::from(all); 2],
                    "{engine:?}, {length}: {path}"
                );
            }
        }
        // Nothing is locked.
        state
            .at("b")
            .and_then(|mut leaf| leaf.adjust_field("place", 0))
            .expect("a place");
        model["b"]
            .set(&of(&vec![3.0; length], DType::F32))
            .expect("a parameter");
        assert_eq!(
            Update::new(&mut state)
                .engine(engine)
                .apply(&model, &grads)
                .expect("an update")
                .applied,
            3
        );
    }
}
