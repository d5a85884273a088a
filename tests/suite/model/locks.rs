//! No lock of a storage is asked for by a thread that has it, and no two are taken in two orders: nothing
//! hangs.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use candle_core::DType::{BF16, F32};
use candle_core::{Device, Tensor, Var};
use optimisers::{
    AccumGrad, Descent, Flow, Gradient, MixedPrecision, OptimiserChain, Parameter, ParameterSlices, Result,
    Rule, Setup, State, StateTree, Update, hyper_parameters, range, setup, update,
};

use support::common::{Grads, Vars, constant, engines, not_finite, tensor, values, var};

/// After which a test is taken to hang. Each takes milliseconds alone, or the time of the stress.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs `work` in a thread of its own; fails instead of hanging.
pub fn watched(work: impl FnOnce() + Send + 'static) {
    let (done, finished) = channel();
    let thread = std::thread::spawn(move || {
        work();
        let _ = done.send(());
    });
    if let Err(RecvTimeoutError::Timeout) = finished.recv_timeout(LIMIT + 2 * stress()) {
        panic!("deadlock");
    }
    thread.join().expect("no panic in the watched thread");
}

/// How long threads go on side by side: `STRESS_SECONDS` of all tests together, or two.
fn stress() -> Duration {
    let seconds = std::env::var("STRESS_SECONDS")
        .ok()
        .and_then(|seconds| seconds.parse().ok());
    Duration::from_secs_f64(seconds.unwrap_or(2.0) / 5.0)
}

/// Calls each of these again and again, in a thread of its own, until the time is over.
pub fn side_by_side<const N: usize>(work: [&mut (dyn FnMut() + Send); N]) {
    let start = Instant::now();
    std::thread::scope(|scope| {
        for work in work {
            scope.spawn(move || {
                while start.elapsed() < stress() {
                    work();
                }
            });
        }
    });
}

/// A state that was made for slices, which does not know where variables lie.
fn of_slices(length: usize) -> StateTree {
    let mut memory = vec![1f32; length];
    let slices = ParameterSlices::new()
        .with("x", length, &mut memory)
        .expect("slices");
    setup(Descent::new(1.0), &slices).expect("a state")
}

/// The parameter under other handles.
fn views(x: &Var) -> [Tensor; 4] {
    let view = x.as_detached_tensor();
    let twice = view
        .reshape((2, ()))
        .and_then(|matrix| matrix.t()?.t())
        .and_then(|matrix| matrix.flatten_all())
        .expect("a view");
    [
        x.as_tensor().clone(),
        view.clone(),
        view.reshape((2, ()))
            .and_then(|matrix| matrix.flatten_all())
            .expect("a view"),
        twice,
    ]
}

#[test]
fn a_gradient_that_is_a_view_of_its_variable_in_a_state_of_slices() {
    watched(|| {
        for engine in engines() {
            for length in [4, 70_000] {
                let mut state = of_slices(length);
                let x = Var::ones(length, F32, &Device::Cpu).expect("a variable");
                let model = Vars::from([("x".to_string(), x.clone())]);
                for view in views(&x) {
                    x.set(&constant(3.0, length, F32)).expect("new values");
                    Update::new(&mut state)
                        .engine(engine)
                        .apply(&model, &[("x", view)])
                        .expect("an update");
                    assert!(values(&x).iter().all(|x| *x == 0.0), "{engine:?}");
                }
            }
        }
    });
}

#[test]
fn a_gradient_that_is_a_view_of_its_variable_on_one_rank_of_a_state_of_slices() {
    watched(|| {
        let mut memory = vec![1f32; 40];
        let slices = ParameterSlices::new().with("x", 40, &mut memory).expect("slices");
        let world = optimisers::ranks(1).remove(0);
        let mut state = Setup::over(&world)
            .build(Descent::new(1.0), &slices)
            .expect("a state");
        let x = Var::ones(40, F32, &Device::Cpu).expect("a variable");
        update(
            &mut state,
            &Vars::from([("x".to_string(), x.clone())]),
            &[("x", x.as_detached_tensor())],
        )
        .expect("an update");
        assert_eq!(values(&x), [0.0; 40]);
    });
}

/// Neither state knows the variables of the other, as neither knows its own.
#[test]
fn players_whose_gradients_are_each_other_in_states_of_slices() {
    watched(|| {
        let mut states = [of_slices(5000), of_slices(5000)];
        let [x, y] = [1, 2].map(|seed| var(&tensor(seed, &[5000], F32)));
        let models = [&x, &y].map(|x| Vars::from([("x".to_string(), x.clone())]));
        let gradients = [&y, &x].map(|other| [("x", other.as_detached_tensor())]);
        let [of_x, of_y] = &mut states;
        side_by_side([
            &mut || drop(update(of_x, &models[0], &gradients[0]).expect("an update")),
            &mut || drop(update(of_y, &models[1], &gradients[1]).expect("an update")),
        ]);
    });
}

hyper_parameters! {
    /// What the rule calls x is the gradient.
    struct Itself {
        /// Rules have one.
        unused: bool = false => range::any,
    }
}

impl Rule for Itself {
    fn init(&self, _x: Parameter<'_>) -> Result<State> {
        Ok(State::empty().with_counter("t"))
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx.with_tensors(state, |_, x, _, _| Ok(x.clone()))))
    }
}

/// A function of a rule is given the master, and may return it.
#[test]
fn a_function_that_returns_the_master() {
    watched(|| {
        for engine in engines() {
            let (x, bare) = (var(&tensor(1, &[300], BF16)), var(&tensor(2, &[300], F32)));
            let mut state = setup(MixedPrecision::new(F32, Itself::default()), &x).expect("a state");
            Update::new(&mut state)
                .engine(engine)
                .apply(&x, &[("", tensor(3, &[300], BF16))])
                .expect("an update");
            let mut state = setup(Itself::default(), &bare).expect("a state");
            Update::new(&mut state)
                .engine(engine)
                .apply(&bare, &[("", tensor(3, &[300], F32))])
                .expect("an update");
            assert_eq!(
                (values(&x), values(&bare)),
                (vec![0.0; 300], vec![0.0; 300]),
                "{engine:?}"
            );
        }
    });
}

/// The gradient of a skipped call is read once more where it ends a window.
#[test]
fn a_skipped_window_whose_gradient_is_a_view_beside_another_state() {
    watched(|| {
        let model: Vars = [("a", 1), ("b", 2)]
            .map(|(path, seed)| (path.to_string(), var(&tensor(seed, &[5000], F32))))
            .into();
        let mut windowed = setup(
            OptimiserChain::new((AccumGrad::new(1), Descent::new(0.1))),
            &model,
        )
        .expect("a state");
        let mut other = setup(Descent::new(1e-6), &model).expect("a state");
        let infinite = constant(f64::INFINITY, 5000, F32);
        let of_itself: Grads = [
            ("a".to_string(), model["a"].as_detached_tensor()),
            ("b".to_string(), infinite),
        ]
        .into();
        let gradients: Grads = model
            .keys()
            .map(|path| (path.clone(), tensor(3, &[5000], F32)))
            .collect();
        side_by_side([
            &mut || {
                let outcome = Update::new(&mut windowed)
                    .finite_only()
                    .apply(&model, &of_itself)
                    .expect("a skipped call");
                assert_eq!(outcome.status, not_finite("b"));
            },
            &mut || drop(update(&mut other, &model, &gradients).expect("an update")),
        ]);
    });
}

/// New values that are views of variables are copied before anything is locked.
#[test]
fn new_values_that_are_views_of_each_other() {
    watched(|| {
        let [x, y] = [1, 2].map(|seed| var(&tensor(seed, &[5000], F32)));
        let mut states = [&x, &y].map(|x| setup(Descent::new(0.1), x).expect("a state"));
        let values = [&y, &x]
            .map(|other| std::collections::BTreeMap::from([(String::new(), other.as_detached_tensor())]));
        let [of_x, of_y] = &mut states;
        side_by_side([
            &mut || drop(of_x.set_masters(&x, &values[0]).expect("new values")),
            &mut || drop(of_y.set_masters(&y, &values[1]).expect("new values")),
        ]);
    });
}
