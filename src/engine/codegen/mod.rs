//! A chain as CUDA C: text in, text out. It knows no device.

mod layout;
mod print;
mod trace;

pub(super) use layout::{Field, Layout, PointerTo};
pub(super) use print::source;
pub(super) use trace::{ArrayRole, Traced, TracedKernel, Work, trace};

/// How many threads a block has.
pub(super) const THREADS: usize = 256;

/// How many elements a block writes; a reduction has a length of its own in each row.
pub(super) const CHUNK: usize = 1 << 14;

/// The name of the function in each printed source. Its arguments are, in this order: the rows of the table, the index of each leaf's first block, the
/// number of leaves, and, if it reduces, where each block writes its result.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) const FUNCTION: &str = "optimiser";
