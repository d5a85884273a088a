//! A step of a scheduler: all values are found and checked first, then set.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::Schedule;
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::rule::field::{Field, FieldValue};
use crate::rule::{
    RATE, RateField, RateFields, RatesDiffer, out_of_range, reached, unreachable_rate, with_places,
};
use crate::tree::{Adjustment, DriveCourse, DriveMark, Leaf, SetField, StateTree, available_in};

const FLATTENED: &str = "make it a factor of each leaf's own with `Schedule::relative`, give parts of the \
                         model schedules of their own with `Schedule::below` or `Schedule::select_where`, \
                         or `adjust` the leaves to one value first";

/// Whether a scheduler is new, and so where the leaves' own values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// The values in the leaves are their own.
    New,
    /// The leaves' own values are their bases in the state.
    Resumed,
    /// As [`Start::Resumed`], but a leaf that was added since has no base. The values are those of this step.
    Running(u64),
}

/// The values, bases and marks that leaves get.
pub(super) struct DriveStep {
    adjustment: Adjustment<'static>,
    bases: Vec<Vec<Base>>,
    marks: Vec<Marks>,
    /// The warning if another schedule, or another step of it, has driven the leaves before.
    warning: Option<Warning>,
}

/// The marks of a leaf's driven fields.
type Marks = SmallVec<[DriveMark; 1]>;

/// The base that a relative schedule multiplies, for the field with this index; `None` if it is no longer
/// driven by one.
type Base = (usize, Option<f64>);

/// The fields that schedules set in a leaf: index, and bits of the value.
pub(super) type FieldValues = SmallVec<[(usize, u64); 1]>;

/// What a schedule has found in the leaves so far.
#[derive(Clone, Default)]
struct DriveRecord<'s> {
    selected: Option<&'s Leaf>,
    has_field: bool,
    /// The first leaf it schedules, with the value before.
    driven: Option<(&'s Leaf, f64)>,
    has_base: bool,
    /// For a new schedule, the first leaf that another has driven already, with the value before.
    begun_anew: Option<(&'s Leaf, f64)>,
    /// For any other, the first leaf whose value is not the schedule's, with that value.
    mismatch: Option<(&'s Leaf, f64)>,
    /// The last optimiser and its driven fields, which the next leaf often shares.
    last: Option<(*const (), Option<DrivenFields>)>,
}

/// The fields that a name drives in a leaf.
#[derive(Clone, Debug)]
pub(super) struct DrivenFields {
    /// The fields that are set.
    pub(super) set: RateFields,
    /// The indices of all that the name reaches.
    reached: SmallVec<[usize; 1]>,
}

impl DriveStep {
    pub(super) fn new(schedules: &[Schedule], steps: u64, start: Start, state: &StateTree) -> Result<Self> {
        state.check_leaves()?;
        let before = if let Start::Running(before) = start { before } else { steps };
        let next =
            schedules.iter().map(|schedule| Next::of(schedule, before, steps)).collect::<Result<_>>()?;
        let mut search =
            Search { schedules, start, before, next, met: vec![DriveRecord::default(); schedules.len()] };
        let mut values = Vec::with_capacity(state.len());
        let (mut bases, mut marks) = (Vec::with_capacity(state.len()), Vec::with_capacity(state.len()));
        for leaf in state.leaves() {
            let (of_leaf, of_bases, of_marks) = search.leaf(leaf)?;
            values.push(of_leaf);
            bases.push(of_bases);
            marks.push(of_marks);
        }
        if !matches!(start, Start::Running(_)) {
            search.check_effect(state)?;
        }
        let warning = search.begun_anew(state)?.or_else(|| search.mismatch(state));
        Ok(DriveStep { adjustment: adjustment(&values, state.leaves())?, bases, marks, warning })
    }

    /// The values of this step, if those of all later steps are in range too.
    pub(super) fn whole(schedules: &[Schedule], steps: u64, start: Start, state: &StateTree) -> Result<Self> {
        let course = DriveStep::new(schedules, steps, start, state)?;
        let mut corners: Vec<u64> = schedules
            .iter()
            .flat_map(|schedule| schedule.curve.corners())
            .filter(|step| *step > steps)
            .collect();
        corners.sort_unstable();
        corners.dedup();
        for step in corners {
            let tried = DriveStep::new(schedules, step, start, state);
            let leaves_range =
                || Error::new(ErrorKind::Argument, format!("in step {step} the schedule leaves the range"));
            tried.map_err(|error| leaves_range().caused_by(error))?;
        }
        Ok(course)
    }

    pub(super) fn commit(self, state: &mut StateTree) {
        for ((leaf, bases), marks) in state.leaves.iter_mut().zip(self.bases).zip(self.marks) {
            bases.into_iter().for_each(|(field, base)| leaf.set_base(field, base));
            marks.into_iter().for_each(|mark| leaf.set_mark(mark));
        }
        self.adjustment.commit(&mut state.leaves);
        if let Some(warning) = self.warning {
            state.warnings.put_off(warning);
        }
    }
}

/// The value of a schedule in a step, and where the schedule is.
#[derive(Clone, Copy)]
struct Next {
    /// The value that leaves are expected to have, unless the schedule is new.
    before: f64,
    value: f64,
    course: DriveCourse,
}

impl Next {
    fn of(schedule: &Schedule, before: u64, steps: u64) -> Result<Self> {
        let value = schedule.at(steps);
        if value.is_nan() {
            return Err(out_of_range("Schedule", schedule.driven_field(), value, "a number"));
        }
        let course = if !schedule.curve.rests_from(steps) {
            DriveCourse::Moves
        } else if value == 0.0 && schedule.name() == RATE && !schedule.curve.rests_from(0) {
            // A rate that is 0 from the start is meant, so it is no warning.
            DriveCourse::IsOver
        } else {
            DriveCourse::Rests
        };
        Ok(Next { before: schedule.at(before), value, course })
    }
}

/// Sets these fields in the leaves.
pub(super) fn adjustment<'l>(
    values: &[FieldValues],
    leaves: impl Iterator<Item = &'l Leaf>,
) -> Result<Adjustment<'static>> {
    let keys = values.iter().map(|values| (!values.is_empty()).then_some(values));
    Adjustment::by_key(leaves, keys, |values| {
        values.iter().map(|&(field, bits)| (SetField::At(field), f64::from_bits(bits).into())).collect()
    })
}

struct Search<'s> {
    schedules: &'s [Schedule],
    start: Start,
    /// The step of [`Next::before`].
    before: u64,
    next: Vec<Next>,
    met: Vec<DriveRecord<'s>>,
}

impl<'s> Search<'s> {
    fn leaf(&mut self, leaf: &'s Leaf) -> Result<(FieldValues, Vec<Base>, Marks)> {
        let (mut values, mut bases, mut marks) = (FieldValues::new(), Vec::new(), Marks::new());
        // Earlier schedules, and the indices of all fields that their names reach.
        let mut before: SmallVec<[&Schedule; 1]> = SmallVec::new();
        let mut driven: SmallVec<[usize; 1]> = SmallVec::new();
        for (i, schedule) in self.schedules.iter().enumerate().filter(|(_, schedule)| schedule.selects(leaf))
        {
            let met = &mut self.met[i];
            met.selected = met.selected.or(Some(leaf));
            // After a drive of `0.eta`, a later drive of `eta` must not touch this leaf's other members.
            if before.iter().any(|before| schedule.driven_field() == before.name()) {
                met.has_field = true;
                continue;
            }
            let optimiser = Arc::as_ptr(&leaf.optimiser).cast::<()>();
            let found = match &met.last {
                Some((last, found)) if *last == optimiser => found.clone(),
                _ => driven_fields(schedule.driven_field(), leaf)?,
            };
            met.last = Some((optimiser, found.clone()));
            let Some(DrivenFields { set, reached }) = found else { continue };
            met.has_field = true;
            // A member's rate that is a part of a driven learning rate is driven already.
            if reached.iter().any(|field| driven.contains(field)) {
                continue;
            }
            before.push(schedule);
            driven.extend(reached);
            for field in set {
                let (next, base) = self.next(i, leaf, &field)?;
                bases.extend(base);
                let Next { value, course, .. } = self.next[i];
                let factor = schedule.is_relative.then_some(value);
                marks.push(DriveMark { field: field.index, factor, since: leaf.steps(), course });
                if next != field.value {
                    values.push((field.index, next.to_bits()));
                }
            }
        }
        Ok((values, bases, marks))
    }

    /// The new value of a field under a schedule, and its base if that changes.
    fn next(&mut self, index: usize, leaf: &'s Leaf, field: &RateField) -> Result<(f64, Option<Base>)> {
        let (schedule, Next { before: expected, value: next, .. }) =
            (&self.schedules[index], self.next[index]);
        let (met, before) = (&mut self.met[index], field.rate());
        let (first, value) = *met.driven.get_or_insert((leaf, before));
        let kept = leaf.base_of(field.index);
        // Before any step a schedule can be made anew, unless it would multiply twice.
        let has_begun = leaf.steps() > 0 || kept.is_some();
        if self.start == Start::New
            && leaf.mark_of(field.index).is_some()
            && (has_begun || schedule.is_relative)
        {
            met.begun_anew.get_or_insert((leaf, before));
        }
        if self.start != Start::New
            && let Some(mark) = leaf.mark_of(field.index)
        {
            // Of a rate that is a product, another member may have been adjusted by hand.
            let found =
                if schedule.is_relative { mark.factor } else { field.others.is_none().then_some(before) };
            let mismatch = found.filter(|found| !is_about(*found, expected) && !is_about(*found, next));
            met.mismatch = met.mismatch.or(mismatch.map(|found| (leaf, found)));
        }
        if schedule.is_relative {
            met.has_base |= kept.is_some();
            let base = kept.filter(|_| self.start != Start::New).unwrap_or(field.value);
            return Ok((base * next, (kept != Some(base)).then_some((field.index, Some(base)))));
        }
        if !is_same_rate(value, before) {
            let (field, first) = (schedule.driven_field(), first.path());
            let problem = format!(
                "one schedule would make its {field}, {before}, and that of {first:?}, {value}, equal"
            );
            return Err(Error::new(ErrorKind::Argument, problem).with_remedy(FLATTENED).at(leaf.path()));
        }
        let refused =
            || unreachable_rate(&mut *dyn_clone::clone_box(leaf.optimiser()), field, next).at(leaf.path());
        Ok((field.value_for(next).ok_or_else(refused)?, kept.map(|_| (field.index, None))))
    }

    /// Refuses a relative schedule that begins anew on driven leaves, and warns of any other.
    fn begun_anew(&self, state: &StateTree) -> Result<Option<Warning>> {
        let mut warning = None;
        for ((schedule, met), Next { value: now, .. }) in self.schedules.iter().zip(&self.met).zip(&self.next)
        {
            let Some((leaf, value)) = met.begun_anew else { continue };
            let (path, field) = (leaf.path().to_string(), schedule.driven_field().to_string());
            let steps = state.leaves().map(Leaf::steps).max().unwrap_or(0);
            if schedule.is_relative {
                let problem =
                    format!("a new relative schedule would multiply the {field} that another has made,");
                let remedy = format!(
                    "go on with `Scheduler::resume(.., steps, ..)` (this state counts {steps} steps); for a \
                     new schedule that is meant, set what it starts from with `adjust` before \
                     `Scheduler::new`"
                );
                return Err(Error::new(ErrorKind::Argument, problem)
                    .with_got(value)
                    .with_remedy(remedy)
                    .at(&path));
            }
            warning =
                warning.or(Some(Warning::ScheduleBegunAnew { path, field, before: value, now: *now, steps }));
        }
        Ok(warning)
    }

    /// Warns of leaves whose values are those of another schedule, or of another step.
    fn mismatch(&self, state: &StateTree) -> Option<Warning> {
        let mut met = self.schedules.iter().zip(&self.met).zip(&self.next);
        let (schedule, expected, (leaf, found)) =
            met.find_map(|((schedule, met), next)| Some((schedule, next.before, met.mismatch?)))?;
        Some(Warning::ScheduleMismatch {
            path: leaf.path().to_string(),
            field: schedule.driven_field().to_string(),
            is_factor: schedule.is_relative,
            found,
            expected,
            step: self.before,
            steps: state.leaves().map(Leaf::steps).max().unwrap_or(0),
        })
    }

    /// Refuses a schedule that drives nothing, and a relative one without a base.
    fn check_effect(&self, state: &StateTree) -> Result<()> {
        for (i, (schedule, met)) in self.schedules.iter().zip(&self.met).enumerate() {
            let field = schedule.driven_field();
            let Some(leaf) = met.selected else { return Err(schedule.empty(state)) };
            if !met.has_field {
                let available = available_in(state.leaves().filter(|leaf| schedule.selects(leaf)), field);
                return Err(Error::unknown("field", field, &available));
            }
            if met.driven.is_none() {
                let problem = format!(
                    "the schedule with the index {i} drives nothing: its {field}, and that of all leaves \
                     that it selects, is driven by one before it"
                );
                let remedy = "leave it out, or put it before the others";
                return Err(Error::new(ErrorKind::Argument, problem).with_remedy(remedy).at(leaf.path()));
            }
            if schedule.is_relative && self.start == Start::Resumed && !met.has_base {
                let problem = format!(
                    "no leaf knows which {field} a relative schedule started from: the state was never \
                     driven by one"
                );
                let remedy = "set the values of step 0 with `adjust`, make the scheduler with `new`, and \
                              `go_to` the step";
                return Err(Error::new(ErrorKind::Argument, problem).with_remedy(remedy));
            }
        }
        Ok(())
    }
}

/// Whether rates are equal up to the rounding of a product that was divided before.
fn is_same_rate(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= 2.0 * f64::EPSILON * a.abs()
}

/// Whether values are equal but for the arithmetic of another program.
fn is_about(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * a.abs().max(b.abs()) + 1e-12
}

/// The fields that this name drives in a leaf; `None` if the leaf has no such field.
pub(super) fn driven_fields(name: &str, leaf: &Leaf) -> Result<Option<DrivenFields>> {
    let refused = |problem: String| Error::new(ErrorKind::Argument, problem).at(leaf.path());
    if let Some(rates) = leaf.optimiser().rates(name) {
        let differ = |differ: RatesDiffer| {
            differ.in_rule(&mut *dyn_clone::clone_box(leaf.optimiser())).at(leaf.path())
        };
        return Ok(Some(DrivenFields { set: rates.fields().map_err(differ)?, reached: rates.indices() }));
    }
    match reached(leaf.optimiser(), name)[..] {
        [] => Ok(None),
        [(index, FieldValue::Real(value))] => Ok(Some(DrivenFields {
            set: smallvec![RateField { index, value, others: None }],
            reached: smallvec![index],
        })),
        [(_, value)] => Err(refused(format!("its {name} is"))
            .with_got(value)
            .with_expected(format_args!("{}, as a schedule gives", f64::EXPECTED))
            .with_remedy("name a field that is a real number")),
        ref several => {
            let members = with_places(leaf.optimiser(), several);
            let place = members.first().map_or("", |(place, _)| place);
            let got = members
                .iter()
                .map(|(place, value)| format!("{place} = {value}"))
                .collect::<Vec<_>>()
                .join(", ");
            let remedy = format!(
                "name the one to drive with its place, as in `Schedule::field({place:?})` (or \
                 `ReduceOnPlateau::field`)"
            );
            Err(refused(format!("several members of its chain have {name}:"))
                .with_got(got)
                .with_remedy(remedy))
        }
    }
}
