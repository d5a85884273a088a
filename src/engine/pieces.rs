//! Jobs (plans for one leaf each) that are committed piece by piece, because their gradients arrive in
//! pieces.

use std::ops::Range;

use super::plan::{Job, Sources, Step};
use super::route::{Engine, Route};
use super::{cpu, functions};
use crate::error::Result;

/// The elements of a leaf, or a range of them.
pub(crate) struct Piece<'a> {
    /// The index of the leaf's job.
    pub(crate) job: usize,
    /// Counted from the first element of the job. The pieces of a job follow each other.
    pub(crate) elements: Range<usize>,
    /// The gradients of these elements.
    pub(crate) gradients: Sources<'a>,
}

/// Whether a job can be committed in pieces: the fused CPU engine runs it, and no step needs all elements at
/// once.
pub(crate) fn is_splittable(engine: Engine, job: &Job<'_>) -> bool {
    let is_elementwise = |step: &Step<'_>| matches!(step, Step::Map { .. } | Step::Identity);
    engine.is_fused_on_cpu(job.x.device()) && job.steps.iter().all(is_elementwise)
}

/// Writes the pieces, and finishes each job with its last piece.
///
/// # Errors
/// As `engine::commit`.
pub(crate) fn commit_pieces<'a>(
    engine: Engine,
    jobs: &mut [Option<&mut Job<'a>>],
    pieces: impl IntoIterator<Item = Piece<'a>>,
) -> Result<()> {
    let mut whole_jobs = Vec::new();
    for Piece {
        job: index,
        elements,
        gradients,
    } in pieces
    {
        let Some(job) = jobs[index].as_mut() else { continue };
        job.sources = gradients;
        let (is_whole, is_last) = (elements.len() == job.length, elements.end == job.length);
        match engine.route(job.x.device()) {
            Route::Cpu(isa) if !is_whole => cpu::commit_part(isa, job, elements, is_last)?,
            _ => whole_jobs.extend(jobs[index].take()),
        }
    }
    functions::commit(engine, whole_jobs)
}
