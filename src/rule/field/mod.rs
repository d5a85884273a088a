//! The values that hyper-parameters can have: their types, conversions and ranges.

mod choice;
mod literal;
mod sizes;

use std::fmt;
use std::mem::discriminant;

use smallvec::{SmallVec, smallvec};

use crate::numbers::Fingerprint;

pub use choice::{Average, Choice, Choices, NonFinite, choice_of, index_in};

pub(crate) use literal::{Literal, Number};
pub use sizes::Sizes;

/// The value of a hyper-parameter, whatever its type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum FieldValue {
    /// A real number, such as a learning rate.
    Real(f64),
    /// A pair of reals, such as Adam's beta.
    Pair(f64, f64),
    /// Three reals, such as AdEMAMix's beta.
    Triple(f64, f64, f64),
    /// A count. A field of real numbers takes it, too.
    Count(u64),
    /// How a whole is cut into parts, such as the rows of a fused matrix.
    Sizes(Sizes),
    /// A switch.
    Flag(bool),
    /// One of several named values, such as what to do on a norm that is [not finite](NonFinite).
    Choice(Choice),
}

impl FieldValue {
    /// Whether this is made of real numbers. Such values, as learning rates are, never decide on the tensors
    /// of a state.
    pub(crate) fn is_real(self) -> bool {
        matches!(self, FieldValue::Real(_) | FieldValue::Pair(..) | FieldValue::Triple(..))
    }

    /// Adds the value to a hash.
    pub(crate) fn printed(self, print: Fingerprint) -> Fingerprint {
        match self {
            FieldValue::Real(a) => print.real(a),
            FieldValue::Pair(a, b) => print.real(a).real(b),
            FieldValue::Triple(a, b, c) => print.real(a).real(b).real(c),
            FieldValue::Count(count) => print.number(count),
            FieldValue::Sizes(sizes) => sizes.iter().fold(print, |print, size| print.number(size as u64)),
            FieldValue::Flag(flag) => print.number(flag.into()),
            FieldValue::Choice(choice) => print.bytes(choice.name().as_bytes()),
        }
    }

    /// The numbers of a pair or triple; empty for any other value.
    pub(crate) fn parts(self) -> SmallVec<[f64; 3]> {
        match self {
            FieldValue::Pair(first, second) => smallvec![first, second],
            FieldValue::Triple(first, second, third) => smallvec![first, second, third],
            _ => SmallVec::new(),
        }
    }

    /// Replaces the number at index `part` of a pair or triple. Panics for any other value.
    pub(crate) fn with_part(self, part: usize, number: f64) -> Self {
        let mut all = self.parts();
        all[part] = number;
        match all[..] {
            [first, second] => (first, second).into(),
            [first, second, third] => (first, second, third).into(),
            _ => self,
        }
    }

    /// This value as one of the type of `like`; `None` if the types differ. A count is also a real number.
    pub(crate) fn like(self, like: FieldValue) -> Option<FieldValue> {
        match (like, self) {
            (FieldValue::Real(_), FieldValue::Count(count)) => Some(FieldValue::Real(count as f64)),
            // Choices have one discriminant, whatever their enum is.
            (FieldValue::Choice(like), FieldValue::Choice(own)) if !own.is_of(like) => None,
            _ => (discriminant(&like) == discriminant(&self)).then_some(self),
        }
    }

    /// The value's type in words, for errors.
    pub(crate) fn expected(self) -> &'static str {
        match self {
            FieldValue::Real(_) => f64::EXPECTED,
            FieldValue::Pair(..) => <(f64, f64)>::EXPECTED,
            FieldValue::Triple(..) => <(f64, f64, f64)>::EXPECTED,
            FieldValue::Count(_) => u64::EXPECTED,
            FieldValue::Sizes(_) => Sizes::EXPECTED,
            FieldValue::Flag(_) => bool::EXPECTED,
            FieldValue::Choice(choice) => choice.expected(),
        }
    }
}

impl fmt::Display for FieldValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FieldValue::Real(value) => write!(f, "{}", Short(*value)),
            FieldValue::Pair(first, second) => write!(f, "({}, {})", Short(*first), Short(*second)),
            FieldValue::Triple(first, second, third) => {
                write!(f, "({}, {}, {})", Short(*first), Short(*second), Short(*third))
            }
            FieldValue::Count(value) => write!(f, "{value}"),
            FieldValue::Sizes(value) => write!(f, "{value}"),
            FieldValue::Flag(value) => write!(f, "{value}"),
            FieldValue::Choice(choice) => f.write_str(choice.name()),
        }
    }
}

/// Displays a number in few characters: below 1e-4, and from 1e16 on, with an exponent.
struct Short(f64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Short(value) = *self;
        if value != 0.0 && !(1e-4..1e16).contains(&value.abs()) {
            write!(f, "{value:e}")
        } else {
            write!(f, "{value}")
        }
    }
}

/// A type that a hyper-parameter can have; for [`choice!`](crate::choice) and
/// [`hyper_parameters!`](crate::hyper_parameters).
pub trait Field: Copy + Into<FieldValue> {
    /// The type in words, for errors.
    const EXPECTED: &'static str;
    /// The value, if it is of this type; a count is also a real number.
    fn from_value(value: FieldValue) -> Option<Self>;
}

macro_rules! fields {
    ($($T:ty, $expected:literal, $value:ident => $wrap:expr $(, $pattern:pat => $unwrap:expr)+;)*) => {$(
        impl From<$T> for FieldValue {
            fn from($value: $T) -> Self {
                $wrap
            }
        }

        impl Field for $T {
            const EXPECTED: &'static str = $expected;
            fn from_value(value: FieldValue) -> Option<Self> {
                match value {
                    $($pattern => $unwrap,)+
                    _ => None,
                }
            }
        }
    )*};
}

fields! {
    f64, "a real number", value => FieldValue::Real(value),
        FieldValue::Real(value) => Some(value), FieldValue::Count(value) => Some(value as f64);
    (f64, f64), "a pair of reals", value => FieldValue::Pair(value.0, value.1), FieldValue::Pair(a, b) => Some((a, b));
    (f64, f64, f64), "three reals", value => FieldValue::Triple(value.0, value.1, value.2), FieldValue::Triple(a, b, c) => Some((a, b, c));
    Sizes, "a list of up to six counts above 0", value => FieldValue::Sizes(value), FieldValue::Sizes(value) => Some(value);
    u64, "a count", value => FieldValue::Count(value), FieldValue::Count(value) => Some(value);
    bool, "true or false", value => FieldValue::Flag(value), FieldValue::Flag(value) => Some(value);
}

/// For a literal such as `3`, whose type is `i32`: a count, or a real number if it is negative.
impl From<i32> for FieldValue {
    fn from(value: i32) -> Self {
        u64::try_from(value).map_or(FieldValue::Real(value.into()), FieldValue::Count)
    }
}

/// Ranges of hyper-parameters, for [`hyper_parameters!`](crate::hyper_parameters).
///
/// Each returns `None` for a value inside, else what was expected. A rule can name a function of its own with
/// such a signature.
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
        // What is allowed is negated, so that NaN, for which all comparisons are false, is refused.
        (!(value >= 0.0 && value.is_finite())).then_some("a finite number of 0 or more")
    }

    /// A number above 0; infinity is allowed.
    pub fn positive(value: f64) -> Option<&'static str> {
        (value.is_nan() || value <= 0.0).then_some("a number above 0")
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
        decay(first).or(decay(second)).or(decay(third)).and(Some("three numbers in [0, 1)"))
    }

    /// A count of 1 or more.
    pub fn at_least_one(value: u64) -> Option<&'static str> {
        (value == 0).then_some("1 or more")
    }
}
