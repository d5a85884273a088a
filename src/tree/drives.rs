//! Schedules resolved in an optimiser: which numbers of its fields they drive.
//!
//! No step fails because of one schedule. Two schedules on the numbers of one field can cross between their
//! extremes, and `acting_optimiser` then refuses the step. Whenever a leaf gets a schedule or another
//! optimiser:
//! 1. `driven_numbers` finds the numbers by the name of the field: a learning rate (in a chain the last one),
//!    a real field, or one number of a pair (`beta1`).
//! 2. A schedule replaces earlier ones of the same numbers, also under another name (`eta` and `1.eta`).
//! 3. `Drives::check` tries the steps with the least and the greatest value of each curve in a copy of the
//!    optimiser.
//!
//! A relative schedule multiplies the leaf's own value. A schedule that is not relative replaces the own
//! value, so its leaves must have equal own values (`check_equal_own_values`), which must not change while the
//! schedule runs (`check_same_own_value`).

use std::cell::LazyCell;
use std::collections::HashMap;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::rest_below;
use super::schedule::{Curve, Schedule, saturating};
use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::FieldValue;
use crate::rule::{
    Adjust, Described, Description, FieldDescription, FieldValues, Optimiser, RateField, Rates, is_same_rate,
    out_of_range, unreachable_rate_error,
};

/// The remedy if a schedule would make different own values equal.
const FLATTENED: &str = "multiply each leaf's own value by the schedule with `Schedule::relative`, give \
                         parts of the model schedules of their own with `state.at(path)?.schedule(..)`, or \
                         first `adjust` the leaves to one value";

/// A number of an optimiser: the index of its field, and its index in a pair or in three numbers.
pub(crate) type NumberPlace = (usize, Option<usize>);

/// A schedule that was given to leaves.
#[derive(Clone, Debug)]
pub(crate) struct ScheduleAssignment {
    pub(crate) schedule: Arc<Schedule>,
    /// The count of steps when the schedule was given or restored.
    pub(crate) since: u64,
    /// Whether the schedule comes from a file, and the program has given no schedule for the field.
    pub(crate) is_from_file: bool,
    /// The schedule of the restored file for this field, if the program gave another. A warning names both.
    pub(super) file_schedule: Option<Arc<Schedule>>,
}

impl ScheduleAssignment {
    pub(crate) fn new(schedule: Schedule, since: u64, is_from_file: bool) -> Self {
        ScheduleAssignment {
            schedule: Arc::new(schedule),
            since,
            is_from_file,
            file_schedule: None,
        }
    }

    /// The program's schedule after a file with this count of steps was restored.
    pub(crate) fn restored_at(&self, steps: u64) -> Self {
        ScheduleAssignment {
            since: steps,
            file_schedule: None,
            ..self.clone()
        }
    }

    /// Replaces an earlier schedule of the same numbers, and keeps the file's schedule for the warning.
    fn replace(&mut self, earlier: ScheduleAssignment) {
        if earlier.schedule == self.schedule {
            self.file_schedule = self.file_schedule.take().or(earlier.file_schedule);
        } else if earlier.is_from_file && !self.is_from_file && earlier.since == self.since {
            // At another count of steps no warning is due, because a schedule that the program gives after
            // steps under the file's schedule begins a new phase on purpose.
            self.file_schedule = Some(earlier.schedule);
        }
    }
}

/// Adds a schedule to those of all leaves, where it replaces the schedule of the same field.
pub(crate) fn give_to_all(for_all: &mut Vec<ScheduleAssignment>, assignment: ScheduleAssignment) {
    for_all.retain(|earlier| earlier.schedule.driven_field() != assignment.schedule.driven_field());
    for_all.push(assignment);
}

/// A number that a schedule sets in an optimiser.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DrivenNumber {
    /// The field, with the leaf's own value of the number.
    pub(crate) field: RateField,
    /// The index in a pair or in three numbers.
    pub(crate) part: Option<usize>,
}

/// The numbers that a schedule sets: one number, or one in each alternative.
type DrivenNumbers = SmallVec<[DrivenNumber; 1]>;

/// A schedule of a leaf, with the numbers that it drives there.
#[derive(Clone, Debug)]
struct Drive {
    assignment: ScheduleAssignment,
    numbers: DrivenNumbers,
}

/// The schedules of a leaf, in the order in which they were given.
#[derive(Clone, Debug, Default)]
pub(crate) struct Drives(Vec<Drive>);

/// Schedules that were resolved in an optimiser.
#[derive(Clone, Default)]
pub(crate) struct ResolvedSchedules {
    pub(crate) drives: Option<Arc<Drives>>,
    /// The fields that the optimiser lacks.
    pub(crate) missing: Vec<String>,
}

/// Resolves schedules in optimisers. Leaves with the same optimiser and schedules share the result.
#[derive(Default)]
pub(crate) struct ScheduleResolver {
    cache: HashMap<ResolverKey, (Arc<Optimiser>, ResolvedSchedules)>,
}

/// The address of an optimiser, and for each assignment the addresses of its schedule and `file_schedule`.
/// The optimiser is kept alive in `cache`, so that no other optimiser gets its address.
type ResolverKey = (*const (), Vec<(*const Schedule, Option<*const Schedule>)>);

impl ScheduleResolver {
    /// Resolves schedules in an optimiser. A later schedule replaces earlier ones of the same numbers.
    ///
    /// # Errors
    /// If a field is no real number or several members of a chain have it; if no value of the last member of
    /// a chain makes a rate right; if a value of any step is out of range.
    pub(crate) fn resolve(
        &mut self,
        optimiser: &Arc<Optimiser>,
        assignments: impl Iterator<Item = ScheduleAssignment>,
    ) -> Result<ResolvedSchedules> {
        let assignments: Vec<ScheduleAssignment> = assignments.collect();
        if assignments.is_empty() {
            return Ok(ResolvedSchedules::default());
        }
        let address = |ScheduleAssignment {
                           schedule,
                           file_schedule,
                           ..
                       }: &ScheduleAssignment| {
            (Arc::as_ptr(schedule), file_schedule.as_ref().map(Arc::as_ptr))
        };
        let key = (
            Arc::as_ptr(optimiser).cast(),
            assignments.iter().map(address).collect(),
        );
        if let Some((_, resolved)) = self.cache.get(&key) {
            return Ok(resolved.clone());
        }
        let resolved = resolve(optimiser, assignments)?;
        self.cache.insert(key, (optimiser.clone(), resolved.clone()));
        Ok(resolved)
    }
}

fn resolve(optimiser: &Optimiser, assignments: Vec<ScheduleAssignment>) -> Result<ResolvedSchedules> {
    let (mut drives, mut missing) = (Drives::default(), Vec::new());
    for assignment in assignments {
        let schedule = assignment.schedule.clone();
        if !drives.add(assignment, optimiser)? {
            missing.push(schedule.driven_field().to_string());
        }
    }
    drives.check(optimiser)?;
    Ok(ResolvedSchedules {
        drives: (!drives.0.is_empty()).then(|| Arc::new(drives)),
        missing,
    })
}

/// Whether two names of fields reach the same numbers of a chain, as `eta` and `1.eta` do.
fn names_overlap(name: &str, other: &str) -> bool {
    let [(place, field), (other_place, other_field)] =
        [name, other].map(|name| name.rsplit_once('.').unwrap_or(("", name)));
    field == other_field
        && (rest_below(place, other_place).is_some() || rest_below(other_place, place).is_some())
}

/// The numbers that a name drives in an optimiser; `None` if it has no such field.
pub(crate) fn driven_numbers(name: &str, optimiser: &Description) -> Result<Option<DrivenNumbers>> {
    if let Some(rates) = Rates::for_name(optimiser, name) {
        let fields = rates.fields(optimiser)?.into_iter();
        return Ok(Some(
            fields.map(|field| DrivenNumber { field, part: None }).collect(),
        ));
    }
    let single = |index, part, value| {
        let field = RateField {
            index,
            value,
            others: None,
        };
        Some(smallvec![DrivenNumber { field, part }])
    };
    let (fields, part) = optimiser.numbers_named(name);
    match (&fields[..], part) {
        ([], _) => Ok(None),
        (
            [
                FieldDescription {
                    index,
                    value: FieldValue::Real(value),
                    ..
                },
            ],
            None,
        ) => Ok(single(*index, None, *value)),
        ([field], Some(part)) => Ok(field
            .value
            .numbers()
            .get(part)
            .and_then(|value| single(field.index, Some(part), *value))),
        ([FieldDescription { value, .. }], None) => {
            let remedy = "name a field that is a real number, or one number of a pair, as in `beta1`";
            Err(Error::new(ErrorKind::Argument, format!("its {name} is"))
                .with_got(value)
                .with_expected(format_args!(
                    "{}, as a schedule gives",
                    FieldValue::Real(0.0).expected()
                ))
                .with_remedy(remedy))
        }
        (fields, part) => Err(several_error(name, optimiser, fields, part)),
    }
}

/// The error that several members of a chain have the field.
fn several_error(
    name: &str,
    optimiser: &Description,
    fields: &[FieldDescription],
    part: Option<usize>,
) -> Error {
    let places = optimiser.places();
    let got: Vec<String> = fields
        .iter()
        .map(|field| format!("{} = {}", places[field.index], field.value))
        .collect();
    let field_place = &places[fields[0].index];
    let place = part.map_or(field_place.to_string(), |part| {
        format!("{field_place}{}", part + 1)
    });
    let remedy = format!(
        "name the one to drive with its place, as in `Schedule::field({place:?})` (or \
         `ReduceOnPlateau::field`)"
    );
    Error::new(
        ErrorKind::Argument,
        format!("several members of its chain have {name}:"),
    )
    .with_got(got.join(", "))
    .with_remedy(remedy)
}

/// The values of those fields of an optimiser that have these numbers, with the numbers set.
pub(crate) fn fields_with(
    optimiser: &Optimiser,
    numbers: impl Iterator<Item = (NumberPlace, f64)>,
) -> FieldValues {
    let mut values = FieldValues::new();
    let fields = LazyCell::new(|| optimiser.fields());
    let mut numbers: SmallVec<[(NumberPlace, f64); 4]> = numbers.collect();
    numbers.sort_by_key(|(place, _)| *place);
    for ((index, part), number) in numbers {
        let Some(part) = part else {
            values.push((index, number.into()));
            continue;
        };
        // Both numbers of a pair may be set, each by its schedule. The second number then goes into the value
        // that has the first.
        match values.last_mut() {
            Some((last, value)) if *last == index => *value = value.with_number(part, number),
            _ => values.extend(
                fields
                    .get(index)
                    .map(|(_, value)| (index, value.with_number(part, number))),
            ),
        }
    }
    values
}

impl DrivenNumber {
    pub(crate) fn place(&self) -> NumberPlace {
        (self.field.index, self.part)
    }
}

impl Drive {
    /// The values of all driven numbers at a value of the curve.
    fn values(&self, curve_value: f64) -> impl Iterator<Item = (NumberPlace, f64)> {
        let value =
            move |DrivenNumber { field, .. }: &DrivenNumber| match self.assignment.schedule.is_relative {
                true => saturating(field.value, curve_value),
                // `check` has refused curves with a value for which `value_for` returns `None`.
                false => field.value_for(curve_value).unwrap_or(field.value),
            };
        self.numbers
            .iter()
            .map(move |number| (number.place(), value(number)))
    }
}

impl Drives {
    /// Tries the steps with the least and the greatest value of each curve.
    ///
    /// A trial has the values of all schedules in its step, because two schedules may drive the two numbers
    /// of one pair.
    fn check(&self, optimiser: &Optimiser) -> Result<()> {
        for drive in &self.0 {
            let schedule = &*drive.assignment.schedule;
            for step in schedule.curve.extremes() {
                let (value, mut trial) = (schedule.at(step), optimiser.clone());
                if value.is_nan() {
                    let not_a_number = out_of_range("Schedule", schedule.driven_field(), value, "a number");
                    return Err(range_error(step).caused_by(not_a_number));
                }
                let mut fields = drive.numbers.iter().map(|number| &number.field);
                if !schedule.is_relative
                    && let Some(field) = fields.find(|field| field.value_for(value).is_none())
                {
                    return Err(unreachable_rate_error(optimiser.description(), field, value));
                }
                let values = fields_with(optimiser, self.values(step));
                trial.write(&values)?;
                self.check_trial(&trial, &values, step)?;
            }
        }
        Ok(())
    }

    /// Whether several schedules drive numbers of one field, so that there are fewer fields than numbers.
    fn share_fields(&self, fields: &FieldValues) -> bool {
        fields.len() < self.0.iter().map(|drive| drive.numbers.len()).sum()
    }

    /// Checks an optimiser with the values of a step, which are those of `fields`.
    fn check_trial(&self, trial: &Optimiser, fields: &FieldValues, step: u64) -> Result<()> {
        trial.check().map_err(|error| {
            let error = range_error(step).caused_by(error);
            if self.share_fields(fields) {
                error.with_remedy(
                    "if two schedules drive two numbers that have to be in order, let neither cross the \
                     other; to replace both schedules, first give the one that makes room",
                )
            } else {
                error
            }
        })
    }

    /// The values of all driven numbers in a step.
    fn values(&self, step: u64) -> impl Iterator<Item = (NumberPlace, f64)> {
        self.0
            .iter()
            .flat_map(move |drive| drive.values(drive.assignment.schedule.at(step)))
    }

    /// Adds a schedule, which replaces earlier schedules of the same numbers. Returns whether the optimiser
    /// has the field.
    fn add(&mut self, mut assignment: ScheduleAssignment, optimiser: &Optimiser) -> Result<bool> {
        let field = assignment.schedule.driven_field();
        let Some(numbers) = driven_numbers(field, optimiser.description())? else {
            return Ok(false);
        };
        let overlaps = |drive: &mut Drive| names_overlap(drive.assignment.schedule.driven_field(), field);
        let earlier_drives: Vec<Drive> = self.0.extract_if(.., overlaps).collect();
        earlier_drives
            .into_iter()
            .for_each(|earlier| assignment.replace(earlier.assignment));
        self.0.push(Drive { assignment, numbers });
        Ok(true)
    }

    pub(crate) fn assignments(&self) -> impl Iterator<Item = &ScheduleAssignment> {
        self.0.iter().map(|drive| &drive.assignment)
    }

    /// The schedule that drives a number of the field with this index.
    pub(crate) fn assignment_for(&self, field: usize) -> Option<&ScheduleAssignment> {
        let drives_field = |drive: &&Drive| drive.numbers.iter().any(|number| number.field.index == field);
        self.0.iter().find(drives_field).map(|drive| &drive.assignment)
    }

    /// The schedules of learning rates, each with the leaf's own rate.
    pub(super) fn rates(&self) -> impl Iterator<Item = (&Arc<Schedule>, f64)> {
        let rate_drives = self
            .0
            .iter()
            .filter(|drive| drive.assignment.schedule.drives_rate());
        rate_drives.flat_map(|drive| {
            drive
                .numbers
                .iter()
                .map(|number| (&drive.assignment.schedule, number.field.rate()))
        })
    }

    /// Whether a schedule of a learning rate has the value 0 in this step. A constant 0 does not count,
    /// because a program gives it on purpose.
    ///
    /// `checked` collects schedules whose value was computed, so that a schedule of several leaves is read
    /// once.
    pub(super) fn has_zero_rate(&self, step: u64, checked: &mut SmallVec<[*const Schedule; 4]>) -> bool {
        self.assignments().any(|ScheduleAssignment { schedule, .. }| {
            let address = Arc::as_ptr(schedule);
            if !schedule.drives_rate() || checked.contains(&address) {
                return false;
            }
            if checked.len() < checked.inline_size() {
                checked.push(address);
            }
            schedule.at(step) == 0.0 && !matches!(schedule.curve, Curve::Constant(_))
        })
    }

    /// A copy of the optimiser with the values of a step.
    ///
    /// # Errors
    /// If the rule describes other fields than when it got the schedules, or if two schedules on numbers of
    /// one field leave the range together.
    pub(super) fn acting_optimiser(&self, optimiser: &Optimiser, step: u64) -> Result<Optimiser> {
        let (values, mut acting) = (
            fields_with(optimiser, self.values(step)),
            optimiser.clone_to_describe(),
        );
        acting.write(&values)?;
        if self.share_fields(&values) {
            self.check_trial(&acting, &values, step)?;
        }
        Ok(acting)
    }
}

fn range_error(step: u64) -> Error {
    Error::new(
        ErrorKind::Argument,
        format!("in step {step} the schedule leaves the range"),
    )
}

/// Refuses different own values under one schedule that is not relative, because they would become equal.
pub(crate) fn check_equal_own_values<'l>(
    leaves: impl Iterator<Item = (&'l str, Option<&'l Drives>)>,
) -> Result<()> {
    let mut first_rates: HashMap<*const Schedule, (&str, f64)> = HashMap::new();
    for (path, drives) in leaves {
        let drives = drives.into_iter().flat_map(|drives| &drives.0);
        for drive in drives.filter(|drive| !drive.assignment.schedule.is_relative) {
            for rate in drive.numbers.iter().map(|number| number.field.rate()) {
                let key = Arc::as_ptr(&drive.assignment.schedule);
                let (first_path, first_rate) = *first_rates.entry(key).or_insert((path, rate));
                if !is_same_rate(first_rate, rate) {
                    let field = drive.assignment.schedule.driven_field();
                    let problem = format!(
                        "one schedule would make two different values equal: its {field}, {rate}, and that \
                         of {first_path:?}, {first_rate}"
                    );
                    return Err(Error::new(ErrorKind::Argument, problem)
                        .with_remedy(FLATTENED)
                        .at(path));
                }
            }
        }
    }
    Ok(())
}

/// Refuses a new own value under a schedule that is not relative, because the value would have no effect.
pub(super) fn check_same_own_value(old: Option<&Drives>, new: Option<&Drives>) -> Result<()> {
    let old_drives: SmallVec<[&Drive; 2]> = old.into_iter().flat_map(|drives| &drives.0).collect();
    let new_drives = new.into_iter().flat_map(|drives| &drives.0);
    for Drive {
        assignment: ScheduleAssignment { schedule, .. },
        numbers,
    } in new_drives
    {
        let old_drive = old_drives
            .iter()
            .find(|old| Arc::ptr_eq(&old.assignment.schedule, schedule));
        let Some(number) = old_drive
            .filter(|_| !schedule.is_relative)
            .and_then(|old| old.numbers.first())
        else {
            continue;
        };
        let (old_rate, mut rates) = (
            number.field.rate(),
            numbers.iter().map(|number| number.field.rate()),
        );
        if let Some(rate) = rates.find(|rate| !is_same_rate(old_rate, *rate)) {
            let field = schedule.driven_field();
            let problem = format!(
                "a schedule sets its {field}, so a new own value would have no effect; the own value would be"
            );
            return Err(Error::new(ErrorKind::Argument, problem)
                .with_got(rate)
                .with_expected(format_args!("{old_rate}, as before"))
                .with_remedy(
                    "give this field of the leaf another schedule by `state.at(path)?.schedule(..)`: one such \
                     as `Schedule::constant(..)`, or one that is `relative`, which multiplies the own value",
                ));
        }
    }
    Ok(())
}
