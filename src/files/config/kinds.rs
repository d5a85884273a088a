//! The kinds of optimisers that a configuration can name, and how each is made.
//!
//! A name may have several kinds, because the settings also decide: `MixedPrecision` with masters in F32 is
//! one kind, with masters in F64 another. `Cautious` is generic, so there is a kind for each rule inside. The
//! registry takes the kind that fits by name, then settings, then rules inside.

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
    /// The settings of the kind. If the example describes no settings, a table may leave these out.
    fixed_settings: Vec<(String, Setting)>,
    /// The field that has no default.
    required_field: Option<&'static str>,
    pub(super) make: Make,
}

/// How an optimiser is made.
#[derive(Clone)]
pub(super) enum Make {
    /// A copy of a rule. The type of this rule decides which rules can be inside.
    Copy(Box<dyn Rule>),
    /// A call with the rules that the table has.
    Build(Arc<Maker>),
}

/// Makes an optimiser from its table and the rules in the table. Returns `None` if the table lacks something.
type Maker = dyn Fn(&NamedTable<'_>, Vec<Box<dyn Rule>>) -> Result<Option<Optimiser>> + Send + Sync;

impl OptimiserKind {
    fn new(example: &impl Described, make: Make) -> Self {
        let example = example.description().record();
        OptimiserKind { fixed_settings: example.settings.clone(), example, required_field: None, make }
    }

    /// A kind of copies of a rule.
    pub(super) fn from_rule(rule: Box<dyn Rule>) -> Self {
        OptimiserKind::new(&rule.clone(), Make::Copy(rule))
    }

    /// A kind of rules or stores that hold N rules.
    pub(super) fn from_maker<O: IntoOptimiser, const N: usize>(
        make: impl Fn([Box<dyn Rule>; N]) -> O + Send + Sync + 'static,
    ) -> Self {
        let example = make([(); N].map(|()| example_rule()));
        let make = move |_: &NamedTable<'_>, rules: Vec<_>| {
            Ok(rules.try_into().ok().map(|rules| Optimiser::new(make(rules))))
        };
        OptimiserKind::new(&example, Make::Build(Arc::new(make)))
    }

    /// Replaces the settings of the kind, which are otherwise those of the example.
    fn with_settings(self, settings: impl IntoIterator<Item = (String, Setting)>) -> Self {
        OptimiserKind { fixed_settings: settings.into_iter().collect(), ..self }
    }

    /// Requires this field in the table.
    fn with_required(self, field: &'static str) -> Self {
        OptimiserKind { required_field: Some(field), ..self }
    }

    /// Whether both kinds have the same name, the same settings and, for copies, the same rules inside.
    pub(super) fn has_same_key(&self, other: &Self) -> bool {
        let are_copies = matches!((&self.make, &other.make), (Make::Copy(_), Make::Copy(_)));
        let differs_inside = are_copies && self.example.difference(&other.example).is_some();
        self.name() == other.name() && self.fixed_settings == other.fixed_settings && !differs_inside
    }

    pub(super) fn name(&self) -> &str {
        &self.example.kind
    }

    /// Whether a table lacks the field that has no default.
    pub(super) fn lacks_field(&self, named: &NamedTable<'_>) -> bool {
        self.required_field.is_some_and(|field| named.value(field).is_none())
    }

    /// The error that a table lacks something, with an example of a whole table.
    pub(super) fn incomplete_error(&self, named: &NamedTable<'_>) -> Error {
        let expected = format!("a table such as {}", example_table(&self.example));
        named.place.mismatch_error(expected, &Data::Table(named.table.into()))
    }

    /// Refuses keys that a table like the example does not have.
    pub(super) fn check_keys(&self, example: &OptimiserRecord, named: &NamedTable<'_>) -> Result<()> {
        // A copy has its members already, so a table cannot give other members.
        let is_copy = matches!(self.make, Make::Copy(_));
        let is_accepted = |key: &&str| !(is_copy && matches!(*key, MEMBERS | FALLBACK));
        let settings = example.settings.iter().map(|(name, _)| name.as_str());
        let fields = example.fields.iter().map(|(name, _)| name.as_str());
        let parts = parts(example).into_iter().map(|(key, _)| key).filter(is_accepted);
        let available: Vec<String> = settings.chain(fields).chain(parts).map(str::to_string).collect();
        check_keys_known(named.table, &available, &named.place)
    }

    /// Whether the settings in a table are those of this kind.
    pub(super) fn has_settings_of(&self, named: &NamedTable<'_>) -> bool {
        are_settings_of(&self.fixed_settings, self.example.settings.is_empty(), named)
    }

    /// The table and, for a copy, the tables of the rules inside. `None` if the rules inside of table and
    /// copy differ.
    pub(super) fn tables<'d>(&self, named: &NamedTable<'d>) -> Option<Vec<NamedTable<'d>>> {
        let mut tables = vec![named.clone()];
        for example in self.copied_rules() {
            let named = tables.last()?.inner()?;
            if example.kind != named.name || !are_settings_of(&example.settings, false, &named) {
                return None;
            }
            tables.push(named);
        }
        Some(tables)
    }

    /// Refuses keys that the [tables](OptimiserKind::tables) of the rules inside cannot have.
    pub(super) fn check_inner_keys(&self, tables: &[NamedTable<'_>]) -> Result<()> {
        let inner = self.copied_rules().zip(&tables[1..]);
        inner.into_iter().try_for_each(|(example, named)| self.check_keys(example, named))
    }

    /// The rules inside of a copy, outermost first. A kind without a copy has none.
    fn copied_rules(&self) -> impl Iterator<Item = &OptimiserRecord> {
        let is_copy = matches!(self.make, Make::Copy(_));
        let outermost = self.example.inner.as_deref().filter(|_| is_copy);
        std::iter::successors(outermost, |example| example.inner.as_deref())
    }
}

/// Whether a table has these settings. A switch that the table lacks is off.
fn are_settings_of(settings: &[(String, Setting)], may_lack: bool, named: &NamedTable<'_>) -> bool {
    settings.iter().all(|(name, setting)| match named.value(name) {
        Some(data) => *data == Data::from(setting),
        None => may_lack || *setting == Setting::Flag(false),
    })
}

/// All optimisers of this crate but `Offload`, whose table is the optimiser inside (see `form.rs`).
pub(super) fn kinds() -> Vec<OptimiserKind> {
    let mut kinds: Vec<OptimiserKind> =
        catalogue().into_iter().map(|listing| OptimiserKind::from_rule(listing.rule)).collect();
    kinds.extend(cautious::<Adam>().into_iter().chain(cautious::<AdamW>()));
    kinds.extend(cautious::<NAdam>().into_iter().chain(cautious::<Lion>()));
    let decay = |[inner]: [Box<dyn Rule>; 1]| DecoupledDecay::new(0.1, inner);
    let store_as_example = StoreAs::all(SlotFormat::Q8, example_rule());
    let fallback_example = Fallback::new(example_rule(), example_rule()).except(["embedding*"]);
    kinds.extend([
        OptimiserKind::from_maker(|[]| None::<Box<dyn Rule>>),
        OptimiserKind::from_maker(decay).with_required("decay_lambda"),
        OptimiserKind::from_maker(move |rules| decay(rules).cautious()).with_required("decay_lambda"),
        OptimiserKind::from_maker(|[inner]| Hyperball::new(inner)),
        OptimiserKind::from_maker(|[inner]| MixedPrecision::new(F32, inner)),
        OptimiserKind::from_maker(|[inner]| MixedPrecision::new(F64, inner)),
        OptimiserKind::from_maker(|[inner]| SplitMaster::of_24_bits(inner)),
        OptimiserKind::from_maker(|[inner]| SplitMaster::new(inner))
            .with_settings([("bits".to_string(), Setting::Count(32))]),
        OptimiserKind::from_maker(|[inner]| Kahan::new(inner)),
        OptimiserKind::from_maker(|[inner]| StochasticRounding::new(0, inner)).with_required("seed"),
        // No fixed settings, because `store_as` and `fallback` read the settings of the table.
        OptimiserKind::new(&store_as_example, Make::Build(Arc::new(store_as))).with_settings([]),
        OptimiserKind::new(&fallback_example, Make::Build(Arc::new(fallback))).with_settings([]),
    ]);
    kinds
}

/// The rule inside of the examples.
fn example_rule() -> Box<dyn Rule> {
    Box::new(Adam::default())
}

/// `Cautious` around a rule, scaled and unscaled.
fn cautious<R: Elementwise + Default>() -> [OptimiserKind; 2] {
    let scaled = Cautious::new(R::default());
    [scaled.clone(), scaled.unscaled()].map(|rule| OptimiserKind::from_rule(Box::new(rule)))
}

/// Makes a `StoreAs`.
fn store_as(named: &NamedTable<'_>, rules: Vec<Box<dyn Rule>>) -> Result<Option<Optimiser>> {
    const SLOTS: &str = "slots";
    let place = named.place.key(SLOTS);
    let read_format = |data: &Data, place: Place| {
        let formats = [F16, BF16, F32, F64].map(SlotFormat::Dtype).into_iter().chain([SlotFormat::Q8]);
        let is_named = |format: &SlotFormat| *data == Data::text(&format.to_string());
        formats
            .into_iter()
            .find(is_named)
            .ok_or_else(|| place.mismatch_error(r#""Q8", "F16", "BF16", "F32" or "F64""#, data))
    };
    let (Ok([inner]), Some(slots)) = (<[_; 1]>::try_from(rules), named.value(SLOTS)) else { return Ok(None) };
    let rule = match slots {
        Data::Table(entries) => {
            let formats =
                entries.iter().map(|(name, data)| Ok((&**name, read_format(data, place.key(name))?)));
            StoreAs::new(formats.collect::<Result<Vec<_>>>()?, inner)
        }
        data => StoreAs::all(read_format(data, place)?, inner),
    };
    Ok(Some(Optimiser::new(rule)))
}

/// Makes a `Fallback`.
fn fallback(named: &NamedTable<'_>, rules: Vec<Box<dyn Rule>>) -> Result<Option<Optimiser>> {
    const EXCEPT: &str = "except";
    let place = named.place.key(EXCEPT);
    let pattern = |(i, data): (usize, &Data)| match data {
        Data::Text(text) => Ok(text.to_string()),
        other => Err(place.index(i).mismatch_error("a text in which * stands for anything", other)),
    };
    let except: Vec<String> = match named.value(EXCEPT) {
        None => Vec::new(),
        Some(Data::List(patterns)) => patterns.iter().enumerate().map(pattern).collect::<Result<_>>()?,
        Some(other) => {
            return Err(place.mismatch_error(r#"a list of patterns such as ["embedding*"]"#, other));
        }
    };
    let pair = <[_; 2]>::try_from(rules).ok();
    Ok(pair.map(|[inner, other]| Optimiser::new(Fallback::new(inner, other).except(except))))
}

/// The error that a table has other settings than all kinds of its name.
pub(super) fn settings_error(kinds: &[&OptimiserKind], named: &NamedTable<'_>) -> Error {
    let settings = || kinds.iter().flat_map(|kind| &kind.fixed_settings);
    for (name, _) in settings() {
        let values: Vec<Data> =
            settings().filter(|(other, _)| other == name).map(|(_, setting)| Data::from(setting)).collect();
        if let Some(data) = named.value(name).filter(|data| !values.contains(data)) {
            let texts: Vec<String> = values.iter().map(Data::to_string).collect();
            let expected = distinct(texts.iter().map(String::as_str)).join(" or ");
            return named.place.key(name).mismatch_error(expected, data);
        }
    }
    kinds[0].incomplete_error(named)
}

/// The error that a table has another rule inside than all kinds whose settings fit.
pub(super) fn inner_rule_error(fitting_kinds: &[&OptimiserKind], named: &NamedTable<'_>) -> Error {
    let Some(got) = named.value(INNER) else { return fitting_kinds[0].incomplete_error(named) };
    let rules = fitting_kinds.iter().filter_map(|kind| kind.example.inner.as_deref());
    let rules: Vec<String> = rules.map(OptimiserRecord::to_string).collect();
    let expected =
        format!("{} (or a rule that `Registry::with` was given in {})", rules.join(", "), named.name);
    named.place.key(INNER).mismatch_error(expected, got)
}
