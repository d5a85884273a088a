//! The hyper-parameters of a file, and those that the rules have by now.

use crate::field::{FieldValue, Literal};
use crate::rule::{FieldDescription, MemberDescription, Optimiser};

/// What a [restored](crate::CheckpointFile::restore) state has that its file does not say.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Restored {
    /// The hyper-parameters that the file lacks, because it was written before their rules had them.
    pub defaults: Vec<DefaultTaken>,
}

/// A hyper-parameter that a file lacks, and that has its default now.
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
pub(super) struct Matched<'r> {
    pub(super) rule: String,
    pub(super) field: &'static str,
    pub(super) default: FieldValue,
    /// `None` if the file lacks it.
    pub(super) saved: Option<&'r Literal>,
}

/// The optimiser's hyper-parameters in their order; `None` if the file has one that the optimiser lacks, or they are in another order.
///
/// A file may lack any but the first of a rule, which every version of that rule has had. So where the last rule begins is the last field of
/// that name, and so on towards the first.
pub(super) fn matched<'r>(optimiser: &dyn Optimiser, saved: &'r [(String, Literal)]) -> Option<Vec<Matched<'r>>> {
    let all_there = optimiser.fields().iter().map(|(name, _)| *name).eq(saved.iter().map(|(name, _)| name));
    let mut parts = Vec::new();
    let mut rest = saved;
    for member in MemberDescription::all(&mut *dyn_clone::clone_box(optimiser)).into_iter().rev() {
        let Some(first) = member.fields.first() else { continue };
        let start = if all_there { rest.len() - member.fields.len() } else { rest.iter().rposition(|(name, _)| name == first.name)? };
        let (before, own) = rest.split_at(start);
        parts.push(of_member(&member, own)?);
        rest = before;
    }
    rest.is_empty().then(|| parts.into_iter().rev().flatten().collect())
}

fn of_member<'r>(member: &MemberDescription, own: &'r [(String, Literal)]) -> Option<Vec<Matched<'r>>> {
    let mut own = own.iter().peekable();
    let matched = member.fields.iter().map(|&FieldDescription { name, default, .. }| {
        let saved = own.next_if(|(saved, _)| saved == name).map(|(_, literal)| literal);
        Matched { rule: member.kind.to_string(), field: name, default, saved }
    });
    let matched = matched.collect();
    own.next().is_none().then_some(matched)
}
