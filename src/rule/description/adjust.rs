//! Reading and setting hyper-parameters by name, for everything that has a [`Description`].

use std::borrow::Cow;

use super::Description;
use super::rates::RATE;
use crate::error::Result;
use crate::rule::field::FieldValue;

/// A type with a [`Description`]: a rule, a store or an optimiser.
///
/// The trait is not exported. A program implements [`Describe`](crate::Describe), and gets `Described` by a
/// blanket implementation.
pub trait Described {
    /// The description, which may be a cached one.
    fn description(&self) -> Cow<'_, Description>;

    /// Sets the fields with these indices in [`Adjust::fields`] to values of their types.
    ///
    /// # Errors
    /// If a field is not described, or has another type.
    fn write(&mut self, values: &[(usize, FieldValue)]) -> Result<()>;

    /// See [`Adjust::check`].
    fn check_described(&self) -> Result<()>;
}

impl<D: Described + ?Sized> Adjust for D {}

/// Hyper-parameters by name.
///
/// Every rule that [describes](crate::Describe) itself implements `Adjust`. A name reaches the field with
/// this name of every member. A place before the name restricts the name to a member: `1.eta` reaches only
/// the second member of the chain, and all members of that member if it is a chain itself. Members are
/// counted from 0. `None` counts as a member and wrappers do not count, as in the names of [state
/// tensors](crate::Leaf::tensor_names). A digit after the name of a pair chooses one of its numbers: `beta1`.
///
/// The learning rate `eta` is different. The steps of a chain are multiplied by the `eta` of each member, so
/// the `eta` of a chain is the *product*, also with a place that reaches several members.
/// [Reading](Adjust::field) returns the product. Setting the product changes only the last `eta`, which
/// becomes the new product divided by the other rates.
///
/// ```
/// use optimisers::{Adam, Adjust, ClipGrad, OptimiserChain};
///
/// let mut rule = OptimiserChain::new((ClipGrad::new(1.0), Adam::new(1e-3)));
/// rule.adjust(5e-4)?;
/// rule.adjust_fields([("1.beta", (0.8, 0.99).into()), ("delta", 2.into())])?;
/// assert_eq!(rule, OptimiserChain::new((ClipGrad::new(2.0), Adam { beta: (0.8, 0.99), ..Adam::new(5e-4) })));
/// assert_eq!(rule.places(), ["0.delta", "1.eta", "1.beta", "1.epsilon", "1.bias_correction"]);
///
/// rule.adjust_field("beta2", 0.98)?;
/// assert_eq!((rule.field("beta1"), rule.field("beta")), (Some(0.8.into()), Some((0.8, 0.98).into())));
/// let error = rule.adjust_field("rho", 0.9).unwrap_err();
/// assert_eq!(error.kind(), optimisers::ErrorKind::UnknownName);
/// assert_eq!(error.expected(), Some("one of: delta, eta, beta, epsilon, bias_correction"));
/// # Ok::<(), optimisers::Error>(())
/// ```
pub trait Adjust: Described {
    /// The rule's name, for errors and listings: its kind, with settings and held rules in brackets.
    fn name(&self) -> String {
        self.description().name()
    }

    /// All hyper-parameters with their values, in order. In a chain, a name can occur more than once.
    fn fields(&self) -> Vec<(&'static str, FieldValue)> {
        self.description().named_values()
    }

    /// The full names of all fields, in the order of [`fields`](Adjust::fields): place and name, as in
    /// `1.eta`. The place of a rule that is in no chain is empty.
    fn places(&self) -> Vec<String> {
        self.description().places()
    }

    /// Sets every field of that name without checking ranges, and returns whether there is such a field.
    ///
    /// [`Adjust::adjust_field`] checks ranges, too.
    ///
    /// # Errors
    /// If the value is of the wrong type; if no value of the last `eta` [makes the
    /// product](crate::ErrorKind::Argument) right.
    fn set_field(&mut self, field: &str, value: FieldValue) -> Result<bool> {
        let values = self.description().values_for(field, value)?;
        self.write(&values)?;
        Ok(!values.is_empty())
    }

    /// Sets all fields, without checking ranges, to values in the order of [`fields`](Adjust::fields).
    ///
    /// The values usually come from another rule of this kind.
    ///
    /// # Errors
    /// If there are more or fewer values than fields, or a value is of the wrong type.
    fn set_fields(&mut self, values: &[FieldValue]) -> Result<()> {
        let values = self.description().typed_values(values)?;
        self.write(&values)
    }

    /// Checks every hyper-parameter against its range.
    ///
    /// # Errors
    /// For the first value that is out of range.
    fn check(&self) -> Result<()> {
        self.check_described()
    }

    /// The value of the first field of that name; for `eta` the product of all rates.
    ///
    /// If the rates of [alternatives](crate::Describer::alternative) differ, `eta` is `None`, because a
    /// single number would be wrong for one of the alternatives. A name with a place still reaches each rate.
    ///
    /// ```
    /// use optimisers::{Adam, Adjust, ClipNorm, Descent, FieldValue, OptimiserChain};
    ///
    /// assert_eq!(Adam::new(0.01).field("eta"), Some(FieldValue::Real(0.01)));
    ///
    /// let chain = OptimiserChain::new((ClipNorm::new(1.0), OptimiserChain::new((Adam::new(0.5), Descent::new(0.25)))));
    /// assert_eq!(chain.field("1.1.eta"), Some(FieldValue::Real(0.25)));
    /// assert_eq!(chain.field("eta"), Some(FieldValue::Real(0.125)));
    /// ```
    fn field(&self, name: &str) -> Option<FieldValue> {
        self.description().field(name)
    }

    /// Sets the learning rate `eta`: in a chain with several rates, the product of the rates.
    ///
    /// ```
    /// use optimisers::{Adjust, Descent, Momentum, OptimiserChain, RMSProp};
    ///
    /// // torch's RMSprop with momentum.
    /// let rule = |eta| OptimiserChain::new((RMSProp::new(1.0), Momentum::new(1.0), Descent::new(eta)));
    /// let mut adjusted = rule(0.02);
    /// adjusted.adjust(0.002)?;
    /// assert_eq!(adjusted, rule(0.002));
    /// # Ok::<(), optimisers::Error>(())
    /// ```
    ///
    /// # Departures
    /// Optimisers.jl's `adjust!` sets every `eta` of a chain. The steps of the chain are then multiplied by
    /// the rate several times.
    ///
    /// # Errors
    /// As [`Adjust::adjust_field`].
    fn adjust(&mut self, eta: f64) -> Result<()>
    where
        Self: Clone,
    {
        self.adjust_field(RATE, eta)
    }

    /// Sets every field of that name, in all members or at the place before the name.
    ///
    /// A real hyper-parameter takes a whole number, too.
    ///
    /// # Errors
    /// If no member has the field (a [setting](crate::Describer::setting) is no field); if the value is of
    /// the wrong type or out of range; if no value of the last `eta` [makes the
    /// product](crate::ErrorKind::Argument) right. After an error nothing has changed.
    fn adjust_field(&mut self, field: &str, value: impl Into<FieldValue>) -> Result<()>
    where
        Self: Clone,
    {
        self.adjust_fields([(field, value.into())])
    }

    /// Sets several fields in order. After an error, no field has changed.
    ///
    /// Ranges are checked after all fields are set, so that fields which depend on each other can change
    /// together.
    ///
    /// # Errors
    /// As [`Adjust::adjust_field`], for the first value that is refused.
    fn adjust_fields<'f>(&mut self, values: impl IntoIterator<Item = (&'f str, FieldValue)>) -> Result<()>
    where
        Self: Clone,
    {
        // The fields of a clone are set, so that an error in the middle changes nothing.
        let mut adjusted = self.clone();
        for (field, value) in values {
            if !adjusted.set_field(field, value)? {
                return Err(self.description().no_field_error(field));
            }
        }
        adjusted.check()?;
        *self = adjusted;
        Ok(())
    }
}
