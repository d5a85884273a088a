//! Windows of accumulation that cannot end.

use super::given::Given;
use super::how::{How, gradient};
use super::ranks::Ranks;
use crate::engine::{Epilogue, Job, Operand, Verdict, Written, reduce};
use crate::error::Result;
use crate::lent::Lent;
use crate::tree::{KeptSums, Leaf, Twins};

/// Whether all gradients of a skipped call are finite. If so, what was collected before is not.
pub(super) fn are_finite(
    how: How,
    ranks: &Ranks<'_>,
    leaves: &[Leaf],
    parameters: &[Lent<'_>],
    twins: &Twins,
    given: Given<'_>,
    sums: &mut KeptSums,
) -> Result<bool> {
    let how = How { finite_only: true, ..how };
    let written = Written::all();
    let mut jobs: Vec<Option<Job<'_>>> = leaves.iter().map(|_| None).collect();
    for (index, (leaf, x)) in leaves.iter().zip(parameters).enumerate().filter(|(_, (leaf, _))| !leaf.frozen) {
        let sources = given.sources(index, leaf, &**x, twins.get(&**x))?;
        let mut job = gradient(how, sources, &leaf.path, None).into_job(&leaf.path, Operand::Lent(&**x), Epilogue::StateOnly);
        let own = job.check(&**x, &|| leaf.optimiser.name())?;
        job.copy_shared(&written, &own)?;
        jobs[index] = Some(Job { whole: leaf.shape.elem_count(), ..job });
    }
    if let Given::Ranks(gradients) = given {
        gradients.add_up(&how, &mut jobs, sums)?;
    }
    Ok(reduce(how.engine, ranks, &mut jobs.iter_mut().flatten().collect::<Vec<&mut Job<'_>>>())?.verdict == Verdict::Go)
}
