//! The plan for one leaf: its optimiser makes a job, which is checked.

use super::call::UpdateCall;
use super::exchange::CallGradients;
use crate::engine::{Job, WrittenStorages};
use crate::error::Result;
use crate::model::lent::{Lend, Lent, check_parameter};
use crate::rule::Extent;
use crate::rule::{LeafNorms, Planned, Progress, Target, Windows};
use crate::tree::Leaf;

/// What the plan for a leaf means for the call.
#[derive(Clone, Copy, Default)]
pub(crate) struct LeafPlan {
    /// `None` for a frozen leaf.
    pub(crate) progress: Option<Progress>,
    pub(crate) windows: Windows,
    /// Whether anything of the leaf changes.
    pub(crate) moves: bool,
    pub(crate) has_gradient: bool,
    /// Whether it may lack a gradient under `require_all`.
    pub(crate) allows_missing: bool,
}

/// The update of one leaf, planned or to be planned.
pub(crate) struct LeafUpdate<'p, 'a> {
    /// The leaf's index in the state.
    index: usize,
    /// The leaf, until the plan is made.
    leaf: Option<&'a mut Leaf>,
    x: &'a dyn Lend,
    /// `None` for a frozen leaf.
    job: &'p mut Option<Job<'a>>,
    pub(crate) plan: LeafPlan,
}

impl<'p, 'a> LeafUpdate<'p, 'a> {
    pub(crate) fn new(
        (index, ((leaf, x), job)): (usize, ((&'a mut Leaf, &'a Lent<'_>), &'p mut Option<Job<'a>>)),
    ) -> Self {
        LeafUpdate { index, leaf: Some(leaf), x: &**x, job, plan: LeafPlan::default() }
    }

    /// Whether making the plan reads a tensor on a device. candle has a CUDA stream for each thread; only the
    /// caller's stream comes after what the caller has computed.
    pub(crate) fn reads_device(&self) -> bool {
        !self.x.device().is_cpu()
    }

    pub(crate) fn make(
        &mut self,
        call: &UpdateCall,
        gradients: CallGradients<'_, 'a>,
        written: &WrittenStorages,
        norms: &[LeafNorms],
    ) -> Result<()> {
        let (Some(leaf), x) = (self.leaf.take(), self.x) else { return Ok(()) };
        let sources = gradients.sources(self.index, leaf, x)?;
        let has_gradient = !sources.is_empty();
        self.plan = LeafPlan { has_gradient, allows_missing: leaf.waiting.is_allowed, ..LeafPlan::default() };
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
        let (whole, first, is_cut) = (leaf.shape.elem_count(), leaf.part().start, leaf.is_cut());
        let Leaf { path, optimiser, acting, state, steps, waiting, .. } = leaf;
        let optimiser = acting.as_ref().unwrap_or(optimiser);
        let planned = optimiser
            .plan(state, Target { path, x, extent }, call.gradient(sources, path, norms.get(self.index)))
            .map_err(|error| error.at(path).counted_from(first))?;
        let moves = planned.moves();
        let Planned { mut job, progress, windows } = planned;
        if progress == Progress::Applied {
            let next = *steps + 1;
            job.counters.push((steps, next));
        }
        waiting.count(has_gradient, progress, &mut job.counters);
        job.whole = whole;
        let own = job.check(x, &|| optimiser.name())?;
        if is_cut {
            job.check_divisible(&|| optimiser.name())?;
        }
        job.copy_shared(written, &own)?;
        self.plan = LeafPlan { progress: Some(progress), windows, moves, ..self.plan };
        *self.job = Some(job);
        Ok(())
    }
}
