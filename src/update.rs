//! One step of a whole model: plan, reduce, commit.

use std::collections::HashSet;

use candle_core::Tensor;

use crate::engine::{Engine, Source, Ticket, Verdict, commit, expect_gradient, map_all, reduce, storage_address};
use crate::error::{Error, Result};
use crate::gradients::Gradients;
use crate::model::Model;
use crate::rule::{Gradient, Leaf as RuleLeaf, Progress};
use crate::tree::{Leaf, StateTree};

/// What a call of [`update`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// The call as a whole.
    pub status: Status,
    /// Parameters that moved.
    pub applied: usize,
    /// Parameters whose gradient went into an accumulator.
    pub accumulated: usize,
    /// Frozen parameters.
    pub frozen: usize,
    /// Parameters without a gradient, which stayed as they are.
    pub without_gradient: usize,
    /// The norm that [`ClipGlobalNorm`](crate::ClipGlobalNorm) took, before clipping.
    pub global_norm: Option<f64>,
}

/// What became of a call of [`update`] as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Status {
    /// At least one parameter moved. A learning-rate schedule should advance now.
    Stepped,
    /// Gradients were collected, no parameter moved.
    Accumulated,
    /// Nothing changed: all parameters are frozen, or a rule asked to skip the call.
    #[default]
    Skipped,
}

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
/// dtype, or a clipping rule refuses a norm that is not finite.
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
    update_on(Engine::default(), state, model, grads)
}

/// [`update`] with a chosen engine.
///
/// # Errors
/// As [`update`].
pub fn update_on<M: Model + ?Sized, G: Gradients + ?Sized>(engine: Engine, state: &mut StateTree, model: &M, grads: &G) -> Result<Outcome> {
    expect_known(state, grads)?;
    let parameters = state.parameters(model)?;
    step(engine, state, &parameters, grads)
}

/// Refuses a gradient for a name that the state does not know.
pub(crate) fn expect_known<G: Gradients + ?Sized>(state: &StateTree, grads: &G) -> Result<()> {
    match grads.paths().find(|path| !state.knows(path)) {
        Some(path) => Err(Error::UnknownGradient { path: path.to_string(), available: state.listed() }),
        None => Ok(()),
    }
}

/// Applies a step to these variables, which are in the order of the leaves.
pub(crate) fn step<G: Gradients + ?Sized>(engine: Engine, state: &mut StateTree, parameters: &[Tensor], grads: &G) -> Result<Outcome> {
    let leaves = parameters.len();
    let StateTree { leaves: all, storages, .. } = state;
    let plans = map_all(all.iter_mut().zip(parameters).collect(), |(leaf, x)| plan(leaf, x, grads, storages))?;

    let mut outcome = Outcome::default();
    let mut any = false;
    let mut jobs = Vec::with_capacity(leaves);
    for Plan { has_gradient, planned } in plans {
        any |= has_gradient;
        let Some((ticket, progress)) = planned else {
            outcome.frozen += 1;
            continue;
        };
        match progress {
            Progress::Applied => outcome.applied += 1,
            Progress::Accumulated => outcome.accumulated += 1,
            Progress::WithoutGradient => outcome.without_gradient += 1,
        }
        jobs.push(ticket);
    }
    if !any {
        return Err(Error::NoGradients { leaves });
    }

    let reduced = reduce(engine, &mut jobs)?;
    outcome.global_norm = reduced.global_norm;
    if reduced.verdict == Verdict::Skip {
        return Ok(Outcome { applied: 0, accumulated: 0, status: Status::Skipped, ..outcome });
    }
    commit(engine, jobs)?;
    outcome.status = match outcome {
        Outcome { applied: 1.., .. } => Status::Stepped,
        Outcome { accumulated: 1.., .. } => Status::Accumulated,
        _ => Status::Skipped,
    };
    Ok(outcome)
}

/// What one leaf has to do.
struct Plan<'a> {
    has_gradient: bool,
    /// None for a frozen leaf.
    planned: Option<(Ticket<'a>, Progress)>,
}

fn plan<'a, G: Gradients + ?Sized>(leaf: &'a mut Leaf, x: &'a Tensor, grads: &G, storages: &HashSet<usize>) -> Result<Plan<'a>> {
    let source = source(leaf, x, grads, storages)?;
    let has_gradient = !source.is_empty();
    let Leaf { path, optimiser, state, frozen, steps, .. } = leaf;
    if *frozen {
        return Ok(Plan { has_gradient, planned: None });
    }
    let mut planned = optimiser.plan(state, RuleLeaf { path, x }, Gradient::new(source)).map_err(|error| error.at(path))?;
    if planned.progress == Progress::Applied {
        let next = *steps + 1;
        planned.job.counters.push((steps, next));
    }
    Ok(Plan { has_gradient, planned: Some((Ticket::new(planned.job), planned.progress)) })
}

/// The checked gradients of a leaf: one, or one for each of its paths. A gradient that shares storage with a parameter is copied,
/// because the update writes that storage while it reads the gradient.
fn source<G: Gradients + ?Sized>(leaf: &Leaf, x: &Tensor, grads: &G, storages: &HashSet<usize>) -> Result<Source> {
    let paths = if grads.by_path() { 1 + leaf.aliases.len() } else { 1 };
    let mut source = Source::new();
    for path in leaf.paths().take(paths) {
        let Some(gradient) = grads.gradient(path, x) else { continue };
        expect_gradient(path, x, gradient)?;
        let aliased = storages.contains(&storage_address(gradient));
        source.push(if aliased { gradient.copy()? } else { gradient.clone() });
    }
    Ok(source)
}
