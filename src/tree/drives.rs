//! Schedules resolved in an optimiser: which numbers of its fields they drive.
//!
//! A step must not fail because of a schedule. So whenever a leaf gets a schedule or another optimiser:
//! 1. `driven_numbers` finds the numbers by the name of the field: a learning rate (in a chain the last one),
//!    a real field, or one number of a pair (`beta1`).
//! 2. A schedule replaces earlier ones of the same numbers, also by another name (`eta` and `1.eta`).
//! 3. `Drive::check` tries the least and the greatest value of the curve in a copy of the optimiser.
//!
//! A relative schedule multiplies the leaf's own value. Any other sets the value alone, so own values must be
//! equal in all its leaves (`check_one_rate`) and must not change under it (`check_same_own`).

use std::cell::LazyCell;
use std::collections::HashMap;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::below;
use super::schedule::{Curve, Schedule, saturating};
use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::FieldValue;
use crate::rule::{
    Adjust, Described, Description, FieldDescription, FieldValues, Optimiser, RateField, Rates, is_same_rate,
    out_of_range, unreachable_rate,
};

const FLATTENED: &str = "multiply each leaf's own value by the schedule with `Schedule::relative`, give \
                         parts of the model schedules of their own with `state.at(path)?.schedule(..)`, or \
                         first `adjust` the leaves to one value";

/// A number of an optimiser: the index of its field, and which number of a pair or of three it is.
pub(crate) type NumberPlace = (usize, Option<usize>);

/// A schedule as it was given to leaves.
#[derive(Clone, Debug)]
pub(crate) struct GivenSchedule {
    pub(crate) schedule: Arc<Schedule>,
    /// The count of steps when it was given, or restored.
    pub(crate) at: u64,
    /// Whether it comes from a file, and the program has given no schedule for the field.
    pub(crate) is_of_file: bool,
    /// The schedule of the restored file for this field, if the program gave another. A warning names both.
    pub(super) of_file: Option<Arc<Schedule>>,
}

impl GivenSchedule {
    pub(crate) fn new(schedule: Schedule, at: u64, is_of_file: bool) -> Self {
        GivenSchedule { schedule: Arc::new(schedule), at, is_of_file, of_file: None }
    }

    /// The program's schedule after a file was restored at this count of steps.
    pub(crate) fn restored_at(&self, at: u64) -> Self {
        GivenSchedule { at, of_file: None, ..self.clone() }
    }

    /// Replaces an earlier schedule of the same numbers, and keeps the file's for the warning.
    fn replace(&mut self, earlier: GivenSchedule) {
        if earlier.schedule == self.schedule {
            self.of_file = self.of_file.take().or(earlier.of_file);
        } else if earlier.is_of_file && !self.is_of_file && earlier.at == self.at {
            // Only at the same count of steps. After steps under the file's schedule, another schedule begins
            // a new phase on purpose, so no warning is due.
            self.of_file = Some(earlier.schedule);
        }
    }
}

/// Adds a schedule to those of all leaves. It replaces one of the same field.
pub(crate) fn give_to_all(all: &mut Vec<GivenSchedule>, given: GivenSchedule) {
    all.retain(|known| known.schedule.driven_field() != given.schedule.driven_field());
    all.push(given);
}

/// A number that a schedule sets in an optimiser.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DrivenNumber {
    /// The field, with the leaf's own value of the number.
    pub(crate) own: RateField,
    pub(crate) part: Option<usize>,
}

/// The numbers that a schedule sets: one, or one of each alternative.
type DrivenNumbers = SmallVec<[DrivenNumber; 1]>;

/// A schedule of a leaf, with the numbers that it drives there.
#[derive(Clone, Debug)]
struct Drive {
    given: GivenSchedule,
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

/// Resolves schedules in optimisers. Leaves with the same optimiser and schedules share the answer.
#[derive(Default)]
pub(crate) struct ScheduleResolver {
    made: HashMap<ResolverKey, (Arc<Optimiser>, ResolvedSchedules)>,
}

/// The addresses of an optimiser and of its schedules, each with the address of the file's schedule. The
/// optimiser is kept alive in `made`, so that no other gets its address.
type ResolverKey = (*const (), Vec<(*const Schedule, Option<*const Schedule>)>);

impl ScheduleResolver {
    /// Resolves schedules in an optimiser. A later schedule replaces earlier ones of the same numbers.
    ///
    /// # Errors
    /// If a field is no real number or several members of a chain have it; if no value of the last member of
    /// a chain makes a rate right; if a value of any step is out of range.
    pub(crate) fn of(
        &mut self,
        optimiser: &Arc<Optimiser>,
        given: impl Iterator<Item = GivenSchedule>,
    ) -> Result<ResolvedSchedules> {
        let given: Vec<GivenSchedule> = given.collect();
        if given.is_empty() {
            return Ok(ResolvedSchedules::default());
        }
        let address =
            |given: &GivenSchedule| (Arc::as_ptr(&given.schedule), given.of_file.as_ref().map(Arc::as_ptr));
        let key = (Arc::as_ptr(optimiser).cast(), given.iter().map(address).collect());
        if let Some((_, known)) = self.made.get(&key) {
            return Ok(known.clone());
        }
        let resolved = resolved(optimiser, given)?;
        self.made.insert(key, (optimiser.clone(), resolved.clone()));
        Ok(resolved)
    }
}

fn resolved(optimiser: &Optimiser, given: Vec<GivenSchedule>) -> Result<ResolvedSchedules> {
    let (mut drives, mut missing) = (Drives::default(), Vec::new());
    for given in given {
        let schedule = given.schedule.clone();
        if !drives.add(given, optimiser)? {
            missing.push(schedule.driven_field().to_string());
        }
    }
    drives.0.iter().try_for_each(|drive| drive.check(optimiser))?;
    Ok(ResolvedSchedules { drives: (!drives.0.is_empty()).then(|| Arc::new(drives)), missing })
}

/// Whether two names of fields reach the same numbers of a chain, as `eta` and `1.eta` do.
fn overlap(name: &str, other: &str) -> bool {
    let [(place, field), (other, other_field)] =
        [name, other].map(|name| name.rsplit_once('.').unwrap_or(("", name)));
    field == other_field && (below(place, other).is_some() || below(other, place).is_some())
}

/// The numbers that a name drives in an optimiser; `None` if it has no such field.
pub(crate) fn driven_numbers(name: &str, optimiser: &Description) -> Result<Option<DrivenNumbers>> {
    if let Some(rates) = Rates::named(optimiser, name) {
        let set = rates.fields(optimiser)?.into_iter();
        return Ok(Some(set.map(|own| DrivenNumber { own, part: None }).collect()));
    }
    let one = |index, part, value| {
        let own = RateField { index, value, others: None };
        Some(smallvec![DrivenNumber { own, part }])
    };
    let (found, part) = optimiser.numbers_named(name);
    match (&found[..], part) {
        ([], _) => Ok(None),
        ([FieldDescription { index, value: FieldValue::Real(value), .. }], None) => {
            Ok(one(*index, None, *value))
        }
        ([field], Some(part)) => {
            Ok(field.value.numbers().get(part).and_then(|own| one(field.index, Some(part), *own)))
        }
        ([FieldDescription { value, .. }], None) => {
            let remedy = "name a field that is a real number, or one number of a pair, as in `beta1`";
            Err(Error::new(ErrorKind::Argument, format!("its {name} is"))
                .with_got(value)
                .with_expected(format_args!("{}, as a schedule gives", FieldValue::Real(0.0).expected()))
                .with_remedy(remedy))
        }
        (several, part) => Err(has_several(name, optimiser, several, part)),
    }
}

fn has_several(
    name: &str,
    optimiser: &Description,
    several: &[FieldDescription],
    part: Option<usize>,
) -> Error {
    let places = optimiser.places();
    let got: Vec<String> =
        several.iter().map(|field| format!("{} = {}", places[field.index], field.value)).collect();
    let place = &places[several[0].index];
    let place = part.map_or(place.to_string(), |part| format!("{place}{}", part + 1));
    let remedy = format!(
        "name the one to drive with its place, as in `Schedule::field({place:?})` (or \
         `ReduceOnPlateau::field`)"
    );
    Error::new(ErrorKind::Argument, format!("several members of its chain have {name}:"))
        .with_got(got.join(", "))
        .with_remedy(remedy)
}

/// The values of fields with these numbers set.
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
        // Both numbers of a pair may be set, each by a schedule: the second then joins the first.
        match values.last_mut() {
            Some((known, value)) if *known == index => *value = value.with_number(part, number),
            _ => values.extend(fields.get(index).map(|(_, own)| (index, own.with_number(part, number)))),
        }
    }
    values
}

impl DrivenNumber {
    pub(crate) fn place(&self) -> NumberPlace {
        (self.own.index, self.part)
    }
}

impl Drive {
    /// The values of the numbers that follow from a value of the curve.
    fn values(&self, of_curve: f64) -> impl Iterator<Item = (NumberPlace, f64)> {
        let value = move |DrivenNumber { own, .. }: &DrivenNumber| match self.given.schedule.is_relative {
            true => saturating(own.value, of_curve),
            // A value exists, because `check` has refused curves without one.
            false => own.value_for(of_curve).unwrap_or(own.value),
        };
        self.numbers.iter().map(move |number| (number.place(), value(number)))
    }

    /// Tries the least and the greatest value of the curve, so that no step can leave the range.
    fn check(&self, optimiser: &Optimiser) -> Result<()> {
        let schedule = &*self.given.schedule;
        for step in schedule.curve.extremes() {
            let (value, mut tried) = (schedule.at(step), optimiser.clone());
            let leaves_range =
                || Error::new(ErrorKind::Argument, format!("in step {step} the schedule leaves the range"));
            if value.is_nan() {
                let no_number = out_of_range("Schedule", schedule.driven_field(), value, "a number");
                return Err(leaves_range().caused_by(no_number));
            }
            let mut rates = self.numbers.iter().map(|number| &number.own);
            if !schedule.is_relative
                && let Some(own) = rates.find(|own| own.value_for(value).is_none())
            {
                return Err(unreachable_rate(optimiser.description(), own, value));
            }
            tried.write(&fields_with(optimiser, self.values(value)))?;
            tried.check().map_err(|error| leaves_range().caused_by(error))?;
        }
        Ok(())
    }
}

impl Drives {
    /// A copy with one more schedule for the same optimiser. `None` if the optimiser lacks the field.
    ///
    /// # Errors
    /// As [`ScheduleResolver::of`]. Only the new schedule is checked.
    pub(super) fn with(&self, given: GivenSchedule, optimiser: &Optimiser) -> Result<Option<Drives>> {
        let mut drives = self.clone();
        let has_field = drives.add(given, optimiser)?;
        drives.0.last().filter(|_| has_field).map_or(Ok(()), |added| added.check(optimiser))?;
        Ok(has_field.then_some(drives))
    }

    /// Adds a schedule, which replaces those of the same numbers. Returns whether the optimiser has the field.
    fn add(&mut self, mut given: GivenSchedule, optimiser: &Optimiser) -> Result<bool> {
        let field = given.schedule.driven_field();
        let Some(numbers) = driven_numbers(field, optimiser.description())? else { return Ok(false) };
        let earlier = self.0.extract_if(.., |drive| overlap(drive.given.schedule.driven_field(), field));
        let earlier: Vec<Drive> = earlier.collect();
        earlier.into_iter().for_each(|earlier| given.replace(earlier.given));
        self.0.push(Drive { given, numbers });
        Ok(true)
    }

    pub(crate) fn given(&self) -> impl Iterator<Item = &GivenSchedule> {
        self.0.iter().map(|drive| &drive.given)
    }

    /// The schedule that drives a number of the field with this index.
    pub(crate) fn of_field(&self, field: usize) -> Option<&GivenSchedule> {
        let drives = |drive: &&Drive| drive.numbers.iter().any(|number| number.own.index == field);
        self.0.iter().find(drives).map(|drive| &drive.given)
    }

    /// The schedules of learning rates, each with the leaf's own rate.
    pub(super) fn rates(&self) -> impl Iterator<Item = (&Arc<Schedule>, f64)> {
        let of_rates = self.0.iter().filter(|drive| drive.given.schedule.drives_rate());
        of_rates
            .flat_map(|drive| drive.numbers.iter().map(|number| (&drive.given.schedule, number.own.rate())))
    }

    /// Whether a schedule of a learning rate is at 0 in this step. A constant 0 does not count, because
    /// somebody means it.
    ///
    /// `seen` has schedules above 0, so that leaves with one schedule compute its value once.
    pub(super) fn has_zero_rate(&self, step: u64, seen: &mut SmallVec<[*const Schedule; 4]>) -> bool {
        self.given().any(|GivenSchedule { schedule, .. }| {
            let address = Arc::as_ptr(schedule);
            if !schedule.drives_rate() || seen.contains(&address) {
                return false;
            }
            if seen.len() < seen.inline_size() {
                seen.push(address);
            }
            schedule.at(step) == 0.0 && !matches!(schedule.curve, Curve::Constant(_))
        })
    }

    /// A copy of the optimiser with the values of a step.
    ///
    /// # Errors
    /// If the rule describes other fields than when it got the schedules.
    pub(super) fn acting(&self, own: &Optimiser, step: u64) -> Result<Optimiser> {
        let numbers = self.0.iter().flat_map(|drive| drive.values(drive.given.schedule.at(step)));
        let (values, mut acting) = (fields_with(own, numbers), own.unread());
        acting.write(&values)?;
        Ok(acting)
    }
}

/// Refuses a schedule that is not relative if the leaves' own values differ, because it makes them equal.
pub(crate) fn check_one_rate<'l>(leaves: impl Iterator<Item = (&'l str, Option<&'l Drives>)>) -> Result<()> {
    let mut known: HashMap<*const Schedule, (&str, f64)> = HashMap::new();
    for (path, drives) in leaves {
        let absolute = drives.into_iter().flat_map(|drives| &drives.0);
        for drive in absolute.filter(|drive| !drive.given.schedule.is_relative) {
            for rate in drive.numbers.iter().map(|number| number.own.rate()) {
                let key = Arc::as_ptr(&drive.given.schedule);
                let (first, value) = *known.entry(key).or_insert((path, rate));
                if !is_same_rate(value, rate) {
                    let field = drive.given.schedule.driven_field();
                    let problem = format!(
                        "one schedule would make two different values equal: its {field}, {rate}, and that \
                         of {first:?}, {value}"
                    );
                    return Err(Error::new(ErrorKind::Argument, problem).with_remedy(FLATTENED).at(path));
                }
            }
        }
    }
    Ok(())
}

/// Refuses another own value under a schedule that is not relative, because it would have no effect.
pub(super) fn check_same_own(old: Option<&Drives>, new: Option<&Drives>) -> Result<()> {
    let old: SmallVec<[&Drive; 2]> = old.into_iter().flat_map(|old| &old.0).collect();
    for Drive { given: GivenSchedule { schedule, .. }, numbers } in new.into_iter().flat_map(|new| &new.0) {
        let before = old.iter().find(|old| Arc::ptr_eq(&old.given.schedule, schedule));
        let Some(before) = before.filter(|_| !schedule.is_relative).and_then(|old| old.numbers.first())
        else {
            continue;
        };
        let (before, mut rates) = (before.own.rate(), numbers.iter().map(|number| number.own.rate()));
        if let Some(rate) = rates.find(|rate| !is_same_rate(before, *rate)) {
            let field = schedule.driven_field();
            let problem = format!(
                "a schedule sets its {field}, so a new own value would have no effect; the own value would be"
            );
            return Err(Error::new(ErrorKind::Argument, problem)
                .with_got(rate)
                .with_expected(format_args!("{before}, as before"))
                .with_remedy(
                    "give this field of the leaf another schedule by `state.at(path)?.schedule(..)`: one such \
                     as `Schedule::constant(..)`, or one that is `relative`, which multiplies the own value",
                ));
        }
    }
    Ok(())
}
