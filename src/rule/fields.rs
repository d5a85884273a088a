//! Hyper-parameters by name: reading, checking, adjusting.

use crate::error::{Error, Result};
use crate::field::{Field, FieldValue};

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

    /// Takes over all values in the order of [`fields`](Adjust::fields), as they were read from a rule of this kind. Ranges are not
    /// checked here.
    ///
    /// A rule that holds others hands each its part; for other rules the provided method is right.
    ///
    /// # Errors
    /// If a value is of the wrong type.
    fn set_fields(&mut self, values: &[FieldValue]) -> Result<()> {
        for ((name, _), value) in self.fields().into_iter().zip(values) {
            self.set_field(name, *value)?;
        }
        Ok(())
    }

    /// The rules in here by their names, each with its hyper-parameters and their defaults; all together in the order of
    /// [`fields`](Adjust::fields). What a [checkpoint](crate::CheckpointFile::restore) of an older version lacks gets its default.
    ///
    /// A rule that holds others asks each. The provided method is for a rule without defaults, and has the values of now.
    fn defaults(&self) -> Vec<(String, Vec<(&'static str, FieldValue)>)> {
        vec![(self.name(), self.fields())]
    }

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

    /// Sets every field of that name, in all members. A whole number will do for a real one.
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
pub fn set<F: Field>(rule: String, available: Vec<String>, name: &str, field: &mut F, value: FieldValue) -> Result<()> {
    let Some(value_of_type) = F::from_value(value) else {
        return Err(Error::FieldType { rule, field: name.to_string(), expected: F::EXPECTED, got: Box::new(value), available });
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

/// Declares the struct of a rule with its defaults and ranges.
///
/// The struct's fields are public; it gets `Clone`, `Debug`, `PartialEq`, `Default`, a `new` that takes the leading field, and
/// [`Adjust`](crate::Adjust). Each field has the form `name: type = default => range,` with a function of
/// [`range`](crate::range) or one like it. Types are those that implement [`Field`](crate::Field).
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
                    ($crate::__private::field_name(stringify!($first)), self.$first.into()),
                    $(($crate::__private::field_name(stringify!($field)), self.$field.into()),)*
                ]
            }

            fn set_field(&mut self, field: &str, value: $crate::FieldValue) -> $crate::Result<bool> {
                let available = vec![$crate::__private::field_name(stringify!($first)).to_string(), $($crate::__private::field_name(stringify!($field)).to_string(),)*];
                let rule = stringify!($Rule).to_string();
                if field == $crate::__private::field_name(stringify!($first)) {
                    return $crate::__private::set(rule, available, field, &mut self.$first, value).map(|()| true);
                }
                $(if field == $crate::__private::field_name(stringify!($field)) {
                    return $crate::__private::set(rule, available, field, &mut self.$field, value).map(|()| true);
                })*
                Ok(false)
            }

            fn defaults(&self) -> Vec<(String, Vec<(&'static str, $crate::FieldValue)>)> {
                vec![($crate::Adjust::name(self), $crate::Adjust::fields(&Self::default()))]
            }

            fn check(&self) -> $crate::Result<()> {
                let rule = || stringify!($Rule).to_string();
                $crate::__private::check(rule(), $crate::__private::field_name(stringify!($first)), self.$first, $first_range)?;
                $($crate::__private::check(rule(), $crate::__private::field_name(stringify!($field)), self.$field, $range)?;)*
                Ok(())
            }
        }
    };
}
