//! Prints a chain as CUDA C. The text is made without a device.
//!
//! A **trace** is the straight-line code of a chain, without its data and the values of its scalars. Leaves
//! (parameters with their state) with equal traces are one launch. Each launch has a **table**: a **row** for
//! each leaf, with its length, addresses and scalars. The **layout** of a trace lists the fields of a row.

mod helpers;
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(super) mod launched;
mod layout;
mod print;
pub(super) mod trace;

pub(crate) use helpers::used_helpers;
pub(crate) use layout::{PointerTo, RowField, RowLayout};
pub(crate) use print::code;
pub(crate) use trace::{ArrayRole, BoundKernel, TracedKernel, trace_job};

/// How many threads a block has: a power of two, because a block adds up its sums in halves.
pub(crate) const THREADS: usize = 256;

/// Compiler flags that give the bits of the CPU: products are not contracted into sums, subnormal numbers are
/// kept, and quotients and roots are rounded correctly.
pub(crate) const CUDA_FLAGS: [&str; 5] = [
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--std=c++17",
];

/// Whether threads of a block may wait for each other in this code.
pub(crate) fn waits(code: &str) -> bool {
    ["__syncthreads()", "warp_largest("]
        .iter()
        .any(|call| code.contains(call))
}
