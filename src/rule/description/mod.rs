//! The description of a rule as a value, and what follows from it.
//!
//! A rule describes itself by `&mut`, so to look at one takes a copy of it. A value is looked at as often as
//! one likes: by adjustments, schedules, checkpoints, configurations and warnings.

pub(crate) mod adjust;
mod hyper_parameters;
pub(crate) mod order;
pub(crate) mod rates;
pub(crate) mod record;
pub(crate) mod role;
pub(crate) mod setting;

use std::fmt::{Display, Write};

use smallvec::SmallVec;

use crate::error::{Error, ErrorKind, Result, meant, one_of};
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
    /// What it is for in a chain, and how many parts were named before that.
    pub(in crate::rule) roles: Vec<(Role, usize)>,
    /// How it stores the parameter, if it decides that.
    pub(in crate::rule) storage: Option<StorageRecord>,
    pub(crate) settings: Vec<(&'static str, Setting)>,
    /// Its own hyper-parameters.
    pub(crate) fields: Vec<FieldDescription>,
    /// What looks like a hyper-parameter and cannot be set.
    pub(in crate::rule) fixed: Vec<&'static str>,
    /// The patterns of paths by which it chooses for each parameter, if it does.
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

/// Fields by their index in [`Adjust::fields`](crate::Adjust::fields), with the values to set them to.
pub(crate) type FieldValues = SmallVec<[(usize, FieldValue); 1]>;

/// The indices of members, outermost first.
type Address = SmallVec<[usize; 4]>;

/// A rule in an optimiser.
#[derive(Clone, Debug)]
pub(crate) struct MemberDescription<'d> {
    /// The members that it is in.
    members: Address,
    pub(crate) rule: &'d Description,
}

impl MemberDescription<'_> {
    /// The full name of a field or state tensor: `1.eta`.
    pub(crate) fn at(&self, name: &str) -> String {
        let place: String = self.members.iter().map(|member| format!("{member}.")).collect();
        place + name
    }
}

/// The address that a name begins with, and the field: `[1, 0]` and `eta` of `1.0.eta`.
fn address(name: &str) -> (Address, &str) {
    let (mut members, mut rest) = (Address::new(), name);
    while let Some((index, inside)) = rest.split_once('.') {
        let Some(member) = index.parse().ok().filter(|number: &usize| number.to_string() == index) else {
            break;
        };
        members.push(member);
        rest = inside;
    }
    (members, rest)
}

impl Description {
    /// This and all that it holds, in order.
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

    /// The rule without how the parameter is stored.
    pub(crate) fn rule(&self) -> &Self {
        match &self.parts[..] {
            [(_, part)] if self.storage.is_some() => part.rule(),
            _ => self,
        }
    }

    /// All fields, in order.
    pub(crate) fn fields(&self) -> Vec<FieldDescription> {
        self.all().iter().flat_map(|member| &member.rule.fields).copied().collect()
    }

    /// See [`Adjust::fields`](crate::Adjust::fields).
    pub(crate) fn named_values(&self) -> Vec<(&'static str, FieldValue)> {
        self.fields().into_iter().map(|field| (field.name, field.value)).collect()
    }

    /// The names that address one field each, in order.
    pub(crate) fn places(&self) -> Vec<String> {
        let of_member = |member: &MemberDescription<'_>| -> Vec<String> {
            member.rule.fields.iter().map(|field| member.at(field.name)).collect()
        };
        self.all().iter().flat_map(of_member).collect()
    }

    /// The names of all fields, each once.
    pub(crate) fn names(&self) -> Vec<String> {
        each_once(self.fields().iter().map(|field| field.name))
    }

    /// Candidates for an unknown name: with places if that has a place, else without.
    pub(crate) fn available(&self, name: &str) -> Vec<String> {
        if name.contains('.') { self.places() } else { self.names() }
    }

    /// The fields that a name reaches.
    pub(crate) fn reached(&self, name: &str) -> SmallVec<[FieldDescription; 1]> {
        let (members, name) = address(name);
        let all = self.all();
        let inside = all.iter().filter(|member| member.members.starts_with(&members));
        inside.flat_map(|member| &member.rule.fields).filter(|field| field.name == name).copied().collect()
    }

    /// What to write to set all fields, in order; with fewer values, the first fields.
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

    /// The value as one of the type of a field of `rule`.
    fn typed(&self, rule: &Self, field: &FieldDescription, value: FieldValue) -> Result<FieldValue> {
        value.like(field.value).ok_or_else(|| {
            let available = self.names_in(rule).join(", ");
            out_of_range(rule.kind, field.name, value, field.value.expected())
                .with_remedy(format!("pass that, or set another of its fields: {available}"))
        })
    }

    /// The error for a name in `rule` that looks like a field and cannot be set.
    fn is_fixed(&self, rule: &Self, name: &str) -> Error {
        let kind = rule.kind;
        let problem = format!("{kind}: {name} decides the layout of the state and cannot be adjusted");
        Error::new(ErrorKind::Argument, problem)
            .with_expected(format_args!("one of: {}", self.names_in(rule).join(", ")))
            .with_remedy("set up a new state, or give the parameters another rule by `Selection::replace`")
    }

    /// The fields that can be set in `rule`; those of all rules if it has none.
    fn names_in(&self, rule: &Self) -> Vec<String> {
        let own = rule.fields.iter().map(|field| field.name);
        if rule.fields.is_empty() { self.names() } else { each_once(own) }
    }

    /// The error for a field that a rule does not have.
    fn has_no_field(&self, field: &str) -> Error {
        has_no(&self.name(), "field", field, &self.available(field))
    }

    /// The name, for errors and listings.
    pub(crate) fn name(&self) -> String {
        self.record().to_string()
    }

    /// The same as files have it.
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

    /// Whether it holds alternatives: rules of which one acts at a time.
    #[cfg(feature = "torch")]
    pub(crate) fn has_alternatives(&self) -> bool {
        let is_one = |place: &ChildPlace| matches!(place, ChildPlace::Alternative(_));
        self.parts.iter().any(|(place, part)| is_one(place) || part.has_alternatives())
    }

    /// The patterns of paths by which rules are chosen.
    pub(crate) fn patterns(&self) -> Vec<String> {
        self.all().iter().filter_map(|member| member.rule.patterns.as_deref()).flatten().cloned().collect()
    }

    /// Whether there is a choice to be made for each parameter.
    pub(crate) fn has_choice(&self) -> bool {
        self.patterns.is_some() || self.parts.iter().any(|(_, part)| part.has_choice())
    }

    /// A hash of kinds, settings and values.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.printed(Fingerprint::new()).finish()
    }

    fn printed(&self, print: Fingerprint) -> Fingerprint {
        let mut print = print.number(1).bytes(self.kind.as_bytes());
        for (name, setting) in &self.settings {
            print = print.bytes(name.as_bytes());
            // `Fingerprint` never fails as a writer.
            let _ = write!(print, "{setting}");
        }
        print = self
            .fields
            .iter()
            .fold(print, |print, field| with_value(print.bytes(field.name.as_bytes()), field.value));
        self.parts.iter().fold(print, |print, (_, part)| part.printed(print)).number(2)
    }
}

/// The error for a hyper-parameter out of range, of a rule or of what is set up like one.
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

/// The error for a name that a rule does not have: of a field, or of a state tensor.
pub(crate) fn has_no(rule: &str, what: &str, name: &str, available: &[String]) -> Error {
    Error::new(ErrorKind::UnknownName, format!("{rule} has no {what} {name:?}{}", meant(name, available)))
        .with_expected(one_of(available))
}

/// Names, each once, in the order in which they come first.
pub(crate) fn each_once<'n>(names: impl Iterator<Item = &'n str>) -> Vec<String> {
    let mut each: Vec<String> = Vec::new();
    for name in names {
        if !each.iter().any(|known| known == name) {
            each.push(name.to_string());
        }
    }
    each
}

fn with_value(print: Fingerprint, value: FieldValue) -> Fingerprint {
    match value {
        FieldValue::Real(a) => print.real(a),
        FieldValue::Pair(a, b) => print.real(a).real(b),
        FieldValue::Triple(a, b, c) => print.real(a).real(b).real(c),
        FieldValue::Count(count) => print.number(count),
        FieldValue::Sizes(sizes) => sizes.iter().fold(print, |print, size| print.number(size as u64)),
        FieldValue::Flag(flag) => print.number(flag.into()),
        FieldValue::Choice(choice) => print.bytes(choice.name().as_bytes()),
    }
}
