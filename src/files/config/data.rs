//! The data of a text, before it is known to mean an optimiser.
//!
//! It is built while it is read, and takes a small multiple of the text's memory: each list and table is
//! shrunk to its length once it is whole.

use std::collections::HashSet;
use std::fmt;
use std::hash::Hash;
use std::marker::PhantomData;

use serde::de::{
    self, DeserializeSeed, Deserializer, EnumAccess, IntoDeserializer, MapAccess, SeqAccess, VariantAccess,
    Visitor, value,
};
use serde::{Deserialize, Serialize, Serializer};

use super::place::Place;
use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::{Literal, Number};

/// Anything that a self-describing format can hold.
#[derive(Clone, Debug)]
pub(super) enum Data {
    Nothing,
    Flag(bool),
    Count(u64),
    Real(Number),
    /// Also the text "inf": only its place says whether it is a number.
    Text(Box<str>),
    List(Box<[Data]>),
    Table(Entries),
}

/// Keys with their values, in order. Repeated keys are kept, to be reported.
pub(super) type Entries = Box<[(Box<str>, Data)]>;

/// Data in the two forms that a configuration has.
pub(super) enum NameOrList {
    /// A name and the table under it, empty for a name alone.
    Named(Box<str>, Data),
    List(Box<[Data]>),
    Other(Data),
}

impl Data {
    /// A table of these entries.
    pub(super) fn table<'k>(entries: impl IntoIterator<Item = (&'k str, Data)>) -> Self {
        Data::Table(entries.into_iter().map(|(key, value)| (key.into(), value)).collect())
    }

    pub(super) fn part(self) -> NameOrList {
        match self {
            Data::Text(name) => NameOrList::Named(name, Data::Table(Box::default())),
            Data::List(members) => NameOrList::List(members),
            Data::Table(entries) => match <Box<[_; 1]>>::try_from(entries) {
                Ok(entry) => {
                    let [(name, value)] = *entry;
                    NameOrList::Named(name, value)
                }
                Err(entries) => NameOrList::Other(Data::Table(entries)),
            },
            other => NameOrList::Other(other),
        }
    }

    /// Refuses data that is nested too deep to be read again.
    pub(super) fn check_shallow(&self) -> Result<()> {
        let depth = self.depth();
        if depth <= DEEPEST {
            return Ok(());
        }
        let deep = Error::new(ErrorKind::Argument, "lists and tables are nested")
            .with_got(format_args!("{depth} deep"));
        Err(deep.with_expected(format_args!("at most {DEEPEST} deep")).in_place(""))
    }

    fn depth(&self) -> usize {
        let parts = |deepest: Option<usize>| 1 + deepest.unwrap_or_default();
        match self {
            Data::List(members) => parts(members.iter().map(Data::depth).max()),
            Data::Table(entries) => parts(entries.iter().map(|(_, value)| value.depth()).max()),
            _ => 0,
        }
    }

    pub(super) fn flag(&self) -> Option<bool> {
        if let Data::Flag(flag) = self { Some(*flag) } else { None }
    }

    pub(super) fn text(&self) -> Option<&str> {
        if let Data::Text(text) = self { Some(text) } else { None }
    }

    /// The value of a hyper-parameter.
    pub(super) fn literal(&self) -> Option<Literal> {
        match self {
            Data::Flag(flag) => Some(Literal::Flag(*flag)),
            Data::Count(count) => Some(Literal::Count(*count)),
            Data::Real(number) => Some(Literal::Real(*number)),
            Data::Text(text) => read(text),
            Data::List(members) => members.iter().map(Data::number).collect::<Option<_>>().map(Literal::List),
            Data::Table(_) | Data::Nothing => None,
        }
    }

    fn number(&self) -> Option<Number> {
        match self {
            Data::Count(count) => Some(Number(*count as f64)),
            Data::Real(number) => Some(*number),
            Data::Text(text) => read(text),
            _ => None,
        }
    }

    /// The entries of a table.
    ///
    /// # Errors
    /// If it is something else, or a key occurs twice.
    pub(super) fn entries(self, expected: &str, place: &Place) -> Result<Entries> {
        let Data::Table(entries) = self else { return Err(place.expected(expected, &self)) };
        if let Some(second) = repeated(entries.iter().map(|(key, _)| key)) {
            let (key, value) = &entries[second];
            let again = Error::new(ErrorKind::Argument, "the key stands here again, with").with_got(value);
            return Err(place.key(key).error(again.with_expected("the key once")));
        }
        Ok(entries)
    }

    /// The values of a table that has these keys and no other.
    pub(super) fn values<const N: usize>(
        self,
        keys: [&str; N],
        expected: &str,
        place: &Place,
    ) -> Result<[Data; N]> {
        let entries = self.entries(expected, place)?;
        if let Some((key, _)) = entries.iter().find(|(key, _)| !keys.contains(&&**key)) {
            return Err(place.error(Error::unknown("key", key, &keys.map(str::to_string))));
        }
        if !keys.iter().all(|key| entries.iter().any(|(known, _)| **known == **key)) {
            return Err(place.expected(expected, &Data::Table(entries)));
        }
        let mut values = keys.map(|_| Data::Nothing);
        for (key, value) in entries {
            if let Some(place) = keys.iter().position(|wanted| *wanted == &*key) {
                values[place] = value;
            }
        }
        Ok(values)
    }
}

/// The order of keys does not count, as some formats do not keep it.
impl PartialEq for Data {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Data::Nothing, Data::Nothing) => true,
            (Data::Flag(one), Data::Flag(other)) => one == other,
            (Data::Count(one), Data::Count(other)) => one == other,
            (Data::Real(one), Data::Real(other)) => one == other,
            (Data::Text(one), Data::Text(other)) => one == other,
            (Data::List(one), Data::List(other)) => one == other,
            (Data::Table(one), Data::Table(other)) => are_same(one, other),
            _ => false,
        }
    }
}

/// Whether these keys have the same values, in any order.
pub(super) fn are_same<K: Ord, V: PartialEq>(one: &[(K, V)], other: &[(K, V)]) -> bool {
    let sorted = |entries: &[(K, V)]| {
        let mut places: Vec<usize> = (0..entries.len()).collect();
        places.sort_by(|&a, &b| entries[a].0.cmp(&entries[b].0));
        places
    };
    let mut pairs = sorted(one).into_iter().zip(sorted(other));
    one.len() == other.len() && pairs.all(|(own, others)| one[own] == other[others])
}

/// The number or name that a text stands for.
fn read<'t, T: Deserialize<'t>>(text: &'t str) -> Option<T> {
    let text: value::StrDeserializer<'_, value::Error> = text.into_deserializer();
    T::deserialize(text).ok()
}

/// The index of the first repeated key.
fn repeated<K: Hash + Eq>(mut keys: impl Iterator<Item = K>) -> Option<usize> {
    let mut seen = HashSet::new();
    keys.position(|key| !seen.insert(key))
}

/// The data as JSON, cut to a length that fits a message.
impl fmt::Display for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 80;
        let text = serde_json::to_string(self).map_err(|_| fmt::Error)?;
        match text.char_indices().nth(LONGEST) {
            None => f.write_str(&text),
            Some((end, _)) => write!(f, "{}...", &text[..end]),
        }
    }
}

impl Serialize for Data {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Data::Nothing => serializer.serialize_unit(),
            Data::Flag(flag) => serializer.serialize_bool(*flag),
            Data::Count(count) => serializer.serialize_u64(*count),
            Data::Real(number) => number.serialize(serializer),
            Data::Text(text) => serializer.serialize_str(text),
            Data::List(members) => serializer.collect_seq(members),
            Data::Table(entries) => serializer.collect_map(entries.iter().map(|(key, value)| (key, value))),
        }
    }
}

/// Not derived: a derived one buffers every part until it knows the variant, and each nested part once more.
impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        DataVisitor { room: DEEPEST }.deserialize(deserializer)
    }
}

/// How deep data may be nested, more than any optimiser needs: reading, showing and dropping recurse.
const DEEPEST: usize = 64;

/// Reads data that is nested at most `room` deep.
#[derive(Clone, Copy)]
struct DataVisitor {
    room: usize,
}

impl DataVisitor {
    /// The visitor for the parts.
    fn inside<E: de::Error>(self) -> std::result::Result<Self, E> {
        let room = self
            .room
            .checked_sub(1)
            .ok_or_else(|| E::custom(format_args!("nested more than {DEEPEST} deep")))?;
        Ok(DataVisitor { room })
    }
}

impl<'de> DeserializeSeed<'de> for DataVisitor {
    type Value = Data;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Data, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for DataVisitor {
    type Value = Data;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name, a table or a list")
    }

    fn visit_unit<E: de::Error>(self) -> std::result::Result<Data, E> {
        Ok(Data::Nothing)
    }

    fn visit_none<E: de::Error>(self) -> std::result::Result<Data, E> {
        Ok(Data::Nothing)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Data, D::Error> {
        self.inside()?.deserialize(deserializer)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Data, D::Error> {
        self.inside()?.deserialize(deserializer)
    }

    fn visit_bool<E: de::Error>(self, flag: bool) -> std::result::Result<Data, E> {
        Ok(Data::Flag(flag))
    }

    fn visit_u64<E: de::Error>(self, count: u64) -> std::result::Result<Data, E> {
        Ok(Data::Count(count))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> std::result::Result<Data, E> {
        Ok(u64::try_from(value).map_or(Data::Real(Number(value as f64)), Data::Count))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> std::result::Result<Data, E> {
        Ok(Data::Real(Number(value)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<Data, E> {
        Ok(Data::Text(text.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Data, A::Error> {
        let inside = self.inside()?;
        let members = std::iter::from_fn(|| list.next_element_seed(inside).transpose());
        members.collect::<std::result::Result<_, _>>().map(Data::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Data, A::Error> {
        let inside = self.inside()?;
        let entries = std::iter::from_fn(|| map.next_entry_seed(PhantomData, inside).transpose());
        entries.collect::<std::result::Result<_, _>>().map(Data::Table)
    }

    /// A tag of YAML, in which serde_yaml writes an enum: `!AdamW {eta: 1e-3}`.
    fn visit_enum<A: EnumAccess<'de>>(self, tagged: A) -> std::result::Result<Data, A::Error> {
        let (name, value) = tagged.variant::<String>()?;
        Ok(Data::table([(name.as_str(), value.newtype_variant_seed(self.inside()?)?)]))
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
        assert_eq!(repeated(keys()), None);
        assert_eq!(repeated(keys().chain([CountedKey(7, &comparisons)])), Some(10_000));
        assert_eq!(repeated([3, 1, 3, 1].into_iter()), Some(2));
        // Two of these can have the same place in the table now and then.
        assert!(comparisons.get() < 5_000, "{} comparisons", comparisons.get());
    }

    #[test]
    fn a_part_takes_no_more_room_than_its_longest_kind() {
        assert_eq!(size_of::<Data>(), 3 * size_of::<usize>());
    }
}
