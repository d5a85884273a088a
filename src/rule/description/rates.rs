//! The learning rate of a chain: the product of its members' rates, and the field that is set for it.
//!
//! The difficulty is alternatives, because only one of them acts. All alternatives of a rule together are one
//! factor of the product, at the place of the first:
//!
//! ```text
//! OptimiserChain(Momentum, Fallback(Muon, AdamW), Descent)      η₀ · (η₁ or η₂) · η₃
//! ```
//!
//! - *Reading* takes the product along each alternative. If two products differ, there is no one rate.
//! - *Setting* changes only the last factor (of each alternative), which becomes the rate divided by the
//!   product of the others. It fails if that product is 0, not finite, or not one number.

use smallvec::SmallVec;

use super::{Description, FieldValues, address, out_of_range};
use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::{Field, FieldValue};
use crate::rule::state::place::ChildPlace;

/// The name of the learning rate in all rules.
pub(crate) const RATE: &str = "eta";

/// The learning rates of a rule: the factors of its steps.
#[derive(Debug, Default)]
pub(crate) struct Rates(Vec<RateFactor>);

#[derive(Debug)]
enum RateFactor {
    /// The index of a field in [`Adjust::fields`](crate::rule::Adjust::fields), and its value.
    Field(usize, f64),
    /// The rates of each alternative.
    Alternatives(Vec<Rates>),
}

/// The field to set for a learning rate: the last factor of the product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RateField {
    /// Its index in [`Adjust::fields`](crate::rule::Adjust::fields).
    pub(crate) index: usize,
    pub(crate) value: f64,
    /// The product of the other factors, if there are others.
    pub(crate) others: Option<f64>,
}

/// Fields that are set together: one, or one for each alternative.
pub(crate) type RateFields = SmallVec<[RateField; 1]>;

impl RateField {
    /// The product of all factors.
    pub(crate) fn rate(&self) -> f64 {
        times(self.others, self.value)
    }

    /// The value that makes the product `rate`. `None` if the product of the others is 0 or not finite.
    pub(crate) fn value_for(&self, rate: f64) -> Option<f64> {
        match self.others {
            None => Some(rate),
            // Otherwise a rate that is read and set again could change the field: the quotient is rounded.
            Some(_) if rate == self.rate() => Some(self.value),
            Some(others) => (others != 0.0 && others.is_finite()).then_some(rate / others),
        }
    }
}

fn times(product: Option<f64>, factor: f64) -> f64 {
    product.map_or(factor, |product| product * factor)
}

/// The error if alternatives have different rates where one number is needed.
struct RatesDiffer;

impl RateFactor {
    fn has_rate(&self) -> bool {
        match self {
            RateFactor::Field(..) => true,
            RateFactor::Alternatives(all) => all.iter().any(Rates::has_rate),
        }
    }
}

impl Rates {
    /// The rates that a name reaches. `None` if it is not the name of a learning rate, or reaches none.
    pub(crate) fn named(rule: &Description, name: &str) -> Option<Self> {
        let (address, field) = address(name);
        if field != RATE {
            return None;
        }
        let rates = Self::at(rule, &address);
        rates.has_rate().then_some(rates)
    }

    /// The rates in the rule at this address, which begins inside `rule`.
    fn at(rule: &Description, address: &[usize]) -> Self {
        let mut factors = Vec::new();
        for field in rule.fields.iter().filter(|field| field.name == RATE && address.is_empty()) {
            if let FieldValue::Real(eta) = field.value {
                factors.push(RateFactor::Field(field.index, eta));
            }
        }
        let mut alternatives: Option<(usize, Vec<Rates>)> = None;
        for (place, part) in &rule.parts {
            let rest = match (place.number(), address) {
                (None, _) | (_, []) => address,
                (Some(number), [first, rest @ ..]) if number == *first => rest,
                _ => continue,
            };
            let inside = Self::at(part, rest);
            match place {
                ChildPlace::Alternative(_) => {
                    // Also if it has no rate, because its product then differs from those of the others.
                    alternatives.get_or_insert((factors.len(), Vec::new())).1.push(inside);
                }
                _ => factors.extend(inside.0),
            }
        }
        if let Some((at, all)) = alternatives {
            factors.insert(at, RateFactor::Alternatives(all));
        }
        Rates(factors)
    }

    fn has_rate(&self) -> bool {
        self.0.iter().any(RateFactor::has_rate)
    }

    /// The product of all rates. `None` if there are no rates, or if those of alternatives differ.
    pub(crate) fn value(&self) -> Option<f64> {
        product(&self.0, None).ok().flatten()
    }

    /// The indices of the fields of all rates.
    pub(crate) fn indices(&self) -> SmallVec<[usize; 1]> {
        let mut all = SmallVec::new();
        for factor in &self.0 {
            match factor {
                RateFactor::Field(index, _) => all.push(*index),
                RateFactor::Alternatives(alternatives) => {
                    all.extend(alternatives.iter().flat_map(Rates::indices))
                }
            }
        }
        all
    }

    /// The fields to set for a learning rate: the last factor, or that of each alternative.
    ///
    /// # Errors
    /// If alternatives of `rule` before the last one have different rates.
    pub(crate) fn fields(&self, rule: &Description) -> Result<RateFields> {
        let mut fields = RateFields::new();
        let found = last_fields(&self.0, None, &mut fields).map(|()| fields);
        found.map_err(|RatesDiffer| {
            let conflict = "the rates of alternatives differ, so there is no single product by which to set \
                            the last rate";
            conflicting_rates(
                rule,
                conflict,
                "adjust each rate by its place, or adjust the state after `setup`",
            )
        })
    }
}

/// The error if no value of this field makes the product `rate`.
pub(crate) fn unreachable_rate(rule: &Description, field: &RateField, rate: f64) -> Error {
    let last = rule.places().swap_remove(field.index);
    let others = field.others.unwrap_or(1.0);
    let conflict =
        format!("no value of {last} makes the product {rate}, because the product of the others is {others}");
    conflicting_rates(rule, &conflict, "first adjust the other rates by their places")
}

/// The error for conflicting learning rates. It lists all of them with their places.
pub(crate) fn conflicting_rates(rule: &Description, conflict: &str, remedy: &'static str) -> Error {
    let fields = rule.places().into_iter().zip(rule.fields());
    let rates = fields.filter(|(_, field)| field.name == RATE);
    let rates = rates.map(|(place, field)| format!("{place} = {}", field.value)).collect::<Vec<_>>();
    let (rates, name) = (rates.join(", "), rule.name());
    Error::new(ErrorKind::Argument, format!("{name} has several learning rates ({rates}), and {conflict}"))
        .with_remedy(remedy)
}

/// Multiplies `before`, the product of the factors in front, by these factors.
fn product(factors: &[RateFactor], before: Option<f64>) -> Result<Option<f64>, RatesDiffer> {
    factors.iter().try_fold(before, |before, factor| match factor {
        RateFactor::Field(_, value) => Ok(Some(times(before, *value))),
        RateFactor::Alternatives(all) => {
            let rates =
                all.iter().map(|rates| product(&rates.0, before)).collect::<Result<SmallVec<[_; 2]>, _>>()?;
            let is_same = |rate: &Option<f64>| match (*rate, rates[0]) {
                (Some(rate), Some(first)) => is_same_rate(first, rate),
                (rate, first) => rate == first,
            };
            if rates.iter().all(is_same) { Ok(rates[0]) } else { Err(RatesDiffer) }
        }
    })
}

/// Whether two rates are equal up to rounding, because each may be a product of several factors.
pub(crate) fn is_same_rate(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= 2.0 * f64::EPSILON * a.abs()
}

/// Adds the fields to set for a learning rate. `before` is the product of the factors in front.
fn last_fields(
    factors: &[RateFactor],
    before: Option<f64>,
    fields: &mut RateFields,
) -> Result<(), RatesDiffer> {
    let Some(last) = factors.iter().rposition(RateFactor::has_rate) else {
        // Refused because this alternative has no rate of its own: its last factor is in front of all
        // alternatives, so setting that would change the others, too.
        return if before.is_none() { Ok(()) } else { Err(RatesDiffer) };
    };
    let others = product(&factors[..last], before)?;
    match &factors[last] {
        RateFactor::Field(index, value) => fields.push(RateField { index: *index, value: *value, others }),
        RateFactor::Alternatives(all) => {
            all.iter().try_for_each(|rates| last_fields(&rates.0, others, fields))?
        }
    }
    Ok(())
}

impl Description {
    /// See [`Adjust::field`](crate::Adjust::field).
    pub(crate) fn field(&self, name: &str) -> Option<FieldValue> {
        match Rates::named(self, name) {
            Some(rates) => rates.value().map(FieldValue::Real),
            None => {
                let (fields, part) = self.reached_numbers(name);
                let value = fields.first()?.value;
                Some(part.map_or(value, |part| value.parts()[part].into()))
            }
        }
    }

    /// The learning rate. `None` if the rule has no rate, or if those of alternatives differ.
    pub(crate) fn learning_rate(&self) -> Option<f64> {
        if let Some(FieldValue::Real(eta)) = self.field(RATE) { Some(eta) } else { None }
    }

    /// The fields that a name reaches, with the value for each. Empty if it reaches none.
    ///
    /// # Errors
    /// As [`Adjust::set_field`](crate::Adjust::set_field).
    pub(crate) fn values_for(&self, name: &str, value: FieldValue) -> Result<FieldValues> {
        if let Some(values) = rate_values(self, name, value)? {
            return Ok(values);
        }
        match self.reached_numbers(name) {
            (fields, Some(part)) if !fields.is_empty() => {
                let expected = || out_of_range(&self.name(), name, value, f64::EXPECTED);
                let number = f64::from_value(value).ok_or_else(expected)?;
                Ok(fields.iter().map(|field| (field.index, field.value.with_part(part, number))).collect())
            }
            _ => self.values_of(name, value),
        }
    }

    /// [`Description::values_for`] for the name of whole fields.
    fn values_of(&self, name: &str, value: FieldValue) -> Result<FieldValues> {
        let (members, name) = address(name);
        let mut values = FieldValues::new();
        for member in self.all().iter().filter(|member| member.members.starts_with(&members)) {
            if member.rule.fixed.contains(&name) {
                return Err(self.is_fixed(member.rule, name));
            }
            for field in member.rule.fields.iter().filter(|field| field.name == name) {
                values.push((field.index, self.typed(member.rule, field, value)?));
            }
        }
        Ok(values)
    }
}

/// The fields and values for which several rates have the product `value`.
///
/// `None` if the name reaches fewer than two rates, or if `value` is no number.
fn rate_values(rule: &Description, name: &str, value: FieldValue) -> Result<Option<FieldValues>> {
    let (Some(rate), Some(rates)) = (f64::from_value(value), Rates::named(rule, name)) else {
        return Ok(None);
    };
    if rates.indices().len() < 2 {
        return Ok(None);
    }
    let value = |field: &RateField| match field.value_for(rate) {
        Some(value) => Ok((field.index, value.into())),
        None => Err(unreachable_rate(rule, field, rate)),
    };
    rates.fields(rule)?.iter().map(value).collect::<Result<_>>().map(Some)
}
