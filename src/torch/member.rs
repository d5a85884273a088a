//! The rules of an optimiser with their places.

use crate::checkpoint::rules;
use crate::field::FieldValue;
use crate::rule::Optimiser;

/// A rule in an optimiser.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) rule: String,
    /// What its fields and state tensors are addressed by: empty, or as `1.`.
    place: String,
    fields: Vec<(&'static str, FieldValue)>,
}

/// The rules of an optimiser that have hyper-parameters, in their order.
pub(super) fn members(optimiser: &dyn Optimiser) -> Vec<Member> {
    let mut fields = optimiser.fields().into_iter().zip(optimiser.places());
    let member = |(rule, defaults): (String, Vec<(&'static str, FieldValue)>)| {
        let own: Vec<_> = fields.by_ref().take(defaults.len()).collect();
        let ((name, _), first) = own.first()?;
        let place = first.strip_suffix(name)?.to_string();
        Some(Member { rule, place, fields: own.into_iter().map(|(field, _)| field).collect() })
    };
    rules(optimiser).into_iter().filter_map(member).collect()
}

impl Member {
    /// The full name of a field or state tensor.
    pub(super) fn at(&self, name: &str) -> String {
        format!("{}{name}", self.place)
    }

    pub(super) fn value(&self, field: &str) -> Option<FieldValue> {
        self.fields.iter().find_map(|(name, value)| (*name == field).then_some(*value))
    }

    pub(super) fn real(&self, field: &str) -> Option<f64> {
        if let Some(FieldValue::Real(value)) = self.value(field) { Some(value) } else { None }
    }

    pub(super) fn flag(&self, field: &str) -> Option<bool> {
        if let Some(FieldValue::Flag(value)) = self.value(field) { Some(value) } else { None }
    }
}
