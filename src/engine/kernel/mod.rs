//! The arithmetic of a step and the loops that run it over elements. They are one room because a kernel
//! behind a pointer carries its loop.

mod erased;
mod isa;
mod lanes;
mod pairwise;
mod reduce_op;

pub(crate) use erased::{ErasedKernel, Kernel, erased};
pub use isa::Isa;
pub(super) use isa::Vectors;
pub(super) use lanes::{BLOCK, LaneArrays, LaneBlock, LaneFloat, add, per_isa, subtract};
pub(super) use pairwise::{halves, pairwise};
#[cfg(any(feature = "cuda", feature = "emulate", feature = "printed"))]
pub(super) use reduce_op::ReduceOp;
pub(super) use reduce_op::{ACCUMULATORS, join_accumulators, reduce_block, reduce_chunk};
pub(crate) use reduce_op::{ChunkTotals, Reducer, chunk_length};
