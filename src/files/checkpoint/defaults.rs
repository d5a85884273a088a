//! The hyper-parameters of a file, compared with those of the rules.

use crate::rule::field::{FieldValue, Literal};
use crate::rule::{Describe, Description, FieldDescription, MemberDescription};

/// What a [restored](crate::CheckpointFile::restore) state has that its file lacks.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Restored {
    /// The hyper-parameters that the file lacks, because it is older than they are.
    pub defaults: Vec<DefaultTaken>,
}

/// A hyper-parameter that a file lacks, so that it got its default.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DefaultTaken {
    /// The first parameter with this optimiser.
    pub path: String,
    /// The rule.
    pub rule: String,
    /// The hyper-parameter.
    pub field: String,
    /// Its default.
    pub value: FieldValue,
}

/// A hyper-parameter of an optimiser.
pub(super) struct FieldMatch<'r> {
    pub(super) rule: String,
    pub(super) field: &'static str,
    pub(super) default: FieldValue,
    /// `None` if the file lacks it.
    pub(super) saved: Option<&'r Literal>,
}

/// A rule whose hyper-parameters are not those of the file.
pub(super) struct OtherFields<'r> {
    pub(super) own: MemberDescription,
    pub(super) saved: &'r Description,
}

/// The hyper-parameters of an optimiser in order, each with the value of the file.
pub(super) fn matched<'r>(
    optimiser: &mut dyn Describe,
    saved: &'r Description,
) -> Result<Vec<FieldMatch<'r>>, OtherFields<'r>> {
    let mut all = Vec::new();
    for (own, saved) in MemberDescription::all(optimiser).into_iter().zip(saved.all()) {
        let Some(fields) = of_member(&own, &saved.fields) else { return Err(OtherFields { own, saved }) };
        all.extend(fields);
    }
    Ok(all)
}

/// `None` if the file has a hyper-parameter that the rule lacks, or they are in another order.
fn of_member<'r>(member: &MemberDescription, saved: &'r [(String, Literal)]) -> Option<Vec<FieldMatch<'r>>> {
    let mut rest = saved.iter().peekable();
    let matched = member.fields.iter().map(|&FieldDescription { name, default, .. }| {
        let saved = rest.next_if(|(saved, _)| saved == name).map(|(_, literal)| literal);
        FieldMatch { rule: member.kind.to_string(), field: name, default, saved }
    });
    let matched = matched.collect();
    rest.next().is_none().then_some(matched)
}
