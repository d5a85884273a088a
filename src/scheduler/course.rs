//! What a step of a scheduler changes: everything is found and checked, then everything is set.

use std::sync::Arc;

use smallvec::SmallVec;

use super::Schedule;
use crate::error::{Error, Result, ScheduleError};
use crate::field::FieldValue;
use crate::rule::{reached, with_places};
use crate::tree::{Adjustment, DriveCourse, DriveMark, Leaf, StateTree, available_in};
use crate::warning::Warning;

/// Whether a scheduler is new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// The values that leaves have are their own.
    New,
    /// The values that were their own are in the state.
    Resumed,
    /// As [`Start::Resumed`], but a leaf that was added since has no such value.
    Running,
}

/// What leaves get.
pub(super) struct Course<'d> {
    adjustment: Adjustment<'d>,
    bases: Vec<Vec<Base>>,
    marks: Vec<Marks>,
    /// Where a schedule has driven the leaves before.
    begun_anew: Option<Warning>,
}

/// The marks of a leaf's driven fields.
type Marks = SmallVec<[DriveMark; 1]>;

/// A value that a relative schedule starts from: that of the field with this index, or `None` where it is not driven by such a one any more.
type Base = (usize, Option<f64>);

/// What schedules set in a leaf: its index, and the bits of the value.
type Driven = SmallVec<[(usize, u64); 1]>;

/// What a schedule has met so far.
#[derive(Clone, Copy, Default)]
struct Met<'s> {
    selected: Option<&'s Leaf>,
    has_field: bool,
    /// The first leaf it schedules, with the value before.
    driven: Option<(&'s Leaf, f64)>,
    has_base: bool,
    /// The first leaf that a schedule has driven already where this one is new, with the value before.
    begun_anew: Option<(&'s Leaf, f64)>,
    /// The last optimiser and its field, which the next leaf often shares.
    last: Option<(*const (), Option<RealField>)>,
}

/// A field by its index, and its value.
pub(super) type RealField = (usize, f64);

impl<'d> Course<'d> {
    pub(super) fn new(schedules: &'d [Schedule], steps: u64, start: Start, state: &StateTree) -> Result<Self> {
        let mut search = Search { schedules, start, next: Vec::new(), met: vec![Met::default(); schedules.len()] };
        search.next = schedules.iter().map(|schedule| Next::of(schedule, steps)).collect::<Result<_>>()?;
        let mut values = Vec::with_capacity(state.len());
        let (mut bases, mut marks) = (Vec::with_capacity(state.len()), Vec::with_capacity(state.len()));
        for leaf in state.leaves() {
            let (of_leaf, of_bases, of_marks) = search.leaf(leaf)?;
            values.push(of_leaf);
            bases.push(of_bases);
            marks.push(of_marks);
        }
        if start != Start::Running {
            search.expect_effect(state)?;
        }
        let begun_anew = search.begun_anew(state)?;
        Ok(Course { adjustment: adjustment(schedules, &values, state)?, bases, marks, begun_anew })
    }

    /// The values of this step, where those of all later steps are in range, too.
    pub(super) fn whole(schedules: &'d [Schedule], steps: u64, start: Start, state: &StateTree) -> Result<Self> {
        let course = Course::new(schedules, steps, start, state)?;
        let mut corners: Vec<u64> = schedules.iter().flat_map(|schedule| schedule.curve.corners()).filter(|step| *step > steps).collect();
        corners.sort_unstable();
        corners.dedup();
        for step in corners {
            let tried = Course::new(schedules, step, start, state);
            tried.map_err(|error| ScheduleError::LeavesRange { step, source: Box::new(error) })?;
        }
        Ok(course)
    }

    pub(super) fn commit(self, state: &mut StateTree) {
        for ((leaf, bases), marks) in state.leaves.iter_mut().zip(self.bases).zip(self.marks) {
            bases.into_iter().for_each(|(field, base)| leaf.set_base(field, base));
            marks.into_iter().for_each(|mark| leaf.set_mark(mark));
        }
        self.adjustment.commit(&mut state.leaves);
        if let Some(warning) = self.begun_anew {
            state.warnings.put_off(warning);
        }
    }
}

/// What a schedule says for a step.
#[derive(Clone, Copy)]
struct Next {
    value: f64,
    course: DriveCourse,
}

impl Next {
    fn of(schedule: &Schedule, steps: u64) -> Result<Self> {
        let value = schedule.at(steps);
        if value.is_nan() {
            return Err(Error::out_of_range("Schedule", schedule.driven_field(), value, "a number"));
        }
        let course = match () {
            () if !schedule.curve.rests_from(steps) => DriveCourse::Moves,
            // Who writes a rate that is 0 from the start means it.
            () if value == 0.0 && schedule.name() == "eta" && !schedule.curve.rests_from(0) => DriveCourse::IsOver,
            () => DriveCourse::Rests,
        };
        Ok(Next { value, course })
    }
}

/// The values that schedules set in the leaves.
fn adjustment<'d>(schedules: &'d [Schedule], values: &[Driven], state: &StateTree) -> Result<Adjustment<'d>> {
    let keys = values.iter().map(|values| (!values.is_empty()).then_some(values));
    Adjustment::by_key(state.leaves(), keys, |values| {
        values.iter().map(|&(schedule, bits)| (schedules[schedule].driven_field(), f64::from_bits(bits).into())).collect()
    })
}

struct Search<'s> {
    schedules: &'s [Schedule],
    start: Start,
    next: Vec<Next>,
    met: Vec<Met<'s>>,
}

impl<'s> Search<'s> {
    fn leaf(&mut self, leaf: &'s Leaf) -> Result<(Driven, Vec<Base>, Marks)> {
        let (mut values, mut bases, mut marks) = (Driven::new(), Vec::new(), Marks::new());
        // The schedules before, each with the index of its field.
        let mut driven: SmallVec<[(&Schedule, usize); 1]> = SmallVec::new();
        for (i, schedule) in self.schedules.iter().enumerate().filter(|(_, schedule)| schedule.selects(leaf)) {
            let met = &mut self.met[i];
            met.selected = met.selected.or(Some(leaf));
            // A schedule for the rest means other leaves, and not what a place before it has left out.
            if driven.iter().any(|(before, _)| schedule.driven_field() == before.name()) {
                met.has_field = true;
                continue;
            }
            let optimiser = Arc::as_ptr(&leaf.optimiser).cast::<()>();
            let found = match met.last {
                Some((last, found)) if last == optimiser => found,
                _ => field_of(schedule.driven_field(), leaf)?,
            };
            met.last = Some((optimiser, found));
            let Some((field, before)) = found else { continue };
            met.has_field = true;
            if driven.iter().any(|(_, known)| *known == field) {
                continue;
            }
            driven.push((schedule, field));
            let (next, base) = self.next(i, leaf, field, before)?;
            bases.extend(base);
            let Next { value, course } = self.next[i];
            marks.push(DriveMark { field, factor: schedule.is_relative.then_some(value), since: leaf.steps(), course });
            if next != before {
                values.push((i, next.to_bits()));
            }
        }
        Ok((values, bases, marks))
    }

    /// What a schedule makes of the value of a field, and the base that changes.
    fn next(&mut self, index: usize, leaf: &'s Leaf, field: usize, before: f64) -> Result<(f64, Option<Base>)> {
        let (schedule, Next { value: next, .. }) = (&self.schedules[index], self.next[index]);
        let met = &mut self.met[index];
        let (first, value) = *met.driven.get_or_insert((leaf, before));
        let kept = leaf.base_of(field);
        // A schedule that has set no step's rate yet can be made anew, unless that multiplies.
        let has_begun = leaf.steps() > 0 || kept.is_some();
        if self.start == Start::New && leaf.mark_of(field).is_some() && (has_begun || schedule.is_relative) {
            met.begun_anew.get_or_insert((leaf, before));
        }
        if schedule.is_relative {
            met.has_base |= kept.is_some();
            let base = kept.filter(|_| self.start != Start::New).unwrap_or(before);
            return Ok((base * next, (kept != Some(base)).then_some((field, Some(base)))));
        }
        if value != before {
            let (first, other) = ((first.path().to_string(), value), (leaf.path().to_string(), before));
            return Err(ScheduleError::Flattened { field: schedule.driven_field().to_string(), first, other }.into());
        }
        Ok((next, kept.map(|_| (field, None))))
    }

    /// Refuses a relative schedule that begins anew where one has driven leaves before, and warns of another.
    fn begun_anew(&self, state: &StateTree) -> Result<Option<Warning>> {
        let mut warning = None;
        for ((schedule, met), Next { value: now, .. }) in self.schedules.iter().zip(&self.met).zip(&self.next) {
            let Some((leaf, value)) = met.begun_anew else { continue };
            let (path, field) = (leaf.path().to_string(), schedule.driven_field().to_string());
            let steps = state.leaves().map(Leaf::steps).max().unwrap_or(0);
            if schedule.is_relative {
                return Err(ScheduleError::BegunAnew { field, path, value, steps }.into());
            }
            warning = warning.or(Some(Warning::ScheduleBegunAnew { path, field, before: value, now: *now, steps }));
        }
        Ok(warning)
    }

    /// Refuses a schedule that drives nothing, and a relative one that has nothing to start from.
    fn expect_effect(&self, state: &StateTree) -> Result<()> {
        for (i, (schedule, met)) in self.schedules.iter().zip(&self.met).enumerate() {
            let field = schedule.driven_field().to_string();
            let Some(leaf) = met.selected else { return Err(schedule.empty(state)) };
            if !met.has_field {
                let available = available_in(state.leaves().filter(|leaf| schedule.selects(leaf)), &field);
                return Err(Error::UnknownField { name: field, available });
            }
            if met.driven.is_none() {
                return Err(ScheduleError::Idle { schedule: i, field, path: leaf.path().to_string() }.into());
            }
            if schedule.is_relative && self.start == Start::Resumed && !met.has_base {
                return Err(ScheduleError::NoBase { field }.into());
            }
        }
        Ok(())
    }
}

/// The field of this name that is to be set in a leaf; `None` if the leaf has no such field.
pub(super) fn field_of(name: &str, leaf: &Leaf) -> Result<Option<RealField>> {
    let (path, field) = (|| leaf.path().to_string(), || name.to_string());
    match reached(leaf.optimiser(), name)[..] {
        [] => Ok(None),
        [(index, FieldValue::Real(value))] => Ok(Some((index, value))),
        [(_, value)] => Err(ScheduleError::NotReal { path: path(), field: field(), value }.into()),
        ref several => {
            let members = with_places(leaf.optimiser(), several);
            Err(ScheduleError::SeveralMembers { path: path(), field: field(), members }.into())
        }
    }
}
