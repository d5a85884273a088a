//! The grammar of a configuration. The registry checks the names of rules and fields.
//!
//! ```text
//! configuration = optimiser | {"ByPath": [{"pattern": text, "optimiser": optimiser | "LeaveOut" | null} ..]}
//! optimiser     = name | {name: table} | [optimiser ..] | {"Offload": optimiser}
//! table         = {setting or field: value, "inner": optimiser, "fallback": optimiser, "members": [..] ..}
//! ```

use super::data::{Data, DataEntry, value};
use super::place::Place;
use crate::error::{Error, Result};

/// The key of the rule inside another.
pub(super) const INNER: &str = "inner";
/// The key of the second rule of a `Fallback`.
pub(super) const FALLBACK: &str = "fallback";
/// The key of a list of rules.
pub(super) const MEMBERS: &str = "members";

/// The optimiser whose table is the optimiser inside.
pub(super) const OFFLOAD: &str = "Offload";

pub(super) const BY_PATH: &str = "ByPath";
pub(super) const PATTERN: &str = "pattern";
pub(super) const OPTIMISER: &str = "optimiser";
const LEAVE_OUT: &str = "LeaveOut";

/// A whole configuration.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Form {
    Single(Data),
    ByPath(Vec<PatternEntry>),
}

/// A pattern, and the optimiser of the parameters that match it. `None` leaves these parameters out.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PatternEntry {
    pub(super) pattern: String,
    pub(super) optimiser: Option<Data>,
}

impl Form {
    pub(super) fn read(data: Data) -> Result<Self> {
        data.check_keys(&Place::Whole)?;
        let choices = match &data {
            Data::Table(entries) if entries.len() == 1 => value(entries, BY_PATH),
            _ => None,
        };
        let Some(choices) = choices else {
            check(&data, &Place::Whole)?;
            return Ok(Form::Single(data));
        };
        let place = Place::Whole.key(BY_PATH);
        let Data::List(choices) = choices else {
            return Err(place.expected(r#"a list such as [{"pattern": "*", "optimiser": "Adam"}]"#, choices));
        };
        let choices = choices.iter().enumerate();
        let read = choices.map(|(i, choice)| PatternEntry::read(choice, &place.index(i)));
        read.collect::<Result<_>>().map(Form::ByPath)
    }

    pub(super) fn write(self) -> Data {
        let choice = |PatternEntry { pattern, optimiser }: PatternEntry| {
            let optimiser = optimiser.unwrap_or_else(|| Data::text(LEAVE_OUT));
            Data::table([(PATTERN, Data::Text(pattern.into())), (OPTIMISER, optimiser)])
        };
        match self {
            Form::Single(optimiser) => optimiser,
            Form::ByPath(choices) => {
                Data::table([(BY_PATH, Data::List(choices.into_iter().map(choice).collect()))])
            }
        }
    }
}

impl PatternEntry {
    fn read(data: &Data, place: &Place) -> Result<Self> {
        let expected =
            || place.expected(r#"a table such as {"pattern": "*.bias", "optimiser": "Adam"}"#, data);
        let Data::Table(entries) = data else { return Err(expected()) };
        check_known(entries, &[PATTERN, OPTIMISER].map(str::to_string), place)?;
        let (Some(pattern), Some(optimiser)) = (value(entries, PATTERN), value(entries, OPTIMISER)) else {
            return Err(expected());
        };
        let Data::Text(pattern) = pattern else {
            return Err(place.key(PATTERN).expected("a text in which * stands for anything", pattern));
        };
        let is_left_out = [Data::Nothing, Data::text(LEAVE_OUT)].contains(optimiser);
        let optimiser = Some(optimiser).filter(|_| !is_left_out).cloned();
        optimiser.iter().try_for_each(|own| check(own, &place.key(OPTIMISER)))?;
        Ok(PatternEntry { pattern: pattern.to_string(), optimiser })
    }
}

/// Refuses a table with a key that is not `available`.
pub(super) fn check_known(entries: &[DataEntry], available: &[String], place: &Place) -> Result<()> {
    match entries.iter().find(|(key, _)| !available.iter().any(|known| **known == **key)) {
        None => Ok(()),
        Some((key, _)) => Err(place.error(Error::unknown("key", key, available))),
    }
}

/// Data, read as an optimiser.
pub(super) enum OptimiserForm<'d> {
    Named(Named<'d>),
    /// `Offload` around an optimiser.
    Offload(&'d Data),
    Chain(&'d [Data]),
}

/// The name of an optimiser, and its table.
#[derive(Clone)]
pub(super) struct Named<'d> {
    pub(super) name: &'d str,
    /// Settings and fields, and the rules inside.
    pub(super) table: &'d [DataEntry],
    /// The place of the table.
    pub(super) place: Place,
}

impl<'d> OptimiserForm<'d> {
    pub(super) fn read(data: &'d Data, place: &Place) -> Result<Self> {
        let (name, table) = match data {
            Data::List(members) => return Ok(OptimiserForm::Chain(members)),
            Data::Text(name) => (name, None),
            Data::Table(entries) if entries.len() == 1 => (&entries[0].0, Some(&entries[0].1)),
            _ => {
                let rule = r#"a rule such as "Adam" or {"Adam": {"eta": 0.001}}, or a list of rules"#;
                return Err(place.expected(rule, data));
            }
        };
        let belongs = match &**name {
            BY_PATH => "chooses among optimisers and goes around all of them",
            LEAVE_OUT => "can only be a whole optimiser, in a choice of ByPath",
            OFFLOAD => {
                let needed = || place.expected(r#"a table such as {"Offload": "Adam"}"#, data);
                return table.ok_or_else(needed).map(OptimiserForm::Offload);
            }
            _ => return Named::read(name, table, place.key(name)).map(OptimiserForm::Named),
        };
        Err(place.misplaced(name, belongs))
    }
}

/// Refuses what cannot be an optimiser, whatever rules a registry has.
fn check(data: &Data, place: &Place) -> Result<()> {
    match OptimiserForm::read(data, place)? {
        OptimiserForm::Chain(members) => {
            members.iter().enumerate().try_for_each(|(i, member)| check(member, &place.index(i)))
        }
        OptimiserForm::Offload(inner) => check(inner, &place.key(OFFLOAD)),
        OptimiserForm::Named(named) => {
            named.table.iter().try_for_each(|(key, value)| match (&**key, value) {
                (INNER | FALLBACK, _) | (MEMBERS, Data::List(_)) => check(value, &named.place.key(key)),
                (MEMBERS, _) => Err(named.place.key(key).expected("a list of rules", value)),
                _ => Ok(()),
            })
        }
    }
}

impl<'d> Named<'d> {
    fn read(name: &'d str, table: Option<&'d Data>, place: Place) -> Result<Self> {
        match table {
            None => Ok(Named { name, table: &[], place }),
            Some(Data::Table(table)) => Ok(Named { name, table, place }),
            Some(other) => {
                Err(place.expected(r#"a table such as {"eta": 0.001} or {"inner": "Adam"}"#, other))
            }
        }
    }

    /// The value of a key, if the table has the key.
    pub(super) fn value(&self, key: &str) -> Option<&'d Data> {
        value(self.table, key)
    }

    /// The rule inside, if there is one and it has a name, unlike a chain.
    pub(super) fn inner(&self) -> Option<Named<'d>> {
        match OptimiserForm::read(self.value(INNER)?, &self.place.key(INNER)) {
            Ok(OptimiserForm::Named(inner)) => Some(inner),
            _ => None,
        }
    }
}
