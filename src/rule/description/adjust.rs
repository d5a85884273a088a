//! What callers ask of a rule: its hyper-parameters by name.

use std::borrow::Cow;

use super::rates::RATE;
use super::{Description, FieldValues};
use crate::error::Result;
use crate::rule::field::FieldValue;

/// What has a [`Description`]: a rule, a store or an optimiser.
///
/// Not exported, so that programs describe a rule by [`Describe`](crate::Describe) and get this from that.
pub trait Described {
    /// The description, which may be kept.
    fn description(&self) -> Cow<'_, Description>;

    /// Sets the fields with these indices in [`Adjust::fields`] to values of their types.
    fn write(&mut self, values: &[(usize, FieldValue)]);

    /// See [`Adjust::check`].
    fn check_described(&self) -> Result<()>;

    /// The same without its type, so that code for all types is compiled once.
    fn as_described(&mut self) -> &mut dyn Described;
}

/// Sets these fields, and returns whether there are any.
fn write_to(described: &mut dyn Described, values: Result<FieldValues>) -> Result<bool> {
    let values = values?;
    described.write(&values);
    Ok(!values.is_empty())
}

impl<D: Described + ?Sized> Adjust for D {}

/// Hyper-parameters by name.
///
/// They follow from how a rule [describes](crate::Describe) itself. A name reaches every member that has it.
/// With a place before it, `1.eta`, it reaches the second member of the chain only. The place of a chain
/// reaches all members of that chain. Members are counted from 0. Wrappers are not counted, `None` is: the
/// places are those of [state tensors](crate::Leaf::tensor_names).
///
/// The learning rate is different: the steps of a chain are multiplied by the `eta` of each member, so `eta`
/// is the *product*. [Reading](Adjust::field) gives the product. Setting it sets the last member's `eta` so
/// that the product is right. `0.eta` is that of one member, unless this is a chain of several itself.
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
/// let error = rule.adjust_field("rho", 0.9).unwrap_err();
/// assert_eq!(error.kind(), optimisers::ErrorKind::UnknownName);
/// assert_eq!(error.expected(), Some("one of: delta, eta, beta, epsilon, bias_correction"));
/// # Ok::<(), optimisers::Error>(())
/// ```
pub trait Adjust: Described {
    /// The rule's name, for errors and listings: its kind, and what it holds in brackets.
    fn name(&self) -> String {
        self.description().name()
    }

    /// All hyper-parameters with their values, in order; a name can occur more than once in a chain.
    fn fields(&self) -> Vec<(&'static str, FieldValue)> {
        self.description().named_values()
    }

    /// The names that address one field each, in the order of [`fields`](Adjust::fields): place and name, as
    /// in `1.eta`. The place of a rule that is no member of a chain is empty.
    fn places(&self) -> Vec<String> {
        self.description().places()
    }

    /// Sets every field of that name, and says whether there was one.
    ///
    /// The name may begin with a place. Of several learning rates it sets [the last](Adjust::adjust). Ranges
    /// are not checked here.
    ///
    /// # Errors
    /// If the value is of the wrong type, or the field decides the layout of the state; if no value of the
    /// last learning rate [makes the product](crate::ErrorKind::Argument) right.
    fn set_field(&mut self, field: &str, value: FieldValue) -> Result<bool> {
        let values = self.description().values_for(field, value);
        write_to(self.as_described(), values)
    }

    /// Takes over all values in the order of [`fields`](Adjust::fields), as they were read from a rule of
    /// this kind. Ranges are not checked here.
    ///
    /// # Errors
    /// If a value is of the wrong type.
    fn set_fields(&mut self, values: &[FieldValue]) -> Result<()> {
        let values = self.description().all_set(values);
        write_to(self.as_described(), values).map(drop)
    }

    /// Checks every hyper-parameter against its range.
    ///
    /// # Errors
    /// For the first that is outside of it.
    fn check(&self) -> Result<()> {
        self.check_described()
    }

    /// The hyper-parameter of that name: of several the first, of learning rates the product.
    ///
    /// The name may begin with a place. [Alternatives](crate::Describer::alternative) whose rates differ have
    /// no `eta` together, as one number would be wrong for one of them: ask by their places.
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

    /// Sets the learning rate `eta`.
    ///
    /// In a chain with several `eta` that is their product: the last member's `eta` becomes the rate divided
    /// by the others.
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
    /// Optimisers.jl's `adjust!` sets every `eta` of a chain, and the steps are multiplied by each.
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
    /// Of several `eta` it sets [the last](Adjust::adjust). A whole number will do for a real one.
    ///
    /// # Errors
    /// If no member has the field, the value is of the wrong type or out of range, or the field decides the
    /// layout of the state; if no value of the last `eta` [makes the product](crate::ErrorKind::Argument)
    /// right. Nothing changes then.
    fn adjust_field(&mut self, field: &str, value: impl Into<FieldValue>) -> Result<()>
    where
        Self: Clone,
    {
        self.adjust_fields([(field, value.into())])
    }

    /// Sets several fields, all or none, in their order. Ranges are checked when all are set, so two that
    /// only fit together can be changed together.
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
                return Err(self.description().has_no_field(field));
            }
        }
        adjusted.check()?;
        *self = adjusted;
        Ok(())
    }
}
