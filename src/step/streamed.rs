//! A step whose gradients come one at a time: begin → push, for each leaf → finish.
//!
//! A push takes one leaf through the stages of `step/pipeline.rs` as far as the commit, so that the bits are
//! those of an update. `finish` takes all leaves through all stages, which pass over those that have moved.
//! The leaves are out of the tree meanwhile, each in a lock of its own that nobody waits for: threads that
//! push different leaves do not meet, and a second push of a leaf is refused.

#[cfg(feature = "candle")]
mod candle;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::slice;
use std::sync::{Mutex, OnceLock, PoisonError, TryLockError};

use super::call::{UpdateCall, UpdateOptions};
use super::leaf::{GradientSource, needs_all_gradients};
use super::loss_scaler::LossScaler;
use super::outcome::{Outcome, SkipReason};
use super::pipeline::{Ending, PlannedStep, StepCall, keep_written, step};
use super::ranks::Ranks;
use super::update::Update;
use crate::engine::{Job, check_gradient};
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::model::Model;
use crate::model::lent::{Lend, Lent, MemoryRef};
use crate::model::slices::GradientSlice;
use crate::ranks::KeptSums;
use crate::rule::Kind;
use crate::tree::{Leaf, NormHistories, StateTree};

/// A step whose gradients come one at a time; each parameter moves when its gradient is there.
///
/// [`Update::begin`] makes it. [`push`](StreamedStep::push) takes a gradient, from any thread, moves its
/// parameter and frees the gradient. [`finish`](StreamedStep::finish) ends the step. So of all gradients only
/// those are in memory that a backward pass has at the time, and the update is done beside it.
///
/// The bits are those of [`update`](crate::update) with the same gradients, in whatever order and from
/// whatever threads they come: parameters, state and counters. It takes every optimiser but those that need
/// numbers of the whole model ([`Kind::WholeModel`](crate::Kind::WholeModel)), such as a norm to clip by: for
/// these [`Update::apply_owned`] frees each gradient once its parameter is written.
///
/// candle returns all gradients of a graph at once. [`Segments`](crate::Segments) gives a step those of one
/// part of the model after another.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use optimisers::{AdamW, Update, setup};
///
/// let variable = || Var::ones(2, DType::F32, &Device::Cpu);
/// let model = std::collections::BTreeMap::from([("a", variable()?), ("b", variable()?)]);
/// let mut state = setup(AdamW::new(0.1), &model)?;
/// let step = Update::new(&mut state).begin(&model)?;
/// std::thread::scope(|scope| {
///     let threads = ["b", "a"].map(|path| scope.spawn(|| step.push(path, Tensor::ones(2, DType::F32, &Device::Cpu)?)));
///     threads.into_iter().try_for_each(|thread| thread.join().expect("a thread"))
/// })?;
/// assert_eq!(step.finish()?.applied, 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # What it promises less than `update`
/// An update checks everything before it writes anything. Here a parameter has moved before the next gradient
/// is there, so the promises are those of each parameter:
///
/// - A gradient that does not fit, or is [not finite](Update::finite_only), is an error of its `push`. That
///   parameter, its state and its counters stay as they were, and it can be pushed again; others have moved.
///   If the gradient is finite, but not the sum of its [window](crate::AccumGrad), the window of that
///   parameter is given up.
/// - A second gradient for a parameter is an error, also under another of its paths: add up what belongs
///   together.
/// - What lacks a gradient is known at the end. `finish` treats it as `update` does; if the state
///   [requires all](StateTree::require_all), that is an error then, and what was pushed has moved.
/// - A step that is dropped before `finish` leaves each parameter whole: as it was, or moved with its state
///   and counters. Windows do not count the call. The state meets a [warning](Warning::StepDropped).
/// - The [`LossScaler`] divides each gradient. One that is not finite lowers the scale at the end; the others
///   have moved. If none has moved, the outcome is that of a skipped call. A step in which anything was
///   pushed uses the scaled loss up, whether it is finished or dropped.
/// - A model that is evaluated meanwhile has parameters of both sides of the step, for longer. A backward
///   pass may push a parameter only after it has read it for the last time.
///
/// Windows, averages and frozen parameters are as in `update`. If the step is leaked (`std::mem::forget`),
/// the state has lost its leaves, and everything that needs them is an error.
#[must_use = "gradients that are pushed move their parameters; `finish` ends the step"]
pub struct StreamedStep<'s> {
    /// The state; its leaves are in `leaves`.
    state: &'s mut StateTree,
    leaves: Vec<Mutex<OpenLeaf>>,
    /// In the order of the leaves.
    parameters: Vec<Lent<'s>>,
    call: UpdateCall,
    scaler: Option<&'s mut LossScaler>,
    /// The first parameter whose gradient was not finite.
    overflow: OnceLock<String>,
}

/// A leaf while its step is open.
struct OpenLeaf {
    leaf: Leaf,
    /// What became of the gradient that was pushed, if one was.
    pushed: Option<GradientSource<'static>>,
}

impl<'s> Update<'s> {
    /// Begins a step whose gradients come one at a time.
    ///
    /// Options hold as for [`apply`](Update::apply). [`finite_only`](Update::finite_only) is always on, for
    /// each gradient by itself: one more read of it.
    ///
    /// # Errors
    /// - The model is not the state's, or has other weights in place of its parameters.
    /// - A rule needs numbers of all gradients together, such as [`ClipGlobalNorm`](crate::ClipGlobalNorm):
    ///   see [`apply_owned`](Update::apply_owned).
    /// - The state is [divided](crate::Setup::over) among ranks, which exchange all gradients in one order.
    /// - With a [scaler](Update::scaler) also as [`apply`](Update::apply).
    pub fn begin<M: Model + ?Sized>(self, model: &'s M) -> Result<StreamedStep<'s>> {
        let Update { state, options, scaler } = self;
        state.check_whole("a step whose gradients come one at a time")?;
        let options = UpdateOptions { finite_only: true, ..options };
        let call = UpdateCall::new(options, scaler.as_deref(), None)?.of_state(state);
        let call = UpdateCall { is_streamed: true, ..call };
        let parameters = state.parameters(model)?;
        state.check_parameters()?;
        let needs_all = |leaf: &&Leaf| !leaf.is_frozen() && leaf.optimiser.rule().kind() == Kind::WholeModel;
        if let Some(leaf) = state.leaves.iter().find(needs_all) {
            return Err(needs_all_gradients(leaf.path()));
        }
        keep_written(state, &parameters);
        let open = |leaf| Mutex::new(OpenLeaf { leaf, pushed: None });
        let leaves = std::mem::take(&mut state.leaves).into_iter().map(open).collect();
        Ok(StreamedStep { state, leaves, parameters, call, scaler, overflow: OnceLock::new() })
    }
}

impl std::fmt::Debug for StreamedStep<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamedStep")
            .field("leaves", &self.leaves.len())
            .field("overflow", &self.overflow.get())
            .finish_non_exhaustive()
    }
}

impl StreamedStep<'_> {
    /// Moves the parameter with this path by its gradient, and frees the gradient.
    ///
    /// The gradient is a tensor, or [memory](Lend) of another owner. Any thread may push, and several at
    /// once. All threads of the engine work on a large parameter, the caller's alone on a small one. A
    /// gradient for a frozen parameter, or one that was left out, is not used.
    ///
    /// # Errors
    /// The parameter stays as it was, and can be pushed again, except in the cases that say so.
    /// - There is no parameter with this path; or it has moved in this step, or is about to.
    /// - The gradient has another shape or device, or a dtype that is not floating-point.
    /// - It has a number that is [infinite, NaN or too large to be squared](Update::finite_only).
    /// - What [`update`](crate::update) refuses of a parameter: one that was changed, or whose memory is not
    ///   what it says. If the owner of the memory fails after it was written, the parameter has moved as a
    ///   whole, the error says so, and another push of it is refused.
    /// - A function of a rule fails.
    /// - A device fails. The parameter may have moved [in part](crate::update#what-is-left-in-the-middle)
    ///   then, and cannot be pushed again.
    ///
    /// # Panics
    /// As [`update`](crate::update#panics), with the consequences that it has there for this parameter. If it
    /// has moved, another push of it is refused.
    pub fn push(&self, path: &str, gradient: impl Lend) -> Result<()> {
        self.push_lent(path, &gradient, false)
    }

    /// As [`push`](StreamedStep::push), with a gradient in a slice, in row-major order.
    ///
    /// ```
    /// use optimisers::{Descent, ParameterSlices, Update, setup};
    ///
    /// let mut weight = [1f32, 2.0];
    /// let model = ParameterSlices::new().with("weight", 2, &mut weight)?;
    /// let mut state = setup(Descent::new(0.5), &model)?;
    /// let step = Update::new(&mut state).begin(&model)?;
    /// step.push_slice("weight", &[2f32, 4.0])?;
    /// step.finish()?;
    /// drop(model);
    /// assert_eq!(weight, [0.0, 0.0]);
    /// # Ok::<(), optimisers::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`push`](StreamedStep::push).
    pub fn push_slice<'g>(&self, path: &str, gradient: impl Into<MemoryRef<'g>>) -> Result<()> {
        self.push_lent(path, &GradientSlice::of(gradient.into()), false)
    }

    /// Pushes a gradient. With `passes_over` one that is not finite is no error: the step goes on without it,
    /// and the scaler learns of it.
    fn push_lent(&self, path: &str, gradient: &dyn Lend, passes_over: bool) -> Result<()> {
        let Some(place) = self.state.place(path) else {
            return Err(Error::unknown("parameter for the gradient of", path, &self.state.known_paths()));
        };
        let Some(index) = place else { return Ok(()) };
        let mut open = match self.leaves[index].try_lock() {
            Ok(open) => open,
            Err(TryLockError::Poisoned(open)) => open.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(pushed_twice(path)),
        };
        if open.pushed.is_some() {
            return Err(pushed_twice(path));
        }
        let x = &self.parameters[index];
        check_gradient(path, &**x, gradient)?;
        match self.advance(&mut open, x, Lent::new(gradient))? {
            Some(SkipReason::NotFinite { path: first }) => {
                let _ = self.overflow.set(first);
                if passes_over {
                    open.pushed = Some(GradientSource::NotFinite);
                    return Ok(());
                }
                let remedy = "the parameter is as it was: push another gradient, or go on without one; with a \
                              `LossScaler` the scale falls in `finish`";
                Err(not_finite(path, "its gradient has", remedy))
            }
            Some(SkipReason::WindowsGivenUp { .. }) => {
                open.leaf.end_window()?;
                let remedy =
                    "its window was given up, as no gradient could end it; other parameters have theirs";
                Err(not_finite(path, "the sum of its window has", remedy))
            }
            _ => Ok(()),
        }
    }

    /// Takes a leaf and its parameter through the stages of a step as far as the commit. The result is why the
    /// gradient is not used, if that is so.
    fn advance(&self, open: &mut OpenLeaf, x: &Lent<'_>, gradient: Lent<'_>) -> Result<Option<SkipReason>> {
        let OpenLeaf { leaf, pushed } = open;
        let mut job = None;
        let step = plan(&self.call, leaf, x, [gradient], &mut job)?;
        let plan = step.plans[0].clone();
        let mut step = step.reduce(&NormHistories::default(), &mut KeptSums::default())?;
        if let Ending::Skipped { reason, .. } = &step.ending
            && *reason != SkipReason::NothingToMove
        {
            return Ok(Some(reason.clone()));
        }
        // The owner of the parameter may panic when all is written already.
        let written = catch_unwind(AssertUnwindSafe(|| step.write()));
        if step.may_have_moved() || matches!(written, Ok(Ok(()))) {
            *pushed = Some(GradientSource::Pushed(plan));
        }
        written.unwrap_or_else(|panic| resume_unwind(panic))?;
        Ok(None)
    }

    /// Ends the step: what was not pushed has no gradient, and is treated as in [`update`](crate::update).
    ///
    /// The outcome is that of all gradients together.
    ///
    /// # Errors
    /// What was pushed has moved in any case.
    /// - No parameter has a gradient, or not all that are [required](StateTree::require_all). Windows do not
    ///   count the call then.
    /// - The [scaler](Update::scaler) would fall below its floor.
    /// - A device or an owner of lent memory fails, with the
    ///   [consequences](crate::update#what-is-left-in-the-middle) that it has in `update` for what was not
    ///   pushed.
    pub fn finish(mut self) -> Result<Outcome> {
        let pushed = self.put_back();
        let moved = count_moved(&pushed);
        let call = UpdateCall { overflow: self.overflow.get().cloned(), ..self.call.clone() };
        let gradients = pushed.into_iter().map(|pushed| pushed.unwrap_or_else(|| GradientSource::found([])));
        let outcome = step(call, self.state, &self.parameters, gradients.collect());
        let mut outcome = outcome.inspect_err(|_| self.fail(moved))?;
        if let Some(scaler) = self.scaler.take()
            && scaler.account_with(&mut outcome, self.call.loss_scale, self.overflow.take())?
        {
            self.state.end_windows()?;
        }
        Ok(outcome)
    }

    /// Ends the scaler's step, if leaves have moved or a gradient was not finite. If the scale is at its
    /// floor, the next step says so.
    fn fail(&mut self, moved: usize) {
        let overflow = self.overflow.take();
        if let Some(scaler) = self.scaler.take().filter(|_| moved > 0 || overflow.is_some()) {
            let _ = scaler.account_with(&mut Outcome::default(), self.call.loss_scale, overflow);
        }
    }

    /// Puts the leaves back into the tree, and returns what was pushed, in the order of the leaves.
    fn put_back(&mut self) -> Vec<Option<GradientSource<'static>>> {
        let open = std::mem::take(&mut self.leaves)
            .into_iter()
            .map(|open| open.into_inner().unwrap_or_else(PoisonError::into_inner));
        let (leaves, pushed) = open.map(|OpenLeaf { leaf, pushed }| (leaf, pushed)).unzip();
        self.state.leaves = leaves;
        pushed
    }
}

/// The plan of a leaf by itself.
fn plan<'j, 'a>(
    call: &'a UpdateCall,
    leaf: &'a mut Leaf,
    x: &'a Lent<'a>,
    gradient: impl IntoIterator<Item = Lent<'a>>,
    job: &'j mut Option<Job<'a>>,
) -> Result<PlannedStep<'j, 'a>> {
    let (leaves, parameters, gradients) =
        (slice::from_mut(leaf), slice::from_ref(x), [GradientSource::found(gradient)]);
    StepCall { call, ranks: &Ranks::ALONE, leaves, parameters, gradients }.plan(slice::from_mut(job))
}

impl Drop for StreamedStep<'_> {
    fn drop(&mut self) {
        if self.leaves.is_empty() {
            return;
        }
        let moved = count_moved(&self.put_back());
        if moved > 0 {
            self.state.warnings.meet(Warning::StepDropped { moved, parameters: self.state.len() });
        }
        self.fail(moved);
    }
}

/// How many leaves were pushed and have moved.
fn count_moved(pushed: &[Option<GradientSource<'_>>]) -> usize {
    let has_moved = |pushed: &&_| matches!(pushed, GradientSource::Pushed(plan) if plan.moves);
    pushed.iter().flatten().filter(has_moved).count()
}

/// The error for a gradient that is not finite, or whose window is not.
fn not_finite(path: &str, what: &str, remedy: &'static str) -> Error {
    let problem = format!("{what} a number that is infinite, NaN or too large to be squared");
    Error::new(ErrorKind::NotFinite, problem).at(path).with_remedy(remedy)
}

/// The error for a second gradient.
fn pushed_twice(path: &str) -> Error {
    let problem = "a gradient was pushed for it in this step already";
    Error::new(ErrorKind::Contract, problem)
        .at(path)
        .with_remedy("add up what belongs together, also for tied parameters, and push the sum")
}
