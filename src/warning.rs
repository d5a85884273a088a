//! Warnings: what is no error and hurts a training all the same.

use std::fmt;
use std::mem::{Discriminant, discriminant};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cuts::advice;

/// Something that is no error and hurts a training all the same. Its `Display` says the remedy.
///
/// A state meets each kind of warning once in its life: [`StateTree::warnings`](crate::StateTree::warnings) keeps it, the
/// [`Outcome::warnings`](crate::Outcome::warnings) of the call that met it names it, and the log has a line. In a program without
/// a logger the line goes to standard error, once for each kind in the life of the process, unless [`Warning::silence`] turns that off.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Warning {
    /// Parameters without a gradient, which stay as they are.
    WithoutGradient {
        /// How many.
        missing: usize,
        /// How many parameters the state has.
        parameters: usize,
        /// Their paths, or the first of them.
        paths: Vec<String>,
    },
    /// [`Scheduler::new`](crate::Scheduler::new) where a schedule has driven parameters already, whose values
    /// go back to those of the start.
    ScheduleBegunAnew {
        /// The first parameter.
        path: String,
        /// The hyper-parameter.
        field: String,
        /// Its value before.
        before: f64,
        /// Its value now.
        now: f64,
        /// The steps that the parameters have made.
        steps: u64,
    },
    /// A schedule that is not [advanced](crate::Scheduler::advance).
    ScheduleNotAdvanced {
        /// The first parameter that it drives.
        path: String,
        /// The hyper-parameter.
        field: String,
        /// The steps of the parameter since the schedule has set a value.
        steps: u64,
    },
    /// A step after the end of a schedule that ends at 0, which moves nothing.
    ScheduleOver {
        /// The first parameter that it drives.
        path: String,
        /// The learning rate.
        field: String,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::WithoutGradient { missing, parameters, paths } => write!(
                f,
                "{missing} of {parameters} parameters have no gradient and stay as they are: {}. {}. `StateTree::require_all` makes this an error; \
                 `Selection::allow_missing` says that it is meant",
                paths.join(", "),
                advice()
            ),
            Warning::ScheduleBegunAnew { path, field, before, now, steps } => write!(
                f,
                "a schedule begins anew where one has driven {field} before: that of {path:?} goes from {before} to {now}. \
                 `Scheduler::resume(.., steps, ..)` goes on (this state counts {steps} steps); `adjust` {field} before `Scheduler::new` to say that it is meant"
            ),
            Warning::ScheduleNotAdvanced { path, field, steps } => write!(
                f,
                "{field} of {path:?} follows a schedule, which was not advanced in the last {steps} steps: call \
                 `scheduler.advance(&outcome, &mut state)` after each update"
            ),
            Warning::ScheduleOver { path, field } => write!(
                f,
                "the schedule of {field} of {path:?} has ended at 0, so steps move nothing: end the training there, or give the schedule more \
                 steps or an end above 0"
            ),
        }
    }
}

static IS_SILENT: AtomicBool = AtomicBool::new(false);

/// The kinds that standard error has.
static PRINTED: Mutex<Vec<Discriminant<Warning>>> = Mutex::new(Vec::new());

impl Warning {
    /// Prints no warning to standard error from now on. A program with a logger decides by that logger instead.
    pub fn silence() {
        IS_SILENT.store(true, Ordering::Relaxed);
    }

    /// Writes a line to the log, or to standard error where the program has no logger.
    fn say(&self) {
        log::warn!("{self}");
        if log::max_level() != log::LevelFilter::Off || IS_SILENT.load(Ordering::Relaxed) {
            return;
        }
        let mut printed = PRINTED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if !printed.contains(&discriminant(self)) {
            printed.push(discriminant(self));
            eprintln!("warning: {self}");
        }
    }
}

/// The warnings that a state has met, one of each kind.
#[derive(Clone, Debug, Default)]
pub(crate) struct Warnings {
    met: Vec<Warning>,
    /// Whether it meets none: a state beside the training, whose warnings are the training's.
    is_deaf: bool,
}

impl Warnings {
    /// Those of a state that says nothing.
    pub(crate) fn none() -> Self {
        Warnings { met: Vec::new(), is_deaf: true }
    }

    /// All of them, in the order in which they were met.
    pub(crate) fn met(&self) -> &[Warning] {
        &self.met
    }

    /// Whether a warning of this kind would be the first.
    pub(crate) fn would_meet(&self, is_kind: impl Fn(&Warning) -> bool) -> bool {
        !self.is_deaf && !self.met.iter().any(is_kind)
    }

    /// Keeps the first warning of a kind and says it. Returns it if it is the first.
    pub(crate) fn meet(&mut self, warning: Warning) -> Option<Warning> {
        if !self.would_meet(|met| discriminant(met) == discriminant(&warning)) {
            return None;
        }
        warning.say();
        self.met.push(warning.clone());
        Some(warning)
    }
}
