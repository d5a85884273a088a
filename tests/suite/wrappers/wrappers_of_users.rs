//! Wrappers as they are written outside of the crate, with what is public, each in as few lines as it takes.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, Adafactor, Adam, AdamW, Adjust, Arithmetic, ClipNorm, Descent, Describe, Describer, Ema,
    Evaluation, Flow, Gradient, Lion, LossScaler, MixedPrecision, Momentum, OptimiserChain, Parameter, Parts,
    Prodigy, Result, Rule, ScheduleFree, Slots, State, StateTree, Update, range, setup, update, value::Value,
};

use crate::rules::laws::assert_lawful;
use support::common::{bits, grads, model, not_finite, tensor, values};

/// The steps of a rule, of which the first n are shorter: step t is t / n as long.
#[derive(Clone, Debug, PartialEq)]
pub struct WarmUp<R> {
    pub n: u64,
    pub inner: R,
}

impl<R: Rule + Clone> Describe for WarmUp<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("WarmUp");
        rule.field("warm_up", &mut self.n, 100, range::at_least_one);
        rule.holds(&mut self.inner);
    }
}

impl<R: Rule + Clone> Rule for WarmUp<R> {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::empty().with_counter("warm").with_held(self, x)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let Parts { counters, held, .. } = state.parts();
        self.inner.apply(held.inner()?, x, dx)?.and_then(|dx| {
            let (dx, t) = dx.next_step(counters)?;
            Ok(dx.scale((t as f64 / self.n as f64).min(1.0)))
        })
    }
}

/// The first rule for n steps, then the second.
#[derive(Clone, Debug, PartialEq)]
pub struct Handover<A, B> {
    pub n: u64,
    pub first: A,
    pub second: B,
}

impl<A: Rule + Clone, B: Rule + Clone> Describe for Handover<A, B> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("Handover");
        rule.field("handover", &mut self.n, 100, range::any);
        rule.alternative(&mut self.first);
        rule.alternative(&mut self.second);
    }
}

impl<A: Rule + Clone, B: Rule + Clone> Rule for Handover<A, B> {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::empty().with_counter("made").with_held(self, x)
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let is_first = state.counter("made")? < self.n;
        let Parts { counters, held, .. } = state.parts();
        let [first, second] = held.members()?;
        let flow = if is_first {
            self.first.apply(first, x, dx)?
        } else {
            self.second.apply(second, x, dx)?
        };
        flow.and_then(|dx| Ok(dx.next_step(counters)?.0))
    }

    fn evaluation<'s>(&self, state: &'s State) -> Result<Option<Evaluation<'s>>> {
        let [first, second] = state.held()?;
        // The rule that made the last step.
        if state.counter("made")? <= self.n {
            self.first.evaluation(first)
        } else {
            self.second.evaluation(second)
        }
    }
}

/// The signs of a rule's steps.
#[derive(Clone, Debug, PartialEq)]
pub struct SignOf<R>(pub R);

impl<R: Rule + Clone> Describe for SignOf<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("SignOf");
        rule.holds(&mut self.0);
    }
}

impl<R: Rule + Clone> Rule for SignOf<R> {
    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        self.0
            .apply(state.parts().held.inner()?, x, dx)?
            .and_then(|dx| Ok(dx.map(Sign, Slots::none())))
    }
}

#[derive(Clone, Copy)]
struct Sign;

impl Arithmetic for Sign {
    type Slots<T> = [T; 0];

    fn step<V: Value>(self, _x: V, dx: V, _: &mut [V; 0]) -> V {
        dx.sign()
    }
}

fn warm_up<R: Rule + Clone>(n: u64, inner: R) -> WarmUp<R> {
    WarmUp { n, inner }
}

fn handover<A: Rule + Clone, B: Rule + Clone>(n: u64, first: A, second: B) -> Handover<A, B> {
    Handover { n, first, second }
}

/// Around every kind of rule: of each element, the tensor and the model; with windows, averages and no state;
/// in each other.
#[test]
fn wrappers_from_outside_keep_every_law() {
    let rules: [Box<dyn Rule>; 10] = [
        Box::new(warm_up(3, Descent::new(0.1))),
        Box::new(warm_up(
            3,
            OptimiserChain::new((ClipNorm::new(0.5), AdamW::new(0.1))),
        )),
        Box::new(OptimiserChain::new((
            AccumGrad::new(2),
            warm_up(2, OptimiserChain::new((Momentum::new(0.1), Ema::new(0.9)))),
        ))),
        Box::new(warm_up(
            2,
            OptimiserChain::new((AccumGrad::new(3), Adafactor::new(0.1))),
        )),
        Box::new(warm_up(4, Prodigy::default())),
        Box::new(handover(3, Adam::new(0.1), Momentum::new(0.1))),
        Box::new(handover(
            2,
            warm_up(3, AdamW::new(0.1)),
            handover(2, Adafactor::new(0.1), Lion::new(0.1)),
        )),
        Box::new(SignOf(Descent::new(0.1))),
        Box::new(OptimiserChain::new((
            SignOf(warm_up(2, Adam::new(0.1))),
            Descent::new(0.1),
        ))),
        Box::new(warm_up(
            2,
            SignOf(Box::new(handover(3, Descent::new(0.1), Lion::new(0.1))) as Box<dyn Rule>),
        )),
    ];
    rules.iter().for_each(|rule| assert_lawful(&**rule));
}

#[test]
fn wrappers_are_adjusted_by_name_and_by_place() {
    let rule = |n, eta, beta| {
        OptimiserChain::new((
            ClipNorm::new(0.5),
            warm_up(
                n,
                handover(
                    4,
                    Adam {
                        beta,
                        ..Adam::new(eta)
                    },
                    SignOf(Descent::new(eta)),
                ),
            ),
        ))
    };
    let mut adjusted = rule(3, 0.1, (0.9, 0.999));
    assert_eq!(
        adjusted.name(),
        "OptimiserChain(ClipNorm, WarmUp(Handover(Adam, SignOf(Descent))))"
    );
    let own = [
        "0.omega",
        "0.p",
        "0.non_finite",
        "1.warm_up",
        "1.handover",
        "1.0.eta",
        "1.0.beta",
        "1.0.epsilon",
        "1.0.bias_correction",
        "1.1.eta",
    ];
    assert_eq!(adjusted.places(), own);
    adjusted
        .adjust_fields([("warm_up", 5.into()), ("1.0.beta", (0.8, 0.99).into())])
        .expect("fields");
    adjusted.adjust(0.01).expect("a learning rate");
    assert_eq!(adjusted, rule(5, 0.01, (0.8, 0.99)));
    let error = adjusted.adjust_field("warm_up", 0).expect_err("no step at all");
    assert!(
        error.to_string().starts_with("WarmUp: warm_up is 0, expected "),
        "{error}"
    );

    let x = model(&[tensor(1, &[4], DType::F32)]);
    let mut state = setup(rule(3, 0.1, (0.9, 0.999)), &x).expect("a state");
    state.all().adjust_field("1.1.eta", 0.5).expect("a field");
    let leaf = state.leaf("0").expect("the leaf");
    assert_eq!(
        (leaf.field("1.0.eta"), leaf.field("1.1.eta")),
        (Some(0.1.into()), Some(0.5.into()))
    );
    assert_eq!(
        leaf.counters()
            .into_iter()
            .map(|(name, _)| name)
            .collect::<Vec<_>>(),
        ["1.warm", "1.made", "1.0.t", "1.1.t"]
    );
}

/// Steps of a descent whose numbers are exact.
fn descend(state: &mut StateTree, x: &support::common::Vars, steps: usize) {
    for _ in 0..steps {
        update(state, x, &grads([Tensor::ones(2, DType::F32, &Device::Cpu).ok()])).expect("an update");
    }
}

#[test]
fn steps_grow_and_go_over_as_they_are_said_to() {
    let x = model(&[Tensor::zeros(2, DType::F32, &Device::Cpu).expect("zeros")]);
    let mut state = setup(
        warm_up(4, handover(3, Descent::new(4.0), SignOf(Descent::new(8.0)))),
        &x,
    )
    .expect("a state");
    for expected in [-1.0, -3.0, -6.0, -7.0, -8.0] {
        descend(&mut state, &x, 1);
        assert_eq!(values(&x["0"]), [expected; 2]);
    }
}

/// Of two rules with weights to evaluate with those of the one that made the last step.
#[test]
fn averages_are_those_of_the_rule_that_acts() {
    let averaging = |eta| OptimiserChain::new((Descent::new(eta), Ema::new(0.5)));
    let x = model(&[Tensor::zeros(2, DType::F32, &Device::Cpu).expect("zeros")]);
    let mut state = setup(
        MixedPrecision::new(
            DType::F64,
            warm_up(1, handover(2, averaging(1.0), averaging(2.0))),
        ),
        &x,
    )
    .expect("a state");
    for place in ["0.1.average", "0.1.average", "1.1.average", "1.1.average"] {
        descend(&mut state, &x, 1);
        let kept = state
            .leaf("0")
            .and_then(|leaf| leaf.tensor(place).ok())
            .expect("an average");
        let found = state.averages(&x).expect("averages");
        assert_eq!(values(&found["0"]), values(&kept), "{place}");
        assert_ne!(values(&found["0"]), values(&x["0"]), "{place}");
    }
    // Arithmetic on what the rule inside keeps.
    let bare = model(&[tensor(1, &[2], DType::F32)]);
    let wrapped = model(&[tensor(1, &[2], DType::F32)]);
    let mut states = (
        setup(ScheduleFree::new(0.1), &bare).expect("a state"),
        setup(warm_up(1, ScheduleFree::new(0.1)), &wrapped).expect("a state"),
    );
    descend(&mut states.0, &bare, 3);
    descend(&mut states.1, &wrapped, 3);
    let found = (
        states.0.averages(&bare).expect("averages"),
        states.1.averages(&wrapped).expect("averages"),
    );
    assert_eq!(bits(&found.0["0"]), bits(&found.1["0"]));
}

#[test]
fn a_skipped_step_is_not_counted_by_a_wrapper() {
    let rule = || {
        MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((AccumGrad::new(2), warm_up(3, Adam::new(0.1)))),
        )
    };
    let [scaled, plain] = [(); 2].map(|()| model(&[tensor(1, &[5], DType::BF16)]));
    let mut states = [&scaled, &plain].map(|model| setup(rule(), model).expect("a state"));
    let mut scaler = LossScaler::dynamic();
    for call in 0..6 {
        let gradient = tensor(2 + call, &[5], DType::F32);
        let loss = scaler
            .scale(&Tensor::new(1f32, &Device::Cpu).expect("a loss"))
            .expect("a scaled loss");
        let scale = f64::from(loss.tensor().to_scalar::<f32>().expect("a scale"));
        let spoilt = (call == 3).then(|| {
            Update::new(&mut states[0])
                .scaler(&mut scaler)
                .apply(&scaled, &grads([(&gradient * f64::INFINITY).ok()]))
        });
        if let Some(skipped) = spoilt {
            assert_eq!(skipped.expect("an update").status, not_finite("0"));
            continue;
        }
        Update::new(&mut states[0])
            .scaler(&mut scaler)
            .apply(&scaled, &grads([(&gradient * scale).ok()]))
            .expect("an update");
        update(&mut states[1], &plain, &grads([Some(gradient)])).expect("an update");
    }
    assert_eq!(bits(&scaled["0"]), bits(&plain["0"]));
    let counters = states.map(|state| state.leaf("0").map(|leaf| leaf.counters()));
    assert_eq!(counters[0], counters[1]);
}

#[test]
fn a_configuration_has_wrappers_from_outside() {
    use optimisers::config::{OptimiserConfig, Registry};

    let registry = Registry::default()
        .with_wrapper(|inner| warm_up(100, inner))
        .with_pair(|first, second| handover(100, first, second))
        .with_wrapper(SignOf);
    let text = r#"{"WarmUp": {"warm_up": 3, "inner": {"Handover": {"members": [{"SignOf": {"inner": "Descent"}}, {"Adam": {"eta": 0.5}}]}}}}"#;
    let config: OptimiserConfig = serde_json::from_str(text).expect("a configuration");
    let optimiser = registry.optimiser(&config).expect("a rule");
    assert_eq!(optimiser.name(), "WarmUp(Handover(SignOf(Descent), Adam))");
    assert_eq!(
        (optimiser.field("warm_up"), optimiser.field("handover")),
        (Some(3.into()), Some(100.into()))
    );
    assert_eq!(optimiser.field("1.eta"), Some(0.5.into()));
}
