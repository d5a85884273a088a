//! Windows of accumulation that cannot end.

use candle_core::Tensor;

use super::{How, LowPrecision, Plan, gradient};
use crate::engine::{Ticket, Verdict, reduce};
use crate::error::Result;
use crate::gradients::Gradients;
use crate::rule::Store;
use crate::tree::{Leaf, StateTree};

/// Whether all gradients of a call that was skipped are finite, so that what was collected before is not.
pub(super) fn are_finite<G: Gradients + ?Sized>(
    how: How,
    leaves: &mut [Leaf],
    parameters: &[Tensor],
    low: Option<&LowPrecision>,
    grads: &G,
) -> Result<bool> {
    let how = How { finite_only: true, ..how };
    let mut tickets = Vec::with_capacity(leaves.len());
    for (leaf, x) in leaves.iter_mut().zip(parameters).filter(|(leaf, _)| !leaf.frozen) {
        let mut nowhere = None;
        let mut plan = Plan::new(((leaf, x), &mut nowhere));
        (0..2).for_each(|stage| plan.prepare(low, grads, stage));
        let Some(leaf) = plan.leaf.take() else { continue };
        let source = plan.source(leaf, grads, |_| false)?;
        tickets.push(Some(Ticket::new(gradient(how, source, &leaf.path).into_job(&leaf.path, x, Store::Nothing))));
    }
    Ok(reduce(how.engine, &mut tickets)?.verdict == Verdict::Go)
}

/// Forgets what was collected: in the next call it would be as little finite as in this.
pub(super) fn give_up(state: &mut StateTree, path: &str) -> Result<()> {
    log::warn!("the gradients collected for {path:?} are not finite together, though each call's are: no step, and all windows begin anew");
    state.end_windows()
}
