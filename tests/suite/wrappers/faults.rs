//! Wrappers of one's own that forget something: nothing goes on in silence.

use candle_core::DType;
use optimisers::{
    Adam, Descent, Describe, Describer, Ema, ErrorKind, Flow, Gradient, Kind, Momentum, OptimiserChain,
    Parameter, Parts, Result, Rule, Setup, State, range, setup, update,
};

use crate::rules::laws::assert_lawful;
use support::common::{grads, is_kind, model, tensor};
use support::threads::on;

/// What the author of a wrapper may forget.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    NameOfTheRuleInside,
    HeldState,
    SecondHeldState,
    Kind,
    FieldFirst,
    OnePlaceForTwo,
    NameOfWhatIsHeld,
    Counter,
}

#[derive(Clone, Debug)]
struct Faulty {
    fault: Fault,
    inner: Adam,
    other: Descent,
}

impl Describe for Faulty {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        if self.fault != Fault::Kind {
            rule.kind("Faulty");
        }
        let Faulty { fault, inner, other } = self;
        match fault {
            Fault::NameOfWhatIsHeld => {}
            Fault::OnePlaceForTwo => {
                rule.holds(inner);
                rule.holds(other);
            }
            Fault::FieldFirst => {
                rule.holds(inner);
                rule.field("late", &mut other.eta, 1.0, range::positive);
            }
            _ => rule.holds(inner),
        }
    }
}

impl Rule for Faulty {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        match self.fault {
            Fault::NameOfTheRuleInside => State::empty().with_counter("t").with_held(self, x),
            Fault::HeldState => Ok(State::empty().with_counter("own")),
            Fault::SecondHeldState => State::empty().with_held(self, x)?.with_held(self, x),
            _ => State::empty().with_held(self, x),
        }
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { counters, held, .. } = state.parts();
        self.inner
            .apply(held.inner()?, x, dx)?
            .and_then(|dx| Ok(dx.next_step(counters)?.0))
    }
}

/// Nothing that is forgotten goes on in silence, and what can be seen at `setup` is refused there.
#[test]
fn what_a_wrapper_forgets_is_said() {
    let x = || model(&[tensor(1, &[4], DType::F32)]);
    let rule = |fault| Faulty {
        fault,
        inner: Adam::new(0.1),
        other: Descent::new(0.1),
    };
    for (fault, expected) in [
        (
            Fault::NameOfTheRuleInside,
            "the state of Faulty(Adam) has two entries \"t\"; in the `init` of the outer rule, give \
             tensors, counters and numbers other names",
        ),
        (
            Fault::HeldState,
            "`init` of Faulty(Adam) made for its held rules is 0, expected 1; call `State::with_held` once",
        ),
        (
            Fault::SecondHeldState,
            "`init` of Faulty(Adam) made for its held rules is 2, expected 1",
        ),
        (
            Fault::Kind,
            "`Describe::describe` of a rule is wrong: it names no kind; call `Describer::kind` first",
        ),
        (
            Fault::FieldFirst,
            "`Describe::describe` of Faulty is wrong: it names fields or settings after a held rule",
        ),
        (
            Fault::OnePlaceForTwo,
            "`Describe::describe` of Faulty is wrong: it calls `holds` twice",
        ),
    ] {
        for optimiser in support::common::rounding_to_nearest(DType::F32, Box::new(rule(fault))) {
            is_kind(
                &setup(optimiser, &x()).expect_err("a fault"),
                ErrorKind::Contract,
                &[expected],
            );
        }
        let x = x();
        let mut state = setup(Descent::new(0.1), &x).expect("a state");
        is_kind(
            &state.all().replace(rule(fault), &x).expect_err("a fault"),
            ErrorKind::Contract,
            &[expected],
        );
    }
    for (fault, parts) in [
        (Fault::NameOfWhatIsHeld, "states of held rules"),
        (Fault::Counter, "counters"),
    ] {
        let x = x();
        let mut state = setup(rule(fault), &x).expect("a state");
        let error = update(&mut state, &x, &grads([Some(tensor(2, &[4], DType::F32))])).expect_err("a fault");
        is_kind(
            &error,
            ErrorKind::Contract,
            &[&format!("the number of {parts} in the state of a rule is")],
        );
        assert_eq!(
            (error.path(), error.got(), error.expected()),
            (Some("0"), Some("0"), Some("1")),
            "{error}"
        );
    }
    let state = State::empty().with_counter("own");
    let error = state.counter("other").expect_err("no such counter").to_string();
    let expected = "expected one of: own; add the counter in `Rule::init` with `State::with_counter`";
    assert_eq!(
        error,
        format!("there is no counter in the state with the name \"other\", {expected}")
    );
}

/// One of two rules, of which nothing says which.
#[derive(Clone, Debug)]
struct Either(Box<dyn Rule>, Box<dyn Rule>);

impl Describe for Either {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("Either");
        rule.alternative(&mut self.0);
        rule.alternative(&mut self.1);
    }
}

impl Rule for Either {
    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let [first, _] = state.parts().held.members()?;
        self.0.apply(first, x, dx)
    }
}

#[test]
fn weights_of_an_alternative_that_may_not_act_are_refused() {
    let x = model(&[tensor(1, &[4], DType::F32)]);
    let averaging = || Box::new(OptimiserChain::new((Descent::new(0.1), Ema::new(0.5))));
    let with = |rule: Either| {
        let mut state = setup(rule, &x).expect("a state");
        update(&mut state, &x, &grads([Some(tensor(2, &[4], DType::F32))])).expect("an update");
        state.averages(&x)
    };
    for rule in [
        Either(averaging(), Box::new(Descent::new(0.1))),
        Either(Box::new(Descent::new(0.1)), averaging()),
    ] {
        let error = with(rule).expect_err("no word of which acts").to_string();
        assert!(
            error.contains("Either(") && error.contains("does not choose one of them by `evaluation`"),
            "{error}"
        );
    }
    let without = with(Either(Box::new(Descent::new(0.1)), Box::new(Adam::new(0.1))));
    assert!(without.is_ok(), "{without:?}");
}

/// The step of a rule without half of its mean, by a function of the whole tensor.
#[derive(Clone, Debug)]
struct Centred {
    is_divisible: bool,
    inner: Momentum,
}

impl Describe for Centred {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("Centred");
        rule.holds(&mut self.inner);
    }
}

impl Rule for Centred {
    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { slots, held, .. } = state.parts();
        self.inner.apply(held.inner()?, x, dx)?.and_then(|dx| {
            Ok(dx.map_tensors(slots, |_, dx, _| Ok(dx.broadcast_sub(&(dx.mean_all()? * 0.5)?)?)))
        })
    }

    fn kind(&self) -> Kind {
        Kind::WholeTensor
    }

    fn is_divisible(&self) -> bool {
        self.is_divisible
    }
}

#[test]
fn a_wrapper_with_a_function_of_the_whole_tensor_keeps_every_law() {
    assert_lawful(&Centred {
        is_divisible: false,
        inner: Momentum::new(0.1),
    });
}

/// By default a wrapper is as divisible as what it is around, and a function would get a part.
#[test]
fn a_function_of_the_whole_tensor_does_not_get_a_part() {
    let errors = on(2, |world| {
        let x = model(&[tensor(1, &[40_000], DType::F32)]);
        let mut state = Setup::over(&world)
            .build(
                Centred {
                    is_divisible: true,
                    inner: Momentum::new(0.1),
                },
                &x,
            )
            .expect("a state");
        update(&mut state, &x, &grads([Some(tensor(2, &[40_000], DType::F32))]))
            .expect_err("a part")
            .to_string()
    });
    let expected = "parameter \"0\": Centred(Momentum) is declared divisible, but plans a function of the \
                    whole tensor";
    assert!(errors.iter().all(|error| error.contains(expected)), "{errors:?}");
}
