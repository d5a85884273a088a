//! The commit stage: parameters, state and counters are written, one leaf after another.

use super::plan::Job;
use super::{Engine, functions, offload};
use crate::error::Result;

/// Runs the last stage over all jobs: parameters and state are written, and then the counters of that leaf
/// move.
///
/// # Errors
/// Only if a device fails, or a function that was left to this stage.
pub(crate) fn commit(engine: Engine, jobs: Vec<&mut Job<'_>>) -> Result<()> {
    let (mut offloaded, here): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.offloaded.is_some());
    offload::prepare(&mut offloaded)?;
    functions::commit(engine, here)?;
    offload::commit(engine, offloaded)
}
