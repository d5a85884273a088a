//! The description of a rule as a value, and what follows from it.
//!
//! A rule describes itself by `&mut`, so each run costs a clone of it. The value that results is kept for
//! adjustments, schedules, checkpoints, configurations and warnings. A field in it has two identifiers:
//!
//! - the *index*, by which fields are written: the place in depth-first order, a rule's own fields before
//!   those of its parts;
//! - the *address* and a name, as in `1.0.eta`: the numbers of the members that contain the field, outermost
//!   first. The rule inside a wrapper has no number, so wrappers change no address.

pub(crate) mod adjust;
mod hyper_parameters;
pub(crate) mod order;
pub(crate) mod rates;
pub(crate) mod record;
pub(crate) mod role;
pub(crate) mod setting;

use std::fmt::{Display, Write};

use smallvec::SmallVec;

use crate::error::{Error, ErrorKind, Result, each_once, meant, one_of};
use crate::numbers::Fingerprint;
use crate::rule::field::FieldValue;
use crate::rule::state::place::ChildPlace;
use record::{OptimiserRecord, StorageRecord};
use role::Role;
use setting::Setting;

/// A rule or an optimiser as it [described](crate::Describe) itself, and what it holds.
#[derive(Clone, Debug, Default)]
#[doc(hidden)]
pub struct Description {
    pub(crate) kind: &'static str,
    /// Its roles in a chain, each with the number of parts that were described before it.
    pub(in crate::rule) roles: Vec<(Role, usize)>,
    /// How it stores the parameter. `None` for a bare rule.
    pub(in crate::rule) storage: Option<StorageRecord>,
    pub(crate) settings: Vec<(&'static str, Setting)>,
    /// Its own hyper-parameters.
    pub(crate) fields: Vec<FieldDescription>,
    /// Names that look like hyper-parameters and cannot be adjusted.
    pub(in crate::rule) fixed: Vec<&'static str>,
    /// The patterns of paths by which it chooses, if it chooses a rule for each parameter.
    pub(in crate::rule) patterns: Option<Vec<String>>,
    pub(crate) parts: Vec<(ChildPlace, Description)>,
}

/// A hyper-parameter of a rule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FieldDescription {
    pub(crate) name: &'static str,
    /// The index in [`Adjust::fields`](crate::Adjust::fields).
    pub(crate) index: usize,
    pub(crate) value: FieldValue,
    pub(crate) default: FieldValue,
}

/// New values of fields, each with the field's index in [`Adjust::fields`](crate::Adjust::fields).
pub(crate) type FieldValues = SmallVec<[(usize, FieldValue); 1]>;

/// The indices of nested members, outermost first.
type Address = SmallVec<[usize; 4]>;

/// A rule somewhere in an optimiser.
#[derive(Clone, Debug)]
pub(crate) struct MemberDescription<'d> {
    /// The members that contain it.
    members: Address,
    pub(crate) rule: &'d Description,
}

impl MemberDescription<'_> {
    /// The full name of one of its fields or state tensors: `1.eta`.
    pub(crate) fn at(&self, name: &str) -> String {
        let place: String = self.members.iter().map(|member| format!("{member}.")).collect();
        place + name
    }
}

/// Splits a full name: `1.0.eta` into `[1, 0]` and `eta`.
fn address(name: &str) -> (Address, &str) {
    let (mut members, mut rest) = (Address::new(), name);
    while let Some((index, inside)) = rest.split_once('.') {
        // Compared with the text, because `parse` takes `01` and `+1`, too.
        let Some(member) = index.parse().ok().filter(|number: &usize| number.to_string() == index) else {
            break;
        };
        members.push(member);
        rest = inside;
    }
    (members, rest)
}

/// Splits the name of one number of a pair, counted from 1: `beta1` into `beta` and 0.
fn number_of(name: &str) -> Option<(&str, usize)> {
    let digit = name.chars().last()?.to_digit(10)?.checked_sub(1)?;
    let pair = &name[..name.len() - 1];
    pair.ends_with(char::is_alphabetic).then_some((pair, digit as usize))
}

impl Description {
    /// This rule and all rules inside, in depth-first order.
    pub(crate) fn all(&self) -> Vec<MemberDescription<'_>> {
        let mut all = Vec::new();
        self.collect(&mut Address::new(), &mut all);
        all
    }

    fn collect<'d>(&'d self, members: &mut Address, all: &mut Vec<MemberDescription<'d>>) {
        all.push(MemberDescription { members: members.clone(), rule: self });
        let depth = members.len();
        for (place, part) in &self.parts {
            members.extend(place.number());
            part.collect(members, all);
            members.truncate(depth);
        }
    }

    /// The rule inside all stores.
    pub(crate) fn rule(&self) -> &Self {
        match &self.parts[..] {
            [(_, part)] if self.storage.is_some() => part.rule(),
            _ => self,
        }
    }

    /// All fields, in the order of their indices.
    pub(crate) fn fields(&self) -> Vec<FieldDescription> {
        self.all().iter().flat_map(|member| &member.rule.fields).copied().collect()
    }

    /// See [`Adjust::fields`](crate::Adjust::fields).
    pub(crate) fn named_values(&self) -> Vec<(&'static str, FieldValue)> {
        self.fields().into_iter().map(|field| (field.name, field.value)).collect()
    }

    /// The full name of each field, in the order of their indices.
    pub(crate) fn places(&self) -> Vec<String> {
        let of_member = |member: &MemberDescription<'_>| -> Vec<String> {
            member.rule.fields.iter().map(|field| member.at(field.name)).collect()
        };
        self.all().iter().flat_map(of_member).collect()
    }

    /// The names of all fields without addresses, each once.
    pub(crate) fn names(&self) -> Vec<String> {
        each_once(self.fields().iter().map(|field| field.name))
    }

    /// The names to suggest instead of the unknown `name`: with addresses if `name` has one, and with the
    /// numbers of pairs if `name` ends like one of these.
    pub(crate) fn available(&self, name: &str) -> Vec<String> {
        let names = if name.contains('.') { self.places() } else { self.names() };
        if number_of(name).is_none() {
            return names;
        }
        let numbers =
            |name: String| match self.reached(&name).first().map_or(0, |field| field.value.parts().len()) {
                0 => vec![name],
                parts => (1..=parts).map(|part| format!("{name}{part}")).collect(),
            };
        names.into_iter().flat_map(numbers).collect()
    }

    /// The fields that a name reaches: with an address, only those inside that member.
    pub(crate) fn reached(&self, name: &str) -> SmallVec<[FieldDescription; 1]> {
        let (members, name) = address(name);
        let all = self.all();
        let inside = all.iter().filter(|member| member.members.starts_with(&members));
        inside.flat_map(|member| &member.rule.fields).filter(|field| field.name == name).copied().collect()
    }

    /// The fields that a name reaches, and the number of each that a name such as `beta1` means.
    pub(crate) fn reached_numbers(&self, name: &str) -> (SmallVec<[FieldDescription; 1]>, Option<usize>) {
        let whole = self.reached(name);
        match number_of(name) {
            Some((pair, part)) if whole.is_empty() => {
                let mut pairs = self.reached(pair);
                pairs.retain(|field| part < field.value.parts().len());
                (pairs, Some(part))
            }
            _ => (whole, None),
        }
    }

    /// Pairs all fields, in order, with values. If there are fewer values, only the first fields.
    ///
    /// # Errors
    /// If a value is of another type than its field.
    pub(crate) fn all_set(&self, values: &[FieldValue]) -> Result<FieldValues> {
        let all = self.all();
        let fields =
            all.iter().flat_map(|member| member.rule.fields.iter().map(|field| (member.rule, field)));
        let typed = fields.zip(values);
        typed.map(|((rule, field), value)| Ok((field.index, self.typed(rule, field, *value)?))).collect()
    }

    /// Converts a value to the type of a field of `rule`, or refuses it.
    fn typed(&self, rule: &Self, field: &FieldDescription, value: FieldValue) -> Result<FieldValue> {
        value.like(field.value).ok_or_else(|| {
            let available = self.names_in(rule).join(", ");
            out_of_range(rule.kind, field.name, value, field.value.expected()).with_remedy(
                match field.value.parts().len() {
                    0 => format!("pass such a value, or set another field of the rule: {available}"),
                    parts => format!("pass such a value, or set one number, as in `{}{parts}`", field.name),
                },
            )
        })
    }

    /// The error for a name in `rule` that cannot be adjusted.
    fn is_fixed(&self, rule: &Self, name: &str) -> Error {
        let kind = rule.kind;
        let problem = format!("{kind}: {name} decides the layout of the state and cannot be adjusted");
        Error::new(ErrorKind::Argument, problem)
            .with_expected(format_args!("one of: {}", self.names_in(rule).join(", ")))
            .with_remedy("set up a new state, or give the parameters another rule by `Selection::replace`")
    }

    /// The fields that can be adjusted in `rule`. If it has none, those of all rules.
    fn names_in(&self, rule: &Self) -> Vec<String> {
        let own = rule.fields.iter().map(|field| field.name);
        if rule.fields.is_empty() { self.names() } else { each_once(own) }
    }

    /// The error for a field that a rule does not have.
    fn has_no_field(&self, field: &str) -> Error {
        has_no(&self.name(), "field", field, &self.available(field))
    }

    /// See [`Adjust::name`](crate::Adjust::name).
    pub(crate) fn name(&self) -> String {
        self.record().to_string()
    }

    /// The form that files have.
    pub(crate) fn record(&self) -> OptimiserRecord {
        let setting = |(name, setting): &(&str, Setting)| (name.to_string(), setting.clone());
        let mut record = OptimiserRecord {
            kind: self.kind.to_string(),
            storage: self.storage,
            settings: self.settings.iter().map(setting).collect(),
            fields: self.fields.iter().map(|field| (field.name.to_string(), field.value.into())).collect(),
            ..OptimiserRecord::default()
        };
        for (place, part) in &self.parts {
            match place.number() {
                Some(_) => record.members.push(part.record()),
                None => record.inner = Some(Box::new(part.record())),
            }
        }
        record
    }

    /// Whether a rule inside holds alternatives.
    #[cfg(feature = "torch")]
    pub(crate) fn has_alternatives(&self) -> bool {
        let is_one = |place: &ChildPlace| matches!(place, ChildPlace::Alternative(_));
        self.parts.iter().any(|(place, part)| is_one(place) || part.has_alternatives())
    }

    /// All patterns of paths by which rules inside are chosen.
    pub(crate) fn patterns(&self) -> Vec<String> {
        self.all().iter().filter_map(|member| member.rule.patterns.as_deref()).flatten().cloned().collect()
    }

    /// Whether a rule inside still has to be chosen for each parameter.
    pub(crate) fn has_choice(&self) -> bool {
        self.patterns.is_some() || self.parts.iter().any(|(_, part)| part.has_choice())
    }

    /// A hash of kinds, settings and values, the same on every machine.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.printed(Fingerprint::new()).finish()
    }

    fn printed(&self, print: Fingerprint) -> Fingerprint {
        // 1 here and 2 at the end are brackets, so that trees of another shape have another hash.
        let mut print = print.number(1).bytes(self.kind.as_bytes());
        for (name, setting) in &self.settings {
            print = print.bytes(name.as_bytes());
            // `Fingerprint` never fails as a writer.
            let _ = write!(print, "{setting}");
        }
        print = self
            .fields
            .iter()
            .fold(print, |print, field| field.value.printed(print.bytes(field.name.as_bytes())));
        self.parts.iter().fold(print, |print, (_, part)| part.printed(print)).number(2)
    }
}

/// The error for a hyper-parameter out of range.
pub(crate) fn out_of_range(
    rule: &str,
    field: &str,
    value: impl Into<FieldValue>,
    expected: impl Display,
) -> Error {
    Error::new(ErrorKind::Argument, format!("{rule}: {field} is"))
        .with_got(value.into())
        .with_expected(expected)
}

/// The error for a name that a rule does not have. `what` is "field", or another kind of name.
pub(crate) fn has_no(rule: &str, what: &str, name: &str, available: &[String]) -> Error {
    Error::new(ErrorKind::UnknownName, format!("{rule} has no {what} {name:?}{}", meant(name, available)))
        .with_expected(one_of(available))
}
