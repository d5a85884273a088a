//! [`Restored`], and the comparison of a file's hyper-parameters with the program's.
//!
//! A run can change its settings: by `adjust`, a plateau, a loop that sets the rate, gradual unfreezing. If
//! the values in file and program differ by such a change, nobody has made a mistake. But if the user has
//! changed the program, the change has no effect, because the file's value counts: [`Replaced`] warns of
//! this. So a value of the program is compared with three values of the file: the present value, the value of
//! the set-up, and the value before the first step. The value of the program is the one before its first
//! step, because a run may be restored later.

use std::collections::HashSet;
use std::fmt::Display;

use super::record::{LeafRecord, Record};
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result, first_names};
use crate::rule::field::{Data, FieldValue};
use crate::rule::{Description, FieldDescription, Optimiser, OptimiserRecord, is_same_rate};
use crate::tree::{Drives, Leaf};

/// The parts that [`CheckpointFile::restore`](crate::CheckpointFile::restore) took over or left out.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Restored {
    /// The paths of the parameters whose state is now that of the file.
    pub taken: Vec<String>,
    /// The paths of the state's parameters that stayed as they were.
    ///
    /// These parameters are [excepted](crate::CheckpointFile::except).
    pub left: Vec<String>,
    /// The paths of the file's parameters that were passed over, because they are excepted.
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
    /// The value in the file; `None` if the file is older than the hyper-parameter, whose default then
    /// counts.
    pub file: Option<FieldValue>,
}

/// The file's values for all fields of an optimiser, in order, and defaults of missing fields.
///
/// Differences from the program's values are added to `restored`.
///
/// # Errors
/// If the file has a field that the rule lacks, fields in another order, or a value of another type.
pub(super) fn saved_values(
    path: &str,
    description: &Description,
    saved_optimiser: &OptimiserRecord,
    restored: &mut Restored,
) -> Result<Vec<FieldValue>> {
    let mut values = Vec::new();
    for (member, saved_rule) in description.all().into_iter().zip(saved_optimiser.all()) {
        let rule = member.rule;
        // File and rule have one order, so a field that does not come next is missing in the file.
        let mut rest = saved_rule.fields.iter().peekable();
        let mut next = |field: &FieldDescription| rest.next_if(|(name, _)| name == field.name);
        let saved_fields: Vec<_> = rule.fields.iter().map(&mut next).collect();
        if rest.next().is_some() {
            let names = rule.fields.iter().map(|field| field.name.to_string()).collect();
            let saved_names = saved_rule.fields.iter().map(|(name, _)| name);
            return Err(names_error(path, saved_rule, "fields", saved_names, names));
        }
        for (field, saved_field) in rule.fields.iter().zip(saved_fields) {
            let &FieldDescription {
                name,
                value: program,
                default,
                ..
            } = field;
            let kind = rule.kind.to_string();
            let read = |(_, data): &(String, Data)| {
                let error = || Error::new(ErrorKind::File, format!("the file's {kind}: {name} is"));
                default
                    .read(data)
                    .ok_or_else(|| error().with_got(data).with_expected(default.expected()).at(path))
            };
            let file = saved_field.map(read).transpose()?;
            values.push(file.unwrap_or(default));
            if file != Some(program) {
                let (path, field) = (path.to_string(), name.to_string());
                restored.differences.push(FieldDifference {
                    path,
                    rule: kind,
                    field,
                    program,
                    file,
                });
            }
        }
    }
    Ok(values)
}

/// The error that a file names other entries of a leaf than the rule has.
pub(super) fn names_error<'n>(
    path: &str,
    saved_optimiser: &OptimiserRecord,
    kind: &'static str,
    names: impl Iterator<Item = &'n String>,
    expected: Vec<String>,
) -> Error {
    // The list is limited, because a damaged file may have any number of names. 20 more than expected show
    // the difference.
    let names: Vec<&String> = names.take(expected.len() + 20).collect();
    let problem = "the file was written by another version of the rule: in the file,";
    Error::new(
        ErrorKind::OtherRule,
        format!("{problem} {saved_optimiser} has the {kind}"),
    )
    .with_got(format_args!("{names:?}"))
    .with_expected(format_args!("{expected:?}"))
    .with_remedy("read the file with the version of optimisers that wrote it")
    .at(path)
}

/// Settings of the program that a file replaces by other values.
#[derive(Default)]
pub(super) struct Replaced {
    /// The differences in words, each once.
    texts: Vec<String>,
    /// The setting, the program's value and the file's value of each difference.
    differences: HashSet<[String; 3]>,
}

impl Replaced {
    fn add(&mut self, setting: &str, path: Option<&str>, program: impl Display, file: impl Display) {
        let values = [setting.to_string(), program.to_string(), file.to_string()];
        if self.differences.insert(values) {
            let owner = path.map_or_else(String::new, |path| format!(" of {path:?}"));
            self.texts.push(format!(
                "{setting}{owner} is {program} in the program and {file} in the file"
            ));
        }
    }

    /// Adds the count of steps that the program has set.
    pub(super) fn compare_steps(&mut self, program: Option<u64>, file: &Record) {
        if let Some(program) = program.filter(|count| *count != file.steps && Some(*count) != file.began_at) {
            self.add("the count of steps", None, program, file.steps);
        }
    }

    /// Adds the leaf's settings that differ, except values that a schedule of the program decides. `restored`
    /// has the values of the file, and `drives` the schedules after the restore.
    pub(super) fn compare(
        &mut self,
        leaf: &Leaf,
        record: &LeafRecord,
        restored: &Optimiser,
        drives: Option<&Drives>,
    ) {
        let run_start = leaf.run_start.as_ref();
        let optimiser = run_start.map_or(&leaf.optimiser, |(optimiser, _)| optimiser);
        let (program_values, file_values) = (optimiser.fields(), restored.fields());
        if program_values != file_values {
            let values = optimiser
                .places()
                .into_iter()
                .zip(program_values.iter().zip(&file_values));
            for (index, (place, ((_, program), (_, file)))) in values.enumerate() {
                let mut earlier_values = record.set_up.iter().filter(|(name, _)| *name == place);
                // Up to rounding, because a rate may be a product of several factors.
                let is_same = |other: FieldValue| program.is_equal(other, is_same_rate);
                let is_in_file =
                    is_same(*file) || earlier_values.any(|(_, data)| file.read(data).is_some_and(is_same));
                let is_driven = drives
                    .and_then(|drives| drives.assignment_for(index))
                    .is_some_and(|assignment| !assignment.is_from_file && !assignment.schedule.is_relative);
                if !is_in_file && !is_driven {
                    self.add(&place, Some(leaf.path()), program, file);
                }
            }
        }
        let is_frozen = run_start.map_or(leaf.frozen, |(_, frozen)| *frozen);
        if is_frozen != record.frozen && Some(is_frozen) != record.began_frozen {
            self.add("frozen", Some(leaf.path()), is_frozen, record.frozen);
        }
    }

    /// The warning about all differences, if there are any.
    pub(super) fn warning(self) -> Option<Warning> {
        let differences = first_names(self.texts.into_iter());
        (!differences.is_empty()).then_some(Warning::SettingsDiffer { differences })
    }
}
