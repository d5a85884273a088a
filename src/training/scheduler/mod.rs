//! Hyper-parameters that follow schedules.

mod course;
mod curve;
mod plateau;
mod schedule;

#[cfg(feature = "config")]
pub(crate) use curve::{Curve, Easing};
pub use plateau::ReduceOnPlateau;
#[cfg(feature = "config")]
pub(crate) use schedule::LeafChoice;
pub use schedule::Schedule;

use crate::error::Result;
use crate::step::outcome::Outcome;
use crate::tree::StateTree;
use course::{DriveStep, Start};

/// Sets the learning rates of a state by a [`Schedule`], and advances with applied steps only.
///
/// Skipped calls and micro-batches that are collected do not count.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Descent, Schedule, Scheduler, setup, update};
///
/// let x = Var::new(&[1f32], &Device::Cpu)?;
/// let mut state = setup(Descent::default(), &x)?;
/// let mut scheduler = Scheduler::new(Schedule::linear(0.4, 0.0, 4), &mut state)?;
/// for _ in 0..2 {
///     let outcome = update(&mut state, &x, &x.sqr()?.sum_all()?.backward()?)?;
///     scheduler.advance(&outcome, &mut state)?;
/// }
/// assert_eq!((scheduler.steps(), state.leaf("").and_then(|leaf| leaf.learning_rate())), (2, Some(0.2)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A schedule gives all leaves one rate, and is refused if they have different rates. Then use
/// [`Schedule::relative`], which makes it a factor of each leaf's own rate, or several schedules for parts of
/// the model:
///
/// ```
/// use candle_core::{DType::F32, Device, Var};
/// use optimisers::{AdamW, ErrorKind, Muon, Rule, Schedule, Scheduler, setup_with};
///
/// let model = (Var::zeros(2, F32, &Device::Cpu)?, Var::zeros((2, 2), F32, &Device::Cpu)?);
/// let mut state = setup_with(&model, |_, x| -> Option<Box<dyn Rule>> {
///     Some(if x.rank() == 2 { Box::new(Muon::new(0.02)) } else { Box::new(AdamW::new(3e-4)) })
/// })?;
/// let refused = Scheduler::new(Schedule::constant(0.02), &mut state).unwrap_err();
/// assert_eq!((refused.kind(), refused.path()), (ErrorKind::Argument, Some("1")));
///
/// let half = Schedule::constant(0.5).relative();
/// let scheduler = Scheduler::new(half, &mut state)?;
/// assert_eq!(state.leaves().map(|leaf| leaf.learning_rate()).collect::<Vec<_>>(), [Some(1.5e-4), Some(0.01)]);
/// # let _ = scheduler;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// To reduce rates when a metric stops improving, use [`ReduceOnPlateau`], alone or beside a relative
/// schedule.
///
/// # Which leaves
/// - A leaf without the field is passed over.
/// - A frozen leaf is driven like the others, so that it goes on at their rate when it is thawed.
/// - A leaf that gets another optimiser stays driven: a relative schedule multiplies the new optimiser's own
///   rate, the rate of any other schedule stays, see [`Selection::replace`](crate::Selection::replace).
/// - A leaf that is added later is driven from the next [`advance`](Scheduler::advance) on, or at once after
///   [`go_to`](Scheduler::go_to) the same step. For a relative schedule, its own rate is the one it has then.
///   For any other it must have the rate of the others, [`current`](Scheduler::current).
/// - A rate adjusted by hand lasts until the next step of the schedule, which is refused if rates that should
///   be one now differ. In a chain with several learning rates the schedule sets the last one. Another one
///   (`0.eta`) adjusted by hand stays: a relative schedule multiplies it, any other sets the product.
///
/// # One schedule after another
/// The state knows what a schedule drives. [`Scheduler::new`] on it would begin anew in the middle of a run.
/// A relative schedule is refused there, as the rates are not the leaves' own; any other is [warned
/// of](crate::Warning::ScheduleBegunAnew). [`Scheduler::resume`] goes on. For a second phase, set the rates
/// by hand first: those are the leaves' own.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Descent, ErrorKind, Schedule, Scheduler, setup};
///
/// let x = Var::new(1f32, &Device::Cpu)?;
/// let mut state = setup(Descent::new(0.5), &x)?;
/// let schedule = || Schedule::cosine(1.0, 0.1, 100).relative();
/// let mut pretraining = Scheduler::new(schedule(), &mut state)?;
/// pretraining.go_to(100, &mut state)?;
/// let refused = Scheduler::new(schedule(), &mut state).unwrap_err();
/// assert_eq!((refused.kind(), refused.got()), (ErrorKind::Argument, Some("0.05")));
///
/// state.adjust(0.125)?;
/// let fine_tuning = Scheduler::new(schedule(), &mut state)?;
/// # let _ = fine_tuning;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # What is warned of
/// - A hundred [steps without `advance`](crate::Warning::ScheduleNotAdvanced) while the schedule would move,
///   or without any scheduler after a restore.
/// - A step after a schedule has [ended at a rate of 0](crate::Warning::ScheduleOver).
/// - Values that are [not the schedule's](crate::Warning::ScheduleMismatch) at its step: it was made before
///   the restore, resumed at another step, or is another schedule.
///
/// The update that meets one warns, once in the life of a state.
///
/// # Checkpoints
/// The state, and so a checkpoint, keeps each leaf's own rate beside the one that a relative schedule made of
/// it. After restoring, [`Scheduler::resume`] goes on from there. It takes the same schedule and the number
/// of applied steps, which the leaves count too.
///
/// ```
/// use candle_core::{DType::F32, Device, Var};
/// use optimisers::{Checkpoint, CheckpointFile, Descent, Schedule, Scheduler, setup};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("run.safetensors");
/// let schedule = || Schedule::linear(0.0, 1.0, 10).relative();
/// let model = vec![Var::ones(2, F32, &Device::Cpu)?, Var::ones(3, F32, &Device::Cpu)?];
/// let mut state = setup(Descent::new(0.5), &model)?;
/// state.at("1")?.adjust(0.25)?;
/// let mut scheduler = Scheduler::new(schedule(), &mut state)?;
/// Checkpoint::new(&state).scheduler(&scheduler).save(&path)?;
///
/// // In another process, where all rates are 0 at first:
/// let mut state = setup(Descent::new(0.5), &model)?;
/// let file = CheckpointFile::open(&path)?;
/// file.restore(&mut state)?;
/// let mut scheduler = Scheduler::resume(schedule(), file.scheduler_steps().unwrap_or(0), &mut state)?;
/// scheduler.go_to(10, &mut state)?;
/// assert_eq!(state.leaves().map(|leaf| leaf.learning_rate()).collect::<Vec<_>>(), [Some(0.5), Some(0.25)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the schedule stands still unless `advance` is called after each update"]
#[derive(Clone, Debug, PartialEq)]
pub struct Scheduler {
    schedules: Vec<Schedule>,
    steps: u64,
}

impl Scheduler {
    /// A scheduler at the start, of one [`Schedule`] or several; sets the values of the first step.
    ///
    /// # Errors
    /// If leaves have different rates and the schedule is not relative; if the field belongs to several
    /// members of a chain and is not [the learning rate](crate::Adjust::adjust); if a schedule drives
    /// nothing, because it selects no leaf, no rule there has the field, or earlier schedules drive all; if
    /// no value of the last member of a chain makes the rate right; if a value is out of range, in this step
    /// or a later one; if a schedule is relative and [another has
    /// driven](Scheduler#one-schedule-after-another) the field before. Nothing changes then.
    pub fn new(schedules: impl Into<Vec<Schedule>>, state: &mut StateTree) -> Result<Self> {
        let scheduler = Scheduler { schedules: schedules.into(), steps: 0 };
        DriveStep::whole(&scheduler.schedules, 0, Start::New, state)?.commit(state);
        Ok(scheduler)
    }

    /// A scheduler after `steps` applied steps, for a training that goes on from a checkpoint.
    ///
    /// A relative schedule goes on from the rates that it started with, which the state has kept.
    ///
    /// # Errors
    /// As [`Scheduler::new`], except that fields may have been driven before. Also if a schedule is relative
    /// and no relative schedule has driven the state.
    pub fn resume(schedules: impl Into<Vec<Schedule>>, steps: u64, state: &mut StateTree) -> Result<Self> {
        let scheduler = Scheduler { schedules: schedules.into(), steps };
        let step = DriveStep::whole(&scheduler.schedules, steps, Start::Resumed, state)?;
        scheduler.correct(step, state);
        Ok(scheduler)
    }

    /// Counts the call if it moved a parameter, and sets the values of the next step.
    ///
    /// # Errors
    /// As [`Scheduler::new`], except that a schedule may drive nothing. Scheduler and state stay as they were
    /// then.
    pub fn advance(&mut self, outcome: &Outcome, state: &mut StateTree) -> Result<()> {
        if outcome.has_stepped() { self.go_to(self.steps.saturating_add(1), state) } else { Ok(()) }
    }

    /// Sets the values of the step with this index, from 0 on, and goes on from there.
    ///
    /// # Errors
    /// As [`Scheduler::advance`].
    pub fn go_to(&mut self, steps: u64, state: &mut StateTree) -> Result<()> {
        let step = DriveStep::new(&self.schedules, steps, Start::Running(self.steps), state)?;
        self.correct(step, state);
        self.steps = steps;
        Ok(())
    }

    /// Takes a step of schedules that drive the state already. One that is moved to the right place is no
    /// fault any more.
    fn correct(&self, step: DriveStep, state: &mut StateTree) {
        state
            .warnings
            .dismiss(|field| self.schedules.iter().any(|schedule| schedule.driven_field() == field));
        step.commit(state);
    }

    /// How many steps were applied.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The value of the schedule, or the first of several, for the next step.
    ///
    /// It is a learning rate, or a factor of learning rates if the schedule is relative.
    pub fn current(&self) -> f64 {
        self.schedules.first().map_or(f64::NAN, |schedule| schedule.at(self.steps))
    }
}
