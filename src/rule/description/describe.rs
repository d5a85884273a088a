//! What is derived from a rule's description of itself: fields, places, checks, choices.

use std::fmt::Display;

use smallvec::SmallVec;

use super::setting::Setting;
use crate::error::{Error, ErrorKind, Result};
use crate::rule::Parameter;
use crate::rule::field::FieldValue;
use crate::rule::state::ChildPlace;
use crate::rule::traits::{Describe, Event, Rule, visit};

/// A rule in an optimiser, with its own fields only.
#[derive(Debug)]
pub(crate) struct MemberDescription {
    pub(crate) kind: &'static str,
    pub(crate) settings: Vec<(&'static str, Setting)>,
    /// The prefix of the names of its fields and state tensors: empty, or as `1.`.
    place: String,
    pub(crate) fields: Vec<FieldDescription>,
}

/// A hyper-parameter of a rule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FieldDescription {
    pub(crate) name: &'static str,
    pub(crate) value: FieldValue,
    pub(crate) default: FieldValue,
}

impl MemberDescription {
    /// All rules in an optimiser, in their order.
    pub(crate) fn all(rule: &mut dyn Describe) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        visit(rule, |position, event| match (event, all.last_mut()) {
            (Event::Kind, _) => all.push(MemberDescription {
                kind: position.kind,
                settings: Vec::new(),
                place: position.place(),
                fields: Vec::new(),
            }),
            (Event::Setting(name, setting), Some(now)) => now.settings.push((name, setting)),
            (Event::Field(name, field), Some(now)) => {
                now.fields.push(FieldDescription { name, value: field.value(), default: field.default() });
            }
            _ => {}
        });
        all
    }

    /// The full name of a field or state tensor.
    pub(crate) fn at(&self, name: &str) -> String {
        format!("{}{name}", self.place)
    }
}

/// Shows all rules that a rule holds directly, with their places.
pub(crate) fn visit_held(rule: &mut dyn Describe, show: &mut dyn FnMut(ChildPlace, &mut dyn Rule)) {
    visit(rule, |position, event| {
        if let Event::Held(place, held) = event
            && position.depth == 0
        {
            show(place, held);
        }
    });
}

/// See [`Adjust::fields`](crate::rule::Adjust::fields).
pub(crate) fn fields(rule: &mut dyn Describe) -> Vec<(&'static str, FieldValue)> {
    MemberDescription::all(rule)
        .into_iter()
        .flat_map(|member| member.fields)
        .map(|field| (field.name, field.value))
        .collect()
}

/// See [`Adjust::places`](crate::rule::Adjust::places).
pub(crate) fn places(rule: &mut dyn Describe) -> Vec<String> {
    MemberDescription::all(rule)
        .iter()
        .flat_map(|member| member.fields.iter().map(|field| member.at(field.name)))
        .collect()
}

/// Why a field was not set: the type that the rule of this kind takes, or `None` if the field decides the
/// layout of its state.
pub(crate) struct Refusal {
    pub(crate) kind: &'static str,
    pub(crate) name: &'static str,
    pub(crate) expected: Option<&'static str>,
    pub(crate) got: FieldValue,
}

/// Sets all fields that a name reaches, and says whether there was one.
pub(crate) fn set_field(
    rule: &mut dyn Describe,
    name: &str,
    value: FieldValue,
) -> std::result::Result<bool, Refusal> {
    let (address, name) = address(name);
    let mut found = Ok(false);
    visit(rule, |position, event| {
        let reaches = |known: &str| known == name && position.members.starts_with(&address);
        let refused = |name, expected| Err(Refusal { kind: position.kind, name, expected, got: value });
        match event {
            Event::Field(known, field) if found.is_ok() && reaches(known) => {
                found =
                    field.set(value).map_or_else(|expected| refused(known, Some(expected)), |()| Ok(true));
            }
            Event::Fixed(known) if found.is_ok() && reaches(known) => found = refused(known, None),
            _ => {}
        }
    });
    found
}

/// Sets the fields to these values, in order; with fewer values, the first fields.
pub(crate) fn set_fields(rule: &mut dyn Describe, values: &[FieldValue]) -> std::result::Result<(), Refusal> {
    set_each(rule, |index| values.get(index).copied())
}

/// Sets the fields with these indices.
pub(crate) fn set_values(
    rule: &mut dyn Describe,
    values: &[(usize, FieldValue)],
) -> std::result::Result<(), Refusal> {
    set_each(rule, |index| values.iter().find_map(|(known, value)| (*known == index).then_some(*value)))
}

/// Sets each field to `value(index)`, if that is `Some`.
fn set_each(
    rule: &mut dyn Describe,
    value: impl Fn(usize) -> Option<FieldValue>,
) -> std::result::Result<(), Refusal> {
    let (mut index, mut set) = (0, Ok(()));
    visit(rule, |position, event| match event {
        Event::Field(name, field) if set.is_ok() => {
            if let Some(got) = value(index) {
                set = field.set(got).map_err(|expected| Refusal {
                    kind: position.kind,
                    name,
                    expected: Some(expected),
                    got,
                });
            }
            index += 1;
        }
        _ => {}
    });
    set
}

/// The indices of members that a name begins with, and the field: `[1, 0]` and `eta` of `1.0.eta`.
pub(crate) fn address(name: &str) -> (SmallVec<[usize; 4]>, &str) {
    let (mut members, mut rest) = (SmallVec::new(), name);
    while let Some((index, inside)) = rest.split_once('.') {
        let Some(member) = index.parse().ok().filter(|number: &usize| number.to_string() == index) else {
            break;
        };
        members.push(member);
        rest = inside;
    }
    (members, rest)
}

/// Checks every field against its range, and what else rules require.
pub(crate) fn check(rule: &mut dyn Describe) -> Result<()> {
    let mut checked = Ok(());
    visit(rule, |position, event| match event {
        _ if checked.is_err() => {}
        Event::Field(name, field) => {
            if let Some(expected) = field.out_of_range() {
                checked = Err(out_of_range(position.kind, name, field.value(), expected));
            }
        }
        Event::Require(check) => checked = check(),
        _ => {}
    });
    checked
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

/// Whether it holds alternatives: rules of which one acts at a time.
#[cfg(feature = "torch")]
pub(crate) fn has_alternatives(rule: &mut dyn Describe) -> bool {
    let mut is_found = false;
    visit(rule, |position, _| is_found |= position.is_alternative);
    is_found
}

/// The patterns of paths by which rules are chosen.
pub(crate) fn patterns(rule: &mut dyn Describe) -> Vec<String> {
    let mut all = Vec::new();
    visit(rule, |_, event| {
        if let Event::Choice(choice) = event {
            all.extend_from_slice(choice.patterns());
        }
    });
    all
}

/// Makes all choices for a parameter, and says whether there was one.
pub(crate) fn choose(rule: &mut dyn Describe, paths: &[String], x: Parameter<'_>) -> bool {
    let mut has_chosen = false;
    visit(rule, |_, event| {
        if let Event::Choice(choice) = event {
            choice.choose(paths, x);
            has_chosen = true;
        }
    });
    has_chosen
}
