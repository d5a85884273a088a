//! Values in the form of texts and files: a tree, from which hyper-parameters, configurations and schedules
//! are read.
//!
//! Data must take only a small multiple of the memory of its text, and its depth must not overflow the stack.
//! So data is built while the text is read, each list and table is shrunk to its length, and depth is
//! bounded.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{
    self, DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, VariantAccess, Visitor,
};
use serde::{Deserialize, Serialize, Serializer};

use super::Sizes;
use crate::error::{Error, ErrorKind};
use crate::numbers::Fingerprint;

/// Any value that a self-describing format of serde can hold.
#[derive(Clone, Debug)]
pub(crate) enum Data {
    Nothing,
    Flag(bool),
    Count(u64),
    /// A number that is no count. `inf`, `-inf` and `nan` are written as texts, because JSON has no such
    /// numbers. Such a text is read as `Text`, because only the field knows the type of its value.
    Real(f64),
    Text(Box<str>),
    List(Box<[Data]>),
    /// Keys with their values, in order.
    Table(Box<[DataEntry]>),
}

/// A key of a table, and its value.
pub(crate) type DataEntry = (Box<str>, Data);

impl Data {
    pub(crate) fn text(text: &str) -> Self {
        Data::Text(text.into())
    }

    /// The data in a sentence: texts without quotes, lists in round brackets, and short numbers. Numbers
    /// below 1e-4 and from 1e16 on have an exponent.
    pub(crate) fn words(&self) -> String {
        match self {
            Data::Real(value) if *value == 0.0 || (1e-4..1e16).contains(&value.abs()) => value.to_string(),
            Data::Real(value) => format!("{value:e}"),
            Data::Text(text) => text.to_string(),
            Data::List(parts) => {
                format!(
                    "({})",
                    parts.iter().map(Data::words).collect::<Vec<_>>().join(", ")
                )
            }
            other => other.to_string(),
        }
    }

    /// Adds a part of a hyper-parameter to a hash.
    pub(super) fn add_to_hash(&self, hash: Fingerprint) -> Fingerprint {
        match self {
            Data::Flag(flag) => hash.number((*flag).into()),
            Data::Count(count) => hash.number(*count),
            Data::Real(value) => hash.real(*value),
            Data::Text(text) => hash.bytes(text.as_bytes()),
            Data::List(parts) => parts.iter().fold(hash.number(parts.len() as u64), |hash, part| {
                part.add_to_hash(hash)
            }),
            // Neither can be a part of a hyper-parameter.
            Data::Nothing | Data::Table(_) => hash,
        }
    }
}

/// The text of a number that JSON does not have: infinity or NaN.
fn non_finite_text(value: f64) -> Option<&'static str> {
    match value {
        f64::INFINITY => Some("inf"),
        f64::NEG_INFINITY => Some("-inf"),
        _ => value.is_nan().then_some("nan"),
    }
}

/// A part of a hyper-parameter.
pub(super) trait Part: Copy {
    fn data(self) -> Data;
    /// Reads `data` as a part of this type; `None` if `data` is of another type.
    fn read(data: &Data) -> Option<Self>;
}

impl Part for bool {
    fn data(self) -> Data {
        Data::Flag(self)
    }

    fn read(data: &Data) -> Option<Self> {
        if let Data::Flag(flag) = data {
            Some(*flag)
        } else {
            None
        }
    }
}

impl Part for u64 {
    fn data(self) -> Data {
        Data::Count(self)
    }

    fn read(data: &Data) -> Option<Self> {
        if let Data::Count(count) = data {
            Some(*count)
        } else {
            None
        }
    }
}

/// Reads a count as a real number, too.
impl Part for f64 {
    fn data(self) -> Data {
        Data::Real(self)
    }

    fn read(data: &Data) -> Option<Self> {
        match data {
            Data::Real(value) => Some(*value),
            Data::Count(count) => Some(*count as f64),
            Data::Text(text) => {
                let numbers = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
                numbers
                    .into_iter()
                    .find(|value| non_finite_text(*value) == Some(&**text))
            }
            _ => None,
        }
    }
}

impl Part for Sizes {
    /// A list of real numbers, as in the first files of this crate.
    fn data(self) -> Data {
        Data::List(self.iter().map(|size| Data::Real(size as f64)).collect())
    }

    fn read(data: &Data) -> Option<Self> {
        let size = |data: &Data| match *data {
            Data::Count(count) => Some(count),
            Data::Real(value) if value >= 0.0 && value.fract() == 0.0 => Some(value as u64),
            _ => None,
        };
        let Data::List(sizes) = data else { return None };
        Sizes::new(&sizes.iter().map(size).collect::<Option<Vec<u64>>>()?)
    }
}

/// Compares data as JSON does: in any order of keys, and infinity is equal to its text.
///
/// The order does not matter, because some formats do not keep it.
impl PartialEq for Data {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Data::Nothing, Data::Nothing) => true,
            (Data::Flag(a), Data::Flag(b)) => a == b,
            (Data::Count(a), Data::Count(b)) => a == b,
            (Data::Text(a), Data::Text(b)) => a == b,
            (Data::Real(a), Data::Real(b)) => a == b || a.is_nan() && b.is_nan(),
            (Data::Real(value), Data::Text(text)) | (Data::Text(text), Data::Real(value)) => {
                non_finite_text(*value) == Some(&**text)
            }
            (Data::List(a), Data::List(b)) => a == b,
            (Data::Table(a), Data::Table(b)) => {
                let [a, b] = [a, b].map(|entries| {
                    let mut sorted: Vec<&DataEntry> = entries.iter().collect();
                    sorted.sort_by_key(|(key, _)| key);
                    sorted
                });
                a == b
            }
            _ => false,
        }
    }
}

/// Writes the data as JSON, cut to a length that fits a message.
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
            Data::Real(value) => match non_finite_text(*value) {
                None => serializer.serialize_f64(*value),
                Some(text) => serializer.serialize_str(text),
            },
            Data::Text(text) => serializer.serialize_str(text),
            Data::List(members) => serializer.collect_seq(members),
            Data::Table(entries) => serializer.collect_map(entries.iter().map(|(key, value)| (key, value))),
        }
    }
}

/// Reads the value of a hyper-parameter, which has at most six parts.
///
/// The implementation is not derived, because derived code buffers every part until the variant of the part
/// is clear, and buffers each nested part once more.
impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        DataVisitor {
            depth: 0,
            deepest: 1,
            longest: Sizes::MOST,
        }
        .deserialize(deserializer)
    }
}

/// The largest depth of data, more than any optimiser needs. Depth is bounded because reading, printing and
/// dropping recurse.
#[cfg(feature = "config")]
pub(crate) const DEEPEST: usize = 64;

#[cfg(feature = "config")]
impl Data {
    /// Reads a whole text, of any length and up to the depth [`DEEPEST`].
    pub(crate) fn read_whole<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        DataVisitor {
            depth: 0,
            deepest: DEEPEST,
            longest: usize::MAX,
        }
        .deserialize(deserializer)
    }
}

/// Reads data at this depth, with bounds for all depths and for the length of lists and tables.
#[derive(Clone, Copy)]
struct DataVisitor {
    depth: usize,
    deepest: usize,
    longest: usize,
}

impl DataVisitor {
    /// The visitor for the parts of a list or table.
    fn for_parts<E: de::Error>(self) -> Result<Self, E> {
        if self.depth == self.deepest {
            return Err(E::custom(format_args!("nested more than {} deep", self.deepest)));
        }
        Ok(DataVisitor {
            depth: self.depth + 1,
            ..self
        })
    }

    /// Collects the parts of a list or table. The first part beyond `longest` ends the reading with an error.
    fn collect<T, E: de::Error>(self, mut next: impl FnMut() -> Result<Option<T>, E>) -> Result<Box<[T]>, E> {
        let mut parts = Vec::new();
        while let Some(part) = next()? {
            if parts.len() == self.longest {
                return Err(E::invalid_length(self.longest + 1, &self));
            }
            parts.push(part);
        }
        Ok(parts.into())
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
        match self.longest {
            usize::MAX => f.write_str("a value, a list or a table"),
            longest => write!(f, "a value, or up to {longest} values"),
        }
    }

    fn visit_unit<E>(self) -> Result<Data, E> {
        Ok(Data::Nothing)
    }

    fn visit_none<E>(self) -> Result<Data, E> {
        Ok(Data::Nothing)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Data, D::Error> {
        self.for_parts()?.deserialize(deserializer)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<Data, D::Error> {
        self.for_parts()?.deserialize(deserializer)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Data, E> {
        Ok(Data::Flag(flag))
    }

    fn visit_u64<E>(self, count: u64) -> Result<Data, E> {
        Ok(Data::Count(count))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Data, E> {
        Ok(u64::try_from(value).map_or(Data::Real(value as f64), Data::Count))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Data, E> {
        Ok(Data::Real(value))
    }

    fn visit_str<E>(self, text: &str) -> Result<Data, E> {
        Ok(Data::text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Data, A::Error> {
        let visitor = self.for_parts()?;
        self.collect(|| list.next_element_seed(visitor)).map(Data::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Data, A::Error> {
        let visitor = self.for_parts()?;
        self.collect(|| map.next_entry_seed(PhantomData, visitor))
            .map(Data::Table)
    }

    /// A tag of YAML, as serde_yaml writes an enum: `!AdamW {eta: 1e-3}`.
    fn visit_enum<A: EnumAccess<'de>>(self, tagged: A) -> Result<Data, A::Error> {
        let (name, value) = tagged.variant::<String>()?;
        Ok(Data::Table(
            [(name.into(), value.newtype_variant_seed(self.for_parts()?)?)].into(),
        ))
    }
}

/// A real number in a file, which may be infinite or NaN.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Data", into = "Data")]
pub(crate) struct Number(pub(crate) f64);

impl From<Number> for Data {
    fn from(Number(value): Number) -> Self {
        Data::Real(value)
    }
}

impl TryFrom<Data> for Number {
    type Error = Error;

    fn try_from(data: Data) -> Result<Self, Error> {
        let type_error = || {
            Error::new(ErrorKind::File, "got")
                .with_got(&data)
                .with_expected(r#"a number, "inf", "-inf" or "nan""#)
        };
        f64::read(&data).map(Number).ok_or_else(type_error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::field::{Average, FieldValue, NonFinite};

    #[test]
    fn every_value_survives_json() {
        let values = [
            FieldValue::Real(0.1 + 0.2),
            FieldValue::Real(1.0),
            FieldValue::Real(-5e-324),
            FieldValue::Real(f64::MAX),
            FieldValue::Real(f64::INFINITY),
            FieldValue::Real(f64::NEG_INFINITY),
            FieldValue::Pair(0.9, f64::INFINITY),
            FieldValue::Pair(0.0, 1.0),
            FieldValue::Triple(0.9, 0.999, 0.9999),
            FieldValue::Triple(f64::NEG_INFINITY, 0.0, 1.0),
            FieldValue::Count(u64::MAX),
            FieldValue::Sizes(Sizes::from([4, 2, 2])),
            FieldValue::Sizes(Sizes::default()),
            FieldValue::Flag(true),
            NonFinite::Skip.into(),
            Average::Weighted.into(),
        ];
        for value in values {
            let text = serde_json::to_string(&value.data()).expect("a text");
            let data: Data = serde_json::from_str(&text).expect("data");
            assert_eq!(value.read(&data), Some(value), "{text}");
        }
    }

    #[test]
    fn a_whole_number_can_be_a_real_and_nothing_else_is_mistaken() {
        let read = |text: &str, example: FieldValue| {
            serde_json::from_str::<Data>(text)
                .ok()
                .and_then(|data| example.read(&data))
        };
        assert_eq!(read("2", FieldValue::Real(0.0)), Some(FieldValue::Real(2.0)));
        assert_eq!(read("-2", FieldValue::Real(0.0)), Some(FieldValue::Real(-2.0)));
        assert_eq!(
            read("[0, 1]", FieldValue::Pair(0.0, 0.0)),
            Some(FieldValue::Pair(0.0, 1.0))
        );
        assert_eq!(read("2.5", FieldValue::Count(0)), None);
        assert_eq!(read("-2", FieldValue::Count(0)), None);
        assert_eq!(read("\"2\"", FieldValue::Real(0.0)), None);
        assert_eq!(read("1", FieldValue::Flag(false)), None);
        assert_eq!(read("\"Ignore\"", NonFinite::Error.into()), None);
        assert_eq!(read("[0, 1, 2]", FieldValue::Pair(0.0, 0.0)), None);
        assert_eq!(
            read("[0, 1, 2]", FieldValue::Triple(0.0, 0.0, 0.0)),
            Some(FieldValue::Triple(0.0, 1.0, 2.0))
        );
        assert_eq!(read("[0, 1]", FieldValue::Triple(0.0, 0.0, 0.0)), None);
        let sizes = |text| read(text, FieldValue::Sizes(Sizes::default()));
        assert_eq!(
            sizes("[1, 2, 3, 4, 5, 6]"),
            Some(Sizes::from([1, 2, 3, 4, 5, 6]).into())
        );
        assert_eq!(
            [
                sizes("[1, 0]"),
                sizes("[1.5]"),
                sizes("[-1]"),
                sizes("[1, 2, 3, 4, 5, 6, 7]"),
                sizes("3")
            ],
            [None; 5]
        );
    }

    #[test]
    fn a_part_takes_no_more_room_than_its_longest_kind() {
        assert_eq!(size_of::<Data>(), 3 * size_of::<usize>());
    }
}
