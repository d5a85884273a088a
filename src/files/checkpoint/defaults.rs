//! [`Restored`], and the comparison of a file's hyper-parameters with the program's.
//!
//! A file has numbers that the run has moved: by `adjust`, a plateau, a loop that sets the rate, gradual
//! unfreezing. Such a difference is no mistake. A mistake is what somebody has changed in the program in the
//! hope that it counts. So for the warning ([`Replaced`]) a value of the program (before its first step,
//! because a run may be restored later) is compared with three of the file: the present one, that of the
//! set-up, and that before the first step.

use std::collections::HashSet;
use std::fmt::Display;

use super::record::{LeafRecord, Record};
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result, listed};
use crate::rule::field::{Data, FieldValue};
use crate::rule::{Description, FieldDescription, Optimiser, OptimiserRecord, is_same_rate};
use crate::tree::{Drives, Leaf};

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

/// Settings of the program that a file replaces by others.
#[derive(Default)]
pub(super) struct Replaced {
    /// For a warning, each difference once.
    texts: Vec<String>,
    known: HashSet<[String; 3]>,
}

impl Replaced {
    fn add(&mut self, setting: &str, path: Option<&str>, program: impl Display, file: impl Display) {
        let values = [setting.to_string(), program.to_string(), file.to_string()];
        if self.known.insert(values) {
            let of = path.map_or_else(String::new, |path| format!(" of {path:?}"));
            self.texts.push(format!("{setting}{of} is {program} in the program and {file} in the file"));
        }
    }

    /// Adds the count of steps that the program has set.
    pub(super) fn compare_steps(&mut self, program: Option<u64>, file: &Record) {
        if let Some(program) = program.filter(|count| *count != file.steps && Some(*count) != file.began_at) {
            self.add("the count of steps", None, program, file.steps);
        }
    }

    /// Adds what is set in the leaf, except what a schedule of the program decides. `restored` has the values
    /// of the file, and `drives` the schedules after the restore.
    pub(super) fn compare(
        &mut self,
        leaf: &Leaf,
        record: &LeafRecord,
        restored: &Optimiser,
        drives: Option<&Drives>,
    ) {
        let begun = leaf.begun.as_ref();
        let own = begun.map_or(&leaf.optimiser, |(optimiser, _)| optimiser);
        let (own_values, file_values) = (own.fields(), restored.fields());
        if own_values != file_values {
            let values = own.places().into_iter().zip(own_values.iter().zip(&file_values));
            for (index, (place, ((_, program), (_, file)))) in values.enumerate() {
                let mut chosen = record.set_up.iter().filter(|(name, _)| *name == place);
                // Up to rounding, because a rate may be a product of several factors.
                let is_same = |other: FieldValue| program.is_equal(other, is_same_rate);
                let is_known = is_same(*file) || chosen.any(|(_, then)| file.read(then).is_some_and(is_same));
                let is_driven = drives
                    .and_then(|drives| drives.of_field(index))
                    .is_some_and(|given| !given.is_of_file && !given.schedule.is_relative);
                if !is_known && !is_driven {
                    self.add(&place, Some(leaf.path()), program, file);
                }
            }
        }
        let program = begun.map_or(leaf.frozen, |(_, frozen)| *frozen);
        if program != record.frozen && Some(program) != record.began_frozen {
            self.add("frozen", Some(leaf.path()), program, record.frozen);
        }
    }

    pub(super) fn warning(self) -> Option<Warning> {
        let differences = listed(self.texts.into_iter());
        (!differences.is_empty()).then_some(Warning::SettingsDiffer { differences })
    }
}
