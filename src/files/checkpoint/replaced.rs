//! The settings of the program that a restore replaces by those of the file, for a warning.
//!
//! A file has numbers that the run has moved: by `adjust`, a plateau, a loop that sets the rate, gradual
//! unfreezing. Such a difference is no mistake. A mistake is what somebody has changed in the program in the
//! hope that it counts. So a value of the program (before its first step, because a run may be restored
//! later) is compared with three of the file: the present one, that of the set-up, and that before the first
//! step.

use std::collections::HashSet;
use std::fmt::Display;

use super::record::{LeafRecord, Record};
use crate::error::listed;
use crate::error::warning::Warning;
use crate::rule::{FieldValue, Optimiser, is_same_rate};
use crate::tree::{Drives, Leaf};

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
