//! The description of a rule as a value, and its names, records and hashes.
//!
//! A rule describes itself by `&mut`, so each run costs a clone of the rule. The resulting [`Description`] is
//! cached for adjustments, schedules, checkpoints, configurations and warnings. A field has two identifiers:
//!
//! - the *index*, by which fields are written: the place in depth-first order, a rule's own fields before the
//!   fields of its parts;
//! - the *address* and a name, as in `1.0.eta`: the numbers of the members that contain the field, outermost
//!   first. The rule inside a wrapper has no number, so wrappers change no address.

pub(crate) mod adjust;
mod hyper_parameters;
pub(crate) mod order;
pub(crate) mod rates;
pub(crate) mod record;
pub(crate) mod role;

use std::fmt::{Display, Write};

use smallvec::SmallVec;

use crate::error::{Error, ErrorKind, Result, distinct, one_of, suggestion};
use crate::numbers::Fingerprint;
use crate::rule::field::{Data, FieldValue};
use record::{OptimiserRecord, Setting, StorageRecord};
use role::Role;

/// A rule or an optimiser as it [described](crate::Describe) itself, with all its parts.
#[derive(Clone, Debug, Default)]
#[doc(hidden)]
pub struct Description {
    pub(crate) kind: &'static str,
    /// The roles of the rule in a chain, each with the number of parts that were described before the role.
    pub(in crate::rule) roles: Vec<(Role, usize)>,
    /// How the optimiser stores the parameter. `None` for a bare rule.
    pub(in crate::rule) storage: Option<StorageRecord>,
    pub(crate) settings: Vec<(&'static str, Setting)>,
    /// The hyper-parameters of the rule without those of its parts.
    pub(crate) fields: Vec<FieldDescription>,
    /// The patterns of paths by which the rule chooses, if it chooses a rule for each parameter.
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

/// How a rule is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum ChildPlace {
    /// As the rule of a store such as `MixedPrecision`, or as the store or rule inside an `Offload`.
    Stored,
    /// As the one rule inside another rule.
    Inner,
    /// As one of several rules that act one after another. The index is in front of the full names of
    /// entries.
    Member(usize),
    /// As one of several alternatives. The index is in front of the full names of entries.
    Alternative(usize),
}

impl ChildPlace {
    /// The index in front of full names, if this place has one.
    pub(in crate::rule) fn number(self) -> Option<usize> {
        match self {
            ChildPlace::Stored | ChildPlace::Inner => None,
            ChildPlace::Member(i) | ChildPlace::Alternative(i) => Some(i),
        }
    }
}

/// A rule somewhere in an optimiser.
#[derive(Clone, Debug)]
pub(crate) struct MemberDescription<'d> {
    /// The members that contain the rule.
    members: Address,
    pub(crate) rule: &'d Description,
}

impl MemberDescription<'_> {
    /// The full name of a field or state tensor of the rule: `1.eta`.
    pub(crate) fn full_name(&self, name: &str) -> String {
        let place: String = self.members.iter().map(|member| format!("{member}.")).collect();
        place + name
    }
}

/// Splits a full name: `1.0.eta` into `[1, 0]` and `eta`.
fn split_address(name: &str) -> (Address, &str) {
    let (mut members, mut rest) = (Address::new(), name);
    while let Some((index, after_index)) = rest.split_once('.') {
        // The number is compared with its text, because `parse` takes `01` and `+1`, too.
        let Some(member) = index
            .parse()
            .ok()
            .filter(|number: &usize| number.to_string() == index)
        else {
            break;
        };
        members.push(member);
        rest = after_index;
    }
    (members, rest)
}

/// Splits the name of one number of a pair, counted from 1: `beta1` into `beta` and 0.
fn split_number(name: &str) -> Option<(&str, usize)> {
    let digit = name.chars().last()?.to_digit(10)?.checked_sub(1)?;
    let pair = &name[..name.len() - 1];
    pair.ends_with(char::is_alphabetic)
        .then_some((pair, digit as usize))
}

impl Description {
    /// This rule and all rules inside, in depth-first order.
    pub(crate) fn all(&self) -> Vec<MemberDescription<'_>> {
        let mut rules = Vec::new();
        self.collect(&mut Address::new(), &mut rules);
        rules
    }

    fn collect<'d>(&'d self, members: &mut Address, rules: &mut Vec<MemberDescription<'d>>) {
        rules.push(MemberDescription {
            members: members.clone(),
            rule: self,
        });
        let depth = members.len();
        for (place, part) in &self.parts {
            members.extend(place.number());
            part.collect(members, rules);
            members.truncate(depth);
        }
    }

    /// Whether this rule, without the rules inside, has the role.
    #[cfg(feature = "torch")]
    pub(crate) fn has_role(&self, role: Role) -> bool {
        self.roles.iter().any(|(own, _)| *own == role)
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
        self.all()
            .iter()
            .flat_map(|member| &member.rule.fields)
            .copied()
            .collect()
    }

    /// See [`Adjust::fields`](crate::Adjust::fields).
    pub(crate) fn named_values(&self) -> Vec<(&'static str, FieldValue)> {
        self.fields()
            .into_iter()
            .map(|field| (field.name, field.value))
            .collect()
    }

    /// The full name of each field, in the order of their indices.
    pub(crate) fn places(&self) -> Vec<String> {
        let of_member = |member: &MemberDescription<'_>| -> Vec<String> {
            member
                .rule
                .fields
                .iter()
                .map(|field| member.full_name(field.name))
                .collect()
        };
        self.all().iter().flat_map(of_member).collect()
    }

    /// The names of all fields without addresses, each once.
    pub(crate) fn names(&self) -> Vec<String> {
        distinct(self.fields().iter().map(|field| field.name))
    }

    /// The names to suggest instead of the unknown `name`.
    ///
    /// With addresses if `name` has an address, and with the numbers of pairs if `name` ends in such a
    /// number.
    pub(crate) fn available(&self, name: &str) -> Vec<String> {
        let names = if name.contains('.') {
            self.places()
        } else {
            self.names()
        };
        if split_number(name).is_none() {
            return names;
        }
        let numbers = |name: String| match self
            .fields_named(&name)
            .first()
            .map_or(0, |field| field.value.numbers().len())
        {
            0 => vec![name],
            parts => (1..=parts).map(|part| format!("{name}{part}")).collect(),
        };
        names.into_iter().flat_map(numbers).collect()
    }

    /// The fields that a name reaches: with an address, only the fields inside that member.
    pub(crate) fn fields_named(&self, name: &str) -> SmallVec<[FieldDescription; 1]> {
        let (members, name) = split_address(name);
        let fields = self
            .rules_inside(&members)
            .into_iter()
            .flat_map(|rule| &rule.fields);
        fields.filter(|field| field.name == name).copied().collect()
    }

    /// The rules inside these nested members, or all rules if `members` is empty.
    fn rules_inside(&self, members: &[usize]) -> Vec<&Description> {
        let all = self.all();
        let reached = all.iter().filter(|member| member.members.starts_with(members));
        reached.map(|member| member.rule).collect()
    }

    /// The fields that a name reaches. For a name such as `beta1` also the index of the number in each field.
    pub(crate) fn numbers_named(&self, name: &str) -> (SmallVec<[FieldDescription; 1]>, Option<usize>) {
        let whole = self.fields_named(name);
        match split_number(name) {
            Some((pair, part)) if whole.is_empty() => {
                let mut pairs = self.fields_named(pair);
                pairs.retain(|field| part < field.value.numbers().len());
                (pairs, Some(part))
            }
            _ => (whole, None),
        }
    }

    /// Pairs all fields, in order, with values.
    ///
    /// # Errors
    /// If there are more or fewer values than fields, or a value is of another type than its field.
    pub(crate) fn typed_values(&self, values: &[FieldValue]) -> Result<FieldValues> {
        let all = self.all();
        let fields = || {
            all.iter()
                .flat_map(|member| member.rule.fields.iter().map(|field| (member.rule, field)))
        };
        let count = fields().count();
        if values.len() != count {
            let problem = format!("{}: the number of values is", self.name());
            let error = Error::new(ErrorKind::Argument, problem)
                .with_got(values.len())
                .with_expected(count);
            return Err(error.with_remedy("pass a value for each of `fields`, in their order"));
        }
        let pairs = fields().zip(values);
        pairs
            .map(|((rule, field), value)| Ok((field.index, self.convert(rule, field, *value)?)))
            .collect()
    }

    /// Converts a value to the type of a field of `rule`, or refuses it.
    fn convert(&self, rule: &Self, field: &FieldDescription, value: FieldValue) -> Result<FieldValue> {
        value.convert_to(field.value).ok_or_else(|| {
            let available = self.names_in(rule).join(", ");
            out_of_range(rule.kind, field.name, value, field.value.expected()).with_remedy(
                match field.value.numbers().len() {
                    0 => format!("pass such a value, or set another field of the rule: {available}"),
                    parts => format!(
                        "pass such a value, or set one number, as in `{}{parts}`",
                        field.name
                    ),
                },
            )
        })
    }

    /// The error for adjusting a setting; `None` if no rule has a setting with this name.
    pub(crate) fn setting_error(&self, name: &str) -> Option<Error> {
        let (members, name) = split_address(name);
        let has_setting = |rule: &&Description| rule.settings.iter().any(|(setting, _)| *setting == name);
        let rule = self.rules_inside(&members).into_iter().find(has_setting)?;
        let problem = format!("{}: {name} is a setting, which cannot be adjusted", rule.kind);
        let error = Error::new(ErrorKind::Argument, problem)
            .with_expected(format_args!("one of: {}", self.names_in(rule).join(", ")));
        Some(
            error.with_remedy(
                "set up a new state, or give the parameters another rule by `Selection::replace`",
            ),
        )
    }

    /// The names of the fields of `rule`. If there are none, the names of the fields of all rules.
    fn names_in(&self, rule: &Self) -> Vec<String> {
        let names = rule.fields.iter().map(|field| field.name);
        if rule.fields.is_empty() {
            self.names()
        } else {
            distinct(names)
        }
    }

    /// The error for the name of a field that no rule has.
    fn no_field_error(&self, name: &str) -> Error {
        let unknown_field_error = || unknown_name_error(&self.name(), "field", name, &self.available(name));
        self.setting_error(name).unwrap_or_else(unknown_field_error)
    }

    /// See [`Adjust::name`](crate::Adjust::name).
    pub(crate) fn name(&self) -> String {
        // A name shows no values of fields.
        self.record_with(&|_| None).to_string()
    }

    /// The form of the description in files.
    pub(crate) fn record(&self) -> OptimiserRecord {
        self.record_with(&|field| Some(field.value.data()))
    }

    /// [`Description::record`] with the fields for which `value` returns a value, and with these values.
    fn record_with(&self, value: &dyn Fn(&FieldDescription) -> Option<Data>) -> OptimiserRecord {
        let field = |field: &FieldDescription| Some((field.name.to_string(), value(field)?));
        let setting = |(name, setting): &(&str, Setting)| (name.to_string(), setting.clone());
        let mut record = OptimiserRecord {
            kind: self.kind.to_string(),
            storage: self.storage,
            settings: self.settings.iter().map(setting).collect(),
            fields: self.fields.iter().filter_map(field).collect(),
            ..OptimiserRecord::default()
        };
        for (place, part) in &self.parts {
            match place.number() {
                Some(_) => record.members.push(part.record_with(value)),
                None => record.inner = Some(Box::new(part.record_with(value))),
            }
        }
        record
    }

    /// Whether a rule inside holds alternatives.
    #[cfg(feature = "torch")]
    pub(crate) fn has_alternatives(&self) -> bool {
        let is_alternative = |place: &ChildPlace| matches!(place, ChildPlace::Alternative(_));
        self.parts
            .iter()
            .any(|(place, part)| is_alternative(place) || part.has_alternatives())
    }

    /// All patterns of paths by which rules inside are chosen.
    pub(crate) fn patterns(&self) -> Vec<String> {
        self.all()
            .iter()
            .filter_map(|member| member.rule.patterns.as_deref())
            .flatten()
            .cloned()
            .collect()
    }

    /// Whether a rule inside still has to be chosen for each parameter.
    pub(crate) fn has_choice(&self) -> bool {
        self.patterns.is_some() || self.parts.iter().any(|(_, part)| part.has_choice())
    }

    /// A hash of kinds, settings and values, the same on every machine.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.add_to_hash(Fingerprint::new()).finish()
    }

    fn add_to_hash(&self, hash: Fingerprint) -> Fingerprint {
        // 1 here and 2 at the end are brackets, so that trees of different shapes have different hashes.
        let mut hash = hash.number(1).bytes(self.kind.as_bytes());
        for (name, setting) in &self.settings {
            hash = hash.bytes(name.as_bytes());
            // `Fingerprint` never fails as a writer.
            let _ = write!(hash, "{setting}");
        }
        hash = self.fields.iter().fold(hash, |hash, field| {
            field.value.add_to_hash(hash.bytes(field.name.as_bytes()))
        });
        self.parts
            .iter()
            .fold(hash, |hash, (_, part)| part.add_to_hash(hash))
            .number(2)
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

/// The error for a name that a rule does not have. `what` is the kind of name, such as "field".
pub(crate) fn unknown_name_error(rule: &str, what: &str, name: &str, available: &[String]) -> Error {
    Error::new(
        ErrorKind::UnknownName,
        format!("{rule} has no {what} {name:?}{}", suggestion(name, available)),
    )
    .with_expected(one_of(available))
}
