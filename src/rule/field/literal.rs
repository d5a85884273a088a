//! Hyper-parameters as JSON and TOML have them.

use std::fmt;

use serde::de::{self, Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use smallvec::SmallVec;

use super::{Field, FieldValue, Short, Sizes};

/// A hyper-parameter as it is written. Its meaning depends on the field: `1` can be a real number or a count.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(crate) enum Literal {
    Flag(bool),
    Count(u64),
    Real(Number),
    // `SmallVec` itself has `Serialize` only with its feature `serde`.
    #[serde(serialize_with = "<[Number]>::serialize")]
    List(NumberList),
    Text(String),
}

/// Up to six numbers, usually two.
pub(crate) type NumberList = SmallVec<[Number; 2]>;

impl Literal {
    fn list(numbers: impl IntoIterator<Item = f64>) -> Self {
        Literal::List(numbers.into_iter().map(Number).collect())
    }

    /// The value for a field of the type of `like`. `None` if the literal cannot be of that type.
    pub(crate) fn read(&self, like: FieldValue) -> Option<FieldValue> {
        Some(match (like, self) {
            (FieldValue::Real(_), Literal::Real(Number(value))) => FieldValue::Real(*value),
            (FieldValue::Real(_), Literal::Count(value)) => {
                FieldValue::Real(f64::from_value(FieldValue::Count(*value))?)
            }
            (FieldValue::Pair(..), Literal::List(list)) => match list[..] {
                [Number(first), Number(second)] => FieldValue::Pair(first, second),
                _ => return None,
            },
            (FieldValue::Triple(..), Literal::List(list)) => match list[..] {
                [Number(first), Number(second), Number(third)] => FieldValue::Triple(first, second, third),
                _ => return None,
            },
            (FieldValue::Sizes(_), Literal::List(list)) => {
                let sizes: Option<SmallVec<[u64; Sizes::MOST]>> =
                    list.iter().map(|number| number.count()).collect();
                FieldValue::Sizes(Sizes::new(&sizes?)?)
            }
            (FieldValue::Count(_), Literal::Count(value)) => FieldValue::Count(*value),
            (FieldValue::Flag(_), Literal::Flag(value)) => FieldValue::Flag(*value),
            (FieldValue::Choice(choice), Literal::Text(text)) => FieldValue::Choice(choice.named(text)?),
            _ => return None,
        })
    }
}

impl fmt::Display for Literal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Literal::Flag(flag) => write!(f, "{flag}"),
            Literal::Count(count) => write!(f, "{count}"),
            Literal::Real(Number(value)) => write!(f, "{}", Short(*value)),
            Literal::List(list) => {
                let numbers: Vec<String> =
                    list.iter().map(|Number(value)| Short(*value).to_string()).collect();
                write!(f, "({})", numbers.join(", "))
            }
            Literal::Text(text) => f.write_str(text),
        }
    }
}

impl From<FieldValue> for Literal {
    fn from(value: FieldValue) -> Self {
        match value {
            FieldValue::Real(value) => Literal::Real(Number(value)),
            FieldValue::Pair(first, second) => Literal::list([first, second]),
            FieldValue::Triple(first, second, third) => Literal::list([first, second, third]),
            FieldValue::Sizes(sizes) => Literal::list(sizes.iter().map(|size| size as f64)),
            FieldValue::Count(value) => Literal::Count(value),
            FieldValue::Flag(value) => Literal::Flag(value),
            FieldValue::Choice(choice) => Literal::Text(choice.name().to_string()),
        }
    }
}

/// Not derived, because the derived one would first buffer the whole value, however long it is.
impl<'de> Deserialize<'de> for Literal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LiteralVisitor)
    }
}

struct LiteralVisitor;

impl<'de> Visitor<'de> for LiteralVisitor {
    type Value = Literal;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("true, false, a number, up to six numbers or a text")
    }

    fn visit_bool<E: de::Error>(self, flag: bool) -> Result<Literal, E> {
        Ok(Literal::Flag(flag))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Literal, E> {
        Ok(Literal::Count(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Literal, E> {
        // TOML passes every integer as i64, so its counts arrive here.
        u64::try_from(value).map_or_else(
            |_| NumberVisitor.visit_i64(value).map(Literal::Real),
            |count| Ok(Literal::Count(count)),
        )
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Literal, E> {
        NumberVisitor.visit_f64(value).map(Literal::Real)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Literal, E> {
        Ok(NumberVisitor.visit_str::<E>(text).map_or_else(|_| Literal::Text(text.to_string()), Literal::Real))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Literal, A::Error> {
        let mut numbers = NumberList::new();
        while numbers.len() < Sizes::MOST {
            match list.next_element()? {
                Some(number) => numbers.push(number),
                None => return Ok(Literal::List(numbers)),
            }
        }
        // One element too many is enough to refuse the list, so the rest is not read.
        match list.next_element::<IgnoredAny>()? {
            None => Ok(Literal::List(numbers)),
            Some(_) => Err(de::Error::invalid_length(Sizes::MOST + 1, &self)),
        }
    }
}

/// A real number. `inf`, `-inf` and `nan` are strings, because JSON has no numbers for them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Number(pub(crate) f64);

impl Number {
    /// The number as a count, if it is one.
    fn count(self) -> Option<u64> {
        // Below 2⁵³, because a larger f64 can be the rounding of another count.
        (self.0 >= 0.0 && self.0 < 2f64.powi(53) && self.0.fract() == 0.0).then_some(self.0 as u64)
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            value if value.is_finite() => serializer.serialize_f64(value),
            value if value.is_nan() => serializer.serialize_str("nan"),
            value if value > 0.0 => serializer.serialize_str("inf"),
            _ => serializer.serialize_str("-inf"),
        }
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NumberVisitor)
    }
}

struct NumberVisitor;

impl Visitor<'_> for NumberVisitor {
    type Value = Number;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a number, \"inf\", \"-inf\" or \"nan\"")
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Number, E> {
        Ok(Number(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Number, E> {
        Ok(Number(value as f64))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Number, E> {
        Ok(Number(value as f64))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Number, E> {
        match text {
            "inf" => Ok(Number(f64::INFINITY)),
            "-inf" => Ok(Number(f64::NEG_INFINITY)),
            "nan" => Ok(Number(f64::NAN)),
            _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::field::{Average, NonFinite};

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
            let text = serde_json::to_string(&Literal::from(value)).expect("a text");
            let read: Literal = serde_json::from_str(&text).expect("a literal");
            assert_eq!(read.read(value), Some(value), "{text}");
        }
    }

    #[test]
    fn a_whole_number_can_be_a_real_and_nothing_else_is_mistaken() {
        let read = |text: &str, like| {
            serde_json::from_str::<Literal>(text).ok().and_then(|literal| literal.read(like))
        };
        assert_eq!(read("2", FieldValue::Real(0.0)), Some(FieldValue::Real(2.0)));
        assert_eq!(read("-2", FieldValue::Real(0.0)), Some(FieldValue::Real(-2.0)));
        assert_eq!(read("[0, 1]", FieldValue::Pair(0.0, 0.0)), Some(FieldValue::Pair(0.0, 1.0)));
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
        assert_eq!(sizes("[1, 2, 3, 4, 5, 6]"), Some(Sizes::from([1, 2, 3, 4, 5, 6]).into()));
        assert_eq!(
            [sizes("[1, 0]"), sizes("[1.5]"), sizes("[-1]"), sizes("[1, 2, 3, 4, 5, 6, 7]"), sizes("3")],
            [None; 5]
        );
    }
}
