//! The engines: the same bits from each, and nothing written where something is wrong.

#[cfg(feature = "cuda")]
mod compiled;
mod concurrency;
mod dependent_norms;
mod eight_bits;
pub(crate) mod emulated;
pub(crate) mod engines;
mod failing_functions;
mod infinite_squares;
mod out_of_memory;
mod soundness;
