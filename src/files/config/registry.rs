//! The rules that a configuration can name, and how an optimiser is built from a configuration.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use super::OptimiserConfig;
use super::form::{BY_PATH, Form, MEMBERS, NamedTable, OFFLOAD, PATTERN, PatternEntry, Place};
use super::kinds::{OptimiserKind, Recipe, inner_rule_error, kinds, settings_error};
use super::written::{is_without_rule, parts};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::patterns::Patterns;
use crate::rule::field::Data;
use crate::rule::{Adjust, Described, Optimiser, Rule, Store};
use crate::step::setup::{Setup, setup, variables};
use crate::stores::Offload;
use crate::tree::StateTree;
use crate::wrappers::OptimiserChain;

/// The rules that a configuration can name, with the defaults of their fields.
///
/// The default registry has the rules of this crate. [`Registry::with`] adds a rule of your own:
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
        f.debug_tuple("Registry")
            .field(&self.names().collect::<Vec<_>>())
            .finish()
    }
}

impl Registry {
    /// Adds a rule under its [kind](crate::Describer::kind), with its values as defaults.
    ///
    /// The rule replaces a rule of the same kind, settings and rules inside. A rule around another rule of a
    /// certain type is found by the kinds of both rules and by its settings. So a configuration can have
    /// `{"Cautious": {"inner": "MyRule", "unscaled": true}}` after such a rule is added:
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
    /// No rule can be named `Offload`, `ByPath` or `LeaveOut`, and no field `inner`, `fallback` or `members`,
    /// because these words have a meaning in every configuration.
    #[must_use]
    pub fn with(self, rule: impl Rule) -> Self {
        self.with_kind(OptimiserKind::from_rule(Box::new(rule)))
    }

    /// Adds a rule around another, made by `make`: `{"Louder": {"factor": 3.0, "inner": "Adam"}}`.
    ///
    /// The values that `make` gives to fields are the defaults. `with_wrapper` calls `make` once with an
    /// example of a rule; later calls get the rules of configurations. The wrapper has to describe the rule
    /// inside by [`Describer::holds`](crate::Describer::holds). Add wrappers that differ in their
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
        self.with_kind(OptimiserKind::from_maker(move |[inner]| make(inner)))
    }

    /// Adds a rule that holds two others: `{"Both": {"members": ["Adam", "Lion"]}}`.
    ///
    /// As [`with_wrapper`](Registry::with_wrapper), but the rule has to describe both rules by
    /// [`Describer::member`](crate::Describer::member) or [`alternative`](crate::Describer::alternative).
    #[must_use]
    pub fn with_pair<R: Rule>(
        self,
        make: impl Fn(Box<dyn Rule>, Box<dyn Rule>) -> R + Send + Sync + 'static,
    ) -> Self {
        self.with_kind(OptimiserKind::from_maker(move |[first, second]| {
            make(first, second)
        }))
    }

    fn with_kind(mut self, kind: OptimiserKind) -> Self {
        self.kinds.retain(|other| !other.is_equivalent_to(&kind));
        self.kinds.push(kind);
        self
    }

    /// The rules without rules inside, with their defaults.
    pub fn rules(&self) -> impl Iterator<Item = &dyn Rule> {
        self.kinds.iter().filter_map(|kind| match &kind.recipe {
            Recipe::Copy(rule) if kind.example.inner.is_none() => Some(&**rule),
            _ => None,
        })
    }

    /// The names of all optimisers, each once.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let mut earlier_names = HashSet::new();
        let names = self.kinds.iter().map(OptimiserKind::name).chain([OFFLOAD]);
        names.filter(move |name| earlier_names.insert(*name))
    }

    /// [`OptimiserConfig::optimiser`] with these rules.
    ///
    /// # Errors
    /// As [`OptimiserConfig::optimiser`].
    pub fn optimiser(&self, config: &OptimiserConfig) -> Result<Optimiser> {
        self.build_whole(&config.data, &Place::Whole)
    }

    /// Builds the optimiser of a parameter. Refuses `"None"`, which does not leave the parameter out, but
    /// moves it by its bare gradients.
    fn build_whole(&self, data: &Data, place: &Place) -> Result<Optimiser> {
        let optimiser = self.build(data, place)?;
        if is_without_rule(&optimiser.description().record()) {
            let expected = "a rule that makes steps, because otherwise the gradient itself is the step";
            return Err(place.mismatch_error(expected, &optimiser.name()).with_remedy(
                "to leave parameters out, write `LeaveOut` in `ByPath`; for plain steps, `Descent`",
            ));
        }
        Ok(optimiser)
    }

    /// [`OptimiserConfig::setup`] with these rules.
    ///
    /// # Errors
    /// As [`OptimiserConfig::setup`].
    pub fn setup<M: Model + ?Sized>(&self, config: &OptimiserConfig, model: &M) -> Result<StateTree> {
        let Form::ByPath(choices) = Form::read(&config.data, &Place::Whole)? else {
            return setup(self.optimiser(config)?, model);
        };
        let build = |choice: &PatternEntry<'_>| -> Result<_> {
            choice
                .optimiser
                .map(|data| self.build_whole(data, &choice.place).map(Arc::new))
                .transpose()
        };
        let optimisers: Vec<Option<Arc<Optimiser>>> = choices.iter().map(build).collect::<Result<_>>()?;
        let record = |choice: usize| {
            optimisers[choice]
                .as_ref()
                .map(|optimiser| optimiser.description().record())
        };
        let variables = variables(model)?;
        let patterns = Patterns::new(choices.iter().map(|choice| choice.pattern.to_string()).collect());
        let list_place = Place::Whole.key(BY_PATH);
        let chosen_patterns = patterns.choose(
            &variables,
            |one, other| record(one) == record(other),
            |pattern, error| match pattern {
                Some(pattern) => list_place.index(pattern).key(PATTERN).error(error),
                None => list_place.error(error),
            },
        )?;
        let chosen_optimisers = chosen_patterns
            .into_iter()
            .map(|pattern| optimisers[pattern].clone());
        Setup::default().assemble(Ok(variables.into_iter().zip(chosen_optimisers).collect()))
    }

    /// Builds the optimiser of the data at a place.
    fn build(&self, data: &Data, place: &Place) -> Result<Optimiser> {
        match Form::read(data, place)? {
            Form::ByPath(_) => {
                let error = place.misplaced_error(BY_PATH, "chooses by the paths of a model's parameters");
                Err(error.with_remedy("call `setup` with the model"))
            }
            Form::Chain(members) => Ok(Optimiser::new(OptimiserChain::new(
                self.chain_rules(members, place)?,
            ))),
            Form::Offload(inner) => {
                let place = place.key(OFFLOAD);
                let optimiser = Optimiser::new(Offload::new(self.build(inner, &place)?));
                optimiser
                    .check()
                    .map(|()| optimiser)
                    .map_err(|error| place.error(error))
            }
            Form::Named(named) => {
                let (kind, tables) = self.kind(&named, place)?;
                let optimiser = match &kind.recipe {
                    _ if kind.lacks_field(&named) => None,
                    Recipe::Copy(rule) => Some(Optimiser::from_boxed_rule(Store::Rounded, rule.clone())),
                    Recipe::Build(build) => build(&named, self.rules_inside(&named, kind)?)?,
                };
                with_fields(optimiser.ok_or_else(|| kind.incomplete_error(&named))?, &tables)
            }
        }
    }

    /// Builds the rules in the table of an optimiser of this kind.
    fn rules_inside(&self, named: &NamedTable<'_>, kind: &OptimiserKind) -> Result<Vec<Box<dyn Rule>>> {
        let mut rules = Vec::new();
        for (key, _) in parts(&kind.example) {
            let place = named.place.key(key);
            match named.value(key) {
                Some(Data::List(members)) if key == MEMBERS => {
                    rules.extend(self.chain_rules(members, &place)?)
                }
                Some(data) => rules.push(self.rule(data, &place)?),
                None => return Err(kind.incomplete_error(named)),
            }
        }
        Ok(rules)
    }

    /// Builds the members of a chain.
    fn chain_rules(&self, members: &[Data], place: &Place) -> Result<Vec<Box<dyn Rule>>> {
        members
            .iter()
            .enumerate()
            .map(|(i, member)| self.rule(member, &place.index(i)))
            .collect()
    }

    /// Builds a rule that is inside of another rule. Refuses stores, which can only be outermost.
    fn rule(&self, data: &Data, place: &Place) -> Result<Box<dyn Rule>> {
        let optimiser = self.build(data, place)?;
        let reason = match optimiser.store() {
            _ if optimiser.is_offloaded() => {
                "decides where the state of a whole optimiser is and goes around it, once"
            }
            Store::Rounded => return Ok(dyn_clone::clone_box(optimiser.rule())),
            _ => "decides how the parameter is stored and goes around the whole rule or list",
        };
        Err(place.misplaced_error(optimiser.description().kind, reason))
    }

    /// The kind that a table names, and the [tables](OptimiserKind::tables) for it.
    fn kind<'d>(
        &self,
        named: &NamedTable<'d>,
        place: &Place,
    ) -> Result<(&OptimiserKind, Vec<NamedTable<'d>>)> {
        let kinds: Vec<_> = self
            .kinds
            .iter()
            .filter(|kind| kind.name() == named.name)
            .collect();
        let Some(first) = kinds.first() else {
            let available: Vec<String> = self.names().map(str::to_string).collect();
            return Err(place.error(Error::unknown("rule", named.name, &available)));
        };
        // Keys are checked before settings. Otherwise a mistyped key would be reported as settings that do
        // not fit.
        first.check_keys(&first.example, named)?;
        let fitting_kinds: Vec<_> = kinds
            .iter()
            .copied()
            .filter(|kind| kind.accepts_settings_of(named))
            .collect();
        if fitting_kinds.is_empty() {
            return Err(settings_error(&kinds, named));
        }
        let (kind, tables) = fitting_kinds
            .iter()
            .find_map(|kind| Some((*kind, kind.tables(named)?)))
            .ok_or_else(|| inner_rule_error(&fitting_kinds, named))?;
        kind.check_inner_keys(&tables)?;
        Ok((kind, tables))
    }
}

/// The optimiser with the fields that the tables give to the optimiser and the rules inside.
fn with_fields(mut optimiser: Optimiser, tables: &[NamedTable<'_>]) -> Result<Optimiser> {
    let (mut values, mut places) = (Vec::new(), Vec::new());
    for (member, named) in optimiser.description().all().iter().zip(tables) {
        for field in &member.rule.fields {
            let Some(data) = named.value(field.name) else {
                continue;
            };
            let place = named.place.key(field.name);
            let value = field
                .value
                .read(data)
                .ok_or_else(|| place.mismatch_error(field.value.expected(), data))?;
            values.push((field.index, value));
            places.push((field.index, place));
        }
    }
    optimiser.write(&values)?;
    let Err((error, faulty_field)) = optimiser.check_fields() else {
        return Ok(optimiser);
    };
    // A faulty field that no table has is a default: the error is then about the whole table.
    let place = places.iter().find(|(index, _)| Some(*index) == faulty_field);
    Err(place.map_or(&tables[0].place, |(_, place)| place).error(error))
}
