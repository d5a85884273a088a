//! What stands for the reference engine where there are no tensor operations: nothing is routed to it.

use super::kernel::ChunkTotals;
use super::plan::{GradientView, Job, ReductionRequest};
use crate::error::Result;
use crate::tensors::Tensor;

pub(super) fn reduce(request: ReductionRequest<'_, '_>) -> Result<ChunkTotals> {
    Err(request.view.job.broken(ABSENT))
}

pub(super) fn materialise(view: GradientView<'_, '_>) -> Result<Tensor> {
    Err(view.job.broken(ABSENT))
}

pub(super) fn commit(job: &mut Job<'_>) -> Result<()> {
    Err(job.broken(ABSENT))
}

const ABSENT: &str = "an update asks for tensor operations, which only the feature `candle` brings";
