//! The arithmetic of a step and the loops that run the arithmetic over elements. Both are in this module,
//! because a kernel whose type is erased carries its loop.

mod isa;
mod lanes;
mod pairwise;
mod reduce_op;

pub use isa::Isa;
pub(super) use lanes::{BLOCK, LaneArrays, Lanes, add, per_isa, subtract};
pub(crate) use lanes::{ErasedKernel, Kernel, erased};
pub(super) use pairwise::{halves, pairwise};
pub(super) use reduce_op::{ACCUMULATORS, ReduceOp, reduce_block};
pub(crate) use reduce_op::{ChunkTotals, Reducer, chunk_length};
