//! A step whose gradients come one at a time: begin → push, for each leaf → finish.
//!
//! A push is the plan, the reduction and the commit of one leaf, as in `step/pipeline.rs`, so that the bits
//! are those of an update. The leaves are out of the tree meanwhile, each behind a lock of its own that
//! nobody waits for: threads that push different leaves do not meet, and a second push of a leaf is refused.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::slice;
use std::sync::{Mutex, OnceLock, PoisonError, TryLockError};

use super::call::{OwnGradients, UpdateCall, UpdateOptions};
use super::exchange::CallGradients;
use super::leaf::{LeafPlan, LeafUpdate};
use super::loss_scaler::LossScaler;
use super::outcome::{Outcome, SkipReason, Status};
use super::pipeline::{StepPlan, are_finite, figures, keep_written, moved, planned};
use super::ranks::Ranks;
use super::update::{StepTarget, Update};
use crate::engine::{Job, Norms, UpdateTargets, Verdict, commit, reduce};
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::model::Model;
use crate::model::gradients::GradientLookUp;
use crate::model::lent::{Lend, Lent, MemoryRef};
use crate::model::slices::GradientSlice;
use crate::ranks::KeptSums;
use crate::rule::{Kind, LeafNorms, Progress, Windows};
use crate::tree::{Leaf, StateTree};

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
    /// What became of its gradient, once that was pushed.
    advance: Option<Advance>,
}

/// What a step has done, or is to do, with a leaf.
struct Advance {
    plan: LeafPlan,
    figures: Option<(f64, Norms)>,
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
        let StepTarget { call, parameters } =
            StepTarget::find(state, model, options, scaler.as_deref(), None)?;
        let call = call.of_state(state);
        state.check_parameters()?;
        let needs_all = |leaf: &&Leaf| !leaf.is_frozen() && leaf.optimiser.rule().kind() == Kind::WholeModel;
        if let Some(leaf) = state.leaves.iter().find(needs_all) {
            return Err(needs_all_gradients(leaf.path()));
        }
        keep_written(state, &parameters);
        let open = |leaf| Mutex::new(OpenLeaf { leaf, advance: None });
        let leaves = std::mem::take(&mut state.leaves).into_iter().map(open).collect();
        Ok(StreamedStep { state, leaves, parameters, call, scaler, overflow: OnceLock::new() })
    }
}

/// One gradient under one path.
struct OneGradient<'g> {
    path: &'g str,
    gradient: &'g dyn Lend,
}

impl GradientLookUp for OneGradient<'_> {
    fn find(&self, path: &str, _x: &dyn Lend) -> Option<&dyn Lend> {
        (path == self.path).then_some(self.gradient)
    }

    fn has_paths(&self) -> bool {
        true
    }
}

/// No gradient at all.
struct NoGradient;

impl GradientLookUp for NoGradient {
    fn find(&self, _path: &str, _x: &dyn Lend) -> Option<&dyn Lend> {
        None
    }

    fn has_paths(&self) -> bool {
        false
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
        self.push_lent(path, &gradient)
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
        self.push_lent(path, &GradientSlice::new(gradient.into()))
    }

    fn push_lent(&self, path: &str, gradient: &dyn Lend) -> Result<()> {
        let Some(place) = self.state.place(path) else {
            return Err(Error::unknown("parameter for the gradient of", path, &self.state.known_paths()));
        };
        let Some(index) = place else { return Ok(()) };
        let mut open = match self.leaves[index].try_lock() {
            Ok(open) => open,
            Err(TryLockError::Poisoned(open)) => open.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(pushed_twice(path)),
        };
        if open.advance.is_some() {
            return Err(pushed_twice(path));
        }
        let gradient = OneGradient { path, gradient };
        match self.advance(index, &mut open, &gradient)? {
            Ok(()) => Ok(()),
            Err(windows) => Err(self.not_finite(index, &mut open.leaf, windows, &gradient)?),
        }
    }

    /// Moves a leaf by its gradient. If that is not finite nothing moves, and the result is what the call
    /// would have done to windows.
    fn advance(
        &self,
        index: usize,
        open: &mut OpenLeaf,
        gradient: &OneGradient<'_>,
    ) -> Result<std::result::Result<(), Windows>> {
        let OpenLeaf { leaf, advance } = open;
        let (x, grads) = (&self.parameters[index], CallGradients::Own(OwnGradients::LookUp(gradient)));
        let norms = self.call.options.figures.then(LeafNorms::default);
        let mut job = None;
        let mut update = LeafUpdate::new((0, ((leaf, x), &mut job)));
        update.make(&self.call, grads, &UpdateTargets::all(), norms.as_slice())?;
        let plan = update.plan;
        if let Some(job) = &mut job
            && !is_finite(&self.call, job)?
        {
            return Ok(Err(plan.windows));
        }
        let done = Advance { plan, figures: norms.and_then(|norms| norms.found()) };
        let committed = catch_unwind(AssertUnwindSafe(|| {
            commit(self.call.options.engine, planned(slice::from_mut(&mut job)))
        }));
        // On a device a part may have moved, whatever the error is.
        let may_have_moved = job.as_ref().is_some_and(|job| job.has_moved || !job.x.device().is_cpu());
        if may_have_moved || matches!(committed, Ok(Ok(()))) {
            *advance = Some(done);
        }
        let committed = committed.unwrap_or_else(|panic| resume_unwind(panic));
        committed.map(Ok).map_err(|error| error.after(moved(slice::from_ref(&job))))
    }

    /// The error for a gradient that is not finite, or whose window is not.
    fn not_finite(
        &self,
        index: usize,
        leaf: &mut Leaf,
        windows: Windows,
        gradient: &OneGradient<'_>,
    ) -> Result<Error> {
        let x = slice::from_ref(&self.parameters[index]);
        let grads = CallGradients::Own(OwnGradients::LookUp(gradient));
        let is_finite = || {
            are_finite(
                &self.call,
                &Ranks::new(None),
                slice::from_ref(leaf),
                x,
                grads,
                &mut KeptSums::default(),
            )
        };
        let error = |what: &str, remedy| {
            let problem = format!("{what} a number that is infinite, NaN or too large to be squared");
            Error::new(ErrorKind::NotFinite, problem).at(gradient.path).with_remedy(remedy)
        };
        if windows.released && is_finite()? {
            leaf.end_window()?;
            let remedy = "its window was given up, as no gradient could end it; other parameters have theirs";
            return Ok(error("the sum of its window has", remedy));
        }
        let _ = self.overflow.set(leaf.path.clone());
        let remedy = "the parameter is as it was: push another gradient, or go on without one; with a \
                      `LossScaler` the scale falls in `finish`";
        Ok(error("its gradient has", remedy))
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
        let advances = self.put_back();
        let moved = count_moved(&advances);
        let mut outcome = self.end(advances).inspect_err(|_| self.fail(moved))?;
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

    /// Puts the leaves back into the tree. What was done with each, in their order.
    fn put_back(&mut self) -> Vec<Option<Advance>> {
        let open = std::mem::take(&mut self.leaves)
            .into_iter()
            .map(|open| open.into_inner().unwrap_or_else(PoisonError::into_inner));
        let (leaves, advances) = open.map(|OpenLeaf { leaf, advance }| (leaf, advance)).unzip();
        self.state.leaves = leaves;
        advances
    }

    /// Goes on with the leaves that were not pushed.
    fn end(&mut self, advances: Vec<Option<Advance>>) -> Result<Outcome> {
        let StreamedStep { state, parameters, call, overflow, .. } = self;
        let (state, grads) = (&mut **state, CallGradients::Own(OwnGradients::LookUp(&NoGradient)));
        let mut all = StepPlan::new(state.requires_all, state.leaves.len());
        let StateTree { leaves, jobs: pool, .. } = &mut *state;
        let (mut jobs, written) = (pool.take(leaves.len()), UpdateTargets::all());
        let leaf_norms: Vec<LeafNorms> =
            leaves.iter().filter(|_| call.options.figures).map(|_| LeafNorms::default()).collect();
        let (mut ended, mut given_up) = (Vec::with_capacity(leaves.len()), Vec::new());
        for (index, (((leaf, x), job), advance)) in
            leaves.iter_mut().zip(&*parameters).zip(&mut jobs).zip(advances).enumerate()
        {
            let advance = match advance {
                Some(advance) => advance,
                None => {
                    let mut update = LeafUpdate::new((index, ((leaf, x), &mut *job)));
                    update.make(call, grads, &written, &leaf_norms)?;
                    let mut plan = update.plan;
                    if !job.as_mut().map_or(Ok(true), |job| is_finite(call, job))? {
                        (plan.progress, *job) = (Some(Progress::WithoutGradient), None);
                        given_up.push(index);
                    }
                    Advance { plan, figures: leaf_norms.get(index).and_then(LeafNorms::found) }
                }
            };
            all.add(index, &advance.plan);
            ended.push(advance);
        }
        if let (false, Some(path)) = (all.has_gradient, overflow.get()) {
            drop(jobs);
            return Ok(all.outcome(state, Status::Skipped(SkipReason::NotFinite { path: path.clone() })));
        }
        if all.is_refused(call) {
            drop(jobs);
            return Err(all.refusal(call, state, "what was pushed has moved"));
        }
        if !all.moves {
            pool.recycle(jobs);
            return Ok(all.outcome(state, Status::Skipped(SkipReason::NothingToMove)));
        }
        commit(call.options.engine, planned(&mut jobs)).map_err(|error| error.after(moved(&jobs)))?;
        pool.recycle(jobs);
        for &index in &given_up {
            let leaf = &mut leaves[index];
            leaf.end_window().map_err(|error| error.at(&leaf.path))?;
        }
        all.figures = figures(leaves, ended.iter().map(|advance| advance.figures));
        let mut outcome = all.committed(state, parameters);
        let lost = given_up
            .into_iter()
            .map(|index| Warning::WindowsGivenUp { path: state.leaves[index].path.clone() });
        let lost: Vec<_> = lost.collect();
        outcome.warnings.extend(lost.into_iter().filter_map(|warning| state.warnings.meet(warning)));
        Ok(outcome)
    }
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
fn count_moved(advances: &[Option<Advance>]) -> usize {
    advances.iter().flatten().filter(|advance| advance.plan.moves).count()
}

/// Evaluates what the step of a leaf waits for, and returns whether its gradient is finite.
fn is_finite(call: &UpdateCall, job: &mut Job<'_>) -> Result<bool> {
    // A rule that does not say that it is of the whole model would get numbers of this leaf alone.
    if job.groups().next().is_some() {
        return Err(needs_all_gradients(job.path));
    }
    Ok(reduce(call.options.engine, &Ranks::new(None), &mut [job])?.verdict == Verdict::Go)
}

/// The error for a rule that depends on gradients that come later.
fn needs_all_gradients(path: &str) -> Error {
    let problem = "its rule needs numbers of all gradients, which come one at a time";
    let remedy =
        "collect the gradients and call `update`, or `Update::apply_owned`, which frees each as it goes";
    Error::new(ErrorKind::Unsupported, problem).at(path).with_remedy(remedy)
}

/// The error for a second gradient.
fn pushed_twice(path: &str) -> Error {
    let problem = "a gradient was pushed for it in this step already";
    Error::new(ErrorKind::Contract, problem)
        .at(path)
        .with_remedy("add up what belongs together, also for tied parameters, and push the sum")
}
