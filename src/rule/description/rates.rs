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
//!
//! The look-up of any other name stands here, too, because a name is first compared with that of the rate.

use smallvec::SmallVec;

use super::{ChildPlace, Description, FieldValues, address, out_of_range};
use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::FieldValue;

/// The name of the learning rate in all rules.
pub(crate) const RATE: &str = "eta";

/// The learning rates of a rule, which multiply its steps.
#[derive(Debug)]
pub(crate) enum Rates {
    /// The index of a field in [`Adjust::fields`](crate::rule::Adjust::fields), and its value.
    Field(usize, f64),
    /// The rates of a rule and of those inside, in the order in which they act.
    Product(Vec<Rates>),
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

impl Rates {
    /// The rates that a name reaches. `None` if it is not the name of a learning rate, or reaches none.
    pub(crate) fn named(rule: &Description, name: &str) -> Option<Self> {
        let (address, field) = address(name);
        if field != RATE {
            return None;
        }
        let rates = Rates::Product(Self::factors(rule, &address));
        rates.has_rate().then_some(rates)
    }

    /// The rates in the rule at this address, which begins inside `rule`.
    fn factors(rule: &Description, address: &[usize]) -> Vec<Rates> {
        let mut factors = Vec::new();
        for field in rule.fields.iter().filter(|field| field.name == RATE && address.is_empty()) {
            if let FieldValue::Real(eta) = field.value {
                factors.push(Rates::Field(field.index, eta));
            }
        }
        let mut alternatives: Option<(usize, Vec<Rates>)> = None;
        for (place, part) in &rule.parts {
            let rest = match (place.number(), address) {
                (None, _) | (_, []) => address,
                (Some(number), [first, rest @ ..]) if number == *first => rest,
                _ => continue,
            };
            let inside = Self::factors(part, rest);
            match place {
                ChildPlace::Alternative(_) => {
                    // Also if it has no rate, because its product then differs from those of the others.
                    let (_, all) = alternatives.get_or_insert((factors.len(), Vec::new()));
                    all.push(Rates::Product(inside));
                }
                _ => factors.extend(inside),
            }
        }
        if let Some((at, all)) = alternatives {
            factors.insert(at, Rates::Alternatives(all));
        }
        factors
    }

    fn has_rate(&self) -> bool {
        self.count() > 0
    }

    /// The product of all rates. `None` if there are no rates, or if those of alternatives differ.
    pub(crate) fn value(&self) -> Option<f64> {
        self.product_after(None).ok().flatten()
    }

    /// The number of all rates.
    fn count(&self) -> usize {
        match self {
            Rates::Field(..) => 1,
            Rates::Product(all) | Rates::Alternatives(all) => all.iter().map(Rates::count).sum(),
        }
    }

    /// The fields to set for a learning rate: the last factor, or that of each alternative.
    ///
    /// # Errors
    /// If alternatives of `rule` before the last one have different rates.
    pub(crate) fn fields(&self, rule: &Description) -> Result<SmallVec<[RateField; 1]>> {
        let mut fields = SmallVec::new();
        self.last_fields(None, &mut fields).map(|()| fields).map_err(|RatesDiffer| {
            let conflict = "the rates of alternatives differ, so there is no single product by which to set \
                            the last rate";
            conflicting_rates(
                rule,
                conflict,
                "adjust each rate by its place, or adjust the state after `setup`",
            )
        })
    }

    /// The product of `before`, the product of the factors in front, and these rates.
    fn product_after(&self, before: Option<f64>) -> Result<Option<f64>, RatesDiffer> {
        match self {
            Rates::Field(_, value) => Ok(Some(times(before, *value))),
            Rates::Product(all) => all.iter().try_fold(before, |before, factor| factor.product_after(before)),
            Rates::Alternatives(all) => {
                let rates: SmallVec<[_; 2]> =
                    all.iter().map(|rates| rates.product_after(before)).collect::<Result<_, _>>()?;
                let is_same = |rate: &Option<f64>| match (*rate, rates[0]) {
                    (Some(rate), Some(first)) => is_same_rate(first, rate),
                    (rate, first) => rate == first,
                };
                if rates.iter().all(is_same) { Ok(rates[0]) } else { Err(RatesDiffer) }
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
                fields.push(RateField { index: *index, value: *value, others: before });
                Ok(())
            }
            Rates::Product(all) => match all.iter().rposition(Rates::has_rate) {
                Some(last) => {
                    let others =
                        all[..last].iter().try_fold(before, |before, factor| factor.product_after(before))?;
                    all[last].last_fields(others, fields)
                }
                None if before.is_none() => Ok(()),
                // An alternative without a rate of its own. Its last factor is in front of all alternatives,
                // so setting that would change the others, too.
                None => Err(RatesDiffer),
            },
            Rates::Alternatives(all) => all.iter().try_for_each(|rates| rates.last_fields(before, fields)),
        }
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

/// Whether two rates are equal up to rounding, because each may be a product of several factors.
pub(crate) fn is_same_rate(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= 2.0 * f64::EPSILON * a.abs()
}

impl Description {
    /// See [`Adjust::field`](crate::Adjust::field).
    pub(crate) fn field(&self, name: &str) -> Option<FieldValue> {
        match Rates::named(self, name) {
            Some(rates) => rates.value().map(FieldValue::Real),
            None => {
                let (fields, part) = self.numbers_named(name);
                let value = fields.first()?.value;
                Some(part.map_or(value, |part| value.numbers()[part].into()))
            }
        }
    }

    /// The learning rate. `None` if the rule has no rate, or if those of alternatives differ.
    pub(crate) fn learning_rate(&self) -> Option<f64> {
        Rates::Product(Rates::factors(self, &[])).value()
    }

    /// The fields that a name reaches, with the value for each. Empty if it reaches none.
    ///
    /// # Errors
    /// As [`Adjust::set_field`](crate::Adjust::set_field).
    pub(crate) fn values_for(&self, name: &str, value: FieldValue) -> Result<FieldValues> {
        if let Some(values) = rate_values(self, name, value)? {
            return Ok(values);
        }
        match self.numbers_named(name) {
            (fields, Some(part)) if !fields.is_empty() => {
                let expected = || out_of_range(&self.name(), name, value, FieldValue::Real(0.0).expected());
                let number = f64::try_from(value).map_err(|_| expected())?;
                Ok(fields.iter().map(|field| (field.index, field.value.with_number(part, number))).collect())
            }
            _ => self.values_of(name, value),
        }
    }

    /// [`Description::values_for`] for the name of whole fields.
    fn values_of(&self, name: &str, value: FieldValue) -> Result<FieldValues> {
        let (members, name) = address(name);
        let mut values = FieldValues::new();
        for rule in self.inside(&members) {
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
    let (Ok(rate), Some(rates)) = (f64::try_from(value), Rates::named(rule, name)) else {
        return Ok(None);
    };
    if rates.count() < 2 {
        return Ok(None);
    }
    let value = |field: &RateField| match field.value_for(rate) {
        Some(value) => Ok((field.index, value.into())),
        None => Err(unreachable_rate(rule, field, rate)),
    };
    rates.fields(rule)?.iter().map(value).collect::<Result<_>>().map(Some)
}
