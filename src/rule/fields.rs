//! Hyper-parameters by name: reading, checking, adjusting.

use smallvec::SmallVec;

use super::describe::{self, Describe, MemberDescription, Refusal, address};
use crate::error::{Error, Result};
use crate::field::FieldValue;

/// Hyper-parameters by name.
///
/// It follows from how a rule [describes](Describe) itself. A name reaches every member that has it. With its place
/// before it, `1.eta`, it reaches the second member of the chain only; with the place of a chain, every member of that
/// one. Members are counted from 0, wrappers are not counted, and `None` is: the places are those of
/// [state tensors](crate::Leaf::tensor_names).
///
/// ```
/// use optimisers::{Adam, Adjust, ClipGrad, OptimiserChain};
///
/// let mut rule = OptimiserChain::new((ClipGrad::new(1.0), Adam::new(1e-3)));
/// rule.adjust(5e-4)?;
/// rule.adjust_fields([("1.beta", (0.8, 0.99).into()), ("delta", 2.into())])?;
/// assert_eq!(rule, OptimiserChain::new((ClipGrad::new(2.0), Adam { beta: (0.8, 0.99), ..Adam::new(5e-4) })));
/// assert_eq!(rule.places(), ["0.delta", "1.eta", "1.beta", "1.epsilon"]);
///
/// let error = rule.adjust_field("rho", 0.9).unwrap_err();
/// assert_eq!(error.to_string(), r#"no rule here has a field "rho"; there are: delta, eta, beta, epsilon"#);
/// # Ok::<(), optimisers::Error>(())
/// ```
pub trait Adjust {
    /// The rule's name, for errors and listings: its kind, and what it holds in brackets.
    fn name(&self) -> String;

    /// All hyper-parameters with their values, in order; a name can occur more than once in a chain.
    fn fields(&self) -> Vec<(&'static str, FieldValue)>;

    /// The names that address one field each, in the order of [`fields`](Adjust::fields): its place in front of its name, as in `1.eta`. The place of
    /// a rule that is no member of a chain is empty.
    fn places(&self) -> Vec<String>;

    /// Sets every field of that name, which may begin with a place, and says whether there was one. Ranges are not checked here.
    ///
    /// # Errors
    /// If the value is of the wrong type, or the field decides the layout of the state.
    fn set_field(&mut self, field: &str, value: FieldValue) -> Result<bool>;

    /// Takes over all values in the order of [`fields`](Adjust::fields), as they were read from a rule of this kind. Ranges are not
    /// checked here.
    ///
    /// # Errors
    /// If a value is of the wrong type.
    fn set_fields(&mut self, values: &[FieldValue]) -> Result<()>;

    /// Checks every hyper-parameter against its range.
    ///
    /// # Errors
    /// For the first that is outside of it.
    fn check(&self) -> Result<()>;

    /// The first hyper-parameter of that name, which may begin with a place.
    ///
    /// ```
    /// use optimisers::{Adam, Adjust, ClipNorm, Descent, FieldValue, OptimiserChain};
    ///
    /// assert_eq!(Adam::new(0.01).field("eta"), Some(FieldValue::Real(0.01)));
    ///
    /// let chain = OptimiserChain::new((ClipNorm::new(1.0), OptimiserChain::new((Adam::new(0.01), Descent::new(1.0)))));
    /// assert_eq!(chain.field("1.1.eta"), Some(FieldValue::Real(1.0)));
    /// ```
    fn field(&self, name: &str) -> Option<FieldValue>;

    /// Sets the learning rate `eta`.
    ///
    /// # Errors
    /// As [`Adjust::adjust_field`]. Of a chain with several learning rates all are set; a
    /// [state](crate::StateTree::adjust) refuses that.
    fn adjust(&mut self, eta: f64) -> Result<()>
    where
        Self: Clone,
    {
        self.adjust_field("eta", eta)
    }

    /// Sets every field of that name, in all members, or in the one whose place is before the name. A whole number will do for a real one.
    ///
    /// # Errors
    /// If no member has the field, the value is of the wrong type or out of range, or the field decides the layout of the state. Nothing
    /// changes then.
    fn adjust_field(&mut self, field: &str, value: impl Into<FieldValue>) -> Result<()>
    where
        Self: Clone,
    {
        self.adjust_fields([(field, value.into())])
    }

    /// Sets several fields, all or none, in their order. Ranges are checked when all are set, so two that only fit together can be changed together.
    ///
    /// # Errors
    /// As [`Adjust::adjust_field`], for the first that is refused.
    fn adjust_fields<'f>(&mut self, values: impl IntoIterator<Item = (&'f str, FieldValue)>) -> Result<()>
    where
        Self: Clone,
    {
        let mut adjusted = self.clone();
        for (field, value) in values {
            if !adjusted.set_field(field, value)? {
                return Err(Error::UnknownField { name: field.to_string(), available: available(self, field) });
            }
        }
        adjusted.check()?;
        *self = adjusted;
        Ok(())
    }
}

/// Everything follows from how a rule [describes](Describe) itself.
impl<R: Describe + Clone> Adjust for R {
    fn name(&self) -> String {
        describe::name(&mut self.clone())
    }

    fn fields(&self) -> Vec<(&'static str, FieldValue)> {
        describe::fields(&mut self.clone())
    }

    fn places(&self) -> Vec<String> {
        describe::places(&mut self.clone())
    }

    fn set_field(&mut self, field: &str, value: FieldValue) -> Result<bool> {
        describe::set_field(self, field, value).map_err(|refusal| refused(self, refusal))
    }

    fn set_fields(&mut self, values: &[FieldValue]) -> Result<()> {
        describe::set_fields(self, values).map_err(|refusal| refused(self, refusal))
    }

    fn check(&self) -> Result<()> {
        describe::check(&mut self.clone())
    }

    fn field(&self, name: &str) -> Option<FieldValue> {
        reached(self, name).first().map(|(_, value)| *value)
    }
}

/// The error for a field that was not set.
fn refused(rule: &mut dyn Describe, refusal: Refusal) -> Error {
    let Refusal { kind, name, expected, got } = refusal;
    let members = MemberDescription::all(rule);
    let own = members.iter().find(|member| member.kind == kind && !member.fields.is_empty());
    let named = own.map_or(&members[..], std::slice::from_ref);
    let available = each_once(named.iter().flat_map(|member| member.fields.iter().map(|field| field.name)));
    let (rule, field) = (kind.to_string(), name.to_string());
    match expected {
        Some(expected) => Error::FieldType { rule, field, expected, got: Box::new(got), available },
        None => Error::FixedField { rule, field, available },
    }
}

/// The fields that a name reaches, each with its index in [`Adjust::fields`].
pub(crate) fn reached<A: Adjust + ?Sized>(rule: &A, name: &str) -> SmallVec<[(usize, FieldValue); 1]> {
    let (members, field) = address(name);
    let named = rule.fields().into_iter().enumerate().filter(|(_, (known, _))| *known == field);
    // Places are made only where they decide.
    let places = if members.is_empty() { Vec::new() } else { rule.places() };
    let is_inside = |i: usize| places.get(i).is_some_and(|place| address(place).0.starts_with(&members));
    named.filter(|(i, _)| members.is_empty() || is_inside(*i)).map(|(i, (_, value))| (i, value)).collect()
}

/// The learning rate: the product of all `eta`, as the steps of a chain are multiplied by each. `None` where there is none.
pub(crate) fn learning_rate<A: Adjust + ?Sized>(rule: &A) -> Option<f64> {
    let rates = reached(rule, "eta").into_iter().filter_map(|(_, value)| if let FieldValue::Real(eta) = value { Some(eta) } else { None });
    rates.reduce(|product, eta| product * eta)
}

/// Refuses one learning rate for several members of a chain, where steps are multiplied by each.
pub(crate) fn expect_one_rate<A: Adjust + ?Sized>(rule: &A) -> Result<()> {
    match reached(rule, "eta")[..] {
        [] | [_] => Ok(()),
        ref several => Err(Error::SeveralRates { rule: rule.name(), members: with_places(rule, several) }),
    }
}

/// The places of fields that a name reaches, and their values.
pub(crate) fn with_places<A: Adjust + ?Sized>(rule: &A, reached: &[(usize, FieldValue)]) -> Vec<(String, FieldValue)> {
    let places = rule.places();
    reached.iter().map(|(i, value)| (places.get(*i).cloned().unwrap_or_default(), *value)).collect()
}

/// What could have been meant by a name that is not there: names, or names with places, as it was one or the other.
pub(crate) fn available<A: Adjust + ?Sized>(rule: &A, name: &str) -> Vec<String> {
    if name.contains('.') { rule.places() } else { names(rule) }
}

/// The names of all fields, each once.
pub(crate) fn names<A: Adjust + ?Sized>(rule: &A) -> Vec<String> {
    each_once(rule.fields().into_iter().map(|(name, _)| name))
}

fn each_once(names: impl Iterator<Item = &'static str>) -> Vec<String> {
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
/// The struct's fields are public; it gets `Clone`, `Debug`, `PartialEq`, `Default`, a `new` that takes the leading field, and
/// [`Describe`](crate::Describe). Each field has the form `name: type = default => range,` with a function of
/// [`range`](crate::range) or one like it. Types are `f64`, pairs and triples of it, `u64`, `bool`,
/// [`Sizes`](crate::Sizes) and the enums of [`choice!`](crate::choice).
///
/// A field can be added later, anywhere but in the first place: checkpoints that lack it are restored with its default, which should therefore be what
/// the rule did before.
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
        $vis:vis struct $Rule:ident {
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
                rule.field($crate::__private::field_name(stringify!($first)), &mut self.$first, default.$first, $first_range);
                $(rule.field($crate::__private::field_name(stringify!($field)), &mut self.$field, default.$field, $range);)*
            }
        }
    };
}
