//! The plan for one leaf (a parameter with its state): its optimiser makes a job, and the job is checked.
//!
//! The order in [`LeafUpdate::make`] matters:
//!
//! 1. Take the gradient out of its source, also if the leaf is frozen: the call still has this gradient.
//! 2. Before the first step, compare the whole parameter with the copies that rules keep of it, or renew the
//!    copies if earlier calls brought no gradient. The plan works on these copies.
//! 3. Let the optimiser make the job, which borrows the state from here on.
//! 4. Compare the parameter with its master, which the plan has chosen as x, and queue the counters.
//! 5. Check the job, which later stages trust. Then copy gradients that lie in memory that updates write,
//!    because the commit would ask for their locks while it holds the parameter's lock.

use super::call::{UpdateCall, sources};
use crate::engine::{Job, Progress, Sources, Windows, WrittenStorages, prefetch};
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
    /// plan takes the handles, so that a gradient is freed once its leaf is written. The fields are not
    /// [`Sources`], because the lifetime of `Sources` cannot be shortened.
    Handles(Option<Lent<'g>>, Vec<Lent<'g>>),
    /// The sum of all ranks, which comes after all ranks have agreed on the plans. A plan needs only its
    /// dtype.
    Promised(DType),
    /// A push has already moved the leaf, by this plan.
    Pushed(LeafPlan),
    /// The step has passed over a pushed gradient that was not finite. The leaf may lack a gradient.
    NotFinite,
}

impl<'g> GradientSource<'g> {
    /// A source with these gradients, maybe none.
    pub(super) fn from_handles(gradients: impl IntoIterator<Item = Lent<'g>>) -> Self {
        let mut gradients = gradients.into_iter();
        GradientSource::Handles(gradients.next(), gradients.collect())
    }

    /// The gradients of all leaves, looked up before the step. `parameters` are in the order of the leaves.
    pub(super) fn look_up_all<'x>(
        state: &StateTree,
        parameters: impl IntoIterator<Item = &'x dyn Lend>,
        grads: &'g dyn GradientLookUp,
    ) -> Result<Vec<Self>> {
        let source =
            |(leaf, x): (&Leaf, _)| Ok(GradientSource::from_handles(sources(leaf.paths(), x, grads)?));
        state.leaves().zip(parameters).map(source).collect()
    }

    /// The sources of all leaves, in order. After the end of `by_leaf` each source is the collection of the
    /// call, without end: `by_leaf` is empty if all gradients are in the collection.
    pub(super) fn for_all_leaves(by_leaf: Vec<Self>) -> impl Iterator<Item = Self> {
        by_leaf.into_iter().chain(std::iter::repeat_with(Self::default))
    }

    /// Takes out the gradients of all paths of the leaf; handles can be taken once. `grads` is the collection
    /// of the call. A promised gradient is a tensor without memory of its own.
    pub(super) fn take(
        &mut self,
        leaf: &Leaf,
        x: &dyn Lend,
        grads: &'g dyn GradientLookUp,
    ) -> Result<Sources<'g>> {
        match self {
            GradientSource::Collection => sources(leaf.paths(), x, grads),
            GradientSource::Handles(first, others) => {
                let mut gradients = Sources::from_iter(first.take());
                gradients.extend(std::mem::take(others));
                Ok(gradients)
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
    /// Whether the window of the leaf is given up, because no call can end the window.
    pub(super) gives_up_window: bool,
    /// The cells for the norms of `Update::with_figures`.
    pub(super) norms: Option<LeafNorms>,
}

impl LeafPlan {
    /// Notes what a job means for the call. The job must not have the counters of the leaf yet.
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
    /// Whether the plan reads a device. Such a plan is made on the caller's thread: candle has a CUDA stream
    /// for each thread, and only the caller's stream comes after what the caller has computed.
    pub(super) fn reads_device(&self) -> bool {
        !self.x.device().is_cpu()
    }

    /// Fetches into the cache what the plan reads first. Each stage follows pointers that the stage before
    /// has fetched.
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

    /// Makes the plan and the job of the leaf.
    pub(super) fn make(
        &mut self,
        call: &UpdateCall,
        grads: &'a dyn GradientLookUp,
        targets: &WrittenStorages,
    ) -> Result<()> {
        let (Some(leaf), x) = (self.leaf.take(), self.x) else {
            return Ok(());
        };
        if let GradientSource::Pushed(plan) = &mut self.gradient {
            self.plan = std::mem::take(plan);
            return Ok(());
        }
        let sources = self.take_gradient(leaf, grads)?;
        leaf.check_parameter()?;
        if leaf.frozen {
            return Ok(());
        }
        // With `keep_masters` no change of the parameter is looked for.
        let extent = match leaf.is_settled() {
            _ if call.options.keep_masters => None,
            true => Some(Extent::Sample),
            false => Some(Extent::First),
        };
        if self.plan.has_gradient && extent == Some(Extent::First) {
            check_copies(leaf, x)?;
        }
        *self.job = Some(self.checked_job(leaf, sources, call, extent, targets)?);
        Ok(())
    }

    /// The job of the leaf's optimiser, compared with the parameter over `extent` and checked.
    fn checked_job(
        &mut self,
        leaf: &'a mut Leaf,
        sources: Sources<'a>,
        call: &UpdateCall,
        extent: Option<Extent>,
        targets: &WrittenStorages,
    ) -> Result<Job<'a>> {
        let x = self.x;
        self.plan.norms = call.options.figures.then(LeafNorms::default);
        let (leaf_length, part_start, is_cut) = (leaf.shape.elem_count(), leaf.part().start, leaf.is_cut());
        let follows_master = leaf.state.outer_master().is_some();
        let Leaf {
            path,
            optimiser,
            acting,
            state,
            steps,
            missing_gradients,
            last_checksum,
            ..
        } = leaf;
        let optimiser: &Optimiser = acting.as_ref().unwrap_or(optimiser);
        let locate = |error: Error| error.at(path).counted_from(part_start);
        let gradient = call.gradient(sources, path, self.plan.norms.as_ref());
        let mut job = optimiser.job(state, x, gradient).map_err(locate)?;
        job.leaf_length = leaf_length;
        self.plan.note(&job);

        let makes_step = job.progress == Progress::Applied;
        // Without a gradient or a step nothing overwrites a change of the parameter, so no change is looked
        // for.
        if let Some(extent) = extent.filter(|_| self.plan.has_gradient || makes_step) {
            let master = &*job.x;
            if follows_master {
                check_rounded(master, x, extent)
            } else {
                Leaf::check_last_checksum(*last_checksum, *steps, x)
            }
            .map_err(locate)?;
        }
        if makes_step {
            let next = counts::add(*steps, 1);
            job.counters.push((steps, next));
        }
        // A call that releases windows brings no gradients by design, so no gradient is missing.
        if !call.options.releases_windows {
            missing_gradients.count(self.plan.has_gradient, job.progress, &mut job.counters);
        }

        check_job(&job, call, x, is_cut, &|| optimiser.name())?;
        job.copy_shared(targets)?;
        Ok(job)
    }

    /// Takes the gradients of the leaf out of their source, and notes whether there are any.
    fn take_gradient(&mut self, leaf: &Leaf, grads: &'a dyn GradientLookUp) -> Result<Sources<'a>> {
        let sources = self.gradient.take(leaf, self.x, grads)?;
        self.plan.has_gradient = !sources.is_empty();
        self.plan.allows_missing =
            leaf.missing_gradients.is_allowed || matches!(self.gradient, GradientSource::NotFinite);
        Ok(sources)
    }
}

/// Compares the whole parameter with the copies that rules keep, before the first step.
///
/// If earlier calls brought no gradient, renews the copies instead.
fn check_copies(leaf: &mut Leaf, x: &dyn Lend) -> Result<()> {
    // `Job::check` would come too late, because the comparisons read the whole parameter.
    check_parameter("parameter", x, false).map_err(|error| error.at(&leaf.path))?;
    let result = if leaf.is_unreached() {
        leaf.catch_up(x)
    } else {
        leaf.check_copies(&leaf.state, x, Extent::First)
    };
    result.map_err(|error| error.counted_from(leaf.part().start))
}

/// Refuses a job that does not fit its parameter, this rank's part, or the call. `rule` names the optimiser
/// in errors.
fn check_job(
    job: &Job<'_>,
    call: &UpdateCall,
    x: &dyn Lend,
    is_cut: bool,
    rule: &dyn Fn() -> String,
) -> Result<()> {
    job.check(x, rule)?;
    if is_cut {
        job.check_divisible(rule)?;
    }
    // `Update::begin` refuses rules that declare `Kind::WholeModel`. A rule that does not declare that kind
    // would get numbers of this leaf alone.
    if call.is_streamed && job.shares_numbers() {
        return Err(needs_all_gradients_error(job.path));
    }
    Ok(())
}

/// The error of a streamed step for a rule that depends on later gradients.
pub(super) fn needs_all_gradients_error(path: &str) -> Error {
    let problem = "its rule needs norms or sums over the gradients of all parameters, but this step gets the \
                   gradients one at a time";
    let remedy = "collect the gradients, as `Segments::gradients` does, and call `update`, or \
                  `Update::apply_owned`, which frees each gradient after its use";
    Error::new(ErrorKind::Unsupported, problem)
        .at(path)
        .with_remedy(remedy)
}
