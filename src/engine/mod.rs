//! How a planned step runs. The engine knows arithmetic, tensors and devices, but no rule, model or tree.
//!
//! Every leaf's rules plan first, and compute nothing. Then the norms and tensor functions that they asked
//! for are evaluated, reading only. Last, parameters, state and counters are written, in one pass per leaf. A
//! factor, a limit and a decay go into the loop of the step behind them, their prologue. If several loops are
//! left, a block of 512 bytes of each array goes through all of them while it is in the first-level cache.
//! One by itself, with all data in place, needs no blocks. Leaves below 65 536 elements are taken in rows, a
//! thread for each row. All threads share a larger one. If all leaves together are small, they run on the
//! caller's thread.
//!
//! On CUDA devices all leaves with the same chain and dtypes are one launch of code that is printed from the
//! same arithmetic. It gives the same bits, except for norms, which are added up in another order (fixed by
//! lengths, dtypes and alignment). Multiply-add is not contracted there either, which costs nothing, as
//! memory is the limit.
//!
//! A step that needs norms, sums or checks from a device waits for it: once for everything that depends on no
//! other answer, and once more for each norm of what another has scaled. AdamW waits for none, AdamW behind a
//! global norm once, LAMB behind a global norm twice. A norm with a p other than 0, 1, 2 and ∞ counts twice.
//! Before its first step a parameter with a master is compared with it, in a sample.
//!
//! A parameter may be on another device than its master and state (see [`Offload`](crate::Offload)). Its
//! gradient is downloaded before it is first read, the work is done on the CPU, and the parameter is uploaded
//! when it has been written there.
//!
//! The fused CPU engine runs on threads of its own, as many as rayon's current pool has (`RAYON_NUM_THREADS`,
//! or the pool in which [`update`](crate::update) is called).

mod codegen;
mod commit;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod device;
mod dispatch;
#[cfg(feature = "emulate")]
pub mod emulation;
mod functions;
mod kernel;
mod memory;
mod offload;
mod pieces;
pub(crate) mod plan;
mod reduce;
#[cfg(feature = "candle")]
mod reference;
mod route;

pub(crate) use codegen::{
    ArrayRole, BoundKernel, CUDA_FLAGS, PointerTo, RowField, RowLayout, THREADS, TracedKernel, code, traced,
    used, waits,
};
pub(crate) use commit::commit;
pub(crate) use cpu::{for_all, to_bf16, to_f16};
pub(crate) use dispatch::download;
pub(crate) use functions::{elements, sum_to};
pub use kernel::Isa;
pub(crate) use kernel::{ChunkTotals, Reducer, chunk_length, erased};
pub(crate) use memory::{
    Buffer, UpdateTargets, WrittenStorages, compensated, filled, joined, keep_low_bits, moved, owned_on,
    rounded, rounded_to, set_lent, set_lent_and, set_lent_part, set_part, split, unshared,
};
pub(crate) use pieces::{Piece, comes_in_pieces, commit_pieces};
pub(crate) use plan::{
    CounterWrites, Epilogue, Group, Job, JobPool, NormLimit, NumberWrites, OffloadTarget, OnNonFinite,
    Operand, Reduction, Sources, Step, Steps, Term, TermOf, Then, check_gradient,
};
pub use plan::{Norms, Resolved};
pub(crate) use reduce::{Gather, ReduceOutcome, reduce};
pub use route::Engine;
