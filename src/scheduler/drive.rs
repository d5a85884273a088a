use std::fmt;
use std::sync::Arc;

use crate::error::Error;
use crate::schedule::Schedule;
use crate::tree::{Leaf, StateTree, below, selected_path};

/// What a [`Schedule`] drives: which hyper-parameter of which leaves, to values or by factors.
///
/// A [`Scheduler`](crate::Scheduler) takes one or several. Of several that select a leaf the first drives it, if it drives the same field (`0.eta` and then
/// `eta`, too), so a last one for all leaves drives the rest:
///
/// ```
/// use candle_core::{DType::F32, Device, Var};
/// use optimisers::{AdamW, Drive, Muon, Rule, Schedule, Scheduler, setup_with};
/// use std::collections::BTreeMap;
///
/// let model = BTreeMap::from([("bias", Var::zeros(2, F32, &Device::Cpu)?), ("weight", Var::zeros((2, 2), F32, &Device::Cpu)?)]);
/// let mut state = setup_with(&model, |_, x| -> Option<Box<dyn Rule>> {
///     Some(if x.rank() == 2 { Box::new(Muon::new(0.02)) } else { Box::new(AdamW::new(3e-4)) })
/// })?;
/// let scheduler = Scheduler::new(
///     [Drive::new(Schedule::linear(0.0, 0.02, 100)).at("weight"), Drive::new(Schedule::cosine(3e-4, 0.0, 1000))],
///     &mut state,
/// )?;
/// assert_eq!(state.leaves().map(|leaf| leaf.learning_rate()).collect::<Vec<_>>(), [Some(3e-4), Some(0.0)]);
/// # let _ = scheduler;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "it does nothing by itself: pass it to `Scheduler::new`"]
#[derive(Clone, Debug, PartialEq)]
pub struct Drive {
    pub(super) schedule: Schedule,
    pub(super) field: String,
    pub(super) is_relative: bool,
    leaves: Chosen,
}

/// Which leaves are driven.
#[derive(Clone)]
enum Chosen {
    All,
    Below(String),
    Where(Arc<dyn Fn(&Leaf) -> bool + Send + Sync>),
}

impl Drive {
    /// Sets the learning rate of all leaves to the schedule's values.
    ///
    /// All leaves that it drives must have the same rate before: one schedule for different rates would make them equal.
    pub fn new(schedule: Schedule) -> Self {
        Drive { schedule, field: "eta".to_string(), is_relative: false, leaves: Chosen::All }
    }

    /// Sets the learning rate of each leaf to its own, as it is when the [`Scheduler`](crate::Scheduler) is made, times the schedule's value: torch's
    /// `LambdaLR`. `Schedule::cosine(1.0, 0.1, steps)` ends with a tenth of each rate.
    pub fn relative(schedule: Schedule) -> Self {
        Drive { is_relative: true, ..Self::new(schedule) }
    }

    /// Another hyper-parameter in place of the learning rate: one of those that are real numbers, by its name, or with its place in a chain before
    /// it, as in `0.eta`.
    pub fn of(self, field: impl Into<String>) -> Self {
        Drive { field: field.into(), ..self }
    }

    /// Only the leaf at `path` and those below it, in place of what was selected before.
    pub fn at(self, path: impl Into<String>) -> Self {
        Drive { leaves: Chosen::Below(path.into()), ..self }
    }

    /// Only the leaves for which `choose` holds, in place of what was selected before. It is asked again in every step.
    pub fn select_where(self, choose: impl Fn(&Leaf) -> bool + Send + Sync + 'static) -> Self {
        Drive { leaves: Chosen::Where(Arc::new(choose)), ..self }
    }

    /// The name of the field without its place.
    pub(super) fn name(&self) -> &str {
        self.field.rsplit('.').next().unwrap_or_default()
    }

    /// Whether it drives this leaf, if the leaf has the field.
    pub(super) fn selects(&self, leaf: &Leaf) -> bool {
        match &self.leaves {
            Chosen::All => true,
            Chosen::Below(path) => leaf.paths().any(|name| below(name, path).is_some()),
            Chosen::Where(choose) => choose(leaf),
        }
    }

    /// The error if it selects no leaf.
    pub(super) fn empty(&self, state: &StateTree) -> Error {
        let selection = match &self.leaves {
            Chosen::Below(path) => selected_path(path),
            Chosen::All | Chosen::Where(_) => "the predicate".to_string(),
        };
        Error::EmptySelection { selection, available: state.listed() }
    }
}

impl From<Drive> for Vec<Drive> {
    fn from(drive: Drive) -> Self {
        vec![drive]
    }
}

/// One learning rate for all leaves.
impl From<Schedule> for Vec<Drive> {
    fn from(schedule: Schedule) -> Self {
        vec![Drive::new(schedule)]
    }
}

impl fmt::Debug for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Chosen::All => f.write_str("All"),
            Chosen::Below(path) => f.debug_tuple("Below").field(path).finish(),
            Chosen::Where(_) => f.write_str("Where(..)"),
        }
    }
}

impl PartialEq for Chosen {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Chosen::All, Chosen::All) => true,
            (Chosen::Below(path), Chosen::Below(other)) => path == other,
            (Chosen::Where(choose), Chosen::Where(other)) => Arc::ptr_eq(choose, other),
            _ => false,
        }
    }
}
