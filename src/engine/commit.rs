//! The commit stage: writes parameters, state and counters.

use super::plan::Job;
use super::{Engine, functions, offload};
use crate::error::Result;

/// Writes all jobs (a job is the plan for one leaf): parameter and state of the leaf, then its counters.
///
/// # Errors
/// If a device, or a function from `Gradient::with_tensors_late`, fails; if a storage has been exchanged
/// since the plan; if an owner does not lend its memory.
pub(crate) fn commit(engine: Engine, jobs: Vec<&mut Job<'_>>) -> Result<()> {
    let (mut offloaded, not_offloaded): (Vec<_>, Vec<_>) =
        jobs.into_iter().partition(|job| job.offloaded.is_some());
    // Downloads that can fail for lack of memory come first, while nothing is written.
    offload::download_strided(&mut offloaded)?;
    functions::commit(engine, not_offloaded)?;
    offload::commit(engine, offloaded)
}
