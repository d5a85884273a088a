//! What a text holds, before it is known to mean an optimiser.

use std::fmt;

use serde::de::{Deserializer, IntoDeserializer, MapAccess, Visitor, value};
use serde::{Deserialize, Serialize, Serializer};

use super::place::Place;
use crate::error::{ConfigurationError, Result};
use crate::field::Literal;

/// Anything that a self-describing format can hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a name, a table or a list")]
pub(super) enum Data {
    /// Before the literals, which take the text "inf" for a number: what a text means is known by where it stands.
    Text(String),
    Literal(Literal),
    List(Vec<Data>),
    Table(Table),
    Nothing,
}

/// Keys with their values, in order; a key that occurs twice is kept, to be reported.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Table(pub(super) Vec<(String, Data)>);

impl Data {
    /// A table of these entries.
    pub(super) fn table<'k>(entries: impl IntoIterator<Item = (&'k str, Data)>) -> Self {
        Data::Table(Table(entries.into_iter().map(|(key, value)| (key.to_string(), value)).collect()))
    }

    /// A name and the table under it, which a name alone leaves empty.
    pub(super) fn named(&self) -> Option<(&str, &Data)> {
        const EMPTY: &Data = &Data::Table(Table(Vec::new()));
        match self {
            Data::Text(name) => Some((name, EMPTY)),
            Data::Table(Table(entries)) => match &entries[..] {
                [(name, value)] => Some((name, value)),
                _ => None,
            },
            _ => None,
        }
    }

    /// The value of a hyper-parameter.
    pub(super) fn literal(&self) -> Option<Literal> {
        match self {
            Data::Text(text) => {
                let text: value::StrDeserializer<'_, value::Error> = text.as_str().into_deserializer();
                Literal::deserialize(text).ok()
            }
            Data::Literal(literal) => Some(literal.clone()),
            Data::List(_) | Data::Table(_) | Data::Nothing => None,
        }
    }

    /// The entries of a table.
    ///
    /// # Errors
    /// If it is something else, or a key occurs twice.
    pub(super) fn entries(&self, expected: &str, place: &Place) -> Result<&[(String, Data)]> {
        let Data::Table(Table(entries)) = self else {
            return Err(place.expected(expected, self));
        };
        for (i, (key, value)) in entries.iter().enumerate() {
            if entries[..i].iter().any(|(earlier, _)| earlier == key) {
                return Err(place.key(key).expected("the key once", value));
            }
        }
        Ok(entries)
    }

    /// The values of a table that has these keys and no other.
    pub(super) fn values<const N: usize>(&self, keys: [&str; N], expected: &str, place: &Place) -> Result<[&Data; N]> {
        let entries = self.entries(expected, place)?;
        if let Some((key, _)) = entries.iter().find(|(key, _)| !keys.contains(&key.as_str())) {
            return Err(place.error(ConfigurationError::UnknownKey { key: key.clone(), available: keys.map(str::to_string).to_vec() }));
        }
        let value = |wanted: &str| entries.iter().find_map(|(key, value)| (key == wanted).then_some(value));
        let values: Vec<&Data> = keys.iter().filter_map(|key| value(key)).collect();
        values.try_into().map_err(|_| place.expected(expected, self))
    }
}

/// As JSON, cut to a length that fits a message.
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

impl Serialize for Table {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

impl<'de> Deserialize<'de> for Table {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(TableVisitor)
    }
}

struct TableVisitor;

impl<'de> Visitor<'de> for TableVisitor {
    type Value = Table;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Table, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Table(entries))
    }
}
