//! The rules that a configuration can name.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use super::OptimiserConfig;
use super::by_path::choose;
use super::data::Data;
use super::form::{BY_PATH, Form, INNER, Named, OptimiserForm, PartForm};
use super::kinds::{Make, OptimiserKind, OptimiserTable, incomplete, kinds};
use super::place::Place;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::rule::field::FieldValue;
use crate::rule::{Adjust, Optimiser, OptimiserRecord, Rule};
use crate::step::setup::{Setup, setup, variables};
use crate::tree::StateTree;
use crate::wrappers::OptimiserChain;

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
#[derive(Clone)]
pub struct Registry {
    kinds: Vec<OptimiserKind>,
}

impl Default for Registry {
    /// The rules of this crate.
    fn default() -> Self {
        Registry { kinds: kinds() }
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registry").field(&self.names().collect::<Vec<_>>()).finish()
    }
}

impl Registry {
    /// Adds a rule under its [kind](crate::Describer::kind), with its values as defaults.
    ///
    /// It replaces a rule like it.
    ///
    /// A rule around another of a certain type is found by both kinds and by its settings. So a configuration
    /// can have `{"Cautious": {"inner": "MyRule", "unscaled": true}}`, once such a rule is added as here:
    ///
    /// ```
    /// use optimisers::config::{OptimiserConfig, Registry};
    /// use optimisers::{Cautious, Yogi};
    ///
    /// let config: OptimiserConfig = serde_json::from_str(r#"{"Cautious": {"inner": {"Yogi": {"eta": 0.1}}}}"#)?;
    /// let refused = config.optimiser().unwrap_err().to_string();
    /// assert!(refused.starts_with("configuration, at Cautious.inner: got {"), "{refused}");
    /// assert!(refused.contains("expected Adam, AdamW, NAdam, Lion"), "{refused}");
    ///
    /// let registry = Registry::default().with(Cautious::new(Yogi::default()));
    /// assert_eq!(registry.optimiser(&config)?.name(), "Cautious(Yogi)");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// `Offload`, `ByPath` and `LeaveOut` cannot be names of rules, nor `inner`, `fallback` and `members`
    /// names of fields: they have a meaning in every configuration.
    #[must_use]
    pub fn with(self, rule: impl Rule) -> Self {
        self.with_kind(OptimiserKind::of_copies(Box::new(rule)))
    }

    /// Adds a rule around another, made by `make`: `{"Louder": {"factor": 3.0, "inner": "Adam"}}`.
    ///
    /// The defaults of its fields are the values that `make` gives them. `make` is called here already, with
    /// some rule, and later with any. The rule describes the rule inside by
    /// [`Describer::holds`](crate::Describer::holds). Add rules that differ in their
    /// [settings](crate::Describer::setting) one by one.
    ///
    /// ```
    /// use optimisers::config::{OptimiserConfig, Registry};
    /// use optimisers::{Describe, Describer, Flow, Gradient, Parameter, Result, Rule, State, range};
    ///
    /// /// Runs a rule with a gradient that is `factor` times as long.
    /// #[derive(Clone, Debug)]
    /// struct Louder {
    ///     factor: f64,
    ///     inner: Box<dyn Rule>,
    /// }
    ///
    /// impl Describe for Louder {
    ///     fn describe(&mut self, rule: &mut Describer<'_>) {
    ///         rule.kind("Louder");
    ///         rule.field("factor", &mut self.factor, 2.0, range::positive);
    ///         rule.holds(&mut self.inner);
    ///     }
    /// }
    ///
    /// impl Rule for Louder {
    ///     // ... as in the documentation of `Describe`.
    ///     # fn apply<'a>(&'a self, state: &'a mut State, x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
    ///     #     self.inner.apply(state.parts().held.inner()?, x, dx.scale(self.factor))
    ///     # }
    /// }
    ///
    /// let registry = Registry::default().with_wrapper(|inner| Louder { factor: 2.0, inner });
    /// let config: OptimiserConfig = serde_json::from_str(r#"{"Louder": {"factor": 3, "inner": ["ClipGrad", "Adam"]}}"#)?;
    /// assert_eq!(registry.optimiser(&config)?.name(), "Louder(OptimiserChain(ClipGrad, Adam))");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_wrapper<R: Rule>(self, make: impl Fn(Box<dyn Rule>) -> R + Send + Sync + 'static) -> Self {
        self.with_kind(OptimiserKind::of_wrappers(make))
    }

    /// Adds a rule that holds two others: `{"Both": {"members": ["Adam", "Lion"]}}`.
    ///
    /// As [`with_wrapper`](Registry::with_wrapper), but the rule describes both by
    /// [`Describer::member`](crate::Describer::member) or [`alternative`](crate::Describer::alternative).
    #[must_use]
    pub fn with_pair<R: Rule>(
        self,
        make: impl Fn(Box<dyn Rule>, Box<dyn Rule>) -> R + Send + Sync + 'static,
    ) -> Self {
        self.with_kind(OptimiserKind::of_pairs(make))
    }

    fn with_kind(mut self, kind: OptimiserKind) -> Self {
        self.kinds.retain(|known| !known.is_like(&kind));
        self.kinds.push(kind);
        self
    }

    /// The rules that hold no others, with their defaults.
    pub fn rules(&self) -> impl Iterator<Item = &dyn Rule> {
        self.kinds.iter().filter_map(|known| match &known.make {
            Make::Copy(rule) if known.example.inner.is_none() => Some(&**rule),
            _ => None,
        })
    }

    /// The names of all optimisers, each once.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let mut seen = HashSet::new();
        self.kinds.iter().map(OptimiserKind::name).filter(move |name| seen.insert(*name))
    }

    /// [`OptimiserConfig::optimiser`] with these rules.
    ///
    /// # Errors
    /// As there.
    pub fn optimiser(&self, config: &OptimiserConfig) -> Result<Optimiser> {
        match &config.form {
            Form::Single(form) => self.build(form),
            Form::ByPath(_) => {
                let misplaced =
                    Place::default().misplaced(BY_PATH, "chooses by the paths of a model's parameters");
                Err(misplaced.with_remedy("call `setup` with the model"))
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
        let mut optimisers: Vec<Option<Arc<Optimiser>>> = Vec::new();
        for choice in choices {
            optimisers
                .push(choice.optimiser.as_ref().map(|form| self.build(form)).transpose()?.map(Arc::new));
        }
        let variables = variables(model)?;
        let chosen = choose(choices, &variables)?;
        let choices = variables
            .into_iter()
            .zip(chosen)
            .map(|(variable, choice)| (variable, optimisers[choice].clone()));
        Setup::default().assemble(Ok(choices.collect()))
    }

    fn build(&self, form: &OptimiserForm) -> Result<Optimiser> {
        if let OptimiserForm::Named(named) = form {
            let kind = self.kind(named)?;
            if let Make::Optimiser(make, _) = &kind.make {
                return self.with_table(named, kind, |table| filled(make(table)?, &[named]));
            }
        }
        Ok(Optimiser::new(self.rule(form)?))
    }

    fn rule(&self, form: &OptimiserForm) -> Result<Box<dyn Rule>> {
        let named = match form {
            OptimiserForm::Named(named) => named,
            OptimiserForm::Chain(members) => {
                let members: Vec<Box<dyn Rule>> =
                    members.iter().map(|member| self.rule(member)).collect::<Result<_>>()?;
                return Ok(Box::new(OptimiserChain::new(members)));
            }
        };
        let kind = self.kind(named)?;
        match &kind.make {
            Make::Copy(rule) => filled(rule.clone(), &named.spine()),
            Make::Rule(make) => self.with_table(named, kind, |table| filled(make(table)?, &[named])),
            Make::Optimiser(_, belongs) => Err(named.place.misplaced(&named.name, belongs)),
        }
    }

    fn with_table<O>(
        &self,
        named: &Named,
        kind: &OptimiserKind,
        make: impl FnOnce(&OptimiserTable<'_>) -> Result<O>,
    ) -> Result<O> {
        let (rule, optimiser) =
            (|form: &OptimiserForm| self.rule(form), |form: &OptimiserForm| self.build(form));
        let table = OptimiserTable { named, example: &kind.example, rule: &rule, optimiser: &optimiser };
        table.check_needed(kind)?;
        make(&table)
    }

    /// The kind of this name with these settings, around these rules.
    fn kind(&self, named: &Named) -> Result<&OptimiserKind> {
        let of_name: Vec<&OptimiserKind> =
            self.kinds.iter().filter(|known| known.name() == &*named.name).collect();
        let Some(first) = of_name.first() else {
            let available: Vec<String> = self.names().map(str::to_string).collect();
            return Err(named.place.error(Error::unknown("rule", &named.name, &available)));
        };
        first.check_keys(&[named])?;
        let fitting: Vec<&OptimiserKind> =
            of_name.iter().copied().filter(|known| known.has_settings_of(named)).collect();
        let Some(first) = fitting.first() else { return Err(other_settings(&of_name, named)) };
        let Make::Copy(_) = first.make else { return Ok(first) };
        if first.example.inner.is_some() && named.part(INNER).is_none() {
            return Err(incomplete(named, &first.example));
        }
        let Some(known) = fitting.iter().find(|known| known.is_around_rules_of(named)) else {
            return Err(other_rule(&fitting, named));
        };
        known.check_keys(&named.spine())?;
        Ok(known)
    }
}

/// The error that no kind of this name has these settings.
fn other_settings(of_name: &[&OptimiserKind], named: &Named) -> Error {
    let fixed = || of_name.iter().flat_map(|known| &known.fixed);
    for (name, _) in fixed() {
        let mut values: Vec<String> = Vec::new();
        for (_, setting) in fixed().filter(|(other, _)| other == name) {
            let value = Data::from(setting).to_string();
            if !values.contains(&value) {
                values.push(value);
            }
        }
        if let Some(data) = named.value(name).filter(|data| !values.contains(&data.to_string())) {
            return named.inside().key(name).expected(values.join(" or "), data);
        }
    }
    incomplete(named, &of_name[0].example)
}

/// The error that no kind has this rule inside.
fn other_rule(fitting: &[&OptimiserKind], named: &Named) -> Error {
    let known = fitting.iter().filter_map(|known| known.example.inner.as_deref());
    let known: Vec<String> = known.map(OptimiserRecord::to_string).collect();
    let got = named.part(INNER).map_or(Data::Nothing, PartForm::write);
    let expected =
        format!("{} (or a rule that `Registry::with` was given in {})", known.join(", "), named.name);
    named.inside().key(INNER).expected(expected, &got)
}

/// The optimiser with the fields that a configuration gives it and the named rules inside.
fn filled<O: Adjust + Clone>(optimiser: O, spine: &[&Named]) -> Result<O> {
    let description = optimiser.description();
    let members = description.all();
    let (mut before, mut values, mut given) = (Vec::new(), Vec::new(), Vec::new());
    for (member, named) in members.iter().zip(spine) {
        for field in &member.rule.fields {
            let value = match named.value(field.name) {
                None => field.value,
                Some(data) => {
                    let place = named.inside().key(field.name);
                    let value = data.literal().and_then(|literal| literal.read(field.value));
                    let value = value.ok_or_else(|| place.expected(field.value.expected(), data))?;
                    given.push((values.len(), place));
                    value
                }
            };
            before.push(field.value);
            values.push(value);
        }
    }
    let with = |values: &[FieldValue]| {
        let mut filled = optimiser.clone();
        filled.set_fields(values)?;
        filled.check().map(|()| filled)
    };
    with(&values).map_err(|error| {
        // A field is at fault if it alone is refused for the same reason.
        let is_same =
            |values: &[FieldValue]| with(values).is_err_and(|alone| alone.to_string() == error.to_string());
        let is_at_fault = |(index, _): &&(usize, Place)| {
            let mut alone = before.clone();
            alone[*index] = values[*index];
            is_same(&alone)
        };
        let at_fault = if is_same(&before) { None } else { given.iter().find(is_at_fault) };
        let place = at_fault.map_or_else(|| spine[0].inside(), |(_, place)| place.clone());
        place.error(error)
    })
}
