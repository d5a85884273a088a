//! Leaves and states whose hyper-parameters schedules drive.
//!
//! [`DriveMark`] marks a driven field. `Selection::replace` sets the driven rate in the new optimiser by the
//! mark. A new schedule on a driven state is refused or warned of.

use smallvec::SmallVec;

use super::marks::{DriveCourse, DriveMark};
use super::{Leaf, StateTree};
use crate::error::Result;
use crate::error::warning::Warning;
use crate::rule::{FieldValue, Optimiser, RATE, RateField, RateFields, reached};

/// The steps on one value of a moving schedule after which it counts as not advanced.
const FORGOTTEN: u64 = 100;

/// The drives of a leaf that another optimiser takes over.
#[derive(Default)]
pub(super) struct CarriedDrives {
    pub(super) marks: Vec<DriveMark>,
    pub(super) bases: Vec<(usize, f64)>,
    /// The fields to set in the other optimiser.
    pub(super) values: Vec<(usize, f64)>,
}

impl CarriedDrives {
    /// The values as a key: leaves with one key share an optimiser.
    pub(super) fn key(&self) -> Vec<(usize, u64)> {
        self.values.iter().map(|(field, value)| (*field, value.to_bits())).collect()
    }

    /// Takes over the drive of a field. A relative schedule multiplies its `own` value; any other keeps the
    /// value `same`.
    fn take(&mut self, mark: &DriveMark, steps: u64, (field, own): (usize, f64), same: Option<f64>) {
        let Some(value) = mark.factor.map_or(same, |factor| Some(own * factor)) else { return };
        if self.marks.iter().all(|known| known.field != field) {
            self.marks.push(DriveMark { field, since: steps, ..*mark });
            self.bases.extend(mark.factor.map(|_| (field, own)));
            self.values.push((field, value));
        }
    }

    /// The optimiser with the driven values.
    pub(super) fn set_in(&self, optimiser: &dyn Optimiser) -> Result<Box<dyn Optimiser>> {
        let mut adjusted = dyn_clone::clone_box(optimiser);
        let mut all: Vec<FieldValue> = optimiser.fields().into_iter().map(|(_, value)| value).collect();
        for (field, value) in &self.values {
            all[*field] = (*value).into();
        }
        adjusted.set_fields(&all)?;
        adjusted.check()?;
        Ok(adjusted)
    }
}

impl Leaf {
    /// The mark of the field with this index, if a schedule drives it.
    pub(crate) fn mark_of(&self, field: usize) -> Option<DriveMark> {
        self.driven.iter().copied().find(|mark| mark.field == field)
    }

    /// The value that a relative schedule on a field multiplies.
    #[cfg(feature = "torch")]
    pub(crate) fn driven_base(&self, place: &str) -> Option<f64> {
        let (field, _) = reached(&*self.optimiser, place).first().copied()?;
        self.mark_of(field)?.factor.and_then(|_| self.base_of(field))
    }

    pub(crate) fn set_mark(&mut self, mark: DriveMark) {
        match self.driven.iter_mut().find(|known| known.field == mark.field) {
            Some(known) => *known = mark,
            None => self.driven.push(mark),
        }
    }

    /// Removes the marks of the fields that this name sets: their values are no longer a schedule's.
    pub(crate) fn unmark(&mut self, name: &str) {
        if self.driven.is_empty() {
            return;
        }
        let set: SmallVec<[usize; 1]> = match self.optimiser.rates(name) {
            Some(rates) => rates.fields().into_iter().flatten().map(|field| field.index).collect(),
            None => reached(&*self.optimiser, name).into_iter().map(|(field, _)| field).collect(),
        };
        self.driven.retain(|mark| !set.contains(&mark.field));
    }

    /// The drives that another optimiser takes over, and its values under them. A relative schedule
    /// multiplies the other's own value; any other keeps the value.
    pub(super) fn drives_for(&self, other: &dyn Optimiser) -> CarriedDrives {
        let mut carried = CarriedDrives::default();
        if self.driven.is_empty() {
            return carried;
        }
        let (places, fields) = (self.optimiser.places(), self.optimiser.fields());
        let [rates, others] = [&*self.optimiser, other].map(set_for_rate);
        for mark in &self.driven {
            let (Some(place), Some((_, FieldValue::Real(value)))) =
                (places.get(mark.field), fields.get(mark.field))
            else {
                continue;
            };
            // A driven learning rate goes over to the other's learning rate, wherever in a chain it is set.
            match rates.iter().find(|field| field.index == mark.field) {
                Some(rate) if !others.is_empty() => {
                    let same = |field: &RateField| {
                        if field.others == rate.others { Some(*value) } else { field.value_for(rate.rate()) }
                    };
                    others.iter().for_each(|field| {
                        carried.take(mark, self.steps, (field.index, field.value), same(field))
                    });
                }
                _ => same_field(place, other)
                    .into_iter()
                    .for_each(|field| carried.take(mark, self.steps, field, Some(*value))),
            }
        }
        carried
    }
}

/// The fields that set the learning rate of an optimiser.
fn set_for_rate(optimiser: &dyn Optimiser) -> RateFields {
    optimiser.rates(RATE).and_then(|rates| rates.fields().ok()).unwrap_or_default()
}

/// The field of an optimiser for a field of another one at this place: the only one of its name, or else the
/// one at the same place.
fn same_field(place: &str, optimiser: &dyn Optimiser) -> Option<(usize, f64)> {
    let name = place.rsplit('.').next().unwrap_or(place);
    let real = |name: &str| match reached(optimiser, name)[..] {
        [(field, FieldValue::Real(value))] => Some((field, value)),
        _ => None,
    };
    real(name).or_else(|| real(place))
}

impl StateTree {
    /// Warns after a step of a schedule that nobody advances, and of one that has ended at a rate of 0.
    pub(crate) fn warn_of_schedules(&mut self) -> impl Iterator<Item = Warning> + use<> {
        let (mut forgotten, mut over) = (None, None);
        for leaf in self.leaves.iter() {
            for mark in &leaf.driven {
                let steps = leaf.steps.saturating_sub(mark.since);
                match mark.course {
                    DriveCourse::Moves | DriveCourse::Restored if steps >= FORGOTTEN => {
                        forgotten = forgotten.or(Some((leaf, mark.field, steps)))
                    }
                    DriveCourse::IsOver if steps > 0 => over = over.or(Some((leaf, mark.field))),
                    _ => {}
                }
            }
        }
        let named = |leaf: &Leaf, field: usize| {
            (leaf.path.clone(), leaf.optimiser.places().get(field).cloned().unwrap_or_default())
        };
        let is_new = |is_kind: fn(&Warning) -> bool| self.warnings.would_meet(is_kind);
        let forgotten = forgotten
            .filter(|_| is_new(|met| matches!(met, Warning::ScheduleNotAdvanced { .. })))
            .map(|(leaf, field, steps)| {
                let (path, field) = named(leaf, field);
                Warning::ScheduleNotAdvanced { path, field, steps }
            });
        let over = over.filter(|_| is_new(|met| matches!(met, Warning::ScheduleOver { .. }))).map(
            |(leaf, field)| {
                let (path, field) = named(leaf, field);
                Warning::ScheduleOver { path, field }
            },
        );
        let met = [forgotten, over].map(|warning| warning.and_then(|warning| self.warnings.meet(warning)));
        met.into_iter().flatten()
    }
}
