//! A chain printed as CUDA C. The room knows no device.
//!
//! A **trace** is the straight-line code of a chain, without its data and the values of its scalars. Leaves
//! with equal traces are one launch. Each launch has a **table**: a **row** for each leaf, with its length,
//! addresses and scalars. The **layout** of a trace says which fields a row has.

mod layout;
mod print;
mod trace;

pub(crate) use layout::{PointerTo, RowField, RowLayout};
pub(crate) use print::code;
pub(super) use print::source;
pub(crate) use trace::{ArrayRole, BoundKernel, TracedKernel, traced};
pub(super) use trace::{Work, trace};

/// How many threads a block has.
pub(crate) const THREADS: usize = 256;

/// Compiler flags for the arithmetic of the CPU. Products are not contracted into sums, subnormal numbers are
/// kept, and quotients and roots are rounded correctly.
pub(crate) const CUDA_FLAGS: [&str; 5] =
    ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--std=c++17"];

/// Whether threads of a block may wait for each other in this code.
#[cfg(any(feature = "emulate", feature = "printed"))]
pub(crate) fn waits(code: &str) -> bool {
    ["__syncthreads()", "warp_largest("].iter().any(|call| code.contains(call))
}

/// The name of the function in each printed source. Its arguments are, in this order: the rows of the table,
/// the index of each leaf's first block, the number of leaves, and, if it reduces, where each block writes
/// its result.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) const FUNCTION: &str = "optimiser";
