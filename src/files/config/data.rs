//! The data of a text in any self-describing format, before it is read as an optimiser.
//!
//! A text must take only a small multiple of its own memory, and not overflow the stack. So data is built
//! while it is read, each list and table is shrunk to its length, and depth is bounded.

use std::collections::HashSet;
use std::fmt;
use std::hash::Hash;
use std::marker::PhantomData;

use serde::de::{DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, VariantAccess, Visitor};
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
    /// A text. "inf" is read as a text, because only the field has the type of the value.
    Text(Box<str>),
    List(Box<[Data]>),
    /// Keys with their values, in order.
    Table(Box<[DataEntry]>),
}

/// A key of a table, and its value.
pub(super) type DataEntry = (Box<str>, Data);

impl Data {
    /// A table of these entries.
    pub(super) fn table<'k>(entries: impl IntoIterator<Item = (&'k str, Data)>) -> Self {
        Data::Table(entries.into_iter().map(|(key, value)| (key.into(), value)).collect())
    }

    pub(super) fn text(text: &str) -> Self {
        Data::Text(text.into())
    }

    /// Refuses data that is nested too deep to be read again.
    pub(super) fn check_shallow(&self) -> Result<()> {
        let again = serde_json::to_value(self).and_then(Data::deserialize).map(drop);
        again.map_err(|error| Error::new(ErrorKind::Argument, error.to_string()).in_place(""))
    }

    /// Refuses a table, at any depth, that has a key twice.
    pub(super) fn check_keys(&self, place: &Place) -> Result<()> {
        match self {
            Data::List(members) => {
                members.iter().enumerate().try_for_each(|(i, member)| member.check_keys(&place.index(i)))
            }
            Data::Table(entries) => {
                if let Some(second) = repeated(entries.iter().map(|(key, _)| key)) {
                    let (key, value) = &entries[second];
                    let again = Error::new(ErrorKind::Argument, "the key is repeated here, with");
                    return Err(place.key(key).error(again.with_got(value).with_expected("the key once")));
                }
                entries.iter().try_for_each(|(key, value)| value.check_keys(&place.key(key)))
            }
            _ => Ok(()),
        }
    }

    /// The data as the value of a hyper-parameter, if it can be one.
    pub(super) fn literal(&self) -> Option<Literal> {
        serde_json::from_value(serde_json::to_value(self).ok()?).ok()
    }
}

/// The value of a key in a table.
pub(super) fn value<'d>(entries: &'d [DataEntry], key: &str) -> Option<&'d Data> {
    entries.iter().find(|(known, _)| **known == *key).map(|(_, value)| value)
}

/// Compares as JSON: in any order of keys, which some formats do not keep, and infinity equals its text.
impl PartialEq for Data {
    fn eq(&self, other: &Self) -> bool {
        serde_json::to_value(self).ok() == serde_json::to_value(other).ok()
    }
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
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
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

/// Not derived, because a derived implementation buffers every part until its variant is clear, and each
/// nested part once more.
impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        DataVisitor { room: DEEPEST }.deserialize(deserializer)
    }
}

/// The largest depth of data, more than any optimiser needs. Bounded, because reading, printing and dropping
/// recurse.
const DEEPEST: usize = 64;

/// Reads data that is nested at most `room` deep.
#[derive(Clone, Copy)]
struct DataVisitor {
    room: usize,
}

impl DataVisitor {
    /// The visitor for the parts of a list or table.
    fn inside<E: serde::de::Error>(self) -> Result<Self, E> {
        let room = self.room.checked_sub(1);
        let room = room.ok_or_else(|| E::custom(format_args!("nested more than {DEEPEST} deep")))?;
        Ok(DataVisitor { room })
    }
}

impl<'de> DeserializeSeed<'de> for DataVisitor {
    type Value = Data;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Data, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for DataVisitor {
    type Value = Data;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name, a table or a list")
    }

    fn visit_unit<E>(self) -> Result<Data, E> {
        Ok(Data::Nothing)
    }

    fn visit_none<E>(self) -> Result<Data, E> {
        Ok(Data::Nothing)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Data, D::Error> {
        self.inside()?.deserialize(deserializer)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<Data, D::Error> {
        self.inside()?.deserialize(deserializer)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Data, E> {
        Ok(Data::Flag(flag))
    }

    fn visit_u64<E>(self, count: u64) -> Result<Data, E> {
        Ok(Data::Count(count))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Data, E> {
        Ok(u64::try_from(value).map_or(Data::Real(Number(value as f64)), Data::Count))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Data, E> {
        Ok(Data::Real(Number(value)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Data, E> {
        Ok(Data::text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Data, A::Error> {
        let inside = self.inside()?;
        let members = std::iter::from_fn(|| list.next_element_seed(inside).transpose());
        members.collect::<Result<_, _>>().map(Data::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Data, A::Error> {
        let inside = self.inside()?;
        let entries = std::iter::from_fn(|| map.next_entry_seed(PhantomData, inside).transpose());
        entries.collect::<Result<_, _>>().map(Data::Table)
    }

    /// A tag of YAML, as serde_yaml writes an enum: `!AdamW {eta: 1e-3}`.
    fn visit_enum<A: EnumAccess<'de>>(self, tagged: A) -> Result<Data, A::Error> {
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
        // Two keys may have the same place in the hash table now and then.
        assert!(comparisons.get() < 5_000, "{} comparisons", comparisons.get());
    }

    #[test]
    fn a_part_takes_no_more_room_than_its_longest_kind() {
        assert_eq!(size_of::<Data>(), 3 * size_of::<usize>());
    }
}
