//! One step of a whole model: call → plan → reduce → commit → outcome.

use super::call::{OwnGradients, UpdateCall};
use super::exchange::{CallGradients, RankGradients};
use super::figures::LeafFigures;
use super::leaf::{LeafPlan, LeafUpdate};
use super::missing::Missing;
use super::outcome::{Outcome, Outlier, SkipReason, Status};
use super::ranks::Ranks;
use crate::engine::{
    Epilogue, Job, Norms, Operand, ReduceOutcome, Sources, UpdateTargets, Verdict, commit, for_all, reduce,
};
use crate::error::warning::Warning;
use crate::error::{Error, ErrorKind, Result};
use crate::model::gradients::GradientLookUp;
use crate::model::lent::Lent;
use crate::ranks::Call;
use crate::ranks::KeptSums;
use crate::rule::{LeafNorms, Progress, Windows};
use crate::tree::{Leaf, LimitedNorms, NormOutlier, StateTree};

/// The gradients that a step gets.
pub(crate) enum StepGradients<'g> {
    /// The caller keeps them.
    Lent(&'g dyn GradientLookUp),
    /// The only handles of tensors, by leaf: the memory of each is free once its leaf is written.
    Owned(Vec<Sources<'static>>),
}

/// Applies a step to these parameters, which are in the order of the leaves.
pub(crate) fn step(
    call: UpdateCall,
    state: &mut StateTree,
    parameters: &[Lent<'_>],
    grads: StepGradients<'_>,
) -> Result<Outcome> {
    let (mut call, requires_all) = (call.of_state(state), state.requires_all);
    keep_written(state, parameters);

    // Call: all ranks agree, then each works on its parts.
    let StateTree { leaves, jobs: pool, sums, norms, world, .. } = state;
    let ranks = Ranks::new(world.as_ref());
    let own_gradients = match &grads {
        StepGradients::Lent(grads) => OwnGradients::LookUp(*grads),
        StepGradients::Owned(found) => OwnGradients::Found(found),
    };
    let agree =
        |world| RankGradients::agree(world, &mut call, requires_all, leaves, parameters, own_gradients);
    let of_ranks = ranks.several().map(agree).transpose()?;
    let gradients = of_ranks.as_ref().map_or(CallGradients::Own(own_gradients), CallGradients::Ranks);
    let own_parts = of_ranks.as_ref().map(RankGradients::own_parts);
    let own = own_parts.as_deref().unwrap_or(parameters);

    // Plan.
    let leaf_norms =
        if call.options.figures { leaves.iter().map(|_| LeafNorms::default()).collect() } else { Vec::new() };
    let mut jobs = pool.take(leaves.len());
    let plan = StepPlan::make(&call, requires_all, leaves, own, gradients, &leaf_norms, &mut jobs);
    let mut plan = ranks.settle(Call::Plan, plan)?;
    if plan.is_refused(&call) {
        drop(jobs);
        return Err(plan.refusal(&call, state, "nothing was changed"));
    }
    if !plan.moves {
        pool.recycle(jobs);
        return Ok(plan.outcome(state, Status::Skipped(SkipReason::NothingToMove)));
    }
    if !plan.collects() {
        // Without a gradient no sums are taken, and rules that follow sums stay as they are.
        jobs.iter_mut().flatten().for_each(|job| job.steps.clear());
    }

    // Reduce.
    let add_up = |of_ranks: &RankGradients| of_ranks.add_up(call.options.engine, &mut jobs, sums);
    let left = of_ranks
        .as_ref()
        .map_or(Ok(Vec::new()), add_up)
        .or_else(|error| ranks.settle(Call::Plan, Err(error)))?;
    let reduced = reduce(call.options.engine, &ranks, &mut planned(&mut jobs));
    let reduced = reduced
        .map_err(|error| of_ranks.iter().fold(error, |error, of_ranks| of_ranks.with_origin(error, &jobs)));
    let ReduceOutcome { verdict, group_norms, limited, .. } = reduced?;
    plan.group_norms = group_norms.into_iter().collect();
    if let Verdict::Skip { offender } = verdict {
        pool.recycle(jobs);
        let cannot_end = plan.windows.released && are_finite(&call, &ranks, leaves, own, gradients, sums)?;
        return plan.not_finite(state, offender, cannot_end);
    }
    if let Some(outlier) = norms.outlier(&limited) {
        pool.recycle(jobs);
        return plan.outlier(state, outlier, &limited);
    }

    // Commit. Of gradients that are the step's own, the plans have the last handles from here on.
    drop(grads);
    let sets_numbers = |(leaf, job): (usize, &Option<Job<'_>>)| {
        job.as_ref().filter(|job| !job.numbers.is_empty()).map(|_| leaf)
    };
    let with_numbers: Vec<usize> = jobs.iter().enumerate().filter_map(sets_numbers).collect();
    let committed = match &of_ranks {
        Some(of_ranks) => of_ranks.commit(call.options.engine, &mut jobs, &left),
        None => commit(call.options.engine, planned(&mut jobs)),
    };
    ranks.settle(Call::Commit, committed.map_err(|error| error.after(moved(&jobs))))?;
    pool.recycle(jobs);
    ranks.share(leaves, parameters, &plan.moved)?;
    norms.record(&limited);

    // Outcome.
    plan.figures = figures(leaves, leaf_norms.iter().map(LeafNorms::found));
    state.share_numbers(&with_numbers);
    Ok(plan.committed(state, parameters))
}

/// Registers memory that has moved, before any call asks what others write: of two calls that begin at once,
/// one sees the other. candle's variables do not move.
pub(super) fn keep_written(state: &mut StateTree, parameters: &[Lent<'_>]) {
    let elsewhere = state
        .leaves
        .iter()
        .zip(parameters)
        .filter(|(leaf, x)| leaf.storage.is_none() || x.tensor().is_none());
    let elsewhere =
        elsewhere.filter_map(|(leaf, x)| x.memory().filter(|memory| Some(*memory) != leaf.storage)).collect();
    state.written_elsewhere.keep(elsewhere);
}

/// The jobs of all leaves that are not frozen.
pub(super) fn planned<'j, 'a>(jobs: &'j mut [Option<Job<'a>>]) -> Vec<&'j mut Job<'a>> {
    jobs.iter_mut().flatten().collect()
}

/// The paths of the leaves that a commit has moved.
pub(super) fn moved<'j>(jobs: &'j [Option<Job<'_>>]) -> impl Iterator<Item = &'j str> {
    jobs.iter().flatten().filter(|job| job.has_moved).map(|job| job.path)
}

/// The plans of all leaves together, and the norms and figures found later.
pub(super) struct StepPlan {
    /// Leaves that move.
    pub(super) moved: Vec<usize>,
    accumulated: usize,
    frozen: usize,
    missing: Missing,
    pub(super) has_gradient: bool,
    /// Whether anything changes.
    pub(super) moves: bool,
    pub(super) windows: Windows,
    /// The norms of all groups, in their order.
    pub(super) group_norms: Vec<(u64, f64)>,
    pub(super) figures: Vec<LeafFigures>,
}

impl StepPlan {
    /// Plans all leaves.
    fn make<'a>(
        call: &UpdateCall,
        requires_all: bool,
        leaves: &'a mut [Leaf],
        parameters: &'a [Lent<'_>],
        gradients: CallGradients<'_, 'a>,
        norms: &[LeafNorms],
        jobs: &mut [Option<Job<'a>>],
    ) -> Result<Self> {
        let written = UpdateTargets::all();
        let mut plans: Vec<LeafUpdate<'_, '_>> =
            leaves.iter_mut().zip(parameters).zip(jobs).enumerate().map(LeafUpdate::new).collect();
        let make = |plan: &mut LeafUpdate<'_, 'a>| plan.make(call, gradients, &written, norms);
        for_all(&mut plans, |plan| if plan.reads_device() { Ok(()) } else { make(plan) })?;
        // Plans that the caller's thread has to make.
        plans.iter_mut().try_for_each(make)?;

        let mut all = StepPlan::new(requires_all, plans.len());
        plans.iter().enumerate().for_each(|(leaf, update)| all.add(leaf, &update.plan));
        Ok(all)
    }

    /// The plan without leaves, with room for so many.
    pub(super) fn new(requires_all: bool, leaves: usize) -> Self {
        StepPlan {
            moved: Vec::with_capacity(leaves),
            accumulated: 0,
            frozen: 0,
            missing: Missing::new(requires_all),
            has_gradient: false,
            moves: false,
            windows: Windows::default(),
            group_norms: Vec::new(),
            figures: Vec::new(),
        }
    }

    /// Adds a leaf, in path order.
    pub(super) fn add(&mut self, leaf: usize, plan: &LeafPlan) {
        self.has_gradient |= plan.has_gradient;
        self.moves |= plan.moves;
        self.windows.open |= plan.windows.open;
        self.windows.released |= plan.windows.released;
        match plan.progress {
            None => self.frozen += 1,
            Some(Progress::Applied) => self.moved.push(leaf),
            Some(Progress::Accumulated) => self.accumulated += 1,
            Some(progress) => self.missing.add(leaf, progress, plan.allows_missing),
        }
    }

    /// Whether any gradient is used.
    fn collects(&self) -> bool {
        self.moved.len() + self.accumulated > 0
    }

    fn has_no_gradients(&self, call: &UpdateCall) -> bool {
        !call.options.allow_no_gradients && !self.has_gradient
    }

    /// Whether required gradients are missing.
    pub(super) fn is_refused(&self, call: &UpdateCall) -> bool {
        self.has_no_gradients(call)
            || self.missing.is_refused() && (self.collects() || !call.options.allow_no_gradients)
    }

    /// The error of a refused call, which says what has moved.
    pub(super) fn refusal(&self, call: &UpdateCall, state: &StateTree, moved: &str) -> Error {
        if !self.has_no_gradients(call) {
            return self.missing.refusal(state, moved);
        }
        let problem = format!("there is no gradient for any of the {} parameters", state.len());
        Error::new(ErrorKind::NoGradient, problem)
            .with_remedy("find out by `audit` whether the loss depends on this model's variables")
    }

    /// The outcome of a call that was committed. It counts in windows, and the state meets its warnings.
    pub(super) fn committed(self, state: &mut StateTree, parameters: &[Lent<'_>]) -> Outcome {
        state.calls = if self.windows.open { state.calls + 1 } else { 0 };
        let status = if self.moved.is_empty() { Status::Accumulated } else { Status::Stepped };
        // Without any gradient the call is one that may have none.
        let missing = if self.has_gradient { self.missing.warn(state) } else { None };
        let warnings =
            missing.into_iter().chain(state.warn_of_shown()).chain(state.warn_of_numbers(parameters));
        let has_stepped = status == Status::Stepped;
        let of_rate = if has_stepped { state.warn_of_rate_of_zero() } else { None };
        let warnings = warnings.chain(of_rate).collect();
        let outcome = Outcome { warnings, ..self.outcome(state, status) };
        if has_stepped {
            state.set_steps(state.steps.saturating_add(1));
        }
        outcome
    }

    /// The outcome of a call with this status.
    pub(super) fn outcome(self, state: &StateTree, status: Status) -> Outcome {
        let counts = match status {
            Status::Skipped(SkipReason::NothingToMove) | Status::Stepped | Status::Accumulated => {
                (self.moved.len(), self.accumulated)
            }
            Status::Skipped(_) => (0, 0),
        };
        let first = self.moved.first().map(|&leaf| &state.leaves[leaf]);
        Outcome {
            applied: counts.0,
            accumulated: counts.1,
            frozen: self.frozen,
            without_gradient: self.missing.into_paths(state),
            learning_rate: first.filter(|_| status == Status::Stepped).and_then(Leaf::learning_rate),
            global_norm: self.group_norms.first().map(|(_, norm)| *norm),
            group_norms: self.group_norms,
            figures: self.figures,
            status,
            ..Outcome::default()
        }
    }

    /// Skips the call for this parameter, whose gradient is not finite. If all gradients of the call are
    /// finite, windows `cannot_end`: their sums would not be finite in the next call either.
    fn not_finite(self, state: &mut StateTree, path: String, cannot_end: bool) -> Result<Outcome> {
        if !cannot_end {
            return Ok(self.outcome(state, Status::Skipped(SkipReason::NotFinite { path })));
        }
        state.end_windows()?;
        let warnings =
            state.warnings.meet(Warning::WindowsGivenUp { path: path.clone() }).into_iter().collect();
        Ok(Outcome { warnings, ..self.outcome(state, Status::Skipped(SkipReason::WindowsGivenUp { path })) })
    }

    /// Skips the call for an outlier. Its norm is recorded all the same, as norms that stay large are no
    /// longer outliers. If windows collected the outlier, they are given up.
    fn outlier(self, state: &mut StateTree, found: NormOutlier, norms: &LimitedNorms) -> Result<Outcome> {
        let NormOutlier { group, norm, limit, is_collected } = found;
        state.norms.record(norms);
        if is_collected {
            state.end_windows()?;
        }
        Ok(self.outcome(state, Status::Skipped(SkipReason::Outlier(Outlier { group, norm, limit }))))
    }
}

/// Whether all gradients of a skipped call are finite. If so, the sums of windows are not.
pub(super) fn are_finite(
    call: &UpdateCall,
    ranks: &Ranks<'_>,
    leaves: &[Leaf],
    parameters: &[Lent<'_>],
    gradients: CallGradients<'_, '_>,
    sums: &mut KeptSums,
) -> Result<bool> {
    let mut call = *call;
    call.options.finite_only = true;
    let (engine, written) = (call.options.engine, UpdateTargets::all());
    let mut jobs: Vec<Option<Job<'_>>> = leaves.iter().map(|_| None).collect();
    for (index, (leaf, x)) in leaves.iter().zip(parameters).enumerate().filter(|(_, (leaf, _))| !leaf.frozen)
    {
        let sources = gradients.sources(index, leaf, &**x)?;
        let mut job = call.gradient(sources, &leaf.path, None).into_job(
            &leaf.path,
            Operand::Lent(&**x),
            Epilogue::StateOnly,
        );
        let own = job.check(&**x, &|| leaf.optimiser.name())?;
        job.copy_shared(&written, &own)?;
        jobs[index] = Some(Job { whole: leaf.shape.elem_count(), ..job });
    }
    if let CallGradients::Ranks(gradients) = gradients {
        gradients.add_up(engine, &mut jobs, sums)?;
    }
    Ok(reduce(engine, ranks, &mut planned(&mut jobs))?.verdict == Verdict::Go)
}

/// The figures of the leaves that have moved, of those whose norms were found.
pub(super) fn figures(
    leaves: &[Leaf],
    norms: impl Iterator<Item = Option<(f64, Norms)>>,
) -> Vec<LeafFigures> {
    let of_leaf = |(leaf, norms): (&Leaf, Option<(f64, Norms)>)| {
        let (gradient, step) = norms?;
        Some(LeafFigures {
            path: leaf.path.clone(),
            gradient,
            parameter: step.parameter,
            update: step.gradient,
        })
    };
    leaves.iter().zip(norms).filter_map(of_leaf).collect()
}
