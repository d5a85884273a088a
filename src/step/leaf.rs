//! The plan for one leaf (a parameter with its state): its optimiser makes a job, and the job is checked.
//!
//! The order in [`LeafUpdate::make`] matters:
//!
//! 1. Take the gradient out of its source, also if the leaf is frozen: it still is a gradient of the call.
//! 2. Before the first step, compare all of the parameter with the copies that rules keep of it, or renew
//!    them if earlier calls brought no gradient. The plan works on these copies.
//! 3. Let the optimiser make the job, which borrows the state from here on.
//! 4. Compare the parameter with its master, which the plan has chosen as x, and queue the counters.
//! 5. Check the job, which later stages trust. Then copy gradients that lie in memory that updates write,
//!    because the commit would ask for their locks while it holds that of the parameter.

use super::call::{UpdateCall, sources};
use crate::engine::{Job, OwnStorages, Progress, Sources, Windows, WrittenStorages, prefetch};
use crate::error::{Error, ErrorKind, Result};
use crate::model::gradients::GradientLookUp;
use crate::model::lent::{Lend, Lent, check_parameter};
use crate::numbers::{DType, counts};
use crate::rule::{Extent, LeafNorms, Optimiser, check_rounded};
use crate::tensors::repeated_zero;
use crate::tree::{Leaf, StateTree};

/// Where a leaf's gradient comes from.
#[derive(Default)]
pub(super) enum GradientSource<'g> {
    /// The collection of the call. The look-up is part of the plan, so that all threads share thousands of
    /// look-ups.
    #[default]
    Collection,
    /// Handles from a look-up before the step: the first path's gradient, and those of further paths. The
    /// plan takes the handles, so that the memory of the last one is freed once the leaf is written. Not
    /// [`Sources`], whose lifetime cannot be shortened.
    Found(Option<Lent<'g>>, Vec<Lent<'g>>),
    /// The sum of all ranks, which comes after they have agreed on the plans. A plan needs only its dtype.
    Promised(DType),
    /// A push has already moved the leaf, by this plan.
    Pushed(LeafPlan),
    /// A push was passed over, because its gradient was not finite. The leaf may lack a gradient.
    NotFinite,
}

impl<'g> GradientSource<'g> {
    /// A source with these gradients, maybe none.
    pub(super) fn found(gradients: impl IntoIterator<Item = Lent<'g>>) -> Self {
        let mut gradients = gradients.into_iter();
        GradientSource::Found(gradients.next(), gradients.collect())
    }

    /// The gradients of all leaves, looked up before the step. `parameters` are in the order of the leaves.
    pub(super) fn look_up_all<'x>(
        state: &StateTree,
        parameters: impl IntoIterator<Item = &'x dyn Lend>,
        grads: &'g dyn GradientLookUp,
    ) -> Result<Vec<Self>> {
        let of_leaf = |(leaf, x): (&Leaf, _)| Ok(GradientSource::found(sources(leaf.paths(), x, grads)?));
        state.leaves().zip(parameters).map(of_leaf).collect()
    }

    /// The sources of all leaves: these, or none if each gradient is in the collection of the call.
    pub(super) fn of_leaves(by_leaf: Vec<Self>) -> impl Iterator<Item = Self> {
        by_leaf.into_iter().chain(std::iter::repeat_with(Self::default))
    }

    /// Takes the gradients of all paths of the leaf out; handles can be taken once. `grads` is the collection
    /// of the call. A promised gradient is a tensor without memory of its own.
    pub(super) fn take(
        &mut self,
        leaf: &Leaf,
        x: &dyn Lend,
        grads: &'g dyn GradientLookUp,
    ) -> Result<Sources<'g>> {
        match self {
            GradientSource::Collection => sources(leaf.paths(), x, grads),
            GradientSource::Found(first, others) => {
                let mut all = Sources::from_iter(first.take());
                all.extend(std::mem::take(others));
                Ok(all)
            }
            GradientSource::Promised(dtype) => {
                let promise = repeated_zero(x.shape(), *dtype, x.device())?;
                Ok(Sources::from_iter([Lent::Tensor(promise)]))
            }
            GradientSource::Pushed(_) | GradientSource::NotFinite => Ok(Sources::new()),
        }
    }
}

/// What the plan for a leaf means for the call.
#[derive(Clone, Default)]
pub(super) struct LeafPlan {
    /// `None` if the leaf is frozen.
    pub(super) progress: Option<Progress>,
    pub(super) windows: Windows,
    /// Whether anything of the leaf changes.
    pub(super) moves: bool,
    pub(super) has_gradient: bool,
    /// Whether the leaf may lack a gradient under `require_all`.
    pub(super) allows_missing: bool,
    /// Whether the window of the leaf is given up, because no call can end it.
    pub(super) gives_up_window: bool,
    /// The cells for the norms of `Update::with_figures`.
    pub(super) norms: Option<LeafNorms>,
}

impl LeafPlan {
    /// Notes what a job means for the call, before the counters of the leaf are added to those of its rules.
    fn note(&mut self, job: &Job<'_>) {
        self.progress = Some(job.progress);
        self.windows = job.windows;
        // If a step has no gradient, only counters can change.
        self.moves = job.progress != Progress::WithoutGradient || !job.counters.is_empty();
    }
}

/// The update of one leaf, before and after its plan is made.
pub(super) struct LeafUpdate<'j, 'a> {
    /// The leaf; taken when the plan is made.
    pub(super) leaf: Option<&'a mut Leaf>,
    pub(super) gradient: GradientSource<'a>,
    /// The parameter, or this rank's part of it.
    pub(super) x: &'a dyn Lend,
    pub(super) plan: LeafPlan,
    /// Stays `None` if the leaf is frozen, or has already moved.
    pub(super) job: &'j mut Option<Job<'a>>,
}

impl<'a> LeafUpdate<'_, 'a> {
    /// Whether the plan reads a device. Such a plan is made on the thread of the caller: candle has a CUDA
    /// stream for each thread, and only that of the caller comes after what the caller has computed.
    pub(super) fn reads_device(&self) -> bool {
        !self.x.device().is_cpu()
    }

    /// Fetches into the cache what the plan reads first. Each stage follows pointers that the one before has
    /// fetched.
    pub(super) fn fetch(&self, stage: usize) {
        let Some(leaf) = &self.leaf else { return };
        match stage {
            0 => prefetch(&**leaf),
            1 => {
                prefetch(&leaf.state.tensors[..]);
                prefetch(leaf.path());
                self.x.tensor().into_iter().for_each(|tensor| prefetch(&**tensor));
            }
            _ => {}
        }
    }

    /// Makes the plan.
    pub(super) fn make(
        &mut self,
        call: &UpdateCall,
        grads: &'a dyn GradientLookUp,
        written: &WrittenStorages,
    ) -> Result<()> {
        let (Some(leaf), x) = (self.leaf.take(), self.x) else { return Ok(()) };
        if let GradientSource::Pushed(plan) = &mut self.gradient {
            self.plan = std::mem::take(plan);
            return Ok(());
        }
        let sources = self.take_gradient(leaf, grads)?;
        leaf.check_parameter()?;
        if leaf.frozen {
            return Ok(());
        }
        let extent = if leaf.is_settled() { Extent::Sample } else { Extent::First };
        let extent = (!call.options.keep_masters).then_some(extent);
        if self.plan.has_gradient && extent == Some(Extent::First) {
            check_copies(leaf, x)?;
        }

        self.plan.norms = call.options.figures.then(LeafNorms::default);
        let (whole, first, is_cut) = (leaf.shape.elem_count(), leaf.part().start, leaf.is_cut());
        let follows_master = leaf.state.followed().is_some();
        let Leaf { path, optimiser, acting, state, steps, waiting, left, .. } = leaf;
        let optimiser: &Optimiser = acting.as_ref().unwrap_or(optimiser);
        let located = |error: Error| error.at(path).counted_from(first);
        let gradient = call.gradient(sources, path, self.plan.norms.as_ref());
        let mut job = optimiser.job(state, x, gradient).map_err(located)?;
        job.whole = whole;
        self.plan.note(&job);

        let makes_step = job.progress == Progress::Applied;
        // Without a gradient or a step nothing overwrites a change of the parameter, so it is not looked for.
        if let Some(extent) = extent.filter(|_| self.plan.has_gradient || makes_step) {
            let master = job.x.lender();
            if follows_master { check_rounded(master, x, extent) } else { Leaf::check_left(*left, x) }
                .map_err(located)?;
        }
        if makes_step {
            // `StepSummary::committed` sets it again. Until then it is unknown, because a commit that fails
            // may have written the parameter.
            *left = None;
            let next = counts::after(*steps, 1);
            job.counters.push((steps, next));
        }
        // Such a call brings no gradients by design, so none is missing.
        if !call.options.releases_windows {
            waiting.count(self.plan.has_gradient, job.progress, &mut job.counters);
        }

        let own = check_job(&job, call, x, is_cut, &|| optimiser.name())?;
        job.copy_shared(written, &own)?;
        *self.job = Some(job);
        Ok(())
    }

    /// Takes the gradients of the leaf out of their source, and notes whether there are any.
    fn take_gradient(&mut self, leaf: &Leaf, grads: &'a dyn GradientLookUp) -> Result<Sources<'a>> {
        let sources = self.gradient.take(leaf, self.x, grads)?;
        self.plan.has_gradient = !sources.is_empty();
        self.plan.allows_missing =
            leaf.waiting.is_allowed || matches!(self.gradient, GradientSource::NotFinite);
        Ok(sources)
    }
}

/// Before the first step, compares all of the parameter with the copies that rules keep, or renews these if
/// earlier calls brought no gradient.
fn check_copies(leaf: &mut Leaf, x: &dyn Lend) -> Result<()> {
    // Checked here, because the comparisons read all of the parameter, and `Job::check` comes later.
    check_parameter("parameter", x, false).map_err(|error| error.at(&leaf.path))?;
    let compared = if leaf.is_unreached() { leaf.catch_up(x) } else { leaf.check_copies(x, Extent::First) };
    compared.map_err(|error| error.counted_from(leaf.part().start))
}

/// Refuses a job that does not fit its parameter, its part of it, or the call. Returns the storages that the
/// commit locks for writing. `rule` names the optimiser in errors.
fn check_job(
    job: &Job<'_>,
    call: &UpdateCall,
    x: &dyn Lend,
    is_cut: bool,
    rule: &dyn Fn() -> String,
) -> Result<OwnStorages> {
    let own = job.check(x, rule)?;
    if is_cut {
        job.check_divisible(rule)?;
    }
    // `Update::begin` refuses rules that declare `Kind::WholeModel`. A rule that does not would get numbers
    // of this leaf alone.
    if call.is_streamed && job.groups().next().is_some() {
        return Err(needs_all_gradients(job.path));
    }
    Ok(own)
}

/// The error of a streamed step for a rule that depends on later gradients.
pub(super) fn needs_all_gradients(path: &str) -> Error {
    let problem = "its rule needs norms or sums over the gradients of all parameters, but this step gets the \
                   gradients one at a time";
    let remedy = "collect the gradients, as `Segments::gradients` does, and call `update`, or \
                  `Update::apply_owned`, which frees each gradient after its use";
    Error::new(ErrorKind::Unsupported, problem).at(path).with_remedy(remedy)
}
