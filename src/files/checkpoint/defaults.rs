//! The hyper-parameters of a file, compared with those of the rules.

use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::{FieldValue, Literal};
use crate::rule::{Description, FieldDescription, OptimiserRecord};

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

/// The values of the file for all fields of an optimiser, in order. Those that the file lacks get their
/// defaults, noted in `restored`.
///
/// # Errors
/// If the file has a field that the rule lacks, fields in another order, or a value of another type.
pub(super) fn saved_values(
    path: &str,
    own: &Description,
    saved: &OptimiserRecord,
    restored: &mut Restored,
) -> Result<Vec<FieldValue>> {
    let mut values = Vec::new();
    for (own, saved) in own.all().into_iter().map(|member| member.rule).zip(saved.all()) {
        let mut rest = saved.fields.iter().peekable();
        let mut literal = |field: &FieldDescription| rest.next_if(|(name, _)| name == field.name);
        let literals: Vec<_> = own.fields.iter().map(&mut literal).collect();
        if rest.next().is_some() {
            let names = own.fields.iter().map(|field| field.name.to_string()).collect();
            return Err(other_names(path, saved, "fields", saved.fields.iter().map(|(name, _)| name), names));
        }
        for (&FieldDescription { name, default, .. }, literal) in own.fields.iter().zip(literals) {
            let rule = own.kind.to_string();
            let Some((_, literal)) = literal else {
                let (path, field) = (path.to_string(), name.to_string());
                restored.defaults.push(DefaultTaken { path, rule, field, value: default });
                values.push(default);
                continue;
            };
            values.push(literal.read(default).ok_or_else(|| {
                let got =
                    if let Literal::Text(text) = literal { format!("{text:?}") } else { literal.to_string() };
                let other = Error::new(ErrorKind::File, format!("the file's {rule}: {name} is"));
                other.with_got(got).with_expected(default.expected()).at(path)
            })?);
        }
    }
    Ok(values)
}

/// The error that a file names other entries of a leaf than the rule has.
pub(super) fn other_names<'n>(
    path: &str,
    saved: &OptimiserRecord,
    what: &'static str,
    found: impl Iterator<Item = &'n String>,
    expected: Vec<String>,
) -> Error {
    // Enough names to show the difference.
    let found: Vec<&String> = found.take(expected.len() + 20).collect();
    Error::new(
        ErrorKind::OtherRule,
        format!("the file is of another version of the rule: its {saved} has the {what}"),
    )
    .with_got(format_args!("{found:?}"))
    .with_expected(format_args!("{expected:?}"))
    .with_remedy("read it with the version that it was written by")
    .at(path)
}
