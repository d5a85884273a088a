//! One step of a whole model: plan, reduce, commit.

use std::collections::HashSet;

use candle_core::Tensor;
use smallvec::smallvec;

use crate::engine::{Addresses, Engine, Extent, Reduced, Source, Ticket, Verdict, commit, expect_gradient, for_all, prefetch, reduce};
use crate::error::{Error, MasterError, Result};
use crate::gradients::Gradients;
use crate::model::Model;
use crate::outcome::{Outcome, Status};
use crate::rule::{Gradient, Leaf as RuleLeaf, Progress};
use crate::tree::{History, Leaf, Reached, StateTree, Twins, expect_twin};

/// Applies one step to every parameter of `model`, in place.
///
/// `model` is the one that [`setup`](crate::setup) saw; `grads` is candle's `GradStore` or a map by path. All checks and all norms come
/// before the first write: after an error model and state are as they were.
///
/// A parameter without a gradient stays untouched, its state and counters too (an accumulation window still advances, see
/// [`AccumGrad`](crate::AccumGrad)). A gradient of zeros is a gradient. Gradients may have any float dtype and any layout, and may be
/// the parameter or a view of it.
///
/// # Concurrency
/// The model may be evaluated in another thread meanwhile. Each parameter is replaced as a whole, one after another, so an evaluation can see
/// some parameters before the step and some after it, never a parameter half-way; copy the model first where that matters. Do not hold a
/// storage guard (`Tensor::storage_and_layout`) of a parameter across the call. Several models may be updated in several threads.
///
/// # Errors
/// If the model is not the state's, no parameter has a gradient, a gradient has an unknown name, another shape, device or a non-float
/// dtype, a parameter was changed that [follows a master](crate::MixedPrecision), or, before its first step, one of which a rule
/// [keeps a copy](crate::Slot::parameter), or a clipping rule refuses a norm that is not finite.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Descent, Status, setup, update};
///
/// let x = Var::new(&[1f32, 2.0], &Device::Cpu)?;
/// let mut state = setup(Descent::new(0.5), &x)?;
/// let grads = x.sqr()?.sum_all()?.backward()?;
/// let outcome = update(&mut state, &x, &grads)?;
/// assert_eq!((outcome.status, outcome.applied), (Status::Stepped, 1));
/// assert_eq!(x.to_vec1::<f32>()?, [0.0, 0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn update<M: Model + ?Sized, G: Gradients + ?Sized>(state: &mut StateTree, model: &M, grads: &G) -> Result<Outcome> {
    Update::new(state).apply(model, grads)
}

/// An [`update`] with more to say about how it is done.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{Descent, Status, Update, setup};
///
/// let x = Var::new(&[0f32, f32::INFINITY], &Device::Cpu)?;
/// let mut state = setup(Descent::new(0.5), &x)?;
/// let outcome = Update::new(&mut state).finite_only().apply(&x, &x.sqr()?.sum_all()?.backward()?)?;
/// assert_eq!(outcome.status, Status::Skipped);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Update<'s> {
    state: &'s mut StateTree,
    pub(crate) how: How,
    pub(crate) low: Option<&'s LowPrecision>,
}

/// Low-precision variables that are computed with, in place of those that are trained.
#[derive(Clone, Debug)]
pub(crate) struct LowPrecision {
    pub(crate) twins: Twins,
    /// The addresses of their storages.
    pub(crate) storages: HashSet<usize>,
}

/// How the gradients of a call are treated before the rules get them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    pub(crate) engine: Engine,
    /// What the gradients are divided by.
    pub(crate) loss_scale: f64,
    /// Whether a gradient that is not finite makes the call a skipped one.
    pub(crate) finite_only: bool,
    /// How much this call counts in a weighted mean.
    pub(crate) weight: u64,
    /// Whether to go on from masters of which the parameters are not copies any more.
    pub(crate) keep_masters: bool,
}

impl Default for How {
    fn default() -> Self {
        How { engine: Engine::default(), loss_scale: 1.0, finite_only: false, weight: 1, keep_masters: false }
    }
}

impl<'s> Update<'s> {
    /// An update of this state.
    pub fn new(state: &'s mut StateTree) -> Self {
        Update { state, how: How::default(), low: None }
    }

    /// With a chosen engine.
    pub fn on(mut self, engine: Engine) -> Self {
        self.how.engine = engine;
        self
    }

    /// Skips the call if a gradient has a number that is infinite or NaN: nothing moves, and the outcome names the parameter.
    ///
    /// It costs one more read of the gradients, or nothing where [`ClipGlobalNorm`](crate::ClipGlobalNorm) is the first in the chain, which reads
    /// them anyway (but for f64, where the norm of finite numbers can be infinite). bf16 needs it as well as f16: its range is that of f32, but a
    /// loss that explodes gets there.
    pub fn finite_only(mut self) -> Self {
        self.how.finite_only = true;
        self
    }

    /// How much the gradients of this call count where [`AccumGrad`](crate::AccumGrad) takes a weighted mean: for a loss that is a mean over
    /// tokens, the number of tokens. 1 if not said.
    pub fn weight(mut self, count: u64) -> Self {
        self.how.weight = count;
        self
    }

    /// Goes on from the masters where parameters were changed since, and overwrites the change. Without this such a parameter is an error, if it is
    /// noticed: on a device only until the parameter's first step, see [`MixedPrecision`](crate::MixedPrecision). Copies that rules keep of the
    /// parameter, such as the slow weights of [`Lookahead`](crate::Lookahead), stay as well.
    pub fn keep_masters(mut self) -> Self {
        self.how.keep_masters = true;
        self
    }

    /// The same update once more.
    pub(crate) fn reborrow(&mut self) -> Update<'_> {
        Update { state: self.state, how: self.how, low: self.low }
    }

    /// Lets every rule forget what it has collected for a step.
    pub(crate) fn end_window(self) -> Result<()> {
        let mut leaves = self.state.leaves.iter_mut().filter(|leaf| !leaf.frozen);
        leaves.try_for_each(|leaf| leaf.optimiser.end_window(&mut leaf.state).map_err(|error| error.at(&leaf.path)))
    }

    /// Applies the step.
    ///
    /// # Errors
    /// As [`update`].
    pub fn apply<M: Model + ?Sized, G: Gradients + ?Sized>(self, model: &M, grads: &G) -> Result<Outcome> {
        let Update { state, how, low } = self;
        expect_known(state, grads)?;
        let parameters = state.parameters(model)?;
        step(how, state, &parameters, low, grads)
    }
}

/// [`update`] with a chosen engine.
///
/// # Errors
/// As [`update`].
pub fn update_on<M: Model + ?Sized, G: Gradients + ?Sized>(engine: Engine, state: &mut StateTree, model: &M, grads: &G) -> Result<Outcome> {
    Update::new(state).on(engine).apply(model, grads)
}

/// Refuses a gradient for a name that the state does not know.
pub(crate) fn expect_known<G: Gradients + ?Sized>(state: &StateTree, grads: &G) -> Result<()> {
    match grads.paths().find(|path| !state.knows(path)) {
        Some(path) => Err(Error::UnknownGradient { path: path.to_string(), available: state.listed() }),
        None => Ok(()),
    }
}

/// Applies a step to these variables, which are in the order of the leaves.
pub(crate) fn step<G: Gradients + ?Sized>(
    how: How,
    state: &mut StateTree,
    parameters: &[Tensor],
    low: Option<&LowPrecision>,
    grads: &G,
) -> Result<Outcome> {
    let StateTree { leaves, storages, tickets: memory, .. } = state;
    let is_written = |address: &usize| storages.contains(address) || low.is_some_and(|low| low.storages.contains(address));
    let mut tickets = memory.lend(leaves.len());
    let mut plans: Vec<Plan<'_, '_>> = leaves.iter_mut().zip(parameters).zip(&mut tickets).map(Plan::new).collect();
    let make = |plan: &mut Plan<'_, '_>| if plan.reads_device() { Ok(()) } else { plan.make(how, grads, is_written) };
    for_all(&mut plans, |plan, stage| plan.prepare(low, grads, stage), make)?;

    let mut outcome = Outcome::default();
    let mut histories = Vec::new();
    for plan in &mut plans {
        plan.finish(how, grads, is_written)?;
        histories.extend(plan.history.take());
        match plan.progress {
            None => outcome.frozen += 1,
            Some(Progress::Applied) => outcome.applied += 1,
            Some(Progress::Accumulated) => outcome.accumulated += 1,
            Some(Progress::WithoutGradient) => outcome.without_gradient += 1,
        }
    }
    if !plans.iter().any(|plan| plan.has_gradient) {
        return Err(Error::NoGradients { leaves: plans.len() });
    }
    drop(plans);

    let Reduced { verdict, group_norms } = reduce(how.engine, &mut tickets)?;
    outcome.global_norm = group_norms.first().map(|(_, norm)| *norm);
    outcome.group_norms = group_norms;
    if let Verdict::Skip { offender } = verdict {
        memory.take_back(tickets);
        return Ok(Outcome { applied: 0, accumulated: 0, status: Status::Skipped, overflow: Some(offender), ..outcome });
    }
    commit(how.engine, &mut tickets)?;
    memory.take_back(tickets);
    for (history, next) in histories {
        *history = next;
    }
    outcome.status = match outcome {
        Outcome { applied: 1.., .. } => Status::Stepped,
        Outcome { accumulated: 1.., .. } => Status::Accumulated,
        _ => Status::Skipped,
    };
    Ok(outcome)
}

/// What one leaf has to do.
struct Plan<'p, 'a> {
    /// Until the plan is made.
    leaf: Option<&'a mut Leaf>,
    x: &'a Tensor,
    /// Nothing for a frozen leaf.
    ticket: &'p mut Option<Ticket<'a>>,
    progress: Option<Progress>,
    /// The leaf's history and what it becomes, if that is another.
    history: Option<(&'a mut History, History)>,
    /// What is computed with in place of x.
    low: Option<&'a Tensor>,
    /// The gradient under the first of the paths.
    gradient: Option<&'a Tensor>,
    has_gradient: bool,
    /// Whether a gradient has to be copied, because the update writes its storage while it reads it.
    is_aliased: bool,
}

impl<'p, 'a> Plan<'p, 'a> {
    fn new(((leaf, x), ticket): ((&'a mut Leaf, &'a Tensor), &'p mut Option<Ticket<'a>>)) -> Self {
        Plan {
            leaf: Some(leaf),
            x,
            ticket,
            progress: None,
            history: None,
            low: None,
            gradient: None,
            has_gradient: false,
            is_aliased: false,
        }
    }

    /// Finds the gradient, and fetches what will be looked at: what is found through the parameter, then what is found through that.
    fn prepare<G: Gradients + ?Sized>(&mut self, low: Option<&'a LowPrecision>, grads: &'a G, stage: usize) {
        let Some(leaf) = &self.leaf else { return };
        match stage {
            0 => {
                prefetch(&**leaf);
                prefetch(&**self.x);
            }
            1 => {
                self.low = low.and_then(|low| low.twins.get(self.x));
                self.gradient = grads.gradient(&leaf.path, self.low.unwrap_or(self.x));
                self.gradient.into_iter().for_each(|gradient| prefetch(&**gradient));
                prefetch(self.x.dims());
                prefetch(&leaf.state.tensors[..]);
                prefetch(&leaf.state.counters[..]);
            }
            _ => self.gradient.into_iter().for_each(|gradient| prefetch(gradient.dims())),
        }
    }

    /// Whether making the plan reads a tensor on a device. candle's stream of a CUDA device is another one on each thread, so that only the caller's
    /// comes after what the caller has computed.
    fn reads_device(&self) -> bool {
        let is_remote = self.leaf.as_ref().is_some_and(|leaf| leaf.state.outgoing.is_some());
        let is_compared = self.leaf.as_ref().is_some_and(|leaf| !leaf.history.is_settled);
        let elsewhere = |low: &Tensor| !low.device().same_device(self.x.device());
        (is_remote || is_compared) && !self.x.device().is_cpu() || self.low.is_some_and(elsewhere)
    }

    /// What is left to the thread of the caller.
    fn finish<G: Gradients + ?Sized>(&mut self, how: How, grads: &G, is_written: impl Fn(&usize) -> bool) -> Result<()> {
        if self.leaf.is_some() {
            self.make(how, grads, &is_written)?;
        }
        if let (true, Some(ticket)) = (self.is_aliased, &mut *self.ticket) {
            let aliased = ticket.job.source.iter_mut().filter(|gradient| is_written(&Addresses::of(gradient).storage));
            for gradient in aliased {
                *gradient = gradient.copy()?;
            }
        }
        Ok(())
    }

    fn make<G: Gradients + ?Sized>(&mut self, how: How, grads: &G, is_written: impl Fn(&usize) -> bool) -> Result<()> {
        let (Some(leaf), x, low) = (self.leaf.take(), self.x, self.low) else { return Ok(()) };
        let mut addresses = smallvec![leaf.addresses];
        let source = self.source(leaf, grads, |of_gradient| {
            addresses.push(of_gradient);
            is_written(&of_gradient.storage)
        })?;
        self.has_gradient = !source.is_empty();
        leaf.expect_parameter()?;
        if leaf.frozen {
            return Ok(());
        }
        let extent = if leaf.history.is_settled { Extent::Sample } else { Extent::First };
        let extent = (!how.keep_masters).then_some(extent);
        if let (true, Some(Extent::First)) = (self.has_gradient, extent) {
            if leaf.history.reached == Reached::Never { leaf.catch_up(x)? } else { leaf.expect_copies(x, Extent::First)? }
        }
        let Leaf { path, optimiser, state, steps, history, .. } = leaf;
        let mut planned =
            optimiser.plan(state, RuleLeaf { path, x, extent }, gradient(how, source, path)).map_err(|error| error.at(path))?;
        if let Some(low) = low {
            let is_written = self.has_gradient || planned.progress == Progress::Applied;
            if let Some(extent) = extent.filter(|_| is_written && low.dtype() != x.dtype()) {
                expect_twin(path, low, x, extent)?;
            }
            planned = planned
                .with_low_precision(low)
                .ok_or_else(|| MasterError::TwinStorage { path: path.clone(), optimiser: optimiser.name() })?;
        }
        if planned.progress == Progress::Applied {
            let next = *steps + 1;
            planned.job.counters.push((steps, next));
        }
        let next = history.after(self.has_gradient, planned.progress);
        self.history = (*history != next).then_some((history, next));
        self.progress = Some(planned.progress);
        *self.ticket = Some(Ticket { addresses, ..Ticket::new(planned.job) });
        Ok(())
    }

    /// The checked gradients: one, or one for each of the leaf's paths.
    fn source<G: Gradients + ?Sized>(&mut self, leaf: &Leaf, grads: &G, mut is_written: impl FnMut(Addresses) -> bool) -> Result<Source> {
        let x = self.low.unwrap_or(self.x);
        let others = if grads.by_path() { &leaf.aliases[..] } else { &[] };
        let others = others.iter().map(|path| (path.as_str(), grads.gradient(path, x)));
        let mut source = Source::new();
        for (path, gradient) in std::iter::once((leaf.path(), self.gradient)).chain(others) {
            let Some(gradient) = gradient else { continue };
            expect_gradient(path, x, gradient)?;
            self.is_aliased |= is_written(Addresses::of(gradient));
            source.push(gradient.clone());
        }
        Ok(source)
    }
}

/// The gradient that the rules get.
fn gradient(how: How, source: Source, path: &str) -> Gradient<'_> {
    let mut gradient = Gradient::new(source, how.weight, path);
    if how.loss_scale != 1.0 {
        gradient = gradient.scale(how.loss_scale.recip());
    }
    if how.finite_only { gradient.finite_only() } else { gradient }
}
