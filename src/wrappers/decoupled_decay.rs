use crate::error::{Error, ErrorKind, Result};
use crate::numbers::value::{Arithmetic, Value};
use crate::rule::{
    Describe, Describer, Description, Flow, Gradient, Parameter, RATE, Role, Rule, Slots, State,
    conflicting_rates_error, out_of_range, range, unknown_name_error,
};

/// Decoupled weight decay for any rule, proportional to the rule's learning rate.
///
/// ```text
/// u   = rule(x, dx)
/// dx' = u + η·λ·x                        η is the rule's eta
/// dx' = u + η·λ·x where u·x ≥ 0, else u  cautious
/// dx' = u + λ·η² / η_max·x               corrected
/// ```
///
/// The wrapper is for rules without a λ of their own. A rule with a λ would decay a parameter twice, by its
/// own λ and by that of the wrapper. Two methods choose another form of decay:
///
/// - [`cautious`](DecoupledDecay::cautious): an element decays only if the step moves it towards zero or does
///   not move it (Chen et al. 2025, "Cautious Weight Decay", [arXiv
///   2510.12402](https://arxiv.org/abs/2510.12402));
/// - [`corrected`](DecoupledDecay::corrected): the decay follows the square of the learning rate, so that the
///   norms of gradients do not grow at the end of a schedule (AdamC, Defazio 2025, [arXiv
///   2506.02285](https://arxiv.org/abs/2506.02285)). The paper has this form for weights before a
///   normalisation, and the usual decay for others.
///
/// η is read in each step, so a [schedule](crate::StateTree::schedule) changes the decay, too. Around a
/// chain, η is the product of the members' rates. The decay has no state, and is part of the wrapped rule's
/// one pass over memory.
///
/// λ and η_max can be adjusted by the names `decay_lambda` and `decay_eta_max`.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{DecoupledDecay, Lion, setup, update};
///
/// // The first element moves away from zero, and does not decay.
/// let x = Var::new(&[1f32, 1.0], &Device::Cpu)?;
/// let mut state = setup(DecoupledDecay::new(0.5, Lion::new(0.5)).cautious(), &x)?;
/// update(&mut state, &x, &[("", Tensor::new(&[-3f32, 3.0], &Device::Cpu)?)])?;
/// assert_eq!(x.to_vec1::<f32>()?, [1.5, 0.25]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`setup`](crate::setup) refuses
///
/// - a rule without `eta`, and [alternatives](crate::Describer::alternative) with different rates. A
///   [`Fallback`](crate::Fallback) inside is allowed: each parameter decays by the rate of its rule. A
///   corrected decay needs equal rates, because one η_max does not fit two;
/// - a rule with a [copy of the parameter](crate::Slot::parameter) in its state, because the copy would not
///   decay. An average belongs after this rule, in a chain around both. Schedule-free rules and
///   [`Prodigy`](crate::Prodigy) have a λ of their own; before [`MADGRAD`](crate::MADGRAD) put
///   [`WeightDecay`](crate::WeightDecay). A copy that steps only read is refused as well;
/// - a corrected decay with an η above η_max. A [schedule](crate::StateTree::schedule) above η_max is refused
///   as soon as the schedule is given.
///
/// # Departures
/// The forms are those of the papers. optax has the plain decay as a part of its rules, torch in `AdamW` and
/// `NAdam`.
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug, PartialEq)]
pub struct DecoupledDecay<R> {
    lambda: f64,
    /// 0 for a decay that is not corrected.
    eta_max: f64,
    is_cautious: bool,
    inner: R,
}

impl<R: Rule + Clone> DecoupledDecay<R> {
    /// Runs `inner`, and lets the parameter decay by λ times the learning rate of `inner`.
    pub fn new(lambda: f64, inner: R) -> Self {
        DecoupledDecay {
            lambda,
            eta_max: 0.0,
            is_cautious: false,
            inner,
        }
    }

    /// Lets an element decay only if its step and its value have the same sign, or one of the two is zero.
    pub fn cautious(self) -> Self {
        DecoupledDecay {
            is_cautious: true,
            ..self
        }
    }

    /// Makes the decay λ·η² / `eta_max` instead of λ·η.
    ///
    /// `eta_max` is the largest learning rate of the schedule. 0 means the usual decay.
    pub fn corrected(self, eta_max: f64) -> Self {
        DecoupledDecay { eta_max, ..self }
    }

    fn eta(&self) -> Result<f64> {
        rate_of(&self.inner.description(), "DecoupledDecay", "a decay")
    }

    /// The decay of one step.
    fn rate(&self) -> Result<f64> {
        let eta = self.eta()?;
        let rate = eta * self.lambda;
        Ok(if self.eta_max > 0.0 {
            rate * (eta / self.eta_max)
        } else {
            rate
        })
    }

    /// Refuses a rule without a rate, and a corrected decay for different rates or for a rate above η_max.
    fn check_rates(&self) -> Result<()> {
        check_rate(&self.inner.description(), "DecoupledDecay")?;
        if self.eta_max == 0.0 || self.lambda == 0.0 {
            return Ok(());
        }
        let eta = self.eta()?;
        // A schedule may exceed its largest rate by a rounding.
        if eta <= self.eta_max * (1.0 + 1e-6) {
            return Ok(());
        }
        let expected = format!("the largest η of the schedule, at least {eta}, the present η");
        let error = out_of_range("DecoupledDecay", "decay_eta_max", self.eta_max, expected);
        Err(error.with_remedy(
            "pass the largest η of the schedule to `corrected`; in a state adjust `decay_eta_max` before η",
        ))
    }
}

/// The learning rate of the rule inside a wrapper. In errors, `what` is the quantity of the wrapper that is
/// proportional to this rate, such as "a decay".
pub(super) fn rate_of(inner: &Description, wrapper: &str, what: &str) -> Result<f64> {
    if let Some(eta) = inner.learning_rate() {
        return Ok(eta);
    }
    check_rate(inner, wrapper)?;
    let conflict =
        format!("its alternatives have different rates, so {what} has no single rate to be proportional to");
    Err(conflicting_rates_error(
        inner,
        &conflict,
        "put the wrapper around each alternative",
    ))
}

/// Refuses a rule without a learning rate. A rule with two different rates passes, because it can be a
/// `Fallback` for which `setup` has not chosen one of the two rules yet.
pub(super) fn check_rate(inner: &Description, wrapper: &str) -> Result<()> {
    let available = inner.names();
    if available.iter().any(|name| name == RATE) {
        return Ok(());
    }
    Err(unknown_name_error(&inner.name(), "field", RATE, &available)
        .with_remedy(format!("put `{wrapper}` around a rule with a learning rate")))
}

/// Refuses the state of a rule with a copy or an average of the parameter, which would lack what `wrapper`
/// changes.
pub(super) fn without_copies(state: State, wrapper: &impl Rule, remedy: &str) -> Result<State> {
    if !state.has_copies() {
        return Ok(state);
    }
    let problem = format!(
        "{} changes the steps of a rule with a copy or an average of the parameter, which would lack the \
         change",
        wrapper.name()
    );
    Err(Error::new(ErrorKind::Unsupported, problem).with_remedy(format!(
        "put an average after the wrapper, in a chain around both; {remedy}"
    )))
}

impl<R: Rule + Clone> Describe for DecoupledDecay<R> {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        // `field` takes a default. λ has no default, so its own value is passed instead.
        let lambda = self.lambda;
        rule.kind("DecoupledDecay");
        rule.setting("cautious", self.is_cautious);
        rule.field("decay_lambda", &mut self.lambda, lambda, range::non_negative);
        rule.field("decay_eta_max", &mut self.eta_max, 0.0, range::non_negative);
        rule.holds(&mut self.inner);
        rule.role(Role::Step);
        rule.require(|| self.check_rates());
    }
}

#[derive(Clone, Copy)]
struct DecayStep {
    rate: f64,
    is_cautious: bool,
}

impl Arithmetic for DecayStep {
    type Slots<T> = [T; 0];

    #[inline(always)]
    fn step<V: Value>(self, x: V, dx: V, _: &mut [V; 0]) -> V {
        let decayed = dx + x * self.rate;
        // x enters by its sign, because the product of two small numbers can be 0.
        if self.is_cautious {
            V::select((dx * x.sign()).ge(dx.constant(0.0)), decayed, dx)
        } else {
            decayed
        }
    }
}

impl<R: Rule + Clone> Rule for DecoupledDecay<R> {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        // `setup` has chosen between alternatives by now, so rates that still differ are refused.
        self.eta()?;
        without_copies(
            State::empty().with_held(self, x)?,
            self,
            "set the rule's own `lambda`; before a rule without one, as `MADGRAD`, put `WeightDecay`",
        )
    }

    fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        let decay = DecayStep {
            rate: self.rate()?,
            is_cautious: self.is_cautious,
        };
        self.inner
            .apply(state.parts().held.inner()?, x, dx)?
            .and_then(|step| Ok(step.map(decay, Slots::none())))
    }
}
