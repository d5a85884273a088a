//! Hyper-parameters by name: reading, checking, adjusting.

use smallvec::SmallVec;

use super::Description;
use super::describe::{self, MemberDescription, Refusal, address, out_of_range};
use super::rates::{self, RATE, Rates};
use crate::error::{Error, ErrorKind, Result, meant, one_of};
use crate::rule::Adjust;
use crate::rule::field::FieldValue;
use crate::rule::state::ChildPlace;
use crate::rule::traits::{Describe, Holder, Rule};

/// Everything follows from how a rule [describes](Describe) itself. The functions behind it are not generic:
/// only this block is compiled for each type of rule.
impl<R: Describe + Clone> Adjust for R {
    fn name(&self) -> String {
        name(&mut self.clone())
    }

    fn fields(&self) -> Vec<(&'static str, FieldValue)> {
        describe::fields(&mut self.clone())
    }

    fn places(&self) -> Vec<String> {
        describe::places(&mut self.clone())
    }

    fn set_field(&mut self, field: &str, value: FieldValue) -> Result<bool> {
        set_named(self, field, value)
    }

    fn set_fields(&mut self, values: &[FieldValue]) -> Result<()> {
        set_all(self, values)
    }

    fn check(&self) -> Result<()> {
        describe::check(&mut self.clone())
    }

    fn field(&self, name: &str) -> Option<FieldValue> {
        value(self, &mut self.clone(), name)
    }

    fn adjust(&mut self, eta: f64) -> Result<()>
    where
        Self: Clone,
    {
        self.adjust_field(RATE, eta)
    }

    fn adjust_field(&mut self, field: &str, value: impl Into<FieldValue>) -> Result<()>
    where
        Self: Clone,
    {
        self.adjust_fields([(field, value.into())])
    }

    fn adjust_fields<'f>(&mut self, values: impl IntoIterator<Item = (&'f str, FieldValue)>) -> Result<()>
    where
        Self: Clone,
    {
        let mut adjusted = self.clone();
        for (field, value) in values {
            if !adjusted.set_field(field, value)? {
                return Err(has_no_field(self, field));
            }
        }
        adjusted.check()?;
        *self = adjusted;
        Ok(())
    }
}

impl<R: Describe + Clone> Holder for R {
    fn visit_held(&self, show: &mut dyn FnMut(ChildPlace, &mut dyn Rule)) {
        describe::visit_held(&mut self.clone(), show);
    }
}

/// See [`Adjust::name`].
fn name(rule: &mut dyn Describe) -> String {
    Description::of(rule).to_string()
}

/// See [`Adjust::set_fields`].
fn set_all(rule: &mut dyn Describe, values: &[FieldValue]) -> Result<()> {
    describe::set_fields(rule, values).map_err(|refusal| refused(rule, refusal))
}

/// See [`Adjust::field`]. `copy` is a copy of `rule`, because describing needs `&mut`.
fn value(rule: &dyn Adjust, copy: &mut dyn Describe, name: &str) -> Option<FieldValue> {
    match Rates::named(copy, name) {
        Some(rates) => rates.value().map(FieldValue::Real),
        None => reached(rule, name).first().map(|(_, value)| *value),
    }
}

/// Sets the fields that a name reaches; `false` if it reaches none.
fn set_named(rule: &mut dyn Describe, name: &str, value: FieldValue) -> Result<bool> {
    let set = match rates::settings(rule, name, value)? {
        Some(values) => describe::set_values(rule, &values).map(|()| true),
        None => describe::set_field(rule, name, value),
    };
    set.map_err(|refusal| refused(rule, refusal))
}

/// Sets the fields with these indices in [`Adjust::fields`].
pub(crate) fn set_values(rule: &mut dyn Describe, values: &[(usize, FieldValue)]) -> Result<()> {
    describe::set_values(rule, values).map_err(|refusal| refused(rule, refusal))
}

/// The error for a field that was not set.
fn refused(rule: &mut dyn Describe, refusal: Refusal) -> Error {
    let Refusal { kind, name, expected, got } = refusal;
    let members = MemberDescription::all(rule);
    let own = members.iter().find(|member| member.kind == kind && !member.fields.is_empty());
    let named = own.map_or(&members[..], std::slice::from_ref);
    let available = each_once(named.iter().flat_map(|member| member.fields.iter().map(|field| field.name)));
    let available = available.join(", ");
    match expected {
        Some(expected) => out_of_range(kind, name, got, expected)
            .with_remedy(format!("pass that, or set another of its fields: {available}")),
        None => Error::new(
            ErrorKind::Argument,
            format!("{kind}: {name} decides the layout of the state and cannot be adjusted"),
        )
        .with_expected(format_args!("one of: {available}"))
        .with_remedy("set up a new state, or give the parameters another rule by `Selection::replace`"),
    }
}

/// The error for a field that a rule does not have.
fn has_no_field(rule: &dyn Adjust, field: &str) -> Error {
    has_no(&rule.name(), "field", field, &available(rule, field))
}

/// The error for a name that a rule does not have: of a field, or of a state tensor.
pub(crate) fn has_no(rule: &str, what: &str, name: &str, available: &[String]) -> Error {
    Error::new(ErrorKind::UnknownName, format!("{rule} has no {what} {name:?}{}", meant(name, available)))
        .with_expected(one_of(available))
}

/// The fields that a name reaches, each with its index in [`Adjust::fields`].
pub(crate) fn reached(rule: &dyn Adjust, name: &str) -> SmallVec<[(usize, FieldValue); 1]> {
    let (members, field) = address(name);
    let named = rule.fields().into_iter().enumerate().filter(|(_, (known, _))| *known == field);
    // Places are strings: made only if the name begins with one.
    let places = if members.is_empty() { Vec::new() } else { rule.places() };
    let is_inside = |i: usize| places.get(i).is_some_and(|place| address(place).0.starts_with(&members));
    named.filter(|(i, _)| members.is_empty() || is_inside(*i)).map(|(i, (_, value))| (i, value)).collect()
}

/// The learning rate: see [`Adjust::field`].
pub(crate) fn learning_rate(rule: &dyn Adjust) -> Option<f64> {
    if let Some(FieldValue::Real(eta)) = rule.field(RATE) { Some(eta) } else { None }
}

/// The places of fields that a name reaches, and their values.
pub(crate) fn with_places(rule: &dyn Adjust, reached: &[(usize, FieldValue)]) -> Vec<(String, FieldValue)> {
    let places = rule.places();
    reached.iter().map(|(i, value)| (places.get(*i).cloned().unwrap_or_default(), *value)).collect()
}

/// Candidates for an unknown name: with places if that has a place, else without.
pub(crate) fn available(rule: &dyn Adjust, name: &str) -> Vec<String> {
    if name.contains('.') { rule.places() } else { names(rule) }
}

/// The names of all fields, each once.
pub(crate) fn names(rule: &dyn Adjust) -> Vec<String> {
    each_once(rule.fields().into_iter().map(|(name, _)| name))
}

/// Names, each once, in the order in which they come first.
pub(crate) fn each_once<'n>(names: impl Iterator<Item = &'n str>) -> Vec<String> {
    let mut each: Vec<String> = Vec::new();
    for name in names {
        if !each.iter().any(|known| known == name) {
            each.push(name.to_string());
        }
    }
    each
}

/// Declares the struct of a rule with its defaults and ranges.
///
/// The struct's fields are public. It gets `Clone`, `Debug`, `PartialEq`, `Default`,
/// [`Describe`](crate::Describe), and a `new` that takes the leading field. Each field has the form
/// `name: type = default => range,` with a function of [`range`](crate::range) or one like it. Types are
/// `f64`, pairs and triples of it, `u64`, `bool`, [`Sizes`](crate::Sizes) and the enums of
/// [`choice!`](crate::choice). A [`Role`](crate::Role) may stand behind the name, as in
/// `pub struct Limited: Step`.
///
/// A field can be added later, anywhere but in the first place. Checkpoints without it are restored with its
/// default, so the default should be what the rule did before.
///
/// ```
/// use optimisers::{hyper_parameters, range};
///
/// hyper_parameters! {
///     /// Gradient descent with a speed limit.
///     pub struct Limited {
///         /// η: the learning rate.
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
        $vis:vis struct $Rule:ident $(: $role:ident)? {
            $(#[$first_meta:meta])*
            $first:ident: $First:ty = $first_default:expr => $first_range:expr,
            $($(#[$field_meta:meta])* $field:ident: $Field:ty = $default:expr => $range:expr,)*
        }
    ) => {
        $(#[$meta])*
        #[must_use = "a rule does nothing by itself: pass it to `setup`"]
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

        impl $crate::Describe for $Rule {
            fn describe(&mut self, rule: &mut $crate::Describer<'_>) {
                let default = Self::default();
                rule.kind(stringify!($Rule));
                $(rule.role($crate::Role::$role);)?
                rule.field($crate::__private::field_name(stringify!($first)), &mut self.$first, default.$first, $first_range);
                $(rule.field($crate::__private::field_name(stringify!($field)), &mut self.$field, default.$field, $range);)*
            }
        }
    };
}
