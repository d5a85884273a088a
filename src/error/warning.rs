//! Warnings: problems that are no errors but hurt a training.
//!
//! [`Warnings`] stores the warnings of a state, the first of each kind. They have two sources:
//!
//! - A call finds something wrong. The warning is recorded and logged at once.
//! - Leaves *show* a warning by their settings, such as a dtype that loses steps. `StateTree::warnings` has
//!   the warning at once. The next update records and logs it, so that a program can allow it before.
//!
//! The warnings that leaves show are cached, because each update would otherwise inspect all leaves.

use std::fmt;
use std::mem::discriminant;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::comma_separated;

/// A problem that is no error but hurts a training. The text (`Display`) contains the remedy.
///
/// A state records the first warning of each kind, and ignores later warnings of that kind.
/// [`StateTree::warnings`](crate::StateTree::warnings) lists the recorded warnings,
/// [`Outcome::warnings`](crate::Outcome::warnings) those that the call has added. Each recorded warning is
/// also a line of the log. If the program has no logger, the line goes to standard error, unless
/// [`Warning::silence`] was called.
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
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// Parameters without a gradient, which stay as they are.
    WithoutGradient {
        /// The number of parameters without a gradient.
        missing: usize,
        /// The number of parameters in the state.
        parameters: usize,
        /// The paths of parameters without a gradient, with running statistics of BatchNorm last. After 20
        /// paths the rest is `...`. If a path is an index in a list
        /// ([`CandleOptimizer`](crate::CandleOptimizer)), the shape follows it.
        paths: Vec<String>,
        /// The usual reason, and what to do.
        remedy: String,
    },
    /// Variables that the loss reaches and the state does not have, such as those of a later layer.
    ///
    /// [`CandleOptimizer`](crate::CandleOptimizer) looks for such variables in the graph of the loss in its
    /// first step, and [`Segments::train`](crate::Segments::train) in those of the segments. An update gets
    /// only gradients, and the gradient of a variable looks like that of a constant. For programs that call
    /// `update`, [`audit`](crate::audit) finds such variables.
    NotInState {
        /// The number of these variables.
        variables: usize,
        /// The shapes and dtypes of these variables. After 20 the rest is `...`.
        shapes: Vec<String>,
    },
    /// A file with numbers that are infinite or NaN. [Saving](crate::Checkpoint::save) returns this warning;
    /// no state records it.
    NotFinite {
        /// The file.
        file: PathBuf,
        /// The number of tensors with such a number.
        tensors: usize,
        /// The first of these tensors by name.
        entry: String,
        /// The index of the first such number of `entry`, in row-major order.
        index: usize,
        /// The number at `index`: `inf`, `-inf` or `NaN`.
        value: String,
    },
    /// A file of a state with open windows of [`AccumGrad`](crate::AccumGrad).
    ///
    /// The parameters in the file lack the collected gradients. [Saving](crate::Checkpoint::save) returns
    /// this warning, also for files of masters and for torch; no state records it. It is not logged, because
    /// a run that resumes from a checkpoint loses nothing.
    WindowsOpen {
        /// The number of calls that the windows have counted.
        calls: u64,
    },
    /// A checkpoint that [`CheckpointSaver::newest`](crate::CheckpointSaver::newest) has passed over, because
    /// the file is damaged, of another format or unfinished. No state records this warning.
    PassedOver {
        /// The file.
        file: PathBuf,
        /// What is wrong with the file, with its path.
        reason: String,
    },
    /// A save in the background that failed and can only be logged, because the program has dropped its
    /// [`CheckpointSaver`](crate::CheckpointSaver) without [waiting](crate::CheckpointSaver::wait). No state
    /// records this warning.
    NotSaved {
        /// The file.
        file: PathBuf,
        /// Why the save failed, with the path of the file.
        reason: String,
    },

    /// Parameters of 16 bits with neither a master nor another store of the bits that rounding loses.
    ///
    /// A step below 2⁻⁹ (BF16) or 2⁻¹² (F16) of an element does not move the element.
    /// [`StateTree::warnings`](crate::StateTree::warnings) has this warning from `setup` on, and the log from
    /// the first update on. A call of
    /// [`Selection::allow_low_precision`](crate::Selection::allow_low_precision) before the first update
    /// removes the warning.
    LowPrecision {
        /// The number of these parameters in BF16.
        bf16: usize,
        /// The number of these parameters in F16.
        f16: usize,
        /// The paths of these parameters. After 20 paths the rest is `...`. If a path is an index in a list
        /// ([`CandleOptimizer`](crate::CandleOptimizer)), the shape follows it.
        paths: Vec<String>,
    },

    /// Rules of a chain in an order that is surely a mistake, judging by their [roles](crate::Role).
    ///
    /// [`StateTree::warnings`](crate::StateTree::warnings) has this warning from `setup` on, and the log from
    /// the first update on.
    WrongOrder {
        /// The first parameter with these rules.
        path: String,
        /// The rules.
        rule: String,
        /// For each rule at a wrong place: its name, the consequence, and the right place.
        faults: Vec<String>,
    },

    /// A parameter with a number that is infinite or NaN after an update.
    ///
    /// Each update checks up to 16 parameters on the CPU, and the next update other parameters. A parameter
    /// with up to 64 elements is checked as a whole, a longer parameter at a few elements. If the loss is
    /// NaN, so are all gradients, and the update finds a NaN. A single NaN is found once it has spread.
    /// Parameters on a device are not checked. [`Update::finite_only`](crate::Update::finite_only),
    /// [`LossScaler`](crate::LossScaler) and clipping rules such as [`ClipGlobalNorm`](crate::ClipGlobalNorm)
    /// skip or refuse such a call before anything is written.
    ParameterNotFinite {
        /// The parameter.
        path: String,
        /// The element, in row-major order.
        index: usize,
    },

    /// Windows of [`AccumGrad`](crate::AccumGrad) that were given up because their sum was not finite.
    WindowsGivenUp {
        /// The first offending parameter.
        path: String,
    },

    /// Ten calls or more that were skipped since the last step.
    ///
    /// The count in [`StateTree::warnings`](crate::StateTree::warnings) grows with each further call; the log
    /// has the warning once. Calls with nothing to move do not count.
    StepsSkipped {
        /// The number of skipped calls since the last step.
        calls: u64,
        /// Why the last of these calls was skipped, and what to do.
        reason: String,
    },

    /// A [`StreamedStep`](crate::StreamedStep) that was dropped before `finish`.
    ///
    /// Parameters whose gradients were pushed have moved. The others have not.
    StepDropped {
        /// The number of parameters that have moved.
        moved: usize,
        /// The number of parameters in the state.
        parameters: usize,
    },

    /// Updates that run as single tensor operations, which is slow.
    ///
    /// The device has no fused engine, or the fused engine does not work on the device. No state records this
    /// warning, which is logged once in the life of the process.
    SlowEngine {
        /// Why no fused engine runs.
        reason: String,
    },
    /// Ranks of an MPI job on one machine whose threads together outnumber the cores.
    ///
    /// The threads wait for each other, which can make a step ten times as long. No state records this
    /// warning. One rank of the machine logs it once in the life of the job.
    CoresShared {
        /// The number of ranks on the machine.
        ranks: usize,
        /// The number of threads of all these ranks.
        threads: usize,
        /// The number of cores that these ranks may use.
        cores: usize,
    },
    /// A schedule of the program that differs from the schedule in the restored file.
    ///
    /// The program's schedule is used. A file of torch shows only that there was a scheduler.
    ScheduleDiffers {
        /// The first parameter.
        path: String,
        /// The hyper-parameter.
        field: String,
        /// The schedule of the program. `None` if the program has none and the file is torch's.
        program: Option<String>,
        /// The schedule of the file.
        file: String,
    },
    /// A schedule of factors that is taken for a schedule of learning rates, or the other way round.
    ///
    /// The parameter's own rate is at most 0.1, and the schedule reaches exactly 1 or 100 times that rate, or
    /// the schedule is [relative](crate::Schedule::relative) and always below 1/100.
    /// [`StateTree::warnings`](crate::StateTree::warnings) has this warning from `schedule` on, and the log
    /// from the next update on.
    UnlikelyRate {
        /// The first parameter.
        path: String,
        /// The parameter's own learning rate.
        own: String,
        /// The highest value of the schedule.
        peak: String,
        /// Whether the schedule is relative.
        is_relative: bool,
    },
    /// Settings of the program that a restored file has replaced by others.
    ///
    /// A restore takes from the file the hyper-parameters, the count of steps, and which parameters are
    /// frozen. The program's settings are compared with those in the file and with the first settings of the
    /// program that wrote the file. So numbers that [`adjust`](crate::StateTree::adjust), a plateau or a
    /// schedule has moved during that run cause no warning.
    SettingsDiffer {
        /// Each difference once, with its first parameter. After 20 the rest is `...`.
        differences: Vec<String>,
    },
    /// Parameters that are not those of the file from which their state was restored.
    ///
    /// The file has the model, but [`restore`](crate::CheckpointFile::restore) takes over only the state, or
    /// other weights were loaded after [`restore_with_model`](crate::CheckpointFile::restore_with_model). The
    /// next update compares a few elements of up to 16 parameters. A parameter that differs and has a master
    /// is refused instead.
    ModelNotRestored {
        /// The first such parameter.
        path: String,
    },
    /// A restored state whose parameters are named only by numbers, the indices of a list.
    ///
    /// If parameters of one shape and dtype have changed places in the list, the restore cannot notice the
    /// change. `VarMap::all_vars` has another order in each process. If all parameters differ in shape or
    /// dtype, the restore refuses another order, and there is no warning.
    OrderUnseen {
        /// The number of the first parameters that have one shape and dtype.
        parameters: usize,
        /// The shape of these parameters.
        shape: Vec<usize>,
    },
    /// Gradients that travel between ranks in another dtype than their layers compute in.
    ///
    /// The layers are those of [`Autocast`](crate::Autocast). If the wire rounds a gradient more than the
    /// layer did, bits are lost. If the gradient of a BF16 layer travels in F32, half of the bytes are zeros.
    /// There is no warning about such bytes if the program has chosen the dtype by
    /// [`Setup::wire`](crate::Setup::wire). Each update over [ranks](crate::Setup::over) checks the dtypes.
    WireDiffers {
        /// The number of these parameters.
        parameters: usize,
        /// The first of these parameters.
        path: String,
        /// The dtype in which the layers compute the first gradient.
        values: String,
        /// The dtype in which the first gradient travels.
        travels: String,
        /// Whether bits are lost. If not, only bytes are wasted.
        loses_bits: bool,
    },
    /// A step at a learning rate of 0 that a schedule gives.
    ///
    /// A schedule that is 0 in all steps is taken as intended and causes no warning.
    ScheduledRateOfZero {
        /// The first parameter.
        path: String,
        /// The step, from 0 on.
        step: u64,
    },
}

/// What to do before a restore of torch's state, so that a schedule goes on.
pub(crate) const TORCH_SCHEDULE_REMEDY: &str = "\
     before the restore, call `state.schedule` with the schedule of the run, in steps; if the file has no \
     `step` (SGD, Lion), also call `state.set_steps` with the count of steps: the `last_epoch` of torch's \
     scheduler, times the steps of an epoch if the scheduler counts epochs";

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::WithoutGradient {
                missing,
                parameters,
                paths,
                remedy,
            } => write!(
                f,
                "{missing} of {parameters} parameters have no gradient and stay as they are: {}. {remedy}. \
                 `StateTree::require_all` makes this an error; if the gradients are missing on purpose, \
                 call `Selection::allow_missing`",
                comma_separated(paths)
            ),
            Warning::NotInState { variables, shapes } => {
                write!(
                    f,
                    "{}: {}. To train them, {TRAIN_OTHERS}",
                    others_reached_text(*variables),
                    comma_separated(shapes)
                )
            }
            Warning::NotFinite {
                file,
                tensors,
                entry,
                index,
                value,
            } => write!(
                f,
                "tensors in {file:?} with numbers that are infinite or NaN: {tensors}, the first is \
                 {entry:?} with {value} at element {index}. The file was written, but a restore refuses such \
                 a file unless `accepting_non_finite` is called: keep the file before it, and skip calls \
                 whose gradients are not finite with `Update::finite_only`"
            ),
            Warning::WindowsOpen { calls } => write!(
                f,
                "windows of `AccumGrad` are open: the number of calls that have not moved the parameters in \
                 the file is {calls}. Save after a call that makes a step, or end the windows by \
                 `Update::release_windows`"
            ),
            Warning::PassedOver { reason, .. } => write!(f, "a checkpoint was passed over: {reason}"),
            Warning::NotSaved { reason, .. } => {
                write!(
                    f,
                    "a checkpoint was not saved: {reason}. `CheckpointSaver::wait` at the end of the program \
                     returns this as an error"
                )
            }
            Warning::LowPrecision { bf16, f16, paths } => {
                let dtypes = [(*bf16, "BF16", "2⁻⁹ (1/512)"), (*f16, "F16", "2⁻¹² (1/4096)")];
                let losses =
                    dtypes
                        .into_iter()
                        .filter(|(count, ..)| *count > 0)
                        .map(|(count, dtype, bound)| {
                            let lose = if count == 1 {
                                "parameter loses"
                            } else {
                                "parameters lose"
                            };
                            format!("{count} {dtype} {lose} every step below {bound} of an element")
                        });
                write!(
                    f,
                    "without a master, {}: {}. To keep such steps, put `MixedPrecision::new(F32, ..)`, \
                     `Kahan` or `StochasticRounding` around the rule; if this is intended, call \
                     `Selection::allow_low_precision`",
                    losses.collect::<Vec<_>>().join(", and "),
                    comma_separated(paths)
                )
            }
            Warning::WrongOrder { path, rule, faults } => {
                write!(
                    f,
                    "the rules of {path:?}, {rule}, are in a wrong order: {}",
                    faults.join("; ")
                )
            }
            Warning::ParameterNotFinite { path, index } => write!(
                f,
                "element {index} of {path:?} is infinite or NaN after an update: the gradient was infinite \
                 or NaN, or the step was too large. Go on from a checkpoint. `Update::finite_only` skips a \
                 call with such a gradient, and a clipping rule refuses such a call, before anything is \
                 written"
            ),
            Warning::WindowsGivenUp { path } => write!(
                f,
                "the sum of the gradients collected for {path:?} is infinite, NaN or too large to be \
                 squared, although the gradient of each call is finite: there was no step, and all windows \
                 begin anew"
            ),
            Warning::StepsSkipped { calls, reason } => {
                write!(
                    f,
                    "{calls} calls were skipped since the last step, and no parameter moved: {reason}"
                )
            }
            Warning::StepDropped { moved, parameters } => write!(
                f,
                "a `StreamedStep` was dropped when {moved} of {parameters} parameters had moved, so the \
                 others have missed this step. Call `StreamedStep::finish`, or go on from a checkpoint"
            ),
            Warning::SlowEngine { reason } => {
                write!(
                    f,
                    "updates run as single tensor operations, which is correct but slow: {reason}"
                )
            }
            Warning::CoresShared {
                ranks,
                threads,
                cores,
            } => write!(
                f,
                "{ranks} ranks on this machine have {threads} threads on {cores} cores and wait for each \
                 other: set RAYON_NUM_THREADS to {} for each rank, or have `mpirun` bind each rank to cores \
                 of its own (`--bind-to core`)",
                (cores / ranks).max(1)
            ),
            Warning::ScheduleDiffers {
                path,
                field,
                program: None,
                file,
            } => write!(
                f,
                "{field} of {path:?} keeps the value of the file: {file} has changed this value, but the \
                 state has no schedule; {TORCH_SCHEDULE_REMEDY}"
            ),
            Warning::ScheduleDiffers {
                path,
                field,
                program: Some(program),
                file,
            } => write!(
                f,
                "{field} of {path:?} follows the schedule of the program, {program}, which differs from the \
                 schedule of the file, {file}. To go on with the schedule of the file, leave out \
                 `state.schedule(..)`; to begin a new schedule at its start, call `state.set_steps(0)`"
            ),
            Warning::SettingsDiffer { differences } => write!(
                f,
                "a restore takes hyper-parameters, the count of steps and frozen parameters from the file, but \
                 the program has set others: {}. To have one of those, set it after the restore; \
                 `CheckpointFile::keeping_settings` keeps all of the program's, also the count of steps, which \
                 is 0 in a new state",
                comma_separated(differences)
            ),
            Warning::ModelNotRestored { path } => write!(
                f,
                "the state was restored from a file that has the model, too, but {path:?} is not the parameter \
                 of the file. To restore both, call `CheckpointFile::restore_with_model`, after weights of \
                 other files were loaded; if the parameters are meant, call `StateTree::refresh_masters`"
            ),
            Warning::UnlikelyRate {
                path,
                own,
                peak,
                is_relative: true,
            } => write!(
                f,
                "the schedule of {path:?} multiplies the own learning rate, {own}, by {peak} at its highest: its \
                 values are factors. If they are meant as rates, leave out `.relative()`; if they are factors, \
                 make the own rate smaller and the factors larger"
            ),
            Warning::UnlikelyRate {
                path,
                own,
                peak,
                is_relative: false,
            } => write!(
                f,
                "the schedule of {path:?} makes the learning rate {peak} at its highest, although the own rate \
                 is {own}: its values are rates. If they are meant as factors of the own rate, add \
                 `.relative()` to the schedule; if they are rates, set the optimiser up with a rate near {peak}"
            ),
            Warning::OrderUnseen { parameters, shape } => write!(
                f,
                "parameters are named by their places in a list, and {parameters} have the shape {shape:?}: if \
                 the list had another order when the state was saved, parameters now have the state of others. \
                 Name the parameters, as a `VarMap` or `model!` does; `VarMap::all_vars` has another order in \
                 each process"
            ),
            Warning::WireDiffers {
                parameters,
                path,
                values,
                travels,
                loses_bits: true,
            } => write!(
                f,
                "the wire between ranks rounds gradients of {parameters} parameters: that of {path:?} has values of \
                 {values} from its layers, and travels in {travels}. To lose nothing, call \
                 `Setup::wire_as_computed` after a first forward pass of all layers, or return a dtype that holds \
                 these values from `Setup::wire`"
            ),
            Warning::WireDiffers {
                parameters,
                path,
                values,
                travels,
                loses_bits: false,
            } => write!(
                f,
                "gradients of {parameters} parameters travel between ranks in a wider dtype than needed: that of \
                 {path:?} in {travels}, although its layer computes in {values}. To send fewer bytes, call \
                 `Setup::wire_as_computed`, which loses nothing if no other code uses these variables; to keep \
                 the wider dtype, return it from `Setup::wire`"
            ),
            Warning::ScheduledRateOfZero { path, step } => write!(
                f,
                "the schedule of {path:?} gave step {step} a learning rate of 0, which moves nothing. If the \
                 schedule has ended, end the training, or give the schedule more steps or an end above 0; if \
                 this is a warm-up, begin it at peak / steps, as `Schedule::warmup_stable_then` does"
            ),
        }
    }
}

/// The text for a loss that reaches variables that the state does not have.
pub(crate) fn others_reached_text(variables: usize) -> String {
    format!("the loss reaches {variables} variables that this state does not have and never trains")
}

/// The remedy for variables that the state does not have, as a clause after "to train them".
pub(crate) const TRAIN_OTHERS: &str = "make the optimiser after the last layer, of a model that shows all \
                                       variables; if they are frozen on purpose, or another state trains \
                                       them, as in a GAN, call `StateTree::allow_others`";

static IS_SILENT: AtomicBool = AtomicBool::new(false);

impl Warning {
    /// Turns off warnings on standard error for the whole process. Lines of the log are not affected.
    pub fn silence() {
        IS_SILENT.store(true, Ordering::Relaxed);
    }

    /// Writes a line to the log, or to standard error if the program has no logger.
    pub(crate) fn log(&self) {
        log::warn!("{self}");
        // `Off` is the level of `log` until a program sets up a logger.
        if log::max_level() == log::LevelFilter::Off && !IS_SILENT.load(Ordering::Relaxed) {
            eprintln!("warning: {self}");
        }
    }
}

/// The warnings of a state, the first of each kind. The head of the file explains how leaves *show* one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Warnings {
    recorded: Vec<Warning>,
    /// Whether nothing is recorded. True for a scratch tree, because the training's tree records the
    /// warnings.
    ignores_all: bool,
    /// A cache of the recorded warnings and those that leaves show. `clear_cache` empties the cache.
    cache: OnceLock<Vec<Warning>>,
    /// Whether `record_shown` has inspected the leaves since the last `clear_cache`.
    are_leaves_inspected: bool,
}

impl Warnings {
    /// The warnings of a state that records none.
    pub(crate) fn ignoring_all() -> Self {
        Warnings {
            ignores_all: true,
            ..Warnings::default()
        }
    }

    /// The recorded warnings for a state with other leaves, without the caches.
    pub(crate) fn for_other_leaves(&self) -> Self {
        Warnings {
            cache: OnceLock::new(),
            are_leaves_inspected: false,
            ..self.clone()
        }
    }

    /// The recorded warnings in their order, then the warnings that leaves `show` and no call has recorded
    /// yet.
    pub(crate) fn all(&self, show: impl Fn() -> Vec<Warning>) -> &[Warning] {
        self.cache.get_or_init(|| {
            let shown = show().into_iter().filter(|shown| self.is_first(shown));
            self.recorded.iter().cloned().chain(shown).collect()
        })
    }

    /// Records and logs the warnings that leaves `show`, and returns the new ones. A further call does
    /// nothing until the next `clear_cache`.
    pub(crate) fn record_shown(&mut self, show: impl FnOnce() -> Vec<Warning>) -> Vec<Warning> {
        if self.are_leaves_inspected || self.ignores_all {
            return Vec::new();
        }
        let new = show()
            .into_iter()
            .filter_map(|warning| self.record(warning))
            .collect();
        // The flag is set last, because `record` clears it.
        self.are_leaves_inspected = true;
        new
    }

    /// Drops the cache of the warnings that leaves show. Must be called wherever leaves may change.
    pub(crate) fn clear_cache(&mut self) {
        self.cache.take();
        self.are_leaves_inspected = false;
    }

    /// Whether a warning of this kind would be the first. Callers ask, to skip the search for a warning.
    pub(crate) fn would_record(&self, is_kind: impl Fn(&Warning) -> bool) -> bool {
        !self.ignores_all && !self.recorded.iter().any(is_kind)
    }

    fn is_first(&self, warning: &Warning) -> bool {
        self.would_record(|recorded| discriminant(recorded) == discriminant(warning))
    }

    /// Replaces a recorded warning of this kind, because the count has grown. If no such warning is recorded,
    /// does the same as [`Warnings::record`].
    pub(crate) fn record_count(&mut self, warning: Warning) -> Option<Warning> {
        let is_kind = |recorded: &&mut Warning| discriminant(&**recorded) == discriminant(&warning);
        if let Some(recorded) = self.recorded.iter_mut().find(is_kind) {
            *recorded = warning;
            self.cache.take();
            return None;
        }
        self.record(warning)
    }

    /// If the warning is the first of its kind, records it, logs it and returns it.
    pub(crate) fn record(&mut self, warning: Warning) -> Option<Warning> {
        if !self.is_first(&warning) {
            return None;
        }
        warning.log();
        self.clear_cache();
        self.recorded.push(warning.clone());
        Some(warning)
    }
}
