//! Hyper-parameters by name: reading, checking, adjusting.

use std::fmt;

use crate::error::{Error, Result};

/// The value of a hyper-parameter, whatever its type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum FieldValue {
    /// A real number, such as a learning rate.
    Real(f64),
    /// A pair of reals, such as Adam's beta.
    Pair(f64, f64),
    /// A count.
    Count(u64),
    /// A switch.
    Flag(bool),
    /// What to do on a norm that is not finite.
    NonFinite(NonFinite),
}

/// What a clipping rule does when the norm is infinite or NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NonFinite {
    /// [`update`](crate::update) returns an error that names the parameter; nothing changes.
    #[default]
    Error,
    /// The gradient goes on as it is.
    Pass,
    /// The whole call is skipped: nothing changes, and the outcome says so.
    Skip,
}

impl fmt::Display for FieldValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FieldValue::Real(value) => write!(f, "{value:?}"),
            FieldValue::Pair(first, second) => write!(f, "({first:?}, {second:?})"),
            FieldValue::Count(value) => write!(f, "{value}"),
            FieldValue::Flag(value) => write!(f, "{value}"),
            FieldValue::NonFinite(value) => write!(f, "{value:?}"),
        }
    }
}

/// A type that a hyper-parameter can have.
pub trait Field: Copy + Into<FieldValue> {
    /// The type in words, for errors.
    const EXPECTED: &'static str;
    /// The value, if it is of this type.
    fn from_value(value: FieldValue) -> Option<Self>;
}

macro_rules! fields {
    ($($T:ty, $expected:literal, $value:ident => $wrap:expr, $pattern:pat => $unwrap:expr;)*) => {$(
        impl From<$T> for FieldValue {
            fn from($value: $T) -> Self {
                $wrap
            }
        }

        impl Field for $T {
            const EXPECTED: &'static str = $expected;
            fn from_value(value: FieldValue) -> Option<Self> {
                match value {
                    $pattern => $unwrap,
                    _ => None,
                }
            }
        }
    )*};
}

fields! {
    f64, "a real number", value => FieldValue::Real(value), FieldValue::Real(value) => Some(value);
    (f64, f64), "a pair of reals", value => FieldValue::Pair(value.0, value.1), FieldValue::Pair(a, b) => Some((a, b));
    u64, "a count", value => FieldValue::Count(value), FieldValue::Count(value) => Some(value);
    bool, "true or false", value => FieldValue::Flag(value), FieldValue::Flag(value) => Some(value);
    NonFinite, "a NonFinite", value => FieldValue::NonFinite(value), FieldValue::NonFinite(value) => Some(value);
}

/// So that a plain `3` is a count.
impl From<i32> for FieldValue {
    fn from(value: i32) -> Self {
        u64::try_from(value).map_or(FieldValue::Real(value.into()), FieldValue::Count)
    }
}

/// Hyper-parameters by name.
///
/// [`hyper_parameters!`](crate::hyper_parameters) implements it for a rule's struct. Chains and wrappers forward to what they hold, so
/// a name reaches every member that has it.
///
/// ```
/// use optimisers::{Adam, Adjust, ClipGrad, OptimiserChain};
///
/// let mut rule = OptimiserChain::new((ClipGrad::new(1.0), Adam::new(1e-3)));
/// rule.adjust(5e-4)?;
/// rule.adjust_field("beta", (0.8, 0.99))?;
/// assert_eq!(rule, OptimiserChain::new((ClipGrad::new(1.0), Adam { beta: (0.8, 0.99), ..Adam::new(5e-4) })));
///
/// let error = rule.adjust_field("rho", 0.9).unwrap_err();
/// assert_eq!(error.to_string(), r#"no rule here has a field "rho"; there are: delta, eta, beta, epsilon"#);
/// # Ok::<(), optimisers::Error>(())
/// ```
pub trait Adjust {
    /// The rule's name, for errors and listings.
    fn name(&self) -> String;

    /// All hyper-parameters with their values, in order; a name can occur more than once in a chain.
    fn fields(&self) -> Vec<(&'static str, FieldValue)>;

    /// Sets every field of that name, and says whether there was one. Ranges are not checked here.
    ///
    /// # Errors
    /// If the value is of the wrong type, or the field decides the layout of the state.
    fn set_field(&mut self, field: &str, value: FieldValue) -> Result<bool>;

    /// Checks every hyper-parameter against its range.
    ///
    /// # Errors
    /// For the first that is outside of it.
    fn check(&self) -> Result<()>;

    /// The first hyper-parameter of that name.
    ///
    /// ```
    /// use optimisers::{Adam, Adjust, FieldValue};
    ///
    /// assert_eq!(Adam::new(0.01).field("eta"), Some(FieldValue::Real(0.01)));
    /// ```
    fn field(&self, name: &str) -> Option<FieldValue> {
        self.fields().into_iter().find_map(|(field, value)| (field == name).then_some(value))
    }

    /// Sets the learning rate `eta`.
    ///
    /// # Errors
    /// As [`Adjust::adjust_field`].
    fn adjust(&mut self, eta: f64) -> Result<()>
    where
        Self: Clone,
    {
        self.adjust_field("eta", eta)
    }

    /// Sets every field of that name, in all members.
    ///
    /// # Errors
    /// If no member has the field, the value is of the wrong type or out of range, or the field decides the layout of the state. Nothing
    /// changes then.
    fn adjust_field(&mut self, field: &str, value: impl Into<FieldValue>) -> Result<()>
    where
        Self: Clone,
    {
        let mut adjusted = self.clone();
        if !adjusted.set_field(field, value.into())? {
            return Err(Error::UnknownField { name: field.to_string(), available: names(self) });
        }
        adjusted.check()?;
        *self = adjusted;
        Ok(())
    }
}

/// The names of all fields, each once.
pub(crate) fn names<A: Adjust + ?Sized>(rule: &A) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for (name, _) in rule.fields() {
        if !names.iter().any(|known| known == name) {
            names.push(name.to_string());
        }
    }
    names
}

/// Sets one field of a struct; for [`hyper_parameters!`](crate::hyper_parameters).
#[doc(hidden)]
pub fn set<F: Field>(rule: String, available: Vec<&'static str>, name: &str, field: &mut F, value: FieldValue) -> Result<()> {
    let Some(value_of_type) = F::from_value(value) else {
        let available = available.into_iter().map(str::to_string).collect();
        return Err(Error::FieldType { rule, field: name.to_string(), expected: F::EXPECTED, got: value, available });
    };
    *field = value_of_type;
    Ok(())
}

/// Checks one field of a struct; for [`hyper_parameters!`](crate::hyper_parameters).
#[doc(hidden)]
pub fn check<F: Field>(rule: String, name: &str, field: F, range: fn(F) -> Option<&'static str>) -> Result<()> {
    match range(field) {
        None => Ok(()),
        Some(expected) => Err(Error::HyperParameter { rule, field: name.to_string(), value: field.into(), expected: expected.to_string() }),
    }
}

/// Ranges of hyper-parameters, for [`hyper_parameters!`](crate::hyper_parameters): each returns what it expects where a value is outside.
///
/// A rule can name a function of its own of the same form.
pub mod range {
    /// Any value of the type.
    pub fn any<F>(_: F) -> Option<&'static str> {
        None
    }

    /// A finite number of 0 or more.
    pub fn non_negative(value: f64) -> Option<&'static str> {
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

    /// A count of 1 or more.
    pub fn at_least_one(value: u64) -> Option<&'static str> {
        (value == 0).then_some("1 or more")
    }
}

/// Declares the struct of a rule with its defaults and ranges.
///
/// The struct's fields are public; it gets `Clone`, `Debug`, `PartialEq`, `Default`, a `new` that takes the leading field, and
/// [`Adjust`](crate::Adjust). Each field has the form `name: type = default => range,` with a function of
/// [`range`](crate::range) or one like it. Types are those that implement [`Field`](crate::Field).
///
/// ```
/// use optimisers::{hyper_parameters, range};
///
/// hyper_parameters! {
///     /// Gradient descent with a speed limit.
///     pub struct Limited {
///         /// The learning rate.
///         eta: f64 = 0.1 => range::non_negative,
///         /// The largest step.
///         delta: f64 = 1.0 => range::positive,
///     }
/// }
///
/// assert_eq!(Limited::new(0.5), Limited { eta: 0.5, delta: 1.0 });
/// ```
#[macro_export]
macro_rules! hyper_parameters {
    (
        $(#[$meta:meta])*
        $vis:vis struct $Rule:ident {
            $(#[$first_meta:meta])*
            $first:ident: $First:ty = $first_default:expr => $first_range:expr,
            $($(#[$field_meta:meta])* $field:ident: $Field:ty = $default:expr => $range:expr,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        $vis struct $Rule {
            $(#[$first_meta])*
            pub $first: $First,
            $($(#[$field_meta])* pub $field: $Field,)*
        }

        impl Default for $Rule {
            fn default() -> Self {
                Self { $first: $first_default, $($field: $default,)* }
            }
        }

        impl $Rule {
            #[doc = concat!("With the given `", stringify!($first), "` and the default for everything else.")]
            #[allow(clippy::needless_update)]
            pub fn new($first: $First) -> Self {
                Self { $first, ..Self::default() }
            }
        }

        impl $crate::Adjust for $Rule {
            fn name(&self) -> String {
                stringify!($Rule).to_string()
            }

            fn fields(&self) -> Vec<(&'static str, $crate::FieldValue)> {
                vec![
                    (stringify!($first), self.$first.into()),
                    $((stringify!($field), self.$field.into()),)*
                ]
            }

            fn set_field(&mut self, field: &str, value: $crate::FieldValue) -> $crate::Result<bool> {
                let available = vec![stringify!($first), $(stringify!($field),)*];
                let rule = stringify!($Rule).to_string();
                if field == stringify!($first) {
                    return $crate::__private::set(rule, available, field, &mut self.$first, value).map(|()| true);
                }
                $(if field == stringify!($field) {
                    return $crate::__private::set(rule, available, field, &mut self.$field, value).map(|()| true);
                })*
                Ok(false)
            }

            fn check(&self) -> $crate::Result<()> {
                let rule = || stringify!($Rule).to_string();
                $crate::__private::check(rule(), stringify!($first), self.$first, $first_range)?;
                $($crate::__private::check(rule(), stringify!($field), self.$field, $range)?;)*
                Ok(())
            }
        }
    };
}
