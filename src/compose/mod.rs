//! Rules made of rules, and the optimiser that keeps a high-precision copy.

mod chain;
mod either;
mod maximise;
mod mixed;

pub use chain::{Members, OptimiserChain};
pub use either::Either;
pub use maximise::maximise;
pub use mixed::MixedPrecision;
