//! The grammar of a configuration, and the places in a configuration, for errors.
//!
//! The registry checks the names of rules and fields.
//!
//! ```text
//! configuration = optimiser | {"ByPath": [{"pattern": text, "optimiser": optimiser | "LeaveOut" | null} ..]}
//! optimiser     = name | {name: table} | [optimiser ..] | {"Offload": optimiser}
//! table         = {setting or field: value, "inner": optimiser, "fallback": optimiser, "members": [..] ..}
//! ```

use std::collections::HashSet;
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::{DEEPEST, Data, DataEntry};

/// The key of the rule inside another rule.
pub(super) const INNER: &str = "inner";
/// The key of the second rule of a `Fallback`.
pub(super) const FALLBACK: &str = "fallback";
/// The key of a list of rules.
pub(super) const MEMBERS: &str = "members";

/// The wrapper whose value is the optimiser inside, not a table.
pub(super) const OFFLOAD: &str = "Offload";

/// The name of a choice by path, and the keys of its entries.
pub(super) const BY_PATH: &str = "ByPath";
pub(super) const PATTERN: &str = "pattern";
pub(super) const OPTIMISER: &str = "optimiser";
/// The name that leaves parameters out, in place of an optimiser.
const LEAVE_OUT: &str = "LeaveOut";

/// A path into a configuration, such as `[1].AdamW.beta`. Paths share their beginnings in memory.
#[derive(Clone)]
pub(super) enum Place {
    /// The whole configuration.
    Whole,
    /// A key of the table at a place.
    Key(Arc<(Place, Box<str>)>),
    /// A member of the list at a place.
    Index(Arc<(Place, usize)>),
}

impl Place {
    /// The place of a key in the table at this place.
    pub(super) fn key(&self, key: &str) -> Place {
        Place::Key(Arc::new((self.clone(), key.into())))
    }

    /// The place of a member of the list at this place.
    pub(super) fn index(&self, index: usize) -> Place {
        Place::Index(Arc::new((self.clone(), index)))
    }

    /// The error with this place.
    pub(super) fn error(&self, error: Error) -> Error {
        error.in_place(&self.to_string())
    }

    /// The error that the data at this place is not as expected.
    pub(super) fn mismatch_error(&self, expected: impl fmt::Display, got: &impl fmt::Display) -> Error {
        self.error(
            Error::new(ErrorKind::Argument, "got")
                .with_got(got)
                .with_expected(expected),
        )
    }

    /// The error that `name` cannot be at this place. `reason` completes a sentence that begins with "it".
    pub(super) fn misplaced_error(&self, name: &str, reason: &str) -> Error {
        self.error(Error::new(
            ErrorKind::Argument,
            format!("{name} cannot be here: it {reason}"),
        ))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Whole => Ok(()),
            Place::Index(pair) => write!(f, "{}[{}]", pair.0, pair.1),
            Place::Key(pair) if matches!(pair.0, Place::Whole) => f.write_str(&pair.1),
            Place::Key(pair) => write!(f, "{}.{}", pair.0, pair.1),
        }
    }
}

/// A table of these entries.
pub(super) fn make_table<'k>(entries: impl IntoIterator<Item = (&'k str, Data)>) -> Data {
    Data::Table(
        entries
            .into_iter()
            .map(|(key, value)| (key.into(), value))
            .collect(),
    )
}

/// The value of a key in a table.
fn value_of<'d>(entries: &'d [DataEntry], key: &str) -> Option<&'d Data> {
    entries
        .iter()
        .find(|(name, _)| **name == *key)
        .map(|(_, value)| value)
}

/// Refuses data that is nested too deep to be read again.
pub(super) fn check_depth(data: &Data) -> Result<()> {
    fn depth(data: &Data) -> usize {
        match data {
            Data::List(members) => 1 + members.iter().map(depth).max().unwrap_or(0),
            Data::Table(entries) => 1 + entries.iter().map(|(_, value)| depth(value)).max().unwrap_or(0),
            _ => 0,
        }
    }
    if depth(data) <= DEEPEST {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Argument, format!("nested more than {DEEPEST} deep")).in_place(""))
}

/// Refuses a table, at any depth, that has a key twice.
pub(super) fn check_repeats(data: &Data, place: &Place) -> Result<()> {
    match data {
        Data::List(members) => members
            .iter()
            .enumerate()
            .try_for_each(|(i, member)| check_repeats(member, &place.index(i))),
        Data::Table(entries) => {
            if let Some(index) = first_repeated(entries.iter().map(|(key, _)| key)) {
                let (key, value) = &entries[index];
                let error = Error::new(ErrorKind::Argument, "the key is repeated here, with");
                return Err(place
                    .key(key)
                    .error(error.with_got(value).with_expected("the key once")));
            }
            entries
                .iter()
                .try_for_each(|(key, value)| check_repeats(value, &place.key(key)))
        }
        _ => Ok(()),
    }
}

/// The index of the first key that equals an earlier one.
fn first_repeated<K: Hash + Eq>(mut keys: impl Iterator<Item = K>) -> Option<usize> {
    let mut earlier_keys = HashSet::new();
    keys.position(|key| !earlier_keys.insert(key))
}

/// The form of data that is a configuration or an optimiser.
pub(super) enum Form<'d> {
    /// A choice by path, which only a whole configuration can be.
    ByPath(Vec<PatternEntry<'d>>),
    /// `Offload` around an optimiser.
    Offload(&'d Data),
    Chain(&'d [Data]),
    Named(NamedTable<'d>),
}

/// A pattern, and the optimiser of the parameters that match it. `None` leaves these parameters out.
pub(super) struct PatternEntry<'d> {
    pub(super) pattern: &'d str,
    pub(super) optimiser: Option<&'d Data>,
    /// The place of the optimiser.
    pub(super) place: Place,
}

/// The name of an optimiser or a schedule, and its table.
#[derive(Clone)]
pub(super) struct NamedTable<'d> {
    pub(super) name: &'d str,
    /// Settings, fields and the rules inside, or the arguments of a schedule.
    pub(super) table: &'d [DataEntry],
    /// The place of the table.
    pub(super) place: Place,
}

impl<'d> Form<'d> {
    /// Finds the form of the data, but not the forms inside.
    pub(super) fn read(data: &'d Data, place: &Place) -> Result<Self> {
        let (name, table) = match data {
            Data::List(members) => return Ok(Form::Chain(members)),
            Data::Text(name) => (name, None),
            Data::Table(entries) if entries.len() == 1 => (&entries[0].0, Some(&entries[0].1)),
            _ => {
                let expected = r#"a rule such as "Adam" or {"Adam": {"eta": 0.001}}, or a list of rules"#;
                return Err(place.mismatch_error(expected, data));
            }
        };
        let reason = match (&**name, table, place) {
            (BY_PATH, Some(list), Place::Whole) => {
                return PatternEntry::read_all(list, &place.key(BY_PATH)).map(Form::ByPath);
            }
            (BY_PATH, ..) => "chooses among optimisers and goes around all of them",
            (LEAVE_OUT, ..) => "can only be a whole optimiser, in a choice of ByPath",
            (OFFLOAD, ..) => {
                let make_error = || place.mismatch_error(r#"a table such as {"Offload": "Adam"}"#, data);
                return table.ok_or_else(make_error).map(Form::Offload);
            }
            _ => return NamedTable::read(name, table, place.key(name)).map(Form::Named),
        };
        Err(place.misplaced_error(name, reason))
    }
}

impl<'d> PatternEntry<'d> {
    fn read_all(list: &'d Data, place: &Place) -> Result<Vec<Self>> {
        let Data::List(entries) = list else {
            return Err(
                place.mismatch_error(r#"a list such as [{"pattern": "*", "optimiser": "Adam"}]"#, list)
            );
        };
        entries
            .iter()
            .enumerate()
            .map(|(i, entry)| PatternEntry::read(entry, &place.index(i)))
            .collect()
    }

    fn read(data: &'d Data, place: &Place) -> Result<Self> {
        let make_error = || {
            place.mismatch_error(
                r#"a table such as {"pattern": "*.bias", "optimiser": "Adam"}"#,
                data,
            )
        };
        let Data::Table(entries) = data else {
            return Err(make_error());
        };
        check_keys_known(entries, &[PATTERN, OPTIMISER], place)?;
        let (Some(pattern), Some(optimiser)) = (value_of(entries, PATTERN), value_of(entries, OPTIMISER))
        else {
            return Err(make_error());
        };
        let Data::Text(pattern) = pattern else {
            return Err(place
                .key(PATTERN)
                .mismatch_error("a text in which * stands for anything", pattern));
        };
        let is_left_out = [Data::Nothing, Data::text(LEAVE_OUT)].contains(optimiser);
        let optimiser = Some(optimiser).filter(|_| !is_left_out);
        Ok(PatternEntry {
            pattern,
            optimiser,
            place: place.key(OPTIMISER),
        })
    }
}

/// A choice by path as data, from patterns and optimisers. `None` leaves parameters out.
pub(super) fn by_path_data<'p>(entries: impl Iterator<Item = (&'p str, Option<Data>)>) -> Data {
    let entry_table = |(pattern, optimiser): (&str, Option<Data>)| {
        let optimiser = optimiser.unwrap_or_else(|| Data::text(LEAVE_OUT));
        make_table([(PATTERN, Data::text(pattern)), (OPTIMISER, optimiser)])
    };
    make_table([(BY_PATH, Data::List(entries.map(entry_table).collect()))])
}

/// Refuses a table with a key that is not one of `known_keys`.
pub(super) fn check_keys_known(
    entries: &[DataEntry],
    known_keys: &[impl AsRef<str>],
    place: &Place,
) -> Result<()> {
    match entries
        .iter()
        .find(|(key, _)| !known_keys.iter().any(|name| *name.as_ref() == **key))
    {
        None => Ok(()),
        Some((key, _)) => Err(place.error(Error::unknown("key", key, known_keys))),
    }
}

/// Refuses data that cannot be an optimiser, whatever rules a registry has.
pub(super) fn check_form(data: &Data, place: &Place) -> Result<()> {
    match Form::read(data, place)? {
        Form::ByPath(entries) => {
            let mut optimisers = entries
                .iter()
                .filter_map(|entry| Some((entry.optimiser?, &entry.place)));
            optimisers.try_for_each(|(optimiser, place)| check_form(optimiser, place))
        }
        Form::Chain(members) => members
            .iter()
            .enumerate()
            .try_for_each(|(i, member)| check_form(member, &place.index(i))),
        Form::Offload(inner) => check_form(inner, &place.key(OFFLOAD)),
        Form::Named(named) => named
            .table
            .iter()
            .try_for_each(|(key, value)| match (&**key, value) {
                (INNER | FALLBACK, _) | (MEMBERS, Data::List(_)) => check_form(value, &named.place.key(key)),
                (MEMBERS, _) => Err(named.place.key(key).mismatch_error("a list of rules", value)),
                _ => Ok(()),
            }),
    }
}

impl<'d> NamedTable<'d> {
    fn read(name: &'d str, table: Option<&'d Data>, place: Place) -> Result<Self> {
        match table {
            None => Ok(NamedTable {
                name,
                table: &[],
                place,
            }),
            Some(Data::Table(table)) => Ok(NamedTable { name, table, place }),
            Some(other) => {
                Err(place.mismatch_error(r#"a table such as {"eta": 0.001} or {"inner": "Adam"}"#, other))
            }
        }
    }

    /// The value of a key, if the table has the key.
    pub(super) fn value(&self, key: &str) -> Option<&'d Data> {
        value_of(self.table, key)
    }

    /// The rule inside; `None` if there is none, or if it has no name and table, such as a chain.
    pub(super) fn inner(&self) -> Option<NamedTable<'d>> {
        match Form::read(self.value(INNER)?, &self.place.key(INNER)) {
            Ok(Form::Named(inner)) => Some(inner),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::hash::Hasher;

    use super::*;

    /// A key that counts how often it is compared.
    #[derive(Debug)]
    struct CountedKey<'c>(usize, &'c Cell<usize>);

    impl PartialEq for CountedKey<'_> {
        fn eq(&self, other: &Self) -> bool {
            self.1.set(self.1.get() + 1);
            self.0 == other.0
        }
    }

    impl Eq for CountedKey<'_> {}

    impl Hash for CountedKey<'_> {
        fn hash<H: Hasher>(&self, state: &mut H) {
            self.0.hash(state);
        }
    }

    #[test]
    fn a_repeated_key_is_found_in_one_pass() {
        let comparisons = Cell::new(0);
        let keys = || (0..10_000).map(|key| CountedKey(key, &comparisons));
        assert_eq!(first_repeated(keys()), None);
        assert_eq!(
            first_repeated(keys().chain([CountedKey(7, &comparisons)])),
            Some(10_000)
        );
        assert_eq!(first_repeated([3, 1, 3, 1].into_iter()), Some(2));
        // Two keys may have the same place in the hash table now and then.
        assert!(comparisons.get() < 5_000, "{} comparisons", comparisons.get());
    }
}
