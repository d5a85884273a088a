//! Hyper-parameters by name: reading, checking, adjusting.

use candle_core::Tensor;
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::field::{Field, FieldValue};

/// Hyper-parameters by name.
///
/// [`hyper_parameters!`](crate::hyper_parameters) implements it for a rule's struct. Chains and wrappers forward to what they hold, so
/// a name reaches every member that has it. With its place before it, `1.eta`, it reaches the second member of the chain only; with the place of a
/// chain, every member of that one. Members are counted from 0, wrappers are not counted, and `None` is: the places are those of
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
    /// The rule's name, for errors and listings.
    fn name(&self) -> String;

    /// All hyper-parameters with their values, in order; a name can occur more than once in a chain.
    fn fields(&self) -> Vec<(&'static str, FieldValue)>;

    /// The names that address one field each, in the order of [`fields`](Adjust::fields): its place in front of its name, as in `1.eta`. The place of
    /// a rule that is no member of a chain is empty.
    ///
    /// A rule that holds others hands on theirs; for other rules the provided method is right.
    fn places(&self) -> Vec<String> {
        self.fields().into_iter().map(|(name, _)| name.to_string()).collect()
    }

    /// Sets every field of that name, which may begin with a place, and says whether there was one. Ranges are not checked here.
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

    /// Decides what depends on the parameter, which has these paths: which of two rules it gets, as a [`Fallback`](crate::Fallback) does. Says whether there was something to decide.
    /// [`setup`](crate::setup) asks this of a copy for each parameter, before its state is made.
    ///
    /// A rule that holds others passes it on. The provided method is for a rule that is the same for all parameters.
    fn settle(&mut self, _paths: &[String], _x: &Tensor) -> bool {
        false
    }

    /// The patterns of paths by which [`settle`](Adjust::settle) decides. At [`setup`](crate::setup) each has to match a path of the model, so that a mistyped one does
    /// not go unnoticed.
    ///
    /// A rule that holds others asks each. The provided method is for a rule without any.
    fn patterns(&self) -> Vec<String> {
        Vec::new()
    }

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
    fn field(&self, name: &str) -> Option<FieldValue> {
        reached(self, name).first().map(|(_, value)| *value)
    }

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

/// Methods of [`Adjust`] by those of the rule that a type holds, which is given as a reference to read and one to write.
///
/// `all` of them, the `fields` (all but the name and the check), the `provided` ones, which the trait itself has for a rule that holds none, or of these the ones about
/// `values` or about `parameters`.
macro_rules! adjust_by {
    (all, $self:ident => $rule:expr, $rule_mut:expr) => {
        fn name(&$self) -> String {
            $crate::rule::Adjust::name($rule)
        }

        fn check(&$self) -> $crate::error::Result<()> {
            $crate::rule::Adjust::check($rule)
        }

        $crate::rule::adjust_by!(fields, $self => $rule, $rule_mut);
    };
    (fields, $self:ident => $rule:expr, $rule_mut:expr) => {
        fn fields(&$self) -> Vec<(&'static str, $crate::rule::FieldValue)> {
            $crate::rule::Adjust::fields($rule)
        }

        fn set_field(&mut $self, field: &str, value: $crate::rule::FieldValue) -> $crate::error::Result<bool> {
            let rule = $rule_mut;
            $crate::rule::Adjust::set_field(rule, field, value)
        }

        $crate::rule::adjust_by!(provided, $self => $rule, $rule_mut);
    };
    (provided, $self:ident => $rule:expr, $rule_mut:expr) => {
        $crate::rule::adjust_by!(values, $self => $rule, $rule_mut);
        $crate::rule::adjust_by!(parameters, $self => $rule, $rule_mut);
    };
    (parameters, $self:ident => $rule:expr, $rule_mut:expr) => {
        fn settle(&mut $self, paths: &[String], x: &candle_core::Tensor) -> bool {
            let rule = $rule_mut;
            $crate::rule::Adjust::settle(rule, paths, x)
        }

        fn patterns(&$self) -> Vec<String> {
            $crate::rule::Adjust::patterns($rule)
        }
    };
    (values, $self:ident => $rule:expr, $rule_mut:expr) => {
        fn places(&$self) -> Vec<String> {
            $crate::rule::Adjust::places($rule)
        }

        fn set_fields(&mut $self, values: &[$crate::rule::FieldValue]) -> $crate::error::Result<()> {
            let rule = $rule_mut;
            $crate::rule::Adjust::set_fields(rule, values)
        }

        fn defaults(&$self) -> Vec<(String, Vec<(&'static str, $crate::rule::FieldValue)>)> {
            $crate::rule::Adjust::defaults($rule)
        }
    };
}
pub(crate) use adjust_by;

/// The fields that a name reaches, each with its index in [`Adjust::fields`].
pub(crate) fn reached<A: Adjust + ?Sized>(rule: &A, name: &str) -> SmallVec<[(usize, FieldValue); 1]> {
    let fields = rule.fields().into_iter().enumerate();
    let Some(dot) = name.rfind('.') else {
        return fields.filter(|(_, (field, _))| *field == name).map(|(i, (_, value))| (i, value)).collect();
    };
    let (inside, field) = name.split_at(dot + 1);
    let places = rule.places();
    let reaches = |place: &String| {
        let between = place.strip_prefix(inside).and_then(|place| place.strip_suffix(field));
        between.is_some_and(|between| between.is_empty() || between.ends_with('.'))
    };
    fields.filter(|(i, _)| places.get(*i).is_some_and(reaches)).map(|(i, (_, value))| (i, value)).collect()
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

/// The index of a member, and the name of a field in it: what a name with a place begins with.
pub(crate) fn in_member(name: &str) -> Option<(usize, &str)> {
    let (index, field) = name.split_once('.')?;
    let index: usize = index.parse().ok().filter(|number: &usize| number.to_string() == index)?;
    Some((index, field))
}

/// What could have been meant by a name that is not there: names, or names with places, as it was one or the other.
pub(crate) fn available<A: Adjust + ?Sized>(rule: &A, name: &str) -> Vec<String> {
    if name.contains('.') { rule.places() } else { names(rule) }
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

/// Sets one field of a struct, or says what it takes; for [`hyper_parameters!`](crate::hyper_parameters).
#[doc(hidden)]
pub fn set<F: Field>(field: &mut F, value: FieldValue) -> std::result::Result<(), &'static str> {
    *field = F::from_value(value).ok_or(F::EXPECTED)?;
    Ok(())
}

/// The error for a value of another type; for [`hyper_parameters!`](crate::hyper_parameters).
#[doc(hidden)]
pub fn wrong_type<A: Adjust + ?Sized>(rule: &A, name: &str, expected: &'static str, got: FieldValue) -> Error {
    Error::FieldType { rule: rule.name(), field: name.to_string(), expected, got: Box::new(got), available: names(rule) }
}

/// Checks one field of a struct; for [`hyper_parameters!`](crate::hyper_parameters).
#[doc(hidden)]
pub fn check<F: Field>(rule: &str, name: &str, field: F, range: fn(F) -> Option<&'static str>) -> Result<()> {
    match range(field) {
        None => Ok(()),
        Some(expected) => {
            let (rule, value) = (rule.to_string(), field.into());
            Err(Error::HyperParameter { rule, field: name.to_string(), value, expected: expected.to_string() })
        }
    }
}

/// Declares the struct of a rule with its defaults and ranges.
///
/// The struct's fields are public; it gets `Clone`, `Debug`, `PartialEq`, `Default`, a `new` that takes the leading field, and
/// [`Adjust`](crate::Adjust). Each field has the form `name: type = default => range,` with a function of
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
                let set = match field {
                    name if name == $crate::__private::field_name(stringify!($first)) => $crate::__private::set(&mut self.$first, value),
                    $(name if name == $crate::__private::field_name(stringify!($field)) => $crate::__private::set(&mut self.$field, value),)*
                    _ => return Ok(false),
                };
                set.map(|()| true).map_err(|expected| $crate::__private::wrong_type(self, field, expected, value))
            }

            fn defaults(&self) -> Vec<(String, Vec<(&'static str, $crate::FieldValue)>)> {
                vec![($crate::Adjust::name(self), $crate::Adjust::fields(&Self::default()))]
            }

            fn check(&self) -> $crate::Result<()> {
                let rule = stringify!($Rule);
                $crate::__private::check(rule, $crate::__private::field_name(stringify!($first)), self.$first, $first_range)?;
                $($crate::__private::check(rule, $crate::__private::field_name(stringify!($field)), self.$field, $range)?;)*
                Ok(())
            }
        }
    };
}
