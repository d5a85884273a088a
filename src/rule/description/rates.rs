//! The learning rate of a chain: the product of its members' rates, and the fields that set this product.
//!
//! Alternatives make this difficult, because only one alternative acts at a time. All alternatives of a rule
//! together are one factor of the product, at the place of the first alternative:
//!
//! ```text
//! OptimiserChain(Momentum, Fallback(Muon, AdamW), Descent)      η₀ · (η₁ or η₂) · η₃
//! ```
//!
//! - *Reading* takes the product along each alternative. If two products differ, there is no single rate.
//! - *Setting* changes only the last factor (of each alternative), which becomes the new rate divided by the
//!   product of the other factors. Setting fails if that product is 0, not finite, or not a single number.
//!
//! The look-up of other names is in this file, too, because a name is first compared with `eta`.

use smallvec::SmallVec;

use super::{ChildPlace, Description, FieldValues, out_of_range, split_address};
use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::FieldValue;

/// The name of the learning rate in all rules.
pub(crate) const RATE: &str = "eta";

/// The learning rates of a rule, which multiply its steps.
#[derive(Debug)]
pub(crate) enum Rates {
    /// The index of a field in [`Adjust::fields`](crate::rule::Adjust::fields), and its value.
    Field(usize, f64),
    /// The rates of a rule and of the rules inside, in the order in which the rules act.
    Product(Vec<Rates>),
    /// The rates of each alternative.
    Alternatives(Vec<Rates>),
}

/// The field to set for a learning rate: the last factor of the product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RateField {
    /// The index in [`Adjust::fields`](crate::rule::Adjust::fields).
    pub(crate) index: usize,
    pub(crate) value: f64,
    /// The product of the other factors, if there are other factors.
    pub(crate) others: Option<f64>,
}

impl RateField {
    /// The product of all factors.
    pub(crate) fn rate(&self) -> f64 {
        multiply(self.others, self.value)
    }

    /// The value with which the product is `rate`. `None` if the product of the others is 0 or not finite.
    pub(crate) fn value_for(&self, rate: f64) -> Option<f64> {
        match self.others {
            None => Some(rate),
            // A rate that is read and set again must not change the field, but the quotient would be rounded.
            Some(_) if rate == self.rate() => Some(self.value),
            Some(others) => (others != 0.0 && others.is_finite()).then_some(rate / others),
        }
    }
}

fn multiply(product: Option<f64>, factor: f64) -> f64 {
    product.map_or(factor, |product| product * factor)
}

/// The error if alternatives have different rates where a single number is needed.
struct RatesDiffer;

impl Rates {
    /// The rates that a name reaches. `None` if the name is not that of a learning rate, or reaches no rate.
    pub(crate) fn for_name(rule: &Description, name: &str) -> Option<Self> {
        let (address, field) = split_address(name);
        if field != RATE {
            return None;
        }
        let rates = Rates::Product(Self::factors(rule, &address));
        rates.has_rate().then_some(rates)
    }

    /// The rates of the rules at this address, which is relative to `rule`.
    fn factors(rule: &Description, address: &[usize]) -> Vec<Rates> {
        let mut factors = Vec::new();
        for field in rule
            .fields
            .iter()
            .filter(|field| field.name == RATE && address.is_empty())
        {
            if let FieldValue::Real(eta) = field.value {
                factors.push(Rates::Field(field.index, eta));
            }
        }
        let mut alternatives: Option<(usize, Vec<Rates>)> = None;
        for (place, part) in &rule.parts {
            let part_address = match (place.number(), address) {
                (None, _) | (_, []) => address,
                (Some(number), [first, rest @ ..]) if number == *first => rest,
                _ => continue,
            };
            let part_factors = Self::factors(part, part_address);
            match place {
                ChildPlace::Alternative(_) => {
                    // An alternative without a rate is added, too, because its product differs from the
                    // products of the others.
                    let (_, products) = alternatives.get_or_insert((factors.len(), Vec::new()));
                    products.push(Rates::Product(part_factors));
                }
                _ => factors.extend(part_factors),
            }
        }
        if let Some((index, products)) = alternatives {
            factors.insert(index, Rates::Alternatives(products));
        }
        factors
    }

    fn has_rate(&self) -> bool {
        self.count() > 0
    }

    /// The product of all rates. `None` if there are no rates, or if the rates of alternatives differ.
    pub(crate) fn value(&self) -> Option<f64> {
        self.product_after(None).ok().flatten()
    }

    /// The number of all rates.
    fn count(&self) -> usize {
        match self {
            Rates::Field(..) => 1,
            Rates::Product(rates) | Rates::Alternatives(rates) => rates.iter().map(Rates::count).sum(),
        }
    }

    /// The fields to set for a learning rate: the last factor, or the last factor of each alternative.
    ///
    /// # Errors
    /// If alternatives of `rule` before the last one have different rates.
    pub(crate) fn fields(&self, rule: &Description) -> Result<SmallVec<[RateField; 1]>> {
        let mut fields = SmallVec::new();
        self.last_fields(None, &mut fields).map(|()| fields).map_err(|RatesDiffer| {
            let conflict = "the rates of alternatives differ, so there is no single product by which to set \
                            the last rate";
            conflicting_rates_error(
                rule,
                conflict,
                "adjust each rate by its place, or adjust the state after `setup`",
            )
        })
    }

    /// The product of these rates and `before`, which is the product of the factors in front.
    fn product_after(&self, before: Option<f64>) -> Result<Option<f64>, RatesDiffer> {
        match self {
            Rates::Field(_, value) => Ok(Some(multiply(before, *value))),
            Rates::Product(factors) => factors
                .iter()
                .try_fold(before, |before, factor| factor.product_after(before)),
            Rates::Alternatives(alternatives) => {
                let rates: SmallVec<[_; 2]> = alternatives
                    .iter()
                    .map(|rates| rates.product_after(before))
                    .collect::<Result<_, _>>()?;
                let is_same = |rate: &Option<f64>| match (*rate, rates[0]) {
                    (Some(rate), Some(first)) => is_same_rate(first, rate),
                    (rate, first) => rate == first,
                };
                if rates.iter().all(is_same) {
                    Ok(rates[0])
                } else {
                    Err(RatesDiffer)
                }
            }
        }
    }

    /// Adds the fields to set for a learning rate. `before` is the product of the factors in front.
    fn last_fields(
        &self,
        before: Option<f64>,
        fields: &mut SmallVec<[RateField; 1]>,
    ) -> Result<(), RatesDiffer> {
        match self {
            Rates::Field(index, value) => {
                fields.push(RateField {
                    index: *index,
                    value: *value,
                    others: before,
                });
                Ok(())
            }
            Rates::Product(factors) => match factors.iter().rposition(Rates::has_rate) {
                Some(last) => {
                    let others = factors[..last]
                        .iter()
                        .try_fold(before, |before, factor| factor.product_after(before))?;
                    factors[last].last_fields(others, fields)
                }
                None if before.is_none() => Ok(()),
                // An alternative has no rate of its own. Its last factor is in front of all alternatives, so
                // setting that factor would change the other alternatives, too.
                None => Err(RatesDiffer),
            },
            Rates::Alternatives(alternatives) => alternatives
                .iter()
                .try_for_each(|rates| rates.last_fields(before, fields)),
        }
    }
}

/// The error if the product is `rate` for no value of this field.
pub(crate) fn unreachable_rate_error(rule: &Description, field: &RateField, rate: f64) -> Error {
    let last = rule.places().swap_remove(field.index);
    let others = field.others.unwrap_or(1.0);
    let conflict =
        format!("no value of {last} makes the product {rate}, because the product of the others is {others}");
    conflicting_rates_error(rule, &conflict, "first adjust the other rates by their places")
}

/// The error for conflicting learning rates, with a list of all rates and their places.
pub(crate) fn conflicting_rates_error(rule: &Description, conflict: &str, remedy: &'static str) -> Error {
    let fields = rule.places().into_iter().zip(rule.fields());
    let rates = fields.filter(|(_, field)| field.name == RATE);
    let list = rates
        .map(|(place, field)| format!("{place} = {}", field.value))
        .collect::<Vec<_>>()
        .join(", ");
    let name = rule.name();
    Error::new(
        ErrorKind::Argument,
        format!("{name} has several learning rates ({list}), and {conflict}"),
    )
    .with_remedy(remedy)
}

/// Whether two rates are equal up to rounding, because each may be a product of several factors.
pub(crate) fn is_same_rate(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= 2.0 * f64::EPSILON * a.abs()
}

impl Description {
    /// See [`Adjust::field`](crate::Adjust::field).
    pub(crate) fn field(&self, name: &str) -> Option<FieldValue> {
        match Rates::for_name(self, name) {
            Some(rates) => rates.value().map(FieldValue::Real),
            None => {
                let (fields, part) = self.numbers_named(name);
                let value = fields.first()?.value;
                Some(part.map_or(value, |part| value.numbers()[part].into()))
            }
        }
    }

    /// The learning rate. `None` if the rule has no rate, or if the rates of alternatives differ.
    pub(crate) fn learning_rate(&self) -> Option<f64> {
        Rates::Product(Rates::factors(self, &[])).value()
    }

    /// The fields that a name reaches, with the value for each. Empty if the name reaches no field.
    ///
    /// # Errors
    /// As [`Adjust::set_field`](crate::Adjust::set_field).
    pub(crate) fn values_for(&self, name: &str, value: FieldValue) -> Result<FieldValues> {
        if let Some(values) = rate_values(self, name, value)? {
            return Ok(values);
        }
        match self.numbers_named(name) {
            (fields, Some(part)) if !fields.is_empty() => {
                let type_error = || out_of_range(&self.name(), name, value, FieldValue::Real(0.0).expected());
                let number = f64::try_from(value).map_err(|_| type_error())?;
                Ok(fields
                    .iter()
                    .map(|field| (field.index, field.value.with_number(part, number)))
                    .collect())
            }
            _ => self.whole_values(name, value),
        }
    }

    /// [`Description::values_for`] for the name of whole fields.
    fn whole_values(&self, name: &str, value: FieldValue) -> Result<FieldValues> {
        let (members, name) = split_address(name);
        let mut values = FieldValues::new();
        for rule in self.rules_inside(&members) {
            for field in rule.fields.iter().filter(|field| field.name == name) {
                values.push((field.index, self.convert(rule, field, value)?));
            }
        }
        Ok(values)
    }
}

/// The fields and values for which several rates have the product `value`.
///
/// `None` if the name reaches fewer than two rates, or if `value` is no number.
fn rate_values(rule: &Description, name: &str, value: FieldValue) -> Result<Option<FieldValues>> {
    let (Ok(rate), Some(rates)) = (f64::try_from(value), Rates::for_name(rule, name)) else {
        return Ok(None);
    };
    if rates.count() < 2 {
        return Ok(None);
    }
    let new_value = |field: &RateField| match field.value_for(rate) {
        Some(value) => Ok((field.index, value.into())),
        None => Err(unreachable_rate_error(rule, field, rate)),
    };
    rates
        .fields(rule)?
        .iter()
        .map(new_value)
        .collect::<Result<_>>()
        .map(Some)
}
