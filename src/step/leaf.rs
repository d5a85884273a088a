//! The plan for one leaf: its optimiser makes a job, which is checked.

use super::call::{UpdateCall, sources};
use crate::engine::{Job, Sources, WrittenStorages};
use crate::error::{Error, ErrorKind, Result};
use crate::model::gradients::GradientLookUp;
use crate::model::lent::{Lend, Lent, check_parameter};
use crate::numbers::DType;
use crate::rule::{Extent, LeafNorms, Planned, Progress, Windows, check_rounded};
use crate::tensors::repeated_zero;
use crate::tree::Leaf;

/// Where a leaf's gradient comes from.
pub(super) enum GradientSource<'g> {
    /// From the caller's collection. It is looked up when the leaf is planned, so that all threads share
    /// thousands of look-ups.
    LookUp(&'g dyn GradientLookUp),
    /// From a look-up before the step: one, if there is one, and those of further paths. The plan takes these
    /// handles, so that the memory of the last one is free once the leaf is written. They are no [`Sources`],
    /// because those cannot become handles for a shorter time.
    Found(Option<Lent<'g>>, Vec<Lent<'g>>),
    /// From all ranks, after they have agreed on the plans. A plan needs only its dtype.
    Promised(DType),
    /// The leaf has moved already, by a push with this plan.
    Pushed(LeafPlan),
    /// The leaf had a gradient that was not finite, and is not missing one.
    NotFinite,
}

impl<'g> GradientSource<'g> {
    /// From these gradients.
    pub(super) fn found(gradients: impl IntoIterator<Item = Lent<'g>>) -> Self {
        let mut gradients = gradients.into_iter();
        GradientSource::Found(gradients.next(), gradients.collect())
    }

    /// From this collection, for each of the leaves.
    pub(super) fn all(grads: &'g dyn GradientLookUp, leaves: usize) -> Vec<Self> {
        (0..leaves).map(|_| GradientSource::LookUp(grads)).collect()
    }

    /// Takes the gradients of all paths of the leaf out, each once. A promised one is a tensor without memory.
    pub(super) fn take(&mut self, leaf: &Leaf, x: &dyn Lend) -> Result<Sources<'g>> {
        match self {
            GradientSource::LookUp(grads) => sources(leaf.paths(), x, *grads),
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
    /// `None` for a frozen leaf.
    pub(super) progress: Option<Progress>,
    pub(super) windows: Windows,
    /// Whether anything of the leaf changes.
    pub(super) moves: bool,
    pub(super) has_gradient: bool,
    /// Whether it may lack a gradient under `require_all`.
    pub(super) allows_missing: bool,
    /// Whether its window is given up, because no call can end it.
    pub(super) gives_up_window: bool,
    /// Where the norms go that the call was asked for.
    pub(super) norms: Option<LeafNorms>,
}

/// The update of one leaf, planned or to be planned.
pub(super) struct LeafUpdate<'j, 'a> {
    /// The leaf, until the plan is made.
    pub(super) leaf: Option<&'a mut Leaf>,
    pub(super) gradient: GradientSource<'a>,
    /// The parameter, or this rank's part of it.
    pub(super) x: &'a dyn Lend,
    pub(super) plan: LeafPlan,
    /// `None` for a leaf that is frozen, or has moved already.
    pub(super) job: &'j mut Option<Job<'a>>,
}

impl LeafUpdate<'_, '_> {
    /// Whether making the plan reads a tensor on a device. candle has a CUDA stream for each thread; only the
    /// caller's stream comes after what the caller has computed.
    pub(super) fn reads_device(&self) -> bool {
        !self.x.device().is_cpu()
    }

    /// Makes the plan, unless it is made.
    pub(super) fn make(&mut self, call: &UpdateCall, written: &WrittenStorages) -> Result<()> {
        let (Some(leaf), x) = (self.leaf.take(), self.x) else { return Ok(()) };
        if let GradientSource::Pushed(plan) = &mut self.gradient {
            self.plan = std::mem::take(plan);
            return Ok(());
        }
        let sources = self.gradient.take(leaf, x)?;
        let has_gradient = !sources.is_empty();
        let allows_missing = leaf.waiting.is_allowed || matches!(self.gradient, GradientSource::NotFinite);
        self.plan = LeafPlan { has_gradient, allows_missing, ..LeafPlan::default() };
        leaf.check_parameter()?;
        if leaf.frozen {
            return Ok(());
        }
        let extent = if leaf.is_settled() { Extent::Sample } else { Extent::First };
        let extent = (!call.options.keep_masters).then_some(extent);
        if let (true, Some(Extent::First)) = (has_gradient, extent) {
            // The checks below read all of the parameter, before the rules choose what they work on.
            check_parameter("parameter", x, false).map_err(|error| error.at(&leaf.path))?;
            let found =
                if leaf.is_unreached() { leaf.catch_up(x) } else { leaf.check_copies(x, Extent::First) };
            found.map_err(|error| error.counted_from(leaf.part().start))?;
        }
        let norms = call.options.figures.then(LeafNorms::default);
        let (whole, first, is_cut) = (leaf.shape.elem_count(), leaf.part().start, leaf.is_cut());
        let Leaf { path, optimiser, acting, state, steps, waiting, left, .. } = leaf;
        let optimiser = acting.as_ref().unwrap_or(optimiser);
        let located = |error: Error| error.at(path).counted_from(first);
        let follows_master = state.followed().is_some();
        let planned =
            optimiser.plan(state, x, call.gradient(sources, path, norms.as_ref())).map_err(located)?;
        // Not in a call that brings the leaf nothing: no step is taken over a change then.
        if let Some(extent) = extent
            && (has_gradient || planned.progress == Progress::Applied)
        {
            let master = planned.job.x.lender();
            if follows_master { check_rounded(master, x, extent) } else { Leaf::check_left(*left, x) }
                .map_err(located)?;
        }
        // Known again once the call has ended: it may fail after it has written the parameter.
        *left = left.filter(|_| planned.progress != Progress::Applied);
        let moves = planned.moves();
        let Planned { mut job, progress, windows } = planned;
        if progress == Progress::Applied {
            let next = *steps + 1;
            job.counters.push((steps, next));
        }
        if !call.options.releases_windows {
            waiting.count(has_gradient, progress, &mut job.counters);
        }
        job.whole = whole;
        let own = job.check(x, &|| optimiser.name())?;
        if is_cut {
            job.check_divisible(&|| optimiser.name())?;
        }
        // A rule that does not declare `Kind::WholeModel` would get numbers of this leaf alone.
        if call.is_streamed && job.groups().next().is_some() {
            return Err(needs_all_gradients(path));
        }
        job.copy_shared(written, &own)?;
        self.plan = LeafPlan { progress: Some(progress), windows, moves, norms, ..self.plan };
        *self.job = Some(job);
        Ok(())
    }
}

/// The error of a streamed step for a rule that depends on gradients that come later.
pub(super) fn needs_all_gradients(path: &str) -> Error {
    let problem = "its rule needs numbers of all gradients, which come one at a time";
    let remedy = "collect the gradients, as `Segments::gradients` does, and call `update`, or \
                  `Update::apply_owned`, which frees each as it goes";
    Error::new(ErrorKind::Unsupported, problem).at(path).with_remedy(remedy)
}
