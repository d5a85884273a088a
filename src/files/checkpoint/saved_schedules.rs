//! The schedules in a checkpoint, joined with those of the program.

use std::sync::Arc;

use super::file::CheckpointFile;
use super::record::{LeafRecord, Record, ScheduleRecord, damage_error};
use crate::error::Result;
use crate::rule::Optimiser;
use crate::tree::{Drives, Leaf, ScheduleAssignment, ScheduleResolver, StateTree, give_to_all};

/// The schedules of the file.
pub(super) struct SavedSchedules {
    schedules: Vec<ScheduleAssignment>,
    /// The count of steps from which the schedules go on; `None` if the program keeps its own schedules and
    /// count.
    pub(super) steps: Option<u64>,
    resolver: ScheduleResolver,
}

impl SavedSchedules {
    pub(super) fn from_file(
        CheckpointFile {
            record,
            keep_settings,
            ..
        }: &CheckpointFile,
    ) -> Result<Self> {
        let assignment = |ScheduleRecord(schedule): &ScheduleRecord| {
            // `Schedule::check` is not called, because files may have periods that get shorter. Their factor
            // counts as 1, as in the run that was saved.
            match schedule.curve.is_ordered() {
                true => Ok(ScheduleAssignment::new(schedule.clone(), record.steps, true)),
                false => Err(damage_error("the parts of a schedule are not in order")),
            }
        };
        let schedules = record.schedules.iter().map(assignment).collect::<Result<_>>()?;
        Ok(SavedSchedules {
            schedules,
            steps: (!keep_settings).then_some(record.steps),
            resolver: ScheduleResolver::default(),
        })
    }

    /// The schedules that were given to all leaves, in the file and in the state.
    pub(super) fn state_schedules(
        &self,
        record: &Record,
        state: &StateTree,
    ) -> Result<Vec<ScheduleAssignment>> {
        let mut schedules = Vec::new();
        for schedule in self.merge(Some(&record.for_all), state.schedules.iter().cloned())? {
            give_to_all(&mut schedules, schedule);
        }
        Ok(schedules)
    }

    /// The file's schedules with these indices, and then the program's schedules.
    ///
    /// If both have a schedule for a field, the program's counts. A leaf that is left out (`indices` is
    /// `None`) keeps all schedules of the program.
    fn merge(
        &self,
        indices: Option<&Vec<usize>>,
        program: impl Iterator<Item = ScheduleAssignment>,
    ) -> Result<Vec<ScheduleAssignment>> {
        let continue_here = |schedule: ScheduleAssignment| match self.steps {
            Some(steps) => schedule.restored_at(steps),
            None => schedule,
        };
        let (Some(indices), Some(_)) = (indices, self.steps) else {
            return Ok(program.map(continue_here).collect());
        };
        let unknown = || damage_error("it refers to a schedule that is not there");
        let saved = indices
            .iter()
            .map(|index| self.schedules.get(*index).cloned().ok_or_else(unknown));
        // Schedules of an earlier file are dropped, because this file replaces them.
        let of_program = program.filter(|schedule| !schedule.is_from_file);
        saved
            .chain(of_program.map(|schedule| Ok(continue_here(schedule))))
            .collect()
    }

    /// The schedules that a leaf goes on with, resolved in the optimiser that it will have. `record` is `None`
    /// if the leaf is left out.
    pub(super) fn resolve(
        &mut self,
        leaf: &Leaf,
        record: Option<&LeafRecord>,
        optimiser: &Arc<Optimiser>,
    ) -> Result<Option<Arc<Drives>>> {
        let indices = record.map(|record| &record.schedules);
        let resolved = self
            .merge(indices, leaf.schedules().cloned())
            .and_then(|schedules| self.resolver.resolve(optimiser, schedules.into_iter()))?;
        match resolved.missing.first() {
            Some(field) => Err(damage_error(format_args!(
                "a schedule drives {field:?}, which the rule lacks"
            ))),
            None => Ok(resolved.drives),
        }
    }
}
