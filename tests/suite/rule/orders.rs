//! The order of rules in a chain: which is warned of, and which is not.

use candle_core::{DType, Device};
use optimisers::{
    AccumGrad, Adam, AdamW, AdaptiveClip, Cautious, Clamp, ClipGlobalNorm, ClipGrad, ClipNorm,
    DecoupledDecay, Descent, Describe, Describer, Ema, Fallback, Flow, Gradient, Lion, Lookahead,
    MixedPrecision, Momentum, Muon, OptimiserChain, Parameter, Q8, RMSProp, Result, Role, Rule, Scale,
    SkipOutliers, State, StoreAs, UniformAverage, Warning, WeightDecay, rules, setup, update,
};

use crate::rule::learning_rates::{Boxed, OF_TORCH, Switch};
use support::common::{Vars, for_any_shape, grads, logged, model, random, rules_and_chains};

fn boxed(rule: impl Rule) -> Boxed {
    Box::new(rule)
}

fn matrix() -> Vars {
    model(&[random(1, &[3, 2], DType::F32, &Device::Cpu)])
}

/// What is wrong with a rule.
fn faults(rule: impl Rule + Clone) -> Vec<String> {
    match setup(rule, &matrix()).expect("a state").warnings() {
        [] => Vec::new(),
        [Warning::WrongOrder { path, faults, .. }] if path == "0" => faults.clone(),
        others => panic!("{others:?}"),
    }
}

/// A rule that limits or averages what the rule inside makes says so after it.
#[derive(Clone, Debug)]
struct Afterwards<R> {
    role: Role,
    inner: R,
}

impl<R: Rule + Clone> Describe for Afterwards<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("Afterwards");
        rule.holds(&mut self.inner);
        rule.role(self.role);
    }
}

impl<R: Rule + Clone> Rule for Afterwards<R> {
    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        self.inner.apply(state.parts().held.inner()?, x, dx)
    }
}

#[test]
fn a_role_stands_where_it_is_said() {
    let around = |role, inner| Afterwards { role, inner };
    assert_eq!(faults(around(Role::Average, Adam::new(0.1))), [] as [&str; 0]);
    let [clipped] = &faults(around(Role::Clip, Adam::new(0.1)))[..] else {
        panic!("one fault")
    };
    assert!(
        clipped.starts_with("Afterwards comes after Adam, so Afterwards limits the steps of Adam"),
        "{clipped}"
    );
    let [averaged] = &faults(OptimiserChain::new((
        around(Role::Average, Adam::new(0.1)),
        Descent::new(1.0),
    )))[..] else {
        panic!("one fault")
    };
    assert!(
        averaged.starts_with("Afterwards comes before Descent"),
        "{averaged}"
    );
}

#[test]
fn an_order_that_cannot_be_meant_is_warned_of_once() {
    let rule = || {
        MixedPrecision::new(
            DType::F64,
            OptimiserChain::new((Adam::new(0.1), ClipNorm::new(1.0))),
        )
    };
    let model = matrix();
    let (mut state, lines) = logged(|| setup(rule(), &model).expect("a state"));
    let [
        expected @ Warning::WrongOrder {
            rule: name, faults, ..
        },
    ] = state.warnings()
    else {
        panic!("{:?}", state.warnings())
    };
    assert_eq!(
        (name.as_str(), faults.len(), lines),
        ("OptimiserChain(Adam, ClipNorm)", 1, vec![])
    );
    let (expected, text) = (expected.clone(), expected.to_string());
    assert!(text.starts_with(
        "the rules of \"0\", OptimiserChain(Adam, ClipNorm), are in a wrong order: ClipNorm comes after Adam"
    ));
    let gradients = || grads(model.values().map(|x| x.ones_like().ok()));
    let (outcomes, lines) =
        logged(|| [(); 3].map(|()| update(&mut state, &model, &gradients()).expect("an update")));
    assert_eq!(
        (outcomes.map(|outcome| outcome.warnings), lines),
        ([vec![expected.clone()], vec![], vec![]], vec![text])
    );

    // Another rule in the place of a right one is met, too, and one that is gone before a step is not.
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    assert_eq!(state.warnings(), []);
    state.all().replace(rule(), &model).expect("another rule");
    assert_eq!(state.warnings(), [expected]);
    state.all().replace(Adam::new(0.1), &model).expect("another rule");
    assert_eq!(state.warnings(), []);
}

#[test]
fn each_wrong_order_is_named_with_the_right_one() {
    let cases: [(Boxed, &[&[&str]]); 15] = [
        (
            boxed(OptimiserChain::new((Ema::new(0.9), Adam::new(0.1)))),
            &[&["Ema comes before Adam", "put Ema after Adam"]],
        ),
        (
            boxed(OptimiserChain::new((
                UniformAverage::default(),
                Descent::new(0.1),
            ))),
            &[&["UniformAverage comes before Descent"]],
        ),
        (
            boxed(OptimiserChain::new((
                Momentum::new(1.0),
                Ema::new(0.9),
                Descent::new(0.1),
            ))),
            &[&["Ema comes before Descent"]],
        ),
        (
            boxed(OptimiserChain::new((Lookahead::new(6), Muon::new(0.1)))),
            &[&["Lookahead comes before Muon"]],
        ),
        (
            boxed(OptimiserChain::new((Adam::new(0.1), ClipGrad::new(1.0)))),
            &[&["ClipGrad comes after Adam", "put ClipGrad before Adam"]],
        ),
        (
            boxed(OptimiserChain::new((Lion::new(0.1), ClipNorm::new(1.0)))),
            &[&["ClipNorm comes after Lion"]],
        ),
        (
            boxed(OptimiserChain::new((
                Muon::new(0.1),
                WeightDecay::new(0.1),
                ClipGlobalNorm::new(1.0),
            ))),
            &[&["ClipGlobalNorm comes after Muon"]],
        ),
        (
            boxed(OptimiserChain::new((AdamW::new(0.1), AdaptiveClip::new(1.0)))),
            &[&["AdaptiveClip comes after AdamW"]],
        ),
        (
            boxed(OptimiserChain::new((AdamW::new(0.1), AccumGrad::new(2)))),
            &[&["AccumGrad comes after AdamW", "put AccumGrad before AdamW"]],
        ),
        (
            boxed(OptimiserChain::new((Momentum::new(0.1), AccumGrad::new(2)))),
            &[&["AccumGrad comes after Momentum"]],
        ),
        (
            boxed(OptimiserChain::new((Adam::new(0.1), AdamW::new(0.1)))),
            &[&["AdamW comes after Adam,", "leave one of the two out"]],
        ),
        (
            boxed(OptimiserChain::new((
                RMSProp::new(1.0),
                Momentum::new(1.0),
                Muon::new(0.1),
            ))),
            &[&["Muon comes after RMSProp"]],
        ),
        // Through wrappers and chains in chains.
        (
            boxed(OptimiserChain::new((
                OptimiserChain::new((
                    None::<Ema>,
                    DecoupledDecay::new(0.1, StoreAs::all(Q8, Cautious::new(AdamW::new(0.1)))),
                )),
                vec_of([boxed(ClipNorm::new(1.0))]),
            ))),
            &[&["ClipNorm comes after AdamW"]],
        ),
        (
            boxed(OptimiserChain::new((
                ClipNorm::new(1.0),
                Fallback::new(Muon::new(0.1), Adam::new(0.1)),
                ClipNorm::new(1.0),
            ))),
            &[&["ClipNorm comes after Muon"]],
        ),
        // All that is wrong.
        (
            boxed(OptimiserChain::new((
                Ema::new(0.9),
                Adam::new(0.1),
                AccumGrad::new(2),
                ClipNorm::new(1.0),
                AdamW::new(0.1),
            ))),
            &[
                &["Ema comes before Adam"],
                &["AccumGrad comes after Adam"],
                &["ClipNorm comes after Adam"],
                &["AdamW comes after Adam,"],
            ],
        ),
    ];
    for (rule, expected) in cases {
        let (name, found) = (rule.name(), faults(rule));
        assert_eq!(found.len(), expected.len(), "{name}: {found:?}");
        for (fault, words) in found.iter().zip(expected) {
            assert!(words.iter().all(|word| fault.contains(word)), "{name}: {fault}");
        }
    }
}

fn vec_of<const N: usize>(members: [Boxed; N]) -> OptimiserChain<Vec<Boxed>> {
    OptimiserChain::new(members.into())
}

/// The chains of README, of the guide and of the rules' pages, with every rule in the place of theirs.
#[test]
fn no_order_that_is_recommended_is_warned_of() {
    let mut right: Vec<Boxed> = rules_and_chains();
    right.extend(OF_TORCH.iter().map(|(_, with_rate)| with_rate(0.1)));
    let makes_steps =
        |rule: &Boxed| !faults(OptimiserChain::new((rule.clone(), AccumGrad::new(2)))).is_empty();
    for rule in rules::catalogue()
        .into_iter()
        .map(|listing| for_any_shape(listing.rule))
        .filter(makes_steps)
    {
        right.push(boxed(OptimiserChain::new((
            ClipGlobalNorm::new(1.0),
            rule.clone(),
        ))));
        right.push(boxed(OptimiserChain::new((AccumGrad::new(4), rule.clone()))));
        right.push(boxed(OptimiserChain::new((rule.clone(), Ema::new(0.999)))));
        right.push(boxed(OptimiserChain::new((
            rule.clone(),
            Lookahead::new(6),
            UniformAverage::default(),
        ))));
        right.push(boxed(OptimiserChain::new((
            SkipOutliers::default(),
            ClipGlobalNorm::new(1.0),
            rule.clone(),
        ))));
        right.push(boxed(OptimiserChain::new((
            ClipNorm::new(1.0),
            AccumGrad::new(2),
            ClipGrad::new(1.0),
            WeightDecay::new(0.1),
            rule.clone(),
        ))));
        right.push(boxed(OptimiserChain::new((
            Scale::new(-1.0),
            rule.clone(),
            Momentum::new(1.0),
            Descent::new(0.1),
            Clamp::new((0.0, 1.0)),
        ))));
    }
    let (muon, adamw) = (Muon::new(0.02), AdamW::new(3e-4));
    right.push(boxed(OptimiserChain::new((
        ClipGlobalNorm::new(1.0),
        muon.with_fallback(adamw),
        Ema::new(0.9),
    ))));
    assert!(right.len() > 300, "{}", right.len());
    for rule in right {
        let name = rule.name();
        assert_eq!(faults(rule), [""; 0], "{name}");
    }
}

/// A rule that is added to the catalogue says what it is for, unless it may stand anywhere.
#[test]
fn all_rules_but_those_that_may_stand_anywhere_say_their_roles() {
    let of = |make: fn(Boxed) -> Boxed| -> Vec<&'static str> {
        let all = rules::catalogue().into_iter();
        all.filter(|listing| !faults(make(for_any_shape(listing.rule.clone()))).is_empty())
            .map(|listing| listing.name)
            .collect()
    };
    let averages = of(|rule| boxed(OptimiserChain::new((rule, Descent::new(0.1)))));
    assert_eq!(averages, ["Clamp", "Lookahead", "Ema", "UniformAverage"]);
    let behind_steps = of(|rule| boxed(OptimiserChain::new((Adam::new(0.1), rule))));
    let steps = of(|rule| boxed(OptimiserChain::new((rule, AccumGrad::new(2)))));
    let silent: Vec<&str> = rules::catalogue()
        .into_iter()
        .map(|listing| listing.name)
        .filter(|name| {
            [&averages, &behind_steps, &steps]
                .iter()
                .all(|said| !said.contains(name))
        })
        .collect();
    assert_eq!(
        silent,
        [
            "WeightDecay",
            "SignDecay",
            "Scale",
            "SkipOutliers",
            "Centralise",
            "GradNoise"
        ]
    );
    let linear: Vec<&str> = steps
        .into_iter()
        .filter(|name| !behind_steps.contains(name))
        .collect();
    assert_eq!(linear, ["Descent", "Momentum", "Nesterov", "ScheduleFreeSGD"]);
}

/// Of alternatives one acts, so they are in no order.
#[test]
fn alternatives_are_in_no_order() {
    assert_eq!(faults(Switch::new(Adam::new(0.1), AdamW::new(0.1))), [""; 0]);
    assert_eq!(
        faults(OptimiserChain::new((
            Switch::new(Adam::new(0.1), Lion::new(0.1)),
            Ema::new(0.9)
        ))),
        [""; 0]
    );
    let chain = OptimiserChain::new((Switch::new(Scale::new(1.0), Adam::new(0.1)), ClipNorm::new(1.0)));
    assert!(faults(chain)[0].starts_with("ClipNorm comes after Adam"));
    let inside = Switch::new(
        Scale::new(1.0),
        OptimiserChain::new((Ema::new(0.9), Descent::new(0.1))),
    );
    assert!(faults(inside)[0].starts_with("Ema comes before Descent"));
}
