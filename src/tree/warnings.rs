//! The warnings of a state. Each warning is about something that is no error and still hurts a training.
//!
//! Warnings are checked at different times:
//! - when leaves are new or changed: the order of rules, lost steps, schedules that differ from a file's, and
//!   own rates that are unlikely under a schedule;
//! - after each step: the numbers of parameters, a sample in each call;
//! - after a restore: the order of a list, and settings of the program that the file replaces;
//! - in the update after a restore: a model that was not restored (`tree/weights.rs`).
//!
//! Rates of 0 are checked in `tree/scheduled.rs`, and missing gradients in `step/summary.rs`. Variables
//! without a leaf are known only to a caller that has the graph: `CandleOptimizer` and `Segments`.

use std::collections::HashMap;
use std::sync::Arc;

use super::schedule::Schedule;
use super::{Leaf, StateTree};
use crate::error::first_names;
use crate::error::warning::{Warning, Warnings};
#[cfg(feature = "candle")]
use crate::error::{
    Error, ErrorKind, Result, comma_separated,
    warning::{TRAIN_OTHERS, others_reached_text},
};
use crate::model::lent::Lent;
use crate::numbers::DType;
use crate::rule::{FieldValue, first_non_finite, order_faults};
#[cfg(feature = "candle")]
use crate::tensors::Tensor;

/// The most parameters that are checked in a call.
const PARAMETERS_PER_CALL: usize = 16;

/// The ratio of the peak of a schedule to the own rate from which the peak is unlikely. The peak of a
/// relative schedule is unlikely below the inverse.
const UNLIKELY_RATIO: f64 = 100.0;

/// The largest own value that is likely to be a learning rate. A larger one is likely a placeholder of 1, to
/// be multiplied by a schedule of rates.
const LARGEST_RATE: f64 = 0.1;

/// The fewest skipped calls without a step between them that are a warning. A dynamic loss scale that starts
/// too high needs a few skipped calls.
const SKIPPED_CALLS: u64 = 10;

#[cfg(feature = "candle")]
impl StateTree {
    /// Whether [`StateTree::warn_of_others`] would warn of variables or refuse them.
    pub(crate) fn looks_for_others(&self) -> bool {
        let would_record = self
            .warnings
            .would_record(|warning| matches!(warning, Warning::NotInState { .. }));
        !self.allows_others && (would_record || self.requires_all)
    }

    /// Warns once of variables that a loss reaches and this state does not have. If the state requires all
    /// gradients, refuses such variables.
    pub(crate) fn warn_of_others(&mut self, others: &[&Tensor]) -> Result<Option<Warning>> {
        if others.is_empty() {
            return Ok(None);
        }
        let shapes = first_names(
            others
                .iter()
                .map(|x| format!("{:?} of {}", x.dims(), DType::from(x.dtype()))),
        );
        if self.requires_all {
            let problem = format!("{}:", others_reached_text(others.len()));
            let error = Error::new(ErrorKind::Model, problem).with_got(comma_separated(&shapes));
            return Err(error.with_remedy(format!("to train them, {TRAIN_OTHERS}")));
        }
        Ok(self.warnings.record(Warning::NotInState {
            variables: others.len(),
            shapes,
        }))
    }
}

impl StateTree {
    /// The [warnings](Warning) of this state, one of each kind, in the order in which they were raised.
    ///
    /// Warnings about parameters and optimisers are here right after [`setup`](crate::setup),
    /// [`add`](StateTree::add) or [`replace`](crate::Selection::replace). The log and the outcome have these
    /// warnings only from the first [`update`](crate::update) on, so that a program can allow them before.
    ///
    /// A clone has the same warnings. A checkpoint does not have them, so a resumed program gets them again.
    pub fn warnings(&self) -> &[Warning] {
        self.warnings.all(|| leaf_warnings(&self.leaves))
    }

    /// This state without a record of warnings, for a scratch tree: the state of the training raises the
    /// warnings.
    pub(crate) fn without_warnings(self) -> Self {
        StateTree {
            warnings: Warnings::ignoring_all(),
            ..self
        }
    }

    /// Raises each of the [`leaf_warnings`] once.
    pub(crate) fn warn_of_leaves(&mut self) -> Vec<Warning> {
        self.warnings.record_shown(|| leaf_warnings(&self.leaves))
    }

    /// Counts a skipped call, and warns if many calls were skipped since the last step.
    pub(crate) fn warn_of_skipped(&mut self, reason: String) -> Option<Warning> {
        self.skipped += 1;
        if self.skipped < SKIPPED_CALLS {
            return None;
        }
        self.warnings.record_count(Warning::StepsSkipped {
            calls: self.skipped,
            reason,
        })
    }

    /// Warns once, after a restore, of parameters that differ only in their index in a list.
    pub(crate) fn warn_of_order(&mut self) {
        if self.leaves.iter().any(|leaf| leaf.path.parse::<usize>().is_err()) {
            return;
        }
        let mut counts: HashMap<_, usize> = HashMap::new();
        self.leaves
            .iter()
            .for_each(|leaf| *counts.entry((leaf.shape(), leaf.dtype)).or_default() += 1);
        let count = |leaf: &Leaf| counts[&(leaf.shape(), leaf.dtype)];
        let Some(first) = self.leaves().find(|leaf| count(leaf) > 1) else {
            return;
        };
        let (parameters, shape) = (count(first), first.shape().to_vec());
        self.warnings.record(Warning::OrderUnseen { parameters, shape });
    }

    /// Warns once of a number in a parameter that is not finite after a step.
    ///
    /// Each step reads samples of a few parameters, chosen by the count of steps. These samples are enough,
    /// because numbers that are not finite stay and spread, so that a later step finds them.
    pub(crate) fn warn_of_numbers(&mut self, parameters: &[Lent<'_>]) -> Option<Warning> {
        if !self
            .warnings
            .would_record(|warning| matches!(warning, Warning::ParameterNotFinite { .. }))
        {
            return None;
        }
        let leaves = self.leaves.len();
        let first = self.acting_at % leaves.max(1) as u64 * PARAMETERS_PER_CALL as u64;
        let places = (first..)
            .take(leaves.min(PARAMETERS_PER_CALL))
            .map(|place| place as usize % leaves);
        let mut stepped = places
            .map(|place| (&self.leaves[place], &parameters[place]))
            .filter(|(leaf, _)| leaf.steps > 0);
        let (leaf, index) = stepped.find_map(|(leaf, x)| Some((leaf, first_non_finite(&**x)?)))?;
        self.warnings.record(Warning::ParameterNotFinite {
            path: leaf.path.clone(),
            index,
        })
    }
}

/// The warnings that follow from the leaves alone.
fn leaf_warnings(leaves: &[Box<Leaf>]) -> Vec<Warning> {
    let rule_warnings = low_precision(leaves).into_iter().chain(wrong_order(leaves));
    rule_warnings
        .chain(other_schedule(leaves))
        .chain(unlikely_rate(leaves))
        .collect()
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
        let faults = order_faults(leaf.optimiser().description());
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
    let count = |dtype: DType| losing().filter(|leaf| leaf.dtype == dtype).count();
    let paths = first_names(losing().map(|leaf| leaf.label()));
    (!paths.is_empty()).then(|| Warning::LowPrecision {
        bf16: count(DType::BF16),
        f16: count(DType::F16),
        paths,
    })
}

/// The warning of the first leaf whose relative schedule has rates instead of factors, or whose schedule that
/// is not relative has factors instead of rates.
fn unlikely_rate(leaves: &[Box<Leaf>]) -> Option<Warning> {
    let mut peaks = HashMap::new();
    leaves.iter().find_map(|leaf| {
        let mut rates = leaf.drives.iter().flat_map(|drives| drives.rates());
        rates.find_map(|(schedule, own_rate)| {
            let highest = || schedule.at(schedule.curve.extremes()[1]);
            let peak = *peaks.entry(Arc::as_ptr(schedule)).or_insert_with(highest);
            let is_rate = own_rate > 0.0 && own_rate <= LARGEST_RATE;
            let is_unlikely = match schedule.is_relative {
                true => peak > 0.0 && peak < UNLIKELY_RATIO.recip(),
                false => peak == 1.0 || peak >= UNLIKELY_RATIO * own_rate,
            };
            let text = |rate| FieldValue::Real(rate).to_string();
            (is_rate && is_unlikely).then(|| Warning::UnlikelyRate {
                path: leaf.path.clone(),
                own: text(own_rate),
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

/// The warning of the first leaf with a schedule of the program that differs from the file's.
fn other_schedule(leaves: &[Box<Leaf>]) -> Option<Warning> {
    leaves.iter().find_map(|leaf| {
        let mut pairs = leaf
            .schedules()
            .filter_map(|assignment| Some((&assignment.schedule, assignment.file_schedule.as_ref()?)));
        pairs
            .next()
            .map(|(schedule, file_schedule)| Warning::ScheduleDiffers {
                path: leaf.path.clone(),
                field: schedule.driven_field().to_string(),
                program: Some(in_words(schedule)),
                file: in_words(file_schedule),
            })
    })
}
