//! The warnings of a state: what is no error and still hurts a training.
//!
//! Numbers of parameters are checked after a commit, a sample in each call. The order of rules, lost steps,
//! schedules that differ from a file's and rates that a schedule makes unlikely are checked when leaves are
//! new or changed; the order of a list and the settings of the program after a restore, and a model that was
//! not restored (`tree/weights.rs`) in the update after it. Rates of 0 are checked in `tree/scheduled.rs`,
//! missing gradients in `step/summary.rs`, variables without a leaf in `training/audit.rs`.

use std::collections::HashMap;
use std::sync::Arc;

use super::drives::GivenSchedule;
use super::schedule::Schedule;
use super::{Leaf, StateTree};
use crate::error::listed;
use crate::error::warning::{Warning, Warnings};
use crate::model::lent::Lent;
use crate::numbers::DType;
use crate::rule::{FieldValue, misplaced, not_finite};

/// The most parameters that are checked in a call.
const PARAMETERS: usize = 16;

/// How many times the own rate is more than a schedule is likely to reach.
const UNLIKELY: f64 = 100.0;

/// The largest own learning rate that is likely to be one, and not 1 for a schedule to multiply.
const LARGEST_RATE: f64 = 0.1;

/// The fewest skipped calls without a step between them that are a warning. A dynamic loss scale that starts
/// too high needs a few.
const SKIPPED: u64 = 10;

impl StateTree {
    /// The [warnings](Warning) of this state, one of each kind, in the order in which they were raised.
    ///
    /// Those about parameters and optimisers are here at once, after [`setup`](crate::setup),
    /// [`add`](StateTree::add) or [`replace`](crate::Selection::replace). The log and the outcome have them
    /// only from the first [`update`](crate::update) on, so that a program can allow them before.
    ///
    /// A clone has the same warnings. A checkpoint does not have them, so a resumed program gets them again.
    pub fn warnings(&self) -> &[Warning] {
        self.warnings.with(|| shown(&self.leaves))
    }

    /// This state without warnings of its own: the training has them.
    pub(crate) fn without_warnings(self) -> Self {
        StateTree { warnings: Warnings::none(), ..self }
    }

    /// Warns once of parameters that lose steps, and of rules in a wrong order.
    pub(crate) fn warn_of_shown(&mut self) -> Vec<Warning> {
        self.warnings.meet_shown(|| shown(&self.leaves))
    }

    /// Counts a skipped call, and warns of those since the last step if they are many.
    pub(crate) fn warn_of_skipped(&mut self, reason: String) -> Option<Warning> {
        self.skipped += 1;
        if self.skipped < SKIPPED {
            return None;
        }
        self.warnings.renew(Warning::StepsSkipped { calls: self.skipped, reason })
    }

    /// Warns once, after a restore, of parameters that are told apart only by places in a list.
    pub(crate) fn warn_of_order(&mut self) {
        if self.leaves.iter().any(|leaf| leaf.path.parse::<usize>().is_err()) {
            return;
        }
        let mut alike: HashMap<_, usize> = HashMap::new();
        self.leaves.iter().for_each(|leaf| *alike.entry((leaf.shape(), leaf.dtype)).or_default() += 1);
        let count = |leaf: &Leaf| alike[&(leaf.shape(), leaf.dtype)];
        let Some(first) = self.leaves().find(|leaf| count(leaf) > 1) else { return };
        let (parameters, shape) = (count(first), first.shape().to_vec());
        self.warnings.meet(Warning::OrderUnseen { parameters, shape });
    }

    /// Warns once of a number in a parameter that is not finite after a step.
    ///
    /// Each step reads samples of other parameters, chosen by the count of steps. That is enough, because
    /// such numbers stay and spread, so that a later step finds them.
    pub(crate) fn warn_of_numbers(&mut self, parameters: &[Lent<'_>]) -> Option<Warning> {
        if !self.warnings.would_meet(|met| matches!(met, Warning::ParameterNotFinite { .. })) {
            return None;
        }
        let leaves = self.leaves.len();
        let first = self.acting_at % leaves.max(1) as u64 * PARAMETERS as u64;
        let places = (first..).take(leaves.min(PARAMETERS)).map(|place| place as usize % leaves);
        let mut moved =
            places.map(|place| (&self.leaves[place], &parameters[place])).filter(|(leaf, _)| leaf.steps > 0);
        let (leaf, index) = moved.find_map(|(leaf, x)| Some((leaf, not_finite(&**x)?)))?;
        self.warnings.meet(Warning::ParameterNotFinite { path: leaf.path.clone(), index })
    }
}

/// Warnings from the leaves alone.
fn shown(leaves: &[Box<Leaf>]) -> Vec<Warning> {
    let of_rules = low_precision(leaves).into_iter().chain(wrong_order(leaves));
    of_rules.chain(other_schedule(leaves)).chain(unlikely_rate(leaves)).collect()
}

/// The warning of the first leaf whose rules are in a wrong order.
fn wrong_order(leaves: &[Box<Leaf>]) -> Option<Warning> {
    let mut last = None;
    leaves.iter().find_map(|leaf| {
        // Leaves in a row often share an optimiser, which is then checked once.
        if last.replace(Arc::as_ptr(&leaf.optimiser).cast::<()>())
            == Some(Arc::as_ptr(&leaf.optimiser).cast())
        {
            return None;
        }
        let faults = misplaced(leaf.optimiser().description());
        (!faults.is_empty()).then(|| Warning::WrongOrder {
            path: leaf.path.clone(),
            rule: leaf.optimiser.rule().name(),
            faults,
        })
    })
}

/// The warning of parameters that lose steps.
fn low_precision(leaves: &[Box<Leaf>]) -> Option<Warning> {
    let losing = || leaves.iter().filter(|leaf| leaf.loses_steps());
    let of = |dtype: DType| losing().filter(|leaf| leaf.dtype == dtype).count();
    let paths = listed(losing().map(|leaf| leaf.label()));
    (!paths.is_empty()).then(|| Warning::LowPrecision { bf16: of(DType::BF16), f16: of(DType::F16), paths })
}

/// The warning of the first leaf for whose schedule factors were surely taken for rates, or rates for
/// factors.
fn unlikely_rate(leaves: &[Box<Leaf>]) -> Option<Warning> {
    let mut peaks = HashMap::new();
    leaves.iter().find_map(|leaf| {
        let mut rates = leaf.drives.iter().flat_map(|drives| drives.rates());
        rates.find_map(|(schedule, own)| {
            let highest = || schedule.at(schedule.curve.extremes()[1]);
            let peak = *peaks.entry(Arc::as_ptr(schedule)).or_insert_with(highest);
            // A larger own rate is meant to be multiplied by rates.
            let is_rate = own > 0.0 && own <= LARGEST_RATE;
            let is_unlikely = match schedule.is_relative {
                true => peak > 0.0 && peak < UNLIKELY.recip(),
                false => peak == 1.0 || peak >= UNLIKELY * own,
            };
            let text = |rate| FieldValue::Real(rate).to_string();
            (is_rate && is_unlikely).then(|| Warning::UnlikelyRate {
                path: leaf.path.clone(),
                own: text(own),
                peak: text(peak),
                is_relative: schedule.is_relative,
            })
        })
    })
}

fn in_words(schedule: &Schedule) -> String {
    let relative = if schedule.is_relative { "a relative " } else { "" };
    format!("{relative}{:?}", schedule.curve)
}

/// The warning of the first leaf whose schedule is another one than the file's.
fn other_schedule(leaves: &[Box<Leaf>]) -> Option<Warning> {
    leaves.iter().find_map(|leaf| {
        let mut given = leaf.schedules().filter_map(|given| Some((given, given.of_file.as_ref()?)));
        given.next().map(|(GivenSchedule { schedule, .. }, of_file)| Warning::ScheduleDiffers {
            path: leaf.path.clone(),
            field: schedule.driven_field().to_string(),
            program: Some(in_words(schedule)),
            file: in_words(of_file),
        })
    })
}
