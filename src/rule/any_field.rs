//! Hyper-parameters whatever their type.

use crate::field::{Field, FieldValue};

/// A hyper-parameter of any type.
pub(super) trait AnyField {
    fn value(&self) -> FieldValue;

    fn default(&self) -> FieldValue;

    /// Sets it, or says which type it takes.
    fn set(&mut self, value: FieldValue) -> std::result::Result<(), &'static str>;

    /// What is expected where the value is out of range.
    fn out_of_range(&self) -> Option<&'static str>;
}

/// A field of a rule, with what is known of its type.
pub(super) struct Typed<'f, F> {
    pub(super) value: &'f mut F,
    pub(super) default: F,
    pub(super) range: fn(F) -> Option<&'static str>,
}

impl<F: Field> AnyField for Typed<'_, F> {
    fn value(&self) -> FieldValue {
        (*self.value).into()
    }

    fn default(&self) -> FieldValue {
        self.default.into()
    }

    fn set(&mut self, value: FieldValue) -> std::result::Result<(), &'static str> {
        *self.value = F::from_value(value).ok_or(F::EXPECTED)?;
        Ok(())
    }

    fn out_of_range(&self) -> Option<&'static str> {
        (self.range)(*self.value)
    }
}
