//! A step whose gradients come one at a time: begin → push, for each leaf → finish.
//!
//! A push takes one leaf (a parameter with its state) through the stages of `step/pipeline.rs` up to and
//! including the commit, so the bits are those of an update. `finish` takes all leaves through all stages,
//! but the stages pass over leaves that have moved. Two things are difficult:
//!
//! - **Threads.** While the step is open, the leaves are out of the tree, each in a lock of its own. A push
//!   only tries its lock and never waits: pushes of different leaves run at the same time, and a second push
//!   of one leaf is refused.
//! - **What has moved.** After an error or a panic in the commit a leaf counts as pushed if it may have
//!   moved, because a second push would apply its gradient twice. The leaves go back into the tree in every
//!   ending, also when the step is dropped.

#[cfg(feature = "candle")]
mod candle;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::slice;
use std::sync::{Mutex, OnceLock, PoisonError, TryLockError};

use super::call::{UpdateCall, UpdateOptions};
use super::leaf::{GradientSource, needs_all_gradients_error};
use super::loss_scaler::LossScaler;
use super::outcome::{Outcome, SkipReason};
use super::pipeline::{Ending, PlannedStep, StepCall, open_step, step};
use super::ranks::Ranks;
use super::update::Update;
use crate::engine::{Job, check_gradient};
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::model::Model;
use crate::model::lent::{Lend, Lent};
use crate::ranks::{KeptSums, StateWorld};
use crate::rule::Kind;
use crate::tree::{Leaf, NormHistories, StateTree};

/// A step whose gradients come one at a time: each parameter moves as soon as its gradient is pushed.
///
/// [`Update::begin`] makes the step. [`push`](StreamedStep::push) takes a gradient from any thread, moves its
/// parameter and frees the gradient. [`finish`](StreamedStep::finish) ends the step. So parameters move while
/// the backward pass runs, and a gradient is in memory only until its push ends.
///
/// Parameters, state and counters have the bits of [`update`](crate::update) with the same gradients, in
/// whatever order and from whatever threads the gradients come. Every optimiser is accepted except those that
/// need numbers of the whole model ([`Kind::WholeModel`](crate::Kind::WholeModel)), such as a norm to clip
/// by. For such optimisers use [`Update::apply_owned`], which frees each gradient once its parameter is
/// written.
///
/// candle returns all gradients of a graph at once. [`Segments`](crate::Segments) computes and pushes the
/// gradients of one segment of the model after another.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use optimisers::{AdamW, Update, setup};
///
/// let variable = || Var::ones(2, DType::F32, &Device::Cpu);
/// let model = std::collections::BTreeMap::from([("a", variable()?), ("b", variable()?)]);
/// let mut state = setup(AdamW::new(0.1), &model)?;
/// let step = Update::new(&mut state).begin(&model)?;
/// let mut grads = model["a"].mul(&model["b"])?.sum_all()?.backward()?; // or layer by layer, by your code
/// std::thread::scope(|scope| {
///     let gradients = model.iter().filter_map(|(path, x)| Some((*path, grads.remove(x)?)));
///     let threads: Vec<_> = gradients.map(|(path, gradient)| scope.spawn(|| step.push(path, gradient))).collect();
///     threads.into_iter().try_for_each(|thread| thread.join().expect("a thread"))
/// })?;
/// assert_eq!(step.finish()?.applied, 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # What a streamed step does not promise
/// [`update`](crate::update) checks everything before it writes anything. In a streamed step a parameter
/// moves before the next gradient exists, so each promise is about one parameter:
///
/// - If a gradient does not fit, or is [not finite](Update::finite_only), its `push` is an error. The
///   parameter, its state and its counters stay as they were, and the parameter can be pushed again. Other
///   pushed parameters have moved. If the gradient is finite but the sum of its [window](crate::AccumGrad) is
///   not, the window of the parameter is given up.
/// - A second gradient for a parameter is an error, also under another of its paths: push the sum.
/// - Which parameters lack a gradient is known only at the end. `finish` treats such parameters as `update`
///   does. If the state [requires all](StateTree::require_all), `finish` is an error, and what was pushed has
///   moved.
/// - If the step is dropped before `finish`, each parameter is whole: as it was, or moved with its state and
///   counters. The number of calls that windows of [`AccumGrad`](crate::AccumGrad) have counted stays as it
///   was. The state records a [warning](Warning::StepDropped).
/// - If a gradient is not finite, a [`LossScaler`] lowers its scale at the end, and other parameters have
///   moved. If no parameter has moved, the outcome is that of a skipped call. If the step
///   is dropped after a push, its scaled loss is used up, as after `finish`.
/// - An evaluation during the step reads some parameters from before and others from after the step. The time
///   in which this can happen is longer than with `update`. A backward pass may push a parameter only after
///   the pass has read that parameter for the last time.
///
/// Windows, averages and frozen parameters are treated as in `update`. If the step is leaked
/// (`std::mem::forget`), the state has lost its leaves, and everything that needs leaves is an error.
#[must_use = "gradients that are pushed move their parameters; `finish` ends the step"]
pub struct StreamedStep<'s> {
    /// The state, without its leaves until the step ends.
    state: &'s mut StateTree,
    leaves: Vec<Mutex<OpenLeaf>>,
    /// In the order of the leaves.
    parameters: Vec<Lent<'s>>,
    call: UpdateCall,
    scaler: Option<&'s mut LossScaler>,
    /// The first parameter whose gradient was not finite.
    overflow_path: OnceLock<String>,
    /// 0 until the leaves are back in the state, then the number of pushed leaves that have moved.
    moved_count: usize,
    /// The warnings of the beginning, for the outcome.
    warnings: Vec<Warning>,
}

/// A leaf while its step is open.
struct OpenLeaf {
    leaf: Box<Leaf>,
    /// The source of the leaf's gradient for `finish`. `Collection` if the leaf can be pushed: no push may
    /// have moved the leaf, and no push has passed over a gradient.
    gradient_source: GradientSource<'static>,
}

impl<'s> Update<'s> {
    /// Begins a step whose gradients come one at a time.
    ///
    /// Options are those of [`apply`](Update::apply). [`finite_only`](Update::finite_only) is always on, for
    /// each gradient by itself, and costs one more read of the gradient.
    ///
    /// # Errors
    /// - The model is not the model of the state, or has other weights for the time being, such as averages.
    /// - A rule needs numbers of all gradients together, such as [`ClipGlobalNorm`](crate::ClipGlobalNorm):
    ///   see [`apply_owned`](Update::apply_owned).
    /// - The state is [divided](crate::Setup::over) among ranks, because all ranks have to exchange all
    ///   gradients in the same order.
    /// - With a [scaler](Update::scaler) also the errors of [`apply`](Update::apply).
    pub fn begin<M: Model + ?Sized>(self, model: &'s M) -> Result<StreamedStep<'s>> {
        let Update {
            state,
            options,
            scaler,
        } = self;
        state.check_whole("a step whose gradients come one at a time")?;
        let options = UpdateOptions {
            finite_only: true,
            ..options
        };
        let call = UpdateCall::new(options, scaler.as_deref(), None, false)?.with_state_settings(state);
        let call = UpdateCall {
            is_streamed: true,
            ..call
        };
        let parameters = state.parameters(model)?;
        state.check_parameters()?;
        let needs_all = |leaf: &&Leaf| !leaf.is_frozen() && leaf.optimiser.rule().kind() == Kind::WholeModel;
        if let Some(leaf) = state.leaves().find(needs_all) {
            return Err(needs_all_gradients_error(leaf.path()));
        }
        let not_restored = open_step(state, &parameters, options.keep_masters)?;
        let open_leaf = |leaf| {
            Mutex::new(OpenLeaf {
                leaf,
                gradient_source: GradientSource::Collection,
            })
        };
        let leaves = std::mem::take(&mut state.leaves)
            .into_iter()
            .map(open_leaf)
            .collect();
        Ok(StreamedStep {
            state,
            leaves,
            parameters,
            call,
            scaler,
            overflow_path: OnceLock::new(),
            moved_count: 0,
            warnings: Vec::from_iter(not_restored),
        })
    }
}

impl std::fmt::Debug for StreamedStep<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamedStep")
            .field("leaves", &self.leaves.len())
            .field("overflow", &self.overflow_path.get())
            .finish_non_exhaustive()
    }
}

impl StreamedStep<'_> {
    /// Moves the parameter with this path by its gradient, and frees the gradient.
    ///
    /// The gradient is a tensor, or [memory](Lend) of another owner, such as a slice. Several threads may
    /// push at once. A large parameter is updated by all threads of the engine, a small one by the calling
    /// thread. A gradient for a parameter that is frozen or left out is not used.
    ///
    /// ```
    /// use optimisers::{Descent, ParameterSlices, TensorSlice, Update, setup};
    ///
    /// let mut weight = [1f32, 2.0];
    /// let model = ParameterSlices::new().with("weight", 2, &mut weight)?;
    /// let mut state = setup(Descent::new(0.5), &model)?;
    /// let step = Update::new(&mut state).begin(&model)?;
    /// step.push("weight", TensorSlice::new([2], &[2f32, 4.0])?)?;
    /// step.finish()?;
    /// drop(model);
    /// assert_eq!(weight, [0.0, 0.0]);
    /// # Ok::<(), optimisers::Error>(())
    /// ```
    ///
    /// # Errors
    /// Unless stated otherwise, the parameter stays as it was and can be pushed again.
    /// - There is no parameter with this path, the parameter has moved in this step, or another thread is
    ///   pushing the parameter.
    /// - The gradient has another shape or device, or a dtype that is not floating-point.
    /// - The gradient has a number that is [infinite, NaN or too large to be squared](Update::finite_only).
    /// - [`update`](crate::update) would refuse the parameter: it was changed, or its memory is not as
    ///   described. If the owner of the memory fails after the memory was written, the parameter has moved as
    ///   a whole, the error names the parameter as moved, and another push is refused.
    /// - A function of a rule fails.
    /// - A device fails. The parameter may then have moved [in
    ///   part](crate::update#what-is-left-in-the-middle), and cannot be pushed again.
    ///
    /// # Panics
    /// As [`update`](crate::update#panics), with the same consequences for this parameter. If the parameter
    /// has moved, another push of it is refused.
    pub fn push(&self, path: &str, gradient: impl Lend) -> Result<()> {
        self.push_lent(path, &gradient, false)
    }

    /// Pushes a gradient. With `ignores_overflow`, a gradient that is not finite is no error: the step
    /// continues without this gradient, and the scaler lowers its scale in `finish`.
    fn push_lent(&self, path: &str, gradient: &dyn Lend, ignores_overflow: bool) -> Result<()> {
        let index = match self.state.leaf_index(path) {
            Some(Some(index)) => index,
            // The state leaves the parameter out.
            Some(None) => return Ok(()),
            None => return Err(self.state.unknown_gradient_error(path)),
        };
        let mut open_leaf = match self.leaves[index].try_lock() {
            Ok(open_leaf) => open_leaf,
            // The leaf is usable after a panic in an earlier push, because `gradient_source` shows whether the
            // leaf has moved.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(second_push_error(path)),
        };
        if !matches!(open_leaf.gradient_source, GradientSource::Collection) {
            return Err(second_push_error(path));
        }
        let x = &self.parameters[index];
        check_gradient(path, &**x, gradient)?;
        match self.advance(&mut open_leaf, x, Lent::new(gradient))? {
            Some(SkipReason::NotFinite { path: first }) => {
                let _ = self.overflow_path.set(first);
                if ignores_overflow {
                    open_leaf.gradient_source = GradientSource::NotFinite;
                    return Ok(());
                }
                let remedy = "the parameter has not changed: push another gradient, or go on without one; \
                              with a `LossScaler`, `finish` lowers the scale";
                Err(not_finite_error(path, "its gradient has", remedy))
            }
            Some(SkipReason::WindowsGivenUp { .. }) => {
                open_leaf.leaf.end_window()?;
                let remedy = "the window of this parameter was given up, because no gradient could end it; \
                              other parameters keep their windows";
                Err(not_finite_error(path, "the sum of its window has", remedy))
            }
            _ => Ok(()),
        }
    }

    /// Takes a leaf through the stages of a step, up to and including the commit. Returns why the leaf is
    /// skipped, if it is.
    fn advance(
        &self,
        open_leaf: &mut OpenLeaf,
        x: &Lent<'_>,
        gradient: Lent<'_>,
    ) -> Result<Option<SkipReason>> {
        let OpenLeaf {
            leaf,
            gradient_source,
        } = open_leaf;
        let mut job = None;
        let planned_step = plan_leaf(&self.call, leaf, x, [gradient], &mut job)?;
        let plan = planned_step.plans[0].clone();
        let mut reduced_step = planned_step.reduce(&NormHistories::default(), &mut KeptSums::default())?;
        // A frozen leaf has nothing to move. Its gradient counts as pushed.
        if let Ending::Skipped { reason, .. } = &reduced_step.ending
            && *reason != SkipReason::NothingToMove
        {
            return Ok(Some(reason.clone()));
        }
        // The owner of the parameter may panic after all is written. A second push would then apply the
        // gradient twice, so `gradient_source` is set before the panic is resumed.
        let result = catch_unwind(AssertUnwindSafe(|| reduced_step.write()));
        if reduced_step.may_have_moved() || matches!(result, Ok(Ok(()))) {
            *gradient_source = GradientSource::Pushed(plan);
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))?;
        Ok(None)
    }

    /// Ends the step. A parameter that was not pushed counts as a parameter without a gradient in
    /// [`update`](crate::update).
    ///
    /// The outcome is that of all gradients of the step together.
    ///
    /// # Errors
    /// In each case, the pushed parameters have moved.
    /// - No parameter has a gradient, or a [required](StateTree::require_all) gradient is missing. The number
    ///   of calls that windows of [`AccumGrad`](crate::AccumGrad) have counted then stays as it was.
    /// - The [scaler](Update::scaler) would fall below its floor.
    /// - A device or an owner of lent memory fails, with the
    ///   [consequences](crate::update#what-is-left-in-the-middle) of `update` for parameters that were not
    ///   pushed.
    pub fn finish(mut self) -> Result<Outcome> {
        let sources_by_leaf = self.put_back();
        let call = UpdateCall {
            overflow: self.overflow_path.get().cloned(),
            ..self.call.clone()
        };
        let mut outcome = step(call, self.state, &self.parameters, &(), sources_by_leaf)?;
        outcome.warnings.append(&mut self.warnings);
        if let Some(scaler) = self.scaler.take() {
            let overflow_path = self.overflow_path.take();
            let ends_windows = scaler.account_overflow(&mut outcome, self.call.loss_scale, overflow_path)?;
            if ends_windows {
                self.state.end_windows()?;
            }
        }
        Ok(outcome)
    }

    /// Puts the leaves back into the tree. Returns their gradient sources, in the order of the leaves.
    fn put_back(&mut self) -> Vec<GradientSource<'static>> {
        let open_leaves = std::mem::take(&mut self.leaves)
            .into_iter()
            .map(|open_leaf| open_leaf.into_inner().unwrap_or_else(PoisonError::into_inner));
        let (leaves, gradient_sources): (_, Vec<_>) = open_leaves
            .map(
                |OpenLeaf {
                     leaf,
                     gradient_source,
                 }| (leaf, gradient_source),
            )
            .unzip();
        self.state.leaves = leaves;
        let has_moved = |source: &&_| matches!(source, GradientSource::Pushed(plan) if plan.moves);
        self.moved_count = gradient_sources.iter().filter(has_moved).count();
        gradient_sources
    }
}

/// A push needs no other ranks, because streamed steps are refused over ranks.
static ALONE: Ranks<'static> = Ranks::alone(&StateWorld::ALONE);

/// Plans one leaf.
fn plan_leaf<'j, 'a>(
    call: &'a UpdateCall,
    leaf: &'a mut Box<Leaf>,
    x: &'a Lent<'a>,
    gradient: impl IntoIterator<Item = Lent<'a>>,
    job: &'j mut Option<Job<'a>>,
) -> Result<PlannedStep<'j, 'a>> {
    let (leaves, parameters, by_leaf) = (
        slice::from_mut(leaf),
        slice::from_ref(x),
        vec![GradientSource::from_handles(gradient)],
    );
    StepCall {
        call,
        ranks: &ALONE,
        leaves,
        parameters,
        grads: &(),
        by_leaf,
    }
    .plan(slice::from_mut(job))
}

impl Drop for StreamedStep<'_> {
    /// Ends a step that `finish` has not ended, also after an error or a panic in `finish`.
    fn drop(&mut self) {
        let is_open = !self.leaves.is_empty();
        if is_open {
            self.put_back();
        }
        let (moved, overflow_path) = (self.moved_count, self.overflow_path.take());
        // `finish` takes the scaler before it accounts for the overflow, so nothing is accounted for twice.
        if let Some(scaler) = self
            .scaler
            .take()
            .filter(|_| moved > 0 || overflow_path.is_some())
        {
            // No caller can get this error. If the scale is at its floor, the next overflow reports that.
            let _ = scaler.account_overflow(&mut Outcome::default(), self.call.loss_scale, overflow_path);
        }
        if is_open && moved > 0 {
            self.state.warnings.record(Warning::StepDropped {
                moved,
                parameters: self.state.len(),
            });
        }
    }
}

/// The error for a gradient or a window that is not finite.
fn not_finite_error(path: &str, subject: &str, remedy: &'static str) -> Error {
    let problem = format!("{subject} a number that is infinite, NaN or too large to be squared");
    Error::new(ErrorKind::NotFinite, problem)
        .at(path)
        .with_remedy(remedy)
}

/// The error for a second gradient.
fn second_push_error(path: &str) -> Error {
    let problem = "a gradient was pushed for it in this step already";
    Error::new(ErrorKind::Contract, problem)
        .at(path)
        .with_remedy("add up all gradients of the parameter, also of a tied parameter, and push the sum")
}
