//! Code of users that breaks what the documentation asks of it: it is refused or harmless, on every engine,
//! and nothing is written.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::DType::{BF16, F32, F64, U32};
use candle_core::{Device, Tensor, Var};
use optimisers::{
    AccumGrad, Adafactor, Adam, Cautious, ClipNorm, Descent, Elementwise, Ema, Error, ErrorKind, Flow,
    Gradient, Gradients, IntoOptimiser, Kahan, LAMB, LARS, Lend, MixedPrecision, Model, Momentum, Muon,
    OptimiserChain, Parameter, Prodigy, RMSProp, Result, Rule, ScheduleFree, Slot, SplitMaster, State,
    Update, Visitor, hyper_parameters, range, setup, value::Value,
};

use support::common::{Grads, Snapshot, assert_same, engines, grads, is_kind, model, random, says, snapshot};

/// A rule that stands for another, and makes its state in a way of its own.
#[derive(Clone, Debug)]
struct Forged<R> {
    inner: R,
    init: fn(&R, Parameter<'_>) -> Result<State>,
}

impl<R: Rule + Clone> optimisers::Describe for Forged<R> {
    fn describe(&mut self, rule: &mut optimisers::Describer<'_>) {
        self.inner.describe(rule);
    }
}

impl<R: Rule + Clone> Rule for Forged<R> {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        // The first leaf has what belongs to it.
        if x.elem_count() == 3 {
            self.inner.init(x)
        } else {
            (self.init)(&self.inner, x)
        }
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        self.inner.apply(state, x, dx)
    }
}

fn shorter<R: Rule>(rule: &R, x: Parameter<'_>) -> Result<State> {
    rule.init(Parameter::from(&Tensor::zeros(16, x.dtype().into(), x.device())?))
}

fn flat<R: Rule>(rule: &R, x: Parameter<'_>) -> Result<State> {
    rule.init(Parameter::from(&Tensor::zeros(
        x.elem_count(),
        x.dtype().into(),
        x.device(),
    )?))
}

fn of_integers<R: Rule>(_: &R, x: Parameter<'_>) -> Result<State> {
    let zeros = || Tensor::zeros(x.shape(), U32, &Device::Cpu);
    State::empty()
        .with_counter("t")
        .with_tensor("m", &zeros()?)?
        .with_tensor("v", &zeros()?)
}

fn without_tensors<R: Rule>(_: &R, _: Parameter<'_>) -> Result<State> {
    Ok(State::empty().with_counter("t"))
}

fn of_too_many<R: Rule>(rule: &R, x: Parameter<'_>) -> Result<State> {
    rule.init(x)?.with_slot(Slot::zeros("more"), x, x.shape())
}

/// The errors of an update on each engine, after each of which everything must be as it was.
fn refusals(optimiser: impl IntoOptimiser + Clone, dtype: candle_core::DType) -> Vec<Error> {
    let parameters = [
        random(1, &[3], dtype, &Device::Cpu),
        random(2, &[40, 25], dtype, &Device::Cpu),
    ];
    let gradients = grads(parameters.iter().map(|x| Some(x.clone())));
    let refused = |engine| {
        let model = model(&parameters);
        let mut state = setup(optimiser.clone(), &model).expect("a state");
        let before = snapshot(&model, &state);
        let error = Update::new(&mut state)
            .engine(engine)
            .apply(&model, &gradients)
            .expect_err("a refusal");
        assert_same(&[snapshot(&model, &state)], &[before], format!("{engine:?}"));
        error
    };
    engines().into_iter().map(refused).collect()
}

/// Code of this test is to blame, which works on the parameter at `path`.
fn is_contract(error: &Error, path: &str, words: &str) {
    is_kind(error, ErrorKind::Contract, &[words]);
    assert_eq!(error.path(), Some(path), "{error}");
}

fn assert_misfit(optimiser: impl IntoOptimiser + Clone, dtype: candle_core::DType, slot: &str) {
    let name = optimiser.name();
    for error in refusals(optimiser, dtype) {
        is_contract(
            &error,
            "1",
            &format!("{name} works element by element on its state tensor {slot:?}"),
        );
        assert!(
            error
                .expected()
                .is_some_and(|expected| expected.contains(" with the shape [40, 25] on ")),
            "{error}"
        );
    }
}

#[test]
fn state_of_another_shape_is_refused() {
    assert_misfit(
        Forged {
            inner: Adam::new(0.1),
            init: shorter,
        },
        F32,
        "m",
    );
    assert_misfit(
        Forged {
            inner: Adam::new(0.1),
            init: flat,
        },
        F32,
        "m",
    );
    assert_misfit(
        Forged {
            inner: Adam::new(0.1),
            init: shorter,
        },
        F64,
        "m",
    );
    assert_misfit(
        Forged {
            inner: Adam::new(0.1),
            init: of_integers,
        },
        F32,
        "m",
    );
    assert_misfit(
        MixedPrecision::new(
            F32,
            Forged {
                inner: Adam::new(0.1),
                init: shorter,
            },
        ),
        BF16,
        "m",
    );
    assert_misfit(
        SplitMaster::new(Forged {
            inner: Adam::new(0.1),
            init: shorter,
        }),
        BF16,
        "m",
    );
    assert_misfit(
        Kahan::new(Forged {
            inner: Momentum::new(0.1),
            init: shorter,
        }),
        BF16,
        "velocity",
    );
    // In front of a norm, of a function and of sums, and where a norm is of what follows.
    assert_misfit(
        OptimiserChain::new((
            Forged {
                inner: Momentum::new(0.1),
                init: shorter,
            },
            ClipNorm::new(1.0),
        )),
        F32,
        "velocity",
    );
    assert_misfit(
        OptimiserChain::new((
            Forged {
                inner: Momentum::new(0.1),
                init: shorter,
            },
            Adafactor::new(1.0),
        )),
        F32,
        "velocity",
    );
    assert_misfit(
        Forged {
            inner: LAMB::new(0.1),
            init: shorter,
        },
        F32,
        "m",
    );
    assert_misfit(
        Forged {
            inner: Prodigy::default(),
            init: shorter,
        },
        F32,
        "start",
    );
    assert_misfit(
        OptimiserChain::new((
            Descent::new(0.1),
            Forged {
                inner: Ema::default(),
                init: shorter,
            },
        )),
        F32,
        "average",
    );
}

#[test]
fn another_number_of_state_tensors_is_refused() {
    for (init, got) in [
        (without_tensors as fn(&Adam, Parameter<'_>) -> Result<State>, "0"),
        (of_too_many, "3 (m, v, more)"),
    ] {
        for error in refusals(
            Forged {
                inner: Adam::new(0.1),
                init,
            },
            F32,
        ) {
            is_contract(
                &error,
                "1",
                "the number of state tensors that Adam gives its arithmetic is",
            );
            assert_eq!((error.got(), error.expected()), (Some(got), Some("2")), "{error}");
        }
    }
}

fn empty<R: Rule>(_: &R, _: Parameter<'_>) -> Result<State> {
    Ok(State::empty())
}

/// The function of a matrix runs while parameters are written.
#[test]
fn another_number_of_state_tensors_is_refused_before_a_late_function() {
    let parameters = [&[1, 3], &[40, 25]].map(|shape| random(1, shape, F32, &Device::Cpu));
    for engine in engines() {
        let model = model(&parameters);
        let forged = Forged {
            inner: Muon::new(0.1),
            init: of_too_many,
        };
        let mut state = setup(forged, &model).expect("a state");
        let before = snapshot(&model, &state);
        let gradients = grads(parameters.iter().map(|x| Some(x.clone())));
        let update = Update::new(&mut state).engine(engine).apply(&model, &gradients);
        assert_foreign(&update.expect_err("a refusal"), Some("1"), "Muon");
        assert_same(&[snapshot(&model, &state)], &[before], format!("{engine:?}"));
    }
}

fn misspelt<R: Rule>(rule: &R, x: Parameter<'_>) -> Result<State> {
    Ok(rule.init(x)?.zeroed_by_new_weights("velocty"))
}

/// Otherwise new weights leave the velocity as it is, without a word.
#[test]
fn a_property_of_no_entry_is_refused() {
    let forged = Forged {
        inner: Momentum::new(0.1),
        init: misspelt,
    };
    let model = model(&[
        random(1, &[3], F32, &Device::Cpu),
        random(2, &[40, 25], F32, &Device::Cpu),
    ]);
    let error = setup(forged, &model).expect_err("a wrong name");
    is_contract(&error, "1", "a property to \"velocty\"");
    says(&error, &["no entry of the state"]);
}

fn assert_foreign(error: &Error, path: Option<&str>, name: &str) {
    is_kind(
        error,
        ErrorKind::Contract,
        &[&format!("the state was not made by {name};")],
    );
    assert_eq!(error.path(), path, "{error}");
}

/// Neither the gradient as it is nor a part of a chain takes the place of a step.
#[test]
fn a_state_that_another_rule_made_is_refused() {
    fn refused<R: Rule + Clone>(inner: R, init: fn(&R, Parameter<'_>) -> Result<State>) {
        let name = inner.name();
        for error in refusals(Forged { inner, init }, F32) {
            assert_foreign(&error, Some("1"), &name);
        }
    }
    refused(Prodigy::default(), without_tensors);
    refused(Prodigy::default(), empty);
}

/// Nor is a bias corrected by no count of steps.
#[test]
fn a_state_without_a_counter_of_steps_is_refused() {
    fn refused<R: Rule + Clone>(inner: R) {
        for error in refusals(Forged { inner, init: empty }, F32) {
            is_contract(&error, "1", "the number of counters in the state of a rule is");
            assert_eq!((error.got(), error.expected()), (Some("0"), Some("1")), "{error}");
        }
    }
    refused(Adam::new(0.1));
    refused(RMSProp::default());
    refused(LAMB::new(0.1));
    refused(LARS::new(0.1));
    refused(ScheduleFree::default());
}

/// Asserts that `setup` refuses a rule whose state for the second parameter has those of so many held rules.
fn assert_held(rule: impl Rule + Clone, states: usize) {
    let (name, mut held) = (rule.name(), 0);
    rule.visit_held(&mut |_, _| held += 1);
    let model = model(&[
        random(1, &[3], F32, &Device::Cpu),
        random(2, &[40, 25], F32, &Device::Cpu),
    ]);
    let error = setup(rule, &model).expect_err("another number of states");
    is_contract(
        &error,
        "1",
        &format!("the number of states that the `init` of {name} made for its held rules is"),
    );
    assert_eq!(
        (error.got(), error.expected()),
        (Some(&*states.to_string()), Some(&*held.to_string())),
        "{error}"
    );
}

#[test]
fn a_wrapper_without_the_state_of_its_rule_is_refused() {
    assert_held(
        Forged {
            inner: Cautious::new(Momentum::new(0.1)),
            init: empty,
        },
        0,
    );
}

#[test]
fn a_chain_refuses_the_state_of_another_number_of_members() {
    fn of_adam<R: Rule>(_: &R, x: Parameter<'_>) -> Result<State> {
        OptimiserChain::new((Adam::new(0.1),)).init(x)
    }
    fn of_three<R: Rule>(_: &R, x: Parameter<'_>) -> Result<State> {
        OptimiserChain::new((Adam::new(0.1), Descent::new(1.0), Descent::new(1.0))).init(x)
    }
    type Chain = OptimiserChain<(Adam, Descent)>;
    for (init, got) in [
        (empty as fn(&Chain, Parameter<'_>) -> Result<State>, 0),
        (of_adam, 1),
        (of_three, 3),
    ] {
        let chain = OptimiserChain::new((Adam::new(0.1), Descent::new(1.0)));
        assert_held(
            Forged {
                inner: chain.clone(),
                init,
            },
            got,
        );
        let x = random(1, &[3], F32, &Device::Cpu);
        let error =
            Rule::evaluation(&chain, &init(&chain, (&x).into()).expect("a state")).expect_err("a refusal");
        assert_foreign(&error, None, "OptimiserChain(Adam, Descent)");
    }
}

#[test]
fn averages_of_a_state_that_another_rule_made_are_refused() {
    let error = Rule::evaluation(&ScheduleFree::default(), &State::empty()).expect_err("a refusal");
    assert_foreign(&error, None, "ScheduleFree");
}

#[test]
fn windows_in_a_state_that_another_rule_made_do_not_end() {
    let x = random(1, &[3], F32, &Device::Cpu);
    let mut states = [
        State::empty(),
        Adam::new(0.1).init_for(&x).expect("a state"),
        Ema::default().init_for(&x).expect("a state"),
    ];
    for state in &mut states {
        let error = Rule::end_window(&AccumGrad::new(2), state).expect_err("a refusal");
        assert_foreign(&error, None, "AccumGrad");
        let error = Rule::end_window(&OptimiserChain::new((AccumGrad::new(2), Adam::new(0.1))), state)
            .expect_err("a refusal");
        assert_foreign(&error, None, "OptimiserChain(AccumGrad, Adam)");
    }
}

hyper_parameters! {
    /// Gives its state to whichever leaf comes next.
    struct Restless {
        /// Nothing.
        eta: f64 = 0.1 => range::any,
    }
}

static HELD: Mutex<Option<State>> = Mutex::new(None);

impl Rule for Restless {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        Momentum::new(self.eta).init(x)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let mut held = HELD.lock().expect("a lock");
        let other = held.take();
        let mine = std::mem::replace(state, State::empty());
        *state = other.unwrap_or_else(|| Momentum::new(self.eta).init(x).expect("a state"));
        *held = Some(mine);
        drop(held);
        MOMENTUM.apply(state, x, dx)
    }
}

static MOMENTUM: Momentum = Momentum { eta: 0.1, rho: 0.9 };

trait InitFor {
    fn init_for(&self, x: &Tensor) -> Result<State>;
}

impl<R: Rule> InitFor for R {
    fn init_for(&self, x: &Tensor) -> Result<State> {
        self.init(x.into())
    }
}

/// A state that moves between leaves of one shape does no harm, and one that moves to another shape is
/// refused.
#[test]
fn states_that_move_between_leaves() {
    for engine in engines() {
        *HELD.lock().expect("a lock") = None;
        let parameters = [
            random(1, &[50], F32, &Device::Cpu),
            random(2, &[20], F32, &Device::Cpu),
        ];
        let model = model(&parameters);
        let mut state = setup(Restless::default(), &model).expect("a state");
        let gradients = grads(parameters.iter().map(|x| Some(x.clone())));
        let error = Update::new(&mut state)
            .engine(engine)
            .apply(&model, &gradients)
            .expect_err("a refusal");
        is_contract(
            &error,
            "1",
            "works element by element on its state tensor \"velocity\"",
        );
    }
}

hyper_parameters! {
    /// Says something else about its state each time that it is asked.
    struct Fickle {
        /// The learning rate.
        eta: f64 = 0.1 => range::any,
    }
}

static ASKED: AtomicUsize = AtomicUsize::new(0);

impl Elementwise for Fickle {
    type Scalars = f64;
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        let asked = ASKED.fetch_add(1, Ordering::Relaxed);
        let slot = if asked.is_multiple_of(2) {
            Slot::zeros("sum")
        } else {
            Slot::full("total", 1.0)
        };
        [if asked.is_multiple_of(3) {
            slot.stored_as(BF16)
        } else {
            slot
        }]
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.eta
    }

    fn step<V: Value>(eta: f64, _x: V, dx: V, [sum]: &mut [V; 1]) -> V {
        *sum = *sum + dx;
        *sum * eta
    }
}

#[test]
fn slots_that_change_their_mind_do_no_harm() {
    for engine in engines() {
        let parameters = [
            random(1, &[50], F32, &Device::Cpu),
            random(2, &[20], F32, &Device::Cpu),
        ];
        let model = model(&parameters);
        let mut state = setup(
            OptimiserChain::new((Fickle::default(), Fickle::default())),
            &model,
        )
        .expect("a state");
        for _ in 0..3 {
            Update::new(&mut state)
                .engine(engine)
                .apply(&model, &grads(parameters.iter().map(|x| Some(x.clone()))))
                .expect("an update");
        }
        assert_eq!(
            state.leaves().map(|leaf| leaf.steps()).collect::<Vec<_>>(),
            [3, 3]
        );
    }
}

/// Some of three variables, each by its index, under these names.
type Shown = &'static [(&'static str, usize)];

/// Shows other variables from the second visit on.
struct Shifting {
    variables: [Var; 3],
    visits: AtomicUsize,
    first: Shown,
    later: Shown,
}

impl Model for Shifting {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        let shown = if self.visits.fetch_add(1, Ordering::Relaxed) == 0 {
            self.first
        } else {
            self.later
        };
        shown
            .iter()
            .for_each(|(name, index)| visitor.child(name, &self.variables[*index]));
    }
}

#[test]
fn models_that_change_between_visits() {
    let variable = |length: usize| {
        Var::from_tensor(&random(length as u64, &[length], F32, &Device::Cpu)).expect("a variable")
    };
    let steps = |engine, first, later| {
        let model = Shifting {
            variables: [variable(4), variable(30), variable(4)],
            visits: AtomicUsize::new(0),
            first,
            later,
        };
        let mut state = setup(Adam::new(0.1), &model).expect("a state");
        let gradient = |index: usize| {
            model.variables[index]
                .as_detached_tensor()
                .copy()
                .expect("a copy")
        };
        let gradients: Grads = [("a".to_string(), gradient(0)), ("b".to_string(), gradient(1))].into();
        (0..3)
            .map(|_| {
                Update::new(&mut state)
                    .engine(engine)
                    .apply(&model, &gradients)
                    .map(|outcome| outcome.applied)
            })
            .collect::<Result<Vec<_>>>()
    };
    const FIRST: Shown = &[("a", 0), ("b", 1)];
    /// The other way round, one of them twice, and each under the other's name.
    const SAME: [Shown; 4] = [
        &[("b", 1), ("a", 0)],
        &[("a", 0), ("a", 0), ("b", 1)],
        &[("b", 1), ("a", 0), ("b", 1)],
        &[("a", 1), ("b", 0)],
    ];
    /// Another variable under a known name, one too many, one too few, and none.
    const OTHER: [Shown; 4] = [
        &[("a", 2), ("b", 1)],
        &[("a", 0), ("b", 1), ("c", 2)],
        &[("a", 0)],
        &[],
    ];
    for engine in engines() {
        for later in SAME {
            assert_eq!(steps(engine, FIRST, later).expect("updates"), [2, 2, 2]);
        }
        for later in OTHER {
            let error = steps(engine, FIRST, later).expect_err("a refusal");
            let is_said = ["it is not in this state", "but the model does not"]
                .iter()
                .any(|words| error.to_string().contains(words));
            assert!(error.kind() == ErrorKind::Model && is_said, "{error}");
        }
    }
}

/// Answers with a longer tensor each time that it is asked.
struct Growing(AtomicUsize, Vec<Tensor>);

impl Gradients for Growing {
    fn gradient(&self, _path: &str, _x: &dyn Lend) -> Option<&dyn Lend> {
        let asked = self.0.fetch_add(1, Ordering::Relaxed);
        self.1
            .get(asked.min(self.1.len() - 1))
            .map(|gradient| gradient as &dyn Lend)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        std::iter::empty()
    }

    fn by_path(&self) -> bool {
        true
    }
}

#[test]
fn gradients_that_answer_differently_each_time() {
    let tensors = || {
        (0..4)
            .map(|i| random(i, &[10 + 40 * i as usize], F32, &Device::Cpu))
            .collect::<Vec<_>>()
    };
    for engine in engines() {
        let model = model(&[random(1, &[10], F32, &Device::Cpu)]);
        let mut state =
            setup(OptimiserChain::new((ClipNorm::new(1.0), Adam::new(0.1))), &model).expect("a state");
        // The first answer fits and is the only one that is asked for.
        Update::new(&mut state)
            .engine(engine)
            .apply(&model, &Growing(AtomicUsize::new(0), tensors()))
            .expect("an update");
        let before: Snapshot = snapshot(&model, &state);
        let error = Update::new(&mut state)
            .engine(engine)
            .apply(&model, &Growing(AtomicUsize::new(1), tensors()))
            .expect_err("a refusal");
        is_kind(&error, ErrorKind::Tensor, &["the gradient has shape"]);
        assert_eq!(error.got(), Some("[50]"), "{error}");
        assert_same(&[snapshot(&model, &state)], &[before], format!("{engine:?}"));
    }
}
