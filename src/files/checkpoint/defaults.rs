//! [`Restored`], and the comparison of a file's hyper-parameters with the program's.

use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::{Data, FieldValue};
use crate::rule::{Description, FieldDescription, OptimiserRecord};

/// What [`CheckpointFile::restore`](crate::CheckpointFile::restore) took over, and what it did not.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Restored {
    /// The paths of the parameters whose state is now that of the file.
    pub taken: Vec<String>,
    /// The paths of the state's parameters that stayed as they were, because they are
    /// [excepted](crate::CheckpointFile::except).
    pub left: Vec<String>,
    /// The paths of the file's parameters that were passed over, for the same reason.
    pub passed_over: Vec<String>,
    /// The hyper-parameters that differ between file and program.
    pub differences: Vec<FieldDifference>,
}

/// A hyper-parameter that has another value in a file than in the program.
///
/// The file's value is used, unless the program
/// [keeps its settings](crate::CheckpointFile::keeping_settings).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FieldDifference {
    /// The first parameter with this optimiser.
    pub path: String,
    /// The rule.
    pub rule: String,
    /// The hyper-parameter.
    pub field: String,
    /// The value in the program before the restore.
    pub program: FieldValue,
    /// The value in the file; `None` if the file is older than the hyper-parameter. Its default counts then.
    pub file: Option<FieldValue>,
}

/// The file's values for all fields of an optimiser, in order, or the defaults of fields that the file lacks.
/// Differences from the program's values are added to `restored`.
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
        // File and rule have one order, so a field that does not come next is missing in the file.
        let mut rest = saved.fields.iter().peekable();
        let mut next = |field: &FieldDescription| rest.next_if(|(name, _)| name == field.name);
        let in_file: Vec<_> = own.fields.iter().map(&mut next).collect();
        if rest.next().is_some() {
            let names = own.fields.iter().map(|field| field.name.to_string()).collect();
            return Err(other_names(path, saved, "fields", saved.fields.iter().map(|(name, _)| name), names));
        }
        for (&FieldDescription { name, value: program, default, .. }, data) in own.fields.iter().zip(in_file)
        {
            let rule = own.kind.to_string();
            let read = |(_, data): &(String, Data)| {
                let other = || Error::new(ErrorKind::File, format!("the file's {rule}: {name} is"));
                let read = default.read(data);
                read.ok_or_else(|| other().with_got(data).with_expected(default.expected()).at(path))
            };
            let file = data.map(read).transpose()?;
            values.push(file.unwrap_or(default));
            if file != Some(program) {
                let (path, field) = (path.to_string(), name.to_string());
                restored.differences.push(FieldDifference { path, rule, field, program, file });
            }
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
    // Cut, because a damaged file may have any number of names. These are enough to show the difference.
    let found: Vec<&String> = found.take(expected.len() + 20).collect();
    Error::new(
        ErrorKind::OtherRule,
        format!("the file was written by another version of the rule: in the file, {saved} has the {what}"),
    )
    .with_got(format_args!("{found:?}"))
    .with_expected(format_args!("{expected:?}"))
    .with_remedy("read the file with the version of optimisers that wrote it")
    .at(path)
}
