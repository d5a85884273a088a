//! The crate as a whole.

mod caught_panics;
mod compile_fail;
mod glob;
pub(crate) mod random_models;
pub(crate) mod readme;
mod regressions;
mod silent;
pub(crate) mod structure;
mod tested;
mod traps;
mod without_candle;
