//! Warnings: what is no error, but hurts a training.

use std::fmt;
use std::mem::discriminant;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::joined;

/// Something that is no error, but hurts a training. Its `Display` says the remedy.
///
/// A state meets each kind of warning once in its life. [`StateTree::warnings`](crate::StateTree::warnings)
/// keeps it, the [`Outcome::warnings`](crate::Outcome::warnings) of the call that met it names it, and the
/// log has a line. In a program without a logger the line goes to standard error, unless
/// [`Warning::silence`] turns that off.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use optimisers::{AdamW, Warning, setup, update};
///
/// let x = Var::ones(4, DType::BF16, &Device::Cpu)?;
/// let mut state = setup(AdamW::new(1e-4), &x)?; // a step of 1e-4 does not move a BF16 number of size 1
/// let outcome = update(&mut state, &x, &x.sqr()?.sum_all()?.backward()?)?;
/// assert!(matches!(&outcome.warnings[0], Warning::LowPrecision { bf16: 1, f16: 0, paths } if paths[0].is_empty()));
/// assert_eq!(outcome.warnings, state.warnings());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Warning {
    /// Parameters without a gradient, which stay as they are.
    WithoutGradient {
        /// How many.
        missing: usize,
        /// How many parameters the state has.
        parameters: usize,
        /// Their paths, or the first of them, with running statistics of BatchNorm last. A path that is a
        /// place in a list ([`CandleOptimizer`](crate::CandleOptimizer)) is followed by the shape.
        paths: Vec<String>,
        /// The usual reason, and what to do.
        remedy: String,
    },
    /// A file with numbers that are infinite or NaN. [Saving](crate::Checkpoint::save) returns this; no state
    /// keeps it.
    NotFinite {
        /// The file.
        file: PathBuf,
        /// How many of its tensors have such a number.
        tensors: usize,
        /// The first of them by name.
        entry: String,
        /// The first such number in it, as its index in row-major order.
        index: usize,
        /// That number.
        value: f64,
    },
    /// A file of a state with open windows of [`AccumGrad`](crate::AccumGrad).
    ///
    /// [Saving](crate::Checkpoint::save) returns this, also of masters and for torch; no state keeps it. The
    /// log does not have it, because a run that goes on from a checkpoint loses nothing. The parameters lack
    /// what was collected.
    WindowsOpen {
        /// How many calls the windows have counted.
        calls: u64,
    },
    /// A checkpoint that [`CheckpointSaver::newest`](crate::CheckpointSaver::newest) has passed over, as it
    /// is damaged, of another format or unfinished. No state keeps it.
    PassedOver {
        /// The file.
        file: PathBuf,
        /// What is wrong with it, with its path.
        reason: String,
    },
    /// A save beside the training that failed, of which the program was not told, as it has dropped the
    /// [`CheckpointSaver`](crate::CheckpointSaver) without [waiting](crate::CheckpointSaver::wait). No state
    /// keeps it.
    NotSaved {
        /// The file.
        file: PathBuf,
        /// Why, with its path.
        reason: String,
    },

    /// Parameters of 16 bits with neither a master nor another way to keep what rounding loses.
    ///
    /// A step that is below 2⁻⁹ of an element in BF16, and below 2⁻¹² in F16, does not move it.
    /// [`StateTree::warnings`](crate::StateTree::warnings) has it from `setup` on, and the log from the first
    /// update on, unless [`Selection::allow_low_precision`](crate::Selection::allow_low_precision) says
    /// before that it is meant.
    LowPrecision {
        /// How many are in BF16.
        bf16: usize,
        /// How many are in F16.
        f16: usize,
        /// Their paths, or the first of them. A path that is a place in a list
        /// ([`CandleOptimizer`](crate::CandleOptimizer)) is followed by the shape.
        paths: Vec<String>,
    },

    /// Rules of a chain whose order cannot be meant, by the [roles](crate::Role) that they state.
    ///
    /// [`StateTree::warnings`](crate::StateTree::warnings) has it from `setup` on, and the log from the first
    /// update on.
    WrongOrder {
        /// The first parameter with these rules.
        path: String,
        /// The rules.
        rule: String,
        /// For each rule at the wrong place: which, what comes of it, and where it belongs.
        faults: Vec<String>,
    },

    /// A parameter with a number that is infinite or NaN after an update has written it.
    ///
    /// Each update looks at a few elements of up to 16 parameters on the CPU (at all, if a parameter has up
    /// to 64), and the next update at others. A loss that is NaN has such gradients everywhere and is seen at
    /// once. A single number is seen when it has spread. Parameters on a device are not looked at.
    /// [`Update::finite_only`](crate::Update::finite_only), [`LossScaler`](crate::LossScaler) and clipping
    /// rules such as [`ClipGlobalNorm`](crate::ClipGlobalNorm) skip or refuse such a call before anything is
    /// written.
    ParameterNotFinite {
        /// The parameter.
        path: String,
        /// The element, in row-major order.
        index: usize,
    },

    /// Windows of [`AccumGrad`](crate::AccumGrad) that were given up, because their sum was not finite.
    WindowsGivenUp {
        /// The first offending parameter.
        path: String,
    },

    /// A step that took its gradients one at a time and was [dropped](crate::StreamedStep) before `finish`.
    ///
    /// The parameters that were pushed have moved, the others have not.
    StepDropped {
        /// How many have moved.
        moved: usize,
        /// How many parameters the state has.
        parameters: usize,
    },

    /// Updates that run as single tensor operations, which is slow.
    ///
    /// There is no fused engine for a device, or it does not work there. The warning belongs to no state: the
    /// log has it once in the life of the process.
    SlowEngine {
        /// Why.
        reason: String,
    },
    /// Ranks of an MPI job on one machine that have more threads together than cores.
    ///
    /// They wait for each other, which can make a step ten times as long. The warning belongs to no state:
    /// one rank of the machine logs it once in the life of the job.
    CoresShared {
        /// The ranks on the machine.
        ranks: usize,
        /// The threads of all of them.
        threads: usize,
        /// The cores that they may use.
        cores: usize,
    },
    /// A schedule of the program that is not the one of the file from which the run goes on.
    ///
    /// That of the program counts. A file of torch tells only that there was a scheduler.
    ScheduleDiffers {
        /// The first parameter.
        path: String,
        /// The hyper-parameter.
        field: String,
        /// The schedule of the program; `None` if the program has none, and the file is torch's.
        program: Option<String>,
        /// The schedule of the file.
        file: String,
    },
    /// A restored state whose parameters are named by numbers, as places of a list are, and have one shape
    /// and dtype.
    ///
    /// If shapes or dtypes differ, a list in another order is refused, unless only parameters of one shape
    /// and dtype have changed their places. [`StateTree::warnings`](crate::StateTree::warnings) and the log
    /// have the warning.
    OrderUnseen {
        /// How many parameters there are.
        parameters: usize,
        /// The shape of each.
        shape: Vec<usize>,
    },
    /// A step at a learning rate of 0, which a schedule gives.
    ///
    /// A schedule that is 0 in all steps is meant.
    ScheduledRateOfZero {
        /// The first parameter.
        path: String,
        /// The step, from 0 on.
        step: u64,
    },
}

/// Numbers are compared as they are shown, so that NaN is equal to itself.
impl PartialEq for Warning {
    fn eq(&self, other: &Self) -> bool {
        format!("{self:?}") == format!("{other:?}")
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::WithoutGradient { missing, parameters, paths, remedy } => write!(
                f,
                "{missing} of {parameters} parameters have no gradient and stay as they are: {}. {remedy}. \
                 `StateTree::require_all` makes this an error; `Selection::allow_missing` says that it is \
                 meant",
                joined(paths)
            ),
            Warning::NotFinite { file, tensors, entry, index, value } => write!(
                f,
                "{tensors} of the tensors in {file:?} are not finite, as {entry:?} with {value} at element \
                 {index}. The file is whole, and refused when it is read: keep the one before, and skip \
                 such calls in time (`Update::finite_only`). `accepting_non_finite` takes it over all the \
                 same"
            ),
            Warning::WindowsOpen { calls } => write!(
                f,
                "windows of `AccumGrad` are open: {calls} calls have not moved the parameters in the file. \
                 Save after a call that makes a step, or end the windows by `Update::release_windows`"
            ),
            Warning::PassedOver { reason, .. } => write!(f, "passed over, {reason}"),
            Warning::NotSaved { reason, .. } => {
                write!(
                    f,
                    "not saved, {reason}. `CheckpointSaver::wait` at the end of the program returns this as \
                     an error"
                )
            }
            Warning::LowPrecision { bf16, f16, paths } => {
                let lost = [(*bf16, "BF16", "2⁻⁹ (1/512)"), (*f16, "F16", "2⁻¹² (1/4096)")];
                let lost = lost.into_iter().filter(|(count, ..)| *count > 0).map(|(count, dtype, bound)| {
                    let lose = if count == 1 { "parameter loses" } else { "parameters lose" };
                    format!("{count} {dtype} {lose} every step below {bound} of an element")
                });
                write!(
                    f,
                    "{}, as they have no master: {}. `MixedPrecision::new(F32, ..)`, `Kahan` or \
                     `StochasticRounding` around the rule keeps such steps; \
                     `Selection::allow_low_precision` says that it is meant",
                    lost.collect::<Vec<_>>().join(", and "),
                    joined(paths)
                )
            }
            Warning::WrongOrder { path, rule, faults } => {
                write!(
                    f,
                    "the rules of {path:?}, {rule}, are in an order that cannot be meant: {}",
                    faults.join("; ")
                )
            }
            Warning::ParameterNotFinite { path, index } => write!(
                f,
                "element {index} of {path:?} is infinite or NaN after an update: its gradient was, or the \
                 step was too large. Go on from a checkpoint; `Update::finite_only` skips such a call, and \
                 a clipping rule refuses it, before anything is written"
            ),
            Warning::WindowsGivenUp { path } => write!(
                f,
                "the gradients collected for {path:?} are not finite together, or too large to be squared, \
                 though each call's are finite: no step, and all windows begin anew"
            ),
            Warning::StepDropped { moved, parameters } => write!(
                f,
                "a step was dropped when {moved} of {parameters} parameters had moved: the others have \
                 missed it. Call `StreamedStep::finish`, or go on from a checkpoint"
            ),
            Warning::SlowEngine { reason } => {
                write!(f, "updates run as single tensor operations, which is correct but slow: {reason}")
            }
            Warning::CoresShared { ranks, threads, cores } => write!(
                f,
                "{ranks} ranks on this machine have {threads} threads on {cores} cores and wait for each \
                 other: set RAYON_NUM_THREADS to {} for each, or have `mpirun` bind each to cores of its \
                 own (`--bind-to core`)",
                (cores / ranks).max(1)
            ),
            Warning::ScheduleDiffers { path, field, program: None, file } => write!(
                f,
                "{field} of {path:?} stays as it is in the file from now on: {file} has changed it, and the \
                 state has no schedule. Before the restore call `state.schedule` with the schedule of the \
                 run, and `state.set_steps` with the `last_epoch` of torch's scheduler"
            ),
            Warning::ScheduleDiffers { path, field, program: Some(program), file } => write!(
                f,
                "{field} of {path:?} follows another schedule than in the file from which the run goes on: \
                 the program's is {program}, which counts, and the file's is {file}. Leave out \
                 `state.schedule(..)` to go on with the file's; with one that is meant to be new, \
                 `state.set_steps(0)` begins it at its start"
            ),
            Warning::OrderUnseen { parameters, shape } => write!(
                f,
                "the {parameters} parameters are named by numbers, as places of a list are, and all have the \
                 shape {shape:?}: if the list has another order than when it was saved, each parameter now \
                 has what belongs to another one. Name the parameters, as a `VarMap` or `model!` does"
            ),
            Warning::ScheduledRateOfZero { path, step } => write!(
                f,
                "the schedule of {path:?} gave step {step} a learning rate of 0, which moves nothing. After \
                 the end of a schedule end the training, or give it more steps or an end above 0; a warm-up \
                 loses no step if it begins at peak / steps, as `Schedule::warmup_stable_then` does"
            ),
        }
    }
}

static IS_SILENT: AtomicBool = AtomicBool::new(false);

impl Warning {
    /// Prints no warning to standard error from now on. A program with a logger decides by that logger
    /// instead.
    pub fn silence() {
        IS_SILENT.store(true, Ordering::Relaxed);
    }

    /// Writes a line to the log, or to standard error where the program has no logger.
    pub(crate) fn say(&self) {
        log::warn!("{self}");
        if log::max_level() == log::LevelFilter::Off && !IS_SILENT.load(Ordering::Relaxed) {
            eprintln!("warning: {self}");
        }
    }
}

/// The warnings that a state has met, one of each kind.
#[derive(Clone, Debug, Default)]
pub(crate) struct Warnings {
    met: Vec<Warning>,
    /// Whether it meets none: the state of a scratch tree, whose warnings are the training's.
    is_deaf: bool,
    /// A cache of all warnings, also of those that leaves show and no call has met. Emptied when leaves may
    /// change.
    with_shown: OnceLock<Vec<Warning>>,
    /// Whether leaves have shown nothing new since they may last have changed.
    are_leaves_clean: bool,
}

impl Warnings {
    /// The warnings of a state that meets none.
    pub(crate) fn none() -> Self {
        Warnings { is_deaf: true, ..Warnings::default() }
    }

    /// The same warnings for a state that has other leaves from now on.
    pub(crate) fn of_other_leaves(&self) -> Self {
        Warnings { with_shown: OnceLock::new(), are_leaves_clean: false, ..self.clone() }
    }

    /// All warnings in the order in which they were met, then those that leaves `show` and that would be met.
    pub(crate) fn with(&self, show: impl Fn() -> Vec<Warning>) -> &[Warning] {
        self.with_shown.get_or_init(|| {
            let shown = show().into_iter().filter(|shown| self.is_first(shown));
            self.met.iter().cloned().chain(shown).collect()
        })
    }

    /// Meets what leaves `show`, and does not ask again until they may have changed.
    pub(crate) fn meet_shown(&mut self, show: impl FnOnce() -> Vec<Warning>) -> Vec<Warning> {
        if self.are_leaves_clean || self.is_deaf {
            return Vec::new();
        }
        let met = show().into_iter().filter_map(|warning| self.meet(warning)).collect();
        self.are_leaves_clean = true;
        met
    }

    /// Forgets what leaves have shown: they may have changed.
    pub(crate) fn look_again(&mut self) {
        self.with_shown.take();
        self.are_leaves_clean = false;
    }

    /// Whether a warning of this kind would be the first.
    pub(crate) fn would_meet(&self, is_kind: impl Fn(&Warning) -> bool) -> bool {
        !self.is_deaf && !self.met.iter().any(is_kind)
    }

    fn is_first(&self, warning: &Warning) -> bool {
        self.would_meet(|met| discriminant(met) == discriminant(warning))
    }

    /// Keeps the first warning of a kind and says it. Returns it if it is the first.
    pub(crate) fn meet(&mut self, warning: Warning) -> Option<Warning> {
        if !self.is_first(&warning) {
            return None;
        }
        warning.say();
        self.look_again();
        self.met.push(warning.clone());
        Some(warning)
    }
}
