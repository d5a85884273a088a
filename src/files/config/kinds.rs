//! The kinds of optimisers that a configuration can name, and how each is made.
//!
//! A name may have several kinds, because other settings make another kind: `MixedPrecision` with masters in
//! F32 is one kind, with masters in F64 another. `Cautious` is generic, so there is a kind for each rule
//! inside. The registry chooses a kind by name, then by settings, then by the rules inside.

use std::sync::Arc;

use super::form::{FALLBACK, INNER, MEMBERS, NamedTable, Place, check_keys_known};
use super::written::{example_table, parts};
use crate::error::{Error, Result, distinct};
use crate::numbers::DType::{BF16, F16, F32, F64};
use crate::rule::field::Data;
use crate::rule::{
    Described, Elementwise, IntoOptimiser, Optimiser, OptimiserRecord, Rule, Setting, SlotFormat,
};
use crate::rules::{Adam, AdamW, Lion, NAdam, catalogue};
use crate::stores::{Kahan, MixedPrecision, SplitMaster, StochasticRounding};
use crate::wrappers::{Cautious, DecoupledDecay, Fallback, Hyperball, StoreAs};

/// An optimiser with certain settings: how it is made, and an example.
#[derive(Clone)]
pub(super) struct OptimiserKind {
    pub(super) example: OptimiserRecord,
    /// The settings of the kind. A table may lack them if the example describes no settings.
    fixed_settings: Vec<(String, Setting)>,
    /// The field that has no default.
    required_field: Option<&'static str>,
    pub(super) recipe: Recipe,
}

/// How an optimiser is made.
#[derive(Clone)]
pub(super) enum Recipe {
    /// A copy of a rule. The type of this rule decides which rules can be inside.
    Copy(Box<dyn Rule>),
    /// A call of a function with the rules inside of the table.
    Build(Arc<BuildFn>),
}

/// Makes an optimiser from its table and the rules in the table. Returns `None` if the table lacks something.
type BuildFn = dyn Fn(&NamedTable<'_>, Vec<Box<dyn Rule>>) -> Result<Option<Optimiser>> + Send + Sync;

impl OptimiserKind {
    fn new(described: &impl Described, recipe: Recipe) -> Self {
        let example = described.description().record();
        OptimiserKind {
            fixed_settings: example.settings.clone(),
            example,
            required_field: None,
            recipe,
        }
    }

    /// A kind whose optimisers are copies of a rule.
    pub(super) fn from_rule(rule: Box<dyn Rule>) -> Self {
        OptimiserKind::new(&rule.clone(), Recipe::Copy(rule))
    }

    /// A kind whose optimisers are rules or stores that hold N rules.
    pub(super) fn from_maker<O: IntoOptimiser, const N: usize>(
        make: impl Fn([Box<dyn Rule>; N]) -> O + Send + Sync + 'static,
    ) -> Self {
        let example = make([(); N].map(|()| example_rule()));
        let build = move |_: &NamedTable<'_>, rules: Vec<_>| {
            Ok(rules.try_into().ok().map(|rules| Optimiser::new(make(rules))))
        };
        OptimiserKind::new(&example, Recipe::Build(Arc::new(build)))
    }

    /// Replaces the settings of the kind, which are otherwise those of the example.
    fn with_settings(self, settings: impl IntoIterator<Item = (String, Setting)>) -> Self {
        OptimiserKind {
            fixed_settings: settings.into_iter().collect(),
            ..self
        }
    }

    /// Requires this field in the table.
    fn with_required(self, field: &'static str) -> Self {
        OptimiserKind {
            required_field: Some(field),
            ..self
        }
    }

    /// Whether both kinds have the same name, the same settings and, for copies, the same rules inside.
    pub(super) fn is_equivalent_to(&self, other: &Self) -> bool {
        let are_copies = matches!((&self.recipe, &other.recipe), (Recipe::Copy(_), Recipe::Copy(_)));
        let differs_inside = are_copies && self.example.difference(&other.example).is_some();
        self.name() == other.name() && self.fixed_settings == other.fixed_settings && !differs_inside
    }

    pub(super) fn name(&self) -> &str {
        &self.example.kind
    }

    /// Whether a table lacks the field that has no default.
    pub(super) fn lacks_field(&self, named_table: &NamedTable<'_>) -> bool {
        self.required_field
            .is_some_and(|field| named_table.value(field).is_none())
    }

    /// The error that a table lacks something, with an example of a whole table.
    pub(super) fn incomplete_error(&self, named_table: &NamedTable<'_>) -> Error {
        let expected = format!("a table such as {}", example_table(&self.example));
        named_table
            .place
            .mismatch_error(expected, &Data::Table(named_table.table.into()))
    }

    /// Refuses keys that no table of an optimiser with this record has.
    pub(super) fn check_keys(&self, record: &OptimiserRecord, named_table: &NamedTable<'_>) -> Result<()> {
        // A copy has its members already, so a table cannot give other members.
        let is_copy = matches!(self.recipe, Recipe::Copy(_));
        let is_accepted = |key: &&str| !(is_copy && matches!(*key, MEMBERS | FALLBACK));
        let settings = record.settings.iter().map(|(name, _)| name.as_str());
        let fields = record.fields.iter().map(|(name, _)| name.as_str());
        let inner_keys = parts(record).into_iter().map(|(key, _)| key).filter(is_accepted);
        let known_keys: Vec<String> = settings
            .chain(fields)
            .chain(inner_keys)
            .map(str::to_string)
            .collect();
        check_keys_known(named_table.table, &known_keys, &named_table.place)
    }

    /// Whether a table has the settings of this kind.
    pub(super) fn accepts_settings_of(&self, named_table: &NamedTable<'_>) -> bool {
        are_in_table(
            &self.fixed_settings,
            self.example.settings.is_empty(),
            named_table,
        )
    }

    /// The table and, for a copy, the tables of the rules inside. `None` if the table has other rules inside
    /// than the copy.
    pub(super) fn tables<'d>(&self, named_table: &NamedTable<'d>) -> Option<Vec<NamedTable<'d>>> {
        let mut tables = vec![named_table.clone()];
        for record in self.inner_records() {
            let inner_table = tables.last()?.inner()?;
            if record.kind != inner_table.name || !are_in_table(&record.settings, false, &inner_table) {
                return None;
            }
            tables.push(inner_table);
        }
        Some(tables)
    }

    /// Refuses keys that the [tables](OptimiserKind::tables) of the rules inside cannot have.
    pub(super) fn check_inner_keys(&self, tables: &[NamedTable<'_>]) -> Result<()> {
        let mut records_and_tables = self.inner_records().zip(&tables[1..]);
        records_and_tables.try_for_each(|(record, inner_table)| self.check_keys(record, inner_table))
    }

    /// The records of the rules inside of a copy, outermost first. A kind without a copy has none.
    fn inner_records(&self) -> impl Iterator<Item = &OptimiserRecord> {
        let is_copy = matches!(self.recipe, Recipe::Copy(_));
        let outermost = self.example.inner.as_deref().filter(|_| is_copy);
        std::iter::successors(outermost, |record| record.inner.as_deref())
    }
}

/// Whether a table has these settings. A switch that the table lacks is off.
fn are_in_table(settings: &[(String, Setting)], may_be_absent: bool, named_table: &NamedTable<'_>) -> bool {
    settings
        .iter()
        .all(|(name, setting)| match named_table.value(name) {
            Some(data) => *data == Data::from(setting),
            None => may_be_absent || *setting == Setting::Flag(false),
        })
}

/// All optimisers of this crate except `Offload`, which has the optimiser inside in place of a table (see
/// `form.rs`).
pub(super) fn kinds() -> Vec<OptimiserKind> {
    let mut kinds: Vec<OptimiserKind> = catalogue()
        .into_iter()
        .map(|listing| OptimiserKind::from_rule(listing.rule))
        .collect();
    kinds.extend(
        cautious_kinds::<Adam>()
            .into_iter()
            .chain(cautious_kinds::<AdamW>()),
    );
    kinds.extend(
        cautious_kinds::<NAdam>()
            .into_iter()
            .chain(cautious_kinds::<Lion>()),
    );
    let make_decoupled_decay = |[inner]: [Box<dyn Rule>; 1]| DecoupledDecay::new(0.1, inner);
    let quantised_example = StoreAs::all(SlotFormat::Q8, example_rule());
    let fallback_example = Fallback::new(example_rule(), example_rule()).except(["embedding*"]);
    kinds.extend([
        OptimiserKind::from_maker(|[]| None::<Box<dyn Rule>>),
        OptimiserKind::from_maker(make_decoupled_decay).with_required("decay_lambda"),
        OptimiserKind::from_maker(move |rules| make_decoupled_decay(rules).cautious())
            .with_required("decay_lambda"),
        OptimiserKind::from_maker(|[inner]| Hyperball::new(inner)),
        OptimiserKind::from_maker(|[inner]| MixedPrecision::new(F32, inner)),
        OptimiserKind::from_maker(|[inner]| MixedPrecision::new(F64, inner)),
        OptimiserKind::from_maker(|[inner]| SplitMaster::of_24_bits(inner)),
        OptimiserKind::from_maker(|[inner]| SplitMaster::new(inner))
            .with_settings([("bits".to_string(), Setting::Count(32))]),
        OptimiserKind::from_maker(|[inner]| Kahan::new(inner)),
        OptimiserKind::from_maker(|[inner]| StochasticRounding::new(0, inner)).with_required("seed"),
        // No fixed settings, because `make_store_as` and `make_fallback` read the settings of the table.
        OptimiserKind::new(&quantised_example, Recipe::Build(Arc::new(make_store_as))).with_settings([]),
        OptimiserKind::new(&fallback_example, Recipe::Build(Arc::new(make_fallback))).with_settings([]),
    ]);
    kinds
}

/// The rule inside of the examples.
fn example_rule() -> Box<dyn Rule> {
    Box::new(Adam::default())
}

/// `Cautious` around a rule, scaled and unscaled.
fn cautious_kinds<R: Elementwise + Default>() -> [OptimiserKind; 2] {
    let scaled = Cautious::new(R::default());
    [scaled.clone(), scaled.unscaled()].map(|rule| OptimiserKind::from_rule(Box::new(rule)))
}

/// Makes a `StoreAs`.
fn make_store_as(named_table: &NamedTable<'_>, rules: Vec<Box<dyn Rule>>) -> Result<Option<Optimiser>> {
    const SLOTS: &str = "slots";
    let place = named_table.place.key(SLOTS);
    let read_format = |data: &Data, place: Place| {
        let formats = [F16, BF16, F32, F64]
            .map(SlotFormat::Dtype)
            .into_iter()
            .chain([SlotFormat::Q8]);
        let is_named = |format: &SlotFormat| *data == Data::text(&format.to_string());
        formats
            .into_iter()
            .find(is_named)
            .ok_or_else(|| place.mismatch_error(r#""Q8", "F16", "BF16", "F32" or "F64""#, data))
    };
    let (Ok([inner]), Some(slots)) = (<[_; 1]>::try_from(rules), named_table.value(SLOTS)) else {
        return Ok(None);
    };
    let rule = match slots {
        Data::Table(entries) => {
            let formats = entries
                .iter()
                .map(|(name, data)| Ok((&**name, read_format(data, place.key(name))?)));
            StoreAs::new(formats.collect::<Result<Vec<_>>>()?, inner)
        }
        data => StoreAs::all(read_format(data, place)?, inner),
    };
    Ok(Some(Optimiser::new(rule)))
}

/// Makes a `Fallback`.
fn make_fallback(named_table: &NamedTable<'_>, rules: Vec<Box<dyn Rule>>) -> Result<Option<Optimiser>> {
    const EXCEPT: &str = "except";
    let place = named_table.place.key(EXCEPT);
    let read_pattern = |(i, data): (usize, &Data)| match data {
        Data::Text(text) => Ok(text.to_string()),
        _ => Err(place
            .index(i)
            .mismatch_error("a text in which * stands for anything", data)),
    };
    let except: Vec<String> = match named_table.value(EXCEPT) {
        None => Vec::new(),
        Some(Data::List(patterns)) => patterns
            .iter()
            .enumerate()
            .map(read_pattern)
            .collect::<Result<_>>()?,
        Some(data) => {
            return Err(place.mismatch_error(r#"a list of patterns such as ["embedding*"]"#, data));
        }
    };
    let pair = <[_; 2]>::try_from(rules).ok();
    Ok(pair.map(|[inner, alternative]| Optimiser::new(Fallback::new(inner, alternative).except(except))))
}

/// The error that no kind of a table's name has the settings of the table.
pub(super) fn settings_error(kinds: &[&OptimiserKind], named_table: &NamedTable<'_>) -> Error {
    let all_settings = || kinds.iter().flat_map(|kind| &kind.fixed_settings);
    for (name, _) in all_settings() {
        let values: Vec<Data> = all_settings()
            .filter(|(key, _)| key == name)
            .map(|(_, setting)| Data::from(setting))
            .collect();
        if let Some(data) = named_table.value(name).filter(|data| !values.contains(data)) {
            let texts: Vec<String> = values.iter().map(Data::to_string).collect();
            let expected = distinct(texts.iter().map(String::as_str)).join(" or ");
            return named_table.place.key(name).mismatch_error(expected, data);
        }
    }
    kinds[0].incomplete_error(named_table)
}

/// The error that no kind with fitting settings has the rule inside of a table.
pub(super) fn inner_rule_error(fitting_kinds: &[&OptimiserKind], named_table: &NamedTable<'_>) -> Error {
    let Some(got) = named_table.value(INNER) else {
        return fitting_kinds[0].incomplete_error(named_table);
    };
    let inner_records = fitting_kinds
        .iter()
        .filter_map(|kind| kind.example.inner.as_deref());
    let rules: Vec<String> = inner_records.map(OptimiserRecord::to_string).collect();
    let expected = format!(
        "{} (or a rule that `Registry::with` was given in {})",
        rules.join(", "),
        named_table.name
    );
    named_table.place.key(INNER).mismatch_error(expected, got)
}
