//! How a planned step runs. The engine knows arithmetic, tensors and devices, but no rule, model or tree.
//!
//! A step has three stages, and nothing is written before the last:
//!
//! ```text
//! plan    the rules of each leaf (a parameter and its state) make a Job; nothing is computed
//! reduce  evaluates the norms, checks and tensor functions that jobs wait for; reads only
//! commit  writes parameters, state and counters, in one pass per leaf
//! ```
//!
//! **CPU.** A factor, a limit and a decay have no loop of their own: they are the prologue of the loop of the
//! next step. If a chain still has several loops, a block of 512 bytes of each array goes through all loops
//! while the block is in the first-level cache. A single loop that can run in place needs no blocks.
//! Neighbouring leaves below 65 536 elements form rows, and a thread takes a row; all threads share a larger
//! leaf. If all leaves together are small, they run on the caller's thread, otherwise on threads of the
//! engine (see [`Engine`]).
//!
//! **CUDA.** All leaves with the same chain and dtypes share a launch of code that is printed from the same
//! arithmetic as on the CPU. The bits are those of the CPU, except for norms, which are added up in another
//! order (fixed by lengths, dtypes and alignment). As on the CPU, multiplications are not contracted with
//! additions. Separate operations cost no time, because memory is the limit.
//!
//! **Waiting for a device.** A step waits only if it needs norms, sums or checks from the device: once for
//! everything that depends on no other answer, and once more for each norm of a gradient that another norm
//! has scaled. AdamW never waits, AdamW after a global norm waits once, LAMB after a global norm twice. A
//! norm with a p other than 0, 1, 2 and ∞ counts twice. One more wait, before the first step of a parameter
//! with a master or copies, is for a sample of the parameter, which is compared with these.
//!
//! **Offload.** A parameter may be on another device than its master and state (see
//! [`Offload`](crate::Offload)). The gradient of such a parameter is downloaded before the first read, the
//! CPU computes the step, and the parameter is uploaded after its commit.

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
mod plan;
mod reduce;
#[cfg(feature = "candle")]
mod reference;
mod route;

pub(crate) use codegen::{
    ArrayRole, BoundKernel, CUDA_FLAGS, PointerTo, RowField, RowLayout, THREADS, TracedKernel, code,
    trace_job, used_helpers, waits,
};
pub(crate) use commit::commit;
pub(crate) use cpu::{for_all, prefetch, to_bf16, to_f16};
pub(crate) use dispatch::download;
pub(crate) use functions::{elements, sum_to};
pub use kernel::Isa;
pub(crate) use kernel::{ChunkTotals, Reducer, chunk_length, erased};
pub(crate) use memory::{
    Buffer, UpdateTargets, WrittenStorages, compensated, filled, joined, on_device, owned_on, rounded,
    rounded_to, set_lent, set_lent_and, set_lent_part, set_low_bits, set_part, split, unshared,
};
pub(crate) use pieces::{Piece, commit_pieces, is_splittable};
#[cfg(feature = "candle")]
pub(crate) use plan::TensorStep;
pub(crate) use plan::{
    CounterWrites, Epilogue, Group, Job, JobPool, NormLimit, NumberWrites, OffloadTarget, OnNonFinite,
    Operand, Progress, Reduction, Sources, Step, StepSlots, Steps, Term, TermOf, Then, Windows,
    check_gradient,
};
pub use plan::{Norms, Resolved};
pub(crate) use reduce::{ReduceOutcome, reduce};
pub use route::Engine;
