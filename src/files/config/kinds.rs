//! The kinds of optimisers that a configuration can name, and how each is made.
//!
//! A name may have several kinds, because settings decide what is made: `MixedPrecision` with masters in F32
//! is one kind, with masters in F64 another. `Cautious` is generic, so each rule inside makes another kind.
//! The registry takes the kind that fits by name, then settings, then rules inside.

use std::sync::Arc;

use super::form::{FALLBACK, INNER, MEMBERS, Named, Place, check_known};
use super::written::{example, parts};
use crate::error::{Error, Result, each_once};
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
    /// The settings of the kind. If the example describes none, a table may leave these out.
    fixed: Vec<(String, Setting)>,
    /// The field that has no default.
    needed: Option<&'static str>,
    pub(super) make: Make,
}

#[derive(Clone)]
pub(super) enum Make {
    /// A copy of a rule. The type of this rule decides which rules can be inside.
    Copy(Box<dyn Rule>),
    /// Made from the rules that the table has.
    Of(Arc<Maker>),
}

/// Makes an optimiser from its table and the rules in it. `None` if something is missing.
type Maker = dyn Fn(&Named<'_>, Vec<Box<dyn Rule>>) -> Result<Option<Optimiser>> + Send + Sync;

impl OptimiserKind {
    fn new(example: &impl Described, make: Make) -> Self {
        let example = example.description().record();
        OptimiserKind { fixed: example.settings.clone(), example, needed: None, make }
    }

    /// A kind of copies of a rule.
    pub(super) fn of_copies(rule: Box<dyn Rule>) -> Self {
        OptimiserKind::new(&rule.clone(), Make::Copy(rule))
    }

    /// A kind of rules or stores that hold N rules.
    pub(super) fn around<O: IntoOptimiser, const N: usize>(
        make: impl Fn([Box<dyn Rule>; N]) -> O + Send + Sync + 'static,
    ) -> Self {
        let example = make([(); N].map(|()| any_rule()));
        let make = move |_: &Named<'_>, held: Vec<_>| {
            Ok(held.try_into().ok().map(|held| Optimiser::new(make(held))))
        };
        OptimiserKind::new(&example, Make::Of(Arc::new(make)))
    }

    /// Replaces the settings of the kind, which are otherwise those of the example.
    fn with_fixed(self, fixed: impl IntoIterator<Item = (String, Setting)>) -> Self {
        OptimiserKind { fixed: fixed.into_iter().collect(), ..self }
    }

    /// Adds that the table must have this field.
    fn needing(self, field: &'static str) -> Self {
        OptimiserKind { needed: Some(field), ..self }
    }

    /// Whether the two have one name and the same settings and, if both are copies, the same rules inside.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let are_copies = matches!((&self.make, &other.make), (Make::Copy(_), Make::Copy(_)));
        let is_other = are_copies && self.example.difference(&other.example).is_some();
        self.name() == other.name() && self.fixed == other.fixed && !is_other
    }

    pub(super) fn name(&self) -> &str {
        &self.example.kind
    }

    /// Whether a table lacks the field that has no default.
    pub(super) fn lacks_field(&self, named: &Named<'_>) -> bool {
        self.needed.is_some_and(|field| named.value(field).is_none())
    }

    /// The error that a table lacks something, with an example of a whole table.
    pub(super) fn incomplete(&self, named: &Named<'_>) -> Error {
        let expected = format!("a table such as {}", example(&self.example));
        named.place.expected(expected, &Data::Table(named.table.into()))
    }

    /// Refuses keys that a table like the example does not have.
    pub(super) fn check_keys(&self, example: &OptimiserRecord, named: &Named<'_>) -> Result<()> {
        // A copy has its members already, so a table cannot give it others.
        let is_copy = matches!(self.make, Make::Copy(_));
        let is_taken = |key: &&str| !(is_copy && matches!(*key, MEMBERS | FALLBACK));
        let settings = example.settings.iter().map(|(name, _)| name.as_str());
        let fields = example.fields.iter().map(|(name, _)| name.as_str());
        let parts = parts(example).into_iter().map(|(key, _)| key).filter(is_taken);
        let available: Vec<String> = settings.chain(fields).chain(parts).map(str::to_string).collect();
        check_known(named.table, &available, &named.place)
    }

    /// Whether the settings in a table are those of this kind.
    pub(super) fn has_settings_of(&self, named: &Named<'_>) -> bool {
        are_settings_of(&self.fixed, self.example.settings.is_empty(), named)
    }

    /// The table and, for a copy, the tables of the rules inside. `None` if the table has another rule inside
    /// than the copy.
    pub(super) fn tables<'d>(&self, named: &Named<'d>) -> Option<Vec<Named<'d>>> {
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
    pub(super) fn check_inner_keys(&self, tables: &[Named<'_>]) -> Result<()> {
        let inner = self.copied_rules().zip(&tables[1..]);
        inner.into_iter().try_for_each(|(example, named)| self.check_keys(example, named))
    }

    /// The rules inside of a copy, outermost first. Empty if this is no copy.
    fn copied_rules(&self) -> impl Iterator<Item = &OptimiserRecord> {
        let is_copy = matches!(self.make, Make::Copy(_));
        let outermost = self.example.inner.as_deref().filter(|_| is_copy);
        std::iter::successors(outermost, |example| example.inner.as_deref())
    }
}

/// Whether a table has these settings. A switch that the table lacks is off.
fn are_settings_of(settings: &[(String, Setting)], may_lack: bool, named: &Named<'_>) -> bool {
    settings.iter().all(|(name, setting)| match named.value(name) {
        Some(data) => *data == Data::from(setting),
        None => may_lack || *setting == Setting::Flag(false),
    })
}

/// All optimisers of this crate but `Offload`, whose table is the optimiser inside (see `form.rs`).
pub(super) fn kinds() -> Vec<OptimiserKind> {
    let mut all: Vec<OptimiserKind> =
        catalogue().into_iter().map(|listing| OptimiserKind::of_copies(listing.rule)).collect();
    all.extend(cautious::<Adam>().into_iter().chain(cautious::<AdamW>()));
    all.extend(cautious::<NAdam>().into_iter().chain(cautious::<Lion>()));
    let decay = |[inner]: [Box<dyn Rule>; 1]| DecoupledDecay::new(0.1, inner);
    let store_as_example = StoreAs::all(SlotFormat::Q8, any_rule());
    let fallback_example = Fallback::new(any_rule(), any_rule()).except(["embedding*"]);
    all.extend([
        OptimiserKind::around(|[]| None::<Box<dyn Rule>>),
        OptimiserKind::around(decay).needing("decay_lambda"),
        OptimiserKind::around(move |held| decay(held).cautious()).needing("decay_lambda"),
        OptimiserKind::around(|[inner]| Hyperball::new(inner)),
        OptimiserKind::around(|[inner]| MixedPrecision::new(F32, inner)),
        OptimiserKind::around(|[inner]| MixedPrecision::new(F64, inner)),
        OptimiserKind::around(|[inner]| SplitMaster::of_24_bits(inner)),
        OptimiserKind::around(|[inner]| SplitMaster::new(inner))
            .with_fixed([("bits".to_string(), Setting::Count(32))]),
        OptimiserKind::around(|[inner]| Kahan::new(inner)),
        OptimiserKind::around(|[inner]| StochasticRounding::new(0, inner)).needing("seed"),
        // No fixed settings, because `store_as` and `fallback` read theirs from the table.
        OptimiserKind::new(&store_as_example, Make::Of(Arc::new(store_as))).with_fixed([]),
        OptimiserKind::new(&fallback_example, Make::Of(Arc::new(fallback))).with_fixed([]),
    ]);
    all
}

/// Any rule, to be inside of the examples.
fn any_rule() -> Box<dyn Rule> {
    Box::new(Adam::default())
}

/// `Cautious` around a rule, scaled and unscaled.
fn cautious<R: Elementwise + Default>() -> [OptimiserKind; 2] {
    let scaled = Cautious::new(R::default());
    [scaled.clone(), scaled.unscaled()].map(|rule| OptimiserKind::of_copies(Box::new(rule)))
}

fn store_as(named: &Named<'_>, held: Vec<Box<dyn Rule>>) -> Result<Option<Optimiser>> {
    const SLOTS: &str = "slots";
    let place = named.place.key(SLOTS);
    let format = |data: &Data, place: Place| {
        let formats = [F16, BF16, F32, F64].map(SlotFormat::Dtype).into_iter().chain([SlotFormat::Q8]);
        let format = formats.into_iter().find(|format| *data == Data::text(&format.to_string()));
        format.ok_or_else(|| place.expected(r#""Q8", "F16", "BF16", "F32" or "F64""#, data))
    };
    let (Ok([inner]), Some(slots)) = (<[_; 1]>::try_from(held), named.value(SLOTS)) else { return Ok(None) };
    let rule = match slots {
        Data::Table(entries) => {
            let formats = entries.iter().map(|(name, data)| Ok((&**name, format(data, place.key(name))?)));
            StoreAs::new(formats.collect::<Result<Vec<_>>>()?, inner)
        }
        data => StoreAs::all(format(data, place)?, inner),
    };
    Ok(Some(Optimiser::new(rule)))
}

fn fallback(named: &Named<'_>, held: Vec<Box<dyn Rule>>) -> Result<Option<Optimiser>> {
    const EXCEPT: &str = "except";
    let place = named.place.key(EXCEPT);
    let pattern = |(i, data): (usize, &Data)| match data {
        Data::Text(text) => Ok(text.to_string()),
        other => Err(place.index(i).expected("a text in which * stands for anything", other)),
    };
    let except: Vec<String> = match named.value(EXCEPT) {
        None => Vec::new(),
        Some(Data::List(patterns)) => patterns.iter().enumerate().map(pattern).collect::<Result<_>>()?,
        Some(other) => return Err(place.expected(r#"a list of patterns such as ["embedding*"]"#, other)),
    };
    let rules = <[_; 2]>::try_from(held).ok();
    Ok(rules.map(|[inner, other]| Optimiser::new(Fallback::new(inner, other).except(except))))
}

/// The error that none of the kinds of one name has the settings of a table.
pub(super) fn other_settings(of_name: &[&OptimiserKind], named: &Named<'_>) -> Error {
    let fixed = || of_name.iter().flat_map(|kind| &kind.fixed);
    for (name, _) in fixed() {
        let values: Vec<Data> =
            fixed().filter(|(other, _)| other == name).map(|(_, setting)| Data::from(setting)).collect();
        if let Some(data) = named.value(name).filter(|data| !values.contains(data)) {
            let texts: Vec<String> = values.iter().map(Data::to_string).collect();
            let expected = each_once(texts.iter().map(String::as_str)).join(" or ");
            return named.place.key(name).expected(expected, data);
        }
    }
    of_name[0].incomplete(named)
}

/// The error that none of the kinds whose settings fit has the rule inside that a table has.
pub(super) fn other_rule(fitting: &[&OptimiserKind], named: &Named<'_>) -> Error {
    let Some(got) = named.value(INNER) else { return fitting[0].incomplete(named) };
    let rules = fitting.iter().filter_map(|kind| kind.example.inner.as_deref());
    let rules: Vec<String> = rules.map(OptimiserRecord::to_string).collect();
    let expected =
        format!("{} (or a rule that `Registry::with` was given in {})", rules.join(", "), named.name);
    named.place.key(INNER).expected(expected, got)
}
