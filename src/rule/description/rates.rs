//! The learning rate of a chain: the product of its members' rates, and the field that is set for it.
//!
//! Alternatives have a product of rates each. One number is given only if they agree.

use smallvec::SmallVec;

use super::Description;
use super::describe::{self, address};
use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::{Field, FieldValue};
use crate::rule::traits::{Describe, Event, Position, visit};

/// What rules call their learning rate.
pub(crate) const RATE: &str = "eta";

/// The learning rates of a rule: its steps are multiplied by all of them.
#[derive(Debug, Default)]
pub(crate) struct Rates(Vec<RateFactor>);

#[derive(Debug)]
enum RateFactor {
    /// A field by its index in [`Adjust::fields`](crate::rule::Adjust::fields), and its value.
    Field(usize, f64),
    /// The rates of each alternative.
    Alternatives(Vec<Rates>),
}

/// The field to set for a learning rate: the only factor of the product, or the last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RateField {
    /// Its index in [`Adjust::fields`](crate::rule::Adjust::fields).
    pub(crate) index: usize,
    pub(crate) value: f64,
    /// The product of the other rates, if there are others.
    pub(crate) others: Option<f64>,
}

/// Fields that are set together: one, or one per alternative.
pub(crate) type RateFields = SmallVec<[RateField; 1]>;

impl RateField {
    /// The learning rate with this value.
    pub(crate) fn rate(&self) -> f64 {
        times(self.others, self.value)
    }

    /// The value that makes the learning rate `rate`; `None` if the product of the others is 0 or not finite.
    pub(crate) fn value_for(&self, rate: f64) -> Option<f64> {
        match self.others {
            None => Some(rate),
            // `rate / others` can differ from the value in the last bit.
            Some(_) if rate == self.rate() => Some(self.value),
            Some(others) => (others != 0.0 && others.is_finite()).then_some(rate / others),
        }
    }
}

fn times(product: Option<f64>, factor: f64) -> f64 {
    product.map_or(factor, |product| product * factor)
}

/// The error that one rate is needed and alternatives have different ones.
#[derive(Debug)]
pub(crate) struct RatesDiffer;

impl RatesDiffer {
    /// The error where a learning rate is to be set.
    pub(crate) fn in_rule(self, rule: &mut dyn Describe) -> Error {
        let conflict = "those of rules in place of each other differ, so the others have no one product to \
                        set the last by";
        conflicting_rates(rule, conflict, "adjust them by their places, or the state after `setup`")
    }
}

impl RateFactor {
    fn has_rate(&self) -> bool {
        match self {
            RateFactor::Field(..) => true,
            RateFactor::Alternatives(all) => all.iter().any(Rates::has_rate),
        }
    }
}

impl Rates {
    /// The rates that a name reaches; `None` if it names no learning rate, or reaches none.
    pub(crate) fn named(rule: &mut dyn Describe, name: &str) -> Option<Self> {
        let (address, field) = address(name);
        if field != RATE {
            return None;
        }
        let rates = Self::at(rule, &address);
        rates.has_rate().then_some(rates)
    }

    /// The rates in the rule at this address.
    fn at(rule: &mut dyn Describe, address: &[usize]) -> Self {
        /// A rule that is being described.
        #[derive(Default)]
        struct Begun {
            /// Whether its rates are kept apart from those around it.
            is_apart: bool,
            /// The index of the factor with the rates of its alternatives.
            alternatives: Option<usize>,
        }

        let (mut begun, mut lists) = (vec![Begun::default()], vec![Rates::default()]);
        let mut index = 0;
        let is_on_way = |position: &Position| {
            position.members.starts_with(address) || address.starts_with(&position.members)
        };
        visit(rule, |position, event| {
            let (Some(around), Some(now)) = (begun.last_mut(), lists.last_mut()) else { return };
            match event {
                Event::Begin => {
                    let is_apart = position.is_alternative && is_on_way(position);
                    if is_apart {
                        if around.alternatives.is_none() {
                            around.alternatives = Some(now.0.len());
                            now.0.push(RateFactor::Alternatives(Vec::new()));
                        }
                        lists.push(Rates::default());
                    }
                    begun.push(Begun { is_apart, alternatives: None });
                }
                Event::End => {
                    if begun.pop().is_some_and(|ended| ended.is_apart)
                        && let Some(ended) = lists.pop()
                        && let Some(place) = begun.last().and_then(|around| around.alternatives)
                        && let Some(RateFactor::Alternatives(all)) =
                            lists.last_mut().and_then(|now| now.0.get_mut(place))
                    {
                        all.push(ended);
                    }
                }
                Event::Field(name, field) => {
                    if let FieldValue::Real(eta) = field.value()
                        && name == RATE
                        && position.members.starts_with(address)
                    {
                        now.0.push(RateFactor::Field(index, eta));
                    }
                    index += 1;
                }
                _ => {}
            }
        });
        lists.swap_remove(0)
    }

    fn has_rate(&self) -> bool {
        self.0.iter().any(RateFactor::has_rate)
    }

    /// The learning rate: the product. `None` if alternatives have different ones.
    pub(crate) fn value(&self) -> Option<f64> {
        product(&self.0, None).ok().flatten()
    }

    /// The indices of all fields.
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

    /// The fields that are set for a learning rate: the last one, or that of each alternative.
    ///
    /// # Errors
    /// If alternatives before the last one have different rates.
    pub(crate) fn fields(&self) -> Result<RateFields, RatesDiffer> {
        let mut fields = RateFields::new();
        last_fields(&self.0, None, &mut fields).map(|()| fields)
    }
}

/// The error if no value of this field makes the learning rate `rate`.
pub(crate) fn unreachable_rate(rule: &mut dyn Describe, field: &RateField, rate: f64) -> Error {
    let last = describe::places(rule).swap_remove(field.index);
    let others = field.others.unwrap_or(1.0);
    let conflict = format!("no {last} makes their product {rate}, as that of the others is {others}");
    conflicting_rates(rule, &conflict, "adjust these by their places first")
}

/// The error for learning rates that do not go together.
pub(crate) fn conflicting_rates(rule: &mut dyn Describe, conflict: &str, remedy: &'static str) -> Error {
    let fields = describe::places(rule).into_iter().zip(describe::fields(rule));
    let members =
        fields.filter(|(_, (name, _))| *name == RATE).map(|(place, (_, value))| format!("{place} = {value}"));
    let (members, rule) = (members.collect::<Vec<_>>().join(", "), Description::of(rule));
    Error::new(ErrorKind::Argument, format!("{rule} has several learning rates ({members}), and {conflict}"))
        .with_remedy(remedy)
}

/// The product of these factors and of `before`, the product of those in front of them.
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

/// Whether rates are equal up to the rounding of products of other factors.
pub(crate) fn is_same_rate(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= 2.0 * f64::EPSILON * a.abs()
}

/// Adds the fields that are set for a learning rate. `before` is the product of the factors in front.
fn last_fields(
    factors: &[RateFactor],
    before: Option<f64>,
    fields: &mut RateFields,
) -> Result<(), RatesDiffer> {
    let Some(last) = factors.iter().rposition(RateFactor::has_rate) else {
        // An alternative without a rate: the last factor is before all of them, so it is not this one's
        // alone.
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

/// Indices of fields, and the values to set them to.
type RateSettings = SmallVec<[(usize, FieldValue); 1]>;

/// What to set so that several rates have the product `value`; `None` if the name reaches fewer than two.
pub(crate) fn settings(
    rule: &mut dyn Describe,
    name: &str,
    value: FieldValue,
) -> Result<Option<RateSettings>> {
    let (Some(rate), Some(rates)) = (f64::from_value(value), Rates::named(rule, name)) else {
        return Ok(None);
    };
    if rates.indices().len() < 2 {
        return Ok(None);
    }
    let mut set = RateSettings::new();
    for field in rates.fields().map_err(|differ| differ.in_rule(rule))? {
        let Some(value) = field.value_for(rate) else { return Err(unreachable_rate(rule, &field, rate)) };
        set.push((field.index, value.into()));
    }
    Ok(Some(set))
}
