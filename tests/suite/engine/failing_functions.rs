//! What a function leaves that fails while parameters are written.

use candle_core::{Device, Tensor};
use optimisers::{
    ClipNorm, Error, Flow, Gradient, IntoOptimiser, Momentum, Optimiser, OptimiserChain, Parameter, Result,
    Rule, State, StateTree, Update, hyper_parameters, range, setup_with,
};

use support::common::{Grads, Vars, engines, snapshot, values, var};

hyper_parameters! {
    /// Descent by a function of the whole tensor, which fails if it is asked to.
    struct Late {
        /// Whether it fails.
        fails: bool = false => range::any,
    }
}

impl Rule for Late {
    fn init(&self, _x: Parameter<'_>) -> Result<State> {
        Ok(State::empty().with_counter("t"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let fails = self.fails;
        Ok(Flow::Step(dx.with_tensors_late(state, move |_, _, dx, _| {
            if fails {
                Err(Error::other("on purpose"))
            } else {
                Ok(dx)
            }
        })))
    }
}

/// A model of which `a` and `d` have an elementwise rule, `b` this one, and `c` one whose function does not
/// fail.
fn started(failing: impl IntoOptimiser + Clone) -> (Vars, StateTree, Grads) {
    // Each is a batch of its own.
    let tensor = |value: f32| Tensor::full(value, 1 << 20, &Device::Cpu).expect("a tensor");
    let model: Vars = ["a", "b", "c", "d"]
        .map(|path| (path.to_string(), var(&tensor(3.0))))
        .into();
    let grads = model.keys().map(|path| (path.clone(), tensor(1.0))).collect();
    let choose = |path: &str, _: Parameter<'_>| -> Option<Optimiser> {
        Some(match path {
            "b" => Optimiser::new(failing.clone()),
            "c" => Optimiser::new(Late::default()),
            _ => Optimiser::new(Momentum::new(1.0)),
        })
    };
    (model.clone(), setup_with(&model, choose).expect("a state"), grads)
}

fn assert_on_purpose(error: &Error) {
    assert!(error.to_string().contains("on purpose"), "{error}");
}

#[test]
fn a_function_that_fails_late_leaves_every_parameter_whole() {
    for engine in engines() {
        let (model, mut state, grads) = started(Late::new(true));
        assert_on_purpose(
            &Update::new(&mut state)
                .engine(engine)
                .apply(&model, &grads)
                .expect_err("a failure"),
        );
        for (path, x) in &model {
            let x = values(x);
            assert!(x.iter().all(|element| *element == x[0]), "{path} on {engine:?}");
            let leaf = state.leaf(path).expect("a leaf");
            let steps = u64::from(x[0] == 2.0);
            let counters: Vec<u64> = leaf.counters().into_iter().map(|(_, count)| count).collect();
            assert_eq!(
                (x[0], leaf.steps(), counters),
                (3.0 - steps as f64, steps, vec![steps; leaf.counters().len()]),
                "{path} on {engine:?}"
            );
            // Elementwise rules come first.
            assert_eq!(
                steps,
                u64::from(matches!(&path[..], "a" | "d")),
                "{path} on {engine:?}"
            );
        }
    }
}

#[test]
fn a_function_that_fails_before_a_norm_leaves_everything() {
    for engine in engines() {
        let (model, mut state, grads) = started(OptimiserChain::new((Late::new(true), ClipNorm::new(1.0))));
        let before = snapshot(&model, &state);
        assert_on_purpose(
            &Update::new(&mut state)
                .engine(engine)
                .apply(&model, &grads)
                .expect_err("a failure"),
        );
        assert!(snapshot(&model, &state) == before, "on {engine:?}");
    }
}

#[test]
fn the_functional_form_leaves_the_originals_whole() {
    let (model, state, grads) = started(Late::new(true));
    let (before, parameters) = (
        snapshot(&model, &state),
        optimisers::trainables(&model).expect("parameters"),
    );
    assert_on_purpose(
        &Update::functional(&state)
            .apply(&parameters, &grads)
            .expect_err("a failure"),
    );
    assert!(snapshot(&model, &state) == before);
}
