//! The values that hyper-parameters can have: their types, conversions and ranges.
//!
//! [`field_values!`] is the table of all types. A row lists the parts of a value. Each [`Part`] is a real
//! number, a count, a switch or [`Sizes`]. Printing, files, configurations and hashes see only the parts, as
//! [`Data`].

mod choice;
mod data;
mod sizes;

use std::fmt;

use smallvec::{SmallVec, smallvec};

use crate::error::{Error, ErrorKind, Result};
use crate::numbers::Fingerprint;

pub use choice::{Average, Choice, NonFinite, choice_of, index_in};

use data::Part;
#[cfg(feature = "config")]
pub(crate) use data::{DEEPEST, DataEntry};
pub(crate) use data::{Data, Number};
pub use sizes::Sizes;

/// Defines [`FieldValue`]: the parts of each type, and the type in words.
macro_rules! field_values {
    ($($(#[$doc:meta])* $Kind:ident($($part:ident: $T:ty),+), $expected:literal;)+) => {
        /// The value of a hyper-parameter, whatever its type.
        ///
        /// A value converts to and from the type of the field, also if the type is an enum of
        /// [`choice!`](crate::choice).
        ///
        /// ```
        /// use optimisers::{Adam, Adjust, FieldValue};
        ///
        /// let rule = Adam::new(1e-3);
        /// let values = ["eta", "beta"].map(|name| rule.field(name).unwrap());
        /// assert_eq!(values, [FieldValue::Real(1e-3), FieldValue::Pair(0.9, 0.999)]);
        /// let (eta, beta): (f64, (f64, f64)) = (values[0].try_into()?, values[1].try_into()?);
        /// assert_eq!((eta, beta), (rule.eta, rule.beta));
        ///
        /// let error = bool::try_from(values[1]).unwrap_err();
        /// assert_eq!(error.to_string(), "the hyper-parameter is (0.9, 0.999), expected true or false");
        /// # Ok::<(), optimisers::Error>(())
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[non_exhaustive]
        pub enum FieldValue {
            $($(#[$doc])* $Kind($($T),+),)+
            /// One of several named values, such as what to do on a norm that is [not finite](NonFinite).
            Choice(Choice),
        }

        $(
            // A type with one part is in needless brackets.
            #[allow(unused_parens)]
            impl From<($($T),+)> for FieldValue {
                fn from(($($part),+): ($($T),+)) -> Self {
                    FieldValue::$Kind($($part),+)
                }
            }

            #[allow(unused_parens, clippy::needless_question_mark)]
            impl TryFrom<FieldValue> for ($($T),+) {
                type Error = Error;

                fn try_from(value: FieldValue) -> Result<Self> {
                    let read = |parts: &[Data]| {
                        let [$($part),+] = parts else { return None };
                        Some(($(Part::read($part)?),+))
                    };
                    // A choice is never of this type, even if its name is the text of a number, such as
                    // `inf`.
                    let is_choice = matches!(value, FieldValue::Choice(_));
                    let converted = if is_choice { None } else { read(&value.parts()) };
                    converted.ok_or_else(|| value.type_error($expected))
                }
            }
        )+

        impl FieldValue {
            /// The parts, in order.
            fn parts(self) -> SmallVec<[Data; 3]> {
                match self {
                    $(FieldValue::$Kind($($part),+) => smallvec![$($part.data()),+],)+
                    FieldValue::Choice(choice) => smallvec![Data::text(choice.name())],
                }
            }

            /// A value of the type of `self` with these parts. `None` if a part is of another type.
            fn with_parts(self, parts: &[Data]) -> Option<Self> {
                match (self, parts) {
                    $((FieldValue::$Kind(..), [$($part),+]) => {
                        Some(FieldValue::$Kind($(Part::read($part)?),+))
                    })+
                    (FieldValue::Choice(choice), [Data::Text(name)]) => {
                        choice.named(name).map(FieldValue::Choice)
                    }
                    _ => None,
                }
            }

            /// The value's type in words, for errors.
            pub(crate) fn expected(self) -> String {
                match self {
                    $(FieldValue::$Kind(..) => $expected.to_string(),)+
                    FieldValue::Choice(choice) => choice.expected(),
                }
            }
        }
    };
}

field_values! {
    /// A real number, such as a learning rate.
    Real(value: f64), "a real number";
    /// A pair of reals, such as Adam's beta.
    Pair(first: f64, second: f64), "a pair of reals";
    /// Three reals, such as AdEMAMix's beta.
    Triple(first: f64, second: f64, third: f64), "three reals";
    /// A count. A field of real numbers takes a count, too.
    Count(count: u64), "a count";
    /// How a whole is cut into parts, such as the rows of a fused matrix.
    Sizes(sizes: Sizes), "a list of up to six counts above 0";
    /// A switch.
    Flag(flag: bool), "true or false";
}

impl FieldValue {
    /// The error for this value where a value of another type is expected.
    fn type_error(self, expected: impl fmt::Display) -> Error {
        Error::new(ErrorKind::Argument, "the hyper-parameter is")
            .with_got(self)
            .with_expected(expected)
    }

    /// Converts this value to the type of `example`; `None` if the types differ.
    pub(crate) fn convert_to(self, example: FieldValue) -> Option<FieldValue> {
        match (example, self) {
            // A name of another enum is refused, even if both enums have this name.
            (FieldValue::Choice(example), FieldValue::Choice(choice)) => {
                (choice.names() == example.names()).then_some(self)
            }
            (FieldValue::Choice(_), _) | (_, FieldValue::Choice(_)) => None,
            _ => example.with_parts(&self.parts()),
        }
    }

    /// The value in the form of texts and files: its only part, or a list of its parts.
    pub(crate) fn data(self) -> Data {
        let mut parts = self.parts();
        if parts.len() == 1 {
            parts.remove(0)
        } else {
            Data::List(parts.into_vec().into())
        }
    }

    /// Reads `data` as a value of the type of `self`; `None` if `data` is of another type.
    pub(crate) fn read(self, data: &Data) -> Option<FieldValue> {
        match data {
            Data::List(parts) if self.parts().len() > 1 => self.with_parts(parts),
            part => self.with_parts(std::slice::from_ref(part)),
        }
    }

    /// Adds the value to a hash.
    pub(crate) fn add_to_hash(self, hash: Fingerprint) -> Fingerprint {
        self.parts()
            .iter()
            .fold(hash, |hash, part| part.add_to_hash(hash))
    }

    /// Whether all parts are real numbers. Such a value, for example a learning rate, never decides which
    /// tensors a state has.
    pub(crate) fn is_real(self) -> bool {
        self.parts().iter().all(|part| matches!(part, Data::Real(_)))
    }

    /// The numbers of a pair or triple; empty for any other value.
    pub(crate) fn numbers(self) -> SmallVec<[f64; 3]> {
        let parts = self.parts();
        if parts.len() < 2 || !self.is_real() {
            return SmallVec::new();
        }
        parts.iter().filter_map(f64::read).collect()
    }

    /// Replaces the number at index `part`. Panics if the value has no such number.
    pub(crate) fn with_number(self, part: usize, number: f64) -> Self {
        let mut parts = self.parts();
        parts[part] = Data::Real(number);
        self.with_parts(&parts).expect("the parts of such a value")
    }

    /// Whether two values are equal, with real numbers compared by `is_same`.
    pub(crate) fn is_equal(self, other: FieldValue, is_same: impl Fn(f64, f64) -> bool) -> bool {
        let (parts, other_parts) = (self.parts(), other.parts());
        parts.len() == other_parts.len()
            && parts.iter().zip(&other_parts).all(|pair| match pair {
                (Data::Real(a), Data::Real(b)) => is_same(*a, *b),
                (a, b) => a == b,
            })
    }
}

impl fmt::Display for FieldValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let FieldValue::Sizes(sizes) = self {
            write!(f, "{sizes}")
        } else {
            f.write_str(&self.data().words())
        }
    }
}

/// Converts a literal such as `3`, of the type `i32`, to a count, or to a real if it is negative.
impl From<i32> for FieldValue {
    fn from(value: i32) -> Self {
        u64::try_from(value).map_or(FieldValue::Real(value.into()), FieldValue::Count)
    }
}

/// Ranges of hyper-parameters, for [`hyper_parameters!`](crate::hyper_parameters).
///
/// Each function returns `None` for a value inside the range, else the range in words. A rule can name a
/// function of its own with such a signature.
pub mod range {
    /// Any value of the type.
    pub fn any<F>(_: F) -> Option<&'static str> {
        None
    }

    /// Any finite number.
    pub fn finite(value: f64) -> Option<&'static str> {
        (!value.is_finite()).then_some("a finite number")
    }

    /// A finite number of 0 or more.
    pub fn non_negative(value: f64) -> Option<&'static str> {
        // The allowed range is negated, because all comparisons of NaN are false, and NaN has to be refused.
        (!(value >= 0.0 && value.is_finite())).then_some("a finite number of 0 or more")
    }

    /// A number above 0; infinity is allowed.
    pub fn positive(value: f64) -> Option<&'static str> {
        (value.is_nan() || value <= 0.0).then_some("a number above 0")
    }

    /// A finite number above 0.
    pub(crate) fn finite_positive(value: f64) -> Option<&'static str> {
        (!(value > 0.0 && value.is_finite())).then_some("a finite number above 0")
    }

    /// A number of 0 or more and below 1.
    pub fn decay(value: f64) -> Option<&'static str> {
        (!(0.0..1.0).contains(&value)).then_some("a number in [0, 1)")
    }

    /// Two numbers of 0 or more and below 1.
    pub fn decays((first, second): (f64, f64)) -> Option<&'static str> {
        decay(first).or(decay(second)).and(Some("two numbers in [0, 1)"))
    }

    /// Three numbers of 0 or more and below 1.
    pub(crate) fn three_decays((first, second, third): (f64, f64, f64)) -> Option<&'static str> {
        decay(first)
            .or(decay(second))
            .or(decay(third))
            .and(Some("three numbers in [0, 1)"))
    }

    /// A count of 1 or more.
    pub fn at_least_one(value: u64) -> Option<&'static str> {
        (value == 0).then_some("1 or more")
    }
}
