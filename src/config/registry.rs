//! The rules that a configuration can name.

use std::sync::Arc;

use super::OptimiserConfig;
use super::form::{BY_PATH, Form, Named, OptimiserForm, RuleForm, SlotFormats, StoreForm};
use super::patterns::choose;
use super::place::Place;
use crate::compose::{DecoupledDecay, Fallback, Kahan, MixedPrecision, Offload, OptimiserChain, SplitMaster, StochasticRounding, StoreAs};
use crate::error::{ConfigurationError, Error, Result};
use crate::lent::INSIDE;
use crate::model::Model;
use crate::rule::{Adjust, Optimiser, Rule, names};
use crate::rules::catalogue;
use crate::setup::{Setup, setup, variables};
use crate::tree::StateTree;

/// The rules that a configuration can name, with the defaults of their fields.
///
/// It starts with the rules of this crate. A rule of your own is added by [`Registry::with`]:
///
/// ```
/// use optimisers::{Elementwise, Slot, config::{OptimiserConfig, Registry}, hyper_parameters, range, value::Value};
///
/// hyper_parameters! {
///     /// Multiplies the gradient.
///     pub struct Scale {
///         /// The factor.
///         factor: f64 = 1.0 => range::any,
///     }
/// }
///
/// impl Elementwise for Scale {
///     type Scalars = f64;
///     type Slots<T> = [T; 0];
///
///     fn slots(&self) -> [Slot; 0] {
///         []
///     }
///
///     fn scalars(&self, _t: u64) -> f64 {
///         self.factor
///     }
///
///     fn step<V: Value>(factor: f64, _x: V, dx: V, _: &mut [V; 0]) -> V {
///         dx * factor
///     }
/// }
///
/// let registry = Registry::default().with(Scale::default());
/// let config: OptimiserConfig = serde_json::from_str(r#"[{"Scale": {"factor": 0.5}}, "Momentum"]"#)?;
/// let optimiser = registry.optimiser(&config)?;
/// # let _ = optimiser;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Registry {
    rules: Vec<Box<dyn Rule>>,
}

impl Default for Registry {
    /// The rules of this crate.
    fn default() -> Self {
        Registry { rules: catalogue().into_iter().map(|listing| listing.rule).collect() }
    }
}

impl Registry {
    /// Adds a rule under its [name](crate::Adjust::name), with the values that it has as defaults. It takes the place of one with the same name.
    ///
    /// The names `MixedPrecision`, `SplitMaster`, `Kahan`, `StochasticRounding`, `DecoupledDecay`, `StoreAs`, `Fallback`,
    /// `Offload`, `ByPath` and `LeaveOut` are not free, they have a meaning in every configuration.
    #[must_use]
    pub fn with(mut self, rule: impl Rule) -> Self {
        self.rules.retain(|known| known.name() != rule.name());
        self.rules.push(Box::new(rule));
        self
    }

    /// The rules.
    pub fn rules(&self) -> impl Iterator<Item = &dyn Rule> {
        self.rules.iter().map(|rule| &**rule)
    }

    /// [`OptimiserConfig::optimiser`] with these rules.
    ///
    /// # Errors
    /// As there.
    pub fn optimiser(&self, config: &OptimiserConfig) -> Result<Box<dyn Optimiser>> {
        match &config.form {
            Form::Single(form) => self.build(form),
            Form::ByPath(_) => {
                let remedy = "chooses by the paths of a model's parameters: call `setup` with the model";
                Err(Place::default().error(ConfigurationError::Misplaced { name: BY_PATH.to_string(), remedy }))
            }
        }
    }

    /// [`OptimiserConfig::setup`] with these rules.
    ///
    /// # Errors
    /// As there.
    pub fn setup<M: Model + ?Sized>(&self, config: &OptimiserConfig, model: &M) -> Result<StateTree> {
        let choices = match &config.form {
            Form::Single(form) => return setup(self.build(form)?, model),
            Form::ByPath(choices) => choices,
        };
        let mut optimisers: Vec<Option<Arc<dyn Optimiser>>> = Vec::new();
        for choice in choices {
            optimisers.push(choice.optimiser.as_ref().map(|form| self.build(form)).transpose()?.map(Arc::from));
        }
        let variables = variables(model)?;
        let chosen = choose(choices, &variables)?;
        let choices = variables.into_iter().zip(chosen).map(|(variable, choice)| (variable, optimisers[choice].clone()));
        Setup::default().build(Ok(choices.collect()), model.lent(INSIDE).is_some())
    }

    fn build(&self, form: &OptimiserForm) -> Result<Box<dyn Optimiser>> {
        Ok(match form {
            OptimiserForm::Plain(form) => Box::new(self.rule(form)?),
            OptimiserForm::Offload(inner) => Box::new(Offload::new(self.build(inner)?)),
            OptimiserForm::Stored { store, inner } => {
                let inner = self.rule(inner)?;
                match *store {
                    StoreForm::MixedPrecision(dtype) => Box::new(MixedPrecision::new(dtype, inner)),
                    StoreForm::SplitMaster { is_short: false } => Box::new(SplitMaster::new(inner)),
                    StoreForm::SplitMaster { is_short: true } => Box::new(SplitMaster::of_24_bits(inner)),
                    StoreForm::Kahan => Box::new(Kahan::new(inner)),
                    StoreForm::StochasticRounding { seed } => Box::new(StochasticRounding::new(seed, inner)),
                }
            }
        })
    }

    fn rule(&self, form: &RuleForm) -> Result<Box<dyn Rule>> {
        match form {
            RuleForm::Named(named) => self.named(named),
            RuleForm::StoreAs(stored) => {
                let inner = self.rule(&stored.inner)?;
                Ok(Box::new(match &stored.formats {
                    SlotFormats::All(format) => StoreAs::all(*format, inner),
                    SlotFormats::Named(named) => StoreAs::new(named.iter().map(|(name, format)| (&**name, *format)), inner),
                }))
            }
            RuleForm::Fallback(form) => {
                let (rule, fallback) = (self.rule(&form.inner)?, self.rule(&form.fallback)?);
                Ok(Box::new(Fallback::new(rule, fallback).except(form.except.iter().map(|pattern| &**pattern))))
            }
            RuleForm::DecoupledDecay(form) => {
                let rule = DecoupledDecay::new(form.lambda, self.rule(&form.inner)?).corrected(form.eta_max);
                let rule = if form.is_cautious { rule.cautious() } else { rule };
                rule.check().map_err(|error| form.place.error(error))?;
                Ok(Box::new(rule))
            }
            RuleForm::Chain(members) => {
                let members: Vec<Box<dyn Rule>> = members.iter().map(|member| self.rule(member)).collect::<Result<_>>()?;
                Ok(Box::new(OptimiserChain::new(members)))
            }
        }
    }

    fn named(&self, Named { place, name, fields }: &Named) -> Result<Box<dyn Rule>> {
        let Some(known) = self.rules.iter().find(|rule| rule.name() == **name) else {
            let available = self.rules.iter().map(|rule| rule.name()).collect();
            return Err(place.error(ConfigurationError::UnknownRule { name: name.to_string(), available }));
        };
        let mut rule = known.clone();
        let place = place.key(name);
        for (key, data) in fields {
            let Some(default) = known.field(key) else {
                return Err(place.error(ConfigurationError::UnknownKey { key: key.to_string(), available: names(known) }));
            };
            let Some(value) = data.literal().and_then(|literal| literal.read(default)) else {
                return Err(place.key(key).expected(default.expected(), data));
            };
            rule.set_field(key, value).map_err(|error| place.key(key).error(error))?;
        }
        match rule.check() {
            Ok(()) => Ok(rule),
            Err(error) => {
                let place = if let Error::HyperParameter { field, .. } = &error { place.key(field) } else { place };
                Err(place.error(error))
            }
        }
    }
}
