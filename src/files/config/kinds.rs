//! The kinds of optimisers that a configuration can name, and how each is made.

use std::sync::Arc;

use crate::numbers::DType::{BF16, F16, F32, F64};

use super::data::Data;
use super::form::{FALLBACK, INNER, MEMBERS, Named, OptimiserForm, PartForm};
use super::place::Place;
use super::written::{example, keys};
use crate::error::{Error, Result};
use crate::rule::{
    Adjust, Elementwise, IntoOptimiser, Optimiser, OptimiserRecord, Rule, Setting, SlotFormat,
};
use crate::rules::{Adam, AdamW, Lion, NAdam, catalogue};
use crate::stores::{Kahan, MixedPrecision, Offload, SplitMaster, StochasticRounding};
use crate::wrappers::{Cautious, DecoupledDecay, Fallback, StoreAs};

/// Where a store belongs, for errors.
const AROUND: &str = "decides how the parameter is stored and goes around the whole rule or list";
/// Where `Offload` belongs, for errors.
const OUTERMOST: &str = "decides where the state of a whole optimiser is and goes around it, once";

/// The formats of state tensors.
const FORMATS: [SlotFormat; 5] = [
    SlotFormat::Q8,
    SlotFormat::Dtype(F16),
    SlotFormat::Dtype(BF16),
    SlotFormat::Dtype(F32),
    SlotFormat::Dtype(F64),
];

/// A kind of optimiser with one setting: how it is made, and an example.
#[derive(Clone)]
pub(super) struct OptimiserKind {
    pub(super) example: OptimiserRecord,
    /// The settings that every optimiser of this kind has.
    pub(super) fixed: Vec<(String, Setting)>,
    /// The fields that have no defaults.
    needed: &'static [&'static str],
    pub(super) make: Make,
}

#[derive(Clone)]
pub(super) enum Make {
    /// A copy of this rule, whose type fixes the type of the rule inside, if there is one.
    Copy(Box<dyn Rule>),
    /// A rule, made of others.
    Rule(Arc<Maker<Box<dyn Rule>>>),
    /// An optimiser that is not a rule, and where it belongs.
    Optimiser(Arc<Maker<Optimiser>>, &'static str),
}

type Maker<O> = dyn Fn(&OptimiserTable<'_>) -> Result<O> + Send + Sync;

impl OptimiserKind {
    fn new(example: OptimiserRecord, make: Make) -> Self {
        OptimiserKind { fixed: example.settings.clone(), example, needed: &[], make }
    }

    /// A kind of copies of a rule.
    pub(super) fn of_copies(rule: Box<dyn Rule>) -> Self {
        let example = record(&rule);
        OptimiserKind::new(example, Make::Copy(rule))
    }

    /// A kind of rules around another.
    pub(super) fn of_wrappers<R: Rule>(make: impl Fn(Box<dyn Rule>) -> R + Send + Sync + 'static) -> Self {
        let example = record(&make(any_rule()));
        OptimiserKind::new(example, Make::Rule(Arc::new(move |given| Ok(Box::new(make(given.rule(INNER)?))))))
    }

    /// A kind of rules that hold two others.
    pub(super) fn of_pairs<R: Rule>(
        make: impl Fn(Box<dyn Rule>, Box<dyn Rule>) -> R + Send + Sync + 'static,
    ) -> Self {
        let example = record(&make(any_rule(), any_rule()));
        let make = move |given: &OptimiserTable<'_>| -> Result<Box<dyn Rule>> {
            let [first, second] = given.pair()?;
            Ok(Box::new(make(first, second)))
        };
        OptimiserKind::new(example, Make::Rule(Arc::new(make)))
    }

    /// A kind of stores.
    fn of_stores<O: IntoOptimiser>(make: impl Fn(Box<dyn Rule>) -> O + Send + Sync + 'static) -> Self {
        let example = record(&make(any_rule()));
        let make = move |given: &OptimiserTable<'_>| Ok(make(given.rule(INNER)?).into_optimiser());
        OptimiserKind::new(example, Make::Optimiser(Arc::new(make), AROUND))
    }

    fn needing(self, needed: &'static [&'static str]) -> Self {
        OptimiserKind { needed, ..self }
    }

    /// The kind with a setting that its optimisers do not describe.
    fn with_setting(mut self, name: &str, setting: Setting) -> Self {
        self.fixed.push((name.to_string(), setting));
        self
    }

    /// Whether both make the same: one name, the same settings, and the same rules inside if these are known.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let is_copy = |of: &Self| matches!(of.make, Make::Copy(_));
        let are_copies = is_copy(self) && is_copy(other);
        let same = self.fixed == other.fixed;
        self.name() == other.name()
            && same
            && !(are_copies && self.example.difference(&other.example).is_some())
    }

    pub(super) fn name(&self) -> &str {
        &self.example.kind
    }

    /// Refuses keys that the tables of an optimiser and of the rules inside do not have.
    pub(super) fn check_keys(&self, spine: &[&Named]) -> Result<()> {
        // A copy has its members already, so these keys are not taken.
        let is_taken =
            |key: &String| !matches!(self.make, Make::Copy(_)) || !matches!(&**key, MEMBERS | FALLBACK);
        let mut tables = self.example.spine().into_iter().zip(spine);
        tables.try_for_each(|(example, named)| {
            named.check_keys(keys(example).into_iter().filter(is_taken).collect())
        })
    }

    /// Whether its optimisers have the settings that are given.
    pub(super) fn has_settings_of(&self, named: &Named) -> bool {
        let is_said = |name: &String| self.example.settings.iter().any(|(own, _)| own == name);
        are_settings_of(&self.fixed, is_said, named)
    }

    /// Whether the rules inside of its optimisers are those that are given.
    pub(super) fn is_around_rules_of(&self, named: &Named) -> bool {
        let (examples, given) = (self.example.spine(), named.spine());
        let is_same = |(example, given): (&&OptimiserRecord, &&Named)| {
            example.kind == *given.name && are_settings_of(&example.settings, |_| true, given)
        };
        examples.len() <= given.len() && examples[1..].iter().zip(&given[1..]).all(is_same)
    }
}

/// Whether these settings are those that are given. A switch that is not given is off; any other setting may
/// be left out if optimisers do not describe it.
fn are_settings_of(settings: &[(String, Setting)], is_said: impl Fn(&String) -> bool, named: &Named) -> bool {
    settings.iter().all(|(name, setting)| match named.value(name) {
        Some(data) => *data == Data::from(setting),
        None => *setting == Setting::Flag(false) || !is_said(name),
    })
}

/// All optimisers of this crate.
pub(super) fn kinds() -> Vec<OptimiserKind> {
    let mut all: Vec<OptimiserKind> =
        catalogue().into_iter().map(|listing| OptimiserKind::of_copies(listing.rule)).collect();
    all.extend(
        [cautious::<Adam>(), cautious::<AdamW>(), cautious::<NAdam>(), cautious::<Lion>()]
            .into_iter()
            .flatten(),
    );
    all.extend([
        OptimiserKind::new(
            record(&None::<Box<dyn Rule>>),
            Make::Rule(Arc::new(|_| Ok(Box::new(None::<Box<dyn Rule>>)))),
        ),
        OptimiserKind::of_wrappers(|inner| DecoupledDecay::new(0.1, inner)).needing(&["decay_lambda"]),
        OptimiserKind::of_wrappers(|inner| DecoupledDecay::new(0.1, inner).cautious())
            .needing(&["decay_lambda"]),
        OptimiserKind::of_stores(|inner| MixedPrecision::new(F32, inner)),
        OptimiserKind::of_stores(|inner| MixedPrecision::new(F64, inner)),
        OptimiserKind::of_stores(SplitMaster::of_24_bits),
        OptimiserKind::of_stores(SplitMaster::new).with_setting("bits", Setting::Count(32)),
        OptimiserKind::of_stores(Kahan::new),
        OptimiserKind::of_stores(|inner| StochasticRounding::new(0, inner)).needing(&["seed"]),
        OptimiserKind {
            fixed: Vec::new(),
            ..OptimiserKind::new(
                record(&StoreAs::all(SlotFormat::Q8, any_rule())),
                Make::Rule(Arc::new(|given| Ok(Box::new(given.store_as()?)))),
            )
        },
        OptimiserKind {
            fixed: Vec::new(),
            ..OptimiserKind::new(
                record(&Fallback::new(any_rule(), any_rule()).except(["embedding*"])),
                Make::Rule(Arc::new(|given| {
                    Ok(Box::new(
                        Fallback::new(given.rule(INNER)?, given.rule(FALLBACK)?).except(given.except()?),
                    ))
                })),
            )
        },
        OptimiserKind::new(
            record(&Offload::new(any_rule())),
            Make::Optimiser(
                Arc::new(|given| Ok(Offload::new(given.optimiser()?).into_optimiser())),
                OUTERMOST,
            ),
        ),
    ]);
    all
}

fn record(example: &impl Adjust) -> OptimiserRecord {
    example.description().record()
}

/// The rule inside, in examples.
fn any_rule() -> Box<dyn Rule> {
    Box::new(Adam::default())
}

/// `Cautious` around a rule, scaled and unscaled.
fn cautious<R: Elementwise + Default>() -> [OptimiserKind; 2] {
    let scaled = Cautious::new(R::default());
    [scaled.clone(), scaled.unscaled()].map(|rule| OptimiserKind::of_copies(Box::new(rule)))
}

/// The error that something is missing.
pub(super) fn incomplete(named: &Named, known: &OptimiserRecord) -> Error {
    named.inside().expected(format!("a table such as {}", example(known)), &Data::Table(named.table()))
}

/// The table of an optimiser that is to be made.
pub(super) struct OptimiserTable<'t> {
    pub(super) named: &'t Named,
    pub(super) example: &'t OptimiserRecord,
    /// Makes a rule inside.
    pub(super) rule: &'t dyn Fn(&OptimiserForm) -> Result<Box<dyn Rule>>,
    /// Makes an optimiser inside.
    pub(super) optimiser: &'t dyn Fn(&OptimiserForm) -> Result<Optimiser>,
}

impl OptimiserTable<'_> {
    fn incomplete(&self) -> Error {
        incomplete(self.named, self.example)
    }

    /// Refuses a table that lacks a field without default.
    pub(super) fn check_needed(&self, kind: &OptimiserKind) -> Result<()> {
        let is_missing = kind.needed.iter().any(|field| self.named.value(field).is_none());
        if is_missing { Err(self.incomplete()) } else { Ok(()) }
    }

    /// The rule with this key.
    fn rule(&self, key: &str) -> Result<Box<dyn Rule>> {
        match self.named.part(key) {
            Some(PartForm::One(form)) => (self.rule)(form),
            _ => Err(self.incomplete()),
        }
    }

    /// The optimiser inside.
    fn optimiser(&self) -> Result<Optimiser> {
        match self.named.part(INNER) {
            Some(PartForm::One(form)) => (self.optimiser)(form),
            _ => Err(self.incomplete()),
        }
    }

    /// Both rules of the list of members.
    fn pair(&self) -> Result<[Box<dyn Rule>; 2]> {
        let Some(PartForm::Several(members)) = self.named.part(MEMBERS) else {
            return Err(self.incomplete());
        };
        let [first, second] = &members[..] else { return Err(self.incomplete()) };
        Ok([(self.rule)(first)?, (self.rule)(second)?])
    }

    fn store_as(&self) -> Result<StoreAs<Box<dyn Rule>>> {
        const SLOTS: &str = "slots";
        let place = self.named.inside().key(SLOTS);
        let format = |data: &Data, place: Place| {
            let known = FORMATS.into_iter().find(|format| *data == Data::Text(format.to_string().into()));
            known.ok_or_else(|| place.expected(r#""Q8", "F16", "BF16", "F32" or "F64""#, data))
        };
        match self.named.value(SLOTS) {
            None => Err(self.incomplete()),
            Some(table @ Data::Table(_)) => {
                let entries = table.clone().entries("a table", &place)?;
                let named = entries.iter().map(|(name, data)| Ok((&**name, format(data, place.key(name))?)));
                Ok(StoreAs::new(named.collect::<Result<Vec<_>>>()?, self.rule(INNER)?))
            }
            Some(data) => Ok(StoreAs::all(format(data, place)?, self.rule(INNER)?)),
        }
    }

    /// The patterns of `Fallback`.
    fn except(&self) -> Result<Vec<String>> {
        const EXCEPT: &str = "except";
        let place = self.named.inside().key(EXCEPT);
        let pattern = |(i, data): (usize, &Data)| match data {
            Data::Text(text) => Ok(text.to_string()),
            other => Err(place.index(i).expected("a text in which * stands for anything", other)),
        };
        match self.named.value(EXCEPT) {
            None => Ok(Vec::new()),
            Some(Data::List(patterns)) => patterns.iter().enumerate().map(pattern).collect(),
            Some(other) => Err(place.expected(r#"a list of patterns such as ["embedding*"]"#, other)),
        }
    }
}
