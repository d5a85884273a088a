//! What lies between a rank's own totals and those of the leaf.

use crate::engine::kernel::ChunkTotals;
use crate::error::Result;

/// How what this process has found becomes what all ranks have found together, each with a part of the leaves.
pub(crate) trait Gather {
    /// The totals of the chunks of all ranks, in the order of elements, for those of this one. The lists are as many on every rank, and may be empty.
    ///
    /// # Errors
    /// If this or another rank has failed.
    fn gather(&self, own: Result<Vec<ChunkTotals>>) -> Result<Vec<ChunkTotals>>;
}
